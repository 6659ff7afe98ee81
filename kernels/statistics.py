"""Row statistics: what one pass over the logits leaves in a workspace for all that follows.

Of each chunk of the random contract they hold the maximum m and the sum of exp((x - m) / T): with
them a row can be drawn from by reading one chunk again, its log-probabilities have their divisor,
and its filters know where to look. Kernels alone need them. An argmax needs no sums: those of rows
with temperature 0 are left out unless something else asks for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fastdraft.kernels import grid, workspace
from fastdraft.kernels.language import jit, tl

LOG2_E = tl.constexpr(1.4426950408889634)
# The key of no candidate in a race: below every other.
OUT = tl.constexpr(-0x80000000)
# The filters' parts of a chunk.
PARTS = tl.constexpr(workspace.PARTS)


class Statistics(NamedTuple):
    """Row statistics of the chunks of one row: float32 (chunks,) each. Made in kernels.

    maximum: each chunk's largest value m; sum: its sum of exp((x - m) / T).
    """

    maximum: Any
    sum: Any


@jit
def _larger(one, other):
    """The larger value, and NaN where one is. `tl.max` leaves NaN to the device."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@jit
def _maxima(x):
    """The maximum of each chunk, NaN where it has one; x: float32 (repeats, chunks, 32, width)."""
    return tl.reduce(tl.reduce(tl.reduce(x, 3, _larger), 0, _larger), 1, _larger)


@jit
def _sums(x, maximum, scale):
    """Each chunk's sum of 2**((x - m) * scale); maximum: that of each chunk, m."""
    anchor = tl.where(tl.abs(maximum) < float("inf"), maximum, 0.0)
    powers = tl.exp2((x - anchor[None, :, None, None]) * scale)
    return tl.sum(tl.sum(tl.sum(powers, 3), 0), 1)


@jit
def tile_units(tile, rows, CHUNKS: tl.constexpr):
    """The units of CHUNKS chunks of a row, (repeats, CHUNKS, 32).

    Each chunk is in the hands of one warp, in loads of 32 units: no sum crosses warps.
    """
    REPEATS: tl.constexpr = grid.CHUNK // (32 * rows.WIDTH)
    chunk = tl.arange(0, CHUNKS) + tile * CHUNKS
    return (
        chunk[None, :, None] * (grid.CHUNK // rows.WIDTH)
        + tl.arange(0, REPEATS)[:, None, None] * 32
        + tl.arange(0, 32)[None, None, :]
    )


@jit
def _leave_tile(rows, values, allowed, tile, scale, sums, left, raw, parts, CHUNKS: tl.constexpr,
                ALLOWED: tl.constexpr, RAW: tl.constexpr, PARTS_TOO: tl.constexpr,
                WHOLE: tl.constexpr):  # fmt: skip
    """Writes the statistics of a tile of a row's chunks; operands as in `leave_part`."""
    unit = tile_units(tile, rows, CHUNKS)
    as_it_is = grid.load_units(rows, values, unit, WHOLE)
    x = as_it_is
    if ALLOWED:
        x = grid.only_allowed(x, allowed, rows, unit)
    # The first lane of each warp writes what the warp found. Indices that follow the lanes keep the
    # compiler from handing it to other warps first.
    chunk = tl.expand_dims(tl.arange(0, CHUNKS) + tile * CHUNKS, 1)
    lane = tl.arange(0, 32)[None, :]
    inside = chunk < tl.cdiv(rows.vocabulary, grid.CHUNK)
    first = inside & (lane == 0)
    index = chunk + lane
    maximum = _maxima(x)
    tl.store(left.maximum + index, maximum[:, None], mask=first)
    if sums:
        tl.store(left.sum + index, _sums(x, maximum, scale)[:, None], mask=first)
    if PARTS_TOO:
        pairs = tl.reshape(tl.max(tl.max(x, 3), 0), (CHUNKS, PARTS, 32 // PARTS))
        best = tl.broadcast_to(tl.max(pairs, 2, keep_dims=True), pairs.shape)
        tl.store(
            parts + chunk * PARTS + lane * PARTS // 32,
            tl.reshape(best, (CHUNKS, 32)),
            mask=inside & (lane % (32 // PARTS) == 0),
        )
    if RAW:
        maximum = _maxima(as_it_is)
        tl.store(raw.maximum + index, maximum[:, None], mask=first)
        tl.store(raw.sum + index, _sums(as_it_is, maximum, LOG2_E)[:, None], mask=first)


@jit
def leave_part(rows, values, allowed, share, tiles, scale, sums, left, raw, parts,
               CHUNKS: tl.constexpr, ALLOWED: tl.constexpr, RAW: tl.constexpr,
               PARTS_TOO: tl.constexpr):  # fmt: skip
    """Writes the statistics of a share of a row, of `tiles` tiles.

    values, allowed: where the row and its mask begin. sums: whether the sums are needed, which take
    an exponential of every logit. left: the row's statistics; RAW: the same of
    the logits as they are too, at temperature 1. PARTS_TOO: parts, float32 (chunks * PARTS,), gets
    the largest logit of each part of a chunk, of what two neighbouring lanes hold of it in all
    repeats of `tile_units`.
    """
    begin = share * tiles
    end = tl.minimum(begin + tiles, tl.cdiv(rows.vocabulary, CHUNKS * grid.CHUNK))
    whole = tl.minimum(end, rows.vocabulary // (CHUNKS * grid.CHUNK))
    for tile in range(begin, whole):
        _leave_tile(
            rows, values, allowed, tile, scale, sums, left, raw, parts,
            CHUNKS, ALLOWED, RAW, PARTS_TOO, True,
        )  # fmt: skip
    if whole < end:
        _leave_tile(
            rows, values, allowed, whole, scale, sums, left, raw, parts,
            CHUNKS, ALLOWED, RAW, PARTS_TOO, False,
        )  # fmt: skip


@jit
def row_chunks(row, rows):
    """How many chunks the rows before this one have."""
    return row.to(tl.int64) * tl.cdiv(rows.vocabulary, grid.CHUNK)


@jit
def statistics_of(location, logits, scratch):
    """The statistics of a row of logits."""
    chunks = row_chunks(location.row, logits)
    return Statistics(scratch.chunk_maximum + chunks, scratch.chunk_sum + chunks)


@jit
def raw_statistics_of(location, logits, scratch):
    """Those of the logits as they are; any others where there are none."""
    raw = statistics_of(location, logits, scratch)
    if scratch.raw_sum is not None:
        chunks = row_chunks(location.row, logits)
        raw = Statistics(scratch.raw_maximum + chunks, scratch.raw_sum + chunks)
    return raw


@jit
def leave_logits(location, batch, logits, scratch, C):
    """Writes a program's share of the statistics of a row of logits, whatever of them scratch has
    room for."""
    parts = scratch.chunk_maximum
    if scratch.part_maximum is not None:
        parts = scratch.part_maximum + row_chunks(location.row, logits) * PARTS
    heat = grid.temperature_of(location, batch, C.GREEDY)
    sums = (heat != 0) | (batch.likeliest > 0)
    if scratch.row_logprobs is not None:
        sums = heat == heat
    leave_part(
        logits, grid.values_of(logits, location.row), grid.mask_of(batch, location.row),
        tl.program_id(0) % batch.programs, batch.tiles,
        scale_of(heat), sums, statistics_of(location, logits, scratch),
        raw_statistics_of(location, logits, scratch), parts,
        C.CHUNKS, C.ALLOWED, scratch.raw_sum is not None, scratch.part_maximum is not None,
    )  # fmt: skip


@jit
def divisor_of(temperature):
    """The divisor of logits: 1 for temperature 0, and no more than a quotient can bear."""
    return tl.where(temperature == 0, 1.0, tl.minimum(temperature, 2.0**126))


@jit
def scale_of(temperature):
    """log2(e) / T; temperature 0 counts as 1."""
    return tl.full((), LOG2_E, tl.float32) / divisor_of(temperature)


@jit
def totals(left, scale, rows, BLOCK: tl.constexpr):
    """Sums up a row's statistics: (the keys of the chunks' maxima, the row's key, the chunks' sums
    relative to the row's maximum). BLOCK: at least the chunks of a row."""
    chunk = tl.arange(0, BLOCK)
    inside = chunk < tl.cdiv(rows.vocabulary, grid.CHUNK)
    maximum = tl.load(left.maximum + chunk, mask=inside, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(left.sum + chunk, mask=inside, other=0.0, cache_modifier=".cg")
    keys = tl.where(inside, grid.ordered_key(maximum), OUT)
    key = tl.max(keys)
    weights = total * tl.exp2((maximum - grid.value_of(key)) * scale)
    return keys, key, tl.where(inside, weights, 0.0)


@jit
def totals_of(location, logits, scratch, scale, BLOCK: tl.constexpr):
    """`totals` of a row of logits."""
    return totals(statistics_of(location, logits, scratch), scale, logits, BLOCK)


@jit
def leave_token(location, logits, scratch, key, token, logprob, BLOCK: tl.constexpr):
    """Leaves what a row gives: its token with the key of its maximum, and the token's
    log-probabilities, if they are asked for."""
    tl.store(scratch.row_results + location.row, grid.pack(key, token))
    if scratch.row_logprobs is not None:
        tl.store(scratch.row_logprobs + location.row, logprob)
    if scratch.row_raw_logprobs is not None:
        raw = raw_statistics_of(location, logits, scratch)
        _, key, weights = totals(raw, LOG2_E, logits, BLOCK)
        at = grid.values_of(logits, location.row) + token.to(tl.int64) * logits.token_stride
        above = tl.load(at).to(tl.float32) - grid.value_of(key)
        tl.store(scratch.row_raw_logprobs + location.row, above - tl.log(tl.sum(weights)))
