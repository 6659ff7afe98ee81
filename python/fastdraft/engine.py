"""The drafting engine: requests by id, one at a time or a batch in one call."""

from __future__ import annotations

from enum import IntEnum

from fastdraft._core import Draft, DraftBatch, Engine

__all__ = ["Draft", "DraftBatch", "Engine", "Source"]


class Source(IntEnum):
    """Where a draft token was found."""

    CONTEXT = 0
    """The request's own text: its prompt and output so far."""
    PREDICTION = 1
    """The request's prediction, whether or not other text agrees with it."""
    DATASTORE = 2
    """A datastore."""
