"""Drafts on the device, from text that the host looked up a step or more ago.

A host computes a tree of *trees* for the text that it knew. When the tree arrives, the text
has grown. So the new text is looked for in the tree, and the draft goes on from there. This costs
no wait: what has arrived is used, whatever its age.

Of one row, with text T of `length` tokens, a tree of T[:base] and at most k tokens to draft:

    suffix(v) = the most tokens at the end of the path to node v that are also T's last ones
    score(v)  = nodes + 1     if the path to v is T[base:length]
                suffix(v)     else, if that is at least `shortest_path`
                0             else, and where v has no children

The draft follows the node of the largest score above 0, and of equal ones the first, down to the
first child each time. The first ones are the most probable, since nodes stand in that order. If
T has not grown, length = base, the draft starts at the root.

If no node is found, T's last tokens are looked for in T itself. Of the positions p before the last,
at most `window` from it, the one after the longest match of `shortest` tokens or more wins, and of
equal ones the latest. The draft is T[p + 1:length], repeated as often as needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft.kernels.operands import Aligned, Scan, Texts, Trees


def align(
    texts: Texts,
    trees: Trees,
    idx_mapping: Tensor,
    num_sampled: Tensor,
    scan: Scan,
    vocabulary: int,
    padding: int | None,
    output: Aligned,
) -> Aligned:
    """Writes a draft for each row of a batch into `output`, and returns it.

    idx_mapping: integer (rows,), each row's place in `texts` and `trees`; a row whose place
        is outside drafts nothing, and is padded with 0 where `padding` is None.
    num_sampled: integer (rows,); a row with 0 drafts nothing.
    vocabulary: a draft ends before the first token outside [0, vocabulary).
    padding: what stands after each draft's end; None for the text's last token.

    O(rows * (nodes**2 + window * longest match)), and no value is read back.
    """
    places, most = texts.token_ids.shape
    inside = (idx_mapping >= 0) & (idx_mapping < places)
    place = torch.where(inside, idx_mapping, 0).long()
    text = _Text(texts.token_ids, place)
    length = torch.where(inside, texts.lengths[place].long().clamp(0, most), 0)
    wanted = torch.minimum(texts.limits[place].long(), most - length)
    wanted = wanted.clamp(0, output.token_ids.shape[1])
    wanted = torch.where((length > 0) & (num_sampled > 0), wanted, 0)

    tree = _Tree(trees, texts, place)
    node, reached = tree.find(text, length, scan.shortest_path)
    ids, chances, count = tree.follow(node, output.token_ids.shape[1])
    found = _own_text(text, length, scan, output.token_ids.shape[1])
    ids = torch.where(reached[:, None], ids, found[0])
    chances = torch.where(reached[:, None], chances, found[1])
    count = torch.minimum(torch.where(reached, count, found[2]), wanted)

    slot = torch.arange(output.token_ids.shape[1], device=length.device)
    foreign = (ids < 0) | (ids >= vocabulary)
    used = (slot < count[:, None]) & (foreign.cumsum(1) == 0)
    last = text.at(length - 1).clamp(min=0)
    after = last if padding is None else torch.full_like(last, padding)
    output.token_ids.copy_(torch.where(used, ids, after[:, None]))
    output.probabilities.copy_(torch.where(used, chances, 0))
    output.counts.copy_(used.sum(1))
    back = torch.arange(output.ends.shape[1] - 3, 0, -1, device=place.device)
    tail = text.at(length[:, None] - back)
    emitted = torch.where(inside, num_sampled, 0)
    output.ends.copy_(torch.cat([torch.stack([emitted, length, output.counts], 1), tail], 1))
    return output


class _Text(NamedTuple):
    """The texts of the batch's rows."""

    token_ids: Tensor
    place: Tensor

    def at(self, columns: Tensor) -> Tensor:
        """A row's tokens in its entries of `columns`, (rows,) or (rows, n); -1 before the text."""
        place = self.place if columns.dim() == 1 else self.place[:, None]
        tokens = self.token_ids[place, columns.clamp(min=0)].long()
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
        # One more column, for the children of the root.
        self.is_parent = torch.zeros(rows, self.nodes + 1, dtype=torch.bool, device=place.device)
        self.is_parent.scatter_reduce_(1, self.parents + 1, self.used, "amax")

    def find(self, text: _Text, length: Tensor, shortest_path: int) -> tuple[Tensor, Tensor]:
        """The node that the draft follows, -1 for the root, and whether there is one: (rows,)."""
        suffix = torch.zeros_like(self.index)
        ends_at_root = torch.zeros_like(self.used)
        current, matches = self.index, self.used
        for back in range(self.nodes):
            token = text.at(length - 1 - back)[:, None]
            matches = matches & (self.ids.gather(1, current) == token)
            suffix = suffix + matches
            above = self.parents.gather(1, current)
            ends_at_root = ends_at_root | (matches & (above < 0))
            matches = matches & (above >= 0)
            current = above.clamp(min=0)
        whole = ends_at_root & (suffix == (length - self.base)[:, None])
        score = torch.where(suffix >= shortest_path, suffix, 0)
        score = torch.where(whole, self.nodes + 1, score)
        score = torch.where(self.is_parent[:, 1:], score, 0)
        best, node = score.max(1)
        node = torch.where(score == best[:, None], self.index, self.nodes).amin(1)
        at_root = (length == self.base) & (self.count > 0)
        return torch.where(at_root, -1, node), at_root | (best > 0)

    def follow(self, node: Tensor, lookahead: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and chances (rows, lookahead) of the first children from `node` down, and counts."""
        ids, chances, count = [], [], torch.zeros_like(node)
        goes_on = torch.ones_like(self.count, dtype=torch.bool)
        for _ in range(lookahead):
            is_child = self.used & (self.parents == node[:, None])
            child = torch.where(is_child, self.index, self.nodes).amin(1)
            goes_on = goes_on & (child < self.nodes)
            child = torch.where(goes_on, child, 0)
            before = torch.where(node < 0, 1, _at(self.probabilities, node.clamp(min=0)))
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
    """The draft from the row's own text: ids, chances (rows, lookahead) and counts (rows,)."""
    place = (length - 1)[:, None] - 1 - torch.arange(scan.window, device=length.device)
    matched = torch.zeros_like(place)
    matches = place >= 0
    for back in range(len(scan.probabilities)):
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
    chance = scan.probabilities[(best - 1).clamp(min=0)][:, None].expand_as(ids)
    return ids, chance, torch.where(found, lookahead, 0)


def _at(values: Tensor, column: Tensor) -> Tensor:
    return values.gather(1, column[:, None])[:, 0]
