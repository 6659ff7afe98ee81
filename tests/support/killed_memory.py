"""A process that saves its memory and is killed at any instant, and what is there afterwards."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

from fastdraft import Datastore, Memory
from fastdraft.memory_folder import MemoryFolder

__all__ = ["KEY", "check_killed", "documents", "open_memory", "restored"]

KEY = b"an operator's key"
DOCUMENT = 300

# Writes documents and saves, and says which are saved, until it is killed. No token stands twice: a
# save may cut a document in two, and a store leaves out a part that repeats what it holds.
WRITER = f"""
import sys
from fastdraft import Memory
from fastdraft.memory_folder import MemoryFolder

memory = Memory(8 << 20, folder=MemoryFolder(sys.argv[1], key={KEY!r}, interval=0.001))
[store] = memory.of("tenant")
memory.save()  # what an earlier process saved has been read
for number in range(int(sys.argv[2]), 1_000_000):
    first = number * {DOCUMENT}
    store.add(range(first, first + {DOCUMENT}), prompt_size=100)
    if number % 10 == 0:
        memory.save()
        print(number, flush=True)
"""


def open_memory(path: Path, **options: object) -> Memory:
    """A memory in a folder that is saved when it is told to."""
    folder = MemoryFolder(path, key=KEY, **{"interval": 3600, **options})  # type: ignore[arg-type]
    return Memory(8 << 20, folder=folder)


def documents(store: Datastore) -> list[list[int]]:
    """What is held, in the order in which it entered."""
    found = []
    position = store.begin
    while position < store.end:
        found.append(store.read(position, store.end - position).tolist())
        position += len(found[-1]) + 1
    return [document for document in found if document]


def restored(path: Path, namespace: Hashable = "tenant") -> list[list[int]]:
    """The documents that a start finds."""
    memory = open_memory(path)
    [store] = memory.of(namespace)
    memory.save()
    found = documents(store)
    memory.close()
    return found


def check_killed(path: Path, times: int, seed: int) -> int:
    """Kills a writer at random instants, and looks at what it left each time.

    There are whole documents in their order, up to at least the last that was said to be saved.
    Returns how many were saved in all.
    """
    chance = random.Random(seed)
    first = 0
    cut: set[int] = set()  # those that were being written when their writer was killed
    for _ in range(times):
        saved = _killed(path, chance.random() * 0.1, first)
        found = restored(path)
        numbers = [document[0] // DOCUMENT for document in found]
        assert numbers == sorted(numbers)
        held = Counter[int]()
        for number, document in zip(numbers, found, strict=True):
            assert document == list(range(document[0], document[0] + len(document)))
            held[number] += len(document)
        # The first may have lost its beginning.
        short = {n for n in range(numbers[0] + 1, numbers[-1] + 1) if held[n] < DOCUMENT} - cut
        assert short <= {numbers[-1]}
        assert numbers[-1] >= saved and saved not in short
        cut |= short
        first = numbers[-1] + 1
    return first


def _killed(path: Path, seconds: float, first: int) -> int:
    """Runs the writer, kills it, and returns the last document that it said to be saved."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(first)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline()]  # it has begun
        timer = threading.Timer(seconds, writer.send_signal, [signal.SIGKILL])
        timer.start()
        said += writer.stdout.readlines()
        timer.join()
    complete = [line for line in said if line.endswith("\n")]
    assert complete, "the writer did not begin"
    return int(complete[-1])
