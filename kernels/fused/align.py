"""Drafts from continuations that have arrived, in one launch: one program a row.

`fastdraft.kernels.reference.align` says which draft a row gets. A tree is held in
registers, and a node's child is found among all nodes at once. The own text is looked through only
where the tree has nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdraft.kernels.fused import config
from fastdraft.kernels.operands import Aligned, Head, Scan, Texts, Trees


class _Row(NamedTuple):
    """A row's text. Made in kernels.

    token_ids: where it begins; length: its tokens, at most the buffer's; last: the last one.
    """

    token_ids: Any
    length: Any
    last: Any


class _Tree(NamedTuple):
    """A row's tree. Made in kernels: pointers to the row's first node, and two scalars."""

    token_ids: Any
    parents: Any
    probabilities: Any
    base: Any
    count: Any


@triton.jit
def _parent(tree, node, used):
    """The parent of each node: -1 or a node before it, whatever the tree holds."""
    parent = tl.load(tree.parents + node, mask=used, other=-1)
    return tl.minimum(tl.maximum(parent, -1), node - 1)


@triton.jit
def _first_child(above, node, index, used, NODES: tl.constexpr):
    """The first child of `node`, NODES if there is none; `above` are the parents of all nodes."""
    return tl.min(tl.where(used & (above == node), index, NODES))


@triton.jit
def _walk(row, tree, ids, above, index, used, REACH: tl.constexpr, NODES: tl.constexpr):
    """The node that what the text has grown by leads to, and the one expected in its place.

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


@triton.jit
def _own_text(
    row, shortest, WINDOW: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The longest match of the text's end in itself, 0 for none, and how far back it ends."""
    best = tl.zeros((BLOCK,), tl.int32)
    lane = tl.arange(0, BLOCK)
    looked_at = tl.minimum(row.length - 1, WINDOW)
    for begin in range(0, looked_at, BLOCK):
        # The place just before the last is 1 back.
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


@triton.jit
def _expected(chances, there, at, slot):
    """The tokens expected of a draft from slot `at` on, where the first is right with `there`."""
    chances = tl.where(slot == at, there, tl.where(slot > at, chances, 1.0))
    return tl.sum(tl.where(slot >= at, tl.cumprod(chances), 0.0))


@triton.jit(
    do_not_specialize=("places", "longest", "text_stride", "nodes", "vocabulary", "padding"),
    do_not_specialize_on_alignment=("idx_mapping", "num_sampled", "token_ids"),
)
def align_kernel(
    idx_mapping, num_sampled, token_ids, lengths, requests, limits,
    base, count, node_ids, parents, node_probabilities, tree_requests, chances,
    head_ids, acceptance, first_right,
    draft_ids, draft_probabilities, draft_counts, ends,
    places, longest, text_stride, nodes, vocabulary, padding,
    LOOKAHEAD: tl.constexpr, SLOTS: tl.constexpr, NODES: tl.constexpr, REACH: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, TAIL_BLOCK: tl.constexpr, PAD_WITH_LAST: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    place = tl.load(idx_mapping + program).to(tl.int64)
    inside = (place >= 0) & (place < places)
    place = tl.where(inside, place, 0)
    length = tl.load(lengths + place, mask=inside, other=0)
    length = tl.minimum(tl.maximum(length, 0), longest)
    text = token_ids + place * text_stride
    last = tl.load(text + length - 1, mask=length > 0, other=0)
    row = _Row(text, length, last)
    wanted = tl.minimum(tl.load(limits + place), longest - length)
    wanted = tl.minimum(tl.maximum(wanted, 0), LOOKAHEAD)
    sampled = tl.load(num_sampled + program).to(tl.int32)
    wanted = tl.where((sampled > 0) & (length > 0), wanted, 0)

    size = tl.minimum(tl.maximum(tl.load(count + place), 0), nodes)
    size = tl.where(tl.load(tree_requests + place) == tl.load(requests + place), size, 0)
    first = place * nodes
    tree = _Tree(
        node_ids + first, parents + first, node_probabilities + first, tl.load(base + place), size
    )
    index = tl.arange(0, NODES)
    used = (index < size) & (wanted > 0)
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
        probabilities = tl.load(chances + length_then, mask=slot < wanted, other=0.0)
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
        probabilities = tl.where(edited & (slot == 0), tl.load(chances), probabilities)

    known = (ids >= 0) & (ids < vocabulary)
    drafted = tl.minimum(drafted, tl.min(tl.where(known, SLOTS, slot)))
    if PAD_WITH_LAST:
        padding = tl.maximum(row.last, 0)
    after = program.to(tl.int64) * LOOKAHEAD + slot
    drawn = tl.where(slot < drafted, ids, padding)
    probabilities = tl.where(slot < drafted, probabilities, 0.0)
    total = drafted
    WIDTH: tl.constexpr = 3 + TAIL + (1 + 2 * LOOKAHEAD if BINS else 0)
    end = ends + program.to(tl.int64) * WIDTH
    if BINS:
        theirs = tl.load(head_ids + after, mask=slot < LOOKAHEAD, other=0).to(tl.int32)
        right = tl.load(acceptance + slot, mask=slot < LOOKAHEAD, other=0.0)
        differs = (slot < drafted) & (theirs != ids)
        at = tl.min(tl.where(differs, slot, SLOTS))
        chance = tl.sum(tl.where(slot == at, probabilities, 0.0))
        of_bins = tl.minimum((chance * BINS).to(tl.int32), BINS - 1)
        tl.store(end + 3, tl.where(at < SLOTS, of_bins, -1))
        tl.store(end + 4 + slot, theirs, mask=slot < LOOKAHEAD)
        aligned = tl.where(slot < drafted, ids, -1)
        tl.store(end + 4 + LOOKAHEAD + slot, aligned, mask=slot < LOOKAHEAD)
        ours = _expected(probabilities, tl.load(first_right + of_bins), at, slot)
        if ours <= _expected(right, tl.load(first_right + BINS + of_bins), at, slot):
            drawn, probabilities, drafted, total = theirs, right, drafted * 0, total * 0 + LOOKAHEAD
    tl.store(draft_ids + after, drawn, mask=slot < LOOKAHEAD)
    tl.store(draft_probabilities + after, probabilities, mask=slot < LOOKAHEAD)
    tl.store(draft_counts + program, total)

    tl.store(end, tl.where(inside, sampled, 0))
    tl.store(end + 1, length)
    tl.store(end + 2, drafted)
    lane = tl.arange(0, TAIL_BLOCK)
    where = length - TAIL + lane
    tail = tl.load(text + where, mask=(where >= 0) & (lane < TAIL), other=-1)
    tl.store(end + WIDTH - TAIL + lane, tail, mask=lane < TAIL)


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
    """The reference's `align`, in one launch."""
    places, longest = texts.token_ids.shape
    nodes = trees.token_ids.shape[1]
    lookahead = output.token_ids.shape[1]
    bins = 0 if head is None else head.first.shape[1]
    tail = output.ends.shape[1] - 3 - (1 + 2 * lookahead if bins else 0)
    # Read by no kernel where there is no head.
    beside = head or (output.token_ids, scan.probabilities, scan.probabilities)
    with torch.cuda.device_of(texts.token_ids):
        align_kernel[(len(idx_mapping),)](
            idx_mapping,
            num_sampled,
            *texts,
            *trees,
            scan.probabilities,
            *beside,
            *output,
            places,
            longest,
            texts.token_ids.stride(0),
            nodes,
            vocabulary,
            0 if padding is None else padding,
            LOOKAHEAD=lookahead,
            SLOTS=triton.next_power_of_2(lookahead),
            NODES=triton.next_power_of_2(nodes),
            REACH=scan.reach,
            SHORTEST=scan.shortest,
            LONGEST=len(scan.probabilities) - 1,
            WINDOW=scan.window,
            BLOCK=config.scan_block(scan.window),
            TAIL=tail,
            TAIL_BLOCK=triton.next_power_of_2(tail),
            PAD_WITH_LAST=padding is None,
            BINS=bins,
            num_warps=config.WARPS,
        )
    return output
