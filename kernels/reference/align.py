"""Drafts on the device, from text that the host looked up a step or more ago.

A host computes a tree of *trees* for the text that it knew. When the tree arrives, the text
has grown. So the new text is looked for in the tree, and the draft goes on from there. This costs
no wait: what has arrived is used, whatever its age.

Of one row, with a text T of `length` tokens and a tree of T[:base], the draft is the first of these
that has tokens:

1. *Tree.* The tokens T[base:length] are followed down the tree from its root. If all are there, the
   draft goes on below the node that they lead to, to the first child each time. First children are
   the most probable ones, since nodes stand in that order.
2. *Own text.* Of the positions before the last, at most `window` from it, the one with the longest
   match of T's last tokens wins, at least `shortest` of them, and of equal ones the latest, p. The
   draft is T[p + 1:length], repeated as often as needed.
3. *Edit.* If all but the last token are there, that one is taken for a replacement of the token
   that the tree has first in its place, and the draft goes on below that.

The chance of a token, where those before it are right, is in 1 and 3 that of its path as a part of
its parent's, but of the first token in 3 `probabilities[0]`. In 2 it is `probabilities[m]` for the
match's length m, and each token makes the match longer.

Beside the drafts of a *head*, a row takes the one of the two that more tokens are expected of, from
where they first differ. There each is right as often as `head.first` says; behind it the draft's
chances are as above, the head's are `head.acceptance`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft.kernels.operands import Aligned, Head, Scan, Texts, Trees


def align(
    texts: Texts,
    trees: Trees,
    idx_mapping: Tensor,
    num_sampled: Tensor,
    scan: Scan,
    vocabulary: int,
    padding: int | None,
    output: Aligned,
    head: Head | None = None,
) -> Aligned:
    """Writes a draft for each row of a batch into `output`, and returns it.

    idx_mapping: integer (rows,), each row's place in `texts` and `trees`; a row whose place
        is outside drafts nothing, and is padded with 0 where `padding` is None.
    num_sampled: integer (rows,); a row with 0 drafts nothing.
    vocabulary: a draft ends before the first token outside [0, vocabulary).
    padding: what stands after each draft's end; None for the text's last token.

    O(rows * ((reach + lookahead) * nodes + window * longest match)), and no value is read back.
    """
    places, most = texts.token_ids.shape
    inside = (idx_mapping >= 0) & (idx_mapping < places)
    place = torch.where(inside, idx_mapping, 0).long()
    text = _Text(texts.token_ids, place)
    length = torch.where(inside, texts.lengths[place].long().clamp(0, most), 0)
    wanted = torch.minimum(texts.limits[place].long(), most - length)
    wanted = wanted.clamp(0, output.token_ids.shape[1])
    wanted = torch.where((length > 0) & (num_sampled > 0), wanted, 0)

    slots = output.token_ids.shape[1]
    tree = _Tree(trees, texts, place)
    node, expected = tree.walk(text, length, scan.reach)
    in_tree = tree.first_child(node) < tree.nodes
    own_ids, own_chances, found = _own_text(text, length, scan, slots)
    ids, chances, count = tree.follow(torch.where(in_tree, node, expected), slots)
    chances[:, 0] = torch.where(in_tree | (count == 0), chances[:, 0], scan.probabilities[0])
    from_own = (~in_tree & found)[:, None]
    ids = torch.where(from_own, own_ids, ids)
    chances = torch.where(from_own, own_chances, chances)
    count = torch.minimum(torch.where(from_own[:, 0], slots, count), wanted)

    slot = torch.arange(output.token_ids.shape[1], device=length.device)
    foreign = (ids < 0) | (ids >= vocabulary)
    used = (slot < count[:, None]) & (foreign.cumsum(1) == 0)
    last = text.at(length - 1).clamp(min=0)
    after = last if padding is None else torch.full_like(last, padding)
    chances = torch.where(used, chances, 0)
    counts = used.sum(1)
    drafted, of_both = counts, ids[:, :0]
    if head is not None:
        theirs, bins = _beside(head, ids, chances, used)
        drafted = torch.where(theirs, 0, counts)
        of_both = torch.cat([bins[:, None], head.token_ids, torch.where(used, ids, -1)], 1)
        used, counts = used | theirs[:, None], torch.where(theirs, slots, counts)
        ids = torch.where(theirs[:, None], head.token_ids, ids)
        chances = torch.where(theirs[:, None], head.acceptance, chances)
    output.token_ids.copy_(torch.where(used, ids, after[:, None]))
    output.probabilities.copy_(chances)
    output.counts.copy_(counts)
    back = torch.arange(output.ends.shape[1] - 3 - of_both.shape[1], 0, -1, device=place.device)
    tail = text.at(length[:, None] - back)
    emitted = torch.where(inside, num_sampled, 0)
    output.ends.copy_(torch.cat([torch.stack([emitted, length, drafted], 1), of_both, tail], 1))
    return output


def _beside(head: Head, ids: Tensor, chances: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """For each row whether the head's draft is taken, and the bin of `head.first`, -1 for none."""
    most, bins = used.shape[1], head.first.shape[1]
    slot = torch.arange(most, device=ids.device)
    differs = used & (ids != head.token_ids)
    at = torch.where(differs, slot, most).amin(1)
    known = (_at(chances, at.clamp(max=most - 1)) * bins).long().clamp(0, bins - 1)
    first, behind = slot == at[:, None], slot > at[:, None]

    def expected(there: Tensor, chances: Tensor) -> Tensor:
        chances = torch.where(first, there[:, None], torch.where(behind, chances, 1))
        return torch.where(first | behind, chances.cumprod(1), 0).sum(1)

    ours, theirs = (
        expected(head.first[0][known], chances),
        expected(head.first[1][known], head.acceptance.expand_as(chances)),
    )
    return ours <= theirs, torch.where(at < most, known, -1)


class _Text(NamedTuple):
    """The texts of the batch's rows."""

    token_ids: Tensor
    place: Tensor

    def at(self, columns: Tensor) -> Tensor:
        """A row's tokens in its entries of `columns`, (rows,) or (rows, n); -1 before the text."""
        place = self.place if columns.dim() == 1 else self.place[:, None]
        tokens = self.token_ids[place, columns.clamp(0, self.token_ids.shape[1] - 1)].long()
        return torch.where(columns < 0, -1, tokens)


class _Tree:
    """The trees of the batch's rows: (rows, nodes) each."""

    def __init__(self, trees: Trees, texts: Texts, place: Tensor) -> None:
        self.ids = trees.token_ids[place].long()
        rows, self.nodes = self.ids.shape
        self.index = torch.arange(self.nodes, device=place.device).expand(rows, -1)
        # Whatever the values hold, a parent stands before its children.
        parents = trees.parents[place].long()
        self.parents = torch.minimum(parents.clamp(min=-1), self.index - 1)
        self.probabilities = trees.probabilities[place]
        self.base = trees.bases[place].long()
        count = trees.counts[place].clamp(0, self.nodes)
        of_another = trees.requests[place] != texts.requests[place]
        self.count = torch.where(of_another, 0, count)
        self.used = self.index < self.count[:, None]

    def first_child(self, node: Tensor, token: Tensor | None = None) -> Tensor:
        """A node's first child, or its first with a token; `nodes` where there is none: (rows,)."""
        is_child = self.used & (self.parents == node[:, None])
        if token is not None:
            is_child = is_child & (self.ids == token[:, None])
        return torch.where(is_child, self.index, self.nodes).amin(1)

    def walk(self, text: _Text, length: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """The node that what the text has grown by leads to, and the one expected in its place.

        -1 is the root; `nodes`, which has no children, stands for none.
        """
        grown = length - self.base
        usable = (self.base >= 0) & (grown >= 0) & (grown <= reach) & (self.count > 0)
        node = before = torch.full_like(grown, -1)
        walked = torch.zeros_like(grown)
        for step in range(reach):
            child = self.first_child(node, text.at(self.base + step))
            hit = usable & (step < grown) & (walked == step) & (child < self.nodes)
            before = torch.where(hit, node, before)
            node = torch.where(hit, child, node)
            walked = walked + hit
        all_there = usable & (walked == grown)
        almost = usable & (grown > 0) & (walked >= grown - 1)
        expected = self.first_child(torch.where(all_there, before, node))
        return (
            torch.where(all_there, node, self.nodes),
            torch.where(almost, expected, self.nodes),
        )

    def follow(self, node: Tensor, lookahead: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and chances (rows, lookahead) of the first children from `node` down, and counts."""
        ids, chances, count = [], [], torch.zeros_like(node)
        goes_on = torch.ones_like(self.count, dtype=torch.bool)
        for _ in range(lookahead):
            child = self.first_child(node)
            goes_on = goes_on & (child < self.nodes)
            child = torch.where(goes_on, child, 0)
            known = _at(self.probabilities, node.clamp(0, self.nodes - 1))
            before = torch.where(node < 0, 1, known)
            ratio = _at(self.probabilities, child) / before
            ids.append(_at(self.ids, child))
            # NaN, of 0 / 0 too, is no chance.
            chances.append(torch.where(ratio > 0, ratio, 0).clamp(max=1))
            count = count + goes_on
            node = child
        return torch.stack(ids, 1), torch.stack(chances, 1), count


def _own_text(
    text: _Text, length: Tensor, scan: Scan, lookahead: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The draft from the own text: ids, chances (rows, lookahead), and whether there is one."""
    longest = len(scan.probabilities) - 1
    place = (length - 1)[:, None] - 1 - torch.arange(scan.window, device=length.device)
    matched = torch.zeros_like(place)
    matches = place >= 0
    for back in range(longest):
        tail = text.at(length - 1 - back)[:, None]
        matches = matches & (place >= back) & (text.at(place - back) == tail)
        matched = matched + matches
    matched = torch.where(matched >= scan.shortest, matched, 0)
    best = matched.amax(1)
    # The latest place is the first here.
    nearest = torch.where(matched == best[:, None], -place, length[:, None]).amin(1)
    period = length - 1 + nearest
    slot = torch.arange(lookahead, device=length.device)
    where = 1 - nearest[:, None] + slot % period.clamp(min=1)[:, None]
    found = best > 0
    ids = text.at(torch.where(found[:, None], where, 0))
    chances = scan.probabilities[(best[:, None] + slot).clamp(max=longest)]
    return ids, chances, found


def _at(values: Tensor, column: Tensor) -> Tensor:
    return values.gather(1, column[:, None])[:, 0]
