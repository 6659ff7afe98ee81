"""All that fastdraft takes for granted of vLLM's Model Runner V2: see `vllm.interface`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastdraft.serving.vllm import interface

if TYPE_CHECKING:
    import torch

READ_IN: Final = ("0.32.0", "0.33.0")

MAKE_RUNNER: Final = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__"
MAKE_SPECULATOR: Final = "vllm.v1.worker.gpu.model_runner:init_speculator"
MAKE_MANAGER: Final = "vllm.v1.worker.gpu.model_runner:maybe_create_adaptive_verification_manager"
MAKE_CACHES: Final = "vllm.v1.engine.core:EngineCore._initialize_kv_caches"
MAKE_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler.__init__"
CHECK_CONFIG: Final = "vllm.config.vllm:VllmConfig._maybe_disable_dynamic_sd_for_data_parallel"

CHECKS: Final = (
    "_validate_adaptive_verification",
    "_validate_batch_sharded_sampling",
    "_verify_sampling_replay_config",
)
"""The checks of a `VllmConfig` that concern adaptive verification: they raise ValueError."""

WARM_UP: Final = ("_warmup_", "_v2_mixed_warmup_")
"""How the ids of the requests begin with which vLLM warms its kernels up."""


class SpeculativeConfig(interface.SpeculativeConfig, Protocol):
    """config/speculative.py:SpeculativeConfig"""

    enable_adaptive_verification: bool


class NewRequestData(interface.RequestData, Protocol):
    """v1/core/sched/output.py:NewRequestData"""

    req_id: str
    prefill_token_ids: Sequence[int]


class SchedulerOutput(Protocol):
    """v1/core/sched/output.py:SchedulerOutput"""

    scheduled_new_reqs: Sequence[NewRequestData]
    finished_req_ids: set[str]
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]


class ModelRunnerOutput(Protocol):
    """v1/outputs.py:ModelRunnerOutput"""

    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]


class ScheduledRequest(Protocol):
    """v1/request.py:Request"""

    max_tokens: int
    num_output_tokens: int


class Scheduler(Protocol):
    """v1/core/sched/scheduler.py:Scheduler"""

    dynamic_sd_lookup: Any
    requests: Mapping[str, ScheduledRequest]
    update_from_output: Callable[..., Any]
    vllm_config: interface.VllmConfig


class RequestState(Protocol):
    """v1/worker/gpu/states.py:RequestState"""

    all_token_ids: Any
    req_id_to_index: dict[str, int]
    total_len: Any


class InputBatch(Protocol):
    """v1/worker/gpu/input_batch.py:InputBatch"""

    cu_num_logits: torch.Tensor
    idx_mapping: torch.Tensor
    idx_mapping_np: Any
    num_draft_tokens: int
    num_reqs: int
    num_tokens: int
    req_ids: list[str]


class DraftModelSpeculator(Protocol):
    """v1/worker/gpu/spec_decode/speculator.py:DraftModelSpeculator"""

    draft_logits: torch.Tensor | None
    draft_token_confidence_probs: torch.Tensor
    propose: Callable[..., torch.Tensor]


class AdaptiveVerificationManager(Protocol):
    """v1/worker/gpu/spec_decode/adaptive_verification.py:AdaptiveVerificationManager"""

    add_request: Callable[[int], None]
    num_speculative_steps: int
    record_confidences: Callable[..., None]
    set_cost_curves: Callable[..., None]
    _confidence_probs: torch.Tensor
    _stale_confidences: Sequence[Any]


class SamplingStates(Protocol):
    """v1/worker/gpu/sample/states.py:SamplingStates"""

    seeds: Any
    temperature: Any

    def apply_top_k_top_p(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, idx_mapping_np: Any
    ) -> torch.Tensor: ...


class Sampler(Protocol):
    """v1/worker/gpu/sample/sampler.py:Sampler"""

    apply_sampling_params: Callable[..., torch.Tensor]
    sampling_states: SamplingStates
    _sample_random: Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RejectionSampler(Protocol):
    """v1/worker/gpu/spec_decode/rejection_sampler.py:RejectionSampler"""

    enable_adaptive_verification: bool
    num_speculative_steps: int
    _verify: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class GPUModelRunner(Protocol):
    """v1/worker/gpu/model_runner.py:GPUModelRunner"""

    adaptive_verification: AdaptiveVerificationManager | None
    add_requests: Callable[[SchedulerOutput], None]
    device: torch.device
    dtype: torch.dtype
    finish_requests: Callable[[SchedulerOutput], None]
    initialize_kv_cache: Callable[..., None]
    load_model: Callable[..., None]
    max_num_reqs: int
    rejection_sampler: RejectionSampler
    req_states: RequestState
    sampler: Sampler | None
    shutdown: Callable[[], None]
    speculator: Any
    vllm_config: interface.VllmConfig
    vocab_size: int


class Worker(Protocol):
    """v1/worker/gpu_worker.py:Worker"""

    model_runner: Any


class EngineCore(Protocol):
    """v1/engine/core.py:EngineCore"""

    model_executor: Any


def base_speculator() -> type:
    """The class of vLLM's speculators."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    return BaseSpeculator  # type: ignore[no-any-return]


def draft_model_speculator() -> type:
    """The class of vLLM's speculators that have a model."""
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator as Speculator

    return Speculator  # type: ignore[no-any-return]


def common_sampler() -> type:
    """The class of vLLM's samplers, but of those of some models and of watermarks."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler as Common

    return Common  # type: ignore[no-any-return]
