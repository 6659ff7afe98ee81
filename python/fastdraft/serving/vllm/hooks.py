"""The hooks in vLLM's engine and workers: they attach drafters to model runners.

vLLM tells a proposer neither whose rows it sees nor what the requests asked for. Both are known to
the model runner that owns the proposer, so the runner is handed over as soon as it exists.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from fastdraft.errors import InvalidValueError
from fastdraft.serving.request_options import request_options
from fastdraft.serving.vllm.lengths import follow_batches, give_lengths
from fastdraft.serving.vllm.method import drafts, drafts_on_v2, has_head, has_v2
from fastdraft.serving.vllm.plugin import Hooks
from fastdraft.serving.vllm.proposer import FastdraftProposer
from fastdraft.serving.vllm.requests import SALT, Salt
from fastdraft.serving.vllm.sampling import mend_sampling
from fastdraft.serving.vllm.settings import Settings
from fastdraft.serving.vllm.verification import agree, create

__all__ = ["HOOKS"]


def _check_options(validate: Any, self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
    """Requests with wrong options are refused where vLLM refuses wrong sampling parameters: it
    answers error 400, at all of its endpoints. For that the error has to be vLLM's own."""
    if drafts(self.vllm_config):
        vocabulary = int(self.vllm_config.model_config.get_vocab_size())
        given = getattr(params, "extra_args", None) or {}
        try:
            request_options(given, vocabulary=vocabulary)
        except InvalidValueError as error:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(str(error)) from error
    return validate(self, params, *args, **kwargs)


def _introduce_runner(made: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    made(runner, *args, **kwargs)
    proposer = getattr(runner, "drafter", None)
    if isinstance(proposer, FastdraftProposer):
        if runner.device.type == "cpu":
            mend_sampling()
        proposer.attach(runner)


def _mark_salt(made: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Requests share text with those of their `cache_salt` alone, as they share prefixes.

    The salt does not reach the workers, the request's parameters do. What a client puts there
    itself is taken out: it would name another tenant's text. A request that reaches a worker
    without a mark shares text with none.
    """
    made(request, *args, **kwargs)
    params = getattr(request, "sampling_params", None)
    if params is not None and hasattr(request, "cache_salt"):
        params.extra_args = {**(params.extra_args or {}), SALT: Salt(request.cache_salt)}


def _introduce_v2_runner(made: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    made(runner, *args, **kwargs)
    speculator, config = getattr(runner, "speculator", None), runner.vllm_config
    if speculator is not None and drafts_on_v2(config):
        if has_head(config):
            speculator = _speculator_class()(config, runner.device, runner.req_states)
        speculator.attach(runner)


def _introduce_scheduler(made: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    made(scheduler, *args, **kwargs)
    follow_batches(scheduler)


def _check_start(decide: Any, config: Any) -> None:
    """Refuses what cannot work, and names lengths of drafts, in each configuration, just before
    vLLM decides what they change."""
    if drafts(config):
        Settings.of(config).check(config, v2=drafts_on_v2(config))
        give_lengths(config)
    decide(config)


def _choose_speculator(make: Any, vllm_config: Any, device: Any, req_states: Any) -> Any:
    """vLLM's speculator, or fastdraft's where it stands in for n-grams: vLLM has no registry."""
    if drafts_on_v2(vllm_config) and not has_head(vllm_config):
        make = _speculator_class()
    return make(vllm_config, device, req_states)


@functools.cache
def _speculator_class() -> Any:
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from fastdraft.serving.vllm.speculator import FastdraftSpeculator

    return type("FastdraftSpeculator", (FastdraftSpeculator, BaseSpeculator), {})


_V1: Final[Hooks] = {
    "vllm.v1.engine.input_processor:InputProcessor._validate_params": _check_options,
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__": _introduce_runner,
    "vllm.v1.request:Request.__init__": _mark_salt,
}
_V2: Final[Hooks] = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__": _introduce_v2_runner,
    "vllm.v1.worker.gpu.model_runner:init_speculator": _choose_speculator,
    "vllm.v1.worker.gpu.model_runner:maybe_create_adaptive_verification_manager": create,
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches": agree,
    "vllm.v1.core.sched.scheduler:Scheduler.__init__": _introduce_scheduler,
    "vllm.config.vllm:VllmConfig._maybe_disable_dynamic_sd_for_data_parallel": _check_start,
}
HOOKS: Final[Hooks] = {**_V1, **(_V2 if has_v2() else {})}
"""All hooks of this vLLM."""
