"""What the target's tokens make of a draft: the accepted tokens, then the target's own.

The walk through a draft begins at the text's last token. The target's token in the row of where it
stands is emitted; the first child that is this token is where it stands next, and without one it
ends. It also ends before an empty row. So the draft's tokens are compared up to the first mismatch,
and rows after that are no part of the text. A draft is looked at up to max_draft tokens.

In a kernel, the program that finishes a request walks, through the rows' results.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastdraft.kernels import grid
from fastdraft.kernels.language import jit, tl
from fastdraft.kernels.operands import Batch, Status, Verified

_NAN = tl.constexpr(int(Status.NAN))
_EMPTY = tl.constexpr(int(Status.EMPTY))


class Chosen(NamedTuple):
    """The token chosen from each row of logits, and what is known of it.

    tokens: int64 (rows,); that of an empty row means nothing, but is in range.
    maxima: (rows,), the largest logit of each row that is allowed, in float32 or float64 where it
        was drawn from; -inf marks an empty row.
    logprobs: float32 (rows,), the log-probability of the token under the distribution that it was
        chosen from, for an argmax the softmax at temperature 1; NaN where the row has no softmax.
        None unless asked for.
    raw_logprobs: the same under the softmax of the logits as they came, with all tokens allowed.
    """

    tokens: Tensor
    maxima: Tensor
    logprobs: Tensor | None
    raw_logprobs: Tensor | None


def join(parts: list[Chosen]) -> Chosen:
    tokens, maxima, logprobs, raw_logprobs = zip(*parts, strict=True)
    return Chosen(
        torch.cat(tokens),
        torch.cat(maxima),
        None if logprobs[0] is None else torch.cat(logprobs),
        None if raw_logprobs[0] is None else torch.cat(raw_logprobs),
    )


def emit(chosen: Chosen, batch: Batch) -> Verified:
    """What is emitted where the target chose these tokens, one for each row of the batch.

    Reads the tokens back from a device.
    """
    tokens, maxima = chosen.tokens.tolist(), chosen.maxima.tolist()
    drafts, starts = batch.draft_ids.tolist(), batch.offsets.tolist()
    parents = None if batch.parents is None else batch.parents.tolist()
    max_draft, device = batch.max_draft, batch.logits.device
    emitted: list[list[int]] = []
    rows: list[list[int]] = []
    status: list[int] = []
    paths: list[list[int]] = []
    for request, (start, end) in enumerate(pairwise(starts)):
        size = min(end - start, max_draft)
        said: list[int] = []
        reached: list[int] = []
        path: list[int] = []
        met = 0
        node: int | None = -1
        while node is not None:
            row = start + request + node + 1
            token, maximum = tokens[row], maxima[row]
            if maximum == -math.inf:
                met |= Status.EMPTY
                break
            if maximum != maximum:
                met |= Status.NAN
            said.append(token)
            reached.append(row)
            # In a chain, there is one child.
            last = min(node + 2, size) if parents is None else size
            for child in range(node + 1, last):
                is_child = (
                    parents is None or min(max(parents[start + child], -1), child - 1) == node
                )
                if is_child and drafts[start + child] == token:
                    path.append(child)
                    node = child
                    break
            else:
                node = None
        emitted.append(said)
        rows.append(reached)
        status.append(met)
        paths.append(path)

    columns = max_draft + 1

    def of_rows(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        at = _padded(rows, columns, device).long()
        return torch.where(at < 0, torch.nan, values[at.clamp(min=0)])

    return Verified(
        _padded(emitted, columns, device),
        _placed([*map(len, emitted)], device),
        _placed(status, device),
        None if parents is None else _padded(paths, max_draft, device),
        of_rows(chosen.logprobs),
        of_rows(chosen.raw_logprobs),
    )


def _padded(lists: list[list[int]], columns: int, device: torch.device) -> Tensor:
    """int32 (lists, columns), -1 after the end of each list."""
    return _placed([each + [-1] * (columns - len(each)) for each in lists], device)


def _placed(numbers: list[Any], device: torch.device) -> Tensor:
    values = torch.from_numpy(np.array(numbers, np.int32))
    return values if device.type == "cpu" else values.to(device)


@jit
def accept(place, batch, logits, scratch, output, C):
    """Writes what a request emits; place: that of any of its rows. With a path it is a tree."""
    if output.tree_path is not None:
        length, nan, stopped = _walk(place, batch, scratch, output, C)
    else:
        length, nan, stopped = _compare(place, batch, logits, scratch, output, C)
    tl.store(output.lengths + place.request, length)
    tl.store(output.status + place.request, nan * _NAN + stopped * _EMPTY)


@jit
def _emitted_of(request, batch):
    """Where what a request emits begins."""
    return request.to(tl.int64) * (batch.max_draft + 1)


@jit
def _results_of(place, scratch, slot):
    """The packed results of the slots."""
    results = scratch.row_results + place.first + slot
    return tl.load(results, mask=slot <= place.size, other=0, cache_modifier=".cg")


@jit
def _compare(place, batch, logits, scratch, output, C):
    """A chain: the slots up to the first whose row does not give the draft's next token."""
    size, max_draft = place.size, batch.max_draft
    emitted = _emitted_of(place.request, batch)
    last = size
    nan = 0
    stopped = 0
    for block in range(0, max_draft + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        packed = _results_of(place, scratch, slot)
        key, token = grid.unpack(packed)
        at = grid.drafted_at(place, slot + 1)
        follows = (slot < size) & (at >= 0) & (at < batch.drafted)
        expected = tl.load(batch.draft_ids + at, mask=follows, other=-1)
        empty = key <= grid.EMPTY_KEY
        refused = (slot <= size) & ((expected != token) | empty)
        last = tl.minimum(last, tl.min(tl.where(refused, slot, size)))
        kept = (slot < last) | ((slot == last) & ~empty)
        token = tl.minimum(token, logits.vocabulary - 1)  # in range whatever the offsets hold
        nan = tl.maximum(nan, tl.max(((slot <= last) & (key == grid.NAN_KEY)).to(tl.int32)))
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


@jit
def _walk(place, batch, scratch, output, C):
    """A tree: from the text's last token to the child that is the target's token, and on from it.

    A child stands behind its parent, so the slots are looked through once, in blocks.
    """
    size, max_draft = place.size, batch.max_draft
    emitted = _emitted_of(place.request, batch)
    token_ids = output.token_ids + emitted
    path = output.tree_path + (emitted - place.request)
    current = 0
    depth = 0
    # The result of the row that the walk has come to.
    result = (place.first * 0).to(tl.int64)
    nan = 0
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        packed = _results_of(place, scratch, slot)
        if block == 0:
            result = tl.max(tl.where(slot == 0, packed, 0))
        at = grid.drafted_at(place, slot)
        is_draft = (slot > 0) & (slot <= size) & (at >= 0) & (at < batch.drafted)
        guess = tl.load(batch.draft_ids + at, mask=is_draft, other=-1)
        parent = tl.where(is_draft, grid.parent_slot(place, slot, batch), -1)
        child = _child(slot, parent, guess, current, result, size)
        while child <= size:
            key, token = grid.unpack(result)
            nan = tl.maximum(nan, (key == grid.NAN_KEY).to(tl.int32))
            tl.store(token_ids + depth, token)
            tl.store(path + depth, child - 1)
            _store_logprobs(place.first + current, emitted + depth, scratch, output)
            depth += 1
            current = child
            result = tl.max(tl.where(slot == current, packed, 0))
            child = _child(slot, parent, guess, current, result, size)

    key, token = grid.unpack(result)
    nan = tl.maximum(nan, (key == grid.NAN_KEY).to(tl.int32))
    stopped = (key <= grid.EMPTY_KEY).to(tl.int32)
    length = depth + 1 - stopped
    if stopped == 0:
        tl.store(token_ids + depth, token)
        _store_logprobs(place.first + current, emitted + depth, scratch, output)
    for block in range(0, max_draft + 1, C.SLOTS):
        step = block + tl.arange(0, C.SLOTS)
        after = (step >= length) & (step <= max_draft)
        tl.store(token_ids + step, tl.full((C.SLOTS,), -1, tl.int32), mask=after)
        unused = (step >= depth) & (step < max_draft)
        tl.store(path + step, tl.full((C.SLOTS,), -1, tl.int32), mask=unused)
        nothing = tl.full((C.SLOTS,), float("nan"), tl.float32)
        if output.logprobs is not None:
            tl.store(output.logprobs + emitted + step, nothing, mask=after)
        if output.raw_logprobs is not None:
            tl.store(output.raw_logprobs + emitted + step, nothing, mask=after)
    return length, nan, stopped


@jit
def _child(slot, parent, guess, current, result, size):
    """The first of the slots that is a child of `current` with the row's token; else size + 1."""
    key, token = grid.unpack(result)
    chosen = (parent == current) & (guess == token) & (key > grid.EMPTY_KEY)
    return tl.min(tl.where(chosen, slot, size + 1))


@jit
def _store_logprobs(row, place, scratch, output):
    """Writes the log-probabilities of a row's token to a place of what is emitted."""
    if output.logprobs is not None:
        tl.store(output.logprobs + place, _load_shared(scratch.row_logprobs + row, True))
    if output.raw_logprobs is not None:
        tl.store(output.raw_logprobs + place, _load_shared(scratch.row_raw_logprobs + row, True))


@jit
def _load_shared(place, kept):
    """What another program may have left; NaN where it is not kept."""
    return tl.load(place, mask=kept, other=float("nan"), cache_modifier=".cg")
