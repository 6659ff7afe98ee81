"""`fastdraft memory`: what the replicas of a fleet publish, listed, forgotten and pruned."""

from __future__ import annotations

import errno
import os
import re
import time
from collections import Counter
from collections.abc import Iterator

import click

from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.memory.sharing import Objects
from fastdraft.serving.host import KEY_VARIABLE, Namespace

__all__ = ["memory"]

_HASH = re.compile("[0-9a-f]{64}", re.ASCII)


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
    """The common memory of a fleet's replicas, under a URL such as s3://bucket/folder.

    The operator's key is read from the environment's FASTDRAFT_MEMORY_KEY.
    """


def _objects(url: str) -> Objects:
    # No option: arguments are seen by all users of a machine.
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise InvalidValueError(
            f"the operator's key must be in the environment's {KEY_VARIABLE}, got none"
        )
    return Objects(url, key)


def _groups(objects: Objects) -> list[str]:
    """The folders of models."""
    found = sorted(objects.ls().items())
    return [group for group, is_object in found if _HASH.fullmatch(group) and not is_object]


def _heads(objects: Objects) -> Iterator[tuple[str, str, str, int, int, float]]:
    """The group, namespace, name, tokens, bytes and time of each object; others are named."""
    for group in _groups(objects):
        for folder in sorted(objects.ls(group)):
            for name in sorted(objects.ls(f"{group}/{folder}")):
                path = f"{group}/{folder}/{name}"
                try:
                    head, _ = objects.read(path, whole=False)
                except FileNotFoundError:
                    continue
                except DatastoreError as error:
                    click.echo(f"left out: {error}", err=True)
                    continue
                yield group, folder, name, head.tokens, head.size, head.time


@memory.command()
@click.argument("url")
def ls(url: str) -> None:
    """List the namespaces by what stands for their names, the largest first."""
    found: dict[str, Counter[str]] = {}
    sizes: Counter[tuple[str, str]] = Counter()
    for group, folder, _, tokens, size, _ in _heads(_objects(url)):
        found.setdefault(group, Counter())[folder] += tokens
        sizes[group, folder] += size
    if not found:
        raise InvalidValueError("nothing is published with this key")
    for group, by_name in found.items():
        click.echo(f"model {group}")
        for folder, tokens in by_name.most_common():
            click.echo(f"  {folder}  {tokens:>14,} tokens  {sizes[group, folder]:>16,} bytes")


@memory.command()
@click.argument("url")
@click.argument("namespace", required=False)
@click.option("--salt", help="Its cache_salt.")
@click.option("--adapter", help="Its LoRA adapter.")
@click.option("--unnamed", is_flag=True, help="The one of requests that have none.")
@click.option("--id", "name", help="What stands for it, as `ls` shows it.")
def forget(
    url: str,
    namespace: str | None,
    salt: str | None,
    adapter: str | None,
    unnamed: bool,
    name: str | None,
) -> None:
    """Remove all text of a namespace: what is published now, and from replicas when they look.

    What a request says after that is remembered again.
    """
    named = not (namespace is None and salt is None and adapter is None)
    if named + unnamed + (name is not None) != 1:
        raise InvalidValueError("give a namespace, --salt and --adapter, or --unnamed, or --id")
    if name is not None and _HASH.fullmatch(name) is None:
        raise InvalidValueError(f"--id must be 64 hexadecimal digits, got {name!r}")
    # SGLang has two kinds of salts.
    salts = [salt] if salt is None else [salt, (salt, None), (None, salt)]
    keys = [None] if unnamed else [Namespace(adapter, each, namespace) for each in salts]
    objects = _objects(url)
    forgotten = [
        f"{group}/{each}"
        for group in _groups(objects)
        for each in ([name] if name else [objects.id_of(group, key) for key in keys])
        if objects.forget(group, each)
    ]
    if not forgotten:
        raise InvalidValueError("nothing is published of this namespace with this key")
    for each in forgotten:
        click.echo(f"{each[:16]}: forgotten")


@memory.command()
@click.argument("url")
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(min=0),
    required=True,
    help="Days since an object was written, by the clock of the machine that wrote it.",
)
def prune(url: str, days: float) -> None:
    """Remove old objects, of replicas that have ended and of those that run.

    A replica that runs drops the namespaces whose objects it misses, and begins anew. What cannot
    be verified with the key stays.
    """
    objects = _objects(url)
    until = time.time() - days * 86400
    count = 0
    for group, folder, name, _, _, written in list(_heads(objects)):
        if written < until:
            objects.remove(f"{group}/{folder}/{name}")
            count += 1
    click.echo(f"{count} objects removed")
