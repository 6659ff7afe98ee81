"""All that fastdraft takes for granted of vLLM's Model Runner V1: see `vllm.interface`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from fastdraft.serving.vllm import interface

READ_IN: Final = interface.READ_IN

MAKE_RUNNER: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__"


class SamplingParams(interface.SamplingParams, Protocol):
    """sampling_params.py:SamplingParams"""

    thinking_token_budget: int | None


class CachedRequestState(Protocol):
    """v1/worker/gpu_input_batch.py:CachedRequestState"""

    sampling_params: SamplingParams
    lora_request: interface.LoRARequest | None
    prompt_token_ids: Sequence[int] | None
    prompt_is_token_ids: Sequence[bool] | None


class InputBatch(Protocol):
    """v1/worker/gpu_input_batch.py:InputBatch"""

    req_ids: list[str]
    num_logprobs: dict[str, int]


class SchedulerOutput(Protocol):
    """v1/core/sched/output.py:SchedulerOutput"""

    finished_req_ids: set[str]
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]


class GPUModelRunner(Protocol):
    """v1/worker/gpu_model_runner.py:GPUModelRunner"""

    device: Any
    drafter: Any
    execute_model: Callable[..., Any]
    input_batch: InputBatch
    requests: Mapping[str, CachedRequestState]
    _input_fits_in_drafter: Callable[..., bool]


class RejectionSampler(Protocol):
    """v1/sample/rejection_sampler.py"""

    expand_batch_to_tokens: Callable[..., Any]


class TopKTopPSampler(Protocol):
    """v1/sample/ops/topk_topp_sampler.py"""

    apply_top_k_only: Callable[..., Any]


def samplers() -> tuple[RejectionSampler, TopKTopPSampler]:
    """The modules that sample."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    return rejection_sampler, topk_topp_sampler
