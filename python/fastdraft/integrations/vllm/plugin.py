"""What vLLM loads in each of its processes: it introduces model runners to their drafters.

vLLM tells a proposer neither whose rows it sees nor what the requests asked for. Both are known to
the model runner that owns the proposer, so the runner is handed over as soon as it exists.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from fastdraft.integrations.vllm.ledger import share_folder
from fastdraft.integrations.vllm.lengths import follow_batches, give_lengths
from fastdraft.integrations.vllm.proposer import FastdraftProposer
from fastdraft.integrations.vllm.requests import SALT
from fastdraft.integrations.vllm.settings import Settings

__all__ = ["register"]

_logger = logging.getLogger(__name__)


def register() -> None:
    """The entry point in `vllm.general_plugins`; may be called any number of times.

    Where a vLLM lacks one of the two places, a warning says so, and the proposer does without:
    it knows rows by their text then.
    """
    share_folder()
    hooks = (
        _introduce_runners,
        _introduce_v2_runners,
        _introduce_schedulers,
        _name_lengths,
        _offer_speculator,
        _mark_salted_requests,
    )
    for hook in hooks:
        try:
            hook()
        except (ImportError, AttributeError) as error:
            _logger.warning("fastdraft finds this vLLM changed and does without: %s", error)


def _introduce_runners() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def introduce(runner: Any) -> None:
        proposer = getattr(runner, "drafter", None)
        if isinstance(proposer, FastdraftProposer):
            proposer.attach(runner)

    _after_init(GPUModelRunner, introduce)


def _introduce_v2_runners() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def introduce(runner: Any) -> None:
        attach = getattr(getattr(runner, "speculator", None), "attach", None)
        if attach is not None and getattr(attach, "__module__", "").startswith("fastdraft."):
            attach(runner)

    _after_init(GPUModelRunner, introduce)


def _introduce_schedulers() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    _after_init(Scheduler, follow_batches)


def _name_lengths() -> None:
    """Names lengths of drafts in each configuration, just before vLLM decides what they change."""
    from vllm.config import VllmConfig

    original = VllmConfig._maybe_disable_dynamic_sd_for_data_parallel
    if getattr(original, "calls_fastdraft", False):
        return

    @functools.wraps(original)
    def decide(self: Any) -> None:
        give_lengths(self)
        original(self)

    decide.calls_fastdraft = True  # type: ignore[attr-defined]
    VllmConfig._maybe_disable_dynamic_sd_for_data_parallel = decide


def _offer_speculator() -> None:
    """Puts a choice in the place of vLLM's n-gram speculator: fastdraft's where it is asked for.

    vLLM has no registry of speculators. It imports this class when it makes one.
    """
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram

    original = ngram.NgramGPUSpeculator
    if getattr(original, "offers_fastdraft", False):
        return

    def choose(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not Settings.of(vllm_config).speculator:
            return original(vllm_config, device, req_states)
        return _speculator_class()(vllm_config, device, req_states)

    choose.offers_fastdraft = True  # type: ignore[attr-defined]
    ngram.NgramGPUSpeculator = choose


@functools.cache
def _speculator_class() -> Any:
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from fastdraft.integrations.vllm.speculator import FastdraftSpeculator

    return type("FastdraftSpeculator", (FastdraftSpeculator, BaseSpeculator), {})


def _mark_salted_requests() -> None:
    """Requests share text with those of their `cache_salt` alone, as they share prefixes.

    The salt does not reach the workers, the request's parameters do. What a client puts there
    itself is taken out: it would name another tenant's text.
    """
    from vllm.v1.request import Request

    def mark(request: Any) -> None:
        params = getattr(request, "sampling_params", None)
        if params is None:
            return
        salt = getattr(request, "cache_salt", None)
        if salt or SALT in (params.extra_args or {}):
            params.extra_args = {**(params.extra_args or {}), SALT: salt}

    _after_init(Request, mark)


def _after_init(kind: Any, then: Any) -> None:
    """Has `then(instance)` run behind the `__init__` of `kind`, once however often it is asked."""
    original = kind.__init__
    if getattr(original, "calls_fastdraft", False):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self)

    init.calls_fastdraft = True  # type: ignore[attr-defined]
    kind.__init__ = init
