"""A replica of a fleet: publishes what its memory remembers, and reads what all have published."""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fastdraft.datastore import Datastore
from fastdraft.errors import DatastoreClosedError, DatastoreError, InvalidValueError
from fastdraft.files import TemporaryFolder
from fastdraft.fleet.objects import Objects
from fastdraft.fleet.published import TEMPORARY, Manifest, Published, StoreFile
from fastdraft.memory import Memory
from fastdraft.memory_folder import secret_of

__all__ = ["Replica"]

# Namespaces that are followed at once.
_MOST_NAMESPACES = 1 << 14
# The longest pause after errors, in seconds.
_LONGEST_PAUSE = 300.0

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Cut:
    """How much of a namespace's live store is published."""

    store: Datastore
    end: int = 0
    """The position behind it."""


@dataclass(slots=True)
class _Open:
    """The published stores of a namespace that are mapped."""

    files: tuple[StoreFile, ...]
    stores: list[Datastore]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class Replica:
    """Shares a memory with the other replicas of a fleet, in a thread of its own.

    Every `interval` it publishes what has entered the memory's live stores since, one segment a
    namespace, and looks for a new manifest. Stores of namespaces that its requests have asked for
    are fetched, checked and mapped; `find` returns them to new requests, while running ones keep
    theirs. The first request of a namespace goes without: its stores are fetched then.

    Text waits in the live stores until it is published. Where it cannot be, the oldest leaves as it
    does anyway, and is counted; what a segment holds that was published is never lost. An error
    costs no drafts: the first of each kind is logged as a warning, all are counted, and the pauses
    between attempts grow to five minutes.

    >>> replica = Replica(memory, "s3://bucket/fastdraft", key=key, model="my-model")
    ...                                         # doctest: +SKIP
    >>> request = engine.add_request(           # doctest: +SKIP
    ...     prompt_ids, datastores=memory.of("tenant"), read_only=replica.find(["tenant"]))

    Args:
        memory: What the replica's requests said; one without a folder.
        url: Where to publish, such as `s3://bucket/folder` or `file:///folder`: see fsspec. The
            same for all replicas and the builder.
        key: The operator's secret, of 16 bytes or more; the same for all. Who has it reads and
            writes what is published.
        model: What the token ids are of. Replicas share text only where it is the same.
        fingerprint: Of the tokenizer, as `fastdraft.datastore.fingerprint` returns it; the same.
        interval: The seconds between two looks.
        max_bytes: The most bytes of mapped stores; by default as many as the memory's. Namespaces
            that were used longest ago go without.
        folder: Where files are kept while they are written or fetched; by default where the system
            keeps temporary files. What is mapped takes its bytes there, under no name.

    Raises:
        InvalidValueError: A value out of its range, or a memory with a folder: what is published is
            there after a start.
        ModuleNotFoundError: fsspec, or what it needs for the URL, is not installed.

    Attributes:
        memory: What the replica's requests said.
        published_tokens: Tokens that are published, once and for all.
        dropped_tokens: Tokens that left the live stores before they could be published, about.
        faults: Errors by kind: "publish", "follow".
        refreshed: Called after each look, mostly in the replica's thread; None calls nothing.
    """

    def __init__(
        self,
        memory: Memory,
        url: str | os.PathLike[str],
        *,
        key: bytes | str,
        model: str = "",
        fingerprint: bytes | None = None,
        interval: float = 10.0,
        max_bytes: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        secret = secret_of(key)
        if not (interval > 0 and math.isfinite(interval)):
            raise InvalidValueError(f"interval must be greater than 0, got {interval!r}")
        if max_bytes is not None and max_bytes < 0:
            raise InvalidValueError(f"max_bytes must be at least 0, got {max_bytes}")
        if memory.saved:
            raise InvalidValueError(
                "memory must have no folder in a fleet, where what is published is there after a "
                f"start, got {memory!r}"
            )
        self.published_tokens = 0
        self.dropped_tokens = 0
        self.faults: Counter[str] = Counter()
        self.refreshed: Callable[[], None] | None = None
        self.memory = memory
        self._published = Published.of(Objects(url), secret, model, fingerprint)
        self._interval = interval
        self._max_bytes = memory.max_bytes if max_bytes is None else max_bytes
        self._folder = folder
        try:
            TemporaryFolder(TEMPORARY, folder).close()
        except OSError as error:
            raise DatastoreError(f"cannot use the folder {folder}: {error}") from error
        # Of this life: a replica that starts anew is another one.
        self._name = secrets.token_hex(8)
        self._sequence = 0
        self._manifest = Manifest()
        self._cuts: dict[Hashable, _Cut] = {}
        self._lock = threading.Lock()  # of the two that follow
        self._wanted: OrderedDict[Hashable, str] = OrderedDict()  # the least recently used first
        self._open: dict[str, _Open] = {}
        self._turn = threading.Lock()  # held by the thread that publishes or follows
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastdraft-fleet", daemon=True)
        self._thread.start()

    def find(self, namespaces: Iterable[Hashable]) -> list[Datastore]:
        """The published stores of namespaces, each once, to be read only.

        Their text is what all replicas said in these namespaces, up to some refreshes ago. Waits
        for nothing: of a namespace that is new here nothing is returned yet. Names that are no data
        have no stores.
        """
        found: list[Datastore] = []
        with self._lock:
            for namespace in dict.fromkeys(namespaces):
                name = self._wanted.get(namespace)
                if name is None:
                    try:
                        name = self._published.id_of(namespace)
                    except InvalidValueError:
                        continue
                    self._wanted[namespace] = name
                    if len(self._wanted) > _MOST_NAMESPACES:
                        _, gone = self._wanted.popitem(last=False)
                        self._open.pop(gone, None)
                    self._wake.set()
                self._wanted.move_to_end(namespace)
                opened = self._open.get(name)
                if opened is not None:
                    found += opened.stores
        return found

    def refresh(self) -> bool:
        """Publishes and follows now, as is done in the background anyway.

        Returns whether it could: then what had entered the memory before is published, and what the
        builder made of all text is mapped, for namespaces that were asked for.
        """
        with self._turn:
            followed = self._guard("follow", self._follow)
            published = self._guard("publish", self._publish)
        if self.refreshed is not None:
            self.refreshed()
        return followed and published

    def close(self, timeout: float = 10.0) -> None:
        """Publishes, for at most `timeout` seconds, and ends the thread; the memory stays open.

        Requests that are running keep their stores. Closing twice does nothing.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            _logger.warning("fastdraft: the fleet's store took too long for what is published last")
        with self._lock:
            self._open.clear()

    @property
    def manifest(self) -> Manifest:
        """The manifest that is followed; number 0 before the first."""
        return self._manifest

    @property
    def bytes(self) -> int:
        """The bytes of mapped stores."""
        with self._lock:
            return sum(opened.bytes for opened in self._open.values())

    def _run(self) -> None:
        failures = 0
        due = time.monotonic()
        while not self._closed.is_set():
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            if self._closed.is_set():
                break
            if time.monotonic() >= due:
                failures = 0 if self.refresh() else failures + 1
                pause = min(
                    self._interval * 2 ** min(failures, 32), max(self._interval, _LONGEST_PAUSE)
                )
                # Replicas that start together do not stay together.
                due = time.monotonic() + pause * random.uniform(0.75, 1.0)
            else:
                with self._turn:
                    self._guard("follow", self._fetch)
        with self._turn:
            self._guard("publish", self._publish)

    def _guard(self, kind: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self._fault(kind, error)
            return False
        return True

    def _fault(self, kind: str, error: Exception) -> None:
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            _logger.warning(
                "fastdraft: cannot %s the fleet's memory: %s; drafting goes on, it is tried again, "
                "and further errors are only counted",
                kind,
                error,
            )

    # --- Publishing ---

    def _publish(self) -> None:
        names = self.memory.namespaces
        for gone in self._cuts.keys() - set(names):
            del self._cuts[gone]
        with TemporaryFolder(TEMPORARY, self._folder) as folder:
            for namespace in names:
                for store in self.memory.find([namespace]):
                    cut = self._cuts.get(namespace)
                    if cut is None or cut.store is not store:
                        cut = self._cuts[namespace] = _Cut(store)
                    try:
                        self._publish_one(namespace, cut, folder.path / "segment.fds")
                    except DatastoreClosedError:
                        continue  # forgotten, or used least recently

    def _publish_one(self, namespace: Hashable, cut: _Cut, path: Path) -> None:
        begin, end = cut.store.begin, cut.store.end
        if end <= cut.end:
            return
        try:
            name = self._published.id_of(namespace)
        except InvalidValueError:
            return
        # The number first: after a later one, text from before it may have to be forgotten.
        seen = self._manifest.number
        try:
            after = cut.store.save(path, first=cut.end)
            path.chmod(0o600)
            with Datastore.open(path) as segment:
                tokens = len(segment)
            if tokens:
                self._published.put_segment(name, self._name, self._sequence, seen, path)
        finally:
            path.unlink(missing_ok=True)
        self._sequence += 1
        self.published_tokens += tokens
        self.dropped_tokens += max(0, begin - cut.end)
        cut.end = after

    # --- Following ---

    def _follow(self) -> None:
        before = self._manifest
        latest = self._published.latest(before.number)
        for error in latest.wrong:
            self._fault("follow", error)
        found = latest.manifest
        if found is not None:
            new = {name for name, at in found.forgotten.items() if at > before.number}
            if new:
                self._forget(new)
            self._manifest = found
        self._fetch()

    def _forget(self, names: set[str]) -> None:
        """Forgets what was said in namespaces, live and mapped."""
        for namespace in self.memory.namespaces:
            try:
                name = self._published.id_of(namespace)
            except InvalidValueError:
                continue
            if name in names:
                self.memory.forget(namespace)
                self._cuts.pop(namespace, None)
        with self._lock:
            opened = [self._open.pop(name) for name in self._open.keys() & names]
        for each in opened:
            for store in each.stores:
                store.close()

    def _fetch(self) -> None:
        """Maps the stores of the manifest, of the namespaces that were used last, and of no other.

        An error keeps what it concerns as it was; the first is raised at the end.
        """
        with self._lock:
            wanted = list(reversed(self._wanted.values()))
        entries = self._manifest.namespaces
        left = self._max_bytes
        failed: Exception | None = None
        kept: set[str] = set()
        with TemporaryFolder(TEMPORARY, self._folder) as folder:
            for name in wanted:
                entry = entries.get(name)
                if entry is None or entry.bytes > left:
                    continue
                left -= entry.bytes
                kept.add(name)
                opened = self._open.get(name)
                if opened is not None and opened.files == entry.stores:
                    continue
                try:
                    fetched = self._fetch_one(name, entry.stores, opened, folder.path)
                except Exception as error:
                    failed = failed or error
                    continue
                with self._lock:
                    self._open[name] = fetched
        with self._lock:
            for name in self._open.keys() - kept:
                del self._open[name]
        if failed is not None:
            raise failed

    def _fetch_one(
        self, name: str, files: tuple[StoreFile, ...], opened: _Open | None, folder: Path
    ) -> _Open:
        known = {} if opened is None else dict(zip(opened.files, opened.stores, strict=True))
        return _Open(
            files,
            [
                known[file] if file in known else self._published.open_store(name, file, folder)
                for file in files
            ],
        )
