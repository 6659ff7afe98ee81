"""Verification without checks, for a loop that makes all operands itself, step after step.

It checks those of its first step by `check_batch`. `Batch`, `Sampling` and `Warpers` say what the
operands are; `greedy.verify`, `sampled.verify` and `rejection.verify` take them as they are.
"""

from __future__ import annotations

from fastdraft.kernels import greedy, rejection, sampled
from fastdraft.kernels.operands import Batch, Sampling, Warpers
from fastdraft.verification.checks import check_batch, check_draft_logits

__all__ = [
    "Batch",
    "Sampling",
    "Warpers",
    "check_batch",
    "check_draft_logits",
    "greedy",
    "rejection",
    "sampled",
]
