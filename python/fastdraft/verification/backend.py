"""Which kernels do the work: those in Triton, or those in plain PyTorch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from fastdraft.kernels import reference


def kernels_for(values: Tensor) -> ModuleType:
    """The kernels for such logits, or other floating-point values on their device.

    Triton's on CUDA and ROCm devices, but for float64, or where Triton is not installed.
    """
    if values.is_cuda and values.dtype != torch.float64 and _has_triton():
        return importlib.import_module("fastdraft.kernels.fused")
    return reference


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
