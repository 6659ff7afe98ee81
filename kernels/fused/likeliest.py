"""The likeliest tokens of each row, from its row statistics: one program a row.

The n likeliest tokens lie in the n chunks of the largest maxima, so only these are read again.
"""

from __future__ import annotations

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
    pack,
    units_of,
    unpack,
    value_of,
    values_of,
)
from fastdraft.kernels.fused.statistics import LOG2_E, divisor_of, statistics_of, totals
from fastdraft.kernels.operands import Batch, Likeliest, Sampling
from fastdraft.kernels.workspace import LIKELIEST, Scratch, take

# Tokens and probabilities have so many columns.
COLUMNS = tl.constexpr(LIKELIEST)


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def likeliest_kernel(
    logits,
    scratch,
    token_ids,
    probabilities,
    draft_ids,
    parents,
    offsets,
    allowed,
    allowed_stride,
    temperature,
    rows,
    requests,
    drafted,
    max_draft,
    count,
    GREEDY: tl.constexpr,
    C,
):
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    row = tl.program_id(0)
    token_ids += row.to(tl.int64) * COLUMNS
    probabilities += row.to(tl.int64) * COLUMNS
    place, used = locate(row, drafts, C.REQUESTS)
    if not used:
        column = tl.arange(0, COLUMNS)
        tl.store(token_ids + column, tl.full((COLUMNS,), -1, tl.int32), mask=column < count)
        tl.store(probabilities + column, tl.zeros((COLUMNS,), tl.float32), mask=column < count)
        return
    allowed += row.to(tl.int64) * allowed_stride
    heat = (place.first * 0).to(tl.float32)
    if not GREEDY:
        heat = tl.load(temperature + place.request)
    divisor = divisor_of(heat)
    left = statistics_of(place, logits, scratch)
    keys, key, weights = totals(left, LOG2_E / divisor, logits, C.BLOCK)
    total = tl.sum(weights)
    maximum = value_of(key)
    has_softmax = (key < INFINITE_KEY) & (key > EMPTY_KEY)

    values = values_of(logits, row)
    index = tl.arange(0, C.BLOCK)
    # Of each chunk the key of the largest logit that is not taken yet.
    best = pack(keys, index)
    taken = (place.first * 0).to(tl.int64) + 0x7FFFFFFFFFFFFFFF
    for column in range(count):
        _, chunk = unpack(tl.max(best))
        x = load_allowed(logits, values, allowed, units_of(chunk, logits), C.ALLOWED)
        token = tl.reshape(chunk * CHUNK + tl.arange(0, CHUNK), x.shape)
        packed = pack(ordered_key(x), token)
        packed = tl.where((token < logits.vocabulary) & (packed < taken), packed, 0)
        taken = tl.max(tl.max(packed, 1), 0)
        after = tl.max(tl.max(tl.where(packed < taken, packed, 0), 1), 0)
        key, chosen = unpack(taken)
        can_come = has_softmax & (key > EMPTY_KEY)
        chance = tl.exp((value_of(key) - maximum) / divisor) / total
        tl.store(token_ids + column, tl.where(can_come, chosen, -1))
        tl.store(probabilities + column, tl.where(can_come, chance, 0.0))
        key, _ = unpack(after)
        best = tl.where(index == chunk, pack(key, index), best)


def launch(batch: Batch, sampling: Sampling | None, scratch: Scratch) -> Likeliest | None:
    """The reference's `likeliest_of` of the batch's rows, if the batch asks for it.

    scratch: with the row statistics, before filters. One launch.
    """
    if not batch.likeliest:
        return None
    found = Likeliest(take(batch, "likeliest_ids"), take(batch, "likeliest_probabilities"))
    with torch.cuda.device_of(batch.logits):
        likeliest_kernel[(len(batch.logits),)](
            Rows.of(batch.logits),
            scratch,
            *found,
            **drafts_of(batch),
            **mask_of(batch),
            temperature=batch.offsets if sampling is None else sampling.warpers.temperature,
            count=batch.likeliest,
            GREEDY=sampling is None,
            C=Config.of(batch),
            num_warps=config.WARPS,
        )
    return Likeliest(*(each[:, : batch.likeliest] for each in found))
