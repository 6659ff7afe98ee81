"""The drafting engine: requests by id, one at a time or a batch in one call."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from fastdraft import _core
from fastdraft._core import Draft, DraftBatch
from fastdraft.calibration import Calibration, calibration_of, set_calibration
from fastdraft.config import DraftConfig
from fastdraft.datastore import Datastore
from fastdraft.stats import DraftStats

__all__ = ["Draft", "DraftBatch", "Engine", "Source"]


class Source(IntEnum):
    """Where a draft token was found."""

    CONTEXT = 0
    """The request's own text: its prompt and output so far."""
    PREDICTION = 1
    """The request's prediction, be it that other text says the same."""
    DATASTORE = 2
    """A datastore."""


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

    def __init__(
        self,
        config: DraftConfig | None = None,
        *,
        datastores: Sequence[Datastore] = (),
        calibration: Calibration | None = None,
    ) -> None:
        """Makes an engine.

        Args:
            config: How it drafts, by default `DraftConfig()`.
            datastores: What requests are drafted from besides their own text, where they are given
                no datastores of their own. A finished request's text enters the live ones. Other
                engines may share them. Only the default drafter draws on them.
            calibration: What an earlier engine learned, to begin with instead of the prior.

        Raises:
            InvalidValueError: Datastores of two tokenizers, or a calibration for a drafter that
                learns nothing.
            DatastoreClosedError: A datastore is closed.
        """
        config = DraftConfig() if config is None else config
        if not isinstance(config, DraftConfig):
            raise TypeError(f"config must be a DraftConfig, got {config!r}")
        super().__init__(
            lookahead=config.lookahead,
            tree_budget=config.tree_budget or 0,
            token_cost=config.token_cost,
            max_ngram=config.max_ngram or 0,
            ngram_order=config.ngram_order or 0,
            min_probability=config.min_probability or 0.0,
            recovery=config.recovery or 0,
            max_request_tokens=config.max_request_tokens,
            max_bytes=config.max_bytes,
            vocabulary=config.vocabulary,
            datastores=datastores,
        )
        self._config = config
        if calibration is not None:
            set_calibration(self, calibration)

    @property
    def config(self) -> DraftConfig:
        """The configuration that the engine was made with."""
        return self._config

    def calibration(self) -> Calibration:
        """What the engine has learned so far, from all its requests.

        Raises InvalidValueError where the drafter learns nothing: all but the default one.
        """
        return calibration_of(self)

    def stats(self, request: int) -> DraftStats:
        """The counts of a running request. Raises UnknownRequestError."""
        return DraftStats(*self._counts(request))

    def finish(self, request: int) -> DraftStats:
        """Ends a request, frees its memory, and returns its counts.

        Its prompt and output enter the live datastores that it was given; one that was closed
        meanwhile is left out. Raises UnknownRequestError for an id that is not running, so for a
        second `finish` too.
        """
        return DraftStats(*self._finish(request))
