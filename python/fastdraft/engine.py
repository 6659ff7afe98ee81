"""The drafting engine: requests by id, one at a time or a batch in one call."""

from __future__ import annotations

import contextlib
from enum import IntEnum
from functools import partial
from itertools import starmap
from typing import Any

from fastdraft._core import Draft, DraftBatch, Engine, Offers, Successors
from fastdraft.stats import DraftStats

__all__ = [
    "Draft",
    "DraftBatch",
    "Engine",
    "Offers",
    "Session",
    "Source",
    "Successors",
    "source_name",
]


class Source(IntEnum):
    """The source of a draft token."""

    CONTEXT = 0
    """The request's own text: its prompt and output so far."""
    PREDICTION = 1
    """The request's prediction, whether or not other text agrees with it."""
    DATASTORE = 2
    """A datastore that the request's own text enters: what earlier requests said."""
    READ_ONLY = 3
    """A datastore that it only reads: a frozen one, a corpus, or what a fleet has published."""
    RUNNING = 4
    """Text that another request, which still runs, has written."""
    TEMPLATE = 5
    """A template."""
    NGRAMS = 6
    """The engine's table of n-grams: text that is frequent anywhere."""
    OFFER = 7
    """An offer of the first kind; 7 + i stands for the kind `Engine.offer_kinds[i]`. The engine did
    not find the token itself."""


def source_name(source: int) -> str:
    """The name of a draft token's source; "offer" for those of all kinds of offers."""
    return Source(min(source, Source.OFFER)).name.lower()


class Session(contextlib.AbstractContextManager["Session"]):
    """Requests that end together: those that it added and that have not ended when it closes are
    cancelled, whatever is raised in between, an interrupt too.

    >>> with Session(engine) as session:
    ...     request = session.add_request([1, 2, 3, 1, 2])
    ...     draft = engine.propose(request)
    >>> engine.num_requests
    0

    Only its own requests may be ended through it. It belongs to one thread.

    Args:
        drafter: An `Engine`, or another drafter with `add_request`, `finish` and `cancel`.
    """

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self._requests: list[int] = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_request(self, prompt_ids: Any, **options: Any) -> int:
        """As the drafter's."""
        add = partial(self._drafter.add_request, prompt_ids, **options)
        # No line of Python runs, and no interrupt comes, before the new request is noted.
        self._requests.extend(starmap(add, [()]))
        return self._requests[-1]

    def finish(self, request: int) -> DraftStats:
        """As the drafter's."""
        stats: DraftStats = self._drafter.finish(request)
        self._requests.remove(request)
        return stats

    def cancel(self, request: int) -> None:
        """As the drafter's."""
        self._drafter.cancel(request)
        self._requests.remove(request)

    def close(self) -> None:
        """Cancels the requests that have not ended. Errors of the drafter are not raised: who
        closes a session on an error hears of that one."""
        for request in self._requests:
            with contextlib.suppress(Exception):
                self._drafter.cancel(request)
        self._requests.clear()
