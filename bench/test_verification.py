"""Verification and the alignment of late drafts, on a CPU and, where there is one, on a GPU.

To compare two commits; bench/verification.py measures a GPU against its bandwidth and others'
kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verification import VERBS, Operands, Sizes, aligned, fastdraft_entry

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def complete(call: Any, device: torch.device) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("verb", VERBS)
def test_verify(benchmark: Any, verb: str, batch: int, device: torch.device) -> None:
    """Drafts of four tokens, of a vocabulary of 32,000."""
    operands = Operands(verb, Sizes(batch, 4, 32_000, torch.float32), device, 0)
    benchmark(complete, fastdraft_entry(verb, operands), device)


@pytest.mark.parametrize("rows", [1, 64])
def test_align(benchmark: Any, rows: int, device: torch.device) -> None:
    benchmark(complete, aligned(rows, 1_000, 64, device), device)
