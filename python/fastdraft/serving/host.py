"""What all adapters share: a host's requests at one engine, their options and namespaces."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from numpy.typing import ArrayLike

from fastdraft import Datastore, DraftBatch, DraftStats, Engine, Memory, Offers
from fastdraft.datastore import fingerprint
from fastdraft.errors import FastdraftError, InvalidValueError, RequestLimitError
from fastdraft.faults import Faults
from fastdraft.fleet import Replica
from fastdraft.serving.metrics import SOURCES, Totals
from fastdraft.serving.request_options import UNLIMITED, RequestOptions, request_options

__all__ = ["KEY_VARIABLE", "HostRequests", "Namespace", "Text", "share", "watch"]

KEY_VARIABLE: Final = "FASTDRAFT_MEMORY_KEY"
"""In the environment: the operator's key for what is saved or published."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Text:
    """What is known of one request of the host."""

    request: int | None = None
    """Its id at the engine; None where it is not drafted for."""
    lookahead: int = UNLIMITED
    """The longest draft that it asks for."""
    remembered: bool = False
    """Whether its text enters the memory."""
    namespace: Namespace | None = None
    """Whose text it shares; None: of all that name no namespace."""


class Namespace(NamedTuple):
    """Whose text a request shares. All parts have to be the same."""

    adapter: Hashable = None
    """The LoRA adapter: the text of one helps little with another."""
    salt: Hashable = None
    """What keeps requests apart in the host's own cache of prefixes."""
    name: str | None = None
    """The name that the request gives, as a parameter."""


TextT = TypeVar("TextT", bound=Text)
ResultT = TypeVar("ResultT")


def share(
    memory: Memory,
    url: str | os.PathLike[str],
    *,
    model: str,
    tokenizer: str,
    revision: str | None = None,
) -> Replica:
    """Shares a host's memory with the other replicas of a fleet.

    Args:
        memory: The host's.
        url: Where replicas publish.
        model: The name of the target.
        tokenizer: The folder of its tokenizer, or its name on the Hugging Face hub.
        revision: Of the tokenizer there.

    Raises:
        InvalidValueError: There is no key in the environment's `KEY_VARIABLE`, or a bad URL.
    """
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise InvalidValueError(
            f"shared or saved memory needs a key in the environment's {KEY_VARIABLE}, got none"
        )
    replica = Replica(memory, url, key=key, model=model, fingerprint=_mark(tokenizer, revision))
    atexit.register(replica.close)
    return replica


def watch(replica: Replica, report: Callable[[Totals], None]) -> None:
    """Has `report` take the replica's totals after each of its looks, in its thread."""

    def refreshed() -> None:
        report(
            {
                "publish_faults": replica.faults["publish"],
                "follow_faults": replica.faults["follow"],
                "published_tokens": replica.published_tokens,
                "dropped_tokens": replica.dropped_tokens,
                "published_bytes": replica.bytes,
                "manifest_number": replica.manifest.number,
            }
        )

    replica.refreshed = refreshed


def _mark(tokenizer: str, revision: str | None) -> bytes | None:
    """The fingerprint of a tokenizer that is on the disk; None for one without a tokenizer.json."""
    local = os.path.join(tokenizer, "tokenizer.json")
    path: object = local
    if not os.path.exists(local):
        try:
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(tokenizer, "tokenizer.json", revision=revision)
        except (ImportError, ValueError):
            return None
    return fingerprint(path) if isinstance(path, str) else None


class HostRequests(Generic[TextT]):
    """The requests of one host at one engine, by the host's names for them.

    A drafting error never fails a request of the host. It is counted in `faults` and logged, and
    the requests concerned go on without drafts. A request whose own options are wrong goes on
    without drafts too, and is counted in `refused`.

    Not thread-safe.

    Args:
        engine: What drafts.
        memory: Where the text of finished requests goes, for later ones to be drafted from.
        frozen: Datastores that all requests are drafted from.
        shared: Names of namespaces, of the base model and without a salt, that all requests read.
        replica: Shares the memory with other processes.
        own_options: Names beginning with "fastdraft" that the host itself puts among the options.

    Attributes:
        engine: What drafts.
        memory: Where the text of finished requests goes.
        replica: Shares the memory with other processes.
    """

    def __init__(
        self,
        engine: Engine,
        memory: Memory,
        frozen: Sequence[Datastore] = (),
        *,
        shared: Sequence[str] = (),
        replica: Replica | None = None,
        own_options: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.replica = replica
        self._faults = Faults(_logger)
        self._refused = Faults(_logger)
        self._frozen = frozen
        self._shared = [Namespace(name=name) for name in shared]
        self._own_options = own_options
        self._texts: dict[Hashable, TextT] = {}
        self._finished = DraftStats()
        # Accepted tokens of finished requests, by field.
        self._hits = {f"hits_{source}": 0.0 for source in SOURCES}
        self._steps = 0  # calls for drafts
        self._seconds = 0.0  # the time in them
        self._memory_bytes: int | None = None  # of the memory; None: not counted since a change
        self._warned_of_foreign = False

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
        """What was done since the start, and what is held now: values of `metrics.FIELDS`, without
        those of a fleet, which change while no requests come: see `watch`.

        Args:
            stats: The counts of all requests, or those of predictions alone.

        O(stores) after a change of the memory, else O(1).
        """
        if self._memory_bytes is None:
            self._memory_bytes = self.memory.bytes
        return {
            "accepted_prediction_tokens": stats.accepted_prediction_tokens,
            "rejected_prediction_tokens": stats.rejected_prediction_tokens,
            "faults": self.faults,
            "refused_requests": self.refused,
            "steps": self._steps,
            "seconds": self._seconds,
            "requests": self.engine.num_requests,
            "request_bytes": self.engine.num_bytes,
            "datastore_bytes": self._memory_bytes,
            **self._hits,
        }

    @property
    def num_requests(self) -> int:
        """How many requests are known, drafted for or not."""
        return len(self._texts)

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
            text: What is known of it; gets the engine's id.
            token_ids: Its prompt, and what it has emitted already. Copied if need be.
            params: Its own parameters.
            adapter: Its LoRA adapter.
            salt: What keeps it apart from other requests of the adapter, if anything does.
            apart: Whether it shares text with no other request, whatever its options say.
        """
        try:
            options = request_options(params, self._own_options)
            text.lookahead = options.lookahead
            if text.lookahead:
                named = Namespace(adapter, salt, options.namespace)
                text.namespace = None if named == Namespace() else named
                self._index(text, token_ids, options, remember=options.remember and not apart)
        except (InvalidValueError, RequestLimitError) as error:
            what = "a request goes on without drafts, since its options are wrong"
            self._refused.add(what, error)

    def _index(
        self, text: TextT, token_ids: ArrayLike, options: RequestOptions, *, remember: bool
    ) -> None:
        """Gives the engine a request. Raises FastdraftError."""
        own: list[Datastore] = []
        read: list[Datastore] = []
        if remember:
            own = self.memory.of(text.namespace)
            shared = [name for name in self._shared if name != text.namespace]
            read = self.memory.find(shared)
            if self.replica is not None:
                read += self.replica.find([text.namespace, *shared])
            # Where the memory holds few stores, one may have left to make room for another.
            own, read = ([store for store in each if not store.closed] for each in (own, read))
        text.request = self.engine.add_request(
            token_ids,
            prediction=options.prediction,
            templates=options.templates,
            datastores=own,
            read_only=[*read, *self._frozen],
        )
        text.remembered = bool(own)
        self._memory_bytes = None

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
        for key in keys:
            text = self._texts.pop(key, None)
            if text is not None:
                if text.request is not None:
                    self._guard([text], self._finish, text)
                self._guard([], self._ended, text)

    def _finish(self, text: TextT) -> None:
        """Ends a request that is drafted for, so that it is remembered."""
        assert text.request is not None
        if text.remembered:
            self.memory.of(text.namespace)  # makes room for its text
        self._conclude(text, self.engine.finish(text.request))

    def _ended(self, text: TextT) -> None:
        """The request is through, and its counts are known."""

    def _conclude(self, text: TextT, stats: DraftStats) -> None:
        """Takes the counts of a request that the engine has ended."""
        found = (*stats.accepted_by_source, stats.accepted - sum(stats.accepted_by_source))
        self._memory_bytes = None
        self._finished += stats
        for source, count in zip(SOURCES, found, strict=True):
            self._hits[f"hits_{source}"] += count

    def _give_up(self, text: TextT) -> None:
        """Leaves the request without drafts from here on."""
        request, text.request = text.request, None
        if request is not None:
            # After an error the engine may no longer know the request, and what keeps the counts
            # may be broken. Nothing can be done about either.
            with contextlib.suppress(Exception):
                stats = self.engine.stats(request)
                self.engine.cancel(request)
                self._conclude(text, stats)

    def _guard(
        self, texts: Iterable[TextT], call: Callable[..., ResultT], *args: Any
    ) -> ResultT | None:
        """What `call` returns; if it raises, `texts` go on without drafts, and None."""
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


def _ids(texts: Iterable[Text]) -> list[Any]:
    """The engine's ids of requests that are drafted for."""
    return [text.request for text in texts]
