"""What of transformers' interface depends on its version."""

from __future__ import annotations

from typing import Final

from transformers.generation.utils import GenerateDecoderOnlyOutput

__all__ = ["CACHE"]

CACHE: Final = next(
    name
    for name in ("cache", "past_key_values")
    if name in GenerateDecoderOnlyOutput.__annotations__
)
"""The key-value cache in the arguments of a model and among the fields of its outputs: `cache` from
transformers 5.24 on."""
