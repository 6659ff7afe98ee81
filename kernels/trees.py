"""Which draft tokens lead to which.

A request's *slots* are the text's last token, slot 0, and its draft tokens, token j in
slot j + 1; they are what a target forward runs over and the logits' rows stand for. `parents`
gives for each draft token the index of its parent within the draft, -1 for the text's last
token; a parent stands before its children. Whatever the values hold, a parent is taken for one
of the slots before its child. Questions about ancestors are answered by doubling: what holds for
a slot and its 2**k - 1 nearest ancestors follows from what holds for half as many of them, here
and at the ancestor half way up. So no value is read back from a device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def depths(parents: Tensor, offsets: Tensor, *, max_draft: int) -> Tensor:
    """How many draft tokens lead to each slot, itself included: int64 (requests, max_draft + 1).

    The depth is what a token's position has over that of the text's last token. 0 for the
    text's last token, and in slots past the draft. For a chain, 0, 1, 2, ...

    parents: integer (drafted,); offsets: int64 (requests + 1,). A draft is looked at up to
    max_draft tokens.
    """
    parent = parent_slots(parents, offsets, max_draft=max_draft)
    depth = (parent != torch.arange(parent.shape[1], device=parent.device)).long()
    for ancestor in doubled(parent):
        depth = depth + depth.gather(1, ancestor)
    return depth


def parent_slots(parents: Tensor, offsets: Tensor, *, max_draft: int) -> Tensor:
    """The parent of each slot as a slot, int64 (requests, max_draft + 1).

    The text's last token and slots past the draft are their own parents.
    """
    slot = torch.arange(max_draft + 1, device=parents.device)
    first = offsets[:-1, None]
    used = (slot > 0) & (slot <= offsets[1:, None] - first)
    # One more value, so that there is something to look at where nothing is drafted.
    bounded = torch.nn.functional.pad(parents.long().clamp(-1, max_draft) + 1, (0, 1))
    parent = bounded[torch.where(used, first + slot - 1, len(parents))]
    return torch.where(used, parent.minimum((slot - 1).clamp(min=0)), slot)


def doubled(parent: Tensor) -> Iterator[Tensor]:
    """The ancestor 1, 2, 4, ... generations up of each slot, until all have come to the root."""
    for _ in range((parent.shape[1] - 1).bit_length()):
        yield parent
        parent = parent.gather(1, parent)
