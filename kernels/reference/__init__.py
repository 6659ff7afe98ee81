"""Every verification operation in plain, vectorised PyTorch: the definition, and the CPU path."""

from __future__ import annotations

from fastdraft.kernels.reference.acceptance import (
    Status,
    accept,
    accept_tree,
    verify_greedy,
    verify_sampled,
)
from fastdraft.kernels.reference.noise import exponential, exponential_noise, philox
from fastdraft.kernels.reference.sampling import CHUNK, argmax, draw, weigh
from fastdraft.kernels.reference.trees import compaction_indices, tree_attention_mask, tree_depths

__all__ = [
    "CHUNK",
    "Status",
    "accept",
    "accept_tree",
    "argmax",
    "compaction_indices",
    "draw",
    "exponential",
    "exponential_noise",
    "philox",
    "tree_attention_mask",
    "tree_depths",
    "verify_greedy",
    "verify_sampled",
    "weigh",
]
