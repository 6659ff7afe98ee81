"""What all adapters share: a host's requests at one engine, their parameters and namespaces."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from numpy.typing import ArrayLike

from fastdraft import Datastore, DraftBatch, DraftStats, Engine, Memory, Offers
from fastdraft.datastore import fingerprint
from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.fleet import Replica
from fastdraft.integrations.metrics import SOURCES, Totals, hits_field
from fastdraft.integrations.request_options import (
    CORPUS,
    CORPUS_ID,
    LOOKAHEAD,
    NAMESPACE,
    PREDICTION,
    REMEMBER,
    SWITCH,
    TEMPLATES,
    UNLIMITED,
)

__all__ = [
    "CORPUS",
    "CORPUS_ID",
    "KEY_VARIABLE",
    "LOOKAHEAD",
    "NAMESPACE",
    "PREDICTION",
    "REMEMBER",
    "SWITCH",
    "TEMPLATES",
    "UNLIMITED",
    "HostRequests",
    "Namespace",
    "Text",
    "longest_draft",
    "share",
    "watch",
]

KEY_VARIABLE: Final = "FASTDRAFT_MEMORY_KEY"
"""In the environment: the operator's key for what is saved or published."""

_LONGEST_NAME: Final = 256

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

    @property
    def namespace_class(self) -> str:
        """Whether it shares text with those of its namespace, "named", with those that name none,
        "unnamed", or with none, "apart"."""
        if not self.remembered:
            return "apart"
        return "unnamed" if self.namespace is None else "named"


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


def longest_draft(params: Mapping[str, Any]) -> int:
    """The longest draft that a request asks for, 0 for none at all.

    Args:
        params: The request's own parameters.

    Raises:
        InvalidValueError: The value of `SWITCH` or `LOOKAHEAD` is invalid.
    """
    switch = params.get(SWITCH, "on")
    # A bool is an integer, and some hosts send it as one.
    if switch not in ("on", "off", True, False):
        raise InvalidValueError(f"{SWITCH} must be 'on' or 'off', got {switch!r}")
    longest = params.get(LOOKAHEAD, UNLIMITED)
    if isinstance(longest, bool) or not isinstance(longest, int):
        raise InvalidValueError(f"{LOOKAHEAD} must be an integer, got {longest!r}")
    if longest < 1:
        raise InvalidValueError(
            f"{LOOKAHEAD} must be at least 1, got {longest}; to draft nothing, say {SWITCH}: 'off'"
        )
    return 0 if switch in ("off", False) else min(longest, UNLIMITED)


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

    A drafting error never fails a request of the host. It is counted in `faults`, the first one is
    logged as a warning, and the requests concerned go on without drafts.

    Args:
        engine: What drafts.
        memory: Where the text of finished requests goes, for later ones to be drafted from.
        frozen: Datastores that all requests are drafted from.
        shared: Names of namespaces, of the base model and without a salt, that all requests read.
        replica: Shares the memory with other processes.

    Attributes:
        engine: What drafts.
        memory: Where the text of finished requests goes.
        replica: Shares the memory with other processes.
        faults: The number of drafting errors.
    """

    def __init__(
        self,
        engine: Engine,
        memory: Memory,
        frozen: Sequence[Datastore] = (),
        *,
        shared: Sequence[str] = (),
        replica: Replica | None = None,
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.replica = replica
        self.faults = 0
        self._frozen = frozen
        self._shared = [Namespace(name=name) for name in shared]
        self._texts: dict[Hashable, TextT] = {}
        self._finished = DraftStats()
        self._hits: dict[str, float] = {}  # accepted tokens of finished requests, by field
        self._steps = 0  # calls for drafts
        self._seconds = 0.0  # the time in them
        self._memory_bytes: int | None = None  # of the memory; None: not counted since a change
        self._warned_of_foreign = False

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
    ) -> None:
        """Starts to draft for a request, unless its parameters switch drafts off.

        Args:
            text: What is known of it; gets the engine's id.
            token_ids: Its prompt, and what it has emitted already.
            params: Its own parameters.
            adapter: Its LoRA adapter.
            salt: What keeps it apart from other requests of the adapter, if anything does.

        Raises:
            FastdraftError: A bad parameter, or one of the errors of `Engine.add_request`.
        """
        text.lookahead = longest_draft(params)
        if not text.lookahead:
            return
        own: list[Datastore] = []
        read: list[Datastore] = []
        if params.get(REMEMBER, True):
            named = Namespace(adapter, salt, _text(params, NAMESPACE))
            namespace = None if named == Namespace() else named
            own = self.memory.of(namespace)
            shared = [name for name in self._shared if name != namespace]
            read = self.memory.find(shared)
            if self.replica is not None:
                read += self.replica.find([namespace, *shared])
            corpus_id = _text(params, CORPUS_ID)
            if corpus_id is not None:
                read += self.memory.corpus(namespace, corpus_id, params.get(CORPUS))
            # Where the memory holds few stores, one may have left to make room for another.
            own, read = ([store for store in each if not store.closed] for each in (own, read))
            text.namespace = namespace
            text.remembered = bool(own)
        self._memory_bytes = None
        text.request = self.engine.add_request(
            token_ids,
            prediction=params.get(PREDICTION),
            templates=params.get(TEMPLATES),
            datastores=own,
            read_only=[*read, *self._frozen],
        )

    def _observe(self, texts: Sequence[TextT], token_ids: ArrayLike, offsets: ArrayLike) -> None:
        """Passes on what requests emitted, as `Engine.observe_batch` takes it.

        Those whose tokens the engine refuses go on without drafts, each a fault.
        """
        try:
            self.engine.observe_batch(_ids(texts), token_ids, offsets)
        except FastdraftError as error:
            if not error.rows:
                raise
            for row in error.rows:
                self._fault()
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
            self._memory_bytes = None
            if text is not None and text.request is not None:
                self._guard([text], self._finish, text)

    def _finish(self, text: TextT) -> None:
        """Ends a request that is drafted for, so that it is remembered."""
        assert text.request is not None
        if text.remembered:
            self.memory.of(text.namespace)  # makes room for its text
        self._conclude(text, self.engine.finish(text.request))

    def _conclude(self, text: TextT, stats: DraftStats) -> None:
        """Takes the counts of a request that the engine has ended."""
        self._finished += stats
        found = (*stats.accepted_by_source, stats.accepted - sum(stats.accepted_by_source))
        for source, count in zip(SOURCES, found, strict=True):
            field = hits_field(text.namespace_class, source)
            self._hits[field] = self._hits.get(field, 0.0) + count

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

    def _fault(self, what: str = "drafting failed") -> None:
        """Counts a fault; warns of the first, with the exception that is being handled, if any."""
        self.faults += 1
        if self.faults == 1:
            _logger.warning(
                "fastdraft: %s; the requests concerned go on without drafts, and further faults "
                "are only counted",
                what,
                exc_info=sys.exc_info()[0] is not None,
            )


def _text(params: Mapping[str, Any], key: str) -> str | None:
    """A parameter that is a name, None where it is not there. Raises InvalidValueError."""
    value = params.get(key)
    if value is not None and not (isinstance(value, str) and 1 <= len(value) <= _LONGEST_NAME):
        raise InvalidValueError(
            f"{key} must be a text of 1 to {_LONGEST_NAME} characters, got {value!r}"
        )
    return value


def _ids(texts: Iterable[Text]) -> list[Any]:
    """The engine's ids of requests that are drafted for."""
    return [text.request for text in texts]
