"""What vLLM loads in each of its processes: it introduces model runners to their drafters.

vLLM tells a proposer neither whose rows it sees nor what the requests asked for. Both are known to
the model runner that owns the proposer, so the runner is handed over as soon as it exists.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from fastdraft.serving.ledger import share_folder
from fastdraft.serving.request_options import request_options
from fastdraft.serving.vllm.lengths import follow_batches, give_lengths
from fastdraft.serving.vllm.method import (
    METHOD,
    add_front,
    configure,
    drafts_on_v2,
    has_head,
    has_v2,
)
from fastdraft.serving.vllm.proposer import FastdraftProposer
from fastdraft.serving.vllm.requests import SALT, Salt
from fastdraft.serving.vllm.sampling import mend_sampling

__all__ = ["register"]

_logger = logging.getLogger(__name__)


def register() -> None:
    """The entry point in `vllm.general_plugins`; may be called any number of times.

    Where a vLLM lacks one of these places, a warning says so. Its drafter then refuses to start, or
    remembers nothing.
    """
    share_folder()
    hooks = [_take_method, _add_fronts, _check_options, _introduce_runners, _mark_salts]
    if has_v2():
        hooks += [_introduce_v2_runners, _introduce_schedulers, _name_lengths, _offer_speculator]
    for hook in hooks:
        try:
            hook()
        except (ImportError, AttributeError) as error:
            _logger.warning("fastdraft finds this vLLM changed: %s", error)


def _take_method() -> None:
    from vllm.engine.arg_utils import EngineArgs

    def configured(
        create: Any, args: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        configure(args, target_parallel_config)
        return create(args, target_model_config, target_parallel_config)

    def named(add: Any, parser: Any) -> Any:
        made = add(parser)
        for action in made._actions:
            if "--spec-method" in action.option_strings and action.choices is not None:
                action.choices = [*action.choices, METHOD]
        return made

    _wrap(EngineArgs, "create_speculative_config", configured)
    _wrap(EngineArgs, "add_cli_args", named)


def _add_fronts() -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.__dict__["from_cli_args"]
    if getattr(original.__func__, "calls_fastdraft", False):
        return

    @functools.wraps(original.__func__)
    def from_cli_args(cls: Any, args: Any) -> Any:
        add_front(args)
        return original.__func__(cls, args)

    from_cli_args.calls_fastdraft = True  # type: ignore[attr-defined]
    EngineArgs.from_cli_args = classmethod(from_cli_args)


def _check_options() -> None:
    """Requests with wrong options are refused where vLLM refuses wrong sampling parameters: it
    answers error 400, at all of its endpoints."""
    from vllm.v1.engine.input_processor import InputProcessor

    def validated(validate: Any, self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if _drafts(self.vllm_config):
            request_options(getattr(params, "extra_args", None) or {})
        return validate(self, params, *args, **kwargs)

    _wrap(InputProcessor, "_validate_params", validated)


def _drafts(vllm_config: Any) -> bool:
    """Whether fastdraft drafts there."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return str(getattr(speculative, "model", None)).startswith(METHOD) or has_head(vllm_config)


def _introduce_runners() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def introduce(made: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        made(runner, *args, **kwargs)
        proposer = getattr(runner, "drafter", None)
        if isinstance(proposer, FastdraftProposer):
            if runner.device.type == "cpu":
                mend_sampling()
            proposer.attach(runner)

    _wrap(GPUModelRunner, "__init__", introduce)


def _introduce_v2_runners() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def introduce(made: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        made(runner, *args, **kwargs)
        speculator = getattr(runner, "speculator", None)
        if speculator is not None and drafts_on_v2(runner.vllm_config):
            if has_head(runner.vllm_config):
                make = _speculator_class()
                speculator = make(runner.vllm_config, runner.device, runner.req_states)
            speculator.attach(runner)

    _wrap(GPUModelRunner, "__init__", introduce)


def _introduce_schedulers() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def introduce(made: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        made(scheduler, *args, **kwargs)
        follow_batches(scheduler)

    _wrap(Scheduler, "__init__", introduce)


def _name_lengths() -> None:
    """Names lengths of drafts in each configuration, just before vLLM decides what they change."""
    from vllm.config import VllmConfig

    def decide(original: Any, config: Any) -> None:
        give_lengths(config)
        original(config)

    _wrap(VllmConfig, "_maybe_disable_dynamic_sd_for_data_parallel", decide)


def _offer_speculator() -> None:
    """Puts a choice in the place of vLLM's n-gram speculator: fastdraft's where it is asked for.

    vLLM has no registry of speculators. It imports this class when it makes one.
    """
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram

    def choose(original: Any, vllm_config: Any, device: Any, req_states: Any) -> Any:
        make = _speculator_class() if drafts_on_v2(vllm_config) else original
        return make(vllm_config, device, req_states)

    _wrap(ngram, "NgramGPUSpeculator", choose)


@functools.cache
def _speculator_class() -> Any:
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from fastdraft.serving.vllm.speculator import FastdraftSpeculator

    return type("FastdraftSpeculator", (FastdraftSpeculator, BaseSpeculator), {})


def _mark_salts() -> None:
    """Requests share text with those of their `cache_salt` alone, as they share prefixes.

    The salt does not reach the workers, the request's parameters do. What a client puts there
    itself is taken out: it would name another tenant's text. A request that reaches a worker
    without a mark shares text with none.
    """
    from vllm.v1.request import Request

    def mark(made: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        made(request, *args, **kwargs)
        params = getattr(request, "sampling_params", None)
        if params is not None and hasattr(request, "cache_salt"):
            params.extra_args = {**(params.extra_args or {}), SALT: Salt(request.cache_salt)}

    _wrap(Request, "__init__", mark)


def _wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Has `call(original, *args, **kwargs)` run in the place of a function, once however often it
    is asked."""
    original = getattr(owner, name)
    if getattr(original, "calls_fastdraft", False):
        return

    @functools.wraps(original, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    wrapped.calls_fastdraft = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
