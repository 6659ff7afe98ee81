"""What an adapter keeps of a serving stack's requests, whichever stack that is."""

from __future__ import annotations

import contextlib
import logging
import reprlib
import sys
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastdraft import DraftStats, Engine
from fastdraft.errors import InvalidValueError

__all__ = ["PREDICTION", "REMEMBER", "UNLIMITED", "HostRequests", "Text"]

PREDICTION: Final = "prediction_token_ids"
"""Among a request's own parameters: the token ids of the text that its caller expects."""
REMEMBER: Final = "fastdraft_remember"
"""Among them too: false keeps the request and the memory of earlier requests apart."""
UNLIMITED: Final = int(np.iinfo(np.int32).max)
"""More tokens, and larger ids of them, than there are."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Text:
    """What is known of one request of the host."""

    request: int | None = None
    """Its id at the engine; None where it is not drafted for."""


TextT = TypeVar("TextT", bound=Text)


class HostRequests(Generic[TextT]):
    """The requests of one host at one engine, by the host's names for them.

    Whatever goes wrong in drafting, the host's requests go on: what was met is counted in `faults`,
    the first of it is warned of, and the requests that it was met with are drafted for no more.

    Args:
        engine: What drafts.
        vocabulary: The tokens that the target knows. A GPU would end the process over others.

    Attributes:
        engine: What drafts.
        vocabulary: The tokens that the target knows.
        faults: How often something went wrong in drafting.
    """

    def __init__(self, engine: Engine, *, vocabulary: int = UNLIMITED) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.faults = 0
        self._texts: dict[Hashable, TextT] = {}
        self._finished = DraftStats()

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

    def _prediction(self, given: Any) -> NDArray[np.int64] | None:
        """What a request has under `PREDICTION`. Raises InvalidValueError."""
        if given is None:
            return None
        try:
            token_ids = np.asarray(given)
        except ValueError:
            # Lists of several lengths.
            token_ids = np.empty((0, 0))
        if token_ids.ndim != 1 or (len(token_ids) and token_ids.dtype.kind not in "iu"):
            raise InvalidValueError(
                f"{PREDICTION} must be a list of integers, got {reprlib.repr(given)}"
            )
        if token_ids.max(initial=0) >= self.vocabulary:
            raise InvalidValueError(
                f"{PREDICTION} must be below the vocabulary's {self.vocabulary}, got "
                f"{token_ids.max()}"
            )
        return token_ids.astype(np.int64)

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
