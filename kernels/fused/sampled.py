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

from fastdraft.kernels.fused import config, likeliest, threshold
from fastdraft.kernels.fused.acceptance import accept
from fastdraft.kernels.fused.arguments import (
    ANY_ALIGNMENT,
    PER_BATCH,
    Config,
    Drafts,
    Draws,
    Rows,
    drafts_of,
    mask_of,
)
from fastdraft.kernels.fused.noise import CHUNK_STREAM, TOKEN_STREAM, exponential_noise
from fastdraft.kernels.fused.rows import (
    CHUNK,
    EMPTY_KEY,
    INFINITE_KEY,
    depth_of,
    last_to_arrive,
    load_allowed,
    locate,
    ordered_key,
    pack,
    passes,
    units_of,
    unpack,
    value_of,
    values_of,
)
from fastdraft.kernels.fused.statistics import (
    LOG2_E,
    OUT,
    divisor_of,
    leave_logits,
    log_raw,
    row_statistics,
    statistics_of,
    totals,
)
from fastdraft.kernels.operands import Batch, Sampling, Verified
from fastdraft.kernels.workspace import Scratch, take_output

# The contract's bound below which a weight is 0.
NEGLIGIBLE = tl.constexpr(2.0**-125)


@triton.jit
def draw(place, logits, allowed, scratch, temperature, seed, position, chunk_stream, token_stream,
         GREEDY: tl.constexpr, ALLOWED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One token of a row, as the random contract has it: (its key, token, log-probability).

    The key is that of the row's maximum. allowed: where the row's mask begins. temperature: 0 for
    the argmax. The streams are those of the noise.
    """
    divisor = divisor_of(temperature)
    left = statistics_of(place, logits, scratch)
    keys, key, weights = totals(left, LOG2_E / divisor, logits, BLOCK)
    # Where the maximum is no number or infinite there is no softmax.
    by_argmax = (temperature == 0) | (key >= INFINITE_KEY) | (key <= EMPTY_KEY)
    index = tl.arange(0, BLOCK)
    score = keys
    if not GREEDY:
        ratio = weights / exponential_noise(seed, position, index, chunk_stream)
        ratio = tl.where(keys == OUT, OUT, ratio.to(tl.int32, bitcast=True))
        score = tl.where(by_argmax, keys, ratio)
    _, chunk = unpack(tl.max(pack(score, index)))

    values = values_of(logits, place.row)
    x = load_allowed(logits, values, allowed, units_of(chunk, logits), ALLOWED)
    token = tl.reshape(chunk * CHUNK + tl.arange(0, CHUNK), x.shape)
    score = ordered_key(x)
    maximum = value_of(key)
    if not GREEDY:
        weight = tl.exp((x - maximum) / divisor)
        kept = weight > NEGLIGIBLE
        if scratch.lowest is not None:
            lowest = tl.load(scratch.lowest + place.row)
            kept = kept & passes(x, token, lowest, tl.load(scratch.last_tied + place.row))
        weight = tl.where(kept, weight, 0.0)
        ratio = weight / exponential_noise(seed, position, token, token_stream)
        score = tl.where(by_argmax, score, ratio.to(tl.int32, bitcast=True))
    score = tl.where(token < logits.vocabulary, score, OUT)
    _, chosen = unpack(tl.max(tl.max(pack(score, token), 1), 0))
    value = tl.sum(tl.sum(tl.where(token == chosen, x, 0.0), 1), 0)
    return key, chosen, (value - maximum) / divisor - tl.log(tl.sum(weights))


@triton.jit
def _finish_row(place, logits, allowed, drafts, draws, scratch, output, GREEDY: tl.constexpr,
                C):  # fmt: skip
    """Draws a row's token and, for the request's last row, writes what the request emits."""
    request = place.request
    heat = (place.first * 0).to(tl.float32)
    seed = place.first.to(tl.int64)
    position = seed
    if not GREEDY:
        heat = tl.load(draws.temperature + request)
        seed = tl.load(draws.seeds + request)
        position = tl.load(draws.positions + request) + depth_of(place, drafts, C.TREE)
    key, token, logprob = draw(
        place, logits, allowed, scratch, heat, seed, position, CHUNK_STREAM, TOKEN_STREAM,
        GREEDY, C.ALLOWED, C.BLOCK,
    )  # fmt: skip
    tl.store(scratch.row_results + place.row, pack(key, token))
    if output.logprobs is not None:
        tl.store(scratch.row_logprobs + place.row, logprob)
    if output.raw_logprobs is not None:
        raw = log_raw(place, logits, token, scratch, C.BLOCK)
        tl.store(scratch.row_raw_logprobs + place.row, raw)
    if last_to_arrive(scratch.request_arrivals + request, place.size + 1, C.WAIT):
        accept(place, drafts, scratch, output, C.SLOTS)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def sampled_kernel(
    logits,
    scratch,
    output,
    draft_ids,
    parents,
    offsets,
    allowed,
    allowed_stride,
    temperature,
    seeds,
    positions,
    rows,
    requests,
    drafted,
    max_draft,
    programs,
    tiles,
    GREEDY: tl.constexpr,
    C,
):
    """Row statistics, and from them all that is emitted."""
    program = tl.program_id(0)
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    draws = Draws(temperature, seeds, positions)
    place, used = locate(program // programs, drafts, C.REQUESTS)
    if not used:
        return
    allowed += place.row.to(tl.int64) * allowed_stride
    heat = (place.first * 0).to(tl.float32)
    if not GREEDY:
        heat = tl.load(temperature + place.request)
    leave_logits(
        place, logits, allowed, heat, program % programs, tiles, scratch, C.CHUNKS, C.ALLOWED
    )
    if last_to_arrive(scratch.row_arrivals + place.row, programs, C.WAIT):
        _finish_row(place, logits, allowed, drafts, draws, scratch, output, GREEDY, C)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def finish_kernel(
    logits,
    scratch,
    output,
    draft_ids,
    parents,
    offsets,
    allowed,
    allowed_stride,
    temperature,
    seeds,
    positions,
    rows,
    requests,
    drafted,
    max_draft,
    C,
):
    """Draws each row from its filtered statistics, and finishes the requests."""
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    draws = Draws(temperature, seeds, positions)
    place, used = locate(tl.program_id(0), drafts, C.REQUESTS)
    if not used:
        return
    allowed += place.row.to(tl.int64) * allowed_stride
    _finish_row(place, logits, allowed, drafts, draws, scratch, output, False, C)


def verify_sampled(batch: Batch, sampling: Sampling) -> Verified:
    """The reference's `verify_sampled`, of logits of 16 or 32 bits.

    One launch without filters, three with one, and one more for the likeliest tokens; the logits
    are read once, and a chunk of each row again. The results are the workspace's buffers, if there
    is one.
    """
    if not sampling.warpers.has_filters:
        return verify_in_one_launch(batch, sampling)
    output = take_output(batch)
    scratch = Scratch.take(
        batch, *threshold.BUFFERS, "chunk_maximum", "chunk_sum", "row_results", "request_arrivals"
    )
    row_statistics(batch, sampling.warpers.temperature, scratch)
    found = likeliest.launch(batch, sampling, scratch)
    threshold.launch(batch, sampling.warpers, scratch)
    with torch.cuda.device_of(batch.logits):
        finish_kernel[(len(batch.logits),)](
            Rows.of(batch.logits),
            scratch,
            output,
            **drafts_of(batch),
            **mask_of(batch),
            temperature=sampling.warpers.temperature,
            seeds=sampling.seeds,
            positions=sampling.positions,
            C=Config.of(batch),
            num_warps=config.WARPS,
        )
    return output._replace(likeliest=found)


def verify_in_one_launch(batch: Batch, sampling: Sampling | None) -> Verified:
    """Verification without filters; the argmax of all rows without sampling.

    One launch more for the likeliest tokens, if the batch asks for them.
    """
    logits, output = batch.logits, take_output(batch)
    scratch = Scratch.take(
        batch, "chunk_maximum", "chunk_sum", "row_results", "row_arrivals", "request_arrivals"
    )
    programs, tiles = config.split_chunks(*logits.shape)
    with torch.cuda.device_of(logits):
        sampled_kernel[(len(logits) * programs,)](
            Rows.of(logits, config.unit(logits)),
            scratch,
            output,
            **drafts_of(batch),
            **mask_of(batch),
            temperature=batch.offsets if sampling is None else sampling.warpers.temperature,
            seeds=batch.offsets if sampling is None else sampling.seeds,
            positions=batch.offsets if sampling is None else sampling.positions,
            programs=programs,
            tiles=tiles,
            GREEDY=sampling is None,
            C=Config.of(batch),
            num_warps=config.WARPS,
        )
    return output._replace(likeliest=likeliest.launch(batch, sampling, scratch))
