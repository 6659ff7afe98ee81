"""Processes that begin with vLLM imported, with its model runner V1 or V2."""

from __future__ import annotations

import functools
import multiprocessing
import os
from pathlib import Path

from forks import Forks

__all__ = ["fork_workers", "v1_forks", "v2_forks", "v2_variables"]

_SUPPORT = Path(__file__).parent
_MODULES = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.v1.executor.multiproc_executor",
)
# Read where vLLM and PyTorch are imported. Tests of engines in their own process want less to be
# logged; what vLLM compiles for a model in parts takes long, and looks for a driver of Triton's.
_VARIABLES = {"VLLM_LOGGING_LEVEL": "INFO", "TORCHDYNAMO_DISABLE": "1"}


def v1_forks() -> Forks:
    return Forks([*_MODULES, "vllm.v1.worker.cpu_worker"], {**os.environ, **_VARIABLES})


def v2_forks() -> Forks:
    return Forks([*_MODULES, "vllm.v1.worker.gpu.model_runner"], {**v2_variables(), **_VARIABLES})


def v2_variables() -> dict[str, str]:
    """The environment of a process whose model runner is V2, on a CPU."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_SUPPORT / "triton_on_cpu"), str(_SUPPORT)]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def fork_workers() -> None:
    """The engine and the workers of this process are forked; on a CPU vLLM starts each anew."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    context = functools.partial(multiprocessing.get_context, "fork")
    utils.get_mp_context = multiproc_executor.get_mp_context = context
