"""Filters: from which logit on a row is kept, by top-k, top-p and min-p, without a sort.

`fastdraft.kernels.reference.sampling.weigh` defines what is kept. A threshold is the largest value
that, with all above it, is enough: k values, or the nucleus' share of the weights. It is sought
among the values themselves, in the order of their keys, which is exact; a step of the search cuts
the values between two bounds in `_CUTS + 1` equal parts.

**What is read.** The row statistics hold, besides each chunk's maximum and sum, the maxima of its
*parts* (`part_maximum`, float32 (rows, chunks, PARTS), of what is allowed, -inf past the
vocabulary). Their k-th largest bounds the threshold from below, and so does the value from which on
they alone are the nucleus. Only parts that reach this bound are read, from then on out of the
caches: about as many as there are tokens to keep, in most rows. Where there is no such bound or
many values reach it (a flat row) it is the whole row, which takes longer and is as exact.

A nucleus has a second bound: what lies below M + T log(r / V), with V values in the row, weighs
less than r together, relative to the maximum M.

**Where a part lies.** In the tile of the statistics, a part is what two neighbouring lanes hold of
a chunk in all repeats, 16 bytes a load: its maximum costs nothing on the way to the chunk's.

What is left of a row is `lowest`, float32 (rows,), -inf where nothing is filtered, and in
`chunk_sum` the sums of what is kept of each chunk. All sums have one order, so the result does not
depend on the batch.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from fastdraft.kernels.fused import config
from fastdraft.kernels.fused.rows import (
    CHUNK,
    EMPTY_KEY,
    INFINITE_KEY,
    load_units,
    locate,
    only_allowed,
    ordered_key,
    value_of,
)
from fastdraft.kernels.fused.statistics import OUT, PARTS, scale_of, totals
from fastdraft.kernels.workspace import Scratch
from torch import Tensor

# Values that a program looks at together, at eight or so a thread.
_TILE = tl.constexpr(1024)
_WARPS: Final = 4
# How many bounds a step of a search tries.
_CUTS = tl.constexpr(4)
# Keys of the floor, which need not be exact, leave out so many bits.
_COARSE = tl.constexpr(16)
# The bits of a float32 key in which values of a type do not differ.
_UNUSED_BITS: Final = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
# What a nucleus needs at least: the likeliest token.
_SOME = tl.constexpr(1e-30)


@triton.jit
def _value_of(key, UNUSED: tl.constexpr):
    """The value of the leading bits of a key: the one in whose key the others are unused."""
    return value_of(tl.where(key < 0, ~(~key << UNUSED), key << UNUSED))


@triton.jit
def _load_listed(
    logits,
    allowed,
    unit_list,
    listed,
    more,
    index,
    token_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
):
    """Units that are listed, float32 (*index.shape, WIDTH), and which they are.

    An entry of the list, of which there are `listed`, stands for 2**more units: one, or a part by
    its first. index: of units; past the list's end they are -inf, and units beyond the row.
    """
    entry = index >> more
    within = index - (entry << more)
    beyond = tl.cdiv(vocabulary, CHUNK) * (CHUNK // WIDTH)
    unit = tl.load(unit_list + entry, mask=entry < listed, other=beyond)
    unit += within // 2 * 32 + within % 2
    x = load_units(logits, unit, token_stride, vocabulary, WIDTH, CONTIGUOUS, False)
    if ALLOWED:
        x = only_allowed(x, allowed, unit, vocabulary, WIDTH)
    return x, unit


@triton.jit
def _load_tile(
    logits,
    allowed,
    part_maximum,
    unit_list,
    count,
    more,
    start,
    token_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    """_TILE of the values to search, (_TILE / WIDTH, WIDTH), in an order that never changes.

    They are the first `count` maxima of parts, if MAXIMA, or what a list of so many entries gives;
    -inf past their end.
    """
    unit = tl.arange(0, _TILE // WIDTH)
    if MAXIMA:
        index = start + unit[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        x = tl.load(part_maximum + index, mask=index < count, other=float("-inf"))
    else:
        index = start // WIDTH + unit
        x, _ = _load_listed(
            logits, allowed, unit_list, count, more, index, token_stride, vocabulary,
            WIDTH, CONTIGUOUS, ALLOWED,
        )  # fmt: skip
    return x


@triton.jit
def _search(
    logits,
    allowed,
    part_maximum,
    unit_list,
    count,
    more,
    floor,
    maximum,
    need,
    scale,
    token_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    MAXIMA: tl.constexpr,
    WEIGHED: tl.constexpr,
    UNUSED: tl.constexpr,
):
    """The largest value that with all above it is enough; floor where no value above it is.

    The values are those of `_load_tile`. They count 1, or 2**((x - maximum) * scale) if WEIGHED;
    need: what is enough, above 0. No two values are told apart whose keys are the same
    without the UNUSED bits. One pass over the values for each 2.3 bits between floor and maximum.
    """
    size = count
    if not MAXIMA:
        size = (count << more) * WIDTH
    bottom = ordered_key(floor) >> UNUSED
    lowest = bottom
    above = (ordered_key(maximum) >> UNUSED) + 1
    # Up to 2**32, and none where a temperature that is no number leaves no order to search in.
    span = tl.where(above > lowest, above - lowest, 0).to(tl.uint32)
    while span > 1:
        step = tl.maximum(span // (_CUTS + 1), 1).to(tl.int32)
        first = _value_of(lowest + step, UNUSED)
        second = _value_of(lowest + step * 2, UNUSED)
        third = _value_of(lowest + step * 3, UNUSED)
        fourth = _value_of(lowest + step * 4, UNUSED)
        from_first = tl.zeros((_TILE // WIDTH, WIDTH), tl.float32)
        from_second = tl.zeros((_TILE // WIDTH, WIDTH), tl.float32)
        from_third = tl.zeros((_TILE // WIDTH, WIDTH), tl.float32)
        from_fourth = tl.zeros((_TILE // WIDTH, WIDTH), tl.float32)
        for start in range(0, size, _TILE):
            x = _load_tile(
                logits, allowed, part_maximum, unit_list, count, more, start, token_stride,
                vocabulary, WIDTH, CONTIGUOUS, ALLOWED, MAXIMA,
            )  # fmt: skip
            weight = tl.full((_TILE // WIDTH, WIDTH), 1.0, tl.float32)
            if WEIGHED:
                weight = tl.exp2((x - maximum) * scale)
            from_first += tl.where(x >= first, weight, 0.0)
            from_second += tl.where(x >= second, weight, 0.0)
            from_third += tl.where(x >= third, weight, 0.0)
            from_fourth += tl.where(x >= fourth, weight, 0.0)
        # One reduction for all four, whose sums fall.
        sums = tl.join(tl.join(from_first, from_second), tl.join(from_third, from_fourth))
        enough = tl.sum((tl.sum(tl.sum(sums, 1), 0) >= need).to(tl.int32))
        if enough < _CUTS:
            above = tl.minimum(above, lowest + step * (enough + 1))
        lowest += step * enough
        span = tl.where(above > lowest, above - lowest, 0).to(tl.uint32)
    return tl.where(lowest > bottom, _value_of(lowest, UNUSED), floor)


@triton.jit
def _weigh(
    logits,
    allowed,
    unit_list,
    count,
    more,
    lowest,
    maximum,
    scale,
    token_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
):
    """What the listed values from `lowest` up weigh together."""
    weights = tl.zeros((_TILE // WIDTH, WIDTH), tl.float32)
    for start in range(0, (count << more) * WIDTH, _TILE):
        x = _load_tile(
            logits, allowed, None, unit_list, count, more, start, token_stride, vocabulary,
            WIDTH, CONTIGUOUS, ALLOWED, False,
        )  # fmt: skip
        weights += tl.where(x >= lowest, tl.exp2((x - maximum) * scale), 0.0)
    return tl.sum(weights)


@triton.jit
def _list_parts(part_maximum, part_list, parts, floor, WIDTH: tl.constexpr):
    """Lists the parts that reach the floor by their first units, in order; how many they are."""
    listed = 0
    for start in range(0, parts, _TILE):
        part = start + tl.arange(0, _TILE)
        best = tl.load(part_maximum + part, mask=part < parts, other=float("-inf"))
        reaches = (best >= floor) & (best > float("-inf"))
        place = listed + tl.cumsum(reaches.to(tl.int32), 0) - 1
        first = part // PARTS * (CHUNK // WIDTH) + part % PARTS * 2
        tl.store(part_list + place, first, mask=reaches)
        listed += tl.sum(reaches.to(tl.int32))
    tl.debug_barrier()
    return listed


@triton.jit
def _list_units(
    logits,
    allowed,
    part_list,
    listed,
    more,
    unit_list,
    room,
    floor,
    token_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
):
    """Lists the units of the listed parts that reach the floor, or where there is no room for as
    many, the parts: (how many entries, what each stands for, as in `_load_listed`)."""
    found = 0
    start = 0
    while (start < listed << more) & (found <= room):
        index = start + tl.arange(0, _TILE // WIDTH)
        x, unit = _load_listed(
            logits, allowed, part_list, listed, more, index, token_stride, vocabulary,
            WIDTH, CONTIGUOUS, ALLOWED,
        )  # fmt: skip
        best = tl.max(x, 1)
        reaches = (best >= floor) & (best > float("-inf"))
        place = found + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(unit_list + place, unit, mask=reaches & (place < room))
        found += tl.sum(reaches.to(tl.int32))
        start += _TILE // WIDTH
    tl.debug_barrier()
    count = found
    each = found * 0
    if found > room:
        # Another pointer would do, were compilers at ease with one that is chosen at run time.
        for copied in range(0, listed, _TILE):
            entry = copied + tl.arange(0, _TILE)
            part = tl.load(part_list + entry, mask=entry < listed)
            tl.store(unit_list + entry, part, mask=entry < listed)
        tl.debug_barrier()
        count = listed
        each = found * 0 + more
    return count, each


@triton.jit
def _replace_sums(
    logits,
    allowed,
    chunk_maximum,
    chunk_sum,
    part_sum,
    part_list,
    listed,
    lowest,
    scale,
    token_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
):
    """Makes the sums of a row's chunks those of what is kept, which the listed parts hold.

    part_sum: room for a number a part.
    """
    chunks = tl.cdiv(vocabulary, CHUNK)
    tl.debug_barrier()  # What was there in place of the sums is no longer read.
    for start in range(0, chunks * PARTS, _TILE):
        part = start + tl.arange(0, _TILE)
        tl.store(part_sum + part, tl.zeros((_TILE,), tl.float32), mask=part < chunks * PARTS)
    tl.debug_barrier()
    loads: tl.constexpr = CHUNK // PARTS // WIDTH
    at_once: tl.constexpr = _TILE // (loads * WIDTH)
    for start in range(0, listed, at_once):
        entry = start + tl.arange(0, at_once)
        first = tl.load(part_list + entry, mask=entry < listed, other=0)
        chunk = first // (CHUNK // WIDTH)
        anchor = tl.load(chunk_maximum + chunk)
        load = tl.arange(0, loads)
        unit = first[:, None] + (load // 2 * 32 + load % 2)[None, :]
        x = load_units(logits, unit, token_stride, vocabulary, WIDTH, CONTIGUOUS, False)
        if ALLOWED:
            x = only_allowed(x, allowed, unit, vocabulary, WIDTH)
        weights = tl.where(x >= lowest, tl.exp2((x - anchor[:, None, None]) * scale), 0.0)
        place = part_sum + chunk * PARTS + first % 32 // 2
        tl.store(place, tl.sum(tl.sum(weights, 2), 1), mask=entry < listed)
    tl.debug_barrier()
    chunks_at_once: tl.constexpr = _TILE // PARTS
    for start in range(0, chunks, chunks_at_once):
        chunk = start + tl.arange(0, chunks_at_once)
        place = part_sum + chunk[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
        sums = tl.load(place, mask=(chunk < chunks)[:, None], other=0.0)
        tl.store(chunk_sum + chunk, tl.sum(sums, 1), mask=chunk < chunks)


@triton.jit(
    do_not_specialize=("rows", "requests", "max_draft", "allowed_stride"),
    do_not_specialize_on_alignment=(
        "allowed",
        "offsets",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    ),
)
def threshold_kernel(
    logits,
    allowed,
    offsets,
    temperature,
    top_k,
    top_p,
    min_p,
    chunk_maximum,
    chunk_sum,
    part_maximum,
    part_list,
    lowest,
    row_stride,
    token_stride,
    allowed_stride,
    vocabulary,
    rows,
    requests,
    max_draft,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    MORE: tl.constexpr,
    UNUSED: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0)
    request, _, _, used = locate(row, offsets, requests, rows, max_draft, REQUESTS)
    if not used:
        return
    nothing = tl.full((), float("-inf"), tl.float32)
    heat = tl.load(temperature + request)
    # Without a filter: no number of tokens, the whole share, no ratio.
    most = tl.full((), 0.0, tl.float32)
    share = tl.full((), 1.0, tl.float32)
    ratio = tl.full((), 0.0, tl.float32)
    if TOP_K:
        k = tl.load(top_k + request)
        most = tl.where((k > 0) & (k < vocabulary), k, 0).to(tl.float32)
    if TOP_P:
        share = tl.load(top_p + request)
    if MIN_P:
        ratio = tl.load(min_p + request)
    if (heat == 0) | ((most == 0) & (share >= 1) & (ratio <= 0)):
        tl.store(lowest + row, nothing)
        return

    logits += row.to(tl.int64) * row_stride
    if ALLOWED:
        allowed += row.to(tl.int64) * allowed_stride
    chunks = tl.cdiv(vocabulary, CHUNK)
    parts = chunks * PARTS
    chunk_maximum += row.to(tl.int64) * chunks
    chunk_sum += row.to(tl.int64) * chunks
    part_maximum += row.to(tl.int64) * parts
    part_list += row.to(tl.int64) * parts
    # Finite, so that the maximum itself weighs 1 at any temperature.
    scale = tl.minimum(scale_of(request, temperature, False), 3e38)
    keys, key, weights = totals(chunk_maximum, chunk_sum, scale, vocabulary, BLOCK)
    if (key >= INFINITE_KEY) | (key <= EMPTY_KEY):
        tl.store(lowest + row, nothing)
        return
    maximum = value_of(key)
    total = tl.sum(weights)

    least = nothing
    if MIN_P:
        log_ratio = tl.log(tl.where(ratio > 0, ratio, 1.0).to(tl.float64))
        bound = (maximum.to(tl.float64) + heat.to(tl.float64) * log_ratio).to(tl.float32)
        least = tl.where(ratio > 0, bound, nothing)

    # Nothing below the floor can be the answer. It is sought where most often it is: from the least
    # of the chunks' maxima on, which as many values reach as there are chunks.
    start = value_of(tl.min(tl.where(keys == OUT, key, keys)))
    floor = least
    if most > 0:
        floor = _search(
            logits, allowed, part_maximum, part_list, parts, 0,
            tl.where(most <= chunks, start, nothing), maximum, most, scale, token_stride,
            vocabulary, WIDTH, CONTIGUOUS, ALLOWED, True, False, _COARSE,
        )  # fmt: skip
    elif share < 1:
        floor = _search(
            logits, allowed, part_maximum, part_list, parts, 0, start, maximum,
            tl.maximum(share * total, _SOME), scale, token_stride, vocabulary,
            WIDTH, CONTIGUOUS, ALLOWED, True, True, _COARSE,
        )  # fmt: skip
        # From the start on it may not have been enough.
        floor = tl.where(floor > start, floor, nothing)
        # Somewhat less than the rest's weight, for what sums and logarithms are rounded by.
        rest = (1 - share) * 0.99 - 2e-6
        if rest > 0:
            floor = tl.maximum(floor, maximum + tl.log2(rest * total / vocabulary) / scale)

    listed = _list_parts(part_maximum, part_list, parts, floor, WIDTH)
    if (most > 0) | (share < 1):
        # The maxima are no longer needed.
        unit_list = part_maximum.to(tl.pointer_type(tl.int32), bitcast=True)
        count, more = _list_units(
            logits, allowed, part_list, listed, MORE, unit_list, parts, floor, token_stride,
            vocabulary, WIDTH, CONTIGUOUS, ALLOWED,
        )  # fmt: skip
        if most > 0:
            floor = _search(
                logits, allowed, None, unit_list, count, more, floor, maximum, most, scale,
                token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED, False, False, UNUSED,
            )  # fmt: skip
        if share < 1:
            if most > 0:
                total = _weigh(
                    logits, allowed, unit_list, count, more, floor, maximum, scale,
                    token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED,
                )  # fmt: skip
            floor = _search(
                logits, allowed, None, unit_list, count, more, floor, maximum,
                tl.maximum(share * total, _SOME), scale, token_stride, vocabulary,
                WIDTH, CONTIGUOUS, ALLOWED, False, True, UNUSED,
            )  # fmt: skip
    kept = tl.maximum(floor, least)
    tl.store(lowest + row, kept)
    _replace_sums(
        logits, allowed, chunk_maximum, chunk_sum, part_maximum, part_list, listed, kept, scale,
        token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED,
    )  # fmt: skip


def launch(
    logits: Tensor,
    offsets: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    allowed: Tensor | None,
    max_draft: int,
    scratch: Scratch,
) -> None:
    """Leaves in scratch what the filters keep: `lowest`, and the sums in `chunk_sum`.

    Operands as in the reference's `verify_sampled`. The row statistics, `part_maximum` too, are in
    scratch; `part_maximum` is used up. A request with temperature 0 or without filters costs
    nothing, and its sums stay as they are. One launch.
    """
    rows, vocabulary = logits.shape
    requests = len(offsets) - 1
    width = config.width(logits.dtype)
    with torch.cuda.device_of(logits):
        threshold_kernel[(rows,)](
            logits,
            allowed,
            offsets,
            temperature,
            top_k,
            top_p,
            min_p,
            scratch.take("chunk_maximum"),
            scratch.take("chunk_sum"),
            scratch.take("part_maximum"),
            scratch.take("part_list"),
            scratch.take("lowest"),
            *logits.stride(),
            0 if allowed is None else allowed.stride(0),
            vocabulary,
            rows,
            requests,
            max_draft,
            WIDTH=width,
            CONTIGUOUS=logits.stride(1) == 1,
            ALLOWED=allowed is not None,
            TOP_K=top_k is not None,
            TOP_P=top_p is not None,
            MIN_P=min_p is not None,
            MORE=(CHUNK.value // PARTS.value // width).bit_length() - 1,
            UNUSED=_UNUSED_BITS[logits.dtype],
            REQUESTS=config.requests_block(requests),
            BLOCK=config.chunks_block(vocabulary),
            num_warps=_WARPS,
        )
