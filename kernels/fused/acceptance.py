"""What the target's tokens make of a draft, by the program that finishes a request.

`fastdraft.kernels.reference.acceptance` defines it. `row_results` holds for each row the packed
`ordered_key` of its largest logit and the target's token; it is read, and zero again afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastdraft.kernels import operands
from fastdraft.kernels.fused.rows import EMPTY_KEY, NAN_KEY, drafted_at, parent_slot, unpack

NAN = tl.constexpr(int(operands.Status.NAN))
EMPTY = tl.constexpr(int(operands.Status.EMPTY))


@triton.jit
def accept(place, drafts, scratch, output, SLOTS: tl.constexpr):
    """Writes what a request emits; place: that of any of its rows. With a path it is a tree."""
    if output.tree_path is not None:
        length, nan, stopped = _walk(place, drafts, scratch, output, SLOTS)
    else:
        length, nan, stopped = _compare(place, drafts, scratch, output, SLOTS)
    tl.store(output.lengths + place.request, length)
    tl.store(output.status + place.request, nan * NAN + stopped * EMPTY)


@triton.jit
def emitted_of(request, drafts):
    """Where what a request emits begins."""
    return request.to(tl.int64) * (drafts.max_draft + 1)


@triton.jit
def _take_results(place, scratch, slot):
    """The packed results of the slots, which are zero from now on."""
    results = scratch.row_results + place.first + slot
    packed = tl.load(results, mask=slot <= place.size, other=0, cache_modifier=".cg")
    tl.debug_barrier()  # No thread writes what another has yet to read.
    tl.store(results, tl.zeros_like(packed), mask=slot <= place.size)
    return packed


@triton.jit
def _compare(place, drafts, scratch, output, SLOTS: tl.constexpr):
    """A chain: the slots up to the first whose row does not give the draft's next token."""
    size, max_draft = place.size, drafts.max_draft
    emitted = emitted_of(place.request, drafts)
    last = size
    nan = 0
    stopped = 0
    for block in range(0, max_draft + 1, SLOTS):
        slot = block + tl.arange(0, SLOTS)
        packed = _take_results(place, scratch, slot)
        key, token = unpack(packed)
        at = drafted_at(place, slot + 1)
        follows = (slot < size) & (at >= 0) & (at < drafts.drafted)
        expected = tl.load(drafts.draft_ids + at, mask=follows, other=-1)
        empty = key <= EMPTY_KEY
        refused = (slot <= size) & ((expected != token) | empty)
        last = tl.minimum(last, tl.min(tl.where(refused, slot, size)))
        kept = (slot < last) | ((slot == last) & ~empty)
        nan = tl.maximum(nan, tl.max(((slot <= last) & (key == NAN_KEY)).to(tl.int32)))
        stopped = tl.maximum(stopped, tl.max(((slot == last) & empty).to(tl.int32)))
        inside = slot <= max_draft
        tl.store(output.token_ids + emitted + slot, tl.where(kept, token, -1), mask=inside)
        if output.logprobs is not None:
            value = _load_shared(scratch.row_logprobs + place.first + slot, kept)
            tl.store(output.logprobs + emitted + slot, value, mask=inside)
        if output.raw_logprobs is not None:
            value = _load_shared(scratch.row_raw_logprobs + place.first + slot, kept)
            tl.store(output.raw_logprobs + emitted + slot, value, mask=inside)
    return last + 1 - stopped, nan, stopped


@triton.jit
def _walk(place, drafts, scratch, output, SLOTS: tl.constexpr):
    """A tree: from the text's last token to the child that is the target's token, and on from it.

    A child stands behind its parent, so the slots are looked through once, in blocks.
    """
    size, max_draft = place.size, drafts.max_draft
    emitted = emitted_of(place.request, drafts)
    token_ids = output.token_ids + emitted
    path = output.tree_path + (emitted - place.request)
    current = 0
    depth = 0
    # The result of the row that the walk has come to.
    result = (place.first * 0).to(tl.int64)
    nan = 0
    for block in range(0, size + 1, SLOTS):
        slot = block + tl.arange(0, SLOTS)
        packed = _take_results(place, scratch, slot)
        if block == 0:
            result = tl.max(tl.where(slot == 0, packed, 0))
        at = drafted_at(place, slot)
        is_draft = (slot > 0) & (slot <= size) & (at >= 0) & (at < drafts.drafted)
        guess = tl.load(drafts.draft_ids + at, mask=is_draft, other=-1)
        parent = tl.where(is_draft, parent_slot(place, slot, drafts), -1)
        child = _child(slot, parent, guess, current, result, size)
        while child <= size:
            key, token = unpack(result)
            nan = tl.maximum(nan, (key == NAN_KEY).to(tl.int32))
            tl.store(token_ids + depth, token)
            tl.store(path + depth, child - 1)
            _store_logprobs(place.first + current, emitted + depth, scratch, output)
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
        _store_logprobs(place.first + current, emitted + depth, scratch, output)
    for block in range(0, max_draft + 1, SLOTS):
        step = block + tl.arange(0, SLOTS)
        after = (step >= length) & (step <= max_draft)
        tl.store(token_ids + step, tl.full((SLOTS,), -1, tl.int32), mask=after)
        unused = (step >= depth) & (step < max_draft)
        tl.store(path + step, tl.full((SLOTS,), -1, tl.int32), mask=unused)
        nothing = tl.full((SLOTS,), float("nan"), tl.float32)
        if output.logprobs is not None:
            tl.store(output.logprobs + emitted + step, nothing, mask=after)
        if output.raw_logprobs is not None:
            tl.store(output.raw_logprobs + emitted + step, nothing, mask=after)
    return length, nan, stopped


@triton.jit
def _child(slot, parent, guess, current, result, size):
    """The first of the slots that is a child of `current` with the row's token; else size + 1."""
    key, token = unpack(result)
    chosen = (parent == current) & (guess == token) & (key > EMPTY_KEY)
    return tl.min(tl.where(chosen, slot, size + 1))


@triton.jit
def _store_logprobs(row, place, scratch, output):
    """Writes the log-probabilities of a row's token to a place of what is emitted."""
    if output.logprobs is not None:
        tl.store(output.logprobs + place, _load_shared(scratch.row_logprobs + row, True))
    if output.raw_logprobs is not None:
        tl.store(output.raw_logprobs + place, _load_shared(scratch.row_raw_logprobs + row, True))


@triton.jit
def _load_shared(place, kept):
    """What another program may have left; NaN where it is not kept."""
    return tl.load(place, mask=kept, other=float("nan"), cache_modifier=".cg")
