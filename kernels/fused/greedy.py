"""Greedy verification in one launch.

A row is split among programs. Each keeps, for each of its lanes, the largest unit of consecutive
logits and where it was, then looks into the best unit for the token, and raises the row's result,
a packed key and token, to what it found: an atomic maximum, so the order of programs does not
matter. The program that finishes a request's last part compares the results with the draft.

Log-probabilities need sums of exponentials: the kernel of sampled verification has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fastdraft.kernels.fused import config
from fastdraft.kernels.fused.acceptance import accept
from fastdraft.kernels.fused.rows import (
    last_to_arrive,
    load_units,
    locate,
    logits_of,
    only_allowed,
    ordered_key,
    pack,
    unpack,
)
from fastdraft.kernels.fused.sampled import verify_sampled
from fastdraft.kernels.reference import Emitted
from fastdraft.kernels.workspace import Scratch, Size, Workspace
from torch import Tensor


@triton.jit
def _fold(x, UNITS: tl.constexpr, WIDTH: tl.constexpr):
    """The maximum of each unit, NaN if one is in it: (UNITS, WIDTH) to (UNITS,). WIDTH: 1, 4, 8."""
    if WIDTH == 8:
        even, odd = tl.split(tl.reshape(x, (UNITS, 4, 2)))
        x = tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL)
    if WIDTH != 1:
        even, odd = tl.split(tl.reshape(x, (UNITS, 2, 2)))
        even, odd = tl.split(tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL))
        x = tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL)
    return tl.reshape(x, (UNITS,))


@triton.jit
def _look(
    logits,
    allowed,
    tile,
    best,
    best_tile,
    token_stride,
    vocabulary,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Takes a tile of UNITS units into each lane's best, which stays where the two are equal."""
    unit = tile * UNITS + tl.arange(0, UNITS)
    x = load_units(logits, unit, token_stride, vocabulary, WIDTH, CONTIGUOUS, WHOLE)
    if ALLOWED:
        x = only_allowed(x, allowed, unit, vocabulary, WIDTH)
    largest = _fold(x, UNITS, WIDTH)
    better = (largest > best) | ((largest != largest) & (best == best))
    return tl.where(better, largest, best), tl.where(better, tile, best_tile)


@triton.jit(
    do_not_specialize=(
        "rows",
        "requests",
        "drafted",
        "max_draft",
        "programs",
        "tiles",
        "allowed_stride",
    ),
    do_not_specialize_on_alignment=("draft_ids", "parents", "offsets", "path"),
)
def greedy_kernel(
    logits,
    allowed,
    draft_ids,
    parents,
    offsets,
    row_results,
    request_arrivals,
    token_ids,
    lengths,
    status,
    path,
    row_stride,
    token_stride,
    allowed_stride,
    vocabulary,
    rows,
    requests,
    drafted,
    max_draft,
    programs,
    tiles,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    TREE: tl.constexpr,
    REQUESTS: tl.constexpr,
    SLOTS: tl.constexpr,
    WAIT: tl.constexpr,
):
    program = tl.program_id(0)
    row = program // programs
    request, first, size, used = locate(row, offsets, requests, rows, max_draft, REQUESTS)
    if not used:
        return

    logits = logits_of(logits, row, row_stride, WIDTH)
    if ALLOWED:
        allowed += row.to(tl.int64) * allowed_stride
    begin = (program % programs) * tiles
    end = tl.minimum(begin + tiles, tl.cdiv(vocabulary, UNITS * WIDTH))
    whole = tl.minimum(end, vocabulary // (UNITS * WIDTH))
    best = tl.full((UNITS,), float("-inf"), tl.float32)
    best_tile = tl.zeros((UNITS,), tl.int32) + begin
    for tile in range(begin, whole):
        best, best_tile = _look(
            logits, allowed, tile, best, best_tile, token_stride, vocabulary,
            UNITS, WIDTH, CONTIGUOUS, ALLOWED, True,
        )  # fmt: skip
    if whole < end:
        best, best_tile = _look(
            logits, allowed, whole, best, best_tile, token_stride, vocabulary,
            UNITS, WIDTH, CONTIGUOUS, ALLOWED, False,
        )  # fmt: skip

    # Of equal units the first, and in it the first of equal logits.
    found = tl.max(pack(ordered_key(best), best_tile * UNITS + tl.arange(0, UNITS)))
    key, unit = unpack(found)
    x = load_units(
        logits, tl.zeros((1,), tl.int32) + unit, token_stride, vocabulary, WIDTH, CONTIGUOUS, False
    )
    if ALLOWED:
        x = only_allowed(x, allowed, tl.zeros((1,), tl.int32) + unit, vocabulary, WIDTH)
    lane = tl.arange(0, WIDTH)[None, :]
    token = unit * WIDTH + tl.min(tl.where(ordered_key(x) == key, lane, WIDTH))
    tl.atomic_max(row_results + row, pack(key, token), sem="relaxed")

    if last_to_arrive(request_arrivals + request, (size + 1) * programs, WAIT):
        accept(
            request, first, size, row_results, None, None, draft_ids, drafted, parents,
            token_ids, lengths, status, path, None, None, max_draft, SLOTS, TREE, False, False,
        )  # fmt: skip


def verify_greedy(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    parents: Tensor | None = None,
    allowed: Tensor | None = None,
    logprobs: bool = False,
    raw_logprobs: bool = False,
    max_draft: int,
    workspace: Workspace | None = None,
) -> Emitted:
    """The reference's `verify_greedy` of logits of 16 or 32 bits, in one launch.

    The results are the workspace's buffers, if there is one.
    """
    if logprobs or raw_logprobs:
        return verify_sampled(
            logits,
            draft_ids,
            offsets,
            parents=parents,
            temperature=None,
            allowed=allowed,
            logprobs=logprobs,
            raw_logprobs=raw_logprobs,
            max_draft=max_draft,
            workspace=workspace,
        )
    rows, vocabulary = logits.shape
    requests = len(offsets) - 1
    scratch = Scratch(workspace, logits.device, Size(rows, requests, vocabulary, max_draft))
    token_ids, lengths, status = map(scratch.take, ("token_ids", "lengths", "status"))
    path = None if parents is None else scratch.take("path")
    width = config.unit(logits)
    programs, tiles = config.split_greedy(rows, vocabulary, logits.dtype)
    unused = status  # Where there is no operand, any pointer will do.
    with torch.cuda.device_of(logits):
        greedy_kernel[(rows * programs,)](
            logits,
            unused if allowed is None else allowed,
            draft_ids,
            unused if parents is None else parents,
            offsets,
            scratch.take("row_results"),
            scratch.take("request_arrivals"),
            token_ids,
            lengths,
            status,
            unused if path is None else path,
            *logits.stride(),
            0 if allowed is None else allowed.stride(0),
            vocabulary,
            rows,
            requests,
            len(draft_ids),
            max_draft,
            programs,
            tiles,
            UNITS=config.greedy_tile(logits.dtype) // width,
            WIDTH=width,
            CONTIGUOUS=logits.stride(1) == 1,
            ALLOWED=allowed is not None,
            TREE=parents is not None,
            REQUESTS=config.requests_block(requests),
            SLOTS=config.SLOTS,
            WAIT=config.wait_for_stores(),
            num_warps=config.WARPS,
        )
    return Emitted(token_ids, lengths, status, path, None, None)
