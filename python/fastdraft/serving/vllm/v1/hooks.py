"""The hook in the workers of Model Runner V1.

vLLM tells a proposer neither whose rows it sees nor what the requests asked for. The model runner
knows both, so the proposer is attached to it as soon as it exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastdraft.serving.vllm.plugin import Hooks
from fastdraft.serving.vllm.v1 import interface as v1
from fastdraft.serving.vllm.v1.proposer import FastdraftProposer
from fastdraft.serving.vllm.v1.sampling import patch_sampling

__all__ = ["HOOKS"]


def _attach(
    make: Callable[..., None], runner: v1.GPUModelRunner, *args: Any, **kwargs: Any
) -> None:
    make(runner, *args, **kwargs)
    proposer = getattr(runner, "drafter", None)
    if isinstance(proposer, FastdraftProposer):
        if runner.device.type == "cpu":
            patch_sampling()
        proposer.attach(runner)


HOOKS: Final[Hooks] = {v1.MAKE_RUNNER: _attach}
