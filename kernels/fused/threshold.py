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

What is left of a row is `lowest`, float32 (rows,), -inf where nothing is filtered, `last_tied`,
int32 (rows,), the last token that is kept of those that equal it, and in `chunk_sum` the sums of
what is kept of each chunk. All sums have one order, so the result does not
depend on the batch.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from fastdraft.kernels.fused import config
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
    CHUNK,
    EMPTY_KEY,
    INFINITE_KEY,
    load_allowed,
    locate,
    ordered_key,
    passes,
    tokens_of,
    value_of,
    values_of,
)
from fastdraft.kernels.fused.statistics import (
    OUT,
    PARTS,
    row_chunks,
    scale_of,
    statistics_of,
    totals,
)
from fastdraft.kernels.operands import Batch, Warpers
from fastdraft.kernels.workspace import Scratch

# What `launch` works with and leaves, besides the row statistics.
BUFFERS: Final = ("part_maximum", "part_list", "lowest", "last_tied")
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
# `last_tied` where all are kept.
_ALL = tl.constexpr(0x7FFFFFFF)


class _Row(NamedTuple):
    """The row that a program looks at. Made in the kernel.

    data, allowed: where its logits and its mask begin; maximum: its largest logit; scale:
    log2(e) / T.
    """

    data: Any
    allowed: Any
    maximum: Any
    scale: Any


class _Units(NamedTuple):
    """A list of units of a row. Made in the kernel.

    entries: int32 (length,); each stands for 2**more units: one, or a part by its first.
    """

    entries: Any
    length: Any
    more: Any


@triton.jit
def _value_of(key, UNUSED: tl.constexpr):
    """The value of the leading bits of a key: the one in whose key the others are unused."""
    return value_of(tl.where(key < 0, ~(~key << UNUSED), key << UNUSED))


@triton.jit
def _load_listed(logits, row, units, index, ALLOWED: tl.constexpr):
    """Units that are listed, float32 (*index.shape, WIDTH), and which they are.

    index: of units; past the list's end they are -inf, and units beyond the row.
    """
    entry = index >> units.more
    within = index - (entry << units.more)
    beyond = tl.cdiv(logits.vocabulary, CHUNK) * (CHUNK // logits.WIDTH)
    unit = tl.load(units.entries + entry, mask=entry < units.length, other=beyond)
    unit += within // 2 * 32 + within % 2
    return load_allowed(logits, row.data, row.allowed, unit, ALLOWED), unit


@triton.jit
def _load_tile(logits, row, maxima, units, start, ALLOWED: tl.constexpr, MAXIMA: tl.constexpr):
    """_TILE of the values to search, (_TILE / WIDTH, WIDTH), in an order that never changes.

    They are the first `units.length` of the parts' maxima, if MAXIMA, or what is listed; -inf past
    their end.
    """
    unit = tl.arange(0, _TILE // logits.WIDTH)
    if MAXIMA:
        index = start + unit[:, None] * logits.WIDTH + tl.arange(0, logits.WIDTH)[None, :]
        x = tl.load(maxima + index, mask=index < units.length, other=float("-inf"))
    else:
        x, _ = _load_listed(logits, row, units, unit + start // logits.WIDTH, ALLOWED)
    return x


@triton.jit
def _search(logits, row, maxima, units, floor, need, ALLOWED: tl.constexpr, MAXIMA: tl.constexpr,
            WEIGHED: tl.constexpr, UNUSED: tl.constexpr):  # fmt: skip
    """The largest value that with all above it is enough; floor where no value above it is.

    The values are those of `_load_tile`. They count 1, or 2**((x - maximum) * scale) if WEIGHED;
    need: what is enough, above 0. No two values are told apart whose keys are the same
    without the UNUSED bits. One pass over the values for each 2.3 bits between floor and maximum.
    """
    maximum = row.maximum
    size = units.length
    if not MAXIMA:
        size = (units.length << units.more) * logits.WIDTH
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
        from_first = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
        from_second = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
        from_third = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
        from_fourth = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
        for start in range(0, size, _TILE):
            x = _load_tile(logits, row, maxima, units, start, ALLOWED, MAXIMA)
            weight = tl.full((_TILE // logits.WIDTH, logits.WIDTH), 1.0, tl.float32)
            if WEIGHED:
                weight = tl.exp2((x - maximum) * row.scale)
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
def _weigh(logits, row, units, lowest, ALLOWED: tl.constexpr):
    """What the listed values from `lowest` up weigh together, and the least of them."""
    weights = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
    least = weights + float("inf")
    for start in range(0, (units.length << units.more) * logits.WIDTH, _TILE):
        x = _load_tile(logits, row, units.entries, units, start, ALLOWED, False)
        weights += tl.where(x >= lowest, tl.exp2((x - row.maximum) * row.scale), 0.0)
        least = tl.minimum(least, tl.where(x >= lowest, x, float("inf")))
    return tl.sum(weights), tl.min(tl.min(least, 1), 0)


@triton.jit
def _count_tied(logits, row, units, value, last, ALLOWED: tl.constexpr):
    """How many of the listed values equal `value`, of tokens up to `last`."""
    tied = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.int32)
    for start in range(0, units.length << units.more, _TILE // logits.WIDTH):
        index = start + tl.arange(0, _TILE // logits.WIDTH)
        x, unit = _load_listed(logits, row, units, index, ALLOWED)
        token = tokens_of(unit, logits)
        inside = (token <= last) & (token < logits.vocabulary)
        tied += ((x == value) & inside).to(tl.int32)
    return tl.sum(tied)


@triton.jit
def _cut_ties(logits, row, units, lowest, need, ALLOWED: tl.constexpr):
    """The least value kept and the last of its tokens that is needed, where from `lowest` up there
    is enough; most often all are, and one pass over the listed values tells."""
    total, least = _weigh(logits, row, units, lowest, ALLOWED)
    each = tl.exp2((least - row.maximum) * row.scale)
    last = tl.full((), _ALL, tl.int32)
    value = lowest
    surplus = (total - need) / each
    if (surplus >= 1) & (surplus < float("inf")):
        value = least
        tied = _count_tied(logits, row, units, value, last, ALLOWED)
        kept = tl.maximum(tied - tl.minimum(surplus, tied.to(tl.float32)).to(tl.int32), 1)
        # The first token up to which so many are tied.
        before = tl.full((), -1, tl.int32)
        last = before + logits.vocabulary
        while last - before > 1:
            middle = before + (last - before) // 2
            if _count_tied(logits, row, units, value, middle, ALLOWED) >= kept:
                last = middle
            else:
                before = middle
    return value, last


@triton.jit
def _list_parts(maxima, entries, parts, floor, logits):
    """Lists the parts that reach the floor by their first units, in order; how many they are."""
    listed = 0
    for start in range(0, parts, _TILE):
        part = start + tl.arange(0, _TILE)
        best = tl.load(maxima + part, mask=part < parts, other=float("-inf"))
        reaches = (best >= floor) & (best > float("-inf"))
        place = listed + tl.cumsum(reaches.to(tl.int32), 0) - 1
        first = part // PARTS * (CHUNK // logits.WIDTH) + part % PARTS * 2
        tl.store(entries + place, first, mask=reaches)
        listed += tl.sum(reaches.to(tl.int32))
    tl.debug_barrier()
    return listed


@triton.jit
def _list_units(logits, row, listed, entries, room, floor, ALLOWED: tl.constexpr):
    """Lists in `entries` those of the listed units that reach the floor.

    Where there is no room for as many, it lists again what is listed, the parts.
    """
    found = 0
    start = 0
    while (start < listed.length << listed.more) & (found <= room):
        index = tl.arange(0, _TILE // logits.WIDTH) + start
        x, unit = _load_listed(logits, row, listed, index, ALLOWED)
        best = tl.max(x, 1)
        reaches = (best >= floor) & (best > float("-inf"))
        place = found + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(entries + place, unit, mask=reaches & (place < room))
        found += tl.sum(reaches.to(tl.int32))
        start += _TILE // logits.WIDTH
    tl.debug_barrier()
    count = found
    each = found * 0
    if found > room:
        # Another pointer would do, were compilers at ease with one that is chosen at run time.
        for copied in range(0, listed.length, _TILE):
            entry = copied + tl.arange(0, _TILE)
            part = tl.load(listed.entries + entry, mask=entry < listed.length)
            tl.store(entries + entry, part, mask=entry < listed.length)
        tl.debug_barrier()
        count = listed.length
        each = found * 0 + listed.more
    return _Units(entries, count, each)


@triton.jit
def _replace_sums(logits, row, left, part_sum, listed, lowest, last_tied, ALLOWED: tl.constexpr):
    """Makes the sums of a row's chunks those of what is kept, which the listed parts hold.

    part_sum: room for a number a part.
    """
    chunks = tl.cdiv(logits.vocabulary, CHUNK)
    tl.debug_barrier()  # What was there in place of the sums is no longer read.
    for start in range(0, chunks * PARTS, _TILE):
        part = start + tl.arange(0, _TILE)
        tl.store(part_sum + part, tl.zeros((_TILE,), tl.float32), mask=part < chunks * PARTS)
    tl.debug_barrier()
    loads: tl.constexpr = CHUNK // PARTS // logits.WIDTH
    at_once: tl.constexpr = _TILE // (CHUNK // PARTS)
    for start in range(0, listed.length, at_once):
        entry = start + tl.arange(0, at_once)
        first = tl.load(listed.entries + entry, mask=entry < listed.length, other=0)
        chunk = first // (CHUNK // logits.WIDTH)
        anchor = tl.load(left.maximum + chunk)
        load = tl.arange(0, loads)
        unit = first[:, None] + (load // 2 * 32 + load % 2)[None, :]
        x = load_allowed(logits, row.data, row.allowed, unit, ALLOWED)
        kept = passes(x, tokens_of(unit, logits), lowest, last_tied)
        weights = tl.where(kept, tl.exp2((x - anchor[:, None, None]) * row.scale), 0.0)
        place = part_sum + chunk * PARTS + first % 32 // 2
        tl.store(place, tl.sum(tl.sum(weights, 2), 1), mask=entry < listed.length)
    tl.debug_barrier()
    chunks_at_once: tl.constexpr = _TILE // PARTS
    for start in range(0, chunks, chunks_at_once):
        chunk = start + tl.arange(0, chunks_at_once)
        place = part_sum + chunk[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
        sums = tl.load(place, mask=(chunk < chunks)[:, None], other=0.0)
        tl.store(left.sum + chunk, tl.sum(sums, 1), mask=chunk < chunks)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def threshold_kernel(
    logits,
    scratch,
    draft_ids,
    parents,
    offsets,
    allowed,
    allowed_stride,
    temperature,
    top_k,
    top_p,
    min_p,
    rows,
    requests,
    drafted,
    max_draft,
    MORE: tl.constexpr,
    UNUSED: tl.constexpr,
    C,
):
    """One row a program."""
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    place, used = locate(tl.program_id(0), drafts, C.REQUESTS)
    if not used:
        return
    request = place.request
    lowest = scratch.lowest + place.row
    tl.store(scratch.last_tied + place.row, _ALL)
    nothing = tl.full((), float("-inf"), tl.float32)
    heat = tl.load(temperature + request)
    # Without a filter: no number of tokens, the whole share, no ratio.
    most = tl.full((), 0.0, tl.float32)
    share = tl.full((), 1.0, tl.float32)
    ratio = tl.full((), 0.0, tl.float32)
    if top_k is not None:
        k = tl.load(top_k + request)
        most = tl.where((k > 0) & (k < logits.vocabulary), k, 0).to(tl.float32)
    if top_p is not None:
        share = tl.load(top_p + request)
    if min_p is not None:
        ratio = tl.load(min_p + request)
    if (heat == 0) | ((most == 0) & (share >= 1) & (ratio <= 0)):
        tl.store(lowest, nothing)
        return

    chunks = tl.cdiv(logits.vocabulary, CHUNK)
    parts = chunks * PARTS
    before = row_chunks(place.row, logits) * PARTS
    maxima = scratch.part_maximum + before
    part_list = scratch.part_list + before
    left = statistics_of(place, logits, scratch)
    # Finite, so that the maximum itself weighs 1 at any temperature.
    scale = tl.minimum(scale_of(heat), 3e38)
    keys, key, weights = totals(left, scale, logits, C.BLOCK)
    if (key >= INFINITE_KEY) | (key <= EMPTY_KEY):
        tl.store(lowest, nothing)
        return
    maximum = value_of(key)
    total = tl.sum(weights)
    mask = allowed + place.row.to(tl.int64) * allowed_stride
    row = _Row(values_of(logits, place.row), mask, maximum, scale)

    least = nothing
    if min_p is not None:
        log_ratio = tl.log(tl.where(ratio > 0, ratio, 1.0).to(tl.float64))
        bound = (maximum.to(tl.float64) + heat.to(tl.float64) * log_ratio).to(tl.float32)
        least = tl.where(ratio > 0, bound, nothing)

    # Nothing below the floor can be the answer. It is sought where most often it is: from the least
    # of the chunks' maxima on, which as many values reach as there are chunks.
    start = value_of(tl.min(tl.where(keys == OUT, key, keys)))
    floor = least
    last_tied = tl.full((), _ALL, tl.int32)
    every_part = _Units(part_list, parts, parts * 0)
    if most > 0:
        floor = _search(
            logits, row, maxima, every_part, tl.where(most <= chunks, start, nothing), most,
            C.ALLOWED, True, False, _COARSE,
        )  # fmt: skip
    elif share < 1:
        floor = _search(
            logits, row, maxima, every_part, start, tl.maximum(share * total, _SOME),
            C.ALLOWED, True, True, _COARSE,
        )  # fmt: skip
        # From the start on it may not have been enough.
        floor = tl.where(floor > start, floor, nothing)
        # Somewhat less than the rest's weight, for what sums and logarithms are rounded by.
        rest = (1 - share) * 0.99 - 2e-6
        if rest > 0:
            floor = tl.maximum(floor, maximum + tl.log2(rest * total / logits.vocabulary) / scale)

    count = _list_parts(maxima, part_list, parts, floor, logits)
    listed = _Units(part_list, count, count * 0 + MORE)
    if (most > 0) | (share < 1):
        # The maxima are no longer needed.
        entries = maxima.to(tl.pointer_type(tl.int32), bitcast=True)
        units = _list_units(logits, row, listed, entries, parts, floor, C.ALLOWED)
        if most > 0:
            floor = _search(
                logits, row, maxima, units, floor, most, C.ALLOWED, False, False, UNUSED
            )
        if share < 1:
            if most > 0:
                total, _ = _weigh(logits, row, units, floor, C.ALLOWED)
            need = tl.maximum(share * total, _SOME)
            floor = _search(logits, row, maxima, units, floor, need, C.ALLOWED, False, True, UNUSED)
            floor, last_tied = _cut_ties(logits, row, units, floor, need, C.ALLOWED)
    kept = tl.maximum(floor, least)
    last_tied = tl.where(least > floor, _ALL, last_tied)
    tl.store(lowest, kept)
    tl.store(scratch.last_tied + place.row, last_tied)
    _replace_sums(logits, row, left, maxima, listed, kept, last_tied, C.ALLOWED)


def launch(batch: Batch, warpers: Warpers, scratch: Scratch) -> None:
    """Leaves in scratch what the filters keep: `lowest`, and the sums in `chunk_sum`.

    The row statistics, `part_maximum` too, are in scratch; `part_maximum` is used up. A request
    with temperature 0 or without filters costs nothing, and its sums stay as they are. One launch.
    """
    dtype = batch.logits.dtype
    parts_loads = CHUNK.value // PARTS.value // config.width(dtype)
    with torch.cuda.device_of(batch.logits):
        threshold_kernel[(len(batch.logits),)](
            Rows.of(batch.logits),
            scratch,
            **drafts_of(batch),
            **mask_of(batch),
            **warpers._asdict(),
            MORE=parts_loads.bit_length() - 1,
            UNUSED=_UNUSED_BITS[dtype],
            C=Config.of(batch),
            num_warps=_WARPS,
        )
