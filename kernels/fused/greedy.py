"""Greedy verification in one launch.

A row is split among programs. Each keeps, for each of its lanes, the largest unit of consecutive
logits and where it was, then looks into the best unit for the token, and raises the row's result,
a packed key and token, to what it found: an atomic maximum, so the order of programs does not
matter. The program that finishes a request's last part compares the results with the draft.

Log-probabilities need sums of exponentials: the kernel of sampled verification has them. So do the
likeliest tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastdraft.kernels.fused import config, sampled
from fastdraft.kernels.fused.acceptance import accept
from fastdraft.kernels.fused.arguments import (
    ANY_ALIGNMENT,
    PER_BATCH,
    Config,
    Drafts,
    Rows,
    drafts_of,
    mask_of,
)
from fastdraft.kernels.fused.rows import (
    last_to_arrive,
    load_allowed,
    load_units,
    locate,
    only_allowed,
    ordered_key,
    pack,
    unpack,
    values_of,
)
from fastdraft.kernels.operands import Batch, Verified
from fastdraft.kernels.workspace import Scratch, take_output


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
def _look(rows, values, allowed, tile, best, best_tile, UNITS: tl.constexpr,
          ALLOWED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Takes a tile of UNITS units into each lane's best, which stays where the two are equal."""
    unit = tile * UNITS + tl.arange(0, UNITS)
    x = load_units(rows, values, unit, WHOLE)
    if ALLOWED:
        x = only_allowed(x, allowed, rows, unit)
    largest = _fold(x, UNITS, rows.WIDTH)
    better = (largest > best) | ((largest != largest) & (best == best))
    return tl.where(better, largest, best), tl.where(better, tile, best_tile)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def greedy_kernel(
    logits,
    scratch,
    output,
    draft_ids,
    parents,
    offsets,
    allowed,
    allowed_stride,
    rows,
    requests,
    drafted,
    max_draft,
    programs,
    tiles,
    UNITS: tl.constexpr,
    C,
):
    program = tl.program_id(0)
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    place, used = locate(program // programs, drafts, C.REQUESTS)
    if not used:
        return

    TILE: tl.constexpr = UNITS * logits.WIDTH
    values = values_of(logits, place.row)
    allowed += place.row.to(tl.int64) * allowed_stride
    begin = (program % programs) * tiles
    end = tl.minimum(begin + tiles, tl.cdiv(logits.vocabulary, TILE))
    whole = tl.minimum(end, logits.vocabulary // TILE)
    best = tl.full((UNITS,), float("-inf"), tl.float32)
    best_tile = tl.zeros((UNITS,), tl.int32) + begin
    for tile in range(begin, whole):
        best, best_tile = _look(
            logits, values, allowed, tile, best, best_tile, UNITS, C.ALLOWED, True
        )
    if whole < end:
        best, best_tile = _look(
            logits, values, allowed, whole, best, best_tile, UNITS, C.ALLOWED, False
        )

    # Of equal units the first, and in it the first of equal logits.
    found = tl.max(pack(ordered_key(best), best_tile * UNITS + tl.arange(0, UNITS)))
    key, unit = unpack(found)
    x = load_allowed(logits, values, allowed, tl.zeros((1,), tl.int32) + unit, C.ALLOWED)
    lane = tl.arange(0, logits.WIDTH)[None, :]
    token = unit * logits.WIDTH + tl.min(tl.where(ordered_key(x) == key, lane, logits.WIDTH))
    tl.atomic_max(scratch.row_results + place.row, pack(key, token), sem="relaxed")

    arrivals = scratch.request_arrivals + place.request
    if last_to_arrive(arrivals, (place.size + 1) * programs, C.WAIT):
        accept(place, drafts, scratch, output, C.SLOTS)


def verify_greedy(batch: Batch) -> Verified:
    """The reference's `verify_greedy` of logits of 16 or 32 bits, in one launch.

    The results are the workspace's buffers, if there is one.
    """
    if batch.logprobs or batch.raw_logprobs or batch.likeliest:
        return sampled.verify_in_one_launch(batch, None)
    logits = batch.logits
    output = take_output(batch)
    width = config.unit(logits)
    programs, tiles = config.split_greedy(len(logits), logits.shape[1], logits.dtype)
    with torch.cuda.device_of(logits):
        greedy_kernel[(len(logits) * programs,)](
            Rows.of(logits, width),
            Scratch.take(batch, "row_results", "request_arrivals"),
            output,
            **drafts_of(batch),
            **mask_of(batch),
            programs=programs,
            tiles=tiles,
            UNITS=config.greedy_tile(logits.dtype) // width,
            C=Config.of(batch),
            num_warps=config.WARPS,
        )
    return output
