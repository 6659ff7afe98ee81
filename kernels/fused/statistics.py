"""Row statistics: what one pass over the logits leaves for all that follows.

Of each chunk of the random contract they hold the maximum m and the sum of exp((x - m) / T): with
them a row can be drawn from by reading one chunk again, its log-probabilities have their divisor,
and its filters know where to look.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fastdraft.kernels import workspace as memory
from fastdraft.kernels.fused import config
from fastdraft.kernels.fused.rows import (
    CHUNK,
    last_to_arrive,
    load_units,
    locate,
    logits_of,
    only_allowed,
    ordered_key,
    value_of,
)
from fastdraft.kernels.workspace import Scratch, Size, Workspace
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
# What is no candidate in a race: below every key.
OUT = tl.constexpr(-0x80000000)
# The filters' parts of a chunk.
PARTS = tl.constexpr(memory.PARTS)

# Operands that a kernel is not compiled anew for: they change from one batch to the next.
PER_BATCH = (
    "rows",
    "requests",
    "drafted",
    "max_draft",
    "programs",
    "tiles",
    "allowed_stride",
)
# Nor for how these lie, of which only few values are read.
ANY_ALIGNMENT = (
    "allowed",
    "draft_ids",
    "parents",
    "offsets",
    "temperature",
    "seeds",
    "positions",
)


@triton.jit
def _sums(x, scale):
    """The maximum m of each chunk, and its sum of 2**((x - m) * scale).

    x: float32 (repeats, chunks, 32, width). NaN for both where a chunk has one.
    """
    maximum = tl.max(tl.max(tl.max(x, 3), 0), 1)
    # What tl.max makes of NaN is up to the device, but a sum has it. Next to an infinite maximum it
    # shows too: exponentials of the logits themselves are 0, infinite or NaN.
    anchor = tl.where(tl.abs(maximum) < float("inf"), maximum, 0.0)
    powers = tl.exp2((x - anchor[None, :, None, None]) * scale)
    total = tl.sum(tl.sum(tl.sum(powers, 3), 0), 1)
    return tl.where(total == total, maximum, float("nan")), total


@triton.jit
def load_tile(
    logits,
    tile,
    token_stride,
    vocabulary,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """CHUNKS chunks of a row, float32 (repeats, CHUNKS, 32, WIDTH), and the units they are.

    Each chunk is in the hands of one warp, in loads of 32 units: no sum crosses warps.
    """
    REPEATS: tl.constexpr = CHUNK // (32 * WIDTH)
    chunk = tile * CHUNKS + tl.arange(0, CHUNKS)
    unit = (
        chunk[None, :, None] * (CHUNK // WIDTH)
        + tl.arange(0, REPEATS)[:, None, None] * 32
        + tl.arange(0, 32)[None, None, :]
    )
    return load_units(logits, unit, token_stride, vocabulary, WIDTH, CONTIGUOUS, WHOLE), unit


@triton.jit
def _leave_statistics(
    logits,
    allowed,
    tile,
    scale,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    part_maximum,
    token_stride,
    vocabulary,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    RAW: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Writes the statistics of a tile of a row's chunks; pointers are those of the row."""
    raw, unit = load_tile(logits, tile, token_stride, vocabulary, CHUNKS, WIDTH, CONTIGUOUS, WHOLE)
    x = raw
    if ALLOWED:
        x = only_allowed(raw, allowed, unit, vocabulary, WIDTH)
    # The first lane of each warp writes what the warp found. Places that follow the lanes keep the
    # compiler from handing it to other warps first.
    chunk = tl.expand_dims(tile * CHUNKS + tl.arange(0, CHUNKS), 1)
    lane = tl.arange(0, 32)[None, :]
    inside = chunk < tl.cdiv(vocabulary, CHUNK)
    first = inside & (lane == 0)
    place = chunk + lane
    maximum, total = _sums(x, scale)
    tl.store(chunk_maximum + place, maximum[:, None], mask=first)
    tl.store(chunk_sum + place, total[:, None], mask=first)
    if part_maximum is not None:
        pairs = tl.reshape(tl.max(tl.max(x, 3), 0), (CHUNKS, PARTS, 32 // PARTS))
        best = tl.broadcast_to(tl.max(pairs, 2, keep_dims=True), pairs.shape)
        tl.store(
            part_maximum + chunk * PARTS + lane * PARTS // 32,
            tl.reshape(best, (CHUNKS, 32)),
            mask=inside & (lane % (32 // PARTS) == 0),
        )
    if RAW:
        maximum, total = _sums(raw, LOG2_E)
        tl.store(raw_maximum + place, maximum[:, None], mask=first)
        tl.store(raw_sum + place, total[:, None], mask=first)


@triton.jit
def leave_part(
    share,
    tiles,
    logits,
    allowed,
    scale,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    token_stride,
    vocabulary,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    RAW: tl.constexpr,
    part_maximum=None,
):
    """Writes the statistics of a share of a row, so many tiles long.

    Pointers are those of the row. With part_maximum, the largest logit of each part of a chunk too:
    of what two neighbouring lanes hold of it in all repeats of `load_tile`.
    """
    begin = share * tiles
    end = tl.minimum(begin + tiles, tl.cdiv(vocabulary, CHUNKS * CHUNK))
    whole = tl.minimum(end, vocabulary // (CHUNKS * CHUNK))
    for tile in range(begin, whole):
        _leave_statistics(
            logits, allowed, tile, scale, chunk_maximum, chunk_sum, raw_maximum, raw_sum,
            part_maximum, token_stride, vocabulary, CHUNKS, WIDTH, CONTIGUOUS, ALLOWED, RAW, True,
        )  # fmt: skip
    if whole < end:
        _leave_statistics(
            logits, allowed, whole, scale, chunk_maximum, chunk_sum, raw_maximum, raw_sum,
            part_maximum, token_stride, vocabulary, CHUNKS, WIDTH, CONTIGUOUS, ALLOWED, RAW, False,
        )  # fmt: skip


@triton.jit
def divisor_of(temperature):
    """What logits are divided by: 1 for temperature 0, and no more than a quotient can bear."""
    return tl.where(temperature == 0, 1.0, tl.minimum(temperature, 2.0**126))


@triton.jit
def scale_of(request, temperature, GREEDY: tl.constexpr):
    """log2(e) / T of a request; temperature 0 counts as 1."""
    scale = (request * 0).to(tl.float32) + LOG2_E
    if not GREEDY:
        scale /= divisor_of(tl.load(temperature + request))
    return scale


@triton.jit
def totals(chunk_maximum, chunk_sum, scale, vocabulary, BLOCK: tl.constexpr):
    """Of a row's statistics: (the keys of the chunks' maxima, the row's key, the chunks' sums
    relative to the row's maximum). BLOCK: at least the chunks of a row."""
    chunk = tl.arange(0, BLOCK)
    inside = chunk < tl.cdiv(vocabulary, CHUNK)
    maximum = tl.load(chunk_maximum + chunk, mask=inside, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(chunk_sum + chunk, mask=inside, other=0.0, cache_modifier=".cg")
    keys = tl.where(inside, ordered_key(maximum), OUT)
    key = tl.max(keys)
    weights = total * tl.exp2((maximum - value_of(key)) * scale)
    return keys, key, tl.where(inside, weights, 0.0)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def statistics_kernel(
    logits,
    allowed,
    offsets,
    temperature,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    part_maximum,
    row_stride,
    token_stride,
    allowed_stride,
    vocabulary,
    rows,
    requests,
    max_draft,
    programs,
    tiles,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ALLOWED: tl.constexpr,
    GREEDY: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Row statistics, left for another launch."""
    program = tl.program_id(0)
    row = program // programs
    request, _, _, used = locate(row, offsets, requests, rows, max_draft, REQUESTS)
    if not used:
        return
    statistics = row.to(tl.int64) * tl.cdiv(vocabulary, CHUNK)
    if ALLOWED:
        allowed += row.to(tl.int64) * allowed_stride
    if RAW_LOGPROBS:
        raw_maximum += statistics
        raw_sum += statistics
    leave_part(
        program % programs, tiles,
        logits_of(logits, row, row_stride, WIDTH if ALIGNED else 1), allowed,
        scale_of(request, temperature, GREEDY), chunk_maximum + statistics, chunk_sum + statistics,
        raw_maximum, raw_sum, token_stride, vocabulary, CHUNKS, WIDTH, CONTIGUOUS, ALLOWED,
        RAW_LOGPROBS, part_maximum + statistics * PARTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=("programs", "tiles"))
def log_sums_kernel(
    logits,
    chunk_maximum,
    chunk_sum,
    row_arrivals,
    row_log_sums,
    row_stride,
    token_stride,
    vocabulary,
    programs,
    tiles,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT: tl.constexpr,
):
    """The logarithm of each row's sum of exponentials."""
    program = tl.program_id(0)
    row = program // programs
    statistics = row.to(tl.int64) * tl.cdiv(vocabulary, CHUNK)
    chunk_maximum += statistics
    chunk_sum += statistics
    leave_part(
        program % programs, tiles, logits_of(logits, row, row_stride, WIDTH), None, LOG2_E,
        chunk_maximum, chunk_sum, None, None, token_stride, vocabulary,
        CHUNKS, WIDTH, CONTIGUOUS, False, False,
    )  # fmt: skip
    if last_to_arrive(row_arrivals + row, programs, WAIT):
        _, key, weights = totals(chunk_maximum, chunk_sum, LOG2_E, vocabulary, BLOCK)
        tl.store(row_log_sums + row, value_of(key) + tl.log(tl.sum(weights)))


def row_statistics(
    logits: Tensor,
    offsets: Tensor,
    *,
    temperature: Tensor | None,
    allowed: Tensor | None,
    raw_logprobs: bool = False,
    max_draft: int,
    scratch: Scratch,
) -> None:
    """Leaves row statistics in scratch: `chunk_maximum` and `chunk_sum` of the rows that count.

    Operands as in `verify_sampled`; temperature 0 counts as 1, and no temperature too. With
    raw_logprobs, `raw_maximum` and `raw_sum` of the logits as they are, at temperature 1. One
    launch.
    """
    rows, vocabulary = logits.shape
    programs, tiles = config.split_chunks(rows, vocabulary)
    with torch.cuda.device_of(logits):
        statistics_kernel[(rows * programs,)](
            **row_operands(logits, offsets, temperature, allowed, raw_logprobs, max_draft, scratch),
            part_maximum=scratch.take("part_maximum"),
            programs=programs,
            tiles=tiles,
            CHUNKS=config.TILE_CHUNKS,
            ALIGNED=config.unit(logits) > 1,
            GREEDY=temperature is None,
            num_warps=config.WARPS,
        )


def log_sums(logits: Tensor, *, workspace: Workspace | None = None) -> Tensor:
    """The logarithm of each row's sum of exponentials, float32 (rows,); no number if it has none.

    logits: (rows, vocabulary) of 16 or 32 bits. One launch. The result is the workspace's buffer,
    if there is one.
    """
    rows, vocabulary = logits.shape
    scratch = Scratch(workspace, logits.device, Size(rows, 1, vocabulary, 0))
    result = scratch.take("row_log_sums")
    programs, tiles = config.split_chunks(rows, vocabulary)
    with torch.cuda.device_of(logits):
        log_sums_kernel[(rows * programs,)](
            logits,
            scratch.take("chunk_maximum"),
            scratch.take("chunk_sum"),
            scratch.take("row_arrivals"),
            result,
            *logits.stride(),
            vocabulary,
            programs,
            tiles,
            CHUNKS=config.TILE_CHUNKS,
            WIDTH=config.unit(logits),
            CONTIGUOUS=logits.stride(1) == 1,
            BLOCK=config.chunks_block(vocabulary),
            WAIT=config.wait_for_stores(),
            num_warps=config.WARPS,
        )
    return result


def row_operands(
    logits: Tensor,
    offsets: Tensor,
    temperature: Tensor | None,
    allowed: Tensor | None,
    raw_logprobs: bool,
    max_draft: int,
    scratch: Scratch,
) -> dict[str, object]:
    """What all kernels over the rows of a batch take."""
    requests = len(offsets) - 1
    return {
        "logits": logits,
        "allowed": allowed,
        "offsets": offsets,
        "temperature": temperature,
        "chunk_maximum": scratch.take("chunk_maximum"),
        "chunk_sum": scratch.take("chunk_sum"),
        "raw_maximum": scratch.take("raw_maximum") if raw_logprobs else None,
        "raw_sum": scratch.take("raw_sum") if raw_logprobs else None,
        "row_stride": logits.stride(0),
        "token_stride": logits.stride(1),
        "allowed_stride": 0 if allowed is None else allowed.stride(0),
        "vocabulary": logits.shape[1],
        "rows": len(logits),
        "requests": requests,
        "max_draft": max_draft,
        "WIDTH": config.width(logits.dtype),
        "CONTIGUOUS": logits.stride(1) == 1,
        "ALLOWED": allowed is not None,
        "RAW_LOGPROBS": raw_logprobs,
        "REQUESTS": config.requests_block(requests),
    }
