"""Logits processors that depend on the text so far: a patch of the few logits that they touch.

What a request's processors can touch is a short list of tokens: those of its text, those with a
bias, those that may end it, those that may complete a banned sequence. Each stands in the list
once, an *entry* with all that is known of it, so that no logit is changed twice and no two writers
meet. A row's logits change as they would in plain decoding of the text and the draft tokens that
lead to the row, which count as output; draft tokens without an entry are patched beside them.

For a token with logit x, that stands n times in the output, with the penalties of its request:

    x <- x + bias
    x <- x / repetition if x > 0 else x * repetition    where the token is in prompt or output
    x <- x - frequency * n
    x <- x - presence                                   where n > 0
    x <- -inf                                           where the token is banned

A token is banned where it would complete a sequence that is not to come, or end the output too
early. This is the order of transformers (SequenceBias, RepetitionPenalty, then NoBadWords,
MinNewTokensLength) and has the effect of vLLM's (bias, then repetition, frequency and presence,
bans in any case). The repetition penalty is that of Keskar et al., CTRL, 2019.

All is computed in float32 (float64 for float64 logits), and rounded to the logits' type once. A
banned token is -inf whatever its logit; otherwise NaN stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdraft.kernels.operands import Batch, Emitted, Processors, Touched
from fastdraft.kernels.reference.acceptance import emitted_rows, rows_of
from fastdraft.kernels.reference.sampling import as_float, log_sums
from fastdraft.kernels.reference.trees import in_slots, parent_slots, tree_attention_mask

# Rows are patched in slabs of about this many entries. No result depends on it.
_SLAB = 1 << 20


def patch(batch: Batch, processors: Processors) -> Touched | None:
    """Applies the processors to the logits, in place.

    The batch's rows share no memory. Gives what was overwritten if the batch wants raw_logprobs.
    Time is linear in the entries times the rows of their requests, and so is memory if it does.
    """
    logits, draft_ids, offsets, max_draft, parents = batch[:5]
    sums = log_sums(logits) if batch.raw_logprobs else None
    if parents is None:
        token = torch.arange(len(draft_ids), device=draft_ids.device)
        parents = token - offsets[torch.searchsorted(offsets, token, right=True) - 1] - 1
    parent = parent_slots(parents, offsets, max_draft=max_draft)
    leads = tree_attention_mask(parents, offsets, max_draft=max_draft)
    drafted = in_slots(draft_ids, offsets, max_draft=max_draft, fill=-1)
    recent = _recent(drafted, parent, processors.tail)
    used = offsets.diff().clamp(max=max_draft)

    request, slot = rows_of(len(logits), offsets)
    step = max(1, _SLAB // (processors.capacity + drafted.shape[1] + len(processors.word_offsets)))
    parts = []
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        b, s = request[part], slot[part].clamp(max=max_draft)
        columns, before, after = _patch_rows(
            logits[part],
            processors,
            request=b,
            on_path=leads[b, s],
            drafted=drafted[b],
            recent=recent[b, s],
            reachable=slot[part] <= used[b],
        )
        logits[part].scatter_(1, columns, after)
        if sums is not None:
            parts.append((columns, before))
    if sums is None:
        return None
    all_columns, all_before = map(torch.cat, zip(*parts, strict=True))
    return Touched(processors, sums, all_before, all_columns)


def raw_logprobs(batch: Batch, emitted: Emitted, touched: Touched) -> Tensor:
    """The log-probabilities of the emitted tokens under the logits before a patch.

    The batch's logits are as the patch left them, and may be as they were before afterwards.
    float32 (requests, max_draft + 1), NaN after the last token.
    """
    logits, columns = batch.logits, touched.columns
    assert columns is not None
    logits.scatter_(1, columns, touched.before)
    rows = emitted_rows(batch.offsets, emitted.path, max_draft=batch.max_draft)
    rows = rows.clamp(max=len(logits) - 1)
    values = as_float(logits[rows, emitted.token_ids.clamp(min=0).long()]) - touched.log_sums[rows]
    step = torch.arange(batch.max_draft + 1, device=logits.device)
    return torch.where(step < emitted.lengths[:, None], values.float(), torch.nan)


def observe(processors: Processors, token_ids: Tensor, lengths: Tensor) -> None:
    """Adds emitted tokens to the text of the requests, in place. The operands are trusted.

    token_ids: int32 (requests, n), the first lengths of each; lengths: int32 (requests,). Tokens of
    requests without penalties get no entries, nor do those that there is no room for.
    """
    penalised = _penalised(processors)
    first = processors.offsets[:-1]
    room = processors.offsets.diff()
    index = torch.arange(processors.capacity, device=token_ids.device)
    for step in range(token_ids.shape[1] if len(processors.token_ids) else 0):
        token = token_ids[:, step]
        counted = (step < lengths) & (token >= 0) & penalised
        is_entry = index < processors.sizes[:, None]
        entry = torch.where(is_entry, first[:, None] + index, 0)
        hits = (processors.token_ids[entry] == token[:, None]) & is_entry
        is_known = hits.any(1)
        is_new = counted & ~is_known & (processors.sizes < room)
        place = torch.where(is_known, hits.int().argmax(1), processors.sizes)
        place = (first + place).clamp(max=len(processors.token_ids) - 1)
        # Added, since requests without room, which add 0, may name the same place as others.
        change = torch.where(is_new, token - processors.token_ids[place], 0)
        processors.token_ids.index_add_(0, place, change)
        processors.counts.index_add_(0, place, ((counted & is_known) | is_new).int())
        processors.sizes.add_(is_new)
    processors.min_left.sub_(lengths).clamp_(min=0)
    place = torch.arange(processors.tail.shape[1], device=token_ids.device) + lengths[:, None]
    text = torch.cat([processors.tail, token_ids], 1)
    processors.tail.copy_(text.gather(1, place.long()))


def _penalised(processors: Processors) -> Tensor:
    """Whether the tokens of each request's text are patched, with an entry or without."""
    penalised = processors.repetition_penalty != 1
    return penalised | (processors.presence_penalty != 0) | (processors.frequency_penalty != 0)


def _recent(drafted: Tensor, parent: Tensor, tail: Tensor) -> Tensor:
    """The last tokens at each slot, the very last first: (requests, slots, tail's width)."""
    slot = torch.arange(drafted.shape[1], device=drafted.device).expand_as(drafted)
    from_tail = torch.zeros_like(slot)
    tokens = torch.empty(*drafted.shape, tail.shape[1], dtype=drafted.dtype, device=drafted.device)
    for i in range(tail.shape[1]):
        in_text = slot == 0
        of_tail = tail.gather(1, tail.shape[1] - 1 - from_tail)
        tokens[:, :, i] = torch.where(in_text, of_tail, drafted.gather(1, slot))
        from_tail = from_tail + in_text
        slot = parent.gather(1, slot)
    return tokens


def _patch_rows(
    logits: Tensor,
    processors: Processors,
    *,
    request: Tensor,
    on_path: Tensor,
    drafted: Tensor,
    recent: Tensor,
    reachable: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The columns that a patch touches in some rows, what they hold, and what it makes of that.

    on_path: bool (rows, slots), which slots lead to the row's; drafted: (rows, slots), their
    tokens; recent: (rows, tail's width); reachable: bool (rows,), False for rows to be left alone.
    """
    index = torch.arange(processors.capacity, device=logits.device)
    room = processors.offsets.diff()[request]
    entry = processors.offsets[request][:, None] + index
    is_entry = index < processors.sizes[request].minimum(room)[:, None]
    is_entry &= (entry >= 0) & (entry < len(processors.token_ids))
    entry = torch.where(is_entry, entry, 0)
    token = torch.where(is_entry, processors.token_ids[entry], -1)
    count = torch.where(is_entry, processors.counts[entry], 0)

    # A path's tokens, each once, where it stands first, with how often it does.
    path = torch.where(on_path, drafted, -1)
    same = path[:, :, None] == path[:, None, :]
    is_first = ~same.tril(-1).any(2)
    for place in range(1, path.shape[1]):
        found = (path[:, place, None] == token) & is_entry
        count = count + found
        is_first[:, place] &= ~found.any(1)

    def beside(of_entries: Tensor, of_path: Tensor | float) -> Tensor:
        """One row of values for the entries, then for the slots."""
        if not isinstance(of_path, Tensor):
            of_path = torch.full_like(path, of_path, dtype=of_entries.dtype)
        return torch.cat([of_entries, of_path], 1)

    depth = on_path[:, 1:].sum(1, keepdim=True)
    banned = processors.ends[entry] & (depth < processors.min_left[request][:, None])
    banned |= _completes(processors, entry, recent)
    count = beside(count, same.sum(2))
    seen = (count > 0) | beside(processors.in_prompt[entry], False)
    column = beside(token, path).long()
    is_first &= on_path & _penalised(processors)[request][:, None]
    touched = beside(is_entry, is_first) & reachable[:, None]
    touched &= (column >= 0) & (column < logits.shape[1])
    column = torch.where(touched, column, 0)

    def option(values: Tensor) -> Tensor:
        return values[request][:, None].to(x.dtype)

    before = logits.gather(1, column)
    x = as_float(before)
    x = x + beside(processors.bias[entry], 0.0)
    repetition = option(processors.repetition_penalty)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - option(processors.frequency_penalty) * count
    x = torch.where(count > 0, x - option(processors.presence_penalty), x)
    x = x.masked_fill(beside(banned, False), -torch.inf)
    after = torch.where(touched, x.to(logits.dtype), before)

    # All rows write as much, without waiting to learn how much each has to: what is not touched
    # writes what the first that is writes, or without one, token 0's logit as it was.
    first = touched.int().argmax(1, keepdim=True)

    def repeated(values: Tensor) -> Tensor:
        return torch.where(touched, values, values.gather(1, first))

    return repeated(column), repeated(before), repeated(after)


def _completes(processors: Processors, entry: Tensor, recent: Tensor) -> Tensor:
    """Whether the entry would complete a banned sequence after the recent tokens."""
    first, end = processors.word_offsets[:-1], processors.word_offsets[1:]
    length = end - first
    word_ids = torch.nn.functional.pad(processors.word_ids, (0, 1), value=-1)
    matches = (length <= recent.shape[1]).repeat(len(recent), 1)
    for i in range(recent.shape[1]):
        place = torch.where(i < length, end - 1 - i, -1)
        expected = word_ids[place.clamp(-1, len(word_ids) - 1)]
        matches &= (expected == recent[:, i, None]) | (i >= length)
    matched = torch.nn.functional.pad(matches.cumsum(1), (1, 0))
    words = processors.words[entry].long().clamp(0, len(length))
    return matched.gather(1, words[:, :, 1]) > matched.gather(1, words[:, :, 0])
