"""Each row a draft of its own length: vLLM's adaptive verification, by fastdraft's probabilities.

vLLM's V2 runner can verify only those draft tokens of a batch that are likeliest to be accepted.
The device chooses which ones, by the drafts at hand. The host chooses how many, by the drafts of
the step before, as it never waits: with many rows that costs less than with one.

vLLM offers it for DSpark. Three things differ for lookups:

- It is tried wherever vLLM may allow it. Whether it does depends on the attention backend, which
  only the worker knows. So the worker decides, and the scheduler asks the workers.
- vLLM takes the first drafts of a request to be certain. Most requests begin without any.
- vLLM prices a step by a forward over equal tokens. A mixture of experts sends them to the same few
  experts, so that all drafts look free. Its real steps are measured instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from fastdraft.serving.vllm.interface import VllmConfig
from fastdraft.serving.vllm.method import chooses_lengths, drafts_on_v2
from fastdraft.serving.vllm.settings import Settings
from fastdraft.serving.vllm.v2 import interface as v2
from fastdraft.serving.vllm.v2.step_clock import StepClock

__all__ = ["adapt", "agree", "create", "is_adaptive"]

# After as many steps prices are renewed, on all ranks at once.
_STEPS: Final = 16

# By vLLM's request states: why its runner has no manager.
_refusals: Final[WeakKeyDictionary[Any, str]] = WeakKeyDictionary()


def is_adaptive(config: VllmConfig) -> bool:
    """True if rows differ in the length of their drafts, by a `VllmConfig` of this process."""
    return bool(getattr(config.speculative_config, "enable_adaptive_verification", False))


def adapt(runner: v2.GPUModelRunner, report: Callable[[str], None]) -> None:
    """Has a V2 `GPUModelRunner` verify adaptively, if vLLM allows it.

    Args:
        runner: Was just made.
        report: Called when vLLM has decided, with what it said against it, or "".
    """
    initialize, config = runner.initialize_kv_cache, runner.vllm_config

    @functools.wraps(initialize)
    def initialize_kv_cache(*args: Any, **options: Any) -> None:
        # Backends of attention are chosen by now, as without fastdraft. What is made here reads
        # the flag.
        reason = _ask(config)
        runner.speculator.enable_adaptive_verification = not reason
        initialize(*args, **options)
        reason = reason or _refusals.pop(runner.req_states, "")
        runner.speculator.enable_adaptive_verification = not reason
        runner.rejection_sampler.enable_adaptive_verification = not reason
        if not reason:
            _adopt(runner)
        report(reason)

    runner.initialize_kv_cache = initialize_kv_cache


def create(make: Callable[..., Any], **options: Any) -> Any:
    """vLLM's `maybe_create_adaptive_verification_manager`, but None where it would end the start.

    The user asked for drafts; how they are verified is ours to choose.
    """
    try:
        return make(**options)
    except ValueError as error:
        config = options["vllm_config"]
        if not drafts_on_v2(config):
            raise
        config.speculative_config.enable_adaptive_verification = False
        _refusals[options["req_states"]] = str(error)
        return None


def agree(initialize: Callable[..., Any], core: v2.EngineCore, config: VllmConfig) -> Any:
    """Tells the process of vLLM's scheduler what its workers have decided."""
    made = initialize(core, config)
    if drafts_on_v2(config):
        decided = core.model_executor.collective_rpc(_has_manager)
        config.speculative_config.enable_adaptive_verification = all(decided)
    return made


def _has_manager(worker: v2.Worker) -> bool:
    """Runs in a worker."""
    return getattr(worker.model_runner, "adaptive_verification", None) is not None


def _ask(config: VllmConfig) -> str:
    """Sets the flag if a `VllmConfig` allows it; else gives the reason."""
    speculative: v2.SpeculativeConfig = config.speculative_config
    if not Settings.of(config).enable_adaptive_verification:
        return "enable_adaptive_verification is off"
    if config.model_config.is_hybrid:
        return "each row of a model with recurrent layers needs a draft"
    # Those that `give_lengths` gave are for where it is not allowed.
    if speculative.num_speculative_tokens_per_batch_size and not chooses_lengths(config):
        return "num_speculative_tokens_per_batch_size is given"
    speculative.enable_adaptive_verification = True
    try:
        for name in v2.CHECKS:
            getattr(config, name)()
    except ValueError as error:
        speculative.enable_adaptive_verification = False
        return str(error)
    return ""


def _adopt(runner: v2.GPUModelRunner) -> None:
    """Gives a runner's manager what lookups need."""
    manager = runner.adaptive_verification
    assert manager is not None

    def add_request(index: int) -> None:
        # A copy that is under way may bring back a part of what the slot had before, for a step.
        manager._confidence_probs[index].fill_(0.0)
        for copied in manager._stale_confidences:
            copied.np[index].fill(0.0)

    manager.add_request = add_request
    if runner.vllm_config.model_config.is_moe:
        prices = _Prices(manager, runner.vllm_config)
        manager.record_confidences = functools.partial(prices.record, manager.record_confidences)


class _Prices:
    """Measures steps, and renews the prices of a manager by them."""

    def __init__(self, manager: v2.AdaptiveVerificationManager, config: VllmConfig) -> None:
        self._manager = manager
        self._widest = 2 * (1 + manager.num_speculative_steps)  # the batch may grow meanwhile
        self._clock = StepClock(config)
        # With steps that overlap the host waits here for the step before.
        self._is_late = bool(config.scheduler_config.async_scheduling)
        self._steps = 0
        self._batch: v2.InputBatch | None = None

    def record(self, record: Callable[..., None], probabilities: Any, batch: v2.InputBatch) -> None:
        """vLLM's `record_confidences`."""
        record(probabilities, batch)
        ended = self._batch or batch if self._is_late else batch
        self._batch = batch
        rows, tokens = ended.num_reqs, ended.num_tokens
        self._clock.end(batch.req_ids, rows, tokens, tokens - rows - ended.num_draft_tokens)
        if self._steps % _STEPS == 0:
            seconds = self._clock.latency.seconds_by_tokens(
                batch.num_reqs, self._widest, optimistic=True
            )
            curve = [*enumerate((1e3 * seconds).tolist(), 1)]
            # The first rank's, as all have to choose alike. Drafts take no time of their own.
            self._manager.set_cost_curves([(1, 0.0)], curve)
        self._steps += 1
