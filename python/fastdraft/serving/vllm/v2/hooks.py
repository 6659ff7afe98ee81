"""The hooks in the engine and workers of Model Runner V2, which makes only vLLM's own speculators
and whose scheduler sees no drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from fastdraft.serving.vllm.interface import VllmConfig
from fastdraft.serving.vllm.method import drafts, drafts_on_v2, has_head
from fastdraft.serving.vllm.plugin import Hooks
from fastdraft.serving.vllm.settings import Settings
from fastdraft.serving.vllm.v2 import interface as v2
from fastdraft.serving.vllm.v2.lengths import follow_batches, give_lengths
from fastdraft.serving.vllm.v2.verification import agree, create

__all__ = ["HOOKS"]


def _check_start(decide: Callable[..., None], config: VllmConfig) -> None:
    """Refuses what cannot work, and names lengths of drafts, in each configuration, just before
    vLLM decides what they change."""
    if drafts(config):
        Settings.of(config).check(config, v2=drafts_on_v2(config))
        give_lengths(config)
    decide(config)


def _attach(
    make: Callable[..., None], runner: v2.GPUModelRunner, *args: Any, **kwargs: Any
) -> None:
    make(runner, *args, **kwargs)
    speculator, config = getattr(runner, "speculator", None), runner.vllm_config
    if speculator is not None and drafts_on_v2(config):
        if has_head(config):
            speculator = _speculator_class()(config, runner.device, runner.req_states)
        speculator.attach(runner)


def _make_speculator(
    make: Callable[..., Any], vllm_config: VllmConfig, device: Any, req_states: v2.RequestState
) -> Any:
    """vLLM's speculator, or fastdraft's where it stands in for n-grams: vLLM has no registry."""
    if drafts_on_v2(vllm_config) and not has_head(vllm_config):
        make = _speculator_class()
    return make(vllm_config, device, req_states)


@functools.cache
def _speculator_class() -> Any:
    from fastdraft.serving.vllm.v2.speculator import FastdraftSpeculator

    return type("FastdraftSpeculator", (FastdraftSpeculator, v2.base_speculator()), {})


def _follow(make: Callable[..., None], scheduler: v2.Scheduler, *args: Any, **kwargs: Any) -> None:
    make(scheduler, *args, **kwargs)
    follow_batches(scheduler)


HOOKS: Final[Hooks] = {
    v2.CHECK_CONFIG: _check_start,
    v2.MAKE_RUNNER: _attach,
    v2.MAKE_SPECULATOR: _make_speculator,
    v2.MAKE_MANAGER: create,
    v2.MAKE_CACHES: agree,
    v2.MAKE_SCHEDULER: _follow,
}
