"""vLLM's `custom_class` proposer: its rows become requests of one engine.

Once a step vLLM passes the rows of its batch with the tokens that each emitted, and takes drafts.
It does not say which row belongs to which request. The model runner knows, and the entry point in
`plugin` attaches it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft import DraftConfig
from fastdraft.errors import InvalidValueError
from fastdraft.serving.settings import COMMON_NGRAMS
from fastdraft.serving.vllm.interface import SpeculativeConfig, VllmConfig, captured_sizes
from fastdraft.serving.vllm.requests import Request, VllmRequests, VllmText, is_first_rank
from fastdraft.serving.vllm.settings import Settings
from fastdraft.serving.vllm.v1 import interface as v1
from fastdraft.serving.vllm.v1.step_times import StepTimes, seconds_of_a_line

__all__ = ["FastdraftProposer"]


@dataclass(slots=True)
class _Text(VllmText):
    scheduled: int = 0
    """The tokens that its next forward is to have, its draft included; 0 for a prompt's."""
    least: int = 0
    """The tokens of it before which vLLM lets it not end."""

    def limit(self) -> int:
        """The longest draft after which vLLM's V1 samples as it would without one.

        One token follows every draft, and must have room too. vLLM masks what would end a text in
        that token by the length before the draft, so the draft may not cross `least`.
        """
        end = self.longest
        if self.length < self.least < end:
            end = self.least
        room = end - self.length - 1
        return min(room, self.lookahead) if room > 0 else 0


class FastdraftProposer(VllmRequests[_Text]):
    """Drafts for one vLLM engine whose model runner is V1: see `method`.

    Not thread-safe: vLLM calls it from the thread that runs the model.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Makes a proposer of a `vllm.config.VllmConfig`, as vLLM does.

        Raises:
            InvalidValueError: An option is unknown or has a bad value, or vLLM is set up in a way
                that drafts cannot serve.
            DatastoreError: A datastore cannot be opened.
        """
        settings = Settings.of(vllm_config)
        settings.check(vllm_config, v2=False)
        speculative: SpeculativeConfig = vllm_config.speculative_config
        self._lookahead = int(speculative.num_speculative_tokens)
        config = DraftConfig(lookahead=self._lookahead, objective=settings.objective)
        if settings.token_cost is not None:
            config = replace(config, token_cost=settings.token_cost)
        # If each rank schedules for itself, all must draft the same, and their clocks differ.
        backend = vllm_config.parallel_config.distributed_executor_backend
        together = backend == "external_launcher"
        self._drafts = together or is_first_rank()
        if together and settings.ngrams == COMMON_NGRAMS:
            settings = replace(settings, ngrams=None)  # one of their machines may fail to make it
        super().__init__(vllm_config, settings, config, drafts=self._drafts, in_step=together)
        self._times = None
        if settings.token_cost is None and not together:
            sizes, even_graphs = captured_sizes(vllm_config)
            device_type = vllm_config.device_config.device_type
            vocabulary = int(vllm_config.model_config.get_vocab_size())
            self._times = StepTimes(
                device_type,
                sizes,
                even_graphs=even_graphs,
                line_seconds=seconds_of_a_line(device_type, vocabulary),
            )
        self._runner: v1.GPUModelRunner | None = None
        # The draft tokens of the last forward, by request id.
        self._verified: Mapping[str, Sequence[int]] = {}
        self._ended_at = 0.0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads nothing: there is no draft model.

        Raises:
            InvalidValueError: Nobody has called `attach`.
        """
        if self._runner is None:
            raise InvalidValueError(
                "fastdraft's entry point must be loaded in vLLM's workers: the method has to be "
                "'fastdraft', and VLLM_PLUGINS, if it is set, has to name fastdraft, got "
                f"{os.environ.get('VLLM_PLUGINS')!r}"
            )

    def attach(self, runner: v1.GPUModelRunner) -> None:
        """Takes request ids, parameters and ends from the V1 `GPUModelRunner` that owns it.

        Raises:
            AttributeError: The runner lacks what is needed.
        """
        # Looked up once here, so that a changed runner shows before the first request.
        runner.input_batch.req_ids, runner.input_batch.num_logprobs, runner.requests.keys()
        execute = runner.execute_model
        self._runner = runner
        if self._drafts:
            self.announce(f"Model Runner V1, drafts of up to {self._lookahead} tokens")

        @functools.wraps(execute)
        def execute_model(scheduler_output: v1.SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
            # `propose` is not called for the last request's end, nor before an id comes again.
            if scheduler_output.finished_req_ids:
                self._guard(self._texts.values(), self._end, scheduler_output.finished_req_ids)
                self._guard(self._texts.values(), self._publish)
            if scheduler_output.num_scheduled_tokens and self._times is not None:
                self._times.add_forward(scheduler_output.num_scheduled_tokens)
            self._verified = scheduler_output.scheduled_spec_decode_tokens
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model
        # Otherwise the runner drafts zeros for all rows as soon as one is near its end. Here the
        # limit is known row by row.
        runner._input_fits_in_drafter = lambda metadata: metadata is not None

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> list[list[int]]:
        """The drafts of the next step.

        Args:
            sampled_token_ids: For each row the tokens that it emitted; none where it is still at
                its prompt.
            num_tokens_no_spec: (rows or more,), the tokens of each row's text, the emitted ones
                included.
            token_ids_cpu: (rows or more, longest text), the texts. Read during the call alone.

        Returns:
            For each row its draft, of at most `num_speculative_tokens` tokens, and never more than
            what remains up to the model's longest text and the request's `max_tokens`.

        One call of the engine for what was emitted and one for the drafts; O(emitted + drafted
        tokens), and O(text) for a request's first.
        """
        started = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._drafts:
            return drafts
        waited = started - self._ended_at
        step = (drafts, waited, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        self._guard(self._texts.values(), self._step, *step)
        self._ended_at = time.perf_counter()
        self._steps += 1
        self._seconds += self._ended_at - started
        if self._ledger is not None:
            self._guard(self._texts.values(), self._publish)
        return drafts

    def _step(
        self,
        drafts: list[list[int]],
        seconds: float,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids: NDArray[np.int32],
    ) -> None:
        lengths = num_tokens_no_spec[: len(drafts)].tolist()
        assert self._runner is not None
        batch, requests = self._runner.input_batch, self._runner.requests
        request_ids, asks = batch.req_ids, bool(batch.num_logprobs)
        gone = self._texts.keys() - requests.keys()
        if gone or self._waiting:
            self._end(gone)
        decoded: dict[str, int] = {}
        live: list[_Text] = []
        rows: list[int] = []
        emitted: list[int] = []
        offsets, verified = [0], list[int]()
        # One loop: at many rows it is most of what a step takes.
        for row, sampled in enumerate(sampled_token_ids):
            if not sampled:
                continue
            key, end = request_ids[row], lengths[row]
            begin = end - len(sampled)
            text = self._texts.get(key)
            if text is not None and text.length > begin and text.is_drafted:
                # The host took tokens back, which the engine cannot.
                self._end([key])
                text = None
            if text is None:
                text = self._begin(key, requests[key], token_ids[row], begin)
            elif text.scheduled > 0 and text.length == begin:
                decoded[key] = text.scheduled
            if text.request is not None:
                live.append(text)
                rows.append(row)
                known = text.length == begin
                said = sampled if known else token_ids[row, text.length : end].tolist()
                if not text.stops.isdisjoint(sampled):
                    stop = next(i for i, token in enumerate(sampled, 1) if token in text.stops)
                    said = said[: len(said) - len(sampled) + stop]
                emitted += said
                offsets.append(len(emitted))
                # vLLM may have cut drafts.
                verified.append(len(self._verified.get(key, ())))
            elif text.indexing is not None:
                text.missed.append(token_ids[row, text.length : end].copy())
            text.length, text.scheduled = end, 1
        if self._times is not None:
            lines = len(drafts) * (1 + max(verified, default=0)) if asks else 0
            self._times.observe(decoded, len(drafts), seconds, 1 + self._lookahead, lines=lines)
        if live:
            self._observe(live, emitted, offsets, verified)
            self._draft(live, rows, drafts, asks=asks)

    def _begin(
        self, key: str, request: v1.CachedRequestState, token_ids: NDArray[np.int32], size: int
    ) -> _Text:
        """A request's first tokens have come, behind `size` others."""
        text = self._texts[key] = _Text()
        known = Request.of(request)
        self._start(text, known, token_ids, size)
        if known is not None:
            _keep_limits(text, known.prompt_size, request.sampling_params)
        return text

    def _draft(
        self, texts: list[_Text], rows: list[int], drafts: list[list[int]], *, asks: bool
    ) -> None:
        live = [
            (text, row) for text, row in zip(texts, rows, strict=True) if text.request is not None
        ]
        if not live:
            return
        limits = [text.limit() for text, _ in live]
        cost, even = None, False
        if self._times is not None:
            # With log-probabilities it is not worth it to fill drafts up.
            even = self._times.largest_even > 0 and not asks and min(limits) >= self._lookahead
            cost = self._times.curve(len(drafts), len(live), self._lookahead, even=even)
            if cost is None:
                return
        batch = self._propose([text for text, _ in live], limits, cost)
        chosen = batch.tolist()
        if self._times is not None and asks:
            longest = self._times.best_longest(len(drafts), batch.offsets, batch.probabilities)
            chosen = [draft[:longest] for draft in chosen]
        if (
            even
            and self._times is not None
            and self._times.is_better_even(len(live) + len(batch.token_ids))
        ):
            # Tokens behind a draft's end are verified for nothing, and the step is faster.
            chosen = [draft + [0] * (self._lookahead - len(draft)) for draft in chosen]
        for (text, row), draft in zip(live, chosen, strict=True):
            text.scheduled += len(draft)
            drafts[row] = draft


def _keep_limits(text: _Text, prompt_size: int, params: v1.SamplingParams) -> None:
    """Shortens the drafts of a request that vLLM's V1 would verify wrongly.

    `thinking_token_budget`: V1 counts the draft tokens of a thought before they are accepted.
    """
    text.least = prompt_size + (params.min_tokens or 0)
    if params.thinking_token_budget is not None and params.thinking_token_budget >= 0:
        text.lookahead = 0
