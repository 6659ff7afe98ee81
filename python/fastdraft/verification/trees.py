"""The layout of drafts that are trees in a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from fastdraft.kernels import trees
from fastdraft.verification.checks import check_tensor, check_tree


@torch.no_grad()
def tree_depths(parents: Tensor, offsets: Tensor, *, max_draft: int | None = None) -> Tensor:
    """The depth of each token of the forward that verifies the drafts, on the parents' device.

    int64 (requests, max_draft + 1): 0 for the text's last token, then for each draft token how many
    draft tokens lead to it, itself included, which is by how much its position is further on;
    0 past the draft.

    parents, offsets and max_draft are as in `verify_greedy`, and checked as there.
    """
    offsets, max_draft = check_tree(parents, offsets, max_draft)
    return trees.depths(parents, offsets, max_draft=max_draft)


@torch.no_grad()
def tree_attention_mask(
    parents: Tensor, offsets: Tensor, *, max_draft: int | None = None
) -> Tensor:
    """Which tokens of the forward that verifies the drafts see which, on the parents' device.

    bool (requests, max_draft + 1, max_draft + 1): [b, i, j] is True where token i may look at token
    j, token 0 being the text's last one and token j + 1 draft token j. The text before them, which
    all see, is not part of it. A token past the draft sees itself alone.

    parents, offsets and max_draft are as in `verify_greedy`, and checked as there. Memory and time
    grow with the square of max_draft.
    """
    offsets, max_draft = check_tree(parents, offsets, max_draft)
    parent = trees.parent_slots(parents, offsets, max_draft=max_draft)
    slots = parent.shape[1]
    seen = torch.eye(slots, dtype=torch.bool, device=parent.device).expand(len(parent), -1, -1)
    for ancestor in trees.doubled(parent):
        seen = seen | seen.gather(1, ancestor[:, :, None].expand(-1, -1, slots))
    return seen


@torch.no_grad()
def compaction_indices(path: Tensor) -> Tensor:
    """Which slot's keys and values each slot has to take over for the accepted text to be in order.

    int64 (requests, max_draft + 1), on the path's device: 0 for the text's last token, the slots of
    the path in its order, then each slot's own number. Nothing is taken from a slot before the
    one that takes it.

    path: int32 (requests, max_draft), `Verified.path`.

    Raises:
        InvalidValueError: it is none.
    """
    check_tensor("path", path, (torch.int32,), dimensions=2)
    slot = torch.arange(path.shape[1] + 1, device=path.device).expand(len(path), -1)
    accepted = torch.nn.functional.pad(path.long() + 1, (1, 0))
    return torch.where(accepted > 0, accepted, slot)
