"""The drafting engine: requests by id, one at a time or a batch in one call."""

from __future__ import annotations

from enum import IntEnum

from fastdraft import _core
from fastdraft._core import Draft, DraftBatch
from fastdraft.config import DraftConfig
from fastdraft.stats import DraftStats

__all__ = ["Draft", "DraftBatch", "Engine", "Source"]


class Source(IntEnum):
    """Where a draft token was found."""

    CONTEXT = 0
    """The request's own text: its prompt and output so far."""
    PREDICTION = 1
    """The request's prediction."""


class Engine(_core.Engine):
    """Drafts for any number of requests, and learns from them what to draft.

    One engine serves a process. Calls on different requests may come from several threads at
    once; calls on one request wait for each other. `add_request`, `propose_batch`,
    `observe_batch` and `finish` release the GIL; `propose` and `observe` are too short for that.

    >>> engine = Engine()
    >>> request = engine.add_request([1, 2, 3, 4, 1, 2])
    >>> engine.propose(request, token_cost=0.0, limit=3).tolist()
    [3, 4, 1]
    >>> engine.observe(request, [3, 4, 9])
    >>> engine.finish(request).mean_accepted_tokens
    3.0
    """

    def __init__(self, config: DraftConfig | None = None) -> None:
        """Makes an engine that drafts by `config`, by default `DraftConfig()`."""
        config = DraftConfig() if config is None else config
        if not isinstance(config, DraftConfig):
            raise TypeError(f"config must be a DraftConfig, got {config!r}")
        super().__init__(
            lookahead=config.lookahead,
            token_cost=config.token_cost,
            max_ngram=config.max_ngram or 0,
            max_request_tokens=config.max_request_tokens,
            max_bytes=config.max_bytes,
        )
        self._config = config

    @property
    def config(self) -> DraftConfig:
        """The configuration that the engine was made with."""
        return self._config

    def stats(self, request: int) -> DraftStats:
        """The counts of a running request. Raises UnknownRequestError."""
        return DraftStats(*self._counts(request))

    def finish(self, request: int) -> DraftStats:
        """Ends a request, frees its memory, and returns its counts.

        Raises UnknownRequestError for an id that is not running, so for a second `finish` too.
        """
        return DraftStats(*self._finish(request))

    def cancel(self, request: int) -> None:
        """Ends a request whose output nobody wants, and frees its memory.

        Raises UnknownRequestError for an id that is not running.
        """
        self._finish(request)
