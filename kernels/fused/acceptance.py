"""What the target's tokens make of a draft, by the program that finishes a request.

`fastdraft.kernels.reference.acceptance` defines it. `row_results` holds for each row the packed
`ordered_key` of its largest logit and the target's token; it is read, and zero again afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fastdraft.kernels import reference
from fastdraft.kernels.fused.rows import EMPTY_KEY, NAN_KEY, drafted_at, parent_slot, unpack

_NAN = tl.constexpr(int(reference.Status.NAN))
_EMPTY = tl.constexpr(int(reference.Status.EMPTY))


@triton.jit
def accept(
    request,
    first,
    size,
    row_results,
    row_logprobs,
    row_raw_logprobs,
    draft_ids,
    drafted,
    parents,
    token_ids,
    lengths,
    status,
    path,
    logprobs,
    raw_logprobs,
    max_draft,
    SLOTS: tl.constexpr,
    TREE: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
):
    """Writes what a request emits. request, first and size are those of `locate`.

    token_ids, lengths, status, path: int32, as the reference gives them, path for trees;
    logprobs, raw_logprobs: float32 like token_ids, of the values that the rows hold; each only
    where its flag is set. All are contiguous.
    """
    emitted = request.to(tl.int64) * (max_draft + 1)
    token_ids += emitted
    if LOGPROBS:
        logprobs += emitted
    if RAW_LOGPROBS:
        raw_logprobs += emitted
    if TREE:
        length, nan, stopped = _walk(
            request,
            first,
            size,
            row_results,
            row_logprobs,
            row_raw_logprobs,
            draft_ids,
            drafted,
            parents,
            token_ids,
            path + request.to(tl.int64) * max_draft,
            logprobs,
            raw_logprobs,
            max_draft,
            SLOTS,
            LOGPROBS,
            RAW_LOGPROBS,
        )
    else:
        length, nan, stopped = _compare(
            request,
            first,
            size,
            row_results,
            row_logprobs,
            row_raw_logprobs,
            draft_ids,
            drafted,
            token_ids,
            logprobs,
            raw_logprobs,
            max_draft,
            SLOTS,
            LOGPROBS,
            RAW_LOGPROBS,
        )
    tl.store(lengths + request, length)
    tl.store(status + request, nan * _NAN + stopped * _EMPTY)


@triton.jit
def _take_results(row_results, slot, size):
    """The packed results of the slots, which are zero from now on."""
    place = row_results + slot
    packed = tl.load(place, mask=slot <= size, other=0, cache_modifier=".cg")
    tl.debug_barrier()  # No thread writes what another has yet to read.
    tl.store(place, tl.zeros_like(packed), mask=slot <= size)
    return packed


@triton.jit
def _compare(
    request,
    first,
    size,
    row_results,
    row_logprobs,
    row_raw_logprobs,
    draft_ids,
    drafted,
    token_ids,
    logprobs,
    raw_logprobs,
    max_draft,
    SLOTS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
):
    """A chain: the slots up to the first whose row does not give the draft's next token."""
    last = size
    nan = 0
    stopped = 0
    for block in range(0, max_draft + 1, SLOTS):
        slot = block + tl.arange(0, SLOTS)
        packed = _take_results(row_results + first, slot, size)
        key, token = unpack(packed)
        at = drafted_at(first, request, slot + 1)
        follows = (slot < size) & (at >= 0) & (at < drafted)
        expected = tl.load(draft_ids + at, mask=follows, other=-1)
        empty = key <= EMPTY_KEY
        refused = (slot <= size) & ((expected != token) | empty)
        last = tl.minimum(last, tl.min(tl.where(refused, slot, size)))
        kept = (slot < last) | ((slot == last) & ~empty)
        nan = tl.maximum(nan, tl.max(((slot <= last) & (key == NAN_KEY)).to(tl.int32)))
        stopped = tl.maximum(stopped, tl.max(((slot == last) & empty).to(tl.int32)))
        tl.store(token_ids + slot, tl.where(kept, token, -1), mask=slot <= max_draft)
        if LOGPROBS:
            value = tl.load(
                row_logprobs + first + slot, mask=kept, other=float("nan"), cache_modifier=".cg"
            )
            tl.store(logprobs + slot, value, mask=slot <= max_draft)
        if RAW_LOGPROBS:
            value = tl.load(
                row_raw_logprobs + first + slot, mask=kept, other=float("nan"), cache_modifier=".cg"
            )
            tl.store(raw_logprobs + slot, value, mask=slot <= max_draft)
    return last + 1 - stopped, nan, stopped


@triton.jit
def _walk(
    request,
    first,
    size,
    row_results,
    row_logprobs,
    row_raw_logprobs,
    draft_ids,
    drafted,
    parents,
    token_ids,
    path,
    logprobs,
    raw_logprobs,
    max_draft,
    SLOTS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    RAW_LOGPROBS: tl.constexpr,
):
    """A tree: from the text's last token to the child that is the target's token, and on from it.

    A child stands behind its parent, so the slots are looked through once, in blocks.
    """
    current = 0
    depth = 0
    # The result of the row that the walk has come to.
    result = (first * 0).to(tl.int64)
    nan = 0
    for block in range(0, size + 1, SLOTS):
        slot = block + tl.arange(0, SLOTS)
        packed = _take_results(row_results + first, slot, size)
        if block == 0:
            result = tl.max(tl.where(slot == 0, packed, 0))
        at = drafted_at(first, request, slot)
        is_draft = (slot > 0) & (slot <= size) & (at >= 0) & (at < drafted)
        guess = tl.load(draft_ids + at, mask=is_draft, other=-1)
        parent = tl.where(is_draft, parent_slot(parents, at, slot, drafted), -1)
        child = _child(slot, parent, guess, current, result, size)
        while child <= size:
            key, token = unpack(result)
            nan = tl.maximum(nan, (key == NAN_KEY).to(tl.int32))
            tl.store(token_ids + depth, token)
            tl.store(path + depth, child - 1)
            if LOGPROBS:
                tl.store(logprobs + depth, _load_shared(row_logprobs + first + current))
            if RAW_LOGPROBS:
                tl.store(raw_logprobs + depth, _load_shared(row_raw_logprobs + first + current))
            depth += 1
            current = child
            result = tl.max(tl.where(slot == current, packed, 0))
            child = _child(slot, parent, guess, current, result, size)

    key, token = unpack(result)
    nan = tl.maximum(nan, (key == NAN_KEY).to(tl.int32))
    stopped = (key <= EMPTY_KEY).to(tl.int32)
    length = depth + 1 - stopped
    if stopped == 0:
        tl.store(token_ids + depth, token)
        if LOGPROBS:
            tl.store(logprobs + depth, _load_shared(row_logprobs + first + current))
        if RAW_LOGPROBS:
            tl.store(raw_logprobs + depth, _load_shared(row_raw_logprobs + first + current))
    for block in range(0, max_draft + 1, SLOTS):
        step = block + tl.arange(0, SLOTS)
        after = (step >= length) & (step <= max_draft)
        tl.store(token_ids + step, tl.full((SLOTS,), -1, tl.int32), mask=after)
        unused = (step >= depth) & (step < max_draft)
        tl.store(path + step, tl.full((SLOTS,), -1, tl.int32), mask=unused)
        if LOGPROBS:
            tl.store(logprobs + step, tl.full((SLOTS,), float("nan"), tl.float32), mask=after)
        if RAW_LOGPROBS:
            tl.store(raw_logprobs + step, tl.full((SLOTS,), float("nan"), tl.float32), mask=after)
    return length, nan, stopped


@triton.jit
def _child(slot, parent, guess, current, result, size):
    """The first of the slots that is a child of `current` with the row's token; else size + 1."""
    key, token = unpack(result)
    chosen = (parent == current) & (guess == token) & (key > EMPTY_KEY)
    return tl.min(tl.where(chosen, slot, size + 1))


@triton.jit
def _load_shared(place):
    return tl.load(place, cache_modifier=".cg")
