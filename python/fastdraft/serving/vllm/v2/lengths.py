"""How many draft tokens each row of a step gets, where all rows get the same number.

vLLM's V2 model runner verifies as many tokens for each row, and its scheduler has to say how many
before the drafts are known. So what decides is what recent drafts had accepted, by their depth, and
what steps of each length take.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from fastdraft._core import BackOff, DepthAcceptance
from fastdraft.faults import Faults
from fastdraft.serving.request_options import UNLIMITED
from fastdraft.serving.vllm.interface import SpeculativeConfig, VllmConfig
from fastdraft.serving.vllm.method import chooses_lengths, drafts_on_v2, has_head
from fastdraft.serving.vllm.v2 import interface as v2
from fastdraft.serving.vllm.v2.step_clock import StepClock
from fastdraft.serving.vllm.v2.verification import is_adaptive
from fastdraft.step_latency import StepLatency

__all__ = ["DraftLengths", "draft_schedule", "follow_batches", "give_lengths"]

_logger = logging.getLogger(__name__)

# After as many drafts an outcome counts half.
_HALF_LIFE: Final = 256.0
# The gain that a length needs over none: estimates of what looks best are too high.
_MARGIN: Final = 1.02
# While nothing is drafted nothing is learned: after how many steps one with the shortest drafts is
# taken, at first and at most.
_PROBES: Final = 32, 1024


class DraftLengths:
    """Chooses the length of the drafts of each step, one of `lengths`, or 0 unless `always`.

    A scheduler sees no drafts, and may run in another process than the engine. So all that can be
    learned is how many tokens are accepted, by their depth.
    """

    def __init__(
        self, lengths: Iterable[int], latency: StepLatency, *, always: bool = False
    ) -> None:
        self._lengths = np.array(sorted({0, *lengths}))
        self._least = int(self._lengths[1]) if always else 0
        self._latency = latency
        self._acceptance = DepthAcceptance(self._lengths[-1], half_life=_HALF_LIFE)
        self._probes = BackOff(*_PROBES)

    def choose(self, rows: int) -> int:
        """The number of draft tokens for each row of the next step. Ask once a step. O(longest)."""
        if self._latency.wants_plain_step(rows):
            return self._least
        widest = int(self._lengths[-1]) + 1
        seconds = self._latency.seconds_by_tokens(rows, widest, optimistic=True)
        speeds = (
            self._acceptance.expected_tokens()[self._lengths]
            / seconds[rows * (1 + self._lengths) - 1]
        )
        best = int(np.argmax(speeds))
        pays = bool(speeds[best] > _MARGIN * speeds[0])
        chosen = best if pays else 1
        return int(self._lengths[chosen]) if self._probes.asks(pays) else self._least

    def observe(self, length: int, accepted: Sequence[int]) -> None:
        """Learns how many tokens of drafts of one length were `accepted`, by row."""
        self._acceptance.observe(accepted, [length] * len(accepted))

    def forget(self, part: float) -> None:
        """Forgets a part, 0 to 1, of what drafts had accepted: the part of the rows that is new.

        What other requests accepted says little of them. One may have a prediction, say.
        """
        self._acceptance.forget(part)


def draft_schedule(longest: int, rows: int, *, always: bool = False) -> list[tuple[int, int, int]]:
    """vLLM's `num_speculative_tokens_per_batch_size` where the user names none.

    vLLM captures graphs of the lengths that it names. Which of them a step takes is fastdraft's
    choice then.

    Args:
        longest: The longest draft.
        rows: The most rows of a step. Each length needs a number of rows of its own.
        always: Whether each step has drafts.
    """
    # Each is half of the one before it, and the last one 0, or 1.
    lengths = [longest >> halvings for halvings in range(longest.bit_length() + 1 - always)]
    if len(lengths) > rows:
        lengths = [*lengths[: rows - 1], lengths[-1]] if rows > 1 else [longest]
    # As many rows as have a graph: where drafts are half as long, twice as many.
    ends = [max(i, (rows - 1) >> (len(lengths) - 1 - i)) for i in range(1, len(lengths))]
    begins = [1, *(end + 1 for end in ends)]
    return [*zip(begins, [*ends, rows], lengths, strict=True)]


def give_lengths(vllm_config: VllmConfig) -> None:
    """Gives a `VllmConfig` lengths of drafts to choose among, before it chooses the sizes of its
    graphs.

    They are for where rows cannot differ in length: see `verification`. Does nothing if the user
    named some, without the V2 speculator, beside a head, with data parallelism, where vLLM cannot
    change the length, and with ranks that schedule for themselves, whose clocks differ.

    Raises:
        InvalidValueError: vLLM takes Model Runner V1 after all.
    """
    if not drafts_on_v2(vllm_config) or has_head(vllm_config):
        return
    parallel = vllm_config.parallel_config
    if (
        not chooses_lengths(vllm_config)
        or parallel.data_parallel_size > 1
        or parallel.distributed_executor_backend == "external_launcher"
    ):
        return
    speculative: SpeculativeConfig = vllm_config.speculative_config
    speculative.num_speculative_tokens_per_batch_size = draft_schedule(
        int(speculative.num_speculative_tokens),
        int(vllm_config.scheduler_config.max_num_seqs),
        always=bool(vllm_config.model_config.is_hybrid),
    )


def follow_batches(scheduler: v2.Scheduler) -> None:
    """Has a `Scheduler` that was just made choose the length of drafts step by step.

    Does nothing where `give_lengths` gave none: a list of the user's own is vLLM's to follow.
    """
    config = scheduler.vllm_config
    speculative: SpeculativeConfig = config.speculative_config
    if not chooses_lengths(config) or not speculative.num_speculative_tokens_per_batch_size:
        return
    if is_adaptive(config):
        scheduler.dynamic_sd_lookup = None  # the longest, which the worker shortens
        return
    allowed = {length for *_, length in speculative.num_speculative_tokens_per_batch_size}
    clock, always = StepClock(config), bool(config.model_config.is_hybrid)
    lengths = DraftLengths(allowed, clock.latency, always=always)
    followed = _Followed(lengths, clock, scheduler)
    update, faults = scheduler.update_from_output, Faults(_logger)

    @functools.wraps(update)
    def update_from_output(
        scheduler_output: v2.SchedulerOutput, model_runner_output: v2.ModelRunnerOutput
    ) -> Any:
        try:
            followed.observe(scheduler_output, model_runner_output)
        except Exception:
            faults.add("a step taught nothing of how long drafts should be")
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = update_from_output
    scheduler.dynamic_sd_lookup = followed


class _Followed:
    """Replaces a scheduler's list of lengths by the number of rows; learns from steps."""

    def __init__(self, lengths: DraftLengths, clock: StepClock, scheduler: v2.Scheduler) -> None:
        self._lengths = lengths
        self._clock = clock
        self._scheduler = scheduler

    def __getitem__(self, rows: int) -> int:
        return self._lengths.choose(rows)

    def observe(self, scheduled: v2.SchedulerOutput, output: v2.ModelRunnerOutput) -> None:
        """Learns from a step's `SchedulerOutput` and `ModelRunnerOutput`."""
        tokens, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        length = max(map(len, drafts.values()), default=0)
        emitted = (
            min(len(output.sampled_token_ids[output.req_id_to_index[key]]), self._room(key))
            for key, draft in drafts.items()
            if len(draft) == length
        )
        accepted = [min(count - 1, length) for count in emitted if count > 0]
        rows, total = len(tokens), sum(tokens.values())
        new = self._clock.end(tokens, rows, total, total - rows - length * len(accepted))
        self._lengths.forget(new)
        self._lengths.observe(length, accepted)

    def _room(self, key: str) -> int:
        """The tokens that a request may still say. A step may emit more, which are cut off."""
        request = self._scheduler.requests.get(key)
        return UNLIMITED if request is None else request.max_tokens - request.num_output_tokens
