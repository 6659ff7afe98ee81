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

from fleets import KEY, join, read

__all__ = ["check_killed", "restored"]

DOCUMENT = 300
# More than all writers together say, however fast the machine is.
BYTES = 1 << 30

# Writes documents and saves, and says which are saved, until it is killed. No token stands twice: a
# save may cut a document in two, and a store leaves out a part that repeats what it holds.
WRITER = f"""
import sys
from fastdraft import Memory
from fastdraft.memory.sharing import Replica

memory = Memory({BYTES})
replica = Replica(memory, sys.argv[1], key={KEY!r}, model="model", interval=0.01)
[store] = memory.of("tenant")
replica.find(["tenant"])
assert replica.refresh()
for number in range(int(sys.argv[2]), 1_000_000):
    first = number * {DOCUMENT}
    store.add(range(first, first + {DOCUMENT}), prompt_size=100)
    if number % 10 == 0 and replica.refresh():
        print(number, flush=True)
"""


def restored(path: Path, namespace: Hashable = "tenant") -> list[list[int]]:
    """The documents that a start finds."""
    replica = join(str(path), memory_bytes=BYTES)
    found = read(replica, namespace)
    replica.close()
    assert not replica.faults
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
        # Nothing is there twice, and nothing is missing but the end of what was being written.
        assert list(held) == list(range(numbers[-1] + 1)) and max(held.values()) == DOCUMENT
        short = {number for number in held if held[number] < DOCUMENT} - cut
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
