"""Logits processors in one launch: a patch of the logits that they touch.

A row's entries are split among programs; each looks how often its tokens stand on the path to the
row, and whether a banned sequence ends with them. The first program of a row also patches what the
path has beyond the entries. Entries of a row are different tokens and the path's others are none
of them, so each logit has one writer, and none is read after it was written.

`fastdraft.kernels.reference.processors` has the order of operations; the same ones in float32,
each rounded by itself, give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdraft.kernels.fused import config
from fastdraft.kernels.fused.arguments import (
    ANY_ALIGNMENT,
    PER_BATCH,
    Config,
    Drafts,
    Place,
    Rows,
    drafts_of,
)
from fastdraft.kernels.fused.rows import drafted_at, locate, parent_slot, values_of
from fastdraft.kernels.fused.statistics import log_sums
from fastdraft.kernels.operands import Batch, Emitted, Processors, Touched
from fastdraft.kernels.workspace import take

# What a patch is not compiled anew for, besides the batch's: the sizes of the processors' tensors.
_SIZES = (*PER_BATCH, "capacity", "longest", "entries", "words", "word_tokens", "columns")


class Texts(NamedTuple):
    """The tensors of `Processors`, by their names there; those of bool as uint8."""

    token_ids: Any
    counts: Any
    in_prompt: Any
    bias: Any
    ends: Any
    words: Any
    offsets: Any
    sizes: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    min_left: Any
    tail: Any
    word_ids: Any
    word_offsets: Any

    @classmethod
    def of(cls, processors: Processors) -> Texts:
        tensors = (getattr(processors, name) for name in cls._fields)
        return cls(*(x.view(torch.uint8) if x.dtype == torch.bool else x for x in tensors))


class _Penalties(NamedTuple):
    """Those of one request. Made in kernels."""

    repetition: Any
    presence: Any
    frequency: Any


@triton.jit
def _path(block, slot, place, drafts, vocabulary, SLOTS: tl.constexpr, TREE: tl.constexpr):
    """The draft tokens from `block` on that lead to a slot, and how many lead to it in all.

    int32 (SLOTS,), -1 for others and out of range; a scalar.
    """
    index = block + tl.arange(0, SLOTS)
    depth = slot
    if TREE:
        depth = slot * 0
        on_path = index < 0
        node = slot
        while node > 0:
            on_path = on_path | (index == node - 1)
            depth += 1
            node = parent_slot(place, node, drafts)
    else:
        on_path = index < slot
    at = drafted_at(place, index + 1)
    known = on_path & (at >= 0) & (at < drafts.drafted)
    token = tl.load(drafts.draft_ids + at, mask=known, other=-1)
    return tl.where((token >= 0) & (token < vocabulary), token, -1).to(tl.int32), depth


@triton.jit
def _times(token, path):
    """How often each token stands on the path: (n,) and (slots,) to int32 (n,)."""
    return tl.sum((token[:, None] == path[None, :]).to(tl.int32), 1)


@triton.jit
def _entry_range(request, texts, entries, capacity):
    """Where a request's entries begin, how many it has, and room for how many.

    In range whatever the tensors hold.
    """
    begin = tl.load(texts.offsets + request)
    end = tl.load(texts.offsets + request + 1)
    begin = tl.minimum(tl.maximum(begin, 0), entries)
    room = tl.minimum(tl.maximum(end - begin, 0), tl.minimum(entries - begin, capacity))
    size = tl.minimum(tl.maximum(tl.load(texts.sizes + request), 0), room)
    return begin, size.to(tl.int32), room.to(tl.int32)


@triton.jit
def _penalties_of(request, texts):
    return _Penalties(
        tl.load(texts.repetition_penalty + request),
        tl.load(texts.presence_penalty + request),
        tl.load(texts.frequency_penalty + request),
    )


@triton.jit
def _is_penalised(penalties):
    """Whether the tokens of a request's text are patched, with an entry or without."""
    repetition, presence, frequency = penalties
    return (repetition != 1) | (presence != 0) | (frequency != 0)


@triton.jit
def _completes(word, is_word, slot, place, drafts, texts, longest, word_tokens,
               TREE: tl.constexpr):  # fmt: skip
    """Whether the banned sequences of these numbers have come to their last token, at a slot."""
    begin = tl.load(texts.word_offsets + word, mask=is_word, other=0)
    end = tl.load(texts.word_offsets + word + 1, mask=is_word, other=0)
    length = end - begin
    matched = is_word & (length >= 0) & (length <= longest) & (begin >= 0) & (end <= word_tokens)
    node = slot
    tail = texts.tail + (place.request.to(tl.int64) + 1) * longest
    for back in range(longest):
        at = drafted_at(place, node)
        known = (node > 0) & (at >= 0) & (at < drafts.drafted)
        token = tl.load(drafts.draft_ids + at, mask=known, other=-1)
        if node <= 0:
            tail -= 1
            token = tl.load(tail).to(token.dtype)
        compared = matched & (back < length)
        expected = tl.load(texts.word_ids + (end - 1 - back), mask=compared, other=-1)
        matched = matched & ((expected == token) | (back >= length))
        node = parent_slot(place, tl.maximum(node, 1), drafts) if TREE else tl.maximum(node - 1, 0)
    return matched


@triton.jit
def _process(x, penalties, bias, count, seen, banned):
    """What becomes of logits, in float32."""
    repetition, presence, frequency = penalties
    x = x + bias
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - frequency * count.to(tl.float32)
    x = tl.where(count > 0, x - presence, x)
    return tl.where(banned, float("-inf"), x)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def patch_kernel(
    logits,
    before,
    texts,
    draft_ids,
    parents,
    offsets,
    rows,
    requests,
    drafted,
    max_draft,
    capacity,
    longest,
    entries,
    words,
    word_tokens,
    programs,
    tiles,
    ENTRIES: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    C,
):
    """Overwrites a row's logits; before, unless None, gets what they were, as `Touched` has it."""
    program = tl.program_id(0)
    part = program % programs
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    place, used = locate(program // programs, drafts, C.REQUESTS)
    if not used:
        return
    row, request = place.row, place.request
    slot = row - place.first
    vocabulary = logits.vocabulary
    values = values_of(logits, row)
    if before is not None:
        before += row.to(tl.int64) * (capacity + max_draft)
    entry_begin, entry_count, _ = _entry_range(request, texts, entries, capacity)
    token_ids = texts.token_ids + entry_begin
    path, depth = _path(0, slot, place, drafts, vocabulary, SLOTS, C.TREE)
    too_early = depth < tl.load(texts.min_left + request)
    penalties = _penalties_of(request, texts)

    if (part == 0) & _is_penalised(penalties):
        for block in range(0, slot, SLOTS):
            index = block + tl.arange(0, SLOTS)
            token, _ = _path(block, slot, place, drafts, vocabulary, SLOTS, C.TREE)
            count = tl.zeros((SLOTS,), tl.int32)
            live = token >= 0
            for other in range(0, slot, SLOTS):
                known, _ = _path(other, slot, place, drafts, vocabulary, SLOTS, C.TREE)
                same = token[:, None] == known[None, :]
                count += tl.sum(same.to(tl.int32), 1)
                earlier = (other + tl.arange(0, SLOTS))[None, :] < index[:, None]
                live = live & (tl.sum((same & earlier).to(tl.int32), 1) == 0)
            for start in range(0, entry_count, ENTRIES):
                entry = start + tl.arange(0, ENTRIES)
                listed = tl.load(token_ids + entry, mask=entry < entry_count, other=-2)
                live = live & (_times(token, listed) == 0)
            at = values + token.to(tl.int64) * logits.token_stride
            x = tl.load(at, mask=live, other=0.0)
            after = _process(x.to(tl.float32), penalties, 0.0, count, count > 0, count < 0)
            tl.store(at, after.to(x.dtype), mask=live)
            if before is not None:
                tl.store(before + capacity + index, x, mask=live)

    end = tl.minimum((part + 1) * tiles, tl.cdiv(entry_count, ENTRIES))
    for tile in range(part * tiles, end):
        index = tile * ENTRIES + tl.arange(0, ENTRIES)
        live = index < entry_count
        token = tl.load(token_ids + index, mask=live, other=-2)
        live = live & (token >= 0) & (token < vocabulary)
        entry = entry_begin + index
        count = tl.load(texts.counts + entry, mask=live, other=0) + _times(token, path)
        for block in range(SLOTS, slot, SLOTS):
            more, _ = _path(block, slot, place, drafts, vocabulary, SLOTS, C.TREE)
            count += _times(token, more)
        seen = (count > 0) | (tl.load(texts.in_prompt + entry, mask=live, other=0) != 0)
        is_end = tl.load(texts.ends + entry, mask=live, other=0) != 0
        banned = is_end & too_early
        if WORDS:
            word = tl.load(texts.words + entry * 2, mask=live, other=0)
            word_end = tl.load(texts.words + entry * 2 + 1, mask=live, other=0)
            word = tl.maximum(tl.minimum(word, words), 0)
            word_end = tl.maximum(tl.minimum(word_end, words), 0)
            while tl.max(word_end - word) > 0:
                banned = banned | _completes(
                    word, word < word_end, slot, place, drafts, texts, longest, word_tokens, C.TREE
                )
                word += 1
        at = values + token.to(tl.int64) * logits.token_stride
        x = tl.load(at, mask=live, other=0.0)
        added = tl.load(texts.bias + entry, mask=live, other=0.0)
        after = _process(x.to(tl.float32), penalties, added, count, seen, banned)
        tl.store(at, after.to(x.dtype), mask=live)
        if before is not None:
            tl.store(before + index, x, mask=live)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def raw_logprobs_kernel(
    logits,
    before,
    log_sums,
    texts,
    output,
    draft_ids,
    parents,
    offsets,
    rows,
    requests,
    drafted,
    max_draft,
    capacity,
    entries,
    ENTRIES: tl.constexpr,
    SLOTS: tl.constexpr,
    TREE: tl.constexpr,
):
    """The log-probability of one emitted token under the logits before a patch."""
    program = tl.program_id(0)
    request = program // (max_draft + 1)
    step = program % (max_draft + 1)
    if step >= tl.load(output.lengths + request):
        tl.store(output.raw_logprobs + program, float("nan"))
        return
    token = tl.load(output.token_ids + program)
    drafts = Drafts(draft_ids, parents, offsets, rows, requests, drafted, max_draft)
    first = tl.load(offsets + request) + request
    first = tl.minimum(tl.maximum(first, 0), rows - 1).to(tl.int32)
    slot = step
    if output.path is not None:
        slot = tl.load(output.path + (program - request - 1), mask=step > 0, other=-1) + 1
    row = tl.minimum(first + slot, rows - 1)
    place = Place(row, request, first, max_draft)
    entry_begin, entry_count, _ = _entry_range(request, texts, entries, capacity)

    # The place of what was overwritten: the entry, or the first of the path's tokens.
    nowhere = capacity + max_draft
    kept = nowhere
    for start in range(0, entry_count, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        mask = index < entry_count
        listed = tl.load(texts.token_ids + entry_begin + index, mask=mask, other=-2)
        kept = tl.minimum(kept, tl.min(tl.where(listed == token, index, nowhere)))
    if (kept == nowhere) & _is_penalised(_penalties_of(request, texts)):
        for block in range(0, slot, SLOTS):
            index = block + tl.arange(0, SLOTS)
            known, _ = _path(block, slot, place, drafts, logits.vocabulary, SLOTS, TREE)
            kept = tl.minimum(kept, tl.min(tl.where(known == token, capacity + index, nowhere)))
    touched = kept < nowhere
    at = values_of(logits, row) + token.to(tl.int64) * logits.token_stride
    x = tl.load(at).to(tl.float32)
    overwritten = tl.load(before + row.to(tl.int64) * nowhere + kept, mask=touched, other=0.0)
    x = tl.where(touched, overwritten, x)
    tl.store(output.raw_logprobs + program, x - tl.load(log_sums + row))


@triton.jit(do_not_specialize=_SIZES)
def observe_kernel(
    emitted_ids,
    lengths,
    texts,
    row_stride,
    column_stride,
    columns,
    capacity,
    longest,
    entries,
    ENTRIES: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Adds what one request emitted to its text."""
    request = tl.program_id(0)
    emitted_ids += request.to(tl.int64) * row_stride
    tail = texts.tail + request.to(tl.int64) * longest
    length = tl.minimum(tl.maximum(tl.load(lengths + request), 0), columns)
    left = tl.load(texts.min_left + request)
    begin, size, room = _entry_range(request, texts, entries, capacity)
    token_ids = texts.token_ids + begin
    counts = texts.counts + begin
    penalised = _is_penalised(_penalties_of(request, texts))
    for step in range(length):
        token = tl.load(emitted_ids + step * column_stride)
        if penalised & (token >= 0):
            place = room
            for start in range(0, size, ENTRIES):
                index = start + tl.arange(0, ENTRIES)
                listed = tl.load(token_ids + index, mask=index < size, other=-1)
                place = tl.minimum(place, tl.min(tl.where(listed == token, index, room)))
            if place < size:
                tl.atomic_add(counts + place, 1, sem="relaxed")
            elif size < room:
                tl.store(token_ids + size, token)
                tl.store(counts + size, 1)
                size += 1
            tl.debug_barrier()  # The next token is looked for among what stands there now.
    if TAIL:
        index = tl.arange(0, TAIL)
        source = index + length
        kept = (index < longest) & (source < longest)
        new = (index < longest) & (source >= longest)
        moved = tl.load(tail + source, mask=kept, other=0)
        place = emitted_ids + (source - longest) * column_stride
        text = tl.where(kept, moved, tl.load(place, mask=new, other=0))
        tl.debug_barrier()  # All has been read, by every thread, before any of it is overwritten.
        tl.store(tail + index, text, mask=index < longest)
    tl.debug_barrier()
    tl.store(texts.min_left + request, tl.maximum(left - length, 0))
    tl.store(texts.sizes + request, size)


def patch(batch: Batch, processors: Processors) -> Touched | None:
    """The reference's `patch`, of logits of 16 or 32 bits, in one launch, or two if it keeps them.

    What is kept is the workspace's buffer, if there is one.
    """
    logits, capacity = batch.logits, processors.capacity
    sums = before = None
    if batch.raw_logprobs:
        sums = log_sums(batch)
        before = take(batch, "before", touched=capacity + batch.max_draft)
    slots = config.path_slots(batch.max_draft)
    programs, tiles = config.split_entries(len(logits), capacity, slots)
    with torch.cuda.device_of(logits):
        patch_kernel[(len(logits) * programs,)](
            Rows.of(logits),
            before,
            Texts.of(processors),
            **drafts_of(batch),
            capacity=capacity,
            longest=processors.tail.shape[1],
            entries=len(processors.token_ids),
            words=len(processors.word_offsets) - 1,
            word_tokens=len(processors.word_ids),
            programs=programs,
            tiles=tiles,
            ENTRIES=config.entries_block(slots),
            SLOTS=slots,
            WORDS=len(processors.word_offsets) > 1,
            C=Config.of(batch),
            num_warps=config.WARPS,
            # A product and a sum rounded together would differ from the reference.
            enable_fp_fusion=False,
        )
    return None if sums is None or before is None else Touched(processors, sums, before, None)


def raw_logprobs(batch: Batch, emitted: Emitted, touched: Touched) -> Tensor:
    """The reference's `raw_logprobs`, in one launch; the logits stay as the patch left them.

    The result is the workspace's buffer, if there is one.
    """
    processors = touched.processors
    result = take(batch, "raw_logprobs")
    slots = config.path_slots(batch.max_draft)
    with torch.cuda.device_of(batch.logits):
        raw_logprobs_kernel[(result.numel(),)](
            Rows.of(batch.logits),
            touched.before,
            touched.log_sums,
            Texts.of(processors),
            emitted._replace(raw_logprobs=result),
            **drafts_of(batch),
            capacity=processors.capacity,
            entries=len(processors.token_ids),
            ENTRIES=config.entries_block(slots),
            SLOTS=slots,
            TREE=batch.parents is not None,
            num_warps=config.WARPS,
        )
    return result


def observe(processors: Processors, token_ids: Tensor, lengths: Tensor) -> None:
    """The reference's `observe`, in one launch."""
    requests, columns = token_ids.shape
    longest = processors.tail.shape[1]
    with torch.cuda.device_of(token_ids):
        observe_kernel[(requests,)](
            token_ids,
            lengths,
            Texts.of(processors),
            *token_ids.stride(),
            columns,
            processors.capacity,
            longest,
            len(processors.token_ids),
            ENTRIES=config.OBSERVED_ENTRIES,
            TAIL=triton.next_power_of_2(longest) if longest else 0,
            num_warps=config.WARPS,
        )
