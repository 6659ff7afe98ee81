"""The tuples that kernels take and pass on, in place of long lists of operands.

Triton takes a NamedTuple apart where a kernel is launched, and compiles it as if its members were
arguments of their own, None and constants too. With one difference, in all versions from 3.3 to
3.9: `do_not_specialize` and `do_not_specialize_on_alignment` do not reach into a tuple. So what
changes from one batch to the next, and what callers may cut out of other tensors, are arguments of
their own, `PER_BATCH` and `ANY_ALIGNMENT`; a kernel packs them into tuples of its own at once.
Triton 3.3 allows neither None nor constants in a tuple made in a kernel. Any pointer stands there
for an operand that is missing, and a constant tells. In the interpreter a constant member has to
stand to the right of a tensor: a number times a constant is a constant.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from fastdraft.kernels.fused import config
from fastdraft.kernels.operands import Batch

# Operands that a kernel is not compiled anew for: they change from one batch to the next.
PER_BATCH = (
    *("rows", "requests", "drafted", "max_draft", "allowed_stride", "programs", "tiles", "count"),
)
# Nor for how these lie, of which only few values are read.
ANY_ALIGNMENT = (
    "draft_ids",
    "parents",
    "offsets",
    "allowed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seeds",
    "positions",
)


class Rows(NamedTuple):
    """Rows of a value for each token of the vocabulary: logits, or what drafts were drawn from.

    data: bfloat16, float16 or float32 (rows, vocabulary).
    row_stride, token_stride: in values.
    vocabulary: their number in a row.
    WIDTH: how many values are loaded together.
    ALIGNED: every row begins at a multiple of so many values.
    CONTIGUOUS: whether token_stride is 1.
    """

    data: Any
    row_stride: Any
    token_stride: Any
    vocabulary: Any
    WIDTH: Any
    ALIGNED: Any
    CONTIGUOUS: Any

    @classmethod
    def of(cls, values: Tensor, width: int | None = None) -> Rows:
        """width: that of one load, unless given."""
        constants = width or config.width(values.dtype), config.unit(values), values.stride(1) == 1
        row_stride, token_stride = values.stride()
        vocabulary = values.shape[1]
        return cls(values, row_stride, token_stride, vocabulary, *map(_constant, constants))


class Config(NamedTuple):
    """What a kernel is compiled for, besides its operands.

    REQUESTS: how many requests are looked through together for the one that a row belongs to.
    BLOCK: at least the chunks of a row, a power of two.
    CHUNKS: the chunks that a program looks at together.
    SLOTS: the slots of a draft that are looked at together.
    WAIT: the instruction that waits for a wave's stores, None for none.
    ALLOWED, TREE: whether there is a mask, whether there are parents.
    """

    REQUESTS: Any
    BLOCK: Any
    CHUNKS: Any
    SLOTS: Any
    WAIT: Any
    ALLOWED: Any
    TREE: Any

    @classmethod
    def of(cls, batch: Batch) -> Config:
        return cls(
            _constant(config.requests_block(batch.requests)),
            _constant(config.chunks_block(batch.logits.shape[1])),
            _constant(config.TILE_CHUNKS),
            _constant(config.SLOTS),
            _constant(config.wait_for_stores()),
            _constant(batch.allowed is not None),
            _constant(batch.parents is not None),
        )


@functools.lru_cache(typed=True)
def _constant(value: object) -> object:
    """A constant member of a tuple: the same one each time, which launches recognise quickly."""
    return None if value is None else tl.constexpr(value)


class Drafts(NamedTuple):
    """The drafts of a batch, and its sizes. Made in kernels.

    draft_ids, parents: int32 or int64 (drafted,); offsets: int64 (requests + 1,); the sizes are
    int32 scalars.
    """

    draft_ids: Any
    parents: Any
    offsets: Any
    rows: Any
    requests: Any
    drafted: Any
    max_draft: Any


class Place(NamedTuple):
    """A row of logits in its request. Made in kernels; int32 scalars.

    first: the request's first row; size: how many draft tokens it has, at most max_draft.
    """

    row: Any
    request: Any
    first: Any
    size: Any


class Statistics(NamedTuple):
    """What row statistics hold of the chunks of one row: float32 (chunks,) each. Made in kernels.

    maximum: each chunk's largest value m; sum: its sum of exp((x - m) / T).
    """

    maximum: Any
    sum: Any


class Draws(NamedTuple):
    """What the tokens of each request are drawn by. Made in kernels.

    temperature: float32 (requests,); seeds, positions: int64 (requests,).
    """

    temperature: Any
    seeds: Any
    positions: Any


def drafts_of(batch: Batch) -> dict[str, Any]:
    """The arguments that `Drafts` are made of, by name."""
    return {
        "draft_ids": batch.draft_ids,
        "parents": batch.draft_ids if batch.parents is None else batch.parents,
        "offsets": batch.offsets,
        "rows": len(batch.logits),
        "requests": batch.requests,
        "drafted": len(batch.draft_ids),
        "max_draft": batch.max_draft,
    }


def mask_of(batch: Batch) -> dict[str, Any]:
    """The arguments for the tokens that are allowed, by name."""
    if batch.allowed is None:
        return {"allowed": batch.offsets, "allowed_stride": 0}
    return {"allowed": batch.allowed, "allowed_stride": batch.allowed.stride(0)}
