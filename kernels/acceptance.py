"""Acceptance of a draft by the target's tokens: the accepted ones, then the target's own.

The walk through a draft begins at the text's last token. The target's token in the row of where it
stands is emitted; the first child that is this token is where it stands next, and without one it
ends. In a chain, each token's parent is the one before it. The walk also ends before an empty row.
So the draft's tokens are compared up to the first mismatch, and rows after that are no part of the
text. A draft is looked at up to max_draft tokens.

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
    raw_logprobs: the same under the softmax of the unchanged logits, with all tokens allowed.
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
    """The emitted tokens if the target chose these, one for each row of the batch.

    Reads the tokens back from a device, where there are drafts.
    """
    if not batch.max_draft and not len(batch.draft_ids):
        return _without_drafts(chosen, batch)
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
        _padded(paths, max_draft, device),
        of_rows(chosen.logprobs),
        of_rows(chosen.raw_logprobs),
    )


def _without_drafts(chosen: Chosen, batch: Batch) -> Verified:
    """`emit` where nothing was drafted: the first row of each request decides."""
    requests = batch.requests
    tokens, maxima = chosen.tokens[:requests].tolist(), chosen.maxima[:requests].tolist()
    nan, empty = int(Status.NAN), int(Status.EMPTY)
    found = [
        (-1, 0, empty) if maximum == -math.inf else (token, 1, nan * (maximum != maximum))
        for token, maximum in zip(tokens, maxima, strict=True)
    ]
    numbers = _placed(list(zip(*found, strict=True)), batch.logits.device)
    said, lengths, status = numbers.unbind()

    def of_rows(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return torch.where(lengths == 0, torch.nan, values[:requests])[:, None]

    return Verified(
        said.unsqueeze(1),
        lengths,
        status,
        numbers.new_empty((requests, 0)),
        of_rows(chosen.logprobs),
        of_rows(chosen.raw_logprobs),
    )


def _padded(lists: list[list[int]], columns: int, device: torch.device) -> Tensor:
    """int32 (lists, columns), -1 after the end of each list."""
    return _placed([each + [-1] * (columns - len(each)) for each in lists], device)


def _placed(numbers: Any, device: torch.device) -> Tensor:
    """Numbers as int32, on a device."""
    values = torch.from_numpy(np.array(numbers, np.int32))
    return values if device.type == "cpu" else values.to(device)


@jit
def accept(location, batch, logits, scratch, output, C):
    """Writes a request's emitted tokens; location: that of any of its rows.

    A child stands behind its parent, so the slots are looked through once, in blocks.
    """
    size, max_draft = location.size, batch.max_draft
    emitted = location.request.to(tl.int64) * (max_draft + 1)
    path = output.path + (emitted - location.request)
    current = 0
    depth = 0
    # The result of the row that the walk has come to.
    result = (location.first * 0).to(tl.int64)
    nan = 0
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        results = scratch.row_results + location.first + slot
        packed = tl.load(results, mask=slot <= size, other=0, cache_modifier=".cg")
        if block == 0:
            result = tl.max(tl.where(slot == 0, packed, 0))
        at = grid.drafted_at(location, slot)
        is_draft = (slot > 0) & (slot <= size) & (at >= 0) & (at < batch.drafted)
        guess = tl.load(batch.draft_ids + at, mask=is_draft, other=-1)
        parent = tl.where(is_draft, grid.parent_slot(location, slot, batch), -1)
        child = _child(slot, parent, guess, current, result, size)
        while child <= size:
            nan = tl.maximum(nan, _is_nan(result))
            _store_emitted(
                result, location.first + current, emitted + depth, logits, scratch, output
            )
            tl.store(path + depth, child - 1)
            depth += 1
            current = child
            result = tl.max(tl.where(slot == current, packed, 0))
            child = _child(slot, parent, guess, current, result, size)

    nan = tl.maximum(nan, _is_nan(result))
    key, _ = grid.unpack(result)
    stopped = (key <= grid.EMPTY_KEY).to(tl.int32)
    length = depth + 1 - stopped
    if stopped == 0:
        _store_emitted(result, location.first + current, emitted + depth, logits, scratch, output)
    for block in range(0, max_draft + 1, C.SLOTS):
        step = block + tl.arange(0, C.SLOTS)
        after = (step >= length) & (step <= max_draft)
        missing = tl.full((C.SLOTS,), -1, tl.int32)
        tl.store(output.token_ids + emitted + step, missing, mask=after)
        tl.store(path + step, missing, mask=(step >= depth) & (step < max_draft))
        nothing = tl.full((C.SLOTS,), float("nan"), tl.float32)
        if output.logprobs is not None:
            tl.store(output.logprobs + emitted + step, nothing, mask=after)
        if output.raw_logprobs is not None:
            tl.store(output.raw_logprobs + emitted + step, nothing, mask=after)
    tl.store(output.lengths + location.request, length)
    tl.store(output.status + location.request, nan * _NAN + stopped * _EMPTY)


@jit
def _child(slot, parent, guess, current, result, size):
    """The first of the slots that is a child of `current` with the row's token; else size + 1."""
    key, token = grid.unpack(result)
    chosen = (parent == current) & (guess == token) & (key > grid.EMPTY_KEY)
    return tl.min(tl.where(chosen, slot, size + 1))


@jit
def _is_nan(result):
    key, _ = grid.unpack(result)
    return (key == grid.NAN_KEY).to(tl.int32)


@jit
def _store_emitted(result, row, index, logits, scratch, output):
    """Writes a row's token and its log-probabilities to an index of what is emitted."""
    _, token = grid.unpack(result)
    # In range whatever the offsets hold.
    tl.store(output.token_ids + index, tl.minimum(token, logits.vocabulary - 1))
    if output.logprobs is not None:
        value = tl.load(scratch.row_logprobs + row, cache_modifier=".cg")
        tl.store(output.logprobs + index, value)
    if output.raw_logprobs is not None:
        value = tl.load(scratch.row_raw_logprobs + row, cache_modifier=".cg")
        tl.store(output.raw_logprobs + index, value)
