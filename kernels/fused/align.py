"""Drafts from continuations that have arrived, in one launch: one program a row.

`fastdraft.kernels.reference.align` says which draft a row gets. Here all nodes of a tree are
compared with the text's end at once, each walking up its path; both come from the first-level
cache. The own text is looked through only where the tree has nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdraft.kernels.fused import config
from fastdraft.kernels.operands import Aligned, Scan, Texts, Trees


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
def _start(row, tree, above, index, used, shortest_path, NODES: tl.constexpr):
    """The node that the draft follows and its first child, NODES if there is none."""
    suffix = tl.zeros((NODES,), tl.int32)
    whole = used & False
    grown = row.length - tree.base
    node = index
    matches = used
    back = row.length * 0
    while tl.max(matches.to(tl.int32)) > 0:
        token = tl.load(row.token_ids + row.length - 1 - back, mask=back < row.length, other=-1)
        guess = tl.load(tree.token_ids + node, mask=matches, other=-1)
        matches = matches & (back < row.length) & (guess == token)
        suffix += matches.to(tl.int32)
        parent = _parent(tree, node, matches)
        whole = whole | (matches & (parent < 0) & (suffix == grown))
        matches = matches & (parent >= 0)
        node = tl.maximum(parent, 0)
        back += 1
    score = tl.where(suffix >= shortest_path, suffix, 0)
    score = tl.where(whole, NODES + 1, score)
    # The larger key of two has the larger score, or is that of an earlier node.
    key = tl.where(score > 0, score * NODES + (NODES - 1 - index), 0)

    best = grown * 0 - 1
    child = best * 0 + NODES
    if (grown == 0) & (tree.count > 0):
        child = _first_child(above, best, index, used, NODES)
    largest = tl.max(key)
    while (child == NODES) & (largest > 0):
        best = NODES - 1 - largest % NODES
        child = _first_child(above, best, index, used, NODES)
        key = tl.where(index == best, 0, key)
        largest = tl.max(key)
    return best, child


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
        for back in tl.static_range(LONGEST):
            inside = matches & (distance + back < row.length)
            token = tl.load(row.token_ids + row.length - 1 - back, mask=back < row.length, other=-1)
            matches = inside & (tl.load(end - back, mask=inside, other=-1) == token)
            matched += matches.to(tl.int32)
        # The larger key of two is of the longer match, or of the nearer one.
        key = tl.where(matched >= shortest, matched * (WINDOW + 1) + (WINDOW - distance), 0)
        best = tl.maximum(best, key)
    key = tl.max(best)
    return key // (WINDOW + 1), WINDOW - key % (WINDOW + 1)


@triton.jit(
    do_not_specialize=("places", "longest", "text_stride", "nodes", "vocabulary", "padding"),
    do_not_specialize_on_alignment=("idx_mapping", "num_sampled", "token_ids"),
)
def align_kernel(
    idx_mapping, num_sampled, token_ids, lengths, requests, limits,
    base, count, node_ids, parents, node_probabilities, tree_requests, chances,
    draft_ids, draft_probabilities, draft_counts, ends,
    places, longest, text_stride, nodes, vocabulary, padding,
    LOOKAHEAD: tl.constexpr, SLOTS: tl.constexpr, NODES: tl.constexpr, SHORTEST_PATH: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, TAIL_BLOCK: tl.constexpr, PAD_WITH_LAST: tl.constexpr,
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

    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    probabilities = tl.zeros((SLOTS,), tl.float32)
    drafted = wanted * 0
    node, child = _start(row, tree, above, index, used, SHORTEST_PATH, NODES)
    before = tl.load(tree.probabilities + node, mask=(node >= 0) & (child < NODES), other=1.0)
    follows = (child < NODES) & (wanted > 0)
    if follows:
        while (child < NODES) & (drafted < wanted):
            probability = tl.load(tree.probabilities + child)
            ratio = probability / before
            ratio = tl.minimum(tl.where(ratio > 0, ratio, 0), 1)
            ids = tl.where(slot == drafted, tl.load(tree.token_ids + child), ids)
            probabilities = tl.where(slot == drafted, ratio, probabilities)
            before = probability
            drafted += 1
            child = _first_child(above, child, index, used, NODES)
    elif wanted > 0:
        matched, distance = _own_text(row, SHORTEST, WINDOW, LONGEST, BLOCK)
        if matched > 0:
            where = row.length - distance + slot % tl.maximum(distance, 1)
            ids = tl.load(text + where, mask=slot < wanted, other=0)
            chance = tl.load(chances + matched - 1)
            probabilities = tl.where(slot < wanted, chance, probabilities)
            drafted = wanted

    known = (ids >= 0) & (ids < vocabulary)
    drafted = tl.minimum(drafted, tl.min(tl.where(known, SLOTS, slot)))
    if PAD_WITH_LAST:
        padding = tl.maximum(row.last, 0)
    after = program.to(tl.int64) * LOOKAHEAD + slot
    drawn = tl.where(slot < drafted, ids, padding)
    tl.store(draft_ids + after, drawn, mask=slot < LOOKAHEAD)
    probabilities = tl.where(slot < drafted, probabilities, 0.0)
    tl.store(draft_probabilities + after, probabilities, mask=slot < LOOKAHEAD)
    tl.store(draft_counts + program, drafted)

    end = ends + program.to(tl.int64) * (3 + TAIL)
    tl.store(end, tl.where(inside, sampled, 0))
    tl.store(end + 1, length)
    tl.store(end + 2, drafted)
    lane = tl.arange(0, TAIL_BLOCK)
    where = length - TAIL + lane
    tail = tl.load(text + where, mask=(where >= 0) & (lane < TAIL), other=-1)
    tl.store(end + 3 + lane, tail, mask=lane < TAIL)


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
    """The reference's `align`, in one launch."""
    places, longest = texts.token_ids.shape
    nodes = trees.token_ids.shape[1]
    lookahead = output.token_ids.shape[1]
    tail = output.ends.shape[1] - 3
    with torch.cuda.device_of(texts.token_ids):
        align_kernel[(len(idx_mapping),)](
            idx_mapping,
            num_sampled,
            *texts,
            *trees,
            scan.probabilities,
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
            SHORTEST_PATH=scan.shortest_path,
            SHORTEST=scan.shortest,
            LONGEST=len(scan.probabilities),
            WINDOW=scan.window,
            BLOCK=config.scan_block(scan.window),
            TAIL=tail,
            TAIL_BLOCK=triton.next_power_of_2(tail),
            PAD_WITH_LAST=padding is None,
            num_warps=config.WARPS,
        )
    return output
