"""Every verification operation in plain, vectorised PyTorch: the definition, and the CPU path."""

from __future__ import annotations

from fastdraft.kernels.reference.acceptance import verify_greedy, verify_sampled
from fastdraft.kernels.reference.align import align
from fastdraft.kernels.reference.attention import attention, cached_attention, visible_columns
from fastdraft.kernels.reference.noise import exponential, exponential_noise, philox
from fastdraft.kernels.reference.rejection import verify_rejection
from fastdraft.kernels.reference.sampling import (
    CHUNK,
    Chosen,
    argmax,
    draw,
    mask,
    warp,
    weigh,
)
from fastdraft.kernels.reference.trees import compaction_indices, tree_attention_mask, tree_depths

__all__ = [
    "CHUNK",
    "Chosen",
    "align",
    "argmax",
    "attention",
    "cached_attention",
    "compaction_indices",
    "draw",
    "exponential",
    "exponential_noise",
    "mask",
    "philox",
    "tree_attention_mask",
    "tree_depths",
    "verify_greedy",
    "verify_rejection",
    "verify_sampled",
    "visible_columns",
    "warp",
    "weigh",
]
