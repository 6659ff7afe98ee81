"""transformers where it depends on the version: its names, and the private ones that hf uses.

No other module uses a private name of transformers. They are those of 5.24, and were read in 5.19
too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fastdraft.errors import InvalidValueError
from fastdraft.versions import newer

__all__ = [
    "CACHE",
    "attention_of",
    "compiled_forward",
    "decoding_scope",
    "is_callers_own",
    "is_recurrent",
    "prefill",
    "set_attention",
    "syncs_ranks",
    "unsupported_call",
]

CACHE: Final = next(
    name
    for name in ("cache", "past_key_values")
    if name in GenerateDecoderOnlyOutput.__annotations__
)
"""The key-value cache in the arguments of a model and among the fields of its outputs: `cache` from
transformers 5.24 on."""


def unsupported_call(problem: str) -> InvalidValueError:
    """The error for a model that is not called as `problem` says it must be.

    It names a transformers newer than was tested, which may call models otherwise.
    """
    sentence = newer()
    return InvalidValueError(problem if sentence is None else f"{sentence} ({problem})")


def prefill(
    model: Any, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> torch.Tensor:
    """Runs the prompts as `generate` does. Gives logits (rows, n, vocabulary) of the ends."""
    logits: torch.Tensor = model._prefill(input_ids, config, model_kwargs).logits
    return logits


def decoding_scope(model: Any) -> AbstractContextManager[None]:
    """The scope in which `generate` runs forwards of few tokens."""
    scope: AbstractContextManager[None] = model._optimize_model_for_decode()
    return scope


def compiled_forward(
    model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """The model's compiled forward; `None` unless plain `generate` compiles."""
    if not model._valid_auto_compile_criteria(model_kwargs, config):
        return None
    call: Callable[..., Any] = model.get_compiled_call(config.compile_config)
    return call


def syncs_ranks(model: Any, synced_gpus: bool | None) -> bool:
    """Says whether `generate` would run the forwards of all ranks together, which it does unasked
    for a model that FSDP or DeepSpeed ZeRO-3 spreads over several ranks."""
    return bool(
        model._extract_generation_mode_kwargs(None, {}, synced_gpus, None, None)["synced_gpus"]
    )


def is_callers_own(cache: Any) -> bool:
    """Says whether the caller of `generate` passed the cache."""
    return bool(getattr(cache, "_is_user_defined", False))


def is_recurrent(model: Any) -> bool:
    """Says whether the model has recurrent states."""
    return bool(getattr(model, "_is_stateful", False))


def attention_of(config: Any) -> str:
    """The name of a configuration's attention function."""
    name: str = config._attn_implementation
    return name


def set_attention(config: Any, name: str) -> None:
    """Replaces the attention function, without the checks and at any time."""
    config._attn_implementation = name
