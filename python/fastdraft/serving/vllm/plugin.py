"""What vLLM loads in each of its processes: it introduces model runners to their drafters.

vLLM tells a proposer neither whose rows it sees nor what the requests asked for. Both are known to
the model runner that owns the proposer, so the runner is handed over as soon as it exists.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable
from typing import Any, Final

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

    Where a vLLM lacks one of the hooks, a warning says so. Its drafter then refuses to start, or
    remembers nothing.
    """
    share_folder()
    for place, call in (_HOOKS | (_V2_HOOKS if has_v2() else {})).items():
        try:
            _wrap(place, call)
        except (ImportError, AttributeError) as error:
            _logger.warning("fastdraft finds this vLLM changed: %s", error)


def _wrap(place: str, call: Callable[..., Any]) -> None:
    """Has `call(original, *args, **kwargs)` run in the place of a function, once however often it
    is asked."""
    module, _, path = place.partition(":")
    holder, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(f"{module}:{holder}")
    found = inspect.getattr_static(owner, name)
    original = getattr(found, "__func__", found)
    if getattr(original, "calls_fastdraft", False):
        return

    @functools.wraps(original, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    wrapped.calls_fastdraft = True  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)


def _take_method(
    create: Any, args: Any, target_model_config: Any, target_parallel_config: Any
) -> Any:
    configure(args, target_parallel_config)
    return create(args, target_model_config, target_parallel_config)


def _name_method(add: Any, parser: Any) -> Any:
    made = add(parser)
    for action in made._actions:
        if "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, METHOD]
    return made


def _add_front(make: Any, cls: Any, args: Any) -> Any:
    add_front(args)
    return make(cls, args)


def _check_options(validate: Any, self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
    """Requests with wrong options are refused where vLLM refuses wrong sampling parameters: it
    answers error 400, at all of its endpoints."""
    config = self.vllm_config
    model = getattr(config.speculative_config, "model", None)
    if str(model).startswith(METHOD) or has_head(config):
        request_options(getattr(params, "extra_args", None) or {})
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


def _name_lengths(decide: Any, config: Any) -> None:
    """Names lengths of drafts in each configuration, just before vLLM decides what they change."""
    give_lengths(config)
    decide(config)


def _choose_speculator(original: Any, vllm_config: Any, device: Any, req_states: Any) -> Any:
    """vLLM's n-gram speculator, or fastdraft's where it is asked for.

    vLLM has no registry of speculators. It imports this class when it makes one.
    """
    make = _speculator_class() if drafts_on_v2(vllm_config) else original
    return make(vllm_config, device, req_states)


@functools.cache
def _speculator_class() -> Any:
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from fastdraft.serving.vllm.speculator import FastdraftSpeculator

    return type("FastdraftSpeculator", (FastdraftSpeculator, BaseSpeculator), {})


_Hooks = dict[str, Callable[..., Any]]
_HOOKS: Final[_Hooks] = {
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config": _take_method,
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": _name_method,
    "vllm.engine.arg_utils:EngineArgs.from_cli_args": _add_front,
    "vllm.v1.engine.input_processor:InputProcessor._validate_params": _check_options,
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__": _introduce_runner,
    "vllm.v1.request:Request.__init__": _mark_salt,
}
_V2_HOOKS: Final[_Hooks] = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__": _introduce_v2_runner,
    "vllm.v1.core.sched.scheduler:Scheduler.__init__": _introduce_scheduler,
    "vllm.config:VllmConfig._maybe_disable_dynamic_sd_for_data_parallel": _name_lengths,
    "vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator": _choose_speculator,
}
