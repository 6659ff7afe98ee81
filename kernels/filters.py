"""Temperature and filters: from which logit on a row is kept, by top-k, top-p and min-p.

`weigh` defines what is kept. A threshold is the largest value that, with all above it, is enough: k
values, or the nucleus' share of the weights. It is sought without a sort among the values
themselves, in the order of their keys, which is exact; a step of a kernel's search cuts the keys
between two bounds in `_CUTS + 1` equal parts. The last `_SPAN` keys are counted one by one: as all
values of a key weigh the same, that tells the threshold, what is above it and how many tie at once.

**What a kernel reads.** The row statistics hold, besides each chunk's maximum and sum, the maxima
of its *parts* (`part_maximum`, float32 (rows, chunks, PARTS), of what is allowed, -inf past the
vocabulary). Their k-th largest bounds the threshold from below, and so does the value from which on
they alone are the nucleus. Only parts that reach this bound are read, from then on out of the
caches: about as many as there are tokens to keep, in most rows. Where there is no such bound or
many values reach it (a flat row) it is the whole row. Of bfloat16 it is read at most four times:
twice to search, once to count and once for the sums of what is kept; of float16 up to five times,
of float32 eight, and more often where a top-k of much of the row comes before a top-p.

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
from torch import Tensor

from fastdraft.kernels import grid, statistics
from fastdraft.kernels.chunks import (
    as_float,
    chunked,
    largest,
    mask,
    reads_back,
    slabs,
    total,
)
from fastdraft.kernels.language import jit, tl
from fastdraft.kernels.operands import Batch, Sampling, Warpers
from fastdraft.kernels.statistics import OUT, PARTS
from fastdraft.kernels.workspace import Scratch

_NEGLIGIBLE: Final = 2.0**-125
NEGLIGIBLE = tl.constexpr(_NEGLIGIBLE)

# The first columns that `_threshold` reads, and their number for a nucleus; no result depends on
# them.
_COLUMN_HEIGHT: Final = 32
_NUCLEUS: Final = 64

# The buffers and results of `launch`, besides the row statistics.
BUFFERS: Final = ("part_maximum", "part_list", "part_tied", "lowest", "last_tied")
# Values that a program looks at together, eight a thread.
_TILE = tl.constexpr(2048)
_WARPS: Final = 8
# How many bounds a step of a search tries.
_CUTS = tl.constexpr(16)
# How many keys are left when a search ends and they are counted: one less than a power of two.
_SPAN = tl.constexpr(255)
# Keys of the floor, which need not be exact, leave out this many bits.
_COARSE = tl.constexpr(16)
# The least nucleus: the likeliest token.
_SOME = tl.constexpr(1e-30)
# `last_tied` where all are kept.
_ALL = tl.constexpr(0x7FFFFFFF)


def weigh(x: Tensor, *, maximum: Tensor, warpers: Warpers) -> Tensor:
    """The weights w of the random contract: the distribution to draw from, up to a factor.

    x: float32 or float64 (rows, chunks, width), like the weights; maximum: (rows,), each row's;
    warpers: of rows, with temperatures above 0. The filters apply in the order top_k, top_p, min_p,
    each to what the one before has left, top_p to the renormalised rest. The token that crosses
    top_p is kept, and so is the likeliest one. Of tokens with equal logits, top_p keeps no more
    than it needs, those with the lowest ids; top_k and min_p keep all.
    """
    temperature, top_k, top_p, min_p = warpers
    weights = x - maximum[:, None, None]
    # exp is up to fifty times slower on a CPU where its result is 0 or below the normal numbers, so
    # it is asked for something just above them, which then is too light to count.
    weights.div_(temperature[:, None, None]).clamp_(min=-87.0).exp_()
    torch.threshold_(weights, _NEGLIGIBLE, 0.0)
    if top_k is not None:
        bounded = (top_k > 0) & (top_k < x[0].numel())
        need = torch.where(bounded, top_k, torch.inf).to(x.dtype)
        if reads_back(x):
            few = int(torch.where(bounded, top_k, 1).max())
            lowest = x.flatten(1).topk(few).values.gather(1, top_k.clamp(1, few)[:, None] - 1)
            lowest = torch.where(bounded, lowest[:, 0], -torch.inf)
        else:
            lowest = _threshold(x, None, need, maximum, few=0)
        _remove_below(lowest, x, weights)
    if top_p is not None:
        need = torch.where(top_p < 1, top_p * weights.sum(-1).sum(-1), torch.inf).to(x.dtype)
        lowest = _threshold(x, weights, need, maximum, few=_NUCLEUS)
        _remove_below(lowest, x, weights)
        _remove_ties(lowest, need, x, weights)
    if min_p is not None:
        lowest = (maximum + temperature * min_p.double().log()).to(x.dtype)
        _remove_below(lowest, x, weights)
    return weights


def weigh_rows(
    logits: Tensor, warpers: Warpers, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The distribution of each row of logits (rows, vocabulary). allowed: as in `mask`.

    Gives the weights (rows, chunks, width); the maxima (rows,); which rows their argmax decides
    alone, bool (rows,), since their temperature is 0 or their maximum is not finite: their weights
    are those of temperature 1, or mean nothing; the argmax of each row, int64 (rows,).
    """
    x = as_float(logits)
    x = chunked(x if allowed is None else mask(x, allowed))
    best, maximum = largest(x)
    by_argmax = (warpers.temperature == 0) | ~maximum.isfinite()
    # The distribution of an argmax, for its logprob, is the softmax at temperature 1, nothing
    # removed.
    usable = Warpers(
        *(
            None if option is None else torch.where(by_argmax, off, option)
            for option, off in zip(warpers, (1.0, 0, 1.0, 0.0), strict=True)
        )  # type: ignore[arg-type]
    )
    return weigh(x, maximum=maximum, warpers=usable), maximum, by_argmax, best


def warp(logits: Tensor, warpers: Warpers) -> Tensor:
    """The scores of rows of logits (rows, vocabulary), whose softmax is the distribution to draw
    from: divided by the temperature, above 0, and -inf for what the filters remove.

    Where there are filters, they also remove what is less than 2**-125 times as likely as the
    likeliest token.
    """
    scores = as_float(logits) / warpers.temperature[:, None]
    if not warpers.has_filters:
        return scores
    for part in slabs(len(logits), logits):
        weights, _, by_argmax, _ = weigh_rows(logits[part], warpers.of(part))
        removed = (weights.flatten(1)[:, : logits.shape[1]] == 0) & ~by_argmax[:, None]
        scores[part].masked_fill_(removed, -torch.inf)
    return scores


def log_softmax_of(token: Tensor, logits: Tensor) -> Tensor:
    """The log-probability of a token of each row, float32 (rows,), at temperature 1."""
    # The maximum first: where it is huge, it would swallow the rest.
    x = as_float(logits)
    maximum = x.amax(-1)
    weights = weigh(chunked(x), maximum=maximum, warpers=Warpers(torch.ones_like(maximum)))
    return (logit_of(logits, token).double() - maximum.double() - total(weights).log()).float()


def logit_of(logits: Tensor, token: Tensor) -> Tensor:
    return as_float(logits.gather(1, token[:, None])[:, 0])


def _remove_below(lowest: Tensor, x: Tensor, weights: Tensor) -> None:
    """Makes the weights of all x below their row's lowest value 0."""
    # As numbers, since torch multiplies much faster on a CPU than it fills under a mask.
    weights.mul_(torch.ge(x, lowest[:, None, None], out=torch.empty_like(x)))


def _remove_ties(lowest: Tensor, need: Tensor, x: Tensor, weights: Tensor) -> None:
    """Makes the weights of those last tokens at `lowest` 0 without which `need` is met too."""
    at_lowest = torch.where(x == lowest[:, None, None], weights, 0.0).amax(-1).amax(-1)
    surplus = (weights.sum(-1).sum(-1) - need) / at_lowest
    rows = torch.arange(len(x), device=x.device)
    if reads_back(x):
        rows = (surplus >= 1).nonzero()[:, 0]
        if not len(rows):
            return
    tied = x[rows].flatten(1) == lowest[rows, None]
    rank = tied.cumsum(1)
    kept = (rank[:, -1] - torch.where(surplus >= 1, surplus, 0)[rows].long()).clamp(min=1)
    cut = tied & (rank > kept[:, None])
    weights[rows] = weights[rows].masked_fill(cut.view(-1, *x.shape[1:]), 0.0)


def _threshold(
    x: Tensor, weights: Tensor | None, need: Tensor, maximum: Tensor, *, few: int
) -> Tensor:
    """The largest value of each row of x that, with all above it, weighs at least `need`.

    x, weights: (rows, chunks, width), None for weights of 1; need, maximum: (rows,), in x's
    dtype. The maximum where nothing is needed, -inf where the row does not weigh as much.

    On a CPU, the answer is first sought in a part of the row. Laid out in columns of
    `_COLUMN_HEIGHT` values, the `few` columns of largest maxima hold the `few` largest values and
    all that are above the least of these maxima, so an answer from there up is the row's.
    """
    row = x.flatten(1)
    columns = row.shape[1] // _COLUMN_HEIGHT
    if not reads_back(x) or few >= columns or row.shape[1] % _COLUMN_HEIGHT:
        return _bisect(x, weights, need, maximum)
    table = x.view(len(x), _COLUMN_HEIGHT, columns)
    best = table.amax(1).topk(few, sorted=True)
    index = best.indices[:, None, :].expand(-1, _COLUMN_HEIGHT, -1)
    held = None if weights is None else weights.view(table.shape).gather(2, index)
    found = _bisect(table.gather(2, index), held, need, maximum)
    open_rows = ((found < best.values[:, -1]) & need.isfinite()).nonzero()[:, 0]
    if len(open_rows):
        held = None if weights is None else weights[open_rows]
        found[open_rows] = _bisect(x[open_rows], held, need[open_rows], maximum[open_rows])
    return found


def _bisect(x: Tensor, weights: Tensor | None, need: Tensor, maximum: Tensor) -> Tensor:
    """`_threshold` by halving, exact after as many passes as a value has bits."""
    lowest = _keys_of(torch.full_like(maximum, -torch.inf))
    above = _keys_of(maximum) + 1
    kept = torch.empty_like(x)
    for _ in range(8 * x.element_size()):
        middle = (lowest & above) + ((lowest ^ above) >> 1)  # their mean, without overflow
        torch.ge(x, _values_of(middle, x.dtype)[:, None, None], out=kept)
        if weights is not None:
            kept.mul_(weights)
        enough = kept.sum(-1).sum(-1) >= need
        lowest = torch.where(enough, middle, lowest)
        above = torch.where(enough, above, middle)
    return _values_of(lowest, x.dtype)


def _keys_of(value: Tensor) -> Tensor:
    """int64 keys in the order of the float32 or float64 values they stand for."""
    integer = torch.int32 if value.dtype == torch.float32 else torch.int64
    bits = value.view(integer).long()
    return bits ^ ((bits >> 63) & torch.iinfo(integer).max)


def _values_of(key: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_keys_of`."""
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    return (key ^ ((key >> 63) & torch.iinfo(integer).max)).to(integer).view(dtype)


class _Row(NamedTuple):
    """The row that a program looks at. Made in the kernel.

    data, allowed: where its logits and its mask begin; maximum: its largest logit; scale:
    log2(e) / T.
    """

    data: Any
    allowed: Any
    maximum: Any
    scale: Any


class _Parts(NamedTuple):
    """A list of parts of a row. Made in the kernel.

    entries: int32 (length,), the first unit of each.
    """

    entries: Any
    length: Any


@jit
def _leading_value(key, UNUSED: tl.constexpr):
    """The value of the leading bits of a key: the one in whose key the others are unused."""
    return grid.value_of(tl.where(key < 0, ~(~key << UNUSED), key << UNUSED))


@jit
def _load_listed(logits, row, listed, index, ALLOWED: tl.constexpr):
    """Units of the listed parts, float32 (*index.shape, WIDTH).

    index: of units; past the list's end they are -inf.
    """
    UNITS: tl.constexpr = grid.CHUNK // PARTS // logits.WIDTH
    entry = index // UNITS
    within = index % UNITS
    beyond = tl.cdiv(logits.vocabulary, grid.CHUNK) * (grid.CHUNK // logits.WIDTH)
    unit = tl.load(listed.entries + entry, mask=entry < listed.length, other=beyond)
    unit += within // 2 * 32 + within % 2
    return grid.load_allowed(logits, row.data, row.allowed, unit, ALLOWED)


@jit
def _load_tile(logits, row, maxima, listed, start, ALLOWED: tl.constexpr, MAXIMA: tl.constexpr):
    """_TILE of the values to search, (_TILE / WIDTH, WIDTH), in an order that never changes.

    They are the first `listed.length` of the parts' maxima, if MAXIMA, or what is listed; -inf past
    their end.
    """
    unit = tl.arange(0, _TILE // logits.WIDTH)
    if MAXIMA:
        index = start + unit[:, None] * logits.WIDTH + tl.arange(0, logits.WIDTH)[None, :]
        x = tl.load(maxima + index, mask=index < listed.length, other=float("-inf"))
    else:
        x = _load_listed(logits, row, listed, unit + start // logits.WIDTH, ALLOWED)
    return x


@jit
def _add_from(sums, x, weight, key, step, UNUSED: tl.constexpr):
    """Adds the weights of the values from each of four keys up, which are `step` apart, to sums.

    The first is key + step. sums: float32 (units,) each, so that they stay in the registers.
    """
    return (
        sums[0] + tl.sum(tl.where(x >= _leading_value(key + step, UNUSED), weight, 0.0), 1),
        sums[1] + tl.sum(tl.where(x >= _leading_value(key + step * 2, UNUSED), weight, 0.0), 1),
        sums[2] + tl.sum(tl.where(x >= _leading_value(key + step * 3, UNUSED), weight, 0.0), 1),
        sums[3] + tl.sum(tl.where(x >= _leading_value(key + step * 4, UNUSED), weight, 0.0), 1),
    )


@jit
def _enough(sums, need):
    """How many of four sums are at least `need`."""
    # One reduction for all.
    joined = tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3]))
    return tl.sum((tl.sum(joined, 0) >= need).to(tl.int32))


@jit
def _search(logits, row, maxima, listed, floor, need, by_weight, ALLOWED: tl.constexpr,
            MAXIMA: tl.constexpr, UNUSED: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """A lower bound of the threshold: the largest value that is enough together with all above it.

    The bound is less than SPAN keys below the threshold, which it is itself for a SPAN of 1. It is
    floor if no value above floor is enough.

    The values are those of `_load_tile`. They count 1, or 2**((x - maximum) * scale) by weight;
    need: the count or weight that is enough, above 0. Values whose keys differ in UNUSED bits alone
    count as equal. One pass over the values for each 4.1 bits between floor and maximum, less
    those of SPAN.
    """
    maximum = row.maximum
    size = listed.length
    if not MAXIMA:
        size *= grid.CHUNK // PARTS
    bottom = grid.ordered_key(floor) >> UNUSED
    lowest = bottom
    above = (grid.ordered_key(maximum) >> UNUSED) + 1
    # Up to 2**32, and none where a temperature that is no number leaves no order to search in.
    span = tl.where(above > lowest, above - lowest, 0).to(tl.uint32)
    while span > SPAN:
        step = tl.maximum(span // (_CUTS + 1), 1).to(tl.int32)
        nothing = tl.zeros((_TILE // logits.WIDTH,), tl.float32)
        first = nothing, nothing, nothing, nothing
        second = first
        third = first
        fourth = first
        for start in range(0, size, _TILE):
            x = _load_tile(logits, row, maxima, listed, start, ALLOWED, MAXIMA)
            weight = tl.where(by_weight, tl.exp2((x - maximum) * row.scale), 1.0)
            first = _add_from(first, x, weight, lowest, step, UNUSED)
            second = _add_from(second, x, weight, lowest + step * 4, step, UNUSED)
            third = _add_from(third, x, weight, lowest + step * 8, step, UNUSED)
            fourth = _add_from(fourth, x, weight, lowest + step * 12, step, UNUSED)
        enough = _enough(first, need) + _enough(second, need)
        enough += _enough(third, need) + _enough(fourth, need)
        if enough < _CUTS:
            above = tl.minimum(above, lowest + step * (enough + 1))
        lowest += step * enough
        span = tl.where(above > lowest, above - lowest, 0).to(tl.uint32)
    return tl.where(lowest > bottom, _leading_value(lowest, UNUSED), floor)


@jit
def _count(logits, row, listed, bottom, ALLOWED: tl.constexpr, UNUSED: tl.constexpr):
    """Counts the listed values of each of _SPAN keys from `bottom` up, in one pass.

    Gives int32 (_SPAN + 1,), the counts from the highest key down, and 0; what one value of each
    weighs, float32 (_SPAN + 1,); what the values above them weigh together, and how many they are.
    Keys are without the UNUSED bits.
    """
    top = bottom + _SPAN - 1
    counts = tl.zeros((_SPAN + 1,), tl.int32)
    number = tl.zeros((_TILE // logits.WIDTH,), tl.int32)
    weights = tl.zeros((_TILE // logits.WIDTH,), tl.float32)
    for start in range(0, listed.length * (grid.CHUNK // PARTS), _TILE):
        x = _load_tile(logits, row, listed.entries, listed, start, ALLOWED, False)
        key = grid.ordered_key(x) >> UNUSED
        # Values with none of these keys are counted beside them.
        inside = (key - bottom).to(tl.uint32) < _SPAN
        index = tl.reshape(tl.where(inside, top - key, _SPAN), (_TILE,), can_reorder=True)
        counts += tl.histogram(index, _SPAN + 1)
        number += tl.sum((key > top).to(tl.int32), 1)
        weight = tl.exp2((x - row.maximum) * row.scale)
        weights += tl.sum(tl.where(key > top, weight, 0.0), 1)
    index = tl.arange(0, _SPAN + 1)
    counts = tl.where(index < _SPAN, counts, 0)
    values = tl.where(counts > 0, _leading_value(top - index, UNUSED), row.maximum)
    each = tl.exp2((values - row.maximum) * row.scale)
    return counts, each, tl.sum(weights), tl.sum(number)


@jit
def _leave_kept(logits, row, left, part_sum, part_tied, listed, value, number,
                ALLOWED: tl.constexpr):  # fmt: skip
    """Makes the sums of a row's chunks those of what is kept: the listed values above `value`, and
    of those that equal it the first `number`, of whose last one it gives the token.

    part_sum, part_tied: room for a number of each part. One pass over what is listed, and where
    not all ties are kept one chunk: parts interleave within it.
    """
    chunks = tl.cdiv(logits.vocabulary, grid.CHUNK)
    nothing = tl.zeros((_TILE,), tl.float32)
    tl.debug_barrier()  # The memory of the sums is no longer read for its old use.
    for start in range(0, chunks * PARTS, _TILE):
        part = start + tl.arange(0, _TILE)
        tl.store(part_sum + part, nothing, mask=part < chunks * PARTS)
        tl.store(part_tied + part, nothing.to(tl.int8), mask=part < chunks * PARTS)
    tl.debug_barrier()
    loads: tl.constexpr = grid.CHUNK // PARTS // logits.WIDTH
    at_once: tl.constexpr = _TILE // (grid.CHUNK // PARTS)
    for start in range(0, listed.length, at_once):
        entry = start + tl.arange(0, at_once)
        first = tl.load(listed.entries + entry, mask=entry < listed.length, other=0)
        chunk = first // (grid.CHUNK // logits.WIDTH)
        anchor = tl.load(left.maximum + chunk)
        index = entry[:, None] * loads + tl.arange(0, loads)[None, :]
        x = _load_listed(logits, row, listed, index, ALLOWED)
        weights = tl.where(x > value, tl.exp2((x - anchor[:, None, None]) * row.scale), 0.0)
        tied = tl.sum(tl.sum((x == value).to(tl.int32), 2), 1)
        at_part = chunk * PARTS + first % 32 // 2
        tl.store(part_sum + at_part, tl.sum(tl.sum(weights, 2), 1), mask=entry < listed.length)
        tl.store(part_tied + at_part, tied.to(tl.int8), mask=entry < listed.length)
    tl.debug_barrier()
    chunks_at_once: tl.constexpr = _TILE // PARTS
    before = 0
    cut = tl.full((), _ALL, tl.int32)
    rest = number
    for start in range(0, chunks, chunks_at_once):
        chunk = start + tl.arange(0, chunks_at_once)
        at_part = chunk[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
        inside = chunk < chunks
        sums = tl.sum(tl.load(part_sum + at_part, mask=inside[:, None], other=0.0), 1)
        tied = tl.load(part_tied + at_part, mask=inside[:, None], other=0)
        tied = tl.sum(tied.to(tl.int32), 1)
        up_to = before + tl.cumsum(tied, 0)
        kept = tl.minimum(tl.maximum(number - up_to + tied, 0), tied)
        anchor = tl.load(left.maximum + chunk, mask=inside, other=0.0)
        each = tl.where(kept > 0, tl.exp2((value - anchor) * row.scale), 0.0)
        tl.store(left.sum + chunk, sums + each * kept.to(tl.float32), mask=inside)
        is_cut = (tied > 0) & (up_to >= number) & (up_to - tied < number)
        cut = tl.minimum(cut, tl.min(tl.where(is_cut, chunk, _ALL)))
        rest += tl.sum(tl.where(is_cut, tied - up_to, 0))
        before += tl.sum(tied)
    last = tl.full((), _ALL, tl.int32)
    if cut != _ALL:
        units = grid.units_of(cut, logits)
        x = grid.load_allowed(logits, row.data, row.allowed, units, ALLOWED)
        tied = tl.reshape((x == value).to(tl.int32), (grid.CHUNK,))
        found = (tied > 0) & (tl.cumsum(tied, 0) >= rest)
        last = tl.min(tl.where(found, cut * grid.CHUNK + tl.arange(0, grid.CHUNK), _ALL))
    return last


@jit
def _list_parts(maxima, entries, parts, floor, logits):
    """Lists the parts that reach the floor by their first units, in order; how many they are."""
    listed = 0
    for start in range(0, parts, _TILE):
        part = start + tl.arange(0, _TILE)
        best = tl.load(maxima + part, mask=part < parts, other=float("-inf"))
        reaches = (best >= floor) & (best > float("-inf"))
        slot = listed + tl.cumsum(reaches.to(tl.int32), 0) - 1
        first = part // PARTS * (grid.CHUNK // logits.WIDTH) + part % PARTS * 2
        tl.store(entries + slot, first, mask=reaches)
        listed += tl.sum(reaches.to(tl.int32))
    tl.debug_barrier()
    return listed


@jit
def threshold_kernel(batch, logits, draft, scratch, output, C):
    """One row a program."""
    location, used = grid.locate(tl.program_id(0), batch, C)
    if not used:
        return
    request = location.request
    lowest = scratch.lowest + location.row
    tl.store(scratch.last_tied + location.row, _ALL)
    nothing = tl.full((), float("-inf"), tl.float32)
    heat = tl.load(batch.temperature + request)
    # Without a filter: no number of tokens, the whole share, no ratio.
    k = tl.load(batch.top_k + request, mask=(batch.given & 1) != 0, other=0)
    most = tl.where((k > 0) & (k < logits.vocabulary), k, 0).to(tl.float32)
    share = tl.load(batch.top_p + request, mask=(batch.given & 2) != 0, other=1.0)
    ratio = tl.load(batch.min_p + request, mask=(batch.given & 4) != 0, other=0.0)
    if (heat == 0) | ((most == 0) & (share >= 1) & (ratio <= 0)):
        tl.store(lowest, nothing)
        return

    chunks = tl.cdiv(logits.vocabulary, grid.CHUNK)
    parts = chunks * PARTS
    before = statistics.row_chunks(location.row, logits) * PARTS
    maxima = scratch.part_maximum + before
    part_list = scratch.part_list + before
    left = statistics.statistics_of(location, logits, scratch)
    # Bits of a key in which values of the logits' type do not differ.
    UNUSED: tl.constexpr = 23 - logits.data.dtype.element_ty.fp_mantissa_width
    # Finite, so that the maximum itself weighs 1 at any temperature.
    scale = tl.minimum(statistics.scale_of(heat), 3e38)
    keys, key, weights = statistics.totals(left, scale, logits, C.BLOCK)
    if (key >= grid.INFINITE_KEY) | (key <= grid.EMPTY_KEY):
        tl.store(lowest, nothing)
        return
    maximum = grid.value_of(key)
    total = tl.sum(weights)
    row = _Row(
        grid.values_of(logits, location.row), grid.mask_of(batch, location.row), maximum, scale
    )

    least = nothing
    if ratio > 0:
        log_ratio = tl.log(ratio.to(tl.float64))
        least = (maximum.to(tl.float64) + heat.to(tl.float64) * log_ratio).to(tl.float32)

    # Nothing below the floor can be the answer. It is sought where most often it is: from the least
    # of the chunks' maxima on, which as many values reach as there are chunks.
    start = grid.value_of(tl.min(tl.where(keys == OUT, key, keys)))
    floor = least
    if (most > 0) | (share < 1):
        by_weight = most == 0
        floor = _search(
            logits, row, maxima, _Parts(part_list, parts),
            tl.where(by_weight | (most <= chunks), start, nothing),
            tl.where(by_weight, tl.maximum(share * total, _SOME), most), by_weight,
            C.ALLOWED, True, _COARSE, 1,
        )  # fmt: skip
        if by_weight:
            # From the start on it may not have been enough.
            floor = tl.where(floor > start, floor, nothing)
            # Somewhat less than the rest's weight, for what sums and logarithms are rounded by.
            rest = (1 - share) * 0.99 - 2e-6
            if rest > 0:
                below = tl.log2(rest * total / logits.vocabulary) / scale
                floor = tl.maximum(floor, maximum + below)

    count = _list_parts(maxima, part_list, parts, floor, logits)
    listed = _Parts(part_list, count)
    number = tl.full((), _ALL, tl.int32)
    index = tl.arange(0, _SPAN + 1)
    counts = index * 0
    each = counts.to(tl.float32)
    above = total * 0
    many = number * 0
    bottom = many
    for step in range(2):
        # First top-k, by numbers, then top-p, by weight: most often among the values just counted.
        by_weight = step == 1
        need = tl.where(by_weight, tl.maximum(share * total, _SOME), most)
        if tl.where(by_weight, share < 1, most > 0):
            if (most == 0) | (above >= need) | (step == 0):
                floor = _search(
                    logits, row, maxima, listed, floor, need, by_weight,
                    C.ALLOWED, False, UNUSED, _SPAN,
                )  # fmt: skip
                bottom = grid.ordered_key(floor) >> UNUSED
                counts, each, above, many = _count(logits, row, listed, bottom, C.ALLOWED, UNUSED)
            sums = above + tl.cumsum(counts * each, 0)
            up_to = tl.where(by_weight, sums, (many + tl.cumsum(counts, 0)).to(tl.float32))
            last = tl.minimum(tl.sum((up_to < need).to(tl.int32)), _SPAN - 1)
            floor = tl.maximum(floor, _leading_value(bottom + _SPAN - 1 - last, UNUSED))
            is_last = index == last
            total = tl.sum(tl.where(is_last, sums, 0.0))
            if by_weight:
                surplus = (total - need) / tl.sum(tl.where(is_last, each, 0.0))
                tied = tl.sum(tl.where(is_last, counts, 0))
                if (surplus >= 1) & (surplus < float("inf")):
                    surplus = tl.minimum(surplus, tied.to(tl.float32))
                    number = tl.maximum(tied - surplus.to(tl.int32), 1)
            # The tokens that top-k removes are gone already.
            counts = tl.where(index <= last, counts, 0)
    number = tl.where(least > floor, _ALL, number)
    lowest_kept = tl.maximum(floor, least)
    tl.store(lowest, lowest_kept)
    part_tied = scratch.part_tied + before
    last_tied = _leave_kept(
        logits, row, left, maxima, part_tied, listed, lowest_kept, number, C.ALLOWED
    )
    tl.store(scratch.last_tied + location.row, last_tied)


def launch(batch: Batch, sampling: Sampling, scratch: Scratch) -> None:
    """Leaves in scratch what the filters keep: `lowest`, and the sums in `chunk_sum`.

    The row statistics, `part_maximum` too, are in scratch; `part_maximum` is used up. A request
    with temperature 0 or without filters costs nothing, and its sums stay as they are. One launch.
    """
    # With nothing else in it, one kernel serves sampled verification and rejection sampling.
    scratch = scratch.only(batch, "chunk_maximum", "chunk_sum", *BUFFERS)
    rows = len(batch.logits)
    grid.run(threshold_kernel, rows, batch, sampling, scratch=scratch, num_warps=_WARPS)
