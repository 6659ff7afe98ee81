"""What the target's tokens make of a draft: the accepted tokens, then the target's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastdraft.kernels.operands import Batch, Sampling, Status, Verified
from fastdraft.kernels.reference.sampling import (
    Chosen,
    argmax,
    draw,
    likeliest_of,
    reads_back,
)
from fastdraft.kernels.reference.trees import tree_depths

# numpy's argmax has vector instructions for these, PyTorch's has none. Of more logits, several
# threads find the maxima sooner.
_NUMPY: Final = (torch.float32, torch.float64)
_FEW: Final = 1 << 23


def verify_greedy(batch: Batch) -> Verified:
    """Greedy verification."""
    logits, allowed, likeliest = batch.logits, batch.allowed, batch.likeliest
    is_plain = allowed is None and not (batch.logprobs or batch.raw_logprobs)
    if is_plain and reads_back(logits) and logits.dtype in _NUMPY and logits.numel() <= _FEW:
        values = logits.numpy(force=True)
        tokens = values.argmax(1).tolist()
        emitted = _walk(tokens, lambda row: values.item(row, tokens[row]), batch)
    else:
        emitted = emit(argmax(logits, allowed, **batch.wanted), batch)
    if not likeliest:
        return emitted
    return emitted._replace(likeliest=likeliest_of(logits, likeliest, allowed=allowed))


def verify_sampled(batch: Batch, sampling: Sampling) -> Verified:
    """Sampled verification of drafts without probabilities.

    One draw a row, kept while it is the draft's token: a token d is accepted with the target's own
    probability p(d), and a recovered token follows p without d, which is the distribution of
    rejection sampling for a certain draft, with nothing wasted; of the children of one parent in a
    tree, all together are accepted with the target's probability of the set. The noise of a row is
    that of the position which its token would take: that of the text's next token plus the depth of
    the row's slot. So what is emitted is the same with any draft, chain or tree, and with none.
    """
    request, depth = rows_of(len(batch.logits), batch.offsets)
    if batch.parents is not None:
        depths = tree_depths(batch.parents, batch.offsets, max_draft=batch.max_draft)
        depth = depths[request, depth.clamp(max=batch.max_draft)]
    of_rows = sampling.of(request)
    of_rows = of_rows._replace(positions=of_rows.positions + depth)
    emitted = emit(draw(batch.logits, of_rows, batch.allowed, **batch.wanted), batch)
    if not batch.likeliest:
        return emitted
    temperature = of_rows.warpers.temperature
    return emitted._replace(
        likeliest=likeliest_of(batch.logits, batch.likeliest, temperature, allowed=batch.allowed)
    )


def emit(chosen: Chosen, batch: Batch) -> Verified:
    """What is emitted where the target chose these tokens, one for each row of the batch.

    Reads the tokens back from a device.
    """
    tokens, maxima, *logprobs = chosen
    return _walk(tokens.tolist(), maxima.tolist().__getitem__, batch, *logprobs)


def _walk(
    tokens: list[int],
    maximum_of: Callable[[int], float],
    batch: Batch,
    logprobs: Tensor | None = None,
    raw_logprobs: Tensor | None = None,
) -> Verified:
    """`emit`, with the tokens and the maximum of a row on the host.

    The walk through a draft begins at the text's last token. The target's token in the row of
    where it stands is emitted; the first child that is this token is where it stands next, and
    without one it ends. It also ends before an empty row. So the draft's tokens are compared up to
    the first mismatch, and rows after that are no part of the text. A draft is looked at up to
    max_draft tokens.
    """
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
            token, maximum = tokens[row], maximum_of(row)
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
        of_rows(logprobs),
        of_rows(raw_logprobs),
    )


def _padded(lists: list[list[int]], columns: int, device: torch.device) -> Tensor:
    """int32 (lists, columns), -1 after the end of each list."""
    return _placed([each + [-1] * (columns - len(each)) for each in lists], device)


def _placed(numbers: list[Any], device: torch.device) -> Tensor:
    values = torch.from_numpy(np.array(numbers, np.int32))
    return values if device.type == "cpu" else values.to(device)


def rows_of(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The request and the slot in it that each row stands for, int64 (rows,) both.

    Rows beyond the last request's are taken for its slots too.
    """
    row = torch.arange(rows, device=offsets.device)
    first = offsets[:-1] + torch.arange(len(offsets) - 1, device=offsets.device)
    request = torch.searchsorted(first, row, right=True) - 1
    return request, row - first[request]
