"""Operations on a device in one to four launches: Triton kernels that read what is large once.

The functions are those of `fastdraft.kernels.reference`, which defines what they do, with the same
operands. They run wherever Triton does.
"""

from __future__ import annotations

from fastdraft.kernels.fused.align import align
from fastdraft.kernels.fused.attention import cached_attention
from fastdraft.kernels.fused.greedy import verify_greedy
from fastdraft.kernels.fused.rejection import verify_rejection
from fastdraft.kernels.fused.sampled import verify_sampled
from fastdraft.kernels.fused.tree import compaction_indices, tree_attention_mask, tree_depths

__all__ = [
    "align",
    "cached_attention",
    "compaction_indices",
    "tree_attention_mask",
    "tree_depths",
    "verify_greedy",
    "verify_rejection",
    "verify_sampled",
]
