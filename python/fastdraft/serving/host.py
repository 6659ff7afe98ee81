"""The common part of all adapters: a host's requests at one engine, their options, namespaces."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from fastdraft import (
    Datastore,
    DraftBatch,
    DraftConfig,
    DraftStats,
    Engine,
    Memory,
    NgramTable,
    Offers,
)
from fastdraft.errors import (
    FastdraftError,
    InvalidValueError,
    MemoryLimitError,
    RequestLimitError,
)
from fastdraft.faults import Faults
from fastdraft.memory.common_ngrams import default_ngrams, tokenizer_file
from fastdraft.memory.datastore import fingerprint
from fastdraft.memory.sharing import Replica
from fastdraft.serving.ledger import Ledger
from fastdraft.serving.metrics import SOURCES, Totals, hits_field
from fastdraft.serving.request_options import (
    PREDICTION,
    TICKET,
    UNLIMITED,
    RequestOptions,
    request_options,
)
from fastdraft.serving.settings import COMMON_NGRAMS, MemorySettings

__all__ = [
    "KEY_VARIABLE",
    "HostRequests",
    "Namespace",
    "Target",
    "Text",
    "host_arguments",
    "memory_key",
    "open_replica",
    "report_totals",
]

KEY_VARIABLE: Final = "FASTDRAFT_MEMORY_KEY"
"""In the environment: the operator's key for what is saved or published."""

_LONG: Final = 4096
"""The most tokens that a step indexes, in about half a millisecond; more are left to a thread."""
_MOST_WAITING: Final = 1 << 24
"""The most tokens that wait for the thread. Beyond them a host indexes in its own step again."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Text:
    """The state of one request of the host."""

    request: int | None = None
    """Its id at the engine; None where it is not drafted for."""
    lookahead: int = UNLIMITED
    """The longest draft that it asks for."""
    remembered: bool = False
    """True if its text enters the memory."""
    namespace: Namespace | None = None
    """Whose text it shares; None: of all that name no namespace."""
    row: int | None = None
    """Its row in the ledger; None for one without a prediction."""
    indexing: Future[_Indexed] | None = None
    """The work of a thread that still indexes the prompt; `request` is None until it ends."""
    missed: list[Any] = field(default_factory=list)
    """The tokens that it has emitted meanwhile."""

    @property
    def is_drafted(self) -> bool:
        """True if the engine has the request, or will when its prompt is indexed."""
        return self.request is not None or self.indexing is not None

    @property
    def namespace_class(self) -> str:
        """The requests with which it shares text: "named" for those of its namespace, "unnamed" for
        all that name none, "apart" for none."""
        if not self.remembered:
            return "apart"
        return "unnamed" if self.namespace is None else "named"


class Namespace(NamedTuple):
    """Whose text a request shares. All parts have to be the same."""

    adapter: Hashable = None
    """The LoRA adapter: the text of one helps little with another."""
    salt: Hashable = None
    """The salt that separates requests in the host's own cache of prefixes."""
    name: str | None = None
    """The name that the request gives, as a parameter."""


class _Indexed(NamedTuple):
    """A request that the engine has just taken."""

    request: int
    remembered: bool
    namespace: Namespace | None


TextT = TypeVar("TextT", bound=Text)
ResultT = TypeVar("ResultT")


class Target(NamedTuple):
    """The model that drafts are for."""

    model: str
    """Its name."""
    tokenizer: str
    """The folder of its tokenizer, or its name on the Hugging Face hub."""
    revision: str | None = None
    """The tokenizer's revision on the hub."""


def memory_key() -> str:
    """The operator's key. Raises InvalidValueError where there is none."""
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise InvalidValueError(
            f"shared or saved memory needs a key in the environment's {KEY_VARIABLE}, got none"
        )
    return key


def open_replica(memory: Memory, url: str | os.PathLike[str], target: Target) -> Replica:
    """Shares a host's memory with the other replicas of a fleet, which publish at a URL.

    Raises:
        InvalidValueError: There is no key in the environment's `KEY_VARIABLE`, or a bad URL.
    """
    key = memory_key()
    mark = _mark(target.tokenizer, target.revision)
    replica = Replica(memory, url, key=key, model=target.model, fingerprint=mark)
    atexit.register(replica.close)
    return replica


def host_arguments(
    settings: MemorySettings, config: DraftConfig, target: Target | None
) -> dict[str, Any]:
    """The arguments of `HostRequests` for an operator's settings.

    Args:
        settings: The operator's.
        config: The drafter's configuration, but for what the settings say.
        target: The model, with whose other replicas the memory may be shared, and whose tokenizer
            the common n-grams are of; None for neither.

    Raises:
        InvalidValueError: See `open_replica`.
        DatastoreError: A datastore or the table of n-grams cannot be opened.
    """
    memory, url = Memory(settings.memory_bytes), settings.memory_url
    ngrams: NgramTable | str | None = settings.ngrams
    if ngrams == COMMON_NGRAMS:
        found = None if target is None else tokenizer_file(target.tokenizer, target.revision)
        ngrams = default_ngrams(found, config.vocabulary)
    return {
        "engine": Engine(replace(config, max_bytes=settings.max_bytes, ngrams=ngrams)),
        "memory": memory,
        "frozen": [Datastore.open(path) for path in settings.datastores],
        "shared": settings.shared_namespaces,
        "replica": None if url is None or target is None else open_replica(memory, url, target),
    }


def report_totals(replica: Replica, report: Callable[[Totals], None]) -> None:
    """Has `report` take the replica's totals after each of its looks, in its thread."""
    replica.refreshed = lambda: report(
        {
            "publish_faults": replica.faults["publish"],
            "follow_faults": replica.faults["follow"],
            "published_tokens": replica.published_tokens,
            "dropped_tokens": replica.dropped_tokens,
            "published_bytes": replica.bytes,
        }
    )


def _mark(tokenizer: str, revision: str | None) -> bytes | None:
    """The fingerprint of a tokenizer that is on the disk; None for one without a tokenizer.json."""
    path = tokenizer_file(tokenizer, revision)
    return None if path is None else fingerprint(path)


class HostRequests(Generic[TextT]):
    """The requests of one host at one engine, by the host's names for them.

    A drafting error never fails a request of the host. It is counted in `faults` and logged, and
    the requests concerned go on without drafts. A request whose own options are wrong goes on
    without drafts too, and is counted in `refused`.

    Not thread-safe, but for its own thread, which takes up and ends requests of much text, in the
    order of the calls: `drain` waits for it. Until a request is indexed it has no drafts.

    Args:
        engine: What drafts.
        memory: Where the text of finished requests goes, for later ones to be drafted from.
        frozen: Datastores that all requests are drafted from.
        shared: Names of namespaces, of the base model and without a salt, that all requests read.
        replica: Shares the memory with other processes.
        ledger: Takes the counts of each request with a prediction, for the server's front.
        own_options: Names beginning with "fastdraft" that the host itself puts among the options.
        in_step: Whether all is indexed in the call that asks for it: for a host that calls from a
            thread of its own, and for one whose ranks must all draft the same.
    """

    def __init__(
        self,
        engine: Engine,
        memory: Memory,
        frozen: Sequence[Datastore] = (),
        *,
        shared: Sequence[str] = (),
        replica: Replica | None = None,
        ledger: Ledger | None = None,
        own_options: Sequence[str] = (),
        in_step: bool = False,
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.replica = replica
        self._ledger = ledger
        self._faults = Faults(_logger)
        self._refused = Faults(_logger)
        self._frozen = frozen
        self._shared = [Namespace(name=name) for name in shared]
        self._own_options = own_options
        self._texts: dict[Hashable, TextT] = {}
        self._finished = DraftStats()
        self._hits: dict[str, float] = {}  # accepted tokens of finished requests, by field
        self._lock = threading.Lock()  # of what both threads count
        self._steps = 0  # calls for drafts
        self._seconds = 0.0  # the time in them
        self._memory_bytes: int | None = None  # of the memory; None: not counted since a change
        self._warned_of_foreign = self._warned_of_limit = False
        # Its thread starts with its first task.
        self._thread = None if in_step else ThreadPoolExecutor(1, "fastdraft-index")
        self._waiting: list[tuple[Future[Any], int]] = []  # its tasks, and their tokens
        _hosts.add(self)

    def _after_fork(self) -> None:
        """In a forked process, which has no thread: what it was indexing goes without drafts."""
        self._lock = threading.Lock()
        self._thread = None
        self._waiting = []
        for text in self._texts.values():
            text.indexing = None

    @property
    def faults(self) -> int:
        """The number of drafting errors."""
        return self._faults.count

    @property
    def refused(self) -> int:
        """The number of requests without drafts because one of their own options was wrong."""
        return self._refused.count

    @property
    def stats(self) -> DraftStats:
        """The counts of all requests, finished and running. O(running requests)."""
        running = (
            self.engine.stats(text.request)
            for text in self._texts.values()
            if text.request is not None
        )
        return sum(running, self._finished)

    def totals(self, stats: DraftStats) -> dict[str, float]:
        """The counts since the start, and the present sizes: values of `metrics.FIELDS`, without
        those of a fleet, which change while no requests come: see `report_totals`.

        `stats` are the counts of all requests, or those of predictions alone. O(stores) after a
        change of the memory, else O(1).
        """
        with self._lock:
            hits = dict(self._hits)
            if self._memory_bytes is None:
                self._memory_bytes = self.memory.bytes
            memory_bytes = self._memory_bytes
        return {
            "accepted_prediction_tokens": stats.accepted_prediction_tokens,
            "rejected_prediction_tokens": stats.rejected_prediction_tokens,
            "faults": self.faults,
            "refused_requests": self.refused,
            "drafted_tokens": self._finished.drafted,
            "steps": self._steps,
            "seconds": self._seconds,
            "requests": self.engine.num_requests,
            "request_bytes": self.engine.num_bytes,
            "datastore_bytes": memory_bytes,
            **hits,
        }

    @property
    def num_requests(self) -> int:
        """How many requests are known, drafted for or not."""
        return len(self._texts)

    def drain(self) -> None:
        """Waits until all requests that were added are indexed, and all that ended are remembered.

        No step needs it.
        """
        for task, _ in self._waiting:
            with contextlib.suppress(Exception):  # reported when the request is used
                task.result()
        self._settle()

    def _add(
        self,
        text: TextT,
        token_ids: ArrayLike,
        params: Mapping[str, Any],
        *,
        adapter: Hashable = None,
        salt: Hashable = None,
        apart: bool = False,
    ) -> None:
        """Starts to draft for a request, unless its options switch drafts off or are wrong.

        Args:
            text: Gets the engine's id.
            token_ids: Its prompt, and what it has emitted already. Copied if need be.
            params: Its own parameters.
            adapter, salt: See `Namespace`.
            apart: Whether it shares text with no other request, whatever its options say.
        """
        try:
            options = request_options(params, self._own_options)
        except InvalidValueError as error:
            self._refuse(error)
            return
        text.lookahead = options.lookahead
        if not text.lookahead:
            return
        named = Namespace(adapter, salt, options.namespace)
        namespace = None if named == Namespace() else named
        options = options._replace(remember=options.remember and not apart)
        known = np.asarray(token_ids)
        size = sum(
            len(part)
            for part in (known, options.prediction, options.templates, options.corpus)
            if part is not None
        )
        if self._is_long(size):
            text.indexing = self._later(size, self._index, known.copy(), options, namespace)
            return
        with self._refusing():
            self._take_up(text, self._index(known, options, namespace))

    def _open_row(self, text: TextT, params: Mapping[str, Any]) -> None:
        """Begins the row of a request in the ledger, if it has a prediction."""
        if self._ledger is not None and params.get(PREDICTION) is not None:
            text.row = self._ledger.open(params.get(TICKET))

    def _index(
        self, token_ids: ArrayLike, options: RequestOptions, namespace: Namespace | None
    ) -> _Indexed:
        """Gives the engine a request. Raises FastdraftError."""
        own: list[Datastore] = []
        read: list[Datastore] = []
        if options.remember:
            own = self.memory.of(namespace)
            shared = [name for name in self._shared if name != namespace]
            read = self.memory.find(shared)
            if self.replica is not None:
                read += self.replica.find([namespace, *shared])
            if options.corpus_id is not None:
                read += self.memory.corpus(namespace, options.corpus_id, options.corpus)
            # In a memory that holds few stores, one may have been closed to make room for another.
            own, read = ([store for store in each if not store.closed] for each in (own, read))
        request = self.engine.add_request(
            token_ids,
            prediction=options.prediction,
            templates=options.templates,
            datastores=own,
            read_only=[*read, *self._frozen],
        )
        return _Indexed(request, bool(own), namespace)

    def _take_up(self, text: TextT, indexed: _Indexed) -> None:
        text.request, text.remembered, text.namespace = indexed
        self._memory_bytes = None

    def is_full(self, error: Exception) -> bool:
        """True if an error only means that the operator's `max_bytes` is reached: no fault."""
        full = isinstance(error, MemoryLimitError) and self.engine.config.max_bytes is not None
        if full and not self._warned_of_limit:
            self._warned_of_limit = True
            _logger.warning(
                "fastdraft: max_bytes is reached: new requests go without drafts until others end, "
                "and so do running ones that would grow beyond it"
            )
        return full

    def _refuse(self, error: Exception) -> None:
        if self.is_full(error):
            return
        self._refused.add("a request goes on without drafts, since its options are wrong", error)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Counts what a request's own tokens are refused for."""
        try:
            yield
        except (InvalidValueError, RequestLimitError, MemoryLimitError) as error:
            if isinstance(error, MemoryLimitError) and self.engine.config.max_bytes is None:
                raise
            self._refuse(error)

    def _is_long(self, size: int) -> bool:
        """True if indexing `size` tokens is left to the thread."""
        if self._thread is None or size < _LONG:
            return False
        waiting = sum(tokens for task, tokens in self._waiting if not task.done())
        return waiting + size <= _MOST_WAITING

    def _later(self, size: int, call: Callable[..., ResultT], *args: Any) -> Future[ResultT]:
        """Queues a call for the thread."""
        assert self._thread is not None
        task = self._thread.submit(call, *args)
        self._waiting.append((task, size))
        return task

    def _settle(self) -> None:
        """Takes up what the thread has indexed. O(requests of much text that are new or ended)."""
        if not self._waiting:
            return
        for text in self._texts.values():
            if text.indexing is not None and text.indexing.done():
                self._guard([text], self._catch_up, text)
        self._waiting = [each for each in self._waiting if not each[0].done()]

    def _catch_up(self, text: TextT) -> None:
        """Takes up a request that is indexed, and what it has emitted meanwhile."""
        assert text.indexing is not None
        indexing, text.indexing = text.indexing, None
        missed, text.missed = text.missed, []
        with self._refusing():
            self._take_up(text, indexing.result())
        if text.request is not None:
            for emitted in missed:
                self.engine.observe(text.request, emitted)

    def _observe(
        self,
        texts: Sequence[TextT],
        token_ids: ArrayLike,
        offsets: ArrayLike,
        drafted: ArrayLike | None = None,
    ) -> None:
        """Passes on what requests emitted, as `Engine.observe_batch` takes it.

        Those whose tokens the engine refuses go on without drafts, each a fault.
        """
        try:
            self.engine.observe_batch(_ids(texts), token_ids, offsets, drafted=drafted)
        except FastdraftError as error:
            if not error.rows:
                raise
            for row, each in error.rows.items():
                if not self.is_full(each):
                    self._fault(error=each)
                self._give_up(texts[row])

    def _propose(
        self,
        texts: Sequence[TextT],
        limits: Sequence[int],
        cost: ArrayLike | None = None,
        *,
        offers: Offers | None = None,
    ) -> DraftBatch:
        """The drafts of a step, as `Engine.propose_batch` gives them."""
        drafts = self.engine.propose_batch(_ids(texts), limits=limits, cost=cost, offers=offers)
        if self.engine.num_foreign and not self._warned_of_foreign:
            self._warned_of_foreign = True
            self._fault(
                "a datastore holds tokens beyond the target's vocabulary of "
                f"{self.engine.config.vocabulary}, which are not drafted; is it of another "
                "tokenizer?"
            )
        return drafts

    def _end(self, keys: Iterable[Hashable]) -> None:
        """Ends requests; unknown ones are skipped."""
        self._settle()
        for key in keys:
            text = self._texts.pop(key, None)
            if text is None:
                continue
            size = 0
            if text.request is not None:
                size = self._guard([text], self.engine.num_tokens, text.request) or 0
            if text.indexing is not None or self._is_long(size):
                self._later(size, self._close, text)
            else:
                self._close(text)

    def _close(self, text: TextT) -> None:
        if text.is_drafted:
            self._guard([text], self._finish, text)
        self._guard([], self._ended, text)

    def _finish(self, text: TextT) -> None:
        """Ends a request that is drafted for, so that it is remembered."""
        if text.indexing is not None:
            self._catch_up(text)  # the thread has indexed it before
        if text.request is None:
            return
        if text.remembered:
            self.memory.of(text.namespace)  # makes room for its text
        self._conclude(text, self.engine.finish(text.request))

    def _ended(self, text: TextT) -> None:
        """The request is through, and its counts are known. Called on the thread too."""
        if text.row is not None and self._ledger is not None:
            self._ledger.close(text.row)

    def _record(self, text: TextT, stats: DraftStats) -> None:
        """Writes the counts of a request with a prediction into the ledger."""
        if text.row is not None and self._ledger is not None:
            counts = stats.accepted_prediction_tokens, stats.rejected_prediction_tokens
            self._ledger.record(text.row, *counts)

    def _conclude(self, text: TextT, stats: DraftStats) -> None:
        """Takes the counts of a request that the engine has ended. Called on the thread too."""
        self._record(text, stats)
        found = (*stats.accepted_by_source, stats.accepted - sum(stats.accepted_by_source))
        with self._lock:
            self._memory_bytes = None
            self._finished += stats
            for source, count in zip(SOURCES, found, strict=True):
                field = hits_field(text.namespace_class, source)
                self._hits[field] = self._hits.get(field, 0.0) + count

    def _give_up(self, text: TextT) -> None:
        """Leaves the request without drafts from here on."""
        request, text.request = text.request, None
        indexing, text.indexing = text.indexing, None
        if indexing is not None:
            assert self._thread is not None
            self._waiting.append((self._thread.submit(self._cancel, indexing), 0))
        if request is not None:
            # After an error the engine may no longer know the request, and what keeps the counts
            # may be broken. Nothing can be done about either.
            with contextlib.suppress(Exception):
                stats = self.engine.stats(request)
                self.engine.cancel(request)
                self._conclude(text, stats)

    def _cancel(self, indexing: Future[_Indexed]) -> None:
        if indexing.exception() is None:
            self.engine.cancel(indexing.result().request)

    def _guard(
        self, texts: Iterable[TextT], call: Callable[..., ResultT], *args: Any
    ) -> ResultT | None:
        """Returns the result of `call`; if it raises, None, and `texts` go on without drafts."""
        try:
            return call(*args)
        except Exception:
            self._fault()
            for text in texts:
                self._give_up(text)
            return None

    def _fault(self, what: str = "drafting failed", error: Exception | None = None) -> None:
        """Counts a fault, by default the exception that is being handled, and logs it."""
        self._faults.add(f"{what}; the requests concerned go on without drafts", error)


_hosts: weakref.WeakSet[HostRequests[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for host in list(_hosts):
        host._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _ids(texts: Iterable[Text]) -> list[Any]:
    """The engine's ids of requests that are drafted for."""
    return [text.request for text in texts]
