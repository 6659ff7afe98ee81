"""Replicas over a store that fails at random: nothing is lost, twice, or served once forgotten.

The store is one of fsspec's, `chaos://`, and fails in all ways that stores fail in.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from fastdraft import Datastore
from fastdraft.errors import DatastoreError
from fastdraft.memory.sharing import Objects, Replica
from fleets import KEY, folder_of, join, texts

__all__ = ["check_chaos"]

URL = "chaos://bucket/fleet"
NAMESPACES = ("a", "b", None)


class ChaosStore(MemoryFileSystem):
    """Objects in memory, with faults at random while `faulty` is set.

    Of 20 calls one fails (`failing`), some after they did what was asked; of 10 reads one is wrong.
    What was written lately may be listed late and be read in part; what was removed may still be
    listed.
    """

    protocol = "chaos"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faulty = False
    failing = 0.05  # the probability that a call fails
    dice = random.Random(0)
    clock = 0  # in calls
    born: ClassVar[dict[str, int]] = {}
    gone: ClassVar[dict[str, int]] = {}
    lock = threading.RLock()

    @classmethod
    def begin(cls, seed: int) -> None:
        """Empties the store."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.born.clear()
        cls.gone.clear()
        cls.dice = random.Random(seed)
        cls.faulty = False
        cls.failing = 0.05

    def _call(self) -> bool:
        """Counts a call; True if it must fail after it did what was asked."""
        cls = ChaosStore
        cls.clock += 1
        if not cls.faulty or cls.dice.random() > cls.failing:
            return False
        if cls.dice.random() < 0.5:
            return True
        raise cls.dice.choice([OSError, PermissionError, TimeoutError, RuntimeError])("chaos")

    def _is_late(self, since: dict[str, int], path: str) -> bool:
        cls = ChaosStore
        late = cls.clock - since.get(path, -99) < cls.dice.randrange(40)
        return cls.faulty and late

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        with self.lock:
            fails = self._call()
            content: bytes = super().cat_file(path, start=start, end=end)
            path = self._strip_protocol(path)
            if fails:
                raise OSError("chaos")
            if self._is_late(self.born, path):
                content = content[: self.dice.randrange(len(content) + 1)]
            if self.faulty and content and self.dice.random() < 0.1:
                at = self.dice.randrange(len(content))
                kept = b"" if self.dice.random() < 0.5 else content[at + 1 :]
                content = content[:at] + bytes([content[at] ^ 1]) + kept
            return content

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        with self.lock:
            fails = self._call()
            super().pipe_file(path, value, mode=mode)
            self.born.setdefault(self._strip_protocol(path), self.clock)
            if fails:
                raise OSError("the answer is lost")

    def rm_file(self, path: str) -> None:
        with self.lock:
            fails = self._call()
            super().rm_file(path)
            self.gone[self._strip_protocol(path)] = self.clock
            if fails:
                raise OSError("the answer is lost")

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        with self.lock:
            if self._call():
                raise OSError("chaos")
            found = super().ls(path, detail=True)
            found = [each for each in found if not self._is_late(self.born, each["name"])]
            root = self._strip_protocol(path).rstrip("/") + "/"
            found += [
                {"name": name, "size": self.dice.randrange(1 << 40), "type": "file"}
                for name in self.gone
                if name.startswith(root) and name not in self.store
                if self._is_late(self.gone, name)
            ]
            return found


fsspec.register_implementation("chaos", ChaosStore, clobber=True)


def check_chaos(seed: int, documents: int) -> Counter[str]:
    """Adds `documents` at replicas that come and go, and forgets some namespaces.

    Returns how many were added and acknowledged, and how many outages there were.
    """
    dice = random.Random(seed)
    ChaosStore.begin(seed)
    ChaosStore.faulty = True
    replicas = [_quiet(join(URL)) for _ in range(4)]
    said: dict[Replica, set[tuple[str | None, int]]] = {replica: set() for replica in replicas}
    every: set[tuple[str | None, int]] = set()
    safe: set[tuple[str | None, int]] = set()  # acknowledged
    dead: set[tuple[str | None, int]] = set()  # said before their namespace was forgotten
    found = Counter[str]()
    for number in range(documents):
        index = dice.randrange(len(replicas))
        replica = replicas[index]
        name = dice.choice(NAMESPACES)
        tokens = range(number * 8, number * 8 + 8)
        replica.memory.of(name)[0].add(list(tokens))
        said[replica].add((name, number))
        every.add((name, number))
        if dice.random() < 0.2:
            replica.find([dice.choice(NAMESPACES)])
            # In an outage every call fails. Threads share the dice: without one, no refresh is sure
            # to fail, since a call is tried again.
            outage = number > documents // 2 and not found["outages"]
            ChaosStore.failing = 1.0 if outage else 0.05
            if replica.refresh():
                assert not outage
                found["refreshes"] += 1
                safe |= _acknowledged(replica, said) - dead
            found["outages"] += outage
            ChaosStore.failing = 0.05
        if dice.random() < 0.01:
            # Killed: what was not acknowledged may be lost.
            del said[replica]
            replicas[index] = _quiet(join(URL))
            said[replicas[index]] = set()
        if dice.random() < 0.02:
            _junk(dice)
        if dice.random() < 0.004 and _forgotten(name):
            found["forgotten"] += 1
            dead |= {each for each in every if each[0] == name}
            safe -= dead
    ChaosStore.faulty = False
    for replica in replicas:
        assert replica.refresh(), replica.faults
        safe |= _acknowledged(replica, said) - dead
    reader = join(URL, memory_bytes=64 << 20)
    reader.find(NAMESPACES)
    assert reader.refresh(), reader.faults
    for name in NAMESPACES:
        times = Counter(token // 8 for text in texts(reader.find([name])) for token in text)
        assert set(times.values()) <= {8}, f"twice: {[n for n in times if times[n] > 8]}"
        lost = {number for each, number in safe if each == name} - times.keys()
        assert not lost, f"lost: {sorted(lost)}"
        served = {number for each, number in dead if each == name} & times.keys()
        assert not served, f"served after it was forgotten: {sorted(served)}"
    reader.close()
    return found + Counter({"documents": documents, "acknowledged": len(safe)})


def _quiet(replica: Replica) -> Replica:
    """Without its thread: text that is published while its namespace is forgotten may go too."""
    replica.close()
    return replica


def _acknowledged(
    replica: Replica, said: dict[Replica, set[tuple[str | None, int]]]
) -> set[tuple[str | None, int]]:
    """The documents that the replica has published. Those that it has dropped, since their
    namespace was forgotten, are not acknowledged."""
    held = {name: _held(replica.memory.find([name])) for name in NAMESPACES}
    done = {(name, number) for name, number in said[replica] if number in held[name]}
    said[replica] = set()
    return done


def _held(stores: list[Datastore]) -> set[int]:
    """The documents whose tokens are in stores."""
    return {token // 8 for text in texts(stores) for token in text}


def _forgotten(name: str | None) -> bool:
    """Forgets a namespace, as an operator who tries again; True if there was anything."""
    objects = Objects(URL, KEY)
    group, _, folder = folder_of(URL, name).partition("/")
    for _ in range(100):
        with contextlib.suppress(DatastoreError, OSError):
            return objects.forget(group, folder)
    raise AssertionError("it cannot be forgotten")


def _junk(dice: random.Random) -> None:
    """An object of somebody without the key."""
    name = dice.choice(["f" * 32 + "-99999999999999999999", "x", "0", "\N{SNOWMAN}" * 9])
    folder = folder_of(URL, dice.choice(NAMESPACES))
    parent = dice.choice([folder, folder.partition("/")[0], "0" * 64, ""])
    ChaosStore.faulty = False
    ChaosStore().pipe_file(f"{URL}/{parent}/{name}", dice.randbytes(dice.choice([0, 1, 1 << 17])))
    ChaosStore.faulty = True
