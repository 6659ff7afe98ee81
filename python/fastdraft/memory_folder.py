"""A memory on the disk: each namespace's text in frozen datastores, saved in the background.

A save writes the text that entered since the last one to a new file, which takes its name when it
is complete. So a process that is killed at any instant leaves whole files of an earlier state. A
start reads the files into the live store again, and the next save writes one file in their place.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdraft.datastore import Datastore
from fastdraft.errors import DatastoreClosedError, DatastoreError, InvalidValueError
from fastdraft.files import lock

__all__ = ["MemoryFolder", "Saver", "digest", "secret_of"]

_LEAST_KEY = 16
# Files of a namespace beyond which its text is written as one.
_MOST_FILES = 16
_SUFFIX = ".fds"
_WHOLE = ".whole" + _SUFFIX

_logger = logging.getLogger(__name__)


class MemoryFolder:
    """Where a memory is saved. One process at a time uses it.

    Names of namespaces do not touch the disk: a namespace's text is in a folder that is called by
    the HMAC-SHA-256 of its name. The files hold token ids in the clear, for the owner alone: modes
    0700 and 0600.

    Args:
        path: The folder; it is made if it is not there.
        key: The operator's secret, of 16 bytes or more. With another key nothing is found again.
        model: What the token ids are of; text that was saved for another model is not found.
        interval: The seconds between two saves: the most that a killed process loses.
        bytes_per_second: The most that is written to the disk in the background, in the mean.

    Raises:
        InvalidValueError: A value out of its range.
        DatastoreError: The folder cannot be made, or another process uses it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: bytes | str,
        model: str = "",
        interval: float = 60.0,
        bytes_per_second: float = 32e6,
    ) -> None:
        secret = secret_of(key)
        for name, value in (("interval", interval), ("bytes_per_second", bytes_per_second)):
            if not value > 0:
                raise InvalidValueError(f"{name} must be greater than 0, got {value!r}")
        self.path = Path(path)
        self.interval = interval
        self.bytes_per_second = bytes_per_second
        self._secret = secret
        self._model = model
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._owner = lock(self.path / "lock", os.O_CREAT | os.O_RDWR)
            # What a killed process had begun.
            for begun in self.path.glob("*/*.tmp"):
                begun.unlink()
        except BlockingIOError as error:
            raise DatastoreError(
                f"cannot use the folder {self.path}: another process uses it"
            ) from error
        except OSError as error:
            raise DatastoreError(f"cannot use the folder {self.path}: {error}") from error

    def folder_of(self, namespace: Hashable) -> Path:
        """Where a namespace's files are. Raises InvalidValueError for a name that is no data."""
        return self.path / digest(self._secret, "memory", self._model, namespace)

    def files(self, namespace: Hashable) -> list[Path]:
        """The namespace's files, in the order in which they were written."""
        return sorted(self.folder_of(namespace).glob("*" + _SUFFIX))

    def current(self, namespace: Hashable) -> list[Path]:
        """Those of its files whose text no later file repeats."""
        files = self.files(namespace)
        last = max((i for i, path in enumerate(files) if path.name.endswith(_WHOLE)), default=0)
        return files[last:]

    def write(
        self, namespace: Hashable, store: Datastore, first: int, *, whole: bool
    ) -> tuple[Path, int]:
        """Writes a store's text from the position `first` on to a new file.

        Args:
            namespace: Its name.
            store: Its store.
            first: The first position that is written.
            whole: Whether the file takes the place of all earlier ones, which may be removed then.

        Returns:
            The file, and the position behind its text.

        Raises:
            DatastoreError, DatastoreClosedError, OSError: It cannot be written.
        """
        folder = self.folder_of(namespace)
        folder.mkdir(mode=0o700, exist_ok=True)
        known = self.files(namespace)
        number = 1 + int(known[-1].name.partition(".")[0]) if known else 0
        path = folder / f"{number:020d}{_WHOLE if whole else _SUFFIX}"
        begun = folder / "new.tmp"
        try:
            end = store.save(begun, first=first)
            begun.chmod(0o600)
            begun.replace(path)
        except BaseException:
            begun.unlink(missing_ok=True)
            raise
        _sync(folder)
        return path, end

    def remove(self, namespace: Hashable) -> bool:
        """Removes a namespace's files; whether there were any. Raises OSError."""
        folder = self.folder_of(namespace)
        if not folder.exists():
            return False
        shutil.rmtree(folder)
        _sync(self.path)
        return True

    def folders(self) -> list[Path]:
        """The namespaces' folders."""
        return [each for each in self.path.iterdir() if each.is_dir()]

    def close(self) -> None:
        """Lets another process use the folder."""
        owner, self._owner = self._owner, None
        if owner is not None:
            os.close(owner)


@dataclass(slots=True)
class _Saved:
    """What is on the disk of one store."""

    store: Datastore
    files: list[tuple[Path, int]] = field(default_factory=list)
    """Of this process, each with the position behind its text."""
    end: int = 0
    """The position behind the text that is saved."""
    fresh: bool = True
    """Whether what was saved before the start is still to be read."""


class Saver:
    """Saves the stores of a memory in a thread of its own, and fills new ones with what was saved.

    An error costs what it concerns: the first is logged as a warning, all are counted.

    Args:
        folder: Where they are saved.
        max_bytes: The most bytes that the disk may hold of namespaces that nobody uses.
        make_room: Gives a namespace's store room for more saved text.

    Attributes:
        faults: The number of errors.
    """

    def __init__(
        self,
        folder: MemoryFolder,
        max_bytes: int,
        make_room: Callable[[Hashable, Datastore], None],
    ) -> None:
        self.faults = 0
        self._make_room = make_room
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # of the two that follow
        self._saved: dict[Hashable, _Saved] = {}
        self._ended: list[Hashable] = []
        self._disk = threading.Lock()  # held while files are written, read or removed
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastdraft-memory", daemon=True)
        self._thread.start()

    def begin(self, namespace: Hashable, store: Datastore) -> None:
        """A namespace has got a store, which is empty."""
        with self._lock:
            self._saved[namespace] = _Saved(store)
        self._wake.set()

    def end(self, namespace: Hashable) -> None:
        """A namespace has lost its store; its files are removed soon."""
        with self._lock:
            self._saved.pop(namespace, None)
            self._ended.append(namespace)
        self._wake.set()

    def forget(self, namespace: Hashable, drop: Callable[[], None]) -> bool:
        """Calls `drop`, and removes the namespace's files before any store can be filled with them;
        whether there were any. Raises OSError."""
        with self._disk:
            drop()
            return self._folder.remove(namespace)

    def clear(self, drop: Callable[[], None]) -> None:
        """Calls `drop`, and removes all files. Raises OSError."""
        with self._disk:
            drop()
            for folder in self._folder.folders():
                shutil.rmtree(folder)

    def save(self) -> None:
        """Saves all stores now."""
        self._round(save=True, rated=False)

    def close(self) -> None:
        """Saves all stores, and ends the thread."""
        self._closed.set()
        self._wake.set()
        self._thread.join()
        self.save()
        self._folder.close()

    def _run(self) -> None:
        due = time.monotonic() + self._folder.interval
        while not self._closed.is_set():
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            if self._closed.is_set():
                return
            now = time.monotonic()
            self._round(save=now >= due, rated=True)
            if now >= due:
                due = time.monotonic() + self._folder.interval

    def _round(self, *, save: bool, rated: bool) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
            saved = list(self._saved.items())
        for namespace in ended:
            self._guard(self._remove, namespace)
        for namespace, each in saved:
            if each.fresh:
                self._guard(self._restore, namespace, each)
        if not save:
            return
        for namespace, each in saved:
            written = self._guard(self._save, namespace, each)
            if written and rated and self._closed.wait(written / self._folder.bytes_per_second):
                return
        self._guard(self._trim)

    def _guard(self, call: Any, *args: Any) -> Any:
        try:
            with self._disk:
                return call(*args)
        except DatastoreClosedError:
            return None  # its files are removed
        except Exception as error:
            self.faults += 1
            if self.faults == 1:
                _logger.warning(
                    "fastdraft: the memory cannot be saved or read: %s; drafting goes on, and "
                    "further errors are only counted",
                    error,
                )
            return None

    def _remove(self, namespace: Hashable) -> None:
        with self._lock:
            if namespace in self._saved:
                return  # it has come back, and goes on with its files
        self._folder.remove(namespace)

    def _restore(self, namespace: Hashable, each: _Saved) -> None:
        if not each.fresh:
            return
        each.fresh = False

        def grow() -> None:
            self._make_room(namespace, each.store)

        for path in self._folder.current(namespace):
            # Checked as a whole: a damaged file is left out, and goes with the next save.
            try:
                with Datastore.open(
                    path, fingerprint=each.store.fingerprint, verify=True
                ) as source:
                    each.store.add_all(source, grow=grow)
            except DatastoreClosedError:
                raise
            except DatastoreError as error:
                self.faults += 1
                _logger.warning("fastdraft: saved text is left out: %s", error)
            each.files.append((path, each.store.end))

    def _save(self, namespace: Hashable, each: _Saved) -> int:
        """Returns the bytes that were written."""
        begin, end = each.store.begin, each.store.end
        while each.files and each.files[0][1] <= begin and each.end > begin:
            each.files[0][0].unlink(missing_ok=True)
            del each.files[0]
        if end <= each.end or each.store.closed:
            return 0
        # What was read at the start stands among newer text, so all is written once.
        whole = each.end == 0 or len(each.files) >= _MOST_FILES
        first = begin if whole else max(begin, each.end)
        path, each.end = self._folder.write(namespace, each.store, first, whole=whole)
        if whole:
            for old in self._folder.files(namespace):
                if old != path:
                    old.unlink()
            each.files.clear()
        each.files.append((path, each.end))
        return path.stat().st_size

    def _trim(self) -> None:
        """Removes what nobody has used since the start, the oldest first, while the disk holds more
        than the memory may."""
        with self._lock:
            known = {self._folder.folder_of(namespace) for namespace in self._saved}
        sizes: dict[Path, int] = {}
        for folder in self._folder.folders():
            sizes[folder] = sum(path.stat().st_size for path in folder.iterdir())
        total = sum(sizes.values())
        for folder in sorted(sizes.keys() - known, key=lambda each: each.stat().st_mtime):
            if total <= self._max_bytes:
                break
            shutil.rmtree(folder)
            total -= sizes[folder]


def secret_of(key: bytes | str) -> bytes:
    """The operator's key as bytes. Raises InvalidValueError where it is too short."""
    secret = key.encode() if isinstance(key, str) else bytes(key)
    if len(secret) < _LEAST_KEY:
        raise InvalidValueError(f"key must have at least {_LEAST_KEY} bytes, got {len(secret)}")
    return secret


def digest(secret: bytes, *parts: Hashable) -> str:
    """The HMAC-SHA-256 of names, 64 hexadecimal digits. Raises InvalidValueError for a name that
    is no data."""
    text = json.dumps([_plain(part) for part in parts], ensure_ascii=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _plain(name: Hashable) -> Any:
    """A namespace's name as data that JSON keeps apart."""
    if name is None or isinstance(name, (str, int)):
        return name
    if isinstance(name, bytes):
        return {"bytes": name.hex()}
    if isinstance(name, tuple):
        return [_plain(part) for part in name]
    raise InvalidValueError(
        "a namespace that is saved must be a text, a number, bytes, or a tuple of these, got "
        f"{name!r}"
    )


def _sync(folder: Path) -> None:
    """Has a folder's names on the disk, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
