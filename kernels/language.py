"""Triton, which is imported here alone: where it is missing, plain versions do all the work.

Kernels stand in the file of their operation, below its plain version. Without Triton they are
functions like any other, which nobody calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = SimpleNamespace(constexpr=lambda value: value)

__all__ = ["has_kernels", "jit", "next_power_of_2", "tl"]


def jit(function: Any = None, **options: Any) -> Any:
    """As `triton.jit`."""
    if triton is not None:
        return triton.jit(function, **options)
    return function or (lambda each: each)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def has_kernels(values: Tensor) -> bool:
    """True if Triton's kernels take such logits, or others of their type on their device.

    They do on CUDA and ROCm devices, but for float64.
    """
    return triton is not None and values.is_cuda and values.dtype != torch.float64
