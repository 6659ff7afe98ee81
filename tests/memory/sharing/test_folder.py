"""A memory on the disk, a fleet of one: its text is there again, however a process ended."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

import numpy as np
import pytest

from fleets import KEY, join, read, say
from random_cases import cases

DOCUMENT = 300
# More than all writers together add, however fast the machine is.
BYTES = 1 << 30

# Writes documents and saves, and prints which are saved, until it is killed. No token occurs twice:
# a save may cut a document in two, and a store leaves out a part that repeats its text.
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


def killed(path: Path, seconds: float, first: int) -> int:
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


@pytest.mark.parametrize("alphabet", [2, 100_000])
def test_much_text_is_saved_and_read_whole(tmp_path: Path, alphabet: int) -> None:
    text = np.random.default_rng(0).integers(0, alphabet, 300_000)
    replica = join(str(tmp_path), memory_bytes=64 << 20)
    for part in np.split(text, 100):
        say(replica, "much", part.tolist())
    replica.close()
    found = restored(tmp_path, "much")
    assert [len(part) for part in found] == [3000] * 100
    assert np.array_equal(np.concatenate(found), text)


@cases(1)
def test_a_writer_is_killed_at_any_instant(seed: int) -> None:
    """There are whole documents in their order, up to at least the last that was saved."""
    random_ = random.Random(seed)
    first = 0
    cut: set[int] = set()  # those that were being written when their writer was killed
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(10):
            saved = killed(Path(folder), random_.random() * 0.1, first)
            found = restored(Path(folder))
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
