"""Drafts for vLLM: a proposer of its `custom_class` method, and the entry point beside it.

vLLM loads the entry point in all of its processes, whoever drafts there. So nothing else is
imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fastdraft.serving.vllm.middleware import PredictionMiddleware
    from fastdraft.serving.vllm.plugin import register
    from fastdraft.serving.vllm.settings import Settings
    from fastdraft.serving.vllm.v1.proposer import FastdraftProposer

__all__ = ["FastdraftProposer", "PredictionMiddleware", "Settings", "register"]

_MODULES: Final = {
    "FastdraftProposer": "v1.proposer",
    "PredictionMiddleware": "middleware",
    "Settings": "settings",
    "register": "plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
