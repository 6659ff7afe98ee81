"""What the target's tokens make of a draft: the accepted tokens, then the target's own."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fastdraft.kernels.operands import Batch, Emitted, Likeliest, Sampling, Status
from fastdraft.kernels.reference import sampling
from fastdraft.kernels.reference.sampling import (
    Chosen,
    argmax,
    argmax_on_host,
    draw,
    likeliest_of,
)
from fastdraft.kernels.reference.trees import doubled, in_slots, parent_slots, tree_depths


def verify_greedy(batch: Batch) -> Emitted:
    """Greedy verification."""
    if batch.allowed is None and not (batch.logprobs or batch.raw_logprobs or batch.likeliest):
        found = argmax_on_host(batch.logits)
        if found is not None:
            tokens, maxima = found
            return Emitted(*_walk(tokens.tolist(), maxima.tolist(), batch), None, None)
    emitted = emit(argmax(batch.logits, batch.allowed, **batch.wanted), batch)
    if not batch.likeliest:
        return emitted
    return emitted._replace(
        likeliest=likeliest_of(batch.logits, batch.likeliest, allowed=batch.allowed)
    )


def verify_sampled(batch: Batch, sampling: Sampling) -> Emitted:
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


def choose(
    logits: Tensor, sampling: Sampling | None, *, likeliest: int = 0
) -> tuple[Tensor, Likeliest | None]:
    """The target's own token of each row of logits, integers (rows,), -1 for an empty row.

    sampling: of rows; None for the largest logit. What the operations above compare drafts with,
    for a loop that compares them on the host. Beside it, so many of each row's likeliest tokens;
    None for none.
    """
    if sampling is None and not likeliest and (found := argmax_on_host(logits)) is not None:
        # One call of PyTorch: the loop asks for this at every step.
        token_ids, maxima = found
        token_ids[maxima == -torch.inf] = -1
        return torch.from_numpy(token_ids), None
    chosen = argmax(logits) if sampling is None else draw(logits, sampling)
    tokens = chosen.tokens.masked_fill(chosen.maxima == -torch.inf, -1)
    if not likeliest:
        return tokens, None
    temperature = None if sampling is None else sampling.warpers.temperature
    return tokens, likeliest_of(logits, likeliest, temperature)


def emit(chosen: Chosen, batch: Batch) -> Emitted:
    """What is emitted where the target chose these tokens, one for each row of the batch."""
    path = None
    operands = chosen.tokens, chosen.maxima, batch.draft_ids, batch.offsets
    if sampling.reads_back(chosen.tokens):
        token_ids, lengths, status, path = _walk(
            chosen.tokens.tolist(), chosen.maxima.tolist(), batch
        )
    elif batch.parents is None:
        token_ids, lengths, status = accept(*operands, max_draft=batch.max_draft)
    else:
        token_ids, lengths, status, path = accept_tree(
            *operands, batch.parents, max_draft=batch.max_draft
        )

    def of_emitted(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        rows = emitted_rows(batch.offsets, path, max_draft=batch.max_draft)
        step = torch.arange(rows.shape[1], device=values.device)
        return torch.where(
            step < lengths[:, None], values[rows.clamp(max=len(values) - 1)], torch.nan
        )

    logprobs, raw_logprobs = map(of_emitted, (chosen.logprobs, chosen.raw_logprobs))
    return Emitted(token_ids, lengths, status, path, logprobs, raw_logprobs)


def _walk(
    tokens: list[int], maxima: list[float], batch: Batch
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`accept`, or `accept_tree`, token by token, as a CPU does little sooner than all at once."""
    drafts, starts = batch.draft_ids.tolist(), batch.offsets.tolist()
    parents = None if batch.parents is None else batch.parents.tolist()
    token_ids: list[list[int]] = []
    lengths: list[int] = []
    status: list[int] = []
    paths: list[list[int]] = []
    for request, (start, end) in enumerate(pairwise(starts)):
        size = min(end - start, batch.max_draft)
        emitted: list[int] = []
        path: list[int] = []
        met = 0
        node = -1
        while True:
            line = start + request + node + 1
            token, maximum = tokens[line], maxima[line]
            if maximum == -math.inf:
                met |= Status.EMPTY
                break
            if maximum != maximum:
                met |= Status.NAN
            emitted.append(token)
            # The first child of the node that is the token; in a chain, there is one.
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
                break
        lengths.append(len(emitted))
        status.append(met)
        token_ids.append(emitted + [-1] * (batch.max_draft + 1 - len(emitted)))
        paths.append(path + [-1] * (batch.max_draft - len(path)))
    return (
        torch.from_numpy(np.array(token_ids, np.int32)),
        torch.from_numpy(np.array(lengths, np.int32)),
        torch.from_numpy(np.array(status, np.int32)),
        None if parents is None else torch.from_numpy(np.array(paths, np.int32)),
    )


def rows_of(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The request and the slot in it that each row stands for, int64 (rows,) both.

    Rows beyond the last request's are taken for its slots too.
    """
    row = torch.arange(rows, device=offsets.device)
    first = offsets[:-1] + torch.arange(len(offsets) - 1, device=offsets.device)
    request = torch.searchsorted(first, row, right=True) - 1
    return request, row - first[request]


def emitted_rows(offsets: Tensor, path: Tensor | None, *, max_draft: int) -> Tensor:
    """The row that each emitted token comes from, int64 (requests, max_draft + 1).

    path: as `accept_tree` gives it, None for chains. After a tree's last token, the row is that of
    the text's last token; after a chain's it may be another request's, or none.
    """
    root = offsets[:-1] + torch.arange(len(offsets) - 1, device=offsets.device)
    if path is None:
        return root[:, None] + torch.arange(max_draft + 1, device=offsets.device)
    return root[:, None] + torch.nn.functional.pad(path.long() + 1, (1, 0))


def accept(
    tokens: Tensor, maxima: Tensor, draft_ids: Tensor, offsets: Tensor, *, max_draft: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compares the target's tokens with the drafts and keeps what plain decoding would emit.

    tokens, maxima: (rows,), the target's token in each row and the row's largest logit, rows laid
    out as in a `Batch`; rows beyond the last request's are ignored. Emitted are the
    draft tokens up to the first that is not the target's, then the target's own token there
    (recovered, or bonus after a whole draft). An empty row that is reached ends the tokens before
    it. A draft is looked at up to max_draft tokens.

    Gives token_ids int32 (requests, max_draft + 1), -1 after the end; lengths int32 (requests,);
    status int32 (requests,), of the rows reached alone: what follows a refused token is no part of
    the text.
    """
    first = offsets[:-1, None]
    size = (offsets[1:, None] - first).clamp(max=max_draft)
    step = torch.arange(max_draft + 1, device=tokens.device)
    row = (first + torch.arange(len(first), device=tokens.device)[:, None] + step).clamp(
        max=len(tokens) - 1
    )
    emitted = tokens[row]
    # One more id, so that there is something to look at where nothing is drafted.
    drafted = torch.nn.functional.pad(draft_ids, (0, 1), value=-1)[
        torch.where(step < size, first + step, len(draft_ids))
    ]
    empty = (maxima == -torch.inf)[row]
    accepted = (emitted == drafted) & (step < size) & ~empty
    last = accepted.cumprod(1).sum(1, keepdim=True)
    stopped = empty.gather(1, last)
    length = last + 1 - stopped.long()
    nan = (maxima.isnan()[row] & (step <= last)).any(1)
    return (
        torch.where(step < length, emitted, -1).int(),
        length[:, 0].int(),
        (nan * Status.NAN + stopped[:, 0] * Status.EMPTY).int(),
    )


def accept_tree(
    tokens: Tensor,
    maxima: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    parents: Tensor,
    *,
    max_draft: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compares the target's tokens with drafts that are trees, and keeps one path of each.

    As `accept`, but a slot's token is compared with the target's token in its parent's slot. The
    slots that are the target's choice all the way from the text's last token are a path, as
    siblings have different tokens; where they do not, the earlier of two slots of one depth counts.
    The path's tokens are emitted, then the target's own token after its last one.

    Gives what `accept` gives, and the path, int32 (requests, max_draft): the accepted draft tokens
    as indices within the draft, -1 after the last. O(max_draft log max_draft) a request.
    """
    parent = parent_slots(parents, offsets, max_draft=max_draft)
    slots = parent.shape[1]
    slot = torch.arange(slots, device=tokens.device)
    root = offsets[:-1, None] + torch.arange(len(parent), device=tokens.device)[:, None]
    row = (root + slot).clamp(max=len(tokens) - 1)
    target = tokens[row]
    empty = (maxima == -torch.inf)[row]

    is_draft = parent != slot
    drafted = in_slots(draft_ids, offsets, max_draft=max_draft, fill=-1)
    on_path = (drafted == target.gather(1, parent)) & ~empty.gather(1, parent) & is_draft
    on_path[:, 0] = True
    depth = is_draft.long()
    for ancestor in doubled(parent):
        on_path = on_path & on_path.gather(1, ancestor)
        depth = depth + depth.gather(1, ancestor)

    # The path's slot at each depth. What is not on it goes to a column that is cut off.
    at_depth = torch.full((len(parent), slots + 1), slots, device=tokens.device).scatter_reduce_(
        1, torch.where(on_path, depth, slots), slot.expand_as(parent), "amin"
    )[:, :slots]
    last = torch.where(on_path, depth, 0).amax(1, keepdim=True)
    reached = slot <= last
    at_depth = torch.where(reached, at_depth, 0)
    stopped = empty.gather(1, at_depth.gather(1, last))
    length = last + 1 - stopped.long()
    nan = (maxima.isnan()[row].gather(1, at_depth) & reached).any(1)
    return (
        torch.where(slot < length, target.gather(1, at_depth), -1).int(),
        length[:, 0].int(),
        (nan * Status.NAN + stopped[:, 0] * Status.EMPTY).int(),
        torch.where(reached, at_depth - 1, -1)[:, 1:].int(),
    )
