"""Greedy verification: the argmax of each row, against the draft. One launch on a device.

There a row is split among programs. Each keeps, for each of its lanes, the largest unit of
consecutive logits and where it was, then looks into the best unit for the token, and raises the
row's result, a packed key and token, to what it found: an atomic maximum, so the order of programs
does not matter. The program that finishes a request's last part compares the results with the
draft.

Log-probabilities need sums of exponentials: the kernel of sampled verification has them. So do the
likeliest tokens.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fastdraft.kernels import config, grid, language, likeliest, sampled
from fastdraft.kernels.acceptance import Chosen, accept, emit, follow, join
from fastdraft.kernels.chunks import chunked, largest, mask, reads_back, slabs
from fastdraft.kernels.filters import log_softmax_of
from fastdraft.kernels.grid import Rows
from fastdraft.kernels.language import jit, tl
from fastdraft.kernels.operands import Batch, Verified
from fastdraft.kernels.workspace import Scratch, take_output

# numpy's argmax has vector instructions for these, PyTorch's has none. Of more logits, several
# threads find the maxima sooner.
_NUMPY: Final = (torch.float32, torch.float64)
_FEW: Final = 1 << 23
# Bytes of logits that a program looks at together.
_BYTES = tl.constexpr(config.GREEDY_BYTES)


def verify(batch: Batch) -> Verified:
    """Greedy verification."""
    return launch(batch) if language.has_kernels(batch.logits) else plain(batch)


def plain(batch: Batch) -> Verified:
    """The definition."""
    logits, allowed = batch.logits, batch.allowed
    is_plain = allowed is None and not (batch.logprobs or batch.raw_logprobs)
    if is_plain and reads_back(logits) and logits.dtype in _NUMPY and logits.numel() <= _FEW:
        values = logits.numpy(force=True)
        tokens = values.argmax(1).tolist()
        emitted = follow(tokens, lambda row: values.item(row, tokens[row]), batch)
    else:
        emitted = emit(argmax(logits, allowed, **batch.wanted), batch)
    if not batch.likeliest:
        return emitted
    return emitted._replace(likeliest=likeliest.plain(logits, batch.likeliest, allowed=allowed))


def argmax(
    logits: Tensor,
    allowed: Tensor | None = None,
    *,
    logprobs: bool = False,
    raw_logprobs: bool = False,
) -> Chosen:
    """The token and the value of each row's maximum, for logits (rows, vocabulary) of any stride.

    Ties go to the lowest id and NaN is above all, as in torch.argmax, which gives the same tokens
    but looks at one logit at a time on a CPU. allowed: as in `mask`.
    """
    if allowed is None and not logprobs and not raw_logprobs:
        return Chosen(*largest(chunked(logits)), None, None)
    parts = []
    for part in slabs(len(logits), logits):
        raw = logits[part]
        x = raw if allowed is None else mask(raw, allowed[part])
        token, maximum = largest(chunked(x))
        logprob = log_softmax_of(token, x) if logprobs else None
        raw_logprob = None
        if raw_logprobs:
            same = logprobs and allowed is None
            raw_logprob = logprob if same else log_softmax_of(token, raw)
        parts.append(Chosen(token, maximum, logprob, raw_logprob))
    return join(parts)


@jit
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


@jit
def _look(rows, values, allowed, tile, best, best_tile, UNITS: tl.constexpr,
          ALLOWED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Takes a tile of UNITS units into each lane's best, which stays where the two are equal."""
    unit = tile * UNITS + tl.arange(0, UNITS)
    x = grid.load_units(rows, values, unit, WHOLE)
    if ALLOWED:
        x = grid.only_allowed(x, allowed, rows, unit)
    largest = _fold(x, UNITS, rows.WIDTH)
    better = (largest > best) | ((largest != largest) & (best == best))
    return tl.where(better, largest, best), tl.where(better, tile, best_tile)


@jit
def greedy_kernel(batch, logits, draft, scratch, output, C):
    program = tl.program_id(0)
    place, used = grid.locate(program // batch.programs, batch, C.REQUESTS)
    if not used:
        return

    BYTES: tl.constexpr = logits.data.dtype.element_ty.primitive_bitwidth // 8
    UNITS: tl.constexpr = _BYTES // BYTES // logits.WIDTH
    TILE: tl.constexpr = UNITS * logits.WIDTH
    values = grid.values_of(logits, place.row)
    allowed = grid.mask_of(batch, place.row)
    begin = (program % batch.programs) * batch.tiles
    end = tl.minimum(begin + batch.tiles, tl.cdiv(logits.vocabulary, TILE))
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
    found = tl.max(grid.pack(grid.ordered_key(best), best_tile * UNITS + tl.arange(0, UNITS)))
    key, unit = grid.unpack(found)
    x = grid.load_allowed(logits, values, allowed, tl.zeros((1,), tl.int32) + unit, C.ALLOWED)
    lane = tl.arange(0, logits.WIDTH)[None, :]
    token = unit * logits.WIDTH + tl.min(tl.where(grid.ordered_key(x) == key, lane, logits.WIDTH))
    tl.atomic_max(scratch.row_results + place.row, grid.pack(key, token), sem="relaxed")

    arrivals = scratch.request_arrivals + place.request
    if grid.last_to_arrive(arrivals, (place.size + 1) * batch.programs, C.WAIT):
        accept(place, batch, logits, scratch.row_results, scratch, output, C)


def launch(batch: Batch) -> Verified:
    """The same of logits of 16 or 32 bits, in one launch.

    The results are the workspace's buffers, if there is one.
    """
    if batch.logprobs or batch.raw_logprobs or batch.likeliest:
        return sampled.launch_once(batch, None)
    logits = batch.logits
    output = take_output(batch)
    grid.run(
        greedy_kernel,
        len(logits),
        batch,
        scratch=Scratch.take(batch, "row_results", "request_arrivals"),
        output=output,
        logits=Rows.of(logits, config.unit(logits)),
        split=config.split_greedy(len(logits), logits.shape[1], logits.dtype),
    )
    return output
