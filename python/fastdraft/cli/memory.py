"""`fastdraft memory`: what the replicas of a fleet publish, listed and forgotten."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
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


@memory.command()
@click.argument("url")
def ls(url: str) -> None:
    """List the namespaces, by what stands for their names."""
    for published in _published(url):
        manifest = published.latest() or Manifest()
        tokens, size = Counter[str](), Counter[str]()
        for pack in (*manifest.packs, *published.waiting(manifest).values()):
            head = published.head(pack)
            if head is not None:
                for name, entry in zip(head.names, head.index, strict=True):
                    if not manifest.stale(pack, name):
                        tokens[name] += int(entry["tokens"])
                        size[name] += int(entry["size"])
        packs = f"{manifest.bytes:,} bytes in {len(manifest.packs)} packs"
        click.echo(f"model {published.group}, manifest {manifest.number}, {packs}")
        for name in sorted(tokens):
            click.echo(f"  {name}  {tokens[name]:>14,} tokens  {size[name]:>16,} bytes")


@memory.command()
@click.argument("url")
@click.argument("namespace", required=False)
@click.option("--salt", help="Its cache_salt.")
@click.option("--adapter", help="Its LoRA adapter.")
@click.option("--unnamed", is_flag=True, help="The one of requests that have none.")
@click.option("--id", help="What stands for it, as `ls` shows it.")
def forget(url: str, **named: Any) -> None:
    """Remove all text of a namespace: what is published now, and from replicas when they refresh.

    What a request says after that is remembered again.
    """
    for published in _published(url):
        manifest = published.forget(_ids(published, **named))
        click.echo(f"{published.group[:16]}: forgotten, manifest {manifest.number}")
