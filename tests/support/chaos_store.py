"""A store of fsspec's that fails in all ways that stores fail in: `chaos://`."""

from __future__ import annotations

import random
import threading
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["ChaosStore"]


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
    chance = random.Random(0)
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
        cls.chance = random.Random(seed)
        cls.faulty = False
        cls.failing = 0.05

    def _call(self) -> bool:
        """Counts a call; whether it is to fail after it did what was asked."""
        cls = ChaosStore
        cls.clock += 1
        if not cls.faulty or cls.chance.random() > cls.failing:
            return False
        if cls.chance.random() < 0.5:
            return True
        raise cls.chance.choice([OSError, PermissionError, TimeoutError, RuntimeError])("chaos")

    def _is_late(self, since: dict[str, int], path: str) -> bool:
        cls = ChaosStore
        late = cls.clock - since.get(path, -99) < cls.chance.randrange(40)
        return cls.faulty and late

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        with self.lock:
            fails = self._call()
            content: bytes = super().cat_file(path, start=start, end=end)
            path = self._strip_protocol(path)
            if fails:
                raise OSError("chaos")
            if self._is_late(self.born, path):
                content = content[: self.chance.randrange(len(content) + 1)]
            if self.faulty and content and self.chance.random() < 0.1:
                at = self.chance.randrange(len(content))
                kept = b"" if self.chance.random() < 0.5 else content[at + 1 :]
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
                {"name": name, "size": self.chance.randrange(1 << 40), "type": "file"}
                for name in self.gone
                if name.startswith(root) and name not in self.store
                if self._is_late(self.gone, name)
            ]
            return found


fsspec.register_implementation("chaos", ChaosStore, clobber=True)
