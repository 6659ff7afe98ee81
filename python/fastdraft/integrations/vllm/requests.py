"""vLLM's requests at one engine: how they start, what they leave, and the ledger of their counts.

Both adapters are made of it: the proposer of the V1 model runner, and the speculator of V2.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastdraft import Datastore, DraftConfig, DraftStats, Engine, Memory
from fastdraft.integrations.host import (
    PREDICTION,
    UNLIMITED,
    HostRequests,
    Text,
    share,
    watch,
)
from fastdraft.integrations.vllm.ledger import Ledger
from fastdraft.integrations.vllm.rows import Request
from fastdraft.integrations.vllm.settings import Settings

__all__ = ["SALT", "TICKET", "VllmRequests", "VllmText", "is_first_rank"]

TICKET = "prediction_ticket"
"""In a request's `extra_args`: under what the ledger notes what became of the prediction."""

SALT = "fastdraft_cache_salt"
"""In a request's `extra_args`: its `cache_salt`, put there by the entry point alone."""

# The least tokens of output that allow for a draft: the one that comes with the prompt, one of a
# draft and the one that follows it.
_LEAST_ROOM = 3


@dataclass(slots=True)
class VllmText(Text):
    """What is known of one request."""

    length: int = 0
    """The tokens of it that the engine has."""
    longest: int = UNLIMITED
    """The tokens at which it ends, of prompt and output."""
    predicts: bool = False
    row: int | None = None
    """Its row in the ledger."""


VllmTextT = TypeVar("VllmTextT", bound=VllmText)


class VllmRequests(HostRequests[VllmTextT]):
    """The requests of one vLLM engine.

    Args:
        vllm_config: A `vllm.config.VllmConfig`.
        settings: Those in it.
        config: The drafter's configuration, but for what the settings and the model say.
        drafts: Whether it drafts at all: not on further ranks of one model.
    """

    def __init__(
        self, vllm_config: Any, settings: Settings, config: DraftConfig, *, drafts: bool
    ) -> None:
        self._model_config = vllm_config.model_config
        frozen = [Datastore.open(path) for path in settings.datastores]
        vocabulary = int(self._model_config.get_vocab_size())
        config = replace(config, max_bytes=settings.max_bytes, vocabulary=vocabulary)
        parallel = getattr(vllm_config, "parallel_config", None)
        rank = getattr(parallel, "data_parallel_rank", 0)
        memory = Memory(settings.memory_bytes)
        replica = None
        # A folder of this machine is a fleet of the engines here, whenever they run.
        url = settings.memory_folder if settings.fleet_url is None else settings.fleet_url
        if url is not None and drafts and settings.memory_bytes:
            model = str(getattr(self._model_config, "model", ""))
            replica = share(
                memory,
                url,
                model=model,
                tokenizer=str(getattr(self._model_config, "tokenizer", model)),
                revision=getattr(self._model_config, "tokenizer_revision", None),
            )
        engine = Engine(config, datastores=frozen)
        super().__init__(engine, memory, frozen, shared=settings.shared_namespaces, replica=replica)
        self._ledger = Ledger.from_environment(engine=rank) if drafts else None
        if replica is not None and self._ledger is not None:
            watch(replica, self._ledger.publish)

    def _start(
        self, text: VllmTextT, request: Request | None, token_ids: NDArray[np.int32], length: int
    ) -> None:
        """Adds a request to the engine, but not its output.

        Args:
            text: What is known of it.
            request: What vLLM knows; None if it cannot be drafted for.
            token_ids: Its text.
            length: The tokens of it.
        """
        if request is None:
            return
        size, params = request.prompt_size, request.params
        text.length = size
        text.longest = self._model_config.max_model_len
        if request.max_tokens is not None:
            text.longest = min(text.longest, size + request.max_tokens)
        predicts = params.get(PREDICTION) is not None
        if predicts and self._ledger is not None:
            text.row = self._ledger.open(params.get(TICKET))
        if text.longest - length < _LEAST_ROOM:
            return
        add = functools.partial(self._add, adapter=request.adapter, salt=params.get(SALT))
        self._guard([text], add, text, token_ids[:size], params)
        text.predicts = predicts and text.request is not None

    def _publish(self) -> None:
        """Writes the counts of predictions and the totals into the ledger. O(requests)."""
        if self._ledger is None:
            return
        stats = self._finished
        for text in self._texts.values():
            if text.predicts and text.request is not None:
                running = self.engine.stats(text.request)
                stats += running
                self._record(text, running)
        self._ledger.publish(self.totals(stats))

    def _end(self, keys: Iterable[Hashable]) -> None:
        ended = [self._texts[key] for key in keys if key in self._texts]
        super()._end(keys)
        for text in ended:
            self._close(text)

    def _close(self, text: VllmTextT) -> None:
        """Ends a request's row in the ledger."""
        if text.row is not None and self._ledger is not None:
            self._ledger.close(text.row)

    def _conclude(self, text: VllmTextT, stats: DraftStats) -> None:
        super()._conclude(text, stats)
        self._record(text, stats)

    def _record(self, text: VllmTextT, stats: DraftStats) -> None:
        if text.row is not None and self._ledger is not None:
            self._ledger.record(
                text.row, stats.accepted_prediction_tokens, stats.rejected_prediction_tokens
            )


def is_first_rank() -> bool:
    """Whether this worker drafts for all: with tensor parallelism, rank 0 does."""
    try:
        from vllm.distributed.parallel_state import get_tp_group

        return bool(get_tp_group().is_first_rank)
    except (ImportError, AttributeError, AssertionError):
        return True
