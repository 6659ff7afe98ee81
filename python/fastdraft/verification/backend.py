"""Which kernels do the work: those in Triton, or those in plain PyTorch."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from fastdraft.kernels import reference
from fastdraft.kernels.operands import Kernels


def kernels_for(values: Tensor) -> Kernels:
    """The kernels for such logits, or other floating-point values on their device.

    Triton's on CUDA and ROCm devices, but for float64, or where Triton is not installed.
    """
    if values.is_cuda and values.dtype != torch.float64 and _has_triton():
        from fastdraft.kernels import fused  # Here and not above: it needs Triton.

        return fused
    return reference


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
