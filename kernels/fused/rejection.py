"""Rejection sampling in two launches, or four where a request has filters.

The first launch goes over the logits and the draft's distribution together and leaves the
statistics of both, as sampled verification does for the logits; probabilities need none. The
program that leaves a row's last ones compares p and q of the row's draft token, and the one that
does so for a request's last row finds out which numbers of tokens may be kept. With filters,
`threshold` comes first, and a launch over the rows compares. The last launch is over the requests:
each of its programs leaves the residual's sums in some chunks of the rows after these numbers of
tokens, on average little more than one row. The last one to do so decides how many tokens are kept,
draws from that row's residual as rows are drawn from their statistics, or after the whole draft the
bonus token, and writes what the request emits.

`fastdraft.kernels.reference.rejection` has the formulas. q is multiplied by the sum of the target's
weights there too, so no probability is made of a weight.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from fastdraft.kernels.fused import config, threshold
from fastdraft.kernels.fused.acceptance import EMPTY, NAN, emitted_of
from fastdraft.kernels.fused.arguments import (
    ANY_ALIGNMENT,
    PER_BATCH,
    Config,
    Drafts,
    Draws,
    Place,
    Rows,
    Statistics,
    drafts_of,
    mask_of,
)
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
    load_allowed,
    load_units,
    locate,
    ordered_key,
    pack,
    passes,
    tokens_of,
    units_of,
    unpack,
    value_of,
    values_of,
)
from fastdraft.kernels.fused.sampled import NEGLIGIBLE, draw
from fastdraft.kernels.fused.statistics import (
    LOG2_E,
    OUT,
    divisor_of,
    leave_logits,
    leave_part,
    log_raw,
    row_chunks,
    scale_of,
    statistics_of,
    tile_units,
    totals,
)
from fastdraft.kernels.operands import Batch, DraftDistribution, Sampling, Verified
from fastdraft.kernels.workspace import Scratch, take_output

# Two rows in the registers at a time, and much besides, want twice the threads.
_LAST_WARPS: Final = 2 * config.WARPS
# In place of log k: a number of tokens that is not kept, and the whole draft, which is.
_REFUSED = tl.constexpr(1.0)
_WHOLE = tl.constexpr(2.0)


@triton.jit
def _is_allowed(allowed, token, ALLOWED: tl.constexpr):
    """Whether a row's mask allows one token, a scalar."""
    if ALLOWED:
        return ((tl.load(allowed + token // 32) >> (token % 32)) & 1) != 0
    return token == token


@triton.jit
def _first_of(keys, key, place, logits, allowed, C):
    """The first token whose logit has the row's key; keys: those of the chunks' maxima."""
    chunk = tl.min(tl.where(keys == key, tl.arange(0, C.BLOCK), C.BLOCK - 1))
    values = values_of(logits, place.row)
    x = load_allowed(logits, values, allowed, units_of(chunk, logits), C.ALLOWED)
    token = tl.reshape(chunk * CHUNK + tl.arange(0, CHUNK), x.shape)
    return tl.min(tl.min(tl.where(ordered_key(x) == key, token, logits.vocabulary), 1), 0)


@triton.jit
def _draft_totals(place, draft, scratch, BLOCK: tl.constexpr):
    """The key of the largest draft logit for a row, and the chunks' sums relative to it."""
    chunks = row_chunks(place.row, draft)
    left = Statistics(scratch.draft_maximum + chunks, scratch.draft_sum + chunks)
    _, key, weights = totals(left, LOG2_E, draft, BLOCK)
    return key, weights


@triton.jit
def _log_q(place, draft, at, token, scratch, BLOCK: tl.constexpr):
    """The logarithm of a token's probability under the draft's distribution; NaN where it has none.

    at: the draft token that the distribution is of.
    """
    q = tl.load(values_of(draft, at) + token.to(tl.int64) * draft.token_stride).to(tl.float32)
    if scratch.draft_sum is not None:
        key, weights = _draft_totals(place, draft, scratch, BLOCK)
        above = q - value_of(key)
        never = tl.exp2(above * LOG2_E) <= NEGLIGIBLE
        log_q = tl.where(never, float("-inf"), above) - tl.log(tl.sum(weights))
    else:
        log_q = tl.where(q == 0, float("-inf"), tl.log(tl.where(q == 0, 1.0, q)))
    return log_q


@triton.jit
def _test(place, logits, allowed, draft, drafts, draws, scratch, C):
    """Leaves in `row_ratios` the logarithm of p / q of a row's draft token, NaN where the draft
    ends before it. allowed: the row's mask."""
    row, request = place.row, place.request
    at = row - request
    drafted = tl.load(drafts.draft_ids + at).to(tl.int64)
    known = (drafted >= 0) & (drafted < logits.vocabulary)
    token = tl.where(known, drafted, 0).to(tl.int32)
    heat = tl.load(draws.temperature + request)
    divisor = divisor_of(heat)
    left = statistics_of(place, logits, scratch)
    keys, key, weights = totals(left, LOG2_E / divisor, logits, C.BLOCK)

    x = tl.load(values_of(logits, row) + token.to(tl.int64) * logits.token_stride).to(tl.float32)
    x = tl.where(_is_allowed(allowed, token, C.ALLOWED), x, float("-inf"))
    above = (x - value_of(key)) / divisor
    never = tl.exp(above) <= NEGLIGIBLE
    if scratch.lowest is not None:
        lowest = tl.load(scratch.lowest + row)
        never = never | ~passes(x, token, lowest, tl.load(scratch.last_tied + row))
    log_p = tl.where(never, float("-inf"), above - tl.log(tl.sum(weights)))
    log_q = _log_q(place, draft, at, token, scratch, C.BLOCK)
    ratio = log_p - log_q
    drawn = known & (key > EMPTY_KEY)
    if heat == 0:
        ratio = tl.where(
            token == _first_of(keys, key, place, logits, allowed, C), 0.0, -float("inf")
        )
    else:
        drawn = drawn & (key < INFINITE_KEY) & (log_q > float("-inf"))
    tl.store(scratch.row_ratios + row, tl.where(drawn, ratio, float("nan")))
    tl.store(scratch.row_tests + row, pack(key, token))
    if scratch.row_logprobs is not None:
        tl.store(scratch.row_logprobs + row, log_p)
    if scratch.row_raw_logprobs is not None:
        tl.store(scratch.row_raw_logprobs + row, log_raw(place, logits, token, scratch, C.BLOCK))


@triton.jit
def _plan(place, draws, scratch, C):
    """Leaves in `row_log_k`, for each number of a request's draft tokens, log k if that number may
    be kept, else `_REFUSED`; `_WHOLE` at the draft's end. It is certain where it is 0 or `_WHOLE`.
    """
    first, size = place.first, place.size
    end = size
    for block in range(0, size, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        ratios = scratch.row_ratios + first + slot
        ratio = tl.load(ratios, mask=slot < size, other=0.0, cache_modifier=".cg")
        end = tl.minimum(end, tl.min(tl.where(ratio != ratio, slot, size)))

    seed = tl.load(draws.seeds + place.request)
    position = tl.load(draws.positions + place.request)
    # log k is how far the sum of the log ratios is below the largest one so far, from 0 up.
    before = (size * 0).to(tl.float32)
    highest = before
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        ratios = scratch.row_ratios + first + slot - 1
        drawn = (slot > 0) & (slot <= end)
        ratio = tl.load(ratios, mask=drawn, other=0.0, cache_modifier=".cg")
        sums = before + tl.cumsum(ratio)
        so_far = tl.where(slot[None, :] <= slot[:, None], sums[None, :], -float("inf"))
        log_k = sums - tl.maximum(tl.max(so_far, 1), highest)
        passed = exponential_noise(seed, position, slot, ACCEPT_STREAM) > -log_k
        passed = passed & (slot <= end)
        left = tl.where(passed, tl.where(slot == end, _WHOLE, log_k), _REFUSED)
        tl.store(scratch.row_log_k + first + slot, left, mask=slot <= size)
        before = tl.sum(tl.where(slot == block + C.SLOTS - 1, sums, 0.0))
        highest = tl.maximum(highest, tl.max(sums))


@triton.jit
def _test_and_plan(place, logits, allowed, draft, drafts, draws, scratch, C):
    """`_test` of a row with a draft token, and of a request's last one `_plan`."""
    at = place.row - place.request
    if (at >= 0) & (at < drafts.drafted):
        _test(place, logits, allowed, draft, drafts, draws, scratch, C)
    else:
        tl.store(scratch.row_ratios + place.row, float("nan"))
    if last_to_arrive(scratch.request_arrivals + place.request, place.size, C.WAIT):
        _plan(place, draws, scratch, C)


@triton.jit
def _planned(slot, first, size, scratch):
    """What `_plan` has left for the slots; a request without a draft is whole at once."""
    left = tl.load(scratch.row_log_k + first + slot, mask=slot <= size, other=_REFUSED)
    return tl.where(slot == size, tl.where(size == 0, _WHOLE, left), left)


@triton.jit
def _next(slot, log_k, after, size):
    """The first slot beyond `after` that may be kept; size + 1 for none."""
    return tl.min(tl.where((slot > after) & (log_k != _REFUSED), slot, size + 1))


@triton.jit
def _residual(x, q, token, maximum, scale, lowest, last_tied, draft_maximum, factor,
              FILTERS: tl.constexpr, DRAFT_LOGITS: tl.constexpr):  # fmt: skip
    """max(w - factor q, 0) of the logits x and the draft's distribution q, 0 where q is not a
    number.

    factor: the sum of w over k, of logits divided by the sum of the draft's weights.
    """
    weight = tl.exp2((x - maximum) * scale)
    weight = tl.where(weight > NEGLIGIBLE, weight, 0.0)
    if FILTERS:
        weight = tl.where(passes(x, token, lowest, last_tied), weight, 0.0)
    if DRAFT_LOGITS:
        q = tl.exp2((q - draft_maximum) * LOG2_E)
        q = tl.where(q <= NEGLIGIBLE, 0.0, q)
    else:
        q = tl.where(q < 0, 0.0, q)  # past the vocabulary it is -inf
    left = weight - q * factor
    return tl.where(left > 0, left, 0.0)


@triton.jit
def _against(place, log_k, scale, logits, draft, drafts, scratch, C):
    """A row that a number of draft tokens leads to, and the next one's distribution.

    Gives (whether that token was refused, its index, the key of the row's maximum, the sum of its
    weights, the factor that `_residual` takes, the largest of the draft's logits).
    """
    slot = place.row - place.first
    at = drafted_at(place, slot + 1)
    refused = (slot < place.size) & (log_k <= 0) & (at >= 0) & (at < drafts.drafted)
    at = tl.where(refused, at, 0).to(tl.int64)
    _, key, weights = totals(statistics_of(place, logits, scratch), scale, logits, C.BLOCK)
    total = tl.sum(weights)
    factor = total * tl.exp(-log_k)
    draft_top = total
    if scratch.draft_sum is not None:
        draft_key, draft_weights = _draft_totals(place, draft, scratch, C.BLOCK)
        draft_top = value_of(draft_key)
        factor = factor / tl.sum(draft_weights)
    return refused, at, key, total, factor, draft_top


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def rejection_statistics_kernel(
    logits,
    draft,
    scratch,
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
    C,
):
    """Row statistics of the logits and the draft's distribution, and without filters the plans."""
    program = tl.program_id(0)
    part = program % programs
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    place, used = locate(program // programs, drafts, C.REQUESTS)
    if not used:
        return
    row = place.row
    at = row - place.request
    has_draft = (row - place.first < place.size) & (at >= 0) & (at < drafted)
    allowed += row.to(tl.int64) * allowed_stride
    heat = tl.load(temperature + place.request)
    leave_logits(place, logits, allowed, heat, part, tiles, scratch, C.CHUNKS, C.ALLOWED)
    if scratch.draft_sum is not None:
        chunks = row_chunks(row, draft)
        left = Statistics(scratch.draft_maximum + chunks, scratch.draft_sum + chunks)
        if has_draft:
            leave_part(
                draft, values_of(draft, at), left.sum, part, tiles, LOG2_E, left, left, left.sum,
                C.CHUNKS, False, False, False,
            )  # fmt: skip
    if scratch.lowest is not None or row - place.first >= place.size:
        return
    if last_to_arrive(scratch.row_arrivals + row, programs, C.WAIT):
        draws = Draws(temperature, seeds, positions)
        _test_and_plan(place, logits, allowed, draft, drafts, draws, scratch, C)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def rejection_test_kernel(
    logits,
    draft,
    scratch,
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
    """The plans of the requests, from filtered statistics."""
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    place, used = locate(tl.program_id(0), drafts, C.REQUESTS)
    if not (used & (place.row - place.first < place.size)):
        return
    allowed += place.row.to(tl.int64) * allowed_stride
    draws = Draws(temperature, seeds, positions)
    _test_and_plan(place, logits, allowed, draft, drafts, draws, scratch, C)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def rejection_kernel(
    logits,
    draft,
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
    C,
):
    """What each request emits, from its plan."""
    FILTERS: tl.constexpr = scratch.lowest is not None
    DRAFT_LOGITS: tl.constexpr = scratch.draft_sum is not None
    program = tl.program_id(0)
    request = program // programs
    part = program % programs
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    # In range whatever the offsets hold.
    first = tl.minimum(tl.maximum(tl.load(offsets + request) + request, 0), rows - 1).to(tl.int32)
    end = tl.minimum(tl.load(offsets + request + 1) + request + 1, rows).to(tl.int32)
    size = tl.minimum(tl.maximum(end - first - 1, 0), max_draft)

    sure = size * 0
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        log_k = _planned(slot, first, size, scratch)
        certain = (log_k == 0) | (log_k == _WHOLE)
        sure = tl.maximum(sure, tl.max(tl.where(certain, slot, 0)))

    chunks = tl.cdiv(logits.vocabulary, CHUNK)
    heat = tl.load(temperature + request)
    scale = scale_of(heat)
    end_tile = tl.minimum((part + 1) * tiles, tl.cdiv(chunks, C.CHUNKS))
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        log_k = _planned(slot, first, size, scratch)
        kept = _next(slot, log_k, sure - 1, size)
        while kept <= size:
            place = Place(first + kept, request, first, size)
            own_log_k = tl.sum(tl.where(slot == kept, log_k, 0.0))
            refused, at, key, total, factor, draft_top = _against(
                place, own_log_k, scale, logits, draft, drafts, scratch, C
            )
            if refused & (heat != 0):
                bound = float("-inf")
                last_tied = 0
                if FILTERS:
                    bound = tl.load(scratch.lowest + place.row)
                    last_tied = tl.load(scratch.last_tied + place.row)
                values = values_of(logits, place.row)
                odds = values_of(draft, at)
                mask = allowed + place.row.to(tl.int64) * allowed_stride
                left_sum = scratch.residual_sum + row_chunks(place.row, logits)
                for tile in range(part * tiles, end_tile):
                    unit = tile_units(tile, logits, C.CHUNKS)
                    x = load_allowed(logits, values, mask, unit, C.ALLOWED)
                    q = load_units(draft, odds, unit, False)
                    left = _residual(
                        x, q, tokens_of(unit, logits), value_of(key), scale, bound, last_tied,
                        draft_top, factor, FILTERS, DRAFT_LOGITS,
                    )  # fmt: skip
                    chunk = tl.arange(0, C.CHUNKS) + tile * C.CHUNKS
                    left = tl.sum(tl.sum(tl.sum(left, 3), 0), 1)
                    tl.store(left_sum + chunk, left, mask=chunk < chunks)
            kept = _next(slot, log_k, kept, size)

    if not last_to_arrive(scratch.request_arrivals + request, programs, C.WAIT):
        return
    # Read again: in registers through the loop above they would leave too few for it.
    heat = tl.load(temperature + request)
    scale = scale_of(heat)
    seed = tl.load(seeds + request)
    index = tl.arange(0, C.BLOCK)
    last = sure
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        log_k = _planned(slot, first, size, scratch)
        noise = exponential_noise(seed, tl.load(positions + request), slot, ACCEPT_STREAM)
        kept = _next(slot, log_k, sure, size)
        while kept <= size:
            place = Place(first + kept, request, first, size)
            left_sum = scratch.residual_sum + row_chunks(place.row, logits)
            left = tl.load(left_sum + index, mask=index < chunks, other=0.0, cache_modifier=".cg")
            _, _, weights = totals(statistics_of(place, logits, scratch), scale, logits, C.BLOCK)
            below = tl.exp(-tl.sum(tl.where(slot == kept, log_k, 0.0))) - 1
            needed = tl.log(1 + tl.sum(weights) * below / tl.sum(left))
            if tl.sum(tl.where(slot == kept, noise, 0.0)) > needed:
                last = kept
            kept = _next(slot, log_k, kept, size)

    place = Place(first + last, request, first, size)
    row = place.row
    own_log_k = tl.sum(_planned(last + tl.zeros((1,), tl.int32), first, size, scratch))
    refused, at, key, total, factor, draft_top = _against(
        place, own_log_k, scale, logits, draft, drafts, scratch, C
    )
    maximum = value_of(key)
    bound = float("-inf")
    last_tied = 0
    if FILTERS:
        bound = tl.load(scratch.lowest + row)
        last_tied = tl.load(scratch.last_tied + row)
    values = values_of(logits, row)
    odds = values_of(draft, at)
    allowed += row.to(tl.int64) * allowed_stride
    left_sum = scratch.residual_sum + row_chunks(row, logits)
    chunk_stream = tl.where(refused, RESIDUAL_CHUNK_STREAM, CHUNK_STREAM)
    token_stream = tl.where(refused, RESIDUAL_TOKEN_STREAM, TOKEN_STREAM)
    position = tl.load(positions + request) + last
    left_chunks = tl.where(refused & (heat != 0), chunks, 0)
    left = tl.load(left_sum + index, mask=index < left_chunks, other=0.0, cache_modifier=".cg")
    if tl.max(left) > 0:
        ratio = left / exponential_noise(seed, position, index, RESIDUAL_CHUNK_STREAM)
        _best, chunk = unpack(tl.max(pack(ratio.to(tl.int32, bitcast=True), index)))
        unit = units_of(chunk, logits)
        x = load_allowed(logits, values, allowed, unit, C.ALLOWED)
        q = load_units(draft, odds, unit, False)
        token = tl.reshape(chunk * CHUNK + tl.arange(0, CHUNK), x.shape)
        left_of = _residual(
            x, q, token, maximum, scale, bound, last_tied, draft_top, factor, FILTERS, DRAFT_LOGITS
        )
        ratio = left_of / exponential_noise(seed, position, token, RESIDUAL_TOKEN_STREAM)
        score = tl.where(token < logits.vocabulary, ratio.to(tl.int32, bitcast=True), OUT)
        _best, found = unpack(tl.max(tl.max(pack(score, token), 1), 0))
        value = tl.sum(tl.sum(tl.where(token == found, x, 0.0), 1), 0)
        logprob = (value - maximum) * scale / LOG2_E - tl.log(total)
    else:
        _best, found, logprob = draw(
            place, logits, allowed, scratch, heat, seed, position, chunk_stream, token_stream,
            False, C.ALLOWED, C.BLOCK,
        )  # fmt: skip

    stopped = (key <= EMPTY_KEY).to(tl.int32)
    nan = (key == NAN_KEY).to(tl.int32)
    emitted = emitted_of(request, drafts)
    raw = 0.0
    if output.raw_logprobs is not None:
        raw = log_raw(place, logits, found, scratch, C.BLOCK)
    for block in range(0, max_draft + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        inside = slot <= max_draft
        taken = slot < last
        is_last = slot == last + stopped * (max_draft + 1)
        row_key, token = unpack(tl.load(scratch.row_tests + first + slot, mask=taken, other=0))
        nan = tl.maximum(nan, tl.max((taken & (row_key == NAN_KEY)).to(tl.int32)))
        token = tl.minimum(token, logits.vocabulary - 1)  # in range whatever the offsets hold
        token = tl.where(taken, token, tl.where(is_last, found, -1))
        tl.store(output.token_ids + emitted + slot, token, mask=inside)
        if output.logprobs is not None:
            value = tl.load(scratch.row_logprobs + first + slot, mask=taken, other=float("nan"))
            value = tl.where(is_last, logprob, value)
            tl.store(output.logprobs + emitted + slot, value, mask=inside)
        if output.raw_logprobs is not None:
            value = tl.load(scratch.row_raw_logprobs + first + slot, mask=taken, other=float("nan"))
            value = tl.where(is_last, raw, value)
            tl.store(output.raw_logprobs + emitted + slot, value, mask=inside)
    tl.store(output.lengths + request, last + 1 - stopped)
    tl.store(output.status + request, nan * NAN + stopped * EMPTY)


def verify_rejection(
    batch: Batch, sampling: Sampling, draft_distribution: DraftDistribution
) -> Verified:
    """The reference's `verify_rejection`, of logits of 16 or 32 bits.

    Two launches without filters, four with one. The logits and a draft's logits are read once, a
    draft's probabilities where the draft tokens are; for each request again the row of both that
    its last token comes from, and those after which it might have ended. The results are the
    workspace's buffers, if there is one.
    """
    logits, warpers = batch.logits, sampling.warpers
    output = take_output(batch)
    scratch = Scratch.take(
        batch,
        *(threshold.BUFFERS if warpers.has_filters else ()),
        *(("draft_maximum", "draft_sum") if draft_distribution.is_logits else ()),
        "chunk_maximum",
        "chunk_sum",
        "row_arrivals",
        "row_tests",
        "row_ratios",
        "row_log_k",
        "residual_sum",
        "request_arrivals",
    )
    operands = {
        "logits": Rows.of(logits),
        "draft": Rows.of(draft_distribution.values, config.width(logits.dtype)),
        "scratch": scratch,
        **drafts_of(batch),
        **mask_of(batch),
        "temperature": warpers.temperature,
        "seeds": sampling.seeds,
        "positions": sampling.positions,
        "C": Config.of(batch),
    }
    with torch.cuda.device_of(logits):
        programs, tiles = config.split_chunks(*logits.shape)
        rejection_statistics_kernel[(len(logits) * programs,)](
            **operands, programs=programs, tiles=tiles, num_warps=config.WARPS
        )
        if warpers.has_filters:
            threshold.launch(batch, warpers, scratch)
            rejection_test_kernel[(len(logits),)](**operands, num_warps=config.WARPS)
        programs, tiles = config.split_chunks(batch.requests, logits.shape[1])
        rejection_kernel[(batch.requests * programs,)](
            **operands, output=output, programs=programs, tiles=tiles, num_warps=_LAST_WARPS
        )
    return output
