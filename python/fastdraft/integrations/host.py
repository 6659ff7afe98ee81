"""What an adapter keeps of a serving stack's requests, whichever stack that is."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np

from fastdraft import Datastore, DraftStats, Engine
from fastdraft.errors import InvalidValueError

__all__ = [
    "LOOKAHEAD",
    "PREDICTION",
    "REMEMBER",
    "SWITCH",
    "UNLIMITED",
    "HostRequests",
    "Memory",
    "Text",
    "longest_draft",
]

PREDICTION: Final = "prediction_token_ids"
"""Among a request's own parameters: the token ids of the text that its caller expects."""
REMEMBER: Final = "fastdraft_remember"
"""Among them too: false keeps the request and the memory of earlier requests apart."""
SWITCH: Final = "fastdraft"
"""Among them too: "off" indexes and drafts nothing for the request."""
LOOKAHEAD: Final = "fastdraft_lookahead"
"""Among them too: the longest draft that the request wants."""
UNLIMITED: Final = int(np.iinfo(np.int32).max)
"""More tokens than there are."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Text:
    """What is known of one request of the host."""

    request: int | None = None
    """Its id at the engine; None where it is not drafted for."""


TextT = TypeVar("TextT", bound=Text)


def longest_draft(params: Mapping[str, Any]) -> int:
    """The longest draft that a request asks for, 0 for none at all.

    Args:
        params: The request's own parameters.

    Raises:
        InvalidValueError: What it has under `SWITCH` or `LOOKAHEAD` is not understood.
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


class Memory:
    """The text of finished requests, a live datastore for each adapter, within one bound.

    What one adapter wrote says little about what another one will write, and may be another
    tenant's. So each adapter has a store of its own, and the model without adapters has one. All
    may grow to an equal share of the bytes; where there are too many for that, those go that no
    request asked for in the longest time.

    Args:
        max_bytes: The most bytes of all stores together; 0 remembers nothing.
        adapters: How many adapters may be at work at once.

    Raises:
        InvalidValueError: The shares are too small to hold anything.
    """

    def __init__(self, max_bytes: int, *, adapters: int = 0) -> None:
        self.max_bytes = max_bytes
        self._share = max_bytes // (1 + adapters)
        # The one that was asked for last stands last.
        self._stores: dict[Hashable, Datastore] = {}
        self.of(None)

    def of(self, adapter: Hashable) -> list[Datastore]:
        """The store of an adapter, or of the model without any for None; none without memory."""
        if not self.max_bytes:
            return []
        store = self._stores.pop(adapter, None)
        if store is None or store.closed:
            store = Datastore(max_bytes=self._share)
        self._stores[adapter] = store
        self.trim()
        return [store]

    def trim(self) -> None:
        """Makes room: to be called when text has entered."""
        while self.bytes > self.max_bytes:
            self._stores.pop(next(iter(self._stores))).close()

    def clear(self) -> None:
        """Forgets everything, and closes the stores."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    @property
    def bytes(self) -> int:
        """The bytes of all stores. O(stores)."""
        return sum(store.bytes for store in self._stores.values())


class HostRequests(Generic[TextT]):
    """The requests of one host at one engine, by the host's names for them.

    Whatever goes wrong in drafting, the host's requests go on: what was met is counted in `faults`,
    the first of it is warned of, and the requests that it was met with are drafted for no more.

    Args:
        engine: What drafts.
        memory: What finished requests leave to later ones.

    Attributes:
        engine: What drafts.
        memory: What finished requests leave to later ones.
        faults: How often something went wrong in drafting.
    """

    def __init__(self, engine: Engine, memory: Memory) -> None:
        self.engine = engine
        self.memory = memory
        self.faults = 0
        self._texts: dict[Hashable, TextT] = {}
        self._finished = DraftStats()
        self._foreign = False

    @property
    def stats(self) -> DraftStats:
        """The counts of all requests, finished and running. O(running requests)."""
        running = (
            self.engine.stats(text.request)
            for text in self._texts.values()
            if text.request is not None
        )
        return sum(running, self._finished)

    @property
    def num_requests(self) -> int:
        """How many requests are known, drafted for or not."""
        return len(self._texts)

    def _note_foreign(self) -> None:
        """Warns once where datastores hold ids that the target does not know: see `num_foreign`."""
        if self.engine.num_foreign and not self._foreign:
            self._foreign = True
            self._fault(
                "a datastore holds tokens beyond the target's vocabulary of "
                f"{self.engine.config.vocabulary}, which are not drafted; is it of another "
                "tokenizer?"
            )

    def _finish(self, text: TextT) -> None:
        """Ends a request that is drafted for."""
        assert text.request is not None
        self._conclude(text, self.engine.finish(text.request))
        self.memory.trim()

    def _conclude(self, text: TextT, stats: DraftStats) -> None:
        """The engine drafts for the request no more; what it did came to `stats`."""
        self._finished += stats

    def _give_up(self, text: TextT) -> None:
        """Leaves the request without drafts from here on."""
        request, text.request = text.request, None
        if request is not None:
            # One that something went wrong with may be gone already, or what keeps its counts be
            # broken; nothing is left to be done about either.
            with contextlib.suppress(Exception):
                stats = self.engine.stats(request)
                self.engine.cancel(request)
                self._conclude(text, stats)

    def _fault(self, what: str = "drafting failed") -> None:
        """Counts what went wrong, and warns of the first, with the exception if one is in hand."""
        self.faults += 1
        if self.faults == 1:
            _logger.warning(
                "fastdraft: %s; the requests that it was met with go on without drafts, and "
                "further faults are only counted",
                what,
                exc_info=sys.exc_info()[0] is not None,
            )
