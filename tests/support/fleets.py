"""Fleets in tests: replicas that act when they are told to, and what is published."""

from __future__ import annotations

from typing import Any

from fastdraft import Datastore, Memory
from fastdraft.fleet import Builder, Published, Replica, groups
from fastdraft.fleet.objects import Objects

__all__ = ["KEY", "builder", "contents", "join", "only", "texts"]

KEY = b"an operator's key"


def join(url: str, **options: Any) -> Replica:
    """A replica with a memory of its own, which refreshes when it is told to."""
    options = {"key": KEY, "model": "model", "interval": 3600, **options}
    max_bytes = options.pop("memory_bytes", 8 << 20)
    replica = Replica(Memory(max_bytes), url, **options)
    # Its thread begins with one: two at once would wait for each other.
    with replica._turn:
        return replica


def only(url: str) -> Published:
    """What is published of the one model."""
    [published] = groups(Objects(url), KEY)
    return published


def builder(url: str, **options: Any) -> Builder:
    return Builder(only(url), **options)


def texts(stores: list[Datastore]) -> list[list[int]]:
    """The documents of stores, in their order."""
    found = []
    for store in stores:
        position = store.begin
        while position < store.end:
            found.append(store.read(position, store.end - position).tolist())
            position += len(found[-1]) + 1
    return [document for document in found if document]


def contents(url: str) -> dict[str, bytes]:
    """All files below a URL."""
    objects = Objects(url)
    return {
        name: objects.read(name, 1 << 30)
        for folder in objects.folders()
        for name in objects.find(folder)
    }
