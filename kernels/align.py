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
   that the tree expects there, and the draft goes on below that.

The probability of a token, if those before it are right, is in 1 and 3 that of its path as a part
of its parent's, but of the first token in 3 `probabilities[0]`. In 2 it is `probabilities[m]` for
the match's length m, and each token makes the match longer.

Beside the drafts of a *head*, a row takes the one of the two that more tokens are expected of, from
where they first differ. There each is right as often as `head.first` says; behind it the draft's
probabilities are as above, the head's are `head.acceptance`.

On a device there is one program a row. A tree is held in registers, and a node's child is found
among all nodes at once. The own text is looked through only where the tree has nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.kernels import config, language
from fastdraft.kernels.language import jit, next_power_of_2, tl
from fastdraft.kernels.operands import Aligned, Alignment, Scan, width_beside_head

# Tokens, each with its probability if those before it are right.
_Draft = list[tuple[int, float]]


def align(batch: Alignment, output: Aligned) -> Aligned:
    """Writes a draft for each row of a batch into `output`, and returns it.

    O(rows * ((reach + lookahead) * nodes + window * longest match)). Where there is a kernel, one
    launch, and no value is read back.
    """
    version = launch if language.has_kernels(batch.texts.token_ids) else plain
    return version(batch, output)


def plain(batch: Alignment, output: Aligned) -> Aligned:
    """The definition, row by row: it reads the operands back."""
    texts, trees, idx_mapping, num_sampled, scan, vocabulary, head = batch
    token_ids, lengths, numbers, limits = (each.numpy(force=True) for each in texts)
    bases, counts, *nodes, tree_numbers = (each.numpy(force=True) for each in trees)
    by_match = scan.probabilities.tolist()
    (capacity, longest), lookahead = token_ids.shape, output.token_ids.shape[1]
    rows: list[tuple[list[int], list[float], int, list[int]]] = []
    for row, (entry, sampled) in enumerate(
        zip(idx_mapping.tolist(), num_sampled.tolist(), strict=True)
    ):
        text, draft = token_ids[0, :0], _Draft()
        is_inside = 0 <= entry < capacity
        if is_inside:
            text = token_ids[entry, : max(min(int(lengths[entry]), longest), 0)]
            most = min(int(limits[entry]), longest - len(text), lookahead)
            if len(text) and sampled > 0 and most > 0:
                count = max(int(counts[entry]), 0) if tree_numbers[entry] == numbers[entry] else 0
                tree = _Tree(int(bases[entry]), *(each[entry, :count].tolist() for each in nodes))
                draft = _draft_of(text, tree, most, by_match, scan)
        foreign = (at for at, (token, _) in enumerate(draft) if not 0 <= token < vocabulary)
        draft = draft[: next(foreign, len(draft))]
        ids, probabilities = [token for token, _ in draft], [each for _, each in draft]
        after = max(int(text[-1]), 0) if len(text) else 0
        counted = drafted = len(draft)
        both: list[int] = []
        if head is not None:
            theirs = head.token_ids[row].tolist()
            acceptance, first = head.acceptance.tolist(), head.first.tolist()
            is_theirs, chosen = _compare(draft, theirs, acceptance, first)
            both = [chosen, *theirs, *ids, *[-1] * (lookahead - drafted)]
            if is_theirs:
                ids, probabilities, counted, drafted = theirs, acceptance, lookahead, 0
        tail = output.ends.shape[1] - 3 - len(both)
        end = [-1] * max(tail - len(text), 0) + text[max(len(text) - tail, 0) :].tolist()
        rest = lookahead - counted
        rows.append(
            (
                ids + [after] * rest,
                probabilities + [0.0] * rest,
                counted,
                [sampled if is_inside else 0, len(text), drafted, *both, *end],
            )
        )
    for to, values in zip(output, zip(*rows, strict=True), strict=True):
        to.copy_(torch.tensor(values, dtype=to.dtype))
    return output


class _Tree:
    """A row's tree; whatever its parents hold, one stands before its children."""

    def __init__(
        self, base: int, token_ids: list[int], parents: list[int], probabilities: list[float]
    ) -> None:
        self.base, self.token_ids, self.probabilities = base, token_ids, probabilities
        # The first child of each node, -1 being the root, and its first with each token.
        self.first: dict[int, int] = {}
        self.first_with: dict[tuple[int, int], int] = {}
        for node in reversed(range(len(token_ids))):
            parent = min(max(parents[node], -1), node - 1)
            self.first[parent] = node
            self.first_with[parent, token_ids[node]] = node

    def walk(self, tokens: list[int]) -> int | None:
        """The node that the tokens lead to from the root; None where they leave the tree."""
        node: int | None = -1
        for token in tokens:
            node = None if node is None else self.first_with.get((node, token))
        return node

    def below(self, node: int, most: int) -> _Draft:
        """The first children from a node down."""
        draft = _Draft()
        before = 1.0 if node < 0 else self.probabilities[node]
        while len(draft) < most and node in self.first:
            node = self.first[node]
            probability = self.probabilities[node]
            ratio = probability / before if before else 0.0
            draft.append((self.token_ids[node], min(ratio, 1.0) if ratio > 0 else 0.0))
            before = probability
        return draft


def _draft_of(
    text: NDArray[np.int32], tree: _Tree, most: int, by_match: list[float], scan: Scan
) -> _Draft:
    """The draft of a text: from the tree, else from the text, else after an edit."""
    grown = len(text) - tree.base
    is_usable = bool(tree.first) and tree.base >= 0 and 0 <= grown <= scan.reach
    emitted = text[tree.base :].tolist() if is_usable else []
    if is_usable and (node := tree.walk(emitted)) is not None:
        draft = tree.below(node, most)
        if draft:
            return draft
    match, after = _repetition(text, scan)
    if match:
        repeated = np.resize(text[after:], most).tolist()
        return [(t, by_match[min(match + i, len(by_match) - 1)]) for i, t in enumerate(repeated)]
    if emitted and (node := tree.walk(emitted[:-1])) is not None and node in tree.first:
        draft = tree.below(tree.first[node], most)
        return [(t, by_match[0] if i == 0 else each) for i, (t, each) in enumerate(draft)]
    return []


def _repetition(text: NDArray[np.int32], scan: Scan) -> tuple[int, int]:
    """The longest match of the text's end in itself, 0 for none, and where the text goes on."""
    last = len(text) - 1
    ends = np.arange(max(last - scan.window, 0), last)
    match = after = 0
    for size in range(1, len(scan.probabilities)):
        ends = ends[ends >= size - 1]
        ends = ends[text[ends - size + 1] == text[last - size + 1]] if len(ends) else ends
        if not len(ends):
            break
        match, after = size, int(ends[-1]) + 1
    return (match, after) if match >= scan.shortest else (0, 0)


def _compare(
    draft: _Draft, theirs: list[int], acceptance: list[float], first: Sequence[list[float]]
) -> tuple[bool, int]:
    """True if the head's draft is taken, and the bin of `Head.first`, -1 for none."""
    at = next((i for i, (token, _) in enumerate(draft) if token != theirs[i]), None)
    if at is None:
        return True, -1
    chosen = min(int(draft[at][1] * len(first[0])), len(first[0]) - 1)
    behind = [each for _, each in draft[at + 1 :]], acceptance[at + 1 :]
    own, its = (
        sum(math.prod([right[chosen], *rest[:size]]) for size in range(len(rest) + 1))
        for right, rest in zip(first, behind, strict=True)
    )
    return own <= its, chosen


class _Row(NamedTuple):
    """A row's text. Made in kernels.

    token_ids: where it begins; length: its tokens, at most the buffer's; last: the last one.
    """

    token_ids: Any
    length: Any
    last: Any


class _TreeOfRow(NamedTuple):
    """A row's tree. Made in kernels: pointers to the row's first node, and two scalars."""

    token_ids: Any
    parents: Any
    probabilities: Any
    base: Any
    count: Any


@jit
def _parent(tree, node, used):
    """The parent of each node: -1 or a node before it, whatever the tree holds."""
    parent = tl.load(tree.parents + node, mask=used, other=-1)
    return tl.minimum(tl.maximum(parent, -1), node - 1)


@jit
def _first_child(above, node, index, used, NODES: tl.constexpr):
    """The first child of `node`, NODES if there is none; `above` are the parents of all nodes."""
    return tl.min(tl.where(used & (above == node), index, NODES))


@jit
def _walk(row, tree, ids, above, index, used, REACH: tl.constexpr, NODES: tl.constexpr):
    """The node to which the tokens since `base` lead, and the one expected instead of it.

    -1 is the root; NODES, which has no children, stands for none.
    """
    grown = row.length - tree.base
    usable = (tree.base >= 0) & (grown >= 0) & (grown <= REACH) & (tree.count > 0)
    steps = tl.where(usable, grown, 0)
    walked = steps * 0
    node = walked - 1
    before = node
    child = node
    while (walked < steps) & (child < NODES):
        token = tl.load(row.token_ids + tree.base + walked)
        child = _first_child(above, node, index, used & (ids == token), NODES)
        before = tl.where(child < NODES, node, before)
        node = tl.where(child < NODES, child, node)
        walked += (child < NODES).to(tl.int32)
    all_there = usable & (walked == grown)
    almost = usable & (grown > 0) & (walked >= grown - 1)
    expected = _first_child(above, tl.where(all_there, before, node), index, used, NODES)
    return tl.where(all_there, node, NODES), tl.where(almost, expected, NODES)


@jit
def _own_text(
    row, shortest, WINDOW: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The longest match of the text's end in itself, 0 for none, and how far back it ends."""
    best = tl.zeros((BLOCK,), tl.int32)
    lane = tl.arange(0, BLOCK)
    looked_at = tl.minimum(row.length - 1, WINDOW)
    for begin in range(0, looked_at, BLOCK):
        # The position just before the last is 1 back.
        distance = lane + begin + 1
        end = row.token_ids + (row.length - 1 - distance)
        matches = distance <= looked_at
        matched = tl.zeros((BLOCK,), tl.int32)
        back = looked_at * 0
        while (back < LONGEST) & (tl.max(matches.to(tl.int32)) > 0):
            inside = matches & (distance + back < row.length)
            token = tl.load(row.token_ids + row.length - 1 - back, mask=back < row.length, other=-1)
            matches = inside & (tl.load(end - back, mask=inside, other=-1) == token)
            matched += matches.to(tl.int32)
            back += 1
        # The larger key of two is of the longer match, or of the nearer one.
        key = tl.where(matched >= shortest, matched * (WINDOW + 1) + (WINDOW - distance), 0)
        best = tl.maximum(best, key)
    key = tl.max(best)
    return key // (WINDOW + 1), WINDOW - key % (WINDOW + 1)


@jit
def _expected(probabilities, there, at, slot):
    """The tokens expected of a draft from slot `at` on, where the first is right with `there`."""
    right = tl.where(slot == at, there, tl.where(slot > at, probabilities, 1.0))
    return tl.sum(tl.where(slot >= at, tl.cumprod(right), 0.0))


@jit(
    do_not_specialize=("capacity", "longest", "text_stride", "nodes", "vocabulary"),
    do_not_specialize_on_alignment=("idx_mapping", "num_sampled"),
)
def align_kernel(
    idx_mapping, num_sampled, texts, trees, by_match, head, output,
    capacity, longest, text_stride, nodes, vocabulary,
    LOOKAHEAD: tl.constexpr, SLOTS: tl.constexpr, NODES: tl.constexpr, REACH: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, TAIL_BLOCK: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    entry = tl.load(idx_mapping + program).to(tl.int64)
    inside = (entry >= 0) & (entry < capacity)
    entry = tl.where(inside, entry, 0)
    length = tl.load(texts.lengths + entry, mask=inside, other=0)
    length = tl.minimum(tl.maximum(length, 0), longest)
    text = texts.token_ids + entry * text_stride
    last = tl.load(text + length - 1, mask=length > 0, other=0)
    row = _Row(text, length, last)
    wanted = tl.minimum(tl.load(texts.limits + entry), longest - length)
    wanted = tl.minimum(tl.maximum(wanted, 0), LOOKAHEAD)
    sampled = tl.load(num_sampled + program).to(tl.int32)
    wanted = tl.where((sampled > 0) & (length > 0), wanted, 0)

    size = tl.minimum(tl.maximum(tl.load(trees.counts + entry), 0), nodes)
    size = tl.where(tl.load(trees.requests + entry) == tl.load(texts.requests + entry), size, 0)
    first = entry * nodes
    tree = _TreeOfRow(
        trees.token_ids + first, trees.parents + first, trees.probabilities + first,
        tl.load(trees.bases + entry), size,
    )  # fmt: skip
    index = tl.arange(0, NODES)
    used = index < tl.where(wanted > 0, size, 0)
    above = _parent(tree, index, used)

    tokens = tl.load(tree.token_ids + index, mask=used, other=0)

    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    probabilities = tl.zeros((SLOTS,), tl.float32)
    drafted = wanted * 0
    matched = wanted * 0
    distance = matched + 1
    node, expected = _walk(row, tree, tokens, above, index, used, REACH, NODES)
    child = _first_child(above, node, index, used, NODES)
    edited = (child == NODES) & (wanted > 0)
    if edited:
        matched, distance = _own_text(row, SHORTEST, WINDOW, LONGEST, BLOCK)
        node = expected
        child = _first_child(above, node, index, used, NODES)
    if matched > 0:
        where = row.length - distance + slot % tl.maximum(distance, 1)
        ids = tl.load(text + where, mask=slot < wanted, other=0)
        length_then = tl.minimum(matched + slot, LONGEST)
        probabilities = tl.load(by_match + length_then, mask=slot < wanted, other=0.0)
        drafted = wanted
    else:
        known_before = (node >= 0) & (child < NODES)
        before = tl.load(tree.probabilities + node, mask=known_before, other=1.0)
        while (child < NODES) & (drafted < wanted):
            probability = tl.load(tree.probabilities + child)
            ratio = probability / before
            ratio = tl.minimum(tl.where(ratio > 0, ratio, 0), 1)
            ids = tl.where(slot == drafted, tl.load(tree.token_ids + child), ids)
            probabilities = tl.where(slot == drafted, ratio, probabilities)
            before = probability
            drafted += 1
            child = _first_child(above, child, index, used, NODES)
        probabilities = tl.where(edited & (slot == 0), tl.load(by_match), probabilities)

    known = (ids >= 0) & (ids < vocabulary)
    drafted = tl.minimum(drafted, tl.min(tl.where(known, SLOTS, slot)))
    after = program.to(tl.int64) * LOOKAHEAD + slot
    drawn = tl.where(slot < drafted, ids, tl.maximum(row.last, 0))
    probabilities = tl.where(slot < drafted, probabilities, 0.0)
    total = drafted
    end = output.ends + program.to(tl.int64) * WIDTH
    if BINS:
        theirs = tl.load(head.token_ids + after, mask=slot < LOOKAHEAD, other=0).to(tl.int32)
        right = tl.load(head.acceptance + slot, mask=slot < LOOKAHEAD, other=0.0)
        differs = (slot < drafted) & (theirs != ids)
        at = tl.min(tl.where(differs, slot, SLOTS))
        own_there = tl.sum(tl.where(slot == at, probabilities, 0.0))
        of_bins = tl.minimum((own_there * BINS).to(tl.int32), BINS - 1)
        tl.store(end + 3, tl.where(at < SLOTS, of_bins, -1))
        tl.store(end + 4 + slot, theirs, mask=slot < LOOKAHEAD)
        aligned = tl.where(slot < drafted, ids, -1)
        tl.store(end + 4 + LOOKAHEAD + slot, aligned, mask=slot < LOOKAHEAD)
        ours = _expected(probabilities, tl.load(head.first + of_bins), at, slot)
        if ours <= _expected(right, tl.load(head.first + BINS + of_bins), at, slot):
            drawn, probabilities, drafted, total = theirs, right, drafted * 0, total * 0 + LOOKAHEAD
    tl.store(output.token_ids + after, drawn, mask=slot < LOOKAHEAD)
    tl.store(output.probabilities + after, probabilities, mask=slot < LOOKAHEAD)
    tl.store(output.counts + program, total)

    tl.store(end, tl.where(inside, sampled, 0))
    tl.store(end + 1, length)
    tl.store(end + 2, drafted)
    lane = tl.arange(0, TAIL_BLOCK)
    where = length - TAIL + lane
    tail = tl.load(text + where, mask=(where >= 0) & (lane < TAIL), other=-1)
    tl.store(end + WIDTH - TAIL + lane, tail, mask=lane < TAIL)


def launch(batch: Alignment, output: Aligned) -> Aligned:
    """The same in one launch."""
    texts, trees, idx_mapping, num_sampled, scan, vocabulary, head = batch
    capacity, longest = texts.token_ids.shape
    nodes = trees.token_ids.shape[1]
    lookahead = output.token_ids.shape[1]
    bins = 0 if head is None else head.first.shape[1]
    width = output.ends.shape[1]
    tail = width - 3 - (width_beside_head(lookahead) if bins else 0)
    with torch.cuda.device_of(texts.token_ids):
        align_kernel[(len(idx_mapping),)](
            idx_mapping,
            num_sampled,
            texts,
            trees,
            scan.probabilities,
            head,
            output,
            capacity,
            longest,
            texts.token_ids.stride(0),
            nodes,
            vocabulary,
            LOOKAHEAD=lookahead,
            SLOTS=next_power_of_2(lookahead),
            NODES=next_power_of_2(nodes),
            REACH=scan.reach,
            SHORTEST=scan.shortest,
            LONGEST=len(scan.probabilities) - 1,
            WINDOW=scan.window,
            BLOCK=config.scan_block(scan.window),
            TAIL=tail,
            TAIL_BLOCK=next_power_of_2(tail),
            BINS=bins,
            WIDTH=width,
            num_warps=config.WARPS,
            enable_fp_fusion=True,
        )
    return output
