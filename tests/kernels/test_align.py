"""Drafts from continuations: the kernel against the plain version, both by examples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from adversarial import check_replays
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from fastdraft.kernels import config
from fastdraft.kernels.align import launch, plain
from fastdraft.kernels.operands import (
    Aligned,
    Alignment,
    Head,
    Scan,
    Texts,
    Trees,
    width_beside_head,
)

VOCABULARY = 5
LONGEST = 24
TAIL = 3
SCAN = {"shortest": 2, "window": 9, "reach": 6}
PROBABILITIES = [0.125, 0.25, 0.5, 0.75]
# Few tokens, so that most things match somehow, and some that are none.
tokens = st.integers(0, 2) | st.sampled_from([-1, VOCABULARY, 2**31 - 1, -(2**31)])
few = st.integers(0, 2)


@dataclass
class Slot:
    """A slot of the host's buffers: a text and the tree that has arrived for it."""

    text: list[int] = field(default_factory=list)
    request: int = 0
    limit: int = 8
    base: int = 0
    count: int = 0
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    of: int = 0


@st.composite
def slots(draw, nodes):
    text = draw(st.lists(few, max_size=LONGEST) | st.lists(tokens, max_size=LONGEST))
    size = draw(st.integers(0, nodes))
    base = draw(st.integers(0, len(text)) | st.integers(-3, LONGEST + 3))
    ids = draw(st.lists(few | tokens, min_size=nodes, max_size=nodes))
    kind = draw(st.sampled_from(["chain", "tree", "anything"]))
    low, high = {"chain": (None, None), "tree": (-1, None), "anything": (-9, nodes + 9)}[kind]
    parents = [
        draw(st.integers(i - 1 if low is None else low, i - 1 if high is None else high))
        for i in range(nodes)
    ]
    if draw(st.booleans()) and 0 <= base < len(text):
        # The new text is in the tree, at least in part.
        grown = text[base : base + nodes]
        ids[: len(grown)], parents[: len(grown)] = grown, [i - 1 for i in range(len(grown))]
    falling = sorted((draw(st.floats(0, 1, width=32)) for _ in ids), reverse=True)
    return Slot(
        text,
        draw(st.integers(0, 1)),
        draw(st.sampled_from([0, 1, 3, 8, 99, -1])),
        base,
        draw(st.sampled_from([size, nodes, -1, nodes + 5])),
        ids,
        parents,
        falling,
        draw(st.integers(0, 1)) if draw(st.booleans()) else 0,
    )


@st.composite
def batches(draw):
    nodes = draw(st.sampled_from([1, 3, 8, 11]))
    held = draw(st.lists(slots(nodes), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(held))))
    rows = [*order[: draw(st.integers(1, len(held)))]]
    for _ in range(draw(st.integers(0, 2))):
        rows.insert(draw(st.integers(0, len(rows))), draw(st.sampled_from([-1, len(held), 2**30])))
    sampled = [draw(st.sampled_from([1, 1, 3, 0])) for _ in rows]
    return held, rows, sampled


def operands(held, rows, sampled, *, dtype=torch.int32, stride=LONGEST, longest=LONGEST):
    def column(values, kind=torch.int32):
        return torch.tensor(values, dtype=kind)

    buffer = torch.full((len(held), max(stride, longest)), 7, dtype=torch.int32)[:, :longest]
    for row, slot in zip(buffer, held, strict=True):
        row[: len(slot.text)] = column(slot.text)
    texts = Texts(
        buffer,
        column([len(slot.text) for slot in held]),
        column([slot.request for slot in held]),
        column([slot.limit for slot in held]),
    )
    trees = Trees(
        column([slot.base for slot in held]),
        column([slot.count for slot in held]),
        column([slot.token_ids for slot in held]),
        column([slot.parents for slot in held]),
        column([slot.probabilities for slot in held], torch.float32),
        column([slot.of for slot in held]),
    )
    return texts, trees, column(rows, dtype), column(sampled, dtype)


def run(version, batch, lookahead, *, scan=SCAN, dtype=torch.int64, head=None):
    """The output of a version, written over other values."""
    width = 3 + TAIL + (width_beside_head(lookahead) if head else 0)
    rows = len(batch[2])
    output = Aligned(
        torch.full((rows, lookahead), 77, dtype=dtype),
        torch.full((rows, lookahead), math.nan),
        torch.full((rows,), -5, dtype=torch.int32),
        torch.full((rows, width), -5, dtype=torch.int32),
    )
    limits = Scan(torch.tensor(PROBABILITIES), **scan)
    assert version(Alignment(*batch, limits, VOCABULARY, head), output) is output
    return output


def check(batch, lookahead, *, rows=slice(None), **more):
    """Compares the kernel with the plain version, in some of the rows."""
    ours, theirs = (run(version, batch, lookahead, **more) for version in (launch, plain))
    for name in ("token_ids", "counts", "ends"):
        assert getattr(ours, name)[rows].tolist() == getattr(theirs, name)[rows].tolist(), name
    torch.testing.assert_close(
        ours.probabilities[rows], theirs.probabilities[rows], rtol=1e-5, atol=1e-7
    )


@settings(max_examples=120, deadline=None)
@given(batches(), st.sampled_from([1, 3, 8]))
def test_kernel_and_plain_version_agree(batch, lookahead):
    check(operands(*batch), lookahead)


@settings(max_examples=40, deadline=None)
@given(
    batches(),
    st.integers(1, 3),
    st.integers(1, 30),
    st.integers(1, 4),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_any_scan_and_layout(batch, shortest, window, reach, dtype):
    scan = {"shortest": shortest, "window": window, "reach": reach}
    check(operands(*batch, dtype=dtype, stride=LONGEST + 5), 6, scan=scan, dtype=dtype)


def tree(text, base, nodes, **more):
    ids, parents, probabilities = zip(*nodes, strict=True)
    return Slot(text, 0, 8, base, len(nodes), list(ids), list(parents), list(probabilities), **more)


NODES = [(1, -1, 0.8), (2, 0, 0.4), (3, -1, 0.2), (2, 1, 0.2), (4, 0, 0.1), (0, 3, 0.05), (1, 2, 0)]


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        # The text has not grown: the most probable path, its probabilities one by one.
        (tree([3, 3], 2, NODES), [(1, 0.8), (2, 0.5), (2, 0.5), (0, 0.25)]),
        # The new text is in the tree.
        (tree([3, 3, 1], 2, NODES), [(2, 0.5), (2, 0.5), (0, 0.25)]),
        (tree([3, 3, 3], 2, NODES), [(1, 0)]),
        # It left the tree at the 1, and does not repeat itself: an edit.
        (tree([3, 3, 4], 2, NODES), [(2, 0.125), (2, 0.5), (0, 0.25)]),
        # It left the tree before its last token.
        (tree([3, 3, 4, 2], 2, NODES), []),
        # It reached a leaf, whose first sibling has children.
        (tree([3, 4, 1, 4], 2, NODES), [(2, 0.125), (0, 0.25)]),
        # It grew by more than the reach.
        (tree([3, 1, 2, 2, 0, 4, 0, 1], 1, NODES), []),
        # The text repeats itself with a period of 3.
        (
            tree([0, 1, 2, 0, 1], 1, NODES[2:3]),
            [(2, 0.5), *((token, 0.75) for token in (0, 1, 2, 0, 1, 2, 0))],
        ),
        # A tree of another request.
        (tree([3, 3], 2, NODES, of=1), []),
        # The text got shorter than the tree's.
        (tree([3], 2, NODES), []),
    ],
)  # fmt: skip
def test_each_way_to_a_draft(slot, expected):
    after = 8 - len(expected)
    tail = ([-1] * TAIL + slot.text)[-TAIL:]
    for version in (launch, plain):
        found = run(version, operands([slot], [0], [2]), 8)
        tokens = [token for token, _ in expected]
        assert found.token_ids.tolist() == [tokens + [slot.text[-1]] * after]
        assert found.probabilities[0].tolist() == pytest.approx(
            [p for _, p in expected] + [0] * after
        )
        assert found.counts.tolist() == [len(expected)]
        assert found.ends.tolist() == [[2, len(slot.text), len(expected), *tail]]


@pytest.mark.parametrize(
    ("theirs", "own_right", "their_right", "takes_own", "bin_of"),
    [
        # 0.8 (1 + 0.5 + 0.125) tokens against 0.5 (1 + 0.5 + 0.25), from where they differ.
        ([1, 0, 0, 0], 0.8, 0.5, True, 2),
        ([1, 0, 0, 0], 0.5, 0.8, False, 2),
        ([0, 2, 2, 0], 0.6, 0.6, False, 3),
        ([1, 2, 2, 0], 1.0, 0.0, False, -1),
    ],
)
def test_a_row_takes_the_better_of_two_drafts(theirs, own_right, their_right, takes_own, bin_of):
    slot = tree([3, 3], 2, NODES)
    first = torch.tensor([[own_right] * 4, [their_right] * 4])
    head = Head(torch.tensor([theirs]), torch.full((4,), 0.5), first)
    for version in (launch, plain):
        found = run(version, operands([slot], [0], [1]), 4, head=head)
        assert found.token_ids.tolist() == [[1, 2, 2, 0] if takes_own else theirs]
        probabilities = [0.8, 0.5, 0.5, 0.25] if takes_own else [0.5] * 4
        assert found.probabilities[0].tolist() == pytest.approx(probabilities)
        assert found.counts.tolist() == [4]
        drafted = 4 if takes_own else 0
        assert found.ends.tolist() == [[1, 2, drafted, bin_of, *theirs, 1, 2, 2, 0, -1, 3, 3]]


@settings(max_examples=120, deadline=None)
@given(st.data(), batches(), st.sampled_from([1, 3, 8]), st.sampled_from([1, 4]))
def test_beside_a_head(data, batch, lookahead, bins):
    given_operands = operands(*batch)
    rows = len(batch[1])
    eighths = st.integers(0, 8).map(lambda n: n / 8)

    def drawn(values, *shape):
        size = math.prod(shape)
        return torch.tensor(data.draw(st.lists(values, min_size=size, max_size=size))).view(shape)

    theirs = drawn(few, rows, lookahead)
    alone = run(plain, given_operands, lookahead)
    for row in range(rows):
        # The beginning is what is found without them.
        size = data.draw(st.integers(0, int(alone.counts[row])))
        theirs[row, :size] = alone.token_ids[row, :size]
    head = Head(theirs, drawn(eighths, lookahead).float(), drawn(eighths, 2, bins).float())
    # Not the rows whose choice rounding may decide.
    more, less = (
        run(plain, given_operands, lookahead, head=head._replace(first=head.first * factor))
        for factor in (torch.tensor([[1.001], [1.0]]), torch.tensor([[1.0], [1.001]]))
    )
    clear = (more.ends == less.ends).all(1)
    check(given_operands, lookahead, head=head, rows=clear)


def large_batch(seed):
    generator = np.random.default_rng(seed)
    held = []
    for number in range(20):
        text = generator.integers(0, 4, LONGEST - number % 5).tolist()
        parents = [int(generator.integers(-1, node)) for node in range(33)]
        ids = generator.integers(0, 4, 33).tolist()
        falling = sorted(generator.random(33).tolist(), reverse=True)
        base = len(text) - number % 4
        held.append(Slot(text, number, 8, base, 33, ids, parents, falling, number))
    return operands(held, generator.permutation(20).tolist(), [1] * 20)


@pytest.mark.usefixtures("any_order")
def test_a_large_batch_in_any_order():
    check(large_batch(0), 8)


def test_replays_read_operands_where_they_lie():
    batch, *others = (large_batch(seed) for seed in (1, 1, 2))
    drafts = Aligned(*map(torch.clone, run(launch, batch, 8)))
    alignment = Alignment(*batch, Scan(torch.tensor(PROBABILITIES), **SCAN), VOCABULARY)
    others = [tree_leaves(other) for other in others]
    check_replays(lambda: launch(alignment, drafts), tree_leaves(batch), others)


def test_a_window_of_several_blocks(monkeypatch):
    monkeypatch.setattr(config, "_SCANNED", 4)
    for window in (3, 7, 20):
        scan = {**SCAN, "window": window}
        held = [Slot([0, 1, 2, 4, 3, 0, 1, 1, 3, 0, 0, 3, 4, 4, 1, 2, 0, 1][:n]) for n in range(18)]
        for slot in held:
            slot.token_ids, slot.parents, slot.probabilities = [0], [-1], [1.0]
        check(operands(held, list(range(18)), [1] * 18), 8, scan=scan)
