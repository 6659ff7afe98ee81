"""A replica of a fleet: publishes what its memory remembers, and adds to it what others publish."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import random
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable

import numpy as np

from fastdraft.datastore import Datastore
from fastdraft.errors import DatastoreClosedError, DatastoreError, InvalidValueError
from fastdraft.fleet.objects import Objects
from fastdraft.fleet.published import HISTORY, Manifest, Pack, Published
from fastdraft.fleet.sealed import Chunk, Head, digest, frame, ids_of, secret_of, texts_of
from fastdraft.memory import Memory

__all__ = ["Replica"]

# The most namespaces that are followed.
_MOST_NAMESPACES = 1 << 14
# The longest pause after errors, in seconds.
_LONGEST_PAUSE = 300.0
# Of one object.
_MOST_TOKENS = 1 << 23
# Read of a new object in one call.
_AHEAD = 1 << 23
# When this many objects or bytes have been published since, they are joined.
_JOINED_OBJECTS = 32
_JOINED_BYTES = 1 << 25
# Under the URL there are this many times the memory's bytes of the model's text at most.
_KEPT = 8
# The most bytes of pack directories that are cached.
_MOST_HEADS = 1 << 28
# Of a namespace's published text, what is newest and takes less than this part of the memory is
# read. A token takes about this many bytes there.
_PART = 2
_TOKEN_BYTES = 15

_logger = logging.getLogger(__name__)


class Replica:
    """Shares a memory with the other replicas of a fleet, in a thread of its own.

    Every `interval` it publishes what has entered the memory's live stores since, in one object,
    and looks for what others have published. Text of namespaces that its requests have asked for
    enters the memory, within its bytes, in stores that `find` returns. The first request of a
    namespace goes without: its text is read then. When many objects have been published, one
    replica joins them.

    With a local folder as its URL, a fleet of one is a memory that survives a restart.

    Text waits in the live stores until it is published. Where it cannot be, the oldest leaves as it
    does anyway, and is counted; what was published is never lost. An error costs no drafts: the
    first of each kind is logged as a warning, all are counted, and the pauses between attempts grow
    to five minutes. A damaged object costs its own text alone.

    >>> replica = Replica(memory, "s3://bucket/fastdraft", key=key, model="my-model")
    ...                                         # doctest: +SKIP
    >>> request = engine.add_request(           # doctest: +SKIP
    ...     prompt_ids, datastores=memory.of("tenant"), read_only=replica.find(["tenant"]))

    Args:
        memory: What the replica's requests said.
        url: Where to publish, such as `s3://bucket/folder`, see fsspec, or a local folder. The same
            for all replicas.
        key: The operator's secret, of 16 bytes or more; the same for all. Who has it reads and
            writes what is published. With another key nothing of it is found, or touched.
        model: What the token ids are of. Replicas share text only where it is the same.
        fingerprint: Of the tokenizer, as `fastdraft.datastore.fingerprint` returns it; the same.
        interval: The seconds between two looks: the most that a killed process loses.

    Raises:
        InvalidValueError: A value out of its range.
        ModuleNotFoundError: What fsspec needs for the URL is not installed.

    Attributes:
        memory: What the replica's requests said.
        published_tokens: Tokens that are published, once and for all.
        dropped_tokens: Tokens that left the live stores before they could be published, about.
        faults: Errors by kind: "publish", "follow", "join".
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
    ) -> None:
        secret = secret_of(key)
        if not (interval > 0 and math.isfinite(interval)):
            raise InvalidValueError(f"interval must be greater than 0, got {interval!r}")
        self.published_tokens = 0
        self.dropped_tokens = 0
        self.faults: Counter[str] = Counter()
        self.refreshed: Callable[[], None] | None = None
        self.memory = memory
        group = digest(secret, "fleet", model, fingerprint)
        self._published = Published(Objects(url), secret, group, self._refused)
        self._id_of = functools.lru_cache(_MOST_NAMESPACES, typed=True)(self._published.id_of)
        self._interval = interval
        # Of this life: a replica that starts anew is another one.
        self._name = secrets.token_hex(8)
        self._sequence = 0
        # Of each namespace the live store, and the position up to which it is published.
        self._cuts: dict[Hashable, tuple[Datastore, int]] = {}
        self._manifest = Manifest()
        self._current: list[Pack] = []  # all objects that count, older text first
        # What replicas published and has entered the stores, or was there before they were read.
        self._folded: set[str] = set()
        self._heads: dict[str, Head] = {}
        self._lock = threading.Lock()  # of the two that follow
        self._asked: OrderedDict[Hashable, None] = OrderedDict()  # to be read
        self._active: OrderedDict[Hashable, Datastore | None] = OrderedDict()  # read, and followed
        self._turn = threading.Lock()  # held by the thread that publishes or follows
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastdraft-fleet", daemon=True)
        self._thread.start()

    def find(self, namespaces: Iterable[Hashable]) -> list[Datastore]:
        """The stores of what others published in namespaces, each once, to be read only.

        Their text is what all replicas said in these namespaces, up to some refreshes ago. Waits
        for nothing: of a namespace that is new here nothing is returned yet. Names that are no data
        have no stores.
        """
        found: list[Datastore] = []
        with self._lock:
            for namespace in dict.fromkeys(namespaces):
                stores = self.memory.published(namespace)
                found += stores
                if namespace not in self._active:
                    self._wake.set()
                elif stores or self._active[namespace] is None:
                    self._active.move_to_end(namespace)
                    continue
                # It is new, or its text had to leave the memory and is read at the next look.
                self._asked[namespace] = None
                if len(self._asked) > _MOST_NAMESPACES:
                    self._asked.popitem(last=False)
        return found

    def refresh(self) -> bool:
        """Publishes and follows now, as is done in the background anyway.

        Returns whether it could: then what had entered the memory before is published, and what
        others had published has entered it, of namespaces that were asked for.
        """
        with self._turn:
            followed = self._guard("follow", self._follow)
            published = self._guard("publish", self._publish)
        if self.refreshed is not None:
            self.refreshed()
        return followed and published

    def close(self, timeout: float = 10.0) -> None:
        """Publishes, for at most `timeout` seconds, and ends the thread; the memory stays open.

        Closing twice does nothing.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            _logger.warning("fastdraft: the fleet's store took too long for what is published last")

    @property
    def manifest(self) -> Manifest:
        """The manifest that is followed; number 0 before the first."""
        return self._manifest

    @property
    def bytes(self) -> int:
        """The bytes of the stores of what others published."""
        with self._lock:
            return sum(store.bytes for store in self._active.values() if store is not None)

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
                    self._guard("follow", self._activate)
        with self._turn:
            self._guard("publish", self._publish)

    def _guard(self, kind: str, call: Callable[[], object]) -> bool:
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

    def _refused(self, name: str, error: Exception) -> None:
        self._fault("follow", DatastoreError(f"{name} is left out: {error}"))

    # --- Publishing ---

    def _publish(self) -> None:
        names = self.memory.namespaces
        for gone in self._cuts.keys() - set(names):
            del self._cuts[gone]
        while self._publish_some(names):
            pass

    def _publish_some(self, names: list[Hashable]) -> bool:
        """Publishes one object; whether there may be more text."""
        # The number first: after a later one, text from before it may have to be forgotten.
        seen = self._manifest.number
        chunks: dict[str, Chunk] = {}
        cuts: dict[Hashable, tuple[Datastore, int]] = {}
        left = _MOST_TOKENS
        dropped = 0
        for namespace in names:
            for store in self.memory.find([namespace]):
                known, end = self._cuts.get(namespace, (store, 0))
                end = end if known is store else 0
                # What is closed meanwhile was forgotten, or had to leave.
                with contextlib.suppress(DatastoreClosedError, InvalidValueError):
                    begin = max(end, store.begin)
                    if store.end <= begin or left <= 0:
                        continue
                    name = self._id_of(namespace)
                    text, published = store._dump(begin, left)
                    # Fewer than `published - begin` where text has left since `begin` was read.
                    tokens = ids_of(text)
                    chunks[name] = Chunk(frame(text), int(np.count_nonzero(tokens >= 0)))
                    cuts[namespace] = (store, published)
                    dropped += published - len(tokens) - end
                    left -= len(tokens)
        if chunks:
            pack = self._published.put_text(self._name, self._sequence, seen, chunks)
            self._sequence += 1
            self._folded.add(pack.name)  # it is in the live stores
            self.published_tokens += sum(chunk.tokens for chunk in chunks.values())
            self.dropped_tokens += dropped
            self._cuts |= cuts
        return left <= 0

    # --- Following ---

    def _follow(self) -> None:
        before = self._manifest
        manifest = self._published.latest(before)
        forgotten = {name for name, at in manifest.forgotten.items() if at > before.number}
        if forgotten:
            self._forget(forgotten)
        self._manifest = manifest
        texts = self._published.texts()
        waiting = [pack for name, pack in texts.items() if name not in manifest.gone]
        self._current = [*manifest.packs, *waiting]
        names = {pack.name for pack in self._current}
        self._heads = {name: head for name, head in self._heads.items() if name in names}
        self._sequence = max([self._sequence, *(1 + pack.sequence for pack in texts.values())])
        # Text enters from the objects that replicas published, which stay for a while after they
        # were joined. What is gone since this replica last looked is in the packs.
        known = texts.keys() | self._folded
        gone = [name for name in manifest.gone if name.startswith("text/")]
        slept = manifest.number >= before.number + HISTORY or not known.issuperset(gone)
        try:
            for name, pack in texts.items():
                if name not in self._folded:
                    self._fold(pack)
        except FileNotFoundError:
            slept = True
        if slept:
            for namespace in list(self._active):
                self._leave(namespace)
                self._asked[namespace] = None
        self._folded = texts.keys() | set(gone)
        self._activate()
        unread = [pack for pack in waiting if pack.name not in self._published.left_out]
        due = (
            len(unread) >= _JOINED_OBJECTS
            or sum(pack.size for pack in unread) >= _JOINED_BYTES
            or any(pack.number < manifest.late for pack in unread)
        )
        # About one of those that have published joins them.
        if due and random.random() * len({pack.replica for pack in unread}) < 1:
            self._guard("join", lambda: self._published.join(_KEPT * self.memory.max_bytes))

    def _fold(self, pack: Pack) -> None:
        """Adds an object's text to the stores of the namespaces that are followed."""
        head = self._published.head(pack, _AHEAD) if self._active else None
        found: dict[Hashable, Chunk | None] = {}
        if head is not None:
            for namespace in self._active:
                with contextlib.suppress(InvalidValueError):
                    name = self._id_of(namespace)
                    entry = head.find(name)
                    if entry is not None and not self._manifest.stale(pack, name):
                        found[namespace] = self._published.chunk(pack, head, entry)
        # Nothing has been added yet. After an error above, the whole object is read again.
        self._folded.add(pack.name)
        for namespace, chunk in found.items():
            self._add(namespace, [chunk])

    def _add(self, namespace: Hashable, chunks: list[Chunk | None]) -> None:
        store = self._active.get(namespace)
        try:
            for chunk in filter(None, chunks):
                if store is None:
                    store = next(iter(self.memory.published(namespace, make=True)), None)
                    with self._lock:
                        self._active[namespace] = store
                for text in texts_of(chunk):
                    if store is not None:
                        self.memory.publish(namespace, store, text)
        except DatastoreClosedError:
            self._leave(namespace)  # others' text needed its room

    def _leave(self, namespace: Hashable) -> None:
        with self._lock:
            store = self._active.pop(namespace, None)
        if store is not None:
            store.close()

    def _activate(self) -> None:
        """Reads the text of namespaces that were asked for."""
        while self._asked:
            with self._lock:
                namespace = next(reversed(self._asked))
            self._leave(namespace)
            with contextlib.suppress(InvalidValueError):
                try:
                    chunks = self._read(self._id_of(namespace))
                except FileNotFoundError:
                    return  # it was joined, and is found at the next look
                with self._lock:
                    self._active[namespace] = None
                self._add(namespace, chunks)
            with self._lock:
                self._asked.pop(namespace, None)
                idle = next((n for n, store in self._active.items() if store is None), None)
            if len(self._active) > _MOST_NAMESPACES:
                self._leave(next(iter(self._active)) if idle is None else idle)

    def _read(self, name: str) -> list[Chunk | None]:
        """What was published of a namespace, older text first, as much as the memory may take."""
        chunks: list[Chunk | None] = []
        left = self.memory.max_bytes // _PART
        for pack in reversed(self._current):
            if pack.replica == self._name or self._manifest.stale(pack, name):
                continue
            head = self._heads.get(pack.name) or self._published.head(pack)
            if head is None:
                continue
            if sum(each.index.nbytes for each in self._heads.values()) > _MOST_HEADS:
                self._heads.clear()
            self._heads[pack.name] = head
            entry = head.find(name)
            if entry is None:
                continue
            left -= _TOKEN_BYTES * int(head.index["tokens"][entry])
            if left < 0:
                break
            chunks.append(self._published.chunk(pack, head, entry))
        return chunks[::-1]

    def _forget(self, names: set[str]) -> None:
        """Forgets the text of namespaces, this replica's and others'."""
        for namespace in {*self.memory.namespaces, *self._active}:
            with contextlib.suppress(InvalidValueError):
                if self._id_of(namespace) in names:
                    self.memory.forget(namespace)
                    self._cuts.pop(namespace, None)
                    with self._lock:
                        if namespace in self._active:
                            self._active[namespace] = None
