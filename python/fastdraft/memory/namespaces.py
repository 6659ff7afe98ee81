"""Memory of finished requests: a live datastore for each namespace, within one bound of bytes."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from numpy.typing import ArrayLike

from fastdraft.errors import DatastoreClosedError, InvalidValueError
from fastdraft.memory.datastore import Datastore

__all__ = ["Memory", "typed"]

# A store that is used gets this many bytes of room for new text: an answer's and its prompt's. In a
# small memory it gets an eighth, in a large one a 32nd part.
_ROOM = 1 << 20
# A store's age is known to within this many tokens.
_MARK_TOKENS = 4096
# The part of the bytes for which namespaces with little text may displace others' text. Each takes
# a whole store, so a client that makes up names would otherwise empty the memory with a few tokens.
_SMALL_PART = 8


@dataclass(frozen=True, slots=True)
class _Name:
    """The name of a store. All names have this form, whatever a namespace is."""

    namespace: Hashable = field(compare=False)
    corpus_id: str | None = None
    """The id of a corpus that a request of the namespace brought; empty for published text;
    None for the text that was said."""
    key: Hashable = field(init=False)
    """The namespace with its types: 1, True and 1.0 are three."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", typed(self.namespace))


@dataclass(slots=True, eq=False)
class _Held:
    """A store, and what is known of its text's age."""

    name: _Name
    store: Datastore
    limit: int
    """Its part of the bytes: the store's own limit."""
    used: int
    """The number of its last use."""
    marked: int = 0
    """The position of its last mark."""


class Memory:
    """Text of finished requests to draft from, kept apart by namespaces, within one bound.

    A namespace is a tenant, a `cache_salt`, a LoRA adapter, or a tuple of these: any hashable
    value, and 1, True and 1.0 are three. Each has a live `Datastore` of its own, made on first use.
    A request that is given the stores of one namespace sees no other's text. When the bytes are
    used up, the text that entered longest ago leaves first, whichever namespace it is in: one that
    nobody uses loses all of its text before a busy one loses any that is newer. A namespace whose
    text is gone loses its store.

    The bound holds at all times: the limits of the stores add up to at most `max_bytes`, and a
    store keeps to its limit. `of` moves bytes to the namespace that is used, so call it when a
    request begins and when its text is about to enter. Thread-safe.

    >>> memory = Memory(max_bytes=1 << 30)
    >>> request = engine.add_request(           # doctest: +SKIP
    ...     prompt_ids, datastores=memory.of("tenant"), read_only=memory.find(["everybody"]))

    Args:
        max_bytes: The most bytes of all stores together; 0 remembers nothing.
        fingerprint: Of the tokenizer, for all stores.

    Raises:
        InvalidValueError: `max_bytes` is too little for one store, or `fingerprint` is not 32
            bytes.
    """

    def __init__(self, max_bytes: int, *, fingerprint: bytes | None = None) -> None:
        if max_bytes:
            Datastore(max_bytes=max_bytes, fingerprint=fingerprint).close()
        self.max_bytes = max_bytes
        self._fingerprint = fingerprint
        self._room = max(_least_bytes(), min(max_bytes // 8, _ROOM), max_bytes // 32)
        self._limits = 0  # of all stores together
        # The least recently used first. `_roomy`: the names of stores that may have bytes to spare.
        self._held: OrderedDict[_Name, _Held] = OrderedDict()
        self._roomy: OrderedDict[_Name, None] = OrderedDict()
        # Stores that had little text when they were last used, the least recently used first.
        self._small: OrderedDict[_Name, None] = OrderedDict()
        # Marks of stores: the number of a use, the position that was then the store's end, and the
        # store, oldest first. The kept text has no more marks than fit: those beyond are of stores
        # that left.
        self._marks: deque[tuple[int, int, _Held]] = deque(maxlen=max_bytes // _MARK_TOKENS)
        self._uses = itertools.count()
        self._lock = threading.RLock()
        _memories.add(self)

    def of(self, namespace: Hashable = None) -> list[Datastore]:
        """The store of a namespace, with room for text; none without memory.

        It is made if there is none. None is the namespace of requests that name no other. O(log n)
        in the namespaces, amortised, and the text that leaves.
        """
        if not self.max_bytes:
            return []
        with self._lock:
            return [self._use(_Name(namespace), self._room).store]

    def find(self, namespaces: Iterable[Hashable]) -> list[Datastore]:
        """The stores of those namespaces that have one, each once; makes none."""
        with self._lock:
            return [
                held.store
                for name in dict.fromkeys(map(_Name, namespaces))
                if (held := self._held.get(name)) is not None and not held.store.closed
            ]

    def corpus(
        self, namespace: Hashable, corpus_id: str, token_ids: ArrayLike | None = None
    ) -> list[Datastore]:
        """A corpus that a request of the namespace brought, for it and its siblings to read.

        It is built once, from the first request's tokens, while requests that name it read what is
        there. It lasts as a namespace does: of corpora the least recently used leaves first. Of one
        that is larger than the memory the end is kept.
        Text must not enter it: pass it as `read_only`.

        Args:
            namespace: Of the request. Other namespaces cannot name its corpora.
            corpus_id: The corpus's name.
            token_ids: Its text; ignored where the corpus is built already.

        Returns:
            Its store; nothing where nobody has brought it, or without memory.

        Raises:
            InvalidValueError: `corpus_id` is no text, or `token_ids` is no row of token ids.
        """
        if not isinstance(corpus_id, str) or not corpus_id:
            raise InvalidValueError(f"corpus_id must be a text, got {corpus_id!r}")
        name = _Name(namespace, corpus_id)
        with self._lock:
            held = self._held.get(name)
            if held is not None and not held.store.closed:
                held.used = next(self._uses)
                self._held.move_to_end(name)
                return [held.store]
            if token_ids is None or not self.max_bytes:
                return []
            store = self._use(name, self._room).store
        # A long text is indexed without the lock, which other namespaces need.
        try:
            store.add(token_ids, grow=lambda: self._make_room_for(name, store))
        except DatastoreClosedError:
            return []  # forgotten meanwhile
        except InvalidValueError:
            with self._lock:
                if (held := self._held.get(name)) is not None and held.store is store:
                    self._drop(name)
            raise
        with self._lock:
            if (held := self._held.get(name)) is None or held.store is not store:
                return []
            # A corpus is used as a whole. Marks made of the object before this copy count no more,
            # so all its text is as new as its last use.
            self._held[name] = held = replace(held)
            self._set_limit(held, store.bytes)
            return [store]

    def published(self, namespace: Hashable, *, make: bool = False) -> list[Datastore]:
        """The store of what others published of a namespace; none where there is none to `make`.

        It counts towards the bytes, and lasts as a namespace does: the text that entered longest
        ago leaves first. Text must not enter it but by `publish`: pass it as `read_only`.
        """
        name = _Name(namespace, "")
        with self._lock:
            held = self._held.get(name)
            if held is not None and not held.store.closed:
                return [held.store]
            return [self._use(name, self._room).store] if make and self.max_bytes else []

    def publish(self, namespace: Hashable, store: Datastore, text: bytes) -> None:
        """Adds text that others published, as `Datastore._dump` gives it, to the `published` store.

        Raises DatastoreClosedError where that had to leave.
        """
        name = _Name(namespace, "")
        self._make_room_for(name, store)
        store._load(text, lambda: self._make_room_for(name, store))

    def forget(self, namespace: Hashable) -> bool:
        """Closes the namespace's stores and its corpora; whether there were any.

        Requests that are running go on without them, and their text does not enter.
        """
        with self._lock:
            key = typed(namespace)
            found = [name for name in self._held if name.key == key]
            for name in found:
                self._drop(name)
            return bool(found)

    def clear(self) -> None:
        """Forgets everything, and closes the stores."""
        with self._lock:
            for name in list(self._held):
                self._drop(name)

    @property
    def namespaces(self) -> list[Hashable]:
        """The namespaces that have a store, without corpora; the least recently used first."""
        with self._lock:
            return [
                name.namespace
                for name, held in self._held.items()
                if name.corpus_id is None and not held.store.closed
            ]

    @property
    def bytes(self) -> int:
        """The bytes of all stores. O(stores)."""
        with self._lock:
            return sum(held.store.bytes for held in self._held.values())

    def _use(self, name: _Name, room: int) -> _Held:
        """The store, with `room` bytes beyond what it holds as far as they can be had."""
        held = self._held.get(name)
        if held is not None and held.store.closed:
            self._drop(name)
            held = None
        use = next(self._uses)
        if held is None:
            self._make_room(_least_bytes(), None)
            store = Datastore(max_bytes=_least_bytes(), fingerprint=self._fingerprint)
            held = self._held[name] = _Held(name, store, _least_bytes(), use)
            self._limits += held.limit
        held.used = use
        begin, end = held.store.begin, held.store.end
        if end >= held.marked + _MARK_TOKENS or held.marked <= begin:
            held.marked = end
            self._marks.append((use, held.marked, held))
        self._held.move_to_end(name)
        self._roomy[name] = None
        self._roomy.move_to_end(name)
        if held.store.bytes <= _least_bytes():
            self._small[name] = None
            self._small.move_to_end(name)
        else:
            self._small.pop(name, None)
        wanted = held.store.bytes + room - held.limit
        if wanted > 0:
            self._make_room(wanted, held)
            self._set_limit(held, held.limit + min(wanted, self.max_bytes - self._limits))
        return held

    def _make_room_for(self, name: _Name, store: Datastore) -> None:
        """Gives a store room for more text, if it still has the name."""
        with self._lock:
            held = self._held.get(name)
            if held is not None and held.store is store:
                self._use(name, self._room)

    def _make_room(self, wanted: int, user: _Held | None) -> None:
        """Lowers the limits of other stores until `wanted` bytes are free, or `user`'s text is the
        oldest there is: then it gives way itself."""
        while self.max_bytes - self._limits < wanted and self._roomy:
            name, _ = self._roomy.popitem(last=False)
            held = self._held.get(name)
            if held is user:
                self._roomy[name] = None
                if len(self._roomy) == 1:
                    break
            elif held is not None:
                self._set_limit(held, held.store.bytes)
        while (
            len(self._small) * _least_bytes() > self.max_bytes // _SMALL_PART
            and self.max_bytes - self._limits < wanted
        ):
            name, _ = self._small.popitem(last=False)
            held = self._held[name]
            # One that has got more text since is no small one any more.
            if held is not user and held.store.bytes <= _least_bytes():
                self._drop(name)
        step = max(_least_bytes() // 4, self._room // 64)
        while (missing := wanted - (self.max_bytes - self._limits)) > 0 and self._held:
            oldest = self._oldest()
            if oldest is user:
                break
            least = max(0, oldest.limit - min(missing, step))
            if self._set_limit(oldest, least) > least or oldest.store.closed:
                self._drop(oldest.name)

    def _oldest(self) -> _Held:
        """The store with the text that entered longest ago; all text after a store's last mark
        counts as that of its last use."""
        unused = next(iter(self._held.values()))
        while self._marks and self._marks[0][0] <= unused.used:
            _, position, held = self._marks[0]
            if self._held.get(held.name) is held and position > held.store.begin:
                return held
            self._marks.popleft()
        return unused

    def _set_limit(self, held: _Held, limit: int) -> int:
        self._limits -= held.limit
        try:
            held.limit = held.store.limit(limit)
        except DatastoreClosedError:
            held.limit = 0
        self._limits += held.limit
        return held.limit

    def _drop(self, name: _Name) -> None:
        held = self._held.pop(name)
        self._roomy.pop(name, None)
        self._small.pop(name, None)
        self._limits -= held.limit
        held.store.close()


def typed(namespace: Hashable) -> Hashable:
    """A namespace as a key that tells apart what is equal but of another type."""
    if isinstance(namespace, tuple):
        return tuple(map(typed, namespace))
    return type(namespace), namespace


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()
_locked: list[Memory] = []


def _before_fork() -> None:
    """Takes all locks, so that no thread is in the middle of a change that it will not finish in
    the child."""
    _locked[:] = sorted(_memories, key=id)
    for memory in _locked:
        memory._lock.acquire()


def _after_fork() -> None:
    while _locked:
        _locked.pop()._lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


@functools.cache
def _least_bytes() -> int:
    """The bytes that a store with one token takes."""
    store = Datastore(max_bytes=1 << 20)
    store.add([0])
    return store.limit(0)
