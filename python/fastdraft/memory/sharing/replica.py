"""A replica of a fleet: publishes what its memory remembers, and adds to it what others publish."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import random
import secrets
import threading
import time
import weakref
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fastdraft.errors import DatastoreClosedError, DatastoreError, InvalidValueError
from fastdraft.memory.datastore import Datastore
from fastdraft.memory.namespaces import Memory, typed
from fastdraft.memory.sharing.objects import BEGUN, NO_TOMBSTONE, TOMBSTONE, Head, Objects, Piece

__all__ = ["Replica"]

_MOST_NAMESPACES: Final = 1 << 14  # that are asked for between two looks
_LONGEST_PAUSE: Final = 300.0  # after errors, in seconds
_MOST_TOKENS: Final = 1 << 23  # of one piece
_MOST_OBJECTS: Final = 8  # of a replica in a namespace, before it joins some
# Newer objects are joined with an older one while that is at most this many times as large: text
# is written again O(log) times.
_GROWTH: Final = 4
_MOST_JOINED: Final = 1 << 26  # bytes
# The newest published text that takes less than this part of the memory is read. A token takes
# about this many bytes there.
_PART: Final = 2
_TOKEN_BYTES: Final = 15
_THREADS: Final = 128  # a look waits for the store, not for this machine
# Clocks of two machines differ by less than this.
_SKEW_SECONDS: Final = 300.0

_Content = bytes  # `Replica.bytes` is a number

_logger = logging.getLogger(__name__)


@dataclass
class _Space:
    """A namespace, and the objects of it that are known."""

    namespace: Hashable
    folder: str
    tombstone: bytes = NO_TOMBSTONE
    store: Datastore | None = None
    """The live store that is published."""
    cut: int = 0
    """The position up to which it is."""
    pending: tuple[str, bytes, int, int] | None = None
    """An object that may be written already: its name, content, tokens, and the next cut."""
    own: dict[str, int] = field(default_factory=dict)
    """Objects of this replica that are there, and their bytes, older ones first."""
    removed: dict[str, None] = field(default_factory=dict)
    """Objects of this replica that may be there, and must not, in the order in which they go."""
    is_followed: bool = False
    read: set[str] = field(default_factory=set)
    """Objects of others whose pieces have entered the memory."""
    taken: set[tuple[str, int]] = field(default_factory=set)
    """These pieces, by replica and number."""


class Replica:
    """Shares a memory with the other replicas of a fleet, in a thread of its own.

    Every `interval` it publishes what has entered the memory's live stores since, one object for
    each namespace that changed, and reads what others published in the namespaces that requests
    have asked for since. That text enters the memory, within its bytes, in stores that `find`
    returns. The first request of a namespace goes without: its text is read then.

    With a local folder as its URL, a fleet of one is a memory that survives a restart.

    Text waits in the live stores until it is published. Where it cannot be, the oldest leaves as it
    does anyway, and is counted; what was published is never lost. An error costs no drafts: the
    first of each kind is logged as a warning, all are counted, and the pauses between attempts grow
    to five minutes. A damaged object costs its own text alone.

    A replica that finds a namespace forgotten, or its own objects gone, drops that namespace from
    its memory, so that no text from before is published after.

    >>> replica = Replica(memory, "s3://bucket/fastdraft", key=key, model="my-model")
    ...                                         # doctest: +SKIP
    >>> request = engine.add_request(           # doctest: +SKIP
    ...     prompt_ids, datastores=memory.of("tenant"), read_only=replica.find(["tenant"]))

    A process that was forked from this one goes on with what the memory holds: it publishes and
    reads nothing.

    Args:
        memory: What the replica's requests said.
        url: Where to publish, such as `s3://bucket/folder`, see fsspec, or a local folder. The same
            for all replicas.
        key: The operator's secret, of 16 bytes or more; the same for all. Who has it reads and
            writes what is published. With another key nothing of it is found, or touched.
        model: What the token ids are of. Replicas share text only where it is the same.
        fingerprint: Of the tokenizer, as `fastdraft.memory.fingerprint` returns it; the same.
        interval: The seconds between two looks: the most that a killed process loses.

    Raises:
        InvalidValueError: A value out of its range, or fsspec, or what it needs for the URL, is
            not installed.

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
    ) -> None:
        if not (interval > 0 and math.isfinite(interval)):
            raise InvalidValueError(f"interval must be greater than 0, got {interval!r}")
        self.published_tokens = 0
        self.dropped_tokens = 0
        self.faults: Counter[str] = Counter()
        self.refreshed: Callable[[], None] | None = None
        self.memory = memory
        self._objects = Objects(url, key)
        self._group = group = self._objects.group_of(model, fingerprint)
        self._id_of = functools.lru_cache(_MOST_NAMESPACES)(
            lambda _, namespace: self._objects.id_of(group, namespace)
        )
        self._interval = interval
        # A replica that starts anew is another one.
        self._name = secrets.token_hex(16)
        self._numbers = itertools.count()
        self._started = time.time()
        self._spaces: dict[str, _Space] = {}
        self._asked: OrderedDict[str, Hashable] = OrderedDict()  # since the last look
        self._closed = threading.Event()
        self._is_forked = False
        self._renew()
        _replicas.add(self)
        self._thread = threading.Thread(target=self._run, name="fastdraft-fleet", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        """Makes the locks; anew in a forked process, where a thread that held one is gone."""
        self._lock = threading.Lock()  # of `_asked`, `_spaces` and the counts
        self._turn = threading.Lock()  # held by the thread that looks
        self._wake = threading.Event()

    def find(self, namespaces: Iterable[Hashable]) -> list[Datastore]:
        """The stores of what others published in namespaces, each once, to be read only.

        Their text is what all other replicas said in these namespaces, up to some looks ago. Waits
        for nothing: of a namespace that is new here nothing is returned yet. Names that are no data
        have no stores.
        """
        found: list[Datastore] = []
        for name, namespace in self._named(namespaces).items():
            stores = self.memory.published(namespace)
            found += stores
            with self._lock:
                self._asked[name] = namespace
                if len(self._asked) > _MOST_NAMESPACES:
                    self._asked.popitem(last=False)
                if not stores and self._is_new(name):
                    self._wake.set()
        return found

    def _is_new(self, name: str) -> bool:
        """True of a namespace that was never read."""
        space = self._spaces.get(name)
        return space is None or not space.is_followed

    def refresh(self) -> bool:
        """Publishes and follows now, as is done in the background anyway.

        Returns whether it could: then what had entered the memory before is published, and what
        others had published has entered it, of namespaces that were asked for.
        """
        return self._look_at(only_new=False)

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
    def bytes(self) -> int:
        """The bytes of the stores of what others published."""
        with self._lock:
            names = [space.namespace for space in self._spaces.values() if space.read]
        return sum(store.bytes for name in names for store in self.memory.published(name))

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
                self._look_at(only_new=True)
        with self._lock:
            self._asked.clear()  # nobody will read it
        self.refresh()

    def _look_at(self, *, only_new: bool) -> bool:
        """Looks at the namespaces that were asked for, of these the new ones alone or also all that
        changed; whether it could be done."""
        if self._is_forked:
            return False
        with self._turn:
            live = self._named(self.memory.namespaces)
            with self._lock:
                asked = {n: s for n, s in self._asked.items() if not only_new or self._is_new(n)}
                for name in asked:
                    del self._asked[name]
                # Namespaces that have left the memory are forgotten here too.
                named = live | asked
                kept = {n: s for n, s in self._spaces.items() if n in named or self._is_held(s)}
                made = {n: _Space(s, f"{self._group}/{n}") for n, s in named.items()}
                self._spaces = made | kept
                spaces = list(self._spaces.items())
            due = [
                (space, name in asked)
                for name, space in spaces
                if name in asked or (not only_new and self._has_news(space))
            ]
            with ThreadPoolExecutor(max(1, min(len(due), _THREADS))) as threads:
                done = list(threads.map(lambda each: self._look(*each), due))
            with self._lock:
                for (space, follow), is_done in zip(due, done, strict=True):
                    if follow and not is_done:  # again with the next look
                        self._asked[space.folder.rpartition("/")[2]] = space.namespace
        if self.refreshed is not None:
            self.refreshed()
        return all(done)

    def _named(self, namespaces: Iterable[Hashable]) -> dict[str, Hashable]:
        """Namespaces by what stands for them, but for names that are no data."""
        found: dict[str, Hashable] = {}
        for namespace in namespaces:
            with contextlib.suppress(InvalidValueError):
                found[self._id_of(typed(namespace), namespace)] = namespace
        return found

    def _is_held(self, space: _Space) -> bool:
        """True while something is known of it that must not be lost."""
        forgotten = space.tombstone != NO_TOMBSTONE
        held = forgotten or space.pending or space.removed
        return bool(held or self.memory.published(space.namespace))

    def _has_news(self, space: _Space) -> bool:
        if space.pending or space.removed:
            return True
        for store in self.memory.find([space.namespace]):
            cut = space.cut if store is space.store else 0
            try:
                return store.end > max(cut, store.begin)
            except (DatastoreClosedError, InvalidValueError):
                continue  # closed meanwhile
        return False

    def _look(self, space: _Space, follow: bool) -> bool:
        """Publishes and follows a namespace; whether both could be done."""
        kind = "publish"
        try:
            tombstone = self._objects.tombstone(space.folder)
            if tombstone is not None and tombstone.tombstone != space.tombstone:
                # Text from before this life began to look may be older than the tombstone.
                is_new = space.tombstone == NO_TOMBSTONE and not space.own and not space.read
                if not is_new or tombstone.time > self._started - _SKEW_SECONDS:
                    self._drop(space)
                space.tombstone = tombstone.tombstone
            names = self._objects.ls(space.folder) if follow or space.own else {}
            if any(self._is_gone(space, name) for name in space.own.keys() - names.keys()):
                self._drop(space)
            for name in list(space.removed):
                self._objects.remove(f"{space.folder}/{name}")
                space.removed.pop(name, None)
            while self._publish(space):
                pass
            if len(space.own) > _MOST_OBJECTS:
                self._join(space)
            kind = "follow"
            if follow:
                self._follow(space, names, tombstone)
            return True
        except Exception as error:
            self._fault(kind, error)
            return False

    def _fault(self, kind: str, error: Exception) -> None:
        with self._lock:
            self.faults[kind] += 1
            first = self.faults[kind] == 1
        if first:
            _logger.warning(
                "fastdraft: cannot %s the fleet's memory: %s; drafting goes on, it is tried again, "
                "and further errors are only counted",
                kind,
                error,
            )

    def _drop(self, space: _Space) -> None:
        """Drops a namespace from the memory, and what this replica published of it."""
        self.memory.forget(space.namespace)
        space.removed |= dict.fromkeys([*space.own, *([space.pending[0]] if space.pending else [])])
        space.pending = None
        space.store, space.cut = None, 0
        for known in (space.own, space.read, space.taken):
            known.clear()

    def _is_gone(self, space: _Space, name: str) -> bool:
        """True if an object of this replica is gone: a listing may be late."""
        try:
            self._objects.read(f"{space.folder}/{name}", whole=False)
        except FileNotFoundError:
            return True
        except (DatastoreError, OSError):
            return False
        return False

    # --- Publishing ---

    def _publish(self, space: _Space) -> bool:
        """Publishes a piece of text; whether there may be more."""
        if space.pending is None and not self._begin(space):
            return False
        assert space.pending is not None
        name, content, tokens, cut = space.pending
        # If an earlier answer was lost, this writes the same again.
        self._objects.write(f"{space.folder}/{name}", content)
        space.pending = None
        space.own[name] = len(content)
        space.cut = cut
        with self._lock:
            self.published_tokens += tokens
        return True

    def _begin(self, space: _Space) -> bool:
        """Makes the object of what is new in the live store; whether there is anything."""
        for store in self.memory.find([space.namespace]):
            try:
                if store is not space.store:
                    space.store, space.cut = store, 0
                begin = max(space.cut, store.begin)
                if store.end <= begin:
                    return False
                text, end = store._dump(begin, _MOST_TOKENS)
            except (DatastoreClosedError, InvalidValueError):
                return False  # it was forgotten meanwhile, or had to leave
            # Ids of 4 bytes, negative where a document begins, and behind them a byte for each that
            # says who wrote it.
            ids = np.frombuffer(text, np.int32, len(text) // 5)
            tokens = int(np.count_nonzero(ids >= 0))
            with self._lock:
                self.dropped_tokens += end - len(ids) - space.cut
            piece = Piece(next(self._numbers), tokens, zlib.compress(text, 1))
            name = f"{self._name}-{piece.number}"
            content = self._sealed(space, name, [piece])
            space.pending = (name, content, tokens, end)
            return True
        return False

    def _sealed(self, space: _Space, name: str, pieces: list[Piece]) -> _Content:
        body = b"".join(piece.sealed() for piece in pieces)
        tokens = sum(piece.tokens for piece in pieces)
        return self._objects.seal(f"{space.folder}/{name}", space.tombstone, body, tokens)

    def _join(self, space: _Space) -> None:
        """Joins newer objects of this replica; those that cannot be read stay as they are."""
        pieces: list[Piece] = []
        joined: list[str] = []
        size = 0
        for name, more in reversed(space.own.items()):
            if size and (more > _GROWTH * size or size + more > _MOST_JOINED):
                break
            try:
                _, body = self._objects.read(f"{space.folder}/{name}")
            except (DatastoreError, OSError):
                break
            joined.append(name)
            pieces[:0] = Piece.parse(body)
            size += more
        if len(joined) < 2:
            return
        name = f"{self._name}-{next(self._numbers)}"
        path = f"{space.folder}/{name}"
        content = self._sealed(space, name, pieces)
        space.removed[name] = None  # unless it is known to be whole
        self._objects.write(path, content)
        self._objects.read(path)
        del space.removed[name]
        space.own[name] = len(content)
        # The newest first: what is left of them when this process is killed is read before the
        # joined object, and must be the beginning of its text.
        for old in joined:
            del space.own[old]
            space.removed[old] = None

    # --- Following ---

    def _follow(self, space: _Space, names: Iterable[str], tombstone: Head | None) -> None:
        """Adds what others published to the memory, as much of the newest as it may take."""
        if not self.memory.published(space.namespace):
            # It was never read, or had to leave.
            space.read.clear()
            space.taken.clear()
        space.is_followed = True
        found: list[tuple[Head, str, _Content]] = []
        held = 0
        unread = set(names) - {TOMBSTONE, *space.read, *space.own, *space.removed}
        for name in sorted(name for name in unread if not name.endswith(BEGUN)):
            read = self._readable(f"{space.folder}/{name}", whole=False)
            if read and (tombstone is None or read[0].tombstone == tombstone.tombstone):
                # Beyond some bytes texts are read again, one by one.
                held += len(read[1])
                found.append((read[0], name, read[1] if held < _MOST_JOINED else b""))
        left = self.memory.max_bytes // _PART // _TOKEN_BYTES
        newest: list[tuple[Head, str, _Content]] = []
        for each in sorted(found, key=lambda each: -each[0].time):
            left -= each[0].tokens
            if left < 0 and newest:
                space.read.add(each[1])
            else:
                newest.append(each)
        for head, name, body in reversed(newest):
            if head.size and not body:
                whole = self._readable(f"{space.folder}/{name}")
                if whole is None:
                    continue
                body = whole[1]
            if not self._add(space, name, body):
                break

    def _readable(self, path: str, *, whole: bool = True) -> tuple[Head, _Content] | None:
        """As `Objects.read`; None where an object is gone, since it was joined, or cannot be
        verified, since it is foreign, damaged or not yet there as a whole. Raises OSError."""
        try:
            return self._objects.read(path, whole=whole)
        except FileNotFoundError:
            return None
        except DatastoreError as error:
            self._fault("follow", error)
            return None

    def _add(self, space: _Space, name: str, body: _Content) -> bool:
        """Adds the pieces of an object that are not there yet; whether there is room."""
        replica = name.partition("-")[0]
        for piece in Piece.parse(body):
            if (replica, piece.number) in space.taken:
                continue
            for store in self.memory.published(space.namespace, make=True):
                try:
                    self.memory.publish(space.namespace, store, zlib.decompress(piece.content))
                except DatastoreClosedError:
                    return False  # others' text needed its room
                space.taken.add((replica, piece.number))
        space.read.add(name)
        return True


_replicas: weakref.WeakSet[Replica] = weakref.WeakSet()


def _after_fork() -> None:
    for replica in list(_replicas):
        replica._renew()
        # The parent publishes: two of one name would be taken for one.
        replica._is_forked = True
        replica._closed.set()


os.register_at_fork(after_in_child=_after_fork)
