"""Rejection sampling in two launches, or four where a request has filters.

The first launch goes over the logits and the draft's law together and leaves the statistics of
both, as sampled verification does for the logits; probabilities need none. The program that leaves
a row's last ones tests the row's draft token. With filters, `threshold` comes first, and a launch
over the rows tests. The last launch is over the requests: each of its programs looks for the first
token refused, and leaves the residual's sums in some chunks of that one row; the last one to do so
draws from the residual as rows are drawn from their statistics, or where all were accepted the
bonus token, and writes what the request emits.

`fastdraft.kernels.reference.rejection` has the formulas. q is multiplied by the sum of the target's
weights there too, so no probability is made of a weight.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from fastdraft.kernels import reference
from fastdraft.kernels.fused import config, threshold
from fastdraft.kernels.fused.noise import (
    ACCEPT_STREAM,
    CHUNK_STREAM,
    RESIDUAL_CHUNK_STREAM,
    RESIDUAL_TOKEN_STREAM,
    TOKEN_STREAM,
    exponential_noise,
)
from fastdraft.kernels.fused.rows import (
    CHUNK,
    EMPTY_KEY,
    INFINITE_KEY,
    NAN_KEY,
    drafted_at,
    last_to_arrive,
    load_chunk,
    load_units,
    locate,
    only_allowed,
    ordered_key,
    pack,
    unpack,
    value_of,
)
from fastdraft.kernels.fused.sampled import NEGLIGIBLE, draw
from fastdraft.kernels.fused.statistics import (
    ANY_ALIGNMENT,
    LOG2_E,
    OUT,
    PARTS,
    PER_BATCH,
    divisor_of,
    leave_part,
    load_tile,
    row_operands,
    scale_of,
    totals,
)
from fastdraft.kernels.reference import Emitted
from fastdraft.kernels.workspace import Scratch, Size, Workspace
from torch import Tensor

_NAN = tl.constexpr(int(reference.Status.NAN))
_EMPTY = tl.constexpr(int(reference.Status.EMPTY))
# Two rows in the registers at a time, and much besides, want twice the threads.
_LAST_WARPS: Final = 2 * config.WARPS
# The index that stands for no token.
_REFUSED = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _is_allowed(allowed, token, ALLOWED: tl.constexpr):
    """Whether a row's mask allows one token, a scalar."""
    if ALLOWED:
        return ((tl.load(allowed + token // 32) >> (token % 32)) & 1) != 0
    return token == token


@triton.jit
def _log_raw(logits, token, raw_maximum, raw_sum, token_stride, vocabulary, BLOCK: tl.constexpr):
    """The log-probability of a token under the logits as they came."""
    _, key, weights = totals(raw_maximum, raw_sum, LOG2_E, vocabulary, BLOCK)
    x = tl.load(logits + token.to(tl.int64) * token_stride).to(tl.float32)
    return x - value_of(key) - tl.log(tl.sum(weights))


@triton.jit
def _first_of(keys, key, logits, allowed, token_stride, vocabulary, WIDTH: tl.constexpr,
              CONTIGUOUS: tl.constexpr, ALLOWED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The first token whose logit has the row's key; keys: those of the chunks' maxima."""
    chunk = tl.min(tl.where(keys == key, tl.arange(0, BLOCK), BLOCK - 1))
    x = load_chunk(logits, allowed, chunk, token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED)
    token = tl.reshape(chunk * CHUNK + tl.arange(0, CHUNK), (CHUNK // WIDTH, WIDTH))
    return tl.min(tl.min(tl.where(ordered_key(x) == key, token, vocabulary), 1), 0)


@triton.jit
def _log_q(draft, token, draft_maximum, draft_sum, stride, vocabulary, DRAFT_LOGITS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """The logarithm of a token's probability under the draft's law; NaN where it has none."""
    q = tl.load(draft + token.to(tl.int64) * stride).to(tl.float32)
    if DRAFT_LOGITS:
        _, key, weights = totals(draft_maximum, draft_sum, LOG2_E, vocabulary, BLOCK)
        above = q - value_of(key)
        never = tl.exp2(above * LOG2_E) <= NEGLIGIBLE
        return tl.where(never, float("-inf"), above) - tl.log(tl.sum(weights))
    return tl.where(q == 0, float("-inf"), tl.log(tl.where(q == 0, 1.0, q)))


@triton.jit
def _test(
    row,
    request,
    first,
    logits,
    allowed,
    draft,
    draft_ids,
    temperature,
    seeds,
    positions,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    lowest,
    draft_maximum,
    draft_sum,
    row_tests,
    row_logprobs,
    row_raw_logprobs,
    token_stride,
    draft_stride,
    draft_token_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    FILTERS: tl.constexpr,
    DRAFT_LOGITS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Leaves in `row_tests` whether a row accepts its draft token.

    logits, allowed and all statistics are those of the row, draft its first row's.
    """
    at = row - request
    drafted = tl.load(draft_ids + at).to(tl.int64)
    known = (drafted >= 0) & (drafted < vocabulary)
    token = tl.where(known, drafted, 0).to(tl.int32)
    heat = tl.load(temperature + request)
    divisor = divisor_of(heat)
    keys, key, weights = totals(chunk_maximum, chunk_sum, LOG2_E / divisor, vocabulary, BLOCK)
    by_argmax = (heat == 0) | (key >= INFINITE_KEY) | (key <= EMPTY_KEY)

    x = tl.load(logits + token.to(tl.int64) * token_stride).to(tl.float32)
    x = tl.where(_is_allowed(allowed, token, ALLOWED), x, float("-inf"))
    above = (x - value_of(key)) / divisor
    never = tl.exp(above) <= NEGLIGIBLE
    if FILTERS:
        never = never | (x < tl.load(lowest + row))
    log_p = tl.where(never, float("-inf"), above - tl.log(tl.sum(weights)))
    log_q = _log_q(
        draft + at.to(tl.int64) * draft_stride, token, draft_maximum, draft_sum, draft_token_stride,
        vocabulary, DRAFT_LOGITS, BLOCK,
    )  # fmt: skip
    seed = tl.load(seeds + request)
    position = tl.load(positions + request) + (row - first)
    index = tl.zeros((1,), tl.int32)
    noise = tl.sum(exponential_noise(seed, position, index, ACCEPT_STREAM))
    accepted = noise > log_q - log_p
    if by_argmax:
        best = _first_of(
            keys, key, logits, allowed, token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED, BLOCK
        )
        accepted = token == best
    accepted = accepted & known & (key > EMPTY_KEY)
    tl.store(row_tests + row, pack(key, tl.where(accepted, token, _REFUSED)))
    if LOGPROBS:
        tl.store(row_logprobs + row, log_p)
    if RAW_LOGPROBS:
        raw = _log_raw(logits, token, raw_maximum, raw_sum, token_stride, vocabulary, BLOCK)
        tl.store(row_raw_logprobs + row, raw)


@triton.jit
def _residual(x, q, maximum, scale, lowest, draft_maximum, factor, FILTERS: tl.constexpr,
              DRAFT_LOGITS: tl.constexpr):  # fmt: skip
    """max(w - factor q, 0) of the logits x and the draft's law q, 0 where q is not a number.

    factor: the sum of w, of logits divided by the sum of the draft's weights; NaN leaves nothing.
    """
    weight = tl.exp2((x - maximum) * scale)
    weight = tl.where(weight > NEGLIGIBLE, weight, 0.0)
    if FILTERS:
        weight = tl.where(x >= lowest, weight, 0.0)
    if DRAFT_LOGITS:
        q = tl.exp2((q - draft_maximum) * LOG2_E)
        q = tl.where(q <= NEGLIGIBLE, 0.0, q)
    else:
        q = tl.where(q < 0, 0.0, q)  # past the vocabulary it is -inf
    left = weight - q * factor
    return tl.where(left > 0, left, 0.0)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def rejection_statistics_kernel(
    logits,
    allowed,
    draft,
    draft_ids,
    offsets,
    temperature,
    seeds,
    positions,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    part_maximum,
    draft_maximum,
    draft_sum,
    row_arrivals,
    row_tests,
    row_logprobs,
    row_raw_logprobs,
    row_stride,
    token_stride,
    allowed_stride,
    draft_stride,
    draft_token_stride,
    vocabulary,
    rows,
    requests,
    drafted,
    max_draft,
    programs,
    tiles,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    DRAFT_CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    FILTERS: tl.constexpr,
    DRAFT_LOGITS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Row statistics of the logits and the draft's law, and without filters the tests."""
    program = tl.program_id(0)
    row = program // programs
    part = program % programs
    request, first, size, used = locate(row, offsets, requests, rows, max_draft, REQUESTS)
    if not used:
        return
    at = row - request
    has_draft = (row - first < size) & (at >= 0) & (at < drafted)
    logits += row.to(tl.int64) * row_stride
    statistics = row.to(tl.int64) * tl.cdiv(vocabulary, CHUNK)
    chunk_maximum += statistics
    chunk_sum += statistics
    if ALLOWED:
        allowed += row.to(tl.int64) * allowed_stride
    if RAW_LOGPROBS:
        raw_maximum += statistics
        raw_sum += statistics
    if FILTERS:
        part_maximum += statistics * PARTS
    leave_part(
        part, tiles, logits, allowed, scale_of(request, temperature, False), chunk_maximum,
        chunk_sum, raw_maximum, raw_sum, token_stride, vocabulary, CHUNKS, WIDTH, CONTIGUOUS,
        ALLOWED, RAW_LOGPROBS, part_maximum,
    )  # fmt: skip
    if DRAFT_LOGITS:
        draft_maximum += statistics
        draft_sum += statistics
        if has_draft:
            leave_part(
                part, tiles, draft + at.to(tl.int64) * draft_stride, None, LOG2_E, draft_maximum,
                draft_sum, None, None, draft_token_stride, vocabulary, CHUNKS, WIDTH,
                DRAFT_CONTIGUOUS, False, False,
            )  # fmt: skip
    if FILTERS or not has_draft:
        return
    if last_to_arrive(row_arrivals + row, programs, WAIT):
        _test(
            row, request, first, logits, allowed, draft, draft_ids, temperature, seeds, positions,
            chunk_maximum, chunk_sum, raw_maximum, raw_sum, None, draft_maximum, draft_sum,
            row_tests, row_logprobs, row_raw_logprobs, token_stride, draft_stride,
            draft_token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED, False, DRAFT_LOGITS,
            LOGPROBS, RAW_LOGPROBS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def rejection_test_kernel(
    logits,
    allowed,
    draft,
    draft_ids,
    offsets,
    temperature,
    seeds,
    positions,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    lowest,
    draft_maximum,
    draft_sum,
    row_tests,
    row_logprobs,
    row_raw_logprobs,
    row_stride,
    token_stride,
    allowed_stride,
    draft_stride,
    draft_token_stride,
    vocabulary,
    rows,
    requests,
    drafted,
    max_draft,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    DRAFT_LOGITS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tests of the rows, from filtered statistics."""
    row = tl.program_id(0)
    request, first, size, used = locate(row, offsets, requests, rows, max_draft, REQUESTS)
    at = row - request
    if not (used & (row - first < size) & (at >= 0) & (at < drafted)):
        return
    statistics = row.to(tl.int64) * tl.cdiv(vocabulary, CHUNK)
    if ALLOWED:
        allowed += row.to(tl.int64) * allowed_stride
    if RAW_LOGPROBS:
        raw_maximum += statistics
        raw_sum += statistics
    if DRAFT_LOGITS:
        draft_maximum += statistics
        draft_sum += statistics
    _test(
        row, request, first, logits + row.to(tl.int64) * row_stride, allowed, draft, draft_ids,
        temperature, seeds, positions, chunk_maximum + statistics, chunk_sum + statistics,
        raw_maximum, raw_sum, lowest, draft_maximum, draft_sum, row_tests, row_logprobs,
        row_raw_logprobs, token_stride, draft_stride, draft_token_stride, vocabulary, WIDTH,
        CONTIGUOUS, ALLOWED, True, DRAFT_LOGITS, LOGPROBS, RAW_LOGPROBS, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def rejection_kernel(
    logits,
    allowed,
    draft,
    draft_ids,
    offsets,
    temperature,
    seeds,
    positions,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    lowest,
    draft_maximum,
    draft_sum,
    residual_sum,
    row_tests,
    row_logprobs,
    row_raw_logprobs,
    request_arrivals,
    token_ids,
    lengths,
    status,
    logprobs,
    raw_logprobs,
    row_stride,
    token_stride,
    allowed_stride,
    draft_stride,
    draft_token_stride,
    vocabulary,
    rows,
    drafted,
    max_draft,
    programs,
    tiles,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    DRAFT_CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    FILTERS: tl.constexpr,
    DRAFT_LOGITS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    WAIT: tl.constexpr,
):
    """What each request emits, from the tests of its rows."""
    program = tl.program_id(0)
    request = program // programs
    part = program % programs
    # In range whatever the offsets hold.
    first = tl.minimum(tl.maximum(tl.load(offsets + request) + request, 0), rows - 1).to(tl.int32)
    end = tl.minimum(tl.load(offsets + request + 1) + request + 1, rows).to(tl.int32)
    size = tl.minimum(tl.maximum(end - first - 1, 0), max_draft)

    last = size
    for block in range(0, size, SLOTS):
        slot = block + tl.arange(0, SLOTS)
        inside = slot < size
        row_key, token = unpack(tl.load(row_tests + first + slot, mask=inside, other=0))
        last = tl.minimum(last, tl.min(tl.where(inside & (token >= vocabulary), slot, size)))

    row = first + last
    at = drafted_at(first, request, last + 1)
    refused = (last < size) & (at >= 0) & (at < drafted)
    at = tl.where(refused, at, 0).to(tl.int64)
    chunks = tl.cdiv(vocabulary, CHUNK)
    logits += row.to(tl.int64) * row_stride
    draft += at * draft_stride
    chunk_maximum += row.to(tl.int64) * chunks
    chunk_sum += row.to(tl.int64) * chunks
    residual_sum += request.to(tl.int64) * chunks
    if ALLOWED:
        allowed += row.to(tl.int64) * allowed_stride
    if DRAFT_LOGITS:
        draft_maximum += row.to(tl.int64) * chunks
        draft_sum += row.to(tl.int64) * chunks
    heat = tl.load(temperature + request)
    scale = scale_of(request, temperature, False)
    bound = float("-inf")
    if FILTERS:
        bound = tl.load(lowest + row)
    _, key, weights = totals(chunk_maximum, chunk_sum, scale, vocabulary, BLOCK)
    total = tl.sum(weights)
    maximum = value_of(key)
    by_argmax = (heat == 0) | (key >= INFINITE_KEY) | (key <= EMPTY_KEY)
    from_residual = refused & (by_argmax == 0)
    chunk_stream = tl.where(refused, RESIDUAL_CHUNK_STREAM, CHUNK_STREAM)
    token_stream = tl.where(refused, RESIDUAL_TOKEN_STREAM, TOKEN_STREAM)

    # NaN where no residual is wanted, or none can be had.
    factor = maximum * float("nan")
    draft_top = factor
    if from_residual:
        guess = tl.load(draft_ids + at).to(tl.int64)
        known = (guess >= 0) & (guess < vocabulary)
        own = tl.load(draft + tl.where(known, guess, 0) * draft_token_stride).to(tl.float32)
        factor = tl.where(known & (own == own), total, float("nan"))
        if DRAFT_LOGITS:
            _draft_keys, draft_key, draft_weights = totals(
                draft_maximum, draft_sum, LOG2_E, vocabulary, BLOCK
            )
            draft_top = value_of(draft_key)
            factor = factor / tl.sum(draft_weights)
        for tile in range(part * tiles, tl.minimum((part + 1) * tiles, tl.cdiv(chunks, CHUNKS))):
            x, unit = load_tile(
                logits, tile, token_stride, vocabulary, CHUNKS, WIDTH, CONTIGUOUS, False
            )
            if ALLOWED:
                x = only_allowed(x, allowed, unit, vocabulary, WIDTH)
            q = load_units(
                draft, unit, draft_token_stride, vocabulary, WIDTH, DRAFT_CONTIGUOUS, False
            )
            left = _residual(x, q, maximum, scale, bound, draft_top, factor, FILTERS, DRAFT_LOGITS)
            chunk = tile * CHUNKS + tl.arange(0, CHUNKS)
            left = tl.sum(tl.sum(tl.sum(left, 3), 0), 1)
            tl.store(residual_sum + chunk, left, mask=chunk < chunks)

    if not last_to_arrive(request_arrivals + request, programs, WAIT):
        return
    seed = tl.load(seeds + request)
    position = tl.load(positions + request) + last
    index = tl.arange(0, BLOCK)
    left_chunks = tl.where(factor == factor, chunks, 0)
    left = tl.load(residual_sum + index, mask=index < left_chunks, other=0.0, cache_modifier=".cg")
    if tl.max(left) > 0:
        ratio = left / exponential_noise(seed, position, index, RESIDUAL_CHUNK_STREAM)
        _best, chunk = unpack(tl.max(pack(ratio.to(tl.int32, bitcast=True), index)))
        x = load_chunk(logits, allowed, chunk, token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED)
        q = load_chunk(
            draft, None, chunk, draft_token_stride, vocabulary, WIDTH, DRAFT_CONTIGUOUS, False
        )
        left_of = _residual(x, q, maximum, scale, bound, draft_top, factor, FILTERS, DRAFT_LOGITS)
        token = tl.reshape(chunk * CHUNK + tl.arange(0, CHUNK), (CHUNK // WIDTH, WIDTH))
        ratio = left_of / exponential_noise(seed, position, token, RESIDUAL_TOKEN_STREAM)
        score = tl.where(token < vocabulary, ratio.to(tl.int32, bitcast=True), OUT)
        _best, found = unpack(tl.max(tl.max(pack(score, token), 1), 0))
        value = tl.sum(tl.sum(tl.where(token == found, x, 0.0), 1), 0)
        logprob = (value - maximum) * scale / LOG2_E - tl.log(total)
    else:
        _best, found, logprob = draw(
            logits, allowed, chunk_maximum, chunk_sum, bound, heat, seed, position, chunk_stream,
            token_stream, token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED, False, BLOCK,
        )  # fmt: skip

    stopped = (key <= EMPTY_KEY).to(tl.int32)
    nan = (key == NAN_KEY).to(tl.int32)
    emitted = request.to(tl.int64) * (max_draft + 1)
    raw = 0.0
    if RAW_LOGPROBS:
        raw_maximum += row.to(tl.int64) * chunks
        raw_sum += row.to(tl.int64) * chunks
        raw = _log_raw(logits, found, raw_maximum, raw_sum, token_stride, vocabulary, BLOCK)
    for block in range(0, max_draft + 1, SLOTS):
        slot = block + tl.arange(0, SLOTS)
        inside = slot <= max_draft
        drafts = slot < last
        is_last = slot == last + stopped * (max_draft + 1)
        row_key, token = unpack(tl.load(row_tests + first + slot, mask=drafts, other=0))
        nan = tl.maximum(nan, tl.max((drafts & (row_key == NAN_KEY)).to(tl.int32)))
        token = tl.where(drafts, token, tl.where(is_last, found, -1))
        tl.store(token_ids + emitted + slot, token, mask=inside)
        if LOGPROBS:
            value = tl.load(row_logprobs + first + slot, mask=drafts, other=float("nan"))
            value = tl.where(is_last, logprob, value)
            tl.store(logprobs + emitted + slot, value, mask=inside)
        if RAW_LOGPROBS:
            value = tl.load(row_raw_logprobs + first + slot, mask=drafts, other=float("nan"))
            value = tl.where(is_last, raw, value)
            tl.store(raw_logprobs + emitted + slot, value, mask=inside)
    tl.store(lengths + request, last + 1 - stopped)
    tl.store(status + request, nan * _NAN + stopped * _EMPTY)


def verify_rejection(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    draft_probs: Tensor | None = None,
    draft_logits: Tensor | None = None,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    allowed: Tensor | None = None,
    logprobs: bool = False,
    raw_logprobs: bool = False,
    max_draft: int,
    workspace: Workspace | None = None,
) -> Emitted:
    """The reference's `verify_rejection`, of logits of 16 or 32 bits.

    Two launches without filters, four with one. The logits and draft_logits are read once,
    draft_probs where the draft tokens are; one row of both for each request again. The results are
    the workspace's buffers, if there is one.
    """
    draft = draft_probs if draft_logits is None else draft_logits
    assert draft is not None
    rows, vocabulary = logits.shape
    requests = len(offsets) - 1
    scratch = Scratch(workspace, logits.device, Size(rows, requests, vocabulary, max_draft))
    emitted = Emitted(
        scratch.take("token_ids"),
        scratch.take("lengths"),
        scratch.take("status"),
        None,
        scratch.take("logprobs") if logprobs else None,
        scratch.take("raw_logprobs") if raw_logprobs else None,
    )
    filters = top_k is not None or top_p is not None or min_p is not None
    is_logits = draft_logits is not None
    operands = {
        **row_operands(logits, offsets, temperature, allowed, raw_logprobs, max_draft, scratch),
        "draft": draft,
        "draft_ids": draft_ids,
        "seeds": seeds,
        "positions": positions,
        "draft_maximum": scratch.take("draft_maximum") if is_logits else None,
        "draft_sum": scratch.take("draft_sum") if is_logits else None,
        "row_tests": scratch.take("row_tests"),
        "row_logprobs": scratch.take("row_logprobs") if logprobs else None,
        "row_raw_logprobs": scratch.take("row_raw_logprobs") if raw_logprobs else None,
        "draft_stride": draft.stride(0),
        "draft_token_stride": draft.stride(1),
        "drafted": len(draft_ids),
        "DRAFT_LOGITS": is_logits,
        "LOGPROBS": logprobs,
        "BLOCK": config.chunks_block(vocabulary),
    }
    lowest = scratch.take("lowest") if filters else None
    of_tiles = {
        "CHUNKS": config.TILE_CHUNKS,
        "FILTERS": filters,
        "DRAFT_CONTIGUOUS": draft.stride(1) == 1,
        "WAIT": config.wait_for_stores(),
    }
    with torch.cuda.device_of(logits):
        programs, tiles = config.split_chunks(rows, vocabulary)
        rejection_statistics_kernel[(rows * programs,)](
            **operands,
            **of_tiles,
            part_maximum=scratch.take("part_maximum") if filters else None,
            row_arrivals=scratch.take("row_arrivals"),
            programs=programs,
            tiles=tiles,
            num_warps=config.WARPS,
        )
        if filters:
            threshold.launch(
                logits,
                offsets,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                allowed=allowed,
                max_draft=max_draft,
                scratch=scratch,
            )
            rejection_test_kernel[(rows,)](**operands, lowest=lowest, num_warps=config.WARPS)
        programs, tiles = config.split_chunks(requests, vocabulary)
        del operands["requests"], operands["REQUESTS"]
        rejection_kernel[(requests * programs,)](
            **operands,
            **of_tiles,
            token_ids=emitted.token_ids,
            lengths=emitted.lengths,
            status=emitted.status,
            logprobs=emitted.logprobs,
            raw_logprobs=emitted.raw_logprobs,
            lowest=lowest,
            residual_sum=scratch.take("residual_sum"),
            request_arrivals=scratch.take("request_arrivals"),
            programs=programs,
            tiles=tiles,
            SLOTS=config.SLOTS,
            num_warps=_LAST_WARPS,
        )
    return emitted
