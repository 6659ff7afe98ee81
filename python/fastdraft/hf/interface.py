"""What of transformers' interface depends on its version."""

from __future__ import annotations

from typing import Final

from transformers.generation.utils import GenerateDecoderOnlyOutput

from fastdraft.errors import InvalidValueError
from fastdraft.versions import newer

__all__ = ["CACHE", "unfit"]

CACHE: Final = next(
    name
    for name in ("cache", "past_key_values")
    if name in GenerateDecoderOnlyOutput.__annotations__
)
"""The key-value cache in the arguments of a model and among the fields of its outputs: `cache` from
transformers 5.24 on."""


def unfit(problem: str) -> InvalidValueError:
    """The error for a model that is not called as `problem` says it must be.

    It names a transformers newer than was tested, which may call models otherwise.
    """
    sentence = newer()
    return InvalidValueError(problem if sentence is None else f"{sentence} ({problem})")
