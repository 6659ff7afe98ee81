"""Temperature and filters: from which logit on a row is kept, by top-k, top-p and min-p.

`weigh` defines what is kept. A threshold is the largest value that, with all above it, is enough: k
values, or the nucleus' share of the weights. It is sought without a sort among the values
themselves, in the order of their keys, which is exact; a step of a kernel's search cuts the values
between two bounds in `_CUTS + 1` equal parts.

**What a kernel reads.** The row statistics hold, besides each chunk's maximum and sum, the maxima
of its *parts* (`part_maximum`, float32 (rows, chunks, PARTS), of what is allowed, -inf past the
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

# Where `_threshold` looks first, and for a nucleus in how many columns. No result depends on them.
_COLUMN_HEIGHT: Final = 32
_NUCLEUS: Final = 64

# What `launch` works with and leaves, besides the row statistics.
BUFFERS: Final = ("part_maximum", "part_list", "lowest", "last_tied")
# Values that a program looks at together, at eight or so a thread.
_TILE = tl.constexpr(1024)
_WARPS: Final = 4
# How many bounds a step of a search tries.
_CUTS = tl.constexpr(4)
# Keys of the floor, which need not be exact, leave out so many bits.
_COARSE = tl.constexpr(16)
# What a nucleus needs at least: the likeliest token.
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
    place = tied.cumsum(1)
    kept = (place[:, -1] - torch.where(surplus >= 1, surplus, 0)[rows].long()).clamp(min=1)
    cut = tied & (place > kept[:, None])
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
    """Units of the listed parts, float32 (*index.shape, WIDTH), and which they are.

    index: of units; past the list's end they are -inf, and units beyond the row.
    """
    UNITS: tl.constexpr = grid.CHUNK // PARTS // logits.WIDTH
    entry = index // UNITS
    within = index % UNITS
    beyond = tl.cdiv(logits.vocabulary, grid.CHUNK) * (grid.CHUNK // logits.WIDTH)
    unit = tl.load(listed.entries + entry, mask=entry < listed.length, other=beyond)
    unit += within // 2 * 32 + within % 2
    return grid.load_allowed(logits, row.data, row.allowed, unit, ALLOWED), unit


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
        x, _ = _load_listed(logits, row, listed, unit + start // logits.WIDTH, ALLOWED)
    return x


@jit
def _search(logits, row, maxima, listed, floor, need, ALLOWED: tl.constexpr, MAXIMA: tl.constexpr,
            WEIGHED: tl.constexpr, UNUSED: tl.constexpr):  # fmt: skip
    """The largest value that with all above it is enough; floor where no value above it is.

    The values are those of `_load_tile`. They count 1, or 2**((x - maximum) * scale) if WEIGHED;
    need: what is enough, above 0. No two values are told apart whose keys are the same
    without the UNUSED bits. One pass over the values for each 2.3 bits between floor and maximum.
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
    while span > 1:
        step = tl.maximum(span // (_CUTS + 1), 1).to(tl.int32)
        first = _leading_value(lowest + step, UNUSED)
        second = _leading_value(lowest + step * 2, UNUSED)
        third = _leading_value(lowest + step * 3, UNUSED)
        fourth = _leading_value(lowest + step * 4, UNUSED)
        from_first = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
        from_second = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
        from_third = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
        from_fourth = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
        for start in range(0, size, _TILE):
            x = _load_tile(logits, row, maxima, listed, start, ALLOWED, MAXIMA)
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
    return tl.where(lowest > bottom, _leading_value(lowest, UNUSED), floor)


@jit
def _weigh(logits, row, listed, lowest, ALLOWED: tl.constexpr):
    """What the listed values from `lowest` up weigh together, and the least of them."""
    weights = tl.zeros((_TILE // logits.WIDTH, logits.WIDTH), tl.float32)
    least = weights + float("inf")
    for start in range(0, listed.length * (grid.CHUNK // PARTS), _TILE):
        x = _load_tile(logits, row, listed.entries, listed, start, ALLOWED, False)
        weights += tl.where(x >= lowest, tl.exp2((x - row.maximum) * row.scale), 0.0)
        least = tl.minimum(least, tl.where(x >= lowest, x, float("inf")))
    return tl.sum(weights), tl.min(tl.min(least, 1), 0)


@jit
def _count_tied(logits, row, listed, counts, value, ALLOWED: tl.constexpr):
    """Leaves in counts how many values of each listed part equal `value`; gives their sum."""
    total = 0
    units: tl.constexpr = grid.CHUNK // PARTS // logits.WIDTH
    at_once: tl.constexpr = _TILE // (grid.CHUNK // PARTS)
    for start in range(0, listed.length, at_once):
        entry = start + tl.arange(0, at_once)
        index = entry[:, None] * units + tl.arange(0, units)[None, :]
        x, _ = _load_listed(logits, row, listed, index, ALLOWED)
        tied = tl.sum(tl.sum((x == value).to(tl.int32), 2), 1)
        tl.store(counts + entry, tied.to(tl.float32), mask=entry < listed.length)
        total += tl.sum(tied)
    tl.debug_barrier()
    return total


@jit
def _tied_token(logits, row, listed, counts, value, number, ALLOWED: tl.constexpr):
    """The token that is the `number`-th, from 1, of those with `value`, in the order of their ids.

    counts: as `_count_tied` leaves them. Reads one chunk: parts interleave within it.
    """
    chunk = tl.full((), _ALL, tl.int32)
    before = 0
    for start in range(0, listed.length, _TILE):
        entry = start + tl.arange(0, _TILE)
        used = entry < listed.length
        each = tl.load(counts + entry, mask=used, other=0.0).to(tl.int32)
        its_chunk = tl.load(listed.entries + entry, mask=used, other=0) // (
            grid.CHUNK // logits.WIDTH
        )
        reached = used & (before + tl.cumsum(each, 0) >= number)
        if chunk == _ALL:
            chunk = tl.min(tl.where(reached, its_chunk, _ALL))
            before += tl.sum(tl.where(its_chunk < chunk, each, 0))
    x = grid.load_allowed(
        logits, row.data, row.allowed, grid.units_of(chunk, logits), ALLOWED
    )  # fmt: skip
    tied = tl.reshape((x == value).to(tl.int32), (grid.CHUNK,))
    found = (tied > 0) & (before + tl.cumsum(tied, 0) >= number)
    return tl.min(tl.where(found, chunk * grid.CHUNK + tl.arange(0, grid.CHUNK), _ALL))


@jit
def _cut_ties(logits, row, listed, counts, lowest, need, ALLOWED: tl.constexpr):
    """The least value kept and the last of its tokens that is needed, where from `lowest` up there
    is enough. One pass over the listed values, and where not all ties are needed a second one.

    counts: room for a float32 a listed part.
    """
    total, least = _weigh(logits, row, listed, lowest, ALLOWED)
    each = tl.exp2((least - row.maximum) * row.scale)
    last = tl.full((), _ALL, tl.int32)
    value = lowest
    surplus = (total - need) / each
    if (surplus >= 1) & (surplus < float("inf")):
        value = least
        tied = _count_tied(logits, row, listed, counts, value, ALLOWED)
        kept = tl.maximum(tied - tl.minimum(surplus, tied.to(tl.float32)).to(tl.int32), 1)
        last = _tied_token(logits, row, listed, counts, value, kept, ALLOWED)
    return value, last


@jit
def _list_parts(maxima, entries, parts, floor, logits):
    """Lists the parts that reach the floor by their first units, in order; how many they are."""
    listed = 0
    for start in range(0, parts, _TILE):
        part = start + tl.arange(0, _TILE)
        best = tl.load(maxima + part, mask=part < parts, other=float("-inf"))
        reaches = (best >= floor) & (best > float("-inf"))
        place = listed + tl.cumsum(reaches.to(tl.int32), 0) - 1
        first = part // PARTS * (grid.CHUNK // logits.WIDTH) + part % PARTS * 2
        tl.store(entries + place, first, mask=reaches)
        listed += tl.sum(reaches.to(tl.int32))
    tl.debug_barrier()
    return listed


@jit
def _replace_sums(logits, row, left, part_sum, listed, lowest, last_tied, ALLOWED: tl.constexpr):
    """Makes the sums of a row's chunks those of what is kept, which the listed parts hold.

    part_sum: room for a number a part.
    """
    chunks = tl.cdiv(logits.vocabulary, grid.CHUNK)
    tl.debug_barrier()  # What was there in place of the sums is no longer read.
    for start in range(0, chunks * PARTS, _TILE):
        part = start + tl.arange(0, _TILE)
        tl.store(part_sum + part, tl.zeros((_TILE,), tl.float32), mask=part < chunks * PARTS)
    tl.debug_barrier()
    loads: tl.constexpr = grid.CHUNK // PARTS // logits.WIDTH
    at_once: tl.constexpr = _TILE // (grid.CHUNK // PARTS)
    for start in range(0, listed.length, at_once):
        entry = start + tl.arange(0, at_once)
        first = tl.load(listed.entries + entry, mask=entry < listed.length, other=0)
        chunk = first // (grid.CHUNK // logits.WIDTH)
        anchor = tl.load(left.maximum + chunk)
        load = tl.arange(0, loads)
        unit = first[:, None] + (load // 2 * 32 + load % 2)[None, :]
        x = grid.load_allowed(logits, row.data, row.allowed, unit, ALLOWED)
        kept = grid.passes(x, grid.tokens_of(unit, logits), lowest, last_tied)
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


@jit
def threshold_kernel(batch, logits, draft, scratch, output, C):
    """One row a program."""
    place, used = grid.locate(tl.program_id(0), batch, C)
    if not used:
        return
    request = place.request
    lowest = scratch.lowest + place.row
    tl.store(scratch.last_tied + place.row, _ALL)
    nothing = tl.full((), float("-inf"), tl.float32)
    heat = tl.load(batch.temperature + request)
    # Without a filter: no number of tokens, the whole share, no ratio.
    k = tl.load(batch.top_k + request, mask=(batch.filters & 1) != 0, other=0)
    most = tl.where((k > 0) & (k < logits.vocabulary), k, 0).to(tl.float32)
    share = tl.load(batch.top_p + request, mask=(batch.filters & 2) != 0, other=1.0)
    ratio = tl.load(batch.min_p + request, mask=(batch.filters & 4) != 0, other=0.0)
    if (heat == 0) | ((most == 0) & (share >= 1) & (ratio <= 0)):
        tl.store(lowest, nothing)
        return

    chunks = tl.cdiv(logits.vocabulary, grid.CHUNK)
    parts = chunks * PARTS
    before = statistics.row_chunks(place.row, logits) * PARTS
    maxima = scratch.part_maximum + before
    part_list = scratch.part_list + before
    left = statistics.statistics_of(place, logits, scratch)
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
    row = _Row(grid.values_of(logits, place.row), grid.mask_of(batch, place.row), maximum, scale)

    least = nothing
    if ratio > 0:
        log_ratio = tl.log(ratio.to(tl.float64))
        least = (maximum.to(tl.float64) + heat.to(tl.float64) * log_ratio).to(tl.float32)

    # Nothing below the floor can be the answer. It is sought where most often it is: from the least
    # of the chunks' maxima on, which as many values reach as there are chunks.
    start = grid.value_of(tl.min(tl.where(keys == OUT, key, keys)))
    floor = least
    last_tied = tl.full((), _ALL, tl.int32)
    every_part = _Parts(part_list, parts)
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
    listed = _Parts(part_list, count)
    if most > 0:
        floor = _search(logits, row, maxima, listed, floor, most, C.ALLOWED, False, False, UNUSED)
    if share < 1:
        if most > 0:
            total, _ = _weigh(logits, row, listed, floor, C.ALLOWED)
        need = tl.maximum(share * total, _SOME)
        floor = _search(logits, row, maxima, listed, floor, need, C.ALLOWED, False, True, UNUSED)
        floor, last_tied = _cut_ties(logits, row, listed, maxima, floor, need, C.ALLOWED)
    kept = tl.maximum(floor, least)
    last_tied = tl.where(least > floor, _ALL, last_tied)
    tl.store(lowest, kept)
    tl.store(scratch.last_tied + place.row, last_tied)
    _replace_sums(logits, row, left, maxima, listed, kept, last_tied, C.ALLOWED)


def launch(batch: Batch, sampling: Sampling, scratch: Scratch) -> None:
    """Leaves in scratch what the filters keep: `lowest`, and the sums in `chunk_sum`.

    The row statistics, `part_maximum` too, are in scratch; `part_maximum` is used up. A request
    with temperature 0 or without filters costs nothing, and its sums stay as they are. One launch.
    """
    # With nothing else in it, one kernel serves sampled verification and rejection sampling.
    scratch = scratch.only("chunk_maximum", "chunk_sum", *BUFFERS)
    rows = len(batch.logits)
    grid.run(threshold_kernel, rows, batch, sampling, scratch=scratch, num_warps=_WARPS)
