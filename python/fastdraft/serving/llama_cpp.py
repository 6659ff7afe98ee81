"""llama-cpp-python: drafts for `llama_cpp.Llama`, by its own interface for draft models.

The host calls a draft model once a step with the whole text so far. It does not say where a request
begins or ends. It samples the target at every draft token, so its output is the target's own.
Written for 0.3.36.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from fastdraft import DraftConfig, DraftStats, Engine, Memory
from fastdraft.errors import InvalidValueError
from fastdraft.serving.handover import ASKED, Asked
from fastdraft.serving.host import HostRequests, Text
from fastdraft.serving.request_options import MOST_IDS, NAMESPACE, PREDICTION
from fastdraft.step_latency import StepLatency

__all__ = ["FastdraftDraftModel"]


class FastdraftDraftModel(HostRequests[Text]):
    """Makes a `llama_cpp.Llama` decode speculatively, from now on until `close`.

    >>> llama = llama_cpp.Llama("model.gguf", n_ctx=8192)
    >>> draft_model = FastdraftDraftModel(llama)
    >>> llama.create_chat_completion(messages)
    >>> draft_model.stats.mean_accepted_tokens

    It uses the times that llama.cpp measures of its own forwards, so it drafts little or nothing
    where that gains nothing. Generations with logits processors, and so those with a `logit_bias`,
    get no drafts: the host shows a processor the whole draft as if it were text already.

    Each generation is a request of the engine. It ends when the next one begins, or with `finish`;
    tokens after its last draft, which the host has not shown by then, are not part of it. After a
    drafting error the generation goes on without drafts: the first is logged as a warning, `faults`
    counts all.

    Like a `Llama`, it must be used by one thread at a time.

    Attributes:
        namespace: The name of those whose text the next generations share, where there is a memory.
    """

    def __init__(
        self,
        llama: llama_cpp.Llama,
        *,
        drafter: Engine | DraftConfig | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Replaces the Llama's draft model, if it has one.

        Works around a llama-cpp-python bug with texts longer than `n_batch`: it keeps the logits
        of all positions when it verifies drafts, but has room for `n_batch` of them. Here it gets
        room for `n_ctx` positions, of 4 bytes a vocabulary entry each; only the part that texts
        reach uses memory.

        Args:
            llama: The model, made in any way.
            drafter: What drafts, by default `DraftConfig()`. An engine may serve other models of
                the same tokenizer too, and may have datastores: finished generations enter the
                live ones.
            memory: Where finished generations are remembered, instead of in the engine's
                datastores; each sees those of its `namespace` alone.

        Raises:
            TypeError: Not a Llama, not a drafter, or not a memory.
            InvalidValueError: A model with recurrent state, a Llama that does not measure its
                times, or a drafter of trees, which the host cannot verify.
        """
        if not isinstance(llama, llama_cpp.Llama):
            raise TypeError(f"llama must be a llama_cpp.Llama, got {llama!r}")
        if not isinstance(drafter, (Engine, DraftConfig, type(None))):
            raise TypeError(f"drafter must be an Engine or a DraftConfig, got {drafter!r}")
        if not isinstance(memory, (Memory, type(None))):
            raise TypeError(f"memory must be a Memory, got {memory!r}")
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
        # There is no other row that would wait for a long prompt.
        super().__init__(engine, Memory(0) if memory is None else memory, in_step=True)
        self.namespace: str | None = None
        self._cost = StepLatency.of(llama, _device_type(llama))
        self._context = llama.ctx
        self._n_batch: int = llama.n_batch
        self._prediction: NDArray[np.int32] | None = None
        self._latest = DraftStats()
        self._asked: Asked | None = None
        # The text that the host showed last, and the size of the draft that it got.
        self._shown: NDArray[np.int32] = np.zeros(len(llama.input_ids), dtype=np.int32)
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
        """The draft for the next step of the whole text, prompt and output; the host calls this.

        O(emitted tokens), besides a comparison of the text with the one shown before, and a new
        generation's prompt.
        """
        milliseconds = self._forward_milliseconds()
        draft = self._guard(self._texts.values(), self._step, input_ids, milliseconds)
        if draft is None:
            draft = np.empty(0, dtype=np.intc)
        self._shown[self._length : len(input_ids)] = input_ids[self._length :]
        self._length = len(input_ids)
        self._drafted = len(draft)
        self._milliseconds = milliseconds
        return draft

    def predict(self, prediction: str | Sequence[int] | NDArray[np.integer] | None) -> None:
        """Sets the text that the next generation is expected to be; it need not be exact.

        Args:
            prediction: The text, or its token ids; None takes an earlier one back.

        Raises:
            InvalidValueError: Not text and not a row of token ids.
            RequestLimitError, MemoryLimitError: It is too long.
        """
        if prediction is None:
            self._prediction = None
            return
        token_ids = self._tokenize(prediction) if isinstance(prediction, str) else prediction
        # Checked now, since the generation could only go on without it.
        self.engine.cancel(self.engine.add_request([], prediction=token_ids))
        self._prediction = np.array(token_ids, dtype=np.int32)

    @property
    def latest_stats(self) -> DraftStats:
        """The counts of the generation that began last."""
        running = [text.request for text in self._texts.values() if text.request is not None]
        return self.engine.stats(running[0]) if running else self._latest

    def finish(self) -> None:
        """Ends the latest generation: its text enters the engine's live datastores.

        Otherwise it ends when the next one begins. Does nothing where none is running.
        """
        self._length = 0
        self._end([None])

    def close(self) -> None:
        """Ends the latest generation; the Llama decodes again as it did before."""
        self.finish()
        llama = self._llama()
        if llama is not None and llama.draft_model is self:
            llama.draft_model, llama._logits_all = self._replaced

    def _goes_on(self, input_ids: NDArray[np.intc]) -> bool:
        """True if the text is the last one shown and the tokens that a step emitted."""
        emitted = len(input_ids) - self._length
        return (
            self._length > 0
            and 1 <= emitted <= 1 + self._drafted
            and np.array_equal(input_ids[: self._length], self._shown[: self._length])
        )

    def _step(self, input_ids: NDArray[np.intc], milliseconds: float) -> NDArray[np.intc] | None:
        """Passes on what the last step emitted; the draft for the next, if there is any."""
        if self._goes_on(input_ids):
            text, emitted = self._texts[None], input_ids[self._length :]
            if text.request is None:
                return None
            seconds = (milliseconds - self._milliseconds) / 1e3
            self._cost.observe(1, 1 + self._drafted, seconds)
        else:
            # The host first calls after the first token.
            text, emitted = self._begin(input_ids[:-1]), input_ids[-1:]
        self._observe([text], emitted, [0, len(emitted)])
        if text.request is None:
            return None
        self._tell(self.engine.stats(text.request))
        # Draft and last token must fit into one batch: of longer ones, logits are lost.
        limit = min(len(self._shown) - len(input_ids), self._n_batch - 1, text.lookahead)
        if self._has_processors() or self._cost.wants_plain_step(1):
            limit = 0
        return self._propose([text], [limit], self._cost.seconds_by_tokens(1)).token_ids

    def _begin(self, prompt: NDArray[np.intc]) -> Text:
        params = {PREDICTION: self._prediction, NAMESPACE: self.namespace}
        self._prediction = None
        self.finish()
        self._asked = asked = ASKED.get()
        if asked is not None:
            params = dict(asked.params)
            if asked.prediction is not None:
                params[PREDICTION] = self._tokenize(asked.prediction)[:MOST_IDS]
        self._latest = DraftStats()
        text = self._texts[None] = Text()
        if self.memory.max_bytes or asked is not None:
            self._add(text, prompt, params)
        else:
            text.request = self.engine.add_request(prompt, prediction=params[PREDICTION])
        return text

    def _conclude(self, text: Text, stats: DraftStats) -> None:
        super()._conclude(text, stats)
        self._latest = stats
        self._tell(stats)

    def _tell(self, stats: DraftStats) -> None:
        """Tells the server's front what became of the prediction so far."""
        if self._asked is not None:
            counts = stats.accepted_prediction_tokens, stats.rejected_prediction_tokens
            self._asked.counts = counts

    def _has_processors(self) -> bool:
        llama = self._llama()
        return llama is not None and bool(llama._sampler.custom_samplers)

    def _tokenize(self, text: str) -> NDArray[np.int32]:
        llama = self._llama()
        if llama is None:
            raise InvalidValueError("text needs the Llama, which is gone; give token ids")
        return np.array(llama.tokenize(text.encode(), add_bos=False), dtype=np.int32)

    def _forward_milliseconds(self) -> float:
        """The time of all forwards so far, without sampling and the caller's own work."""
        times = llama_cpp.llama_perf_context(self._context)
        return float(times.t_eval_ms + times.t_p_eval_ms)


def _engine(config: DraftConfig | None, vocabulary: int) -> Engine:
    """An engine that drafts no token beyond the vocabulary: llama.cpp fails on such tokens."""
    config = DraftConfig() if config is None else config
    if config.vocabulary is None:
        config = dataclasses.replace(config, vocabulary=vocabulary)
    return Engine(config)


def _device_type(llama: llama_cpp.Llama) -> str:
    offloaded = llama_cpp.llama_supports_gpu_offload() and llama.model_params.n_gpu_layers != 0
    return "cuda" if offloaded else "cpu"


LlamaDraftModel.register(FastdraftDraftModel)
