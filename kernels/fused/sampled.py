"""Sampled verification: one launch, or three where a request has filters.

The first launch goes over the logits once and leaves *row statistics* in the workspace: of each
chunk of the random contract the maximum m and the sum of exp((x - m) / T). With them a row is drawn
from one chunk alone: the chunk by a race over the chunks' sums, the token by a race in that chunk,
read again. The program that leaves a row's last statistics does it, and the one that finishes a
request's last row compares the tokens with the draft. Filters come between: `threshold` then says
from which logit on a row is kept and what is left of the sums, and a launch over the rows draws.

`fastdraft.kernels.reference.sampling` has the contract and why it is a race of ratios.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fastdraft.kernels.fused import config, threshold
from fastdraft.kernels.fused.acceptance import accept
from fastdraft.kernels.fused.noise import CHUNK_STREAM, TOKEN_STREAM, exponential_noise
from fastdraft.kernels.fused.rows import (
    CHUNK,
    EMPTY_KEY,
    INFINITE_KEY,
    depth_of,
    last_to_arrive,
    load_chunk,
    locate,
    logits_of,
    ordered_key,
    pack,
    unpack,
    value_of,
)
from fastdraft.kernels.fused.statistics import (
    ANY_ALIGNMENT,
    LOG2_E,
    OUT,
    PER_BATCH,
    divisor_of,
    leave_part,
    row_operands,
    row_statistics,
    scale_of,
    totals,
)
from fastdraft.kernels.reference import Emitted
from fastdraft.kernels.workspace import Scratch, Size, Workspace
from torch import Tensor

# The contract's bound below which a weight is 0.
NEGLIGIBLE = tl.constexpr(2.0**-125)


@triton.jit
def draw(
    logits,
    allowed,
    chunk_maximum,
    chunk_sum,
    lowest,
    temperature,
    seed,
    position,
    chunk_stream,
    token_stream,
    token_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token of a row, as the random contract has it: (its key, token, log-probability).

    The key is that of the row's maximum. temperature, 0 for the argmax, and lowest are values, the
    statistics and logits those of the row, the streams those of the noise.
    """
    divisor = divisor_of(temperature)
    keys, key, weights = totals(chunk_maximum, chunk_sum, LOG2_E / divisor, vocabulary, BLOCK)
    # Where the maximum is no number or infinite there is no softmax.
    by_argmax = (temperature == 0) | (key >= INFINITE_KEY) | (key <= EMPTY_KEY)
    index = tl.arange(0, BLOCK)
    score = keys
    if not GREEDY:
        ratio = weights / exponential_noise(seed, position, index, chunk_stream)
        ratio = tl.where(keys == OUT, OUT, ratio.to(tl.int32, bitcast=True))
        score = tl.where(by_argmax, keys, ratio)
    _, chunk = unpack(tl.max(pack(score, index)))

    x = load_chunk(logits, allowed, chunk, token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED)
    token = tl.reshape(chunk * CHUNK + tl.arange(0, CHUNK), (CHUNK // WIDTH, WIDTH))
    score = ordered_key(x)
    maximum = value_of(key)
    if not GREEDY:
        weight = tl.exp((x - maximum) / divisor)
        weight = tl.where((weight > NEGLIGIBLE) & (x >= lowest), weight, 0.0)
        ratio = weight / exponential_noise(seed, position, token, token_stream)
        score = tl.where(by_argmax, score, ratio.to(tl.int32, bitcast=True))
    score = tl.where(token < vocabulary, score, OUT)
    _, chosen = unpack(tl.max(tl.max(pack(score, token), 1), 0))
    value = tl.sum(tl.sum(tl.where(token == chosen, x, 0.0), 1), 0)
    return key, chosen, (value - maximum) / divisor - tl.log(tl.sum(weights))


@triton.jit
def _finish_row(
    row,
    request,
    first,
    size,
    logits,
    allowed,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    lowest,
    temperature,
    seeds,
    positions,
    draft_ids,
    parents,
    row_results,
    row_logprobs,
    row_raw_logprobs,
    request_arrivals,
    token_ids,
    lengths,
    status,
    path,
    logprobs,
    raw_logprobs,
    token_stride,
    vocabulary,
    drafted,
    max_draft,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    GREEDY: tl.constexpr,
    FILTERS: tl.constexpr,
    TREE: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Draws a row's token and, for the request's last row, writes what the request emits.

    logits, allowed and the statistics are those of the row.
    """
    heat = (first * 0).to(tl.float32)
    seed = first.to(tl.int64)
    position = seed
    if not GREEDY:
        heat = tl.load(temperature + request)
        seed = tl.load(seeds + request)
        position = tl.load(positions + request)
        position += depth_of(row - first, first, request, parents, drafted, TREE)
    bound = float("-inf")
    if FILTERS:
        bound = tl.load(lowest + row)
    key, token, logprob = draw(
        logits, allowed, chunk_maximum, chunk_sum, bound, heat, seed, position, CHUNK_STREAM,
        TOKEN_STREAM, token_stride, vocabulary, WIDTH, CONTIGUOUS, ALLOWED, GREEDY, BLOCK,
    )  # fmt: skip
    tl.store(row_results + row, pack(key, token))
    if LOGPROBS:
        tl.store(row_logprobs + row, logprob)
    if RAW_LOGPROBS:
        _, key, weights = totals(raw_maximum, raw_sum, LOG2_E, vocabulary, BLOCK)
        place = logits + token.to(tl.int64) * token_stride
        value = tl.load(place).to(tl.float32) - value_of(key)
        tl.store(row_raw_logprobs + row, value - tl.log(tl.sum(weights)))

    if last_to_arrive(request_arrivals + request, size + 1, WAIT):
        accept(
            request, first, size, row_results, row_logprobs, row_raw_logprobs, draft_ids, drafted,
            parents, token_ids, lengths, status, path, logprobs, raw_logprobs, max_draft,
            SLOTS, TREE, LOGPROBS, RAW_LOGPROBS,
        )  # fmt: skip


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def sampled_kernel(
    logits,
    allowed,
    draft_ids,
    parents,
    offsets,
    temperature,
    seeds,
    positions,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    row_arrivals,
    row_results,
    row_logprobs,
    row_raw_logprobs,
    request_arrivals,
    token_ids,
    lengths,
    status,
    path,
    logprobs,
    raw_logprobs,
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
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    GREEDY: tl.constexpr,
    TREE: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Row statistics, and from them all that is emitted."""
    program = tl.program_id(0)
    row = program // programs
    request, first, size, used = locate(row, offsets, requests, rows, max_draft, REQUESTS)
    if not used:
        return
    logits = logits_of(logits, row, row_stride, WIDTH)
    statistics = row.to(tl.int64) * tl.cdiv(vocabulary, CHUNK)
    chunk_maximum += statistics
    chunk_sum += statistics
    if ALLOWED:
        allowed += row.to(tl.int64) * allowed_stride
    if RAW_LOGPROBS:
        raw_maximum += statistics
        raw_sum += statistics
    leave_part(
        program % programs, tiles, logits, allowed, scale_of(request, temperature, GREEDY),
        chunk_maximum, chunk_sum, raw_maximum, raw_sum, token_stride, vocabulary,
        CHUNKS, WIDTH, CONTIGUOUS, ALLOWED, RAW_LOGPROBS,
    )  # fmt: skip
    if last_to_arrive(row_arrivals + row, programs, WAIT):
        _finish_row(
            row, request, first, size, logits, allowed, chunk_maximum, chunk_sum, raw_maximum,
            raw_sum, None, temperature, seeds, positions, draft_ids, parents, row_results,
            row_logprobs, row_raw_logprobs, request_arrivals, token_ids, lengths, status, path,
            logprobs, raw_logprobs, token_stride, vocabulary, drafted, max_draft, WIDTH, CONTIGUOUS,
            ALLOWED, GREEDY, False, TREE, LOGPROBS, RAW_LOGPROBS, BLOCK, SLOTS, WAIT,
        )  # fmt: skip


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def finish_kernel(
    logits,
    allowed,
    draft_ids,
    parents,
    offsets,
    temperature,
    seeds,
    positions,
    chunk_maximum,
    chunk_sum,
    raw_maximum,
    raw_sum,
    lowest,
    row_results,
    row_logprobs,
    row_raw_logprobs,
    request_arrivals,
    token_ids,
    lengths,
    status,
    path,
    logprobs,
    raw_logprobs,
    row_stride,
    token_stride,
    allowed_stride,
    vocabulary,
    rows,
    requests,
    drafted,
    max_draft,
    WIDTH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALLOWED: tl.constexpr,
    TREE: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Draws each row from its filtered statistics, and finishes the requests."""
    row = tl.program_id(0)
    request, first, size, used = locate(row, offsets, requests, rows, max_draft, REQUESTS)
    if not used:
        return
    statistics = row.to(tl.int64) * tl.cdiv(vocabulary, CHUNK)
    if ALLOWED:
        allowed += row.to(tl.int64) * allowed_stride
    if RAW_LOGPROBS:
        raw_maximum += statistics
        raw_sum += statistics
    _finish_row(
        row, request, first, size, logits + row.to(tl.int64) * row_stride, allowed,
        chunk_maximum + statistics, chunk_sum + statistics, raw_maximum, raw_sum, lowest,
        temperature, seeds, positions, draft_ids, parents, row_results, row_logprobs,
        row_raw_logprobs, request_arrivals, token_ids, lengths, status, path, logprobs,
        raw_logprobs, token_stride, vocabulary, drafted, max_draft, WIDTH, CONTIGUOUS, ALLOWED,
        False, True, TREE, LOGPROBS, RAW_LOGPROBS, BLOCK, SLOTS, WAIT,
    )  # fmt: skip


def verify_sampled(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    parents: Tensor | None = None,
    temperature: Tensor | None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    allowed: Tensor | None = None,
    logprobs: bool = False,
    raw_logprobs: bool = False,
    max_draft: int,
    workspace: Workspace | None = None,
) -> Emitted:
    """The reference's `verify_sampled`, of logits of 16 or 32 bits.

    One launch without filters, three with one; the logits are read once, and a chunk of each row
    again. No temperature, seeds and positions where all requests are greedy. The results are the
    workspace's buffers, if there is one.
    """
    rows, vocabulary = logits.shape
    requests = len(offsets) - 1
    scratch = Scratch(workspace, logits.device, Size(rows, requests, vocabulary, max_draft))
    emitted = Emitted(
        scratch.take("token_ids"),
        scratch.take("lengths"),
        scratch.take("status"),
        None if parents is None else scratch.take("path"),
        scratch.take("logprobs") if logprobs else None,
        scratch.take("raw_logprobs") if raw_logprobs else None,
    )
    finish = {
        **emitted._asdict(),
        "draft_ids": draft_ids,
        "parents": parents,
        "seeds": seeds,
        "positions": positions,
        "row_results": scratch.take("row_results"),
        "row_logprobs": scratch.take("row_logprobs") if logprobs else None,
        "row_raw_logprobs": scratch.take("row_raw_logprobs") if raw_logprobs else None,
        "request_arrivals": scratch.take("request_arrivals"),
        "drafted": len(draft_ids),
        "TREE": parents is not None,
        "LOGPROBS": logprobs,
        "BLOCK": config.chunks_block(vocabulary),
        "SLOTS": config.SLOTS,
        "WAIT": config.wait_for_stores(),
    }
    statistics = row_operands(
        logits, offsets, temperature, allowed, raw_logprobs, max_draft, scratch
    )
    if temperature is None or (top_k is None and top_p is None and min_p is None):
        programs, tiles = config.split_chunks(rows, vocabulary)
        with torch.cuda.device_of(logits):
            sampled_kernel[(rows * programs,)](
                **{**statistics, **finish, "WIDTH": config.unit(logits)},
                row_arrivals=scratch.take("row_arrivals"),
                programs=programs,
                tiles=tiles,
                CHUNKS=config.TILE_CHUNKS,
                GREEDY=temperature is None,
                num_warps=config.WARPS,
            )
        return emitted

    row_statistics(
        logits,
        offsets,
        temperature=temperature,
        allowed=allowed,
        raw_logprobs=raw_logprobs,
        max_draft=max_draft,
        scratch=scratch,
    )
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
    with torch.cuda.device_of(logits):
        finish_kernel[(rows,)](
            **statistics, **finish, lowest=scratch.take("lowest"), num_warps=config.WARPS
        )
    return emitted
