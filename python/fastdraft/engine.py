"""The drafting engine: requests by id, one at a time or a batch in one call."""

from __future__ import annotations

from enum import IntEnum

from fastdraft._core import Draft, DraftBatch, Engine, Offers, Successors

__all__ = ["Draft", "DraftBatch", "Engine", "Offers", "Source", "Successors", "source_name"]


class Source(IntEnum):
    """Where a draft token was found."""

    CONTEXT = 0
    """The request's own text: its prompt and output so far."""
    PREDICTION = 1
    """The request's prediction, whether or not other text agrees with it."""
    DATASTORE = 2
    """A datastore that the request's own text enters: what earlier requests said."""
    READ_ONLY = 3
    """A datastore that it only reads: a frozen one, a corpus, or what a fleet has published."""
    RUNNING = 4
    """What another request, which still runs, has written."""
    TEMPLATE = 5
    """A template."""
    OFFER = 6
    """An offer of the first kind; 6 + i stands for the kind `Engine.offer_kinds[i]`. The engine did
    not find the token itself."""


def source_name(source: int) -> str:
    """The name of a draft token's source; "offer" for those of all kinds of offers."""
    return Source(min(source, Source.OFFER)).name.lower()
