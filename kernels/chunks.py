"""Rows of logits in plain PyTorch: masked, in chunks, a slab of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from fastdraft.kernels import operands

# Rows are drawn in slabs of about this many logits: enough to hide the cost of an operator, few
# enough for a slab to stay in a CPU's cache, and for any batch to need little memory beyond its
# logits. No result depends on it.
_SLAB: Final = {"cpu": 1 << 20, "cuda": 1 << 26}


def mask(logits: Tensor, allowed: Tensor) -> Tensor:
    """A copy of logits (rows, vocabulary) with -inf where a token is not allowed.

    allowed: int32 (rows, ceil(vocabulary / 32)); bit t % 32 of word t // 32 is 1 where token t is.
    """
    bit = torch.arange(32, dtype=torch.int32, device=allowed.device)
    bits = ((allowed[:, :, None] >> bit) & 1).flatten(1)[:, : logits.shape[1]]
    return torch.where(bits.bool(), logits, -torch.inf)


def as_float(logits: Tensor) -> Tensor:
    """The logits in float32, or in float64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def chunked(logits: Tensor) -> Tensor:
    """The rows as (rows, chunks, chunk), filled up with -inf; a view where the shape allows one."""
    rows, vocabulary = logits.shape
    width = min(operands.CHUNK, vocabulary)
    chunks = -(-vocabulary // width)
    if chunks * width == vocabulary:
        return logits.reshape(rows, chunks, width)
    filled = logits.new_full((rows, chunks * width), -torch.inf)
    filled[:, :vocabulary] = logits
    return filled.view(rows, chunks, width)


def slabs(rows: int, logits: Tensor) -> Iterator[slice]:
    """Slices that cut `rows` rows, of the logits' size and device, into slabs."""
    slab = max(1, _SLAB.get(logits.device.type, _SLAB["cuda"]) // logits.shape[1])
    return (slice(start, start + slab) for start in range(0, rows, slab))


def chunk_of(chunks: Tensor, chunk: Tensor) -> Tensor:
    """The chosen chunk of each row: (rows, chunks, width) and (rows,) to (rows, width)."""
    return chunks[torch.arange(len(chunk), device=chunk.device), chunk]


def largest(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """The token and the value of the maximum of rows (rows, chunks, width)."""
    chunk_maximum = chunks.amax(-1)
    chunk = chunk_maximum.argmax(-1)
    token = chunk * chunks.shape[2] + chunk_of(chunks, chunk).argmax(-1)
    return token, chunk_maximum.amax(-1)


def total(weights: Tensor) -> Tensor:
    return weights.sum(-1).double().sum(-1)


def reads_back(x: Tensor) -> bool:
    """True if a value may steer the next computation: on a CPU, where that waits for nothing."""
    return x.device.type == "cpu"


def rows_of(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The request and the slot in it that each row stands for, int64 (rows,) both.

    Rows beyond the last request's are taken for its slots too.
    """
    row = torch.arange(rows, device=offsets.device)
    first = offsets[:-1] + torch.arange(len(offsets) - 1, device=offsets.device)
    request = torch.searchsorted(first, row, right=True) - 1
    return request, row - first[request]
