"""llama-cpp-python: drafts for `llama_cpp.Llama`, by its own interface for draft models.

The host calls a draft model once a step with the whole text so far. It names no request, does not
say where one begins or ends, and samples the target at every draft token, so its output is the
target's own. Written for 0.3.36.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from fastdraft import DraftConfig, DraftStats, Engine
from fastdraft.errors import InvalidValueError
from fastdraft.step_cost import StepCost

__all__ = ["FastdraftDraftModel"]

_logger = logging.getLogger(__name__)


class FastdraftDraftModel:
    """Makes a `llama_cpp.Llama` decode speculatively, from now on until `close`.

    >>> llama = llama_cpp.Llama("model.gguf", n_ctx=8192)
    >>> draft_model = FastdraftDraftModel(llama)
    >>> llama.create_chat_completion(messages)
    >>> draft_model.stats.mean_accepted_tokens

    It drafts by the times that llama.cpp measures of its own forwards, so it drafts little or
    nothing where a model and a machine gain nothing by it. Generations with logits processors, so
    those with a `logit_bias` too, are not drafted for: the host shows a processor the whole draft
    as if it were text already.

    Each generation is a request of the engine, which ends where the next one begins, or with
    `finish`; tokens that the host has not shown by then, those after the last draft, are not in
    it. Where drafting fails, the generation goes on without drafts: the first time is logged as a
    warning, `faults` counts them.

    As a `Llama` itself, it is to be used by one thread at a time.
    """

    def __init__(
        self, llama: llama_cpp.Llama, *, drafter: Engine | DraftConfig | None = None
    ) -> None:
        """Takes the place of the Llama's draft model, if it has one.

        The host keeps the logits of all positions when it verifies drafts, but makes room for
        `n_batch` of them, and fails on longer texts. Here it gets room for `n_ctx` positions, of
        4 bytes a vocabulary entry each; memory is taken as far as a text comes.

        Args:
            llama: The model, made in any way.
            drafter: What drafts, by default `DraftConfig()`. An engine may serve other models of
                the same tokenizer too, and may have datastores: finished generations enter the
                live ones.

        Raises:
            TypeError: Not a Llama, or not a drafter.
            InvalidValueError: A model with recurrent state, which cannot be taken back to the
                tokens that were accepted; a Llama that does not measure its times; or a drafter
                of trees, which the host cannot verify.
        """
        if not isinstance(llama, llama_cpp.Llama):
            raise TypeError(f"llama must be a llama_cpp.Llama, got {llama!r}")
        if not isinstance(drafter, (Engine, DraftConfig, type(None))):
            raise TypeError(f"drafter must be an Engine or a DraftConfig, got {drafter!r}")
        engine = drafter if isinstance(drafter, Engine) else _engine(drafter, llama.n_vocab())
        if engine.config.tree_budget is not None:
            raise InvalidValueError(
                "llama-cpp-python verifies chains only: tree_budget must be None, got "
                f"{engine.config.tree_budget}"
            )
        for kind, has_it in (
            ("recurrent", llama_cpp.llama_model_is_recurrent),
            ("hybrid", llama_cpp.llama_model_is_hybrid),
        ):
            if has_it(llama.model):
                raise InvalidValueError(
                    "drafts need a model with a key-value cache alone, whose rejected tokens can "
                    f"be taken back; got a {kind} model, {llama.model_path!r}"
                )
        if llama.context_params.no_perf:
            raise InvalidValueError(
                "drafts are chosen by the times that llama.cpp measures: no_perf must be False, "
                "got True"
            )
        self._engine = engine
        self._cost = StepCost.of(llama, _device_type(llama))
        self._context = llama.ctx
        self._n_batch: int = llama.n_batch
        self._request: int | None = None
        self._prediction: NDArray[np.int32] | None = None
        self._finished = DraftStats()
        self._latest = DraftStats()
        self._faults = 0
        # The text that the host showed last, and what it was answered with.
        self._text: NDArray[np.int32] = np.zeros(len(llama.input_ids), dtype=np.int32)
        self._length = 0
        self._drafted = 0
        self._milliseconds = 0.0

        # Weakly, since the Llama holds this object.
        self._llama = weakref.ref(llama)
        self._replaced = (llama.draft_model, llama._logits_all)
        llama.draft_model = self
        llama._logits_all = True
        if len(llama.scores) < llama.n_ctx():
            llama.scores = np.empty((llama.n_ctx(), llama.n_vocab()), dtype=np.single)

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """The draft for the next step; the host calls this.

        O(emitted tokens), besides a comparison of the text with the one shown before, and a new
        generation's prompt.

        Args:
            input_ids: The whole text, prompt and output, of shape (tokens,).

        Returns:
            The draft, of shape (drafted,), empty where nothing is worth it.
        """
        milliseconds = self._forward_milliseconds()
        draft = np.empty(0, dtype=np.intc)
        try:
            if not self._goes_on(input_ids):
                self._begin(input_ids)
            elif self._request is not None:
                seconds = (milliseconds - self._milliseconds) / 1e3
                self._cost.observe(1, 1 + self._drafted, seconds)
                self._engine.observe(self._request, input_ids[self._length :])
            if self._request is not None:
                draft = self._propose(self._request, len(input_ids))
        except Exception:
            self._give_up()
        self._text[self._length : len(input_ids)] = input_ids[self._length :]
        self._length = len(input_ids)
        self._drafted = len(draft)
        self._milliseconds = milliseconds
        return draft

    def predict(self, prediction: str | Sequence[int] | NDArray[np.integer] | None) -> None:
        """Tells what the output of the next generation is expected to be; it need not be exact.

        Args:
            prediction: The text, or its token ids; None takes back what was told before.

        Raises:
            InvalidValueError: Not text and not a row of token ids.
            RequestLimitError, MemoryLimitError: It is too long.
        """
        if prediction is None:
            self._prediction = None
            return
        token_ids = self._tokenize(prediction) if isinstance(prediction, str) else prediction
        # Checked now, since the generation could only go on without it.
        self._engine.cancel(self._engine.add_request([], prediction=token_ids))
        self._prediction = np.array(token_ids, dtype=np.int32)

    @property
    def stats(self) -> DraftStats:
        """The counts over all generations, the running one included."""
        return self._finished + self._running()

    @property
    def latest_stats(self) -> DraftStats:
        """The counts of the generation that began last."""
        return self._latest if self._request is None else self._running()

    @property
    def faults(self) -> int:
        """The generations that went on without drafts after an error."""
        return self._faults

    def finish(self) -> None:
        """Ends the latest generation: its text enters the engine's live datastores.

        Otherwise it ends where the next one begins. Does nothing where none is running.
        """
        request, self._request = self._request, None
        self._length = 0
        if request is not None:
            self._latest = self._engine.finish(request)
            self._finished += self._latest

    def close(self) -> None:
        """Ends the latest generation; the Llama decodes again as it did before."""
        self.finish()
        llama = self._llama()
        if llama is not None and llama.draft_model is self:
            llama.draft_model, llama._logits_all = self._replaced

    def _goes_on(self, input_ids: NDArray[np.intc]) -> bool:
        """Whether the text is the one shown before and what a step emitted."""
        emitted = len(input_ids) - self._length
        return (
            self._length > 0
            and 1 <= emitted <= 1 + self._drafted
            and np.array_equal(input_ids[: self._length], self._text[: self._length])
        )

    def _begin(self, input_ids: NDArray[np.intc]) -> None:
        prediction, self._prediction = self._prediction, None
        self.finish()
        # The host first calls after the first token.
        self._request = self._engine.add_request(input_ids[:-1], prediction=prediction)
        self._engine.observe(self._request, input_ids[-1:])

    def _propose(self, request: int, length: int) -> NDArray[np.intc]:
        # Draft and last token have to fit into one batch: of others, logits are gone.
        limit = min(len(self._text) - length, self._n_batch - 1)
        if self._has_processors() or self._cost.wants_plain_step(1):
            limit = 0
        cost = self._cost.seconds_by_tokens(1)
        return self._engine.propose(request, limit=limit, cost=cost).token_ids

    def _has_processors(self) -> bool:
        llama = self._llama()
        return llama is not None and bool(llama._sampler.custom_samplers)

    def _give_up(self) -> None:
        """Goes on without drafts until the next generation."""
        if not self._faults:
            _logger.warning("drafting failed, the generation goes on without", exc_info=True)
        self._faults += 1
        with contextlib.suppress(Exception):
            self._latest = self._running()
            self._finished += self._latest
            if self._request is not None:
                self._engine.cancel(self._request)
        self._request = None

    def _running(self) -> DraftStats:
        return DraftStats() if self._request is None else self._engine.stats(self._request)

    def _tokenize(self, text: str) -> NDArray[np.int32]:
        llama = self._llama()
        if llama is None:
            raise InvalidValueError("text needs the Llama, which is gone; give token ids")
        return np.array(llama.tokenize(text.encode(), add_bos=False), dtype=np.int32)

    def _forward_milliseconds(self) -> float:
        """What all forwards so far took together, without sampling and the caller's own work."""
        times = llama_cpp.llama_perf_context(self._context)
        return float(times.t_eval_ms + times.t_p_eval_ms)


def _engine(config: DraftConfig | None, vocabulary: int) -> Engine:
    """An engine for a target of so many tokens: llama.cpp ends a generation over others."""
    config = DraftConfig() if config is None else config
    if config.vocabulary is None:
        config = dataclasses.replace(config, vocabulary=vocabulary)
    return Engine(config)


def _device_type(llama: llama_cpp.Llama) -> str:
    offloaded = llama_cpp.llama_supports_gpu_offload() and llama.model_params.n_gpu_layers != 0
    return "cuda" if offloaded else "cpu"


LlamaDraftModel.register(FastdraftDraftModel)
