"""vLLM's requests at one engine: how they start, what they leave, and the ledger of their counts.

Both adapters are made of it: the proposer of the V1 model runner, and the speculator of V2.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastdraft import DraftConfig, __version__
from fastdraft.serving.host import HostRequests, Target, Text, host_arguments, report_totals
from fastdraft.serving.ledger import Ledger
from fastdraft.serving.request_options import PREDICTION, UNLIMITED
from fastdraft.serving.vllm.interface import RequestData, VllmConfig, first_rank_group
from fastdraft.serving.vllm.settings import Settings

__all__ = ["SALT", "Request", "Salt", "VllmRequests", "VllmText", "is_first_rank"]

SALT = "fastdraft_cache_salt"
"""In a request's `extra_args`: its `Salt`, put there by the entry point alone."""

_logger = logging.getLogger(__name__)

# The least tokens of output that allow for a draft: the one that comes with the prompt, one of a
# draft and the one that follows it.
_LEAST_ROOM = 3


class Salt(NamedTuple):
    """A request's `cache_salt`. No client can send one: what comes as JSON is no `Salt`."""

    value: str | None


class Request(NamedTuple):
    """A request that can be drafted for, as vLLM knows it."""

    prompt_size: int
    """The tokens of its prompt."""
    params: Mapping[str, Any]
    """Its `extra_args`."""
    max_tokens: int | None
    """The most tokens of its output."""
    adapter: str | None
    """The name of its LoRA adapter, by which vLLM tells adapters apart, in its cache too."""
    stops: frozenset[int]
    """The tokens that end its output. A step may emit more behind one, which vLLM cuts off."""

    def longest(self, max_model_len: int) -> int:
        """The tokens at which its text ends, whatever it says."""
        ends = [max_model_len]
        if self.max_tokens is not None:
            ends.append(self.prompt_size + self.max_tokens)
        return min(ends)

    @classmethod
    def of(cls, request: RequestData) -> Request | None:
        """That of vLLM's own record, a `NewRequestData` or a `CachedRequestState`; None where the
        prompt, or a part of it, is embeddings, which have no tokens to look up."""
        params = request.sampling_params
        if (
            params is None
            or request.prompt_token_ids is None
            or getattr(request, "prompt_is_token_ids", None)
        ):
            return None
        adapter = getattr(request, "lora_request", None)
        stops = (params.eos_token_id, *(params.stop_token_ids or ()))
        return cls(
            len(request.prompt_token_ids),
            getattr(params, "extra_args", None) or {},
            getattr(params, "max_tokens", None),
            None if adapter is None else adapter.lora_name,
            frozenset(stop for stop in stops if stop is not None),
        )


@dataclass(slots=True)
class VllmText(Text):
    """The text of one request."""

    length: int = 0
    """The tokens of it that the engine has."""
    longest: int = UNLIMITED
    """The tokens at which it ends, of prompt and output."""
    stops: frozenset[int] = frozenset()
    """See `Request`."""
    predicts: bool = False


VllmTextT = TypeVar("VllmTextT", bound=VllmText)


class VllmRequests(HostRequests[VllmTextT]):
    """The requests of one vLLM engine.

    Args:
        vllm_config: A `vllm.config.VllmConfig`, and the settings in it.
        config: The drafter's configuration, but for what these say.
        drafts: Whether it drafts at all: not on further ranks of one model.
        in_step: See `HostRequests`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: Settings,
        config: DraftConfig,
        *,
        drafts: bool,
        in_step: bool,
    ) -> None:
        self._model_config = model = vllm_config.model_config
        config = replace(config, vocabulary=int(model.get_vocab_size()))
        target = Target(model.model, model.tokenizer, model.tokenizer_revision)
        rank = vllm_config.parallel_config.data_parallel_rank
        super().__init__(
            **host_arguments(settings, config, target if drafts else None),
            ledger=Ledger.from_environment(engine=rank) if drafts else None,
            own_options=(SALT,),
            in_step=in_step,
        )
        self._warned_of_salts = False
        if self.replica is not None and self._ledger is not None:
            report_totals(self.replica, self._ledger.publish)

    def _start(
        self, text: VllmTextT, request: Request | None, token_ids: NDArray[np.int32], length: int
    ) -> None:
        """Adds a request to the engine, but not its output.

        Args:
            text: Gets what is known of it.
            request: None if it cannot be drafted for.
            token_ids, length: Its text, and the tokens of that.
        """
        if request is None:
            return
        size, params = request.prompt_size, request.params
        text.length = size
        text.longest = request.longest(self._model_config.max_model_len)
        text.stops = request.stops
        self._open_row(text, params)
        if text.longest - length < _LEAST_ROOM:
            return
        self._guard([text], self._add_apart, text, token_ids[:size], request)
        text.predicts = params.get(PREDICTION) is not None and text.is_drafted

    def _add_apart(self, text: VllmTextT, prompt: NDArray[np.int32], request: Request) -> None:
        """Adds a request to those of its salt. Where none is known to be its own, it is apart from
        all others: else a `cache_salt` that is lost on its way would open one tenant's text to
        others."""
        salt = request.params.get(SALT)
        known = isinstance(salt, Salt)
        if not known and not self._warned_of_salts:
            self._warned_of_salts = True
            _logger.warning(
                "fastdraft: this vLLM does not show cache_salt to its drafter, so nothing is "
                "remembered: drafts come from each request's own text and its prediction alone"
            )
        self._add(
            text,
            prompt,
            request.params,
            adapter=request.adapter,
            salt=salt.value if isinstance(salt, Salt) else None,
            apart=not known,
        )

    def announce(self, what: str) -> None:
        """Says once, in vLLM's own log, what drafts, and with which memory. A pooling server has a
        model runner too, but writes no text."""
        if self._model_config.runner_type == "pooling":
            return
        memory = f"{self.memory.max_bytes >> 20} MiB" if self.memory.max_bytes else "none"
        shared = " shared between replicas" if self.replica is not None else ""
        # vLLM shows what its own loggers say.
        logging.getLogger("vllm.fastdraft").info(
            "fastdraft %s drafts: %s, memory: %s%s", __version__, what, memory, shared
        )

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


def is_first_rank() -> bool:
    """True if this worker drafts for all: with tensor parallelism, rank 0 does."""
    try:
        return bool(first_rank_group().is_first_rank)
    except (ImportError, AttributeError, AssertionError):
        return True
