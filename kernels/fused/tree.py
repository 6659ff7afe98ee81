"""Depths, attention masks and compaction of drafts that are trees, in one launch each.

`fastdraft.kernels.reference.trees` defines them. Each slot of a block walks up to the text's last
token, all at once; the parents on the way come from the first-level cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdraft.kernels.fused import config
from fastdraft.kernels.fused.arguments import Place
from fastdraft.kernels.fused.rows import parent_slot


class _Parents(NamedTuple):
    """What `parent_slot` reads of `Drafts`. Made in kernels."""

    parents: Any
    drafted: Any


@triton.jit
def _up(slot, place, drafts):
    """The parent of each slot; the text's last token and slots past the draft are their own."""
    parent = parent_slot(place, slot, drafts)
    return tl.where((slot > 0) & (slot <= place.size), parent, slot)


@triton.jit
def _place(block, offsets, drafted, blocks):
    """That of the first row of the request that a block of slots belongs to."""
    request = block // blocks
    start = tl.load(offsets + request)
    size = tl.load(offsets + request + 1) - start
    start = tl.minimum(tl.maximum(start, 0), drafted).to(tl.int32)
    size = tl.minimum(tl.maximum(size, 0), drafted)
    return Place(start + request, request, start + request, size.to(tl.int32))


@triton.jit(
    do_not_specialize=("drafted", "slots", "blocks"),
    do_not_specialize_on_alignment=("parents", "offsets"),
)
def depths_kernel(parents, offsets, depths, drafted, slots, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    drafts = _Parents(parents, drafted)
    place = _place(block, offsets, drafted, blocks)
    slot = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.zeros((BLOCK,), tl.int64)
    current = slot
    above = _up(current, place, drafts)
    while tl.max((above != current).to(tl.int32)) > 0:
        depth += (above != current).to(tl.int64)
        current = above
        above = _up(current, place, drafts)
    tl.store(depths + place.request.to(tl.int64) * slots + slot, depth, mask=slot < slots)


@triton.jit(
    do_not_specialize=("drafted", "slots", "blocks"),
    do_not_specialize_on_alignment=("parents", "offsets"),
)
def mask_kernel(
    parents,
    offsets,
    seen,
    drafted,
    slots,
    blocks,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)
    drafts = _Parents(parents, drafted)
    place = _place(block, offsets, drafted, blocks)
    slot = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
    row = (place.request.to(tl.int64) * slots + slot) * slots
    for start in range(0, slots, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        current = slot
        sees = current[:, None] == column[None, :]
        above = _up(current, place, drafts)
        while tl.max((above != current).to(tl.int32)) > 0:
            current = above
            sees |= current[:, None] == column[None, :]
            above = _up(current, place, drafts)
        inside = (slot < slots)[:, None] & (column < slots)[None, :]
        tl.store(seen + row[:, None] + column[None, :], sees.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=("count", "slots"), do_not_specialize_on_alignment=("path",))
def compaction_kernel(path, indices, count, slots, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = index % slots
    # The path has one column less: it leaves out the text's last token.
    place = index - index // slots - 1
    accepted = tl.load(path + place, mask=(index < count) & (slot > 0), other=-1).to(tl.int64)
    tl.store(indices + index, tl.where(accepted >= 0, accepted + 1, slot), mask=index < count)


def tree_depths(parents: Tensor, offsets: Tensor, *, max_draft: int) -> Tensor:
    """The reference's `tree_depths`, in one launch."""
    requests, slots = len(offsets) - 1, max_draft + 1
    depths = torch.empty(requests, slots, dtype=torch.int64, device=parents.device)
    blocks = -(-slots // config.SLOTS)
    with torch.cuda.device_of(parents):
        depths_kernel[(requests * blocks,)](
            parents,
            offsets,
            depths,
            len(parents),
            slots,
            blocks,
            BLOCK=config.SLOTS,
            num_warps=1,
        )
    return depths


def tree_attention_mask(parents: Tensor, offsets: Tensor, *, max_draft: int) -> Tensor:
    """The reference's `tree_attention_mask`, in one launch."""
    requests, slots = len(offsets) - 1, max_draft + 1
    seen = torch.empty(requests, slots, slots, dtype=torch.bool, device=parents.device)
    blocks = -(-slots // config.MASK_SLOTS)
    with torch.cuda.device_of(parents):
        mask_kernel[(requests * blocks,)](
            parents,
            offsets,
            seen.view(torch.uint8),
            len(parents),
            slots,
            blocks,
            BLOCK=config.MASK_SLOTS,
            COLUMNS=config.SLOTS,
            num_warps=1,
        )
    return seen


def compaction_indices(path: Tensor) -> Tensor:
    """The reference's `compaction_indices`, in one launch."""
    requests, slots = path.shape[0], path.shape[1] + 1
    indices = torch.empty(requests, slots, dtype=torch.int64, device=path.device)
    with torch.cuda.device_of(path):
        compaction_kernel[(-(-indices.numel() // config.SLOTS),)](
            path.contiguous(),
            indices,
            indices.numel(),
            slots,
            BLOCK=config.SLOTS,
            num_warps=1,
        )
    return indices
