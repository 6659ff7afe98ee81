"""`fastdraft memory`: what the replicas of a fleet publish, joined, listed, kept and forgotten."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from typing import Any

import click

from fastdraft.cli.options import NUMBER
from fastdraft.errors import DatastoreError, FastdraftError, InvalidValueError
from fastdraft.fleet import Builder, Published, groups
from fastdraft.fleet.objects import Objects
from fastdraft.integrations.host import Namespace
from fastdraft.memory_folder import secret_of

__all__ = ["memory"]

_KEY = "FASTDRAFT_MEMORY_KEY"


def _published(url: str) -> list[Published]:
    """What is published under a URL, of each model. Raises InvalidValueError."""
    # No option: arguments are seen by all users of a machine.
    key = os.environ.get(_KEY)
    if not key:
        raise InvalidValueError(f"the operator's key must be in the environment's {_KEY}, got none")
    return groups(Objects(url), secret_of(key))


def _named(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--id", help="What stands for it, as `ls` shows it."),
        click.option("--unnamed", is_flag=True, help="The one of requests that have none."),
        click.option("--adapter", help="Its LoRA adapter."),
        click.option("--salt", help="Its cache_salt."),
        click.argument("namespace", required=False),
    ):
        command = option(command)
    return command


def _ids(
    published: Published,
    *,
    namespace: str | None,
    salt: str | None,
    adapter: str | None,
    unnamed: bool,
    id: str | None,  # noqa: A002 - as the option is called
) -> list[str]:
    """What may stand for a namespace, in vLLM and SGLang. Raises InvalidValueError."""
    named = not (namespace is None and salt is None and adapter is None)
    if named + unnamed + (id is not None) != 1:
        raise InvalidValueError("give a namespace, --salt and --adapter, or --unnamed, or --id")
    if id is not None:
        if re.fullmatch("[0-9a-f]{64}", id) is None:
            raise InvalidValueError(f"--id must be 64 hexadecimal digits, got {id!r}")
        return [id]
    if unnamed:
        return [published.id_of(None)]
    # SGLang has two kinds of salts.
    salts = [salt] if salt is None else [salt, (salt, None), (None, salt)]
    return [published.id_of(Namespace(adapter, each, namespace)) for each in salts]


class _Group(click.Group):
    """Says in one line what the store of the URL answers."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # of the output, which click knows
            raise DatastoreError(f"the store cannot be used: {error}") from error


@click.group(cls=_Group)
def memory() -> None:
    """What the replicas of a fleet remember together, under a URL such as s3://bucket/folder.

    The operator's key is read from the environment's FASTDRAFT_MEMORY_KEY.
    """


@memory.command()
@click.argument("url")
@click.option(
    "--every", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Build again and again."
)
@click.option(
    "--max-bytes",
    type=NUMBER,
    default=8 << 30,
    show_default=True,
    help="The most bytes of the stores of a model; the oldest text leaves first.",
)
def build(url: str, every: float | None, max_bytes: int) -> None:
    """Join what replicas have published to stores, which they read from then on.

    Run one builder for a fleet, with --every 10 or so. Further ones do no harm.
    """
    builders: dict[str, Builder] = {}
    while True:
        try:
            found = _published(url)
            if not found and every is None:
                raise InvalidValueError(f"nothing is published under {url} with this key")
            for published in found:
                builder = builders.setdefault(
                    published.group, Builder(published, max_bytes=max_bytes)
                )
                before, refused = builder.number, builder.refused
                manifest = builder.build()
                if manifest.number != before or builder.refused != refused:
                    click.echo(
                        f"{published.group[:16]}: manifest {manifest.number}, "
                        f"{len(manifest.namespaces)} namespaces, {manifest.bytes:,} bytes, "
                        f"{builder.refused} files refused"
                    )
        except (OSError, FastdraftError) as error:
            if every is None or isinstance(error, InvalidValueError):
                raise
            click.echo(f"not built, and tried again: {error}", err=True)
        if every is None:
            return
        time.sleep(every)


@memory.command()
@click.argument("url")
def ls(url: str) -> None:
    """List the namespaces, by what stands for their names."""
    for published in _published(url):
        manifest = Builder(published).latest()
        click.echo(f"model {published.group}, manifest {manifest.number}")
        for name, entry in sorted(manifest.namespaces.items()):
            pinned = ", pinned" if entry.pinned else ""
            click.echo(
                f"  {name}  {entry.tokens:>14,} tokens  {entry.bytes:>16,} bytes  "
                f"manifest {entry.written}{pinned}"
            )


@memory.command()
@click.argument("url")
def du(url: str) -> None:
    """Show the bytes of stores, and of segments that wait for the builder."""
    for published in _published(url):
        manifest = Builder(published).latest()
        stores = published.stores()
        segments = published.segments()
        waiting = [
            each.bytes
            for name, found in segments.items()
            for each in found
            if name not in manifest.namespaces
            or each.file not in manifest.namespaces[name].segments
        ]
        everything = sum(sum(files.values()) for files in stores.values())
        everything += sum(each.bytes for found in segments.values() for each in found)
        click.echo(f"model {published.group}, manifest {manifest.number}")
        click.echo(f"  stores    {manifest.bytes:>16,} bytes")
        click.echo(f"  waiting   {sum(waiting):>16,} bytes in {len(waiting)} segments")
        click.echo(f"  all files {everything:>16,} bytes")


@memory.command()
@click.argument("url")
@_named
@click.option("--off", is_flag=True, help="No longer.")
def pin(url: str, off: bool, **named: Any) -> None:
    """Keep a namespace when there is more text than allowed."""
    found = False
    for published in _published(url):
        builder = Builder(published)
        names = set(_ids(published, **named)) & builder.latest().namespaces.keys()
        if names:
            found = True
            manifest = builder.pin(names, pinned=not off)
            click.echo(f"{published.group[:16]}: manifest {manifest.number}")
    if not found:
        raise InvalidValueError("no model has text of this namespace")


@memory.command()
@click.argument("url")
@_named
def forget(url: str, **named: Any) -> None:
    """Remove all text of a namespace: what is published now, and from replicas when they refresh.

    What a request says after that is remembered again.
    """
    for published in _published(url):
        manifest = Builder(published).forget(_ids(published, **named))
        click.echo(f"{published.group[:16]}: forgotten by manifest {manifest.number}")
