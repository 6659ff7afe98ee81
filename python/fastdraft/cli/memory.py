"""`fastdraft memory`: what the replicas of a fleet publish, listed, pinned and forgotten."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import click

from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.fleet import Manifest, Published, groups
from fastdraft.fleet.objects import Objects
from fastdraft.fleet.sealed import secret_of
from fastdraft.serving.host import Namespace

__all__ = ["memory"]

_KEY = "FASTDRAFT_MEMORY_KEY"


def _published(url: str) -> list[Published]:
    """What is published under a URL with the operator's key, of each model.

    Raises InvalidValueError where nothing is.
    """
    # No option: arguments are seen by all users of a machine.
    key = os.environ.get(_KEY)
    if not key:
        raise InvalidValueError(f"the operator's key must be in the environment's {_KEY}, got none")

    def refused(name: str, error: Exception) -> None:
        click.echo(f"left out: {name}: {error}", err=True)

    return groups(Objects(url), secret_of(key), refused)


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


def _held(published: Published) -> tuple[Manifest, Counter[str], Counter[str]]:
    """The manifest, and the tokens and bytes of each namespace."""
    manifest = published.latest()
    tokens, size = Counter[str](), Counter[str]()
    for pack in published.current(manifest):
        head = published.head(pack)
        if head is not None:
            for name, entry in zip(head.names, head.index, strict=True):
                if not manifest.stale(pack, name):
                    tokens[name] += int(entry["tokens"])
                    size[name] += int(entry["size"])
    return manifest, tokens, size


@memory.command()
@click.argument("url")
def ls(url: str) -> None:
    """List the namespaces, by what stands for their names."""
    for published in _published(url):
        manifest, tokens, size = _held(published)
        packs = f"{manifest.bytes:,} bytes in {len(manifest.packs)} packs"
        click.echo(f"model {published.group}, manifest {manifest.number}, {packs}")
        for name in sorted(tokens):
            pinned = ", pinned" if name in manifest.pinned else ""
            click.echo(f"  {name}  {tokens[name]:>14,} tokens  {size[name]:>16,} bytes{pinned}")


@memory.command()
@click.argument("url")
def du(url: str) -> None:
    """Show the bytes of namespaces, the largest first, and of each model."""
    for published in _published(url):
        _, _, size = _held(published)
        for name, count in size.most_common():
            click.echo(f"{count:>16,}  {name}")
        click.echo(f"{size.total():>16,}  model {published.group}")


def _named(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--id", help="What stands for it, as `ls` shows it."),
        click.option("--unnamed", is_flag=True, help="The one of requests that have none."),
        click.option("--adapter", help="Its LoRA adapter."),
        click.option("--salt", help="Its cache_salt."),
        click.argument("namespace", required=False),
        click.argument("url"),
    ):
        command = option(command)
    return command


@memory.command()
@_named
@click.option("--off", is_flag=True, help="No longer.")
def pin(url: str, off: bool, **named: Any) -> None:
    """Keep a namespace when there is more text than the replicas allow."""
    found = False
    for published in _published(url):
        manifest, tokens, _ = _held(published)
        names = set(_ids(published, **named)) & (tokens.keys() | manifest.pinned)
        if names:
            found = True
            manifest = published.pin(names, pinned=not off)
            _say(published, manifest, "no longer pinned" if off else "pinned")
    if not found:
        raise InvalidValueError("no model has text of this namespace")


@memory.command()
@_named
def forget(url: str, **named: Any) -> None:
    """Remove all text of a namespace: what is published now, and from replicas when they refresh.

    What a request says after that is remembered again.
    """
    for published in _published(url):
        _say(published, published.forget(_ids(published, **named)), "forgotten")


def _say(published: Published, manifest: Manifest, what: str) -> None:
    click.echo(f"{published.group[:16]}: {what}, manifest {manifest.number}")
