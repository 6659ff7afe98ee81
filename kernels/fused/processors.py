"""Logits processors in one launch: a patch of the logits that they touch.

A row's entries are split among programs; each looks how often its tokens stand on the path to the
row, and whether a banned sequence ends with them. The first program of a row also patches what the
path has beyond the entries. Entries of a row are different tokens and the path's others are none
of them, so each logit has one writer, and none is read after it was written.

`fastdraft.kernels.reference.processors` has the order of operations; the same ones in float32,
each rounded by itself, give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from fastdraft.kernels.fused import config
from fastdraft.kernels.fused.rows import drafted_at, locate, parent_slot
from fastdraft.kernels.reference import Emitted, Processors
from fastdraft.kernels.workspace import Scratch, Size, Workspace
from torch import Tensor

_SIZES = ("rows", "requests", "drafted", "max_draft", "capacity", "longest", "entries", "words",
          "word_tokens", "programs", "tiles", "columns")  # fmt: skip
_UNALIGNED = ("draft_ids", "parents", "offsets")


@triton.jit
def _path(block, slot, first, request, draft_ids, parents, drafted, vocabulary,
          SLOTS: tl.constexpr, TREE: tl.constexpr):  # fmt: skip
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
            node = parent_slot(parents, drafted_at(first, request, node), node, drafted)
    else:
        on_path = index < slot
    at = drafted_at(first, request, index + 1)
    token = tl.load(draft_ids + at, mask=on_path & (at >= 0) & (at < drafted), other=-1)
    return tl.where((token >= 0) & (token < vocabulary), token, -1).to(tl.int32), depth


@triton.jit
def _times(token, path):
    """How often each token stands on the path: (n,) and (slots,) to int32 (n,)."""
    return tl.sum((token[:, None] == path[None, :]).to(tl.int32), 1)


@triton.jit
def _entry_range(request, entry_offsets, sizes, entries, capacity):
    """Where a request's entries begin, and how many it has; in range whatever the tensors hold."""
    begin = tl.load(entry_offsets + request)
    end = tl.load(entry_offsets + request + 1)
    begin = tl.minimum(tl.maximum(begin, 0), entries)
    room = tl.minimum(tl.maximum(end - begin, 0), tl.minimum(entries - begin, capacity))
    size = tl.minimum(tl.maximum(tl.load(sizes + request), 0), room)
    return begin, size.to(tl.int32), room.to(tl.int32)


@triton.jit
def _is_penalised(repetition, presence, frequency):
    """Whether the tokens of a request's text are patched, with an entry or without."""
    return (repetition != 1) | (presence != 0) | (frequency != 0)


@triton.jit
def _completes(word, is_word, slot, first, request, draft_ids, parents, drafted, tail, word_ids,
               word_offsets, longest, word_tokens, TREE: tl.constexpr):  # fmt: skip
    """Whether the banned sequences of these numbers have come to their last token, at a slot."""
    begin = tl.load(word_offsets + word, mask=is_word, other=0)
    end = tl.load(word_offsets + word + 1, mask=is_word, other=0)
    length = end - begin
    matched = is_word & (length >= 0) & (length <= longest) & (begin >= 0) & (end <= word_tokens)
    node = slot
    tail += (request.to(tl.int64) + 1) * longest
    for back in range(longest):
        at = drafted_at(first, request, node)
        known = (node > 0) & (at >= 0) & (at < drafted)
        token = tl.load(draft_ids + at, mask=known, other=-1)
        if node <= 0:
            tail -= 1
            token = tl.load(tail).to(token.dtype)
        compared = matched & (back < length)
        expected = tl.load(word_ids + (end - 1 - back), mask=compared, other=-1)
        matched = matched & ((expected == token) | (back >= length))
        if TREE:
            node = parent_slot(parents, at, tl.maximum(node, 1), drafted)
        else:
            node = tl.maximum(node - 1, 0)
    return matched


@triton.jit
def _process(x, bias, count, seen, banned, repetition, frequency, presence):
    """What becomes of logits, in float32."""
    x = x + bias
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - frequency * count.to(tl.float32)
    x = tl.where(count > 0, x - presence, x)
    return tl.where(banned, float("-inf"), x)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def patch_kernel(
    logits,
    before,
    draft_ids,
    parents,
    offsets,
    token_ids,
    counts,
    in_prompt,
    bias,
    ends,
    words_of,
    entry_offsets,
    sizes,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    min_left,
    tail,
    word_ids,
    word_offsets,
    row_stride,
    token_stride,
    vocabulary,
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
    REQUESTS: tl.constexpr,
    TREE: tl.constexpr,
    WORDS: tl.constexpr,
    KEEP: tl.constexpr,
):
    program = tl.program_id(0)
    row = program // programs
    part = program % programs
    request, first, _, used = locate(row, offsets, requests, rows, max_draft, REQUESTS)
    if not used:
        return
    slot = row - first
    logits += row.to(tl.int64) * row_stride
    before += row.to(tl.int64) * (capacity + max_draft)
    entry_begin, entry_count, _ = _entry_range(request, entry_offsets, sizes, entries, capacity)
    token_ids += entry_begin
    repetition = tl.load(repetition_penalty + request)
    presence = tl.load(presence_penalty + request)
    frequency = tl.load(frequency_penalty + request)
    path, depth = _path(
        0, slot, first, request, draft_ids, parents, drafted, vocabulary, SLOTS, TREE
    )
    too_early = depth < tl.load(min_left + request)

    if (part == 0) & _is_penalised(repetition, presence, frequency):
        for block in range(0, slot, SLOTS):
            index = block + tl.arange(0, SLOTS)
            token, _ = _path(
                block, slot, first, request, draft_ids, parents, drafted, vocabulary, SLOTS, TREE
            )
            count = tl.zeros((SLOTS,), tl.int32)
            live = token >= 0
            for other in range(0, slot, SLOTS):
                known, _ = _path(
                    other, slot, first, request, draft_ids, parents, drafted, vocabulary,
                    SLOTS, TREE,
                )  # fmt: skip
                same = token[:, None] == known[None, :]
                count += tl.sum(same.to(tl.int32), 1)
                earlier = (other + tl.arange(0, SLOTS))[None, :] < index[:, None]
                live = live & (tl.sum((same & earlier).to(tl.int32), 1) == 0)
            for start in range(0, entry_count, ENTRIES):
                entry = start + tl.arange(0, ENTRIES)
                listed = tl.load(token_ids + entry, mask=entry < entry_count, other=-2)
                live = live & (_times(token, listed) == 0)
            place = logits + token.to(tl.int64) * token_stride
            x = tl.load(place, mask=live, other=0.0)
            after = _process(
                x.to(tl.float32), 0.0, count, count > 0, count < 0, repetition, frequency, presence
            )
            tl.store(place, after.to(x.dtype), mask=live)
            if KEEP:
                tl.store(before + capacity + index, x, mask=live)

    end = tl.minimum((part + 1) * tiles, tl.cdiv(entry_count, ENTRIES))
    for tile in range(part * tiles, end):
        index = tile * ENTRIES + tl.arange(0, ENTRIES)
        live = index < entry_count
        token = tl.load(token_ids + index, mask=live, other=-2)
        live = live & (token >= 0) & (token < vocabulary)
        entry = entry_begin + index
        count = tl.load(counts + entry, mask=live, other=0) + _times(token, path)
        for block in range(SLOTS, slot, SLOTS):
            more, _ = _path(
                block, slot, first, request, draft_ids, parents, drafted, vocabulary,
                SLOTS, TREE,
            )  # fmt: skip
            count += _times(token, more)
        seen = (count > 0) | (tl.load(in_prompt + entry, mask=live, other=0) != 0)
        is_end = tl.load(ends + entry, mask=live, other=0) != 0
        banned = is_end & too_early
        if WORDS:
            word = tl.load(words_of + entry * 2, mask=live, other=0)
            word_end = tl.load(words_of + entry * 2 + 1, mask=live, other=0)
            word = tl.maximum(tl.minimum(word, words), 0)
            word_end = tl.maximum(tl.minimum(word_end, words), 0)
            while tl.max(word_end - word) > 0:
                banned = banned | _completes(
                    word, word < word_end, slot, first, request, draft_ids, parents, drafted,
                    tail, word_ids, word_offsets, longest, word_tokens, TREE,
                )  # fmt: skip
                word += 1
        place = logits + token.to(tl.int64) * token_stride
        x = tl.load(place, mask=live, other=0.0)
        added = tl.load(bias + entry, mask=live, other=0.0)
        after = _process(
            x.to(tl.float32), added, count, seen, banned, repetition, frequency, presence
        )
        tl.store(place, after.to(x.dtype), mask=live)
        if KEEP:
            tl.store(before + index, x, mask=live)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def raw_logprobs_kernel(
    logits,
    before,
    log_sums,
    draft_ids,
    parents,
    offsets,
    token_ids,
    entry_offsets,
    sizes,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    emitted_ids,
    lengths,
    path,
    raw_logprobs,
    row_stride,
    token_stride,
    vocabulary,
    rows,
    drafted,
    max_draft,
    capacity,
    entries,
    ENTRIES: tl.constexpr,
    SLOTS: tl.constexpr,
    TREE: tl.constexpr,
):
    program = tl.program_id(0)
    request = program // (max_draft + 1)
    step = program % (max_draft + 1)
    if step >= tl.load(lengths + request):
        tl.store(raw_logprobs + program, float("nan"))
        return
    token = tl.load(emitted_ids + program)
    first = tl.load(offsets + request) + request
    first = tl.minimum(tl.maximum(first, 0), rows - 1).to(tl.int32)
    slot = step
    if TREE:
        slot = tl.load(path + (program - request - 1), mask=step > 0, other=-1) + 1
    row = tl.minimum(first + slot, rows - 1).to(tl.int64)
    entry_begin, entry_count, _ = _entry_range(request, entry_offsets, sizes, entries, capacity)

    # The place of what was overwritten: the entry, or the first of the path's tokens.
    nowhere = capacity + max_draft
    kept = nowhere
    for start in range(0, entry_count, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        listed = tl.load(token_ids + entry_begin + index, mask=index < entry_count, other=-2)
        kept = tl.minimum(kept, tl.min(tl.where(listed == token, index, nowhere)))
    penalised = _is_penalised(
        tl.load(repetition_penalty + request),
        tl.load(presence_penalty + request),
        tl.load(frequency_penalty + request),
    )
    if (kept == nowhere) & penalised:
        for block in range(0, slot, SLOTS):
            index = block + tl.arange(0, SLOTS)
            known, _ = _path(
                block, slot, first, request, draft_ids, parents, drafted, vocabulary, SLOTS, TREE
            )
            kept = tl.minimum(kept, tl.min(tl.where(known == token, capacity + index, nowhere)))
    touched = kept < nowhere
    x = tl.load(logits + row * row_stride + token.to(tl.int64) * token_stride).to(tl.float32)
    overwritten = tl.load(before + row * nowhere + kept, mask=touched, other=0.0)
    x = tl.where(touched, overwritten, x)
    tl.store(raw_logprobs + program, x - tl.load(log_sums + row))


@triton.jit(do_not_specialize=_SIZES)
def observe_kernel(
    emitted_ids,
    lengths,
    token_ids,
    counts,
    entry_offsets,
    sizes,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    min_left,
    tail,
    row_stride,
    column_stride,
    columns,
    capacity,
    longest,
    entries,
    ENTRIES: tl.constexpr,
    TAIL: tl.constexpr,
):
    request = tl.program_id(0)
    emitted_ids += request.to(tl.int64) * row_stride
    tail += request.to(tl.int64) * longest
    length = tl.minimum(tl.maximum(tl.load(lengths + request), 0), columns)
    left = tl.load(min_left + request)
    begin, size, room = _entry_range(request, entry_offsets, sizes, entries, capacity)
    token_ids += begin
    counts += begin
    penalised = _is_penalised(
        tl.load(repetition_penalty + request),
        tl.load(presence_penalty + request),
        tl.load(frequency_penalty + request),
    )
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
    tl.store(min_left + request, tl.maximum(left - length, 0))
    tl.store(sizes + request, size)


@dataclass(frozen=True, eq=False)
class Touched:
    """The logits that a patch has overwritten, and what tells where they stand.

    before: float32 (rows, capacity + max_draft): for each entry, then for each draft token on the
    way to the row, first where it stands twice, what its logit was.
    """

    before: Tensor
    draft_ids: Tensor
    parents: Tensor | None
    processors: Processors


def patch(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    processors: Processors,
    *,
    parents: Tensor | None = None,
    max_draft: int,
    keep: bool = False,
    workspace: Workspace | None = None,
) -> Touched | None:
    """The reference's `patch`, of logits of 16 or 32 bits, in one launch.

    What is kept is the workspace's buffer, if there is one.
    """
    rows, vocabulary = logits.shape
    requests = len(offsets) - 1
    capacity = processors.capacity
    slots = config.path_slots(max_draft)
    programs, tiles = config.split_entries(rows, capacity, slots)
    size = Size(rows, requests, vocabulary, max_draft, capacity + max_draft)
    before = Scratch(workspace, logits.device, size).take("before") if keep else None
    with torch.cuda.device_of(logits):
        patch_kernel[(rows * programs,)](
            logits,
            logits if before is None else before,
            draft_ids,
            draft_ids if parents is None else parents,
            offsets,
            processors.token_ids,
            processors.counts,
            processors.in_prompt.view(torch.uint8),
            processors.bias,
            processors.ends.view(torch.uint8),
            processors.words,
            processors.offsets,
            processors.sizes,
            processors.repetition_penalty,
            processors.presence_penalty,
            processors.frequency_penalty,
            processors.min_left,
            processors.tail,
            processors.word_ids,
            processors.word_offsets,
            *logits.stride(),
            vocabulary,
            rows,
            requests,
            len(draft_ids),
            max_draft,
            capacity,
            processors.tail.shape[1],
            len(processors.token_ids),
            len(processors.word_offsets) - 1,
            len(processors.word_ids),
            programs,
            tiles,
            ENTRIES=config.entries_block(slots),
            SLOTS=slots,
            REQUESTS=config.requests_block(requests),
            TREE=parents is not None,
            WORDS=len(processors.word_offsets) > 1,
            KEEP=keep,
            num_warps=config.WARPS,
            # A product and a sum rounded together would differ from the reference.
            enable_fp_fusion=False,
        )
    return None if before is None else Touched(before, draft_ids, parents, processors)


def raw_logprobs(
    logits: Tensor,
    emitted: Emitted,
    offsets: Tensor,
    touched: Touched,
    log_sums: Tensor,
    *,
    workspace: Workspace | None = None,
) -> Tensor:
    """The reference's `raw_logprobs`, in one launch; the logits stay as the patch left them.

    log_sums: float32 (rows,). The result is the workspace's buffer, if there is one.
    """
    processors = touched.processors
    rows, vocabulary = logits.shape
    requests, columns = emitted.token_ids.shape
    scratch = Scratch(workspace, logits.device, Size(rows, requests, vocabulary, columns - 1))
    result = scratch.take("raw_logprobs")
    slots = config.path_slots(columns - 1)
    with torch.cuda.device_of(logits):
        raw_logprobs_kernel[(requests * columns,)](
            logits,
            touched.before,
            log_sums,
            touched.draft_ids,
            touched.draft_ids if touched.parents is None else touched.parents,
            offsets,
            processors.token_ids,
            processors.offsets,
            processors.sizes,
            processors.repetition_penalty,
            processors.presence_penalty,
            processors.frequency_penalty,
            emitted.token_ids,
            emitted.lengths,
            emitted.token_ids if emitted.path is None else emitted.path,
            result,
            *logits.stride(),
            vocabulary,
            rows,
            len(touched.draft_ids),
            columns - 1,
            processors.capacity,
            len(processors.token_ids),
            ENTRIES=config.entries_block(slots),
            SLOTS=slots,
            TREE=touched.parents is not None,
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
            processors.token_ids,
            processors.counts,
            processors.offsets,
            processors.sizes,
            processors.repetition_penalty,
            processors.presence_penalty,
            processors.frequency_penalty,
            processors.min_left,
            processors.tail,
            *token_ids.stride(),
            columns,
            processors.capacity,
            longest,
            len(processors.token_ids),
            ENTRIES=config.OBSERVED_ENTRIES,
            TAIL=triton.next_power_of_2(longest) if longest else 0,
            num_warps=config.WARPS,
        )
