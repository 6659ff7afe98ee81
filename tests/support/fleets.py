"""Fleets in tests: replicas that act when a test says so, and what is published."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from typing import Any

from fastdraft import Datastore, Memory
from fastdraft.memory.sharing import Objects, Replica

__all__ = ["KEY", "contents", "folder_of", "holds", "join", "publish", "read", "say", "texts"]

KEY = b"an operator's key"


def join(url: str, **options: Any) -> Replica:
    """A replica with a memory of its own, which refreshes when a test says so."""
    options = {"key": KEY, "model": "model", "interval": 3600, **options}
    max_bytes = options.pop("memory_bytes", 8 << 20)
    replica = Replica(Memory(max_bytes), url, **options)
    # Its thread begins with a look: two at once would wait for each other.
    assert replica.refresh() or replica.faults
    return replica


def say(replica: Replica, namespace: Any, tokens: list[int]) -> None:
    replica.memory.of(namespace)[0].add(tokens)


def publish(url: str, namespace: Any, *documents: list[int]) -> Replica:
    """A replica that has published documents of a namespace, one after the other."""
    replica = join(url)
    for document in documents:
        say(replica, namespace, document)
        assert replica.refresh()
    return replica


def read(replica: Replica, namespace: Any) -> list[list[int]]:
    """The documents that the replica reads of a namespace after a refresh."""
    replica.find([namespace])
    assert replica.refresh(), replica.faults
    return texts(replica.find([namespace]))


def texts(stores: list[Datastore]) -> list[list[int]]:
    """The documents of stores, in their order."""
    found = []
    for store in stores:
        position = store.begin
        while position < store.end:
            found.append(store.read(position, store.end - position).tolist())
            position += len(found[-1]) + 1
    return [document for document in found if document]


def folder_of(url: str, namespace: Any) -> str:
    """The folder of a namespace's objects, below the URL."""
    objects = Objects(url, KEY)
    group = objects.group_of("model", None)
    return f"{group}/{objects.id_of(group, namespace)}"


def contents(url: str) -> dict[str, bytes]:
    """All objects below a URL."""
    objects = Objects(url, KEY)
    return {
        f"{group}/{folder}/{name}": objects._part(f"{group}/{folder}/{name}", 0, 1 << 30)
        for group in objects.ls()
        for folder in objects.ls(group)
        for name in objects.ls(f"{group}/{folder}")
    }


def holds(content: bytes, tokens: list[int]) -> bool:
    """True if an object holds two of the tokens in a row."""
    pairs = [
        a.to_bytes(4, "little") + b.to_bytes(4, "little") for a, b in itertools.pairwise(tokens)
    ]
    parts = [content]
    begin = content.find(b"\x78\x01")  # as text that zlib wrote begins
    while begin >= 0:
        with contextlib.suppress(zlib.error):
            parts.append(zlib.decompressobj().decompress(content[begin:]))
        begin = content.find(b"\x78\x01", begin + 1)
    return any(pair in part for pair in pairs for part in parts)
