"""Drafts from continuations: the kernel and the reference against an oracle in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from oracles.align import Tree, align

VOCABULARY = 5
LONGEST = 24
TAIL = 3
SCAN = {"shortest": 2, "window": 9, "reach": 6}
CHANCES = [0.125, 0.25, 0.5, 0.75]
# Few tokens, so that most things match somehow, and some that are none.
tokens = st.integers(0, 2) | st.sampled_from([-1, VOCABULARY, 2**31 - 1, -(2**31)])
few = st.integers(0, 2)


@dataclass
class Place:
    """A place of the host's buffers: a text and the tree that has arrived for it."""

    text: list[int] = field(default_factory=list)
    request: int = 0
    limit: int = 8
    base: int = 0
    count: int = 0
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    of: int = 0

    def draft(self, lookahead, scan, longest=LONGEST):
        most = max(min(self.limit, lookahead, longest - len(self.text)), 0)
        count = min(max(self.count, 0), len(self.token_ids))
        tree = None
        if self.of == self.request and count:
            tree = Tree(
                self.base, self.token_ids[:count], self.parents[:count], self.probabilities[:count]
            )
        if not self.text or not most:
            return []
        draft = align(self.text, tree, most, CHANCES, **scan)
        foreign = (i for i, (token, _) in enumerate(draft) if not 0 <= token < VOCABULARY)
        return draft[: next(foreign, len(draft))]


@st.composite
def places(draw, nodes):
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
        # What came is in the tree, at least in part.
        grown = text[base : base + nodes]
        ids[: len(grown)], parents[: len(grown)] = grown, [i - 1 for i in range(len(grown))]
    falling = sorted((draw(st.floats(0, 1, width=32)) for _ in ids), reverse=True)
    return Place(
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
    held = draw(st.lists(places(nodes), min_size=1, max_size=4))
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
    for row, place in zip(buffer, held, strict=True):
        row[: len(place.text)] = column(place.text)
    texts = Texts(
        buffer,
        column([len(place.text) for place in held]),
        column([place.request for place in held]),
        column([place.limit for place in held]),
    )
    trees = Trees(
        column([place.base for place in held]),
        column([place.count for place in held]),
        column([place.token_ids for place in held]),
        column([place.parents for place in held]),
        column([place.probabilities for place in held], torch.float32),
        column([place.of for place in held]),
    )
    return texts, trees, column(rows, dtype), column(sampled, dtype)


def both(given_operands, lookahead, *, scan=SCAN, padding=None, dtype=torch.int64, head=None):
    """What the kernel and the reference write, over what stood there before."""
    found = []
    width = 3 + TAIL + (width_beside_head(lookahead) if head else 0)
    rows = len(given_operands[2])
    for version in (launch, plain):
        output = Aligned(
            torch.full((rows, lookahead), 77, dtype=dtype),
            torch.full((rows, lookahead), math.nan),
            torch.full((rows,), -5, dtype=torch.int32),
            torch.full((rows, width), -5, dtype=torch.int32),
        )
        limits = Scan(torch.tensor(CHANCES), **scan)
        batch = Alignment(*given_operands, limits, VOCABULARY, padding, head)
        assert version(batch, output) is output
        found.append(output)
    return found


def assert_drafts(output, held, rows, sampled, lookahead, *, scan=SCAN, padding=None):
    columns = [each.tolist() for each in output]
    for row, come, ids, chances, count, end in zip(rows, sampled, *columns, strict=True):
        place = held[row] if 0 <= row < len(held) else Place()
        expected = place.draft(lookahead, scan) if come > 0 else []
        last = max(place.text[-1], 0) if place.text else 0
        after = lookahead - len(expected)
        assert count == len(expected)
        tail = ([-1] * TAIL + place.text)[-TAIL:]
        here = 0 <= row < len(held)
        assert end == [come if here else 0, len(place.text), count, *tail]
        assert (
            ids == [token for token, _ in expected] + [last if padding is None else padding] * after
        )
        np.testing.assert_allclose(
            chances, [chance for _, chance in expected] + [0] * after, rtol=1e-5, atol=1e-7
        )


@settings(max_examples=120, deadline=None)
@given(batches(), st.sampled_from([1, 3, 8]), st.sampled_from([None, -1, 0]))
def test_both_are_the_oracle(batch, lookahead, padding):
    for output in both(operands(*batch), lookahead, padding=padding):
        assert_drafts(output, *batch, lookahead, padding=padding)


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
    given_operands = operands(*batch, dtype=dtype, stride=LONGEST + 5)
    for output in both(given_operands, 6, scan=scan, dtype=dtype):
        assert_drafts(output, *batch, 6, scan=scan)


def tree(text, base, nodes, **more):
    ids, parents, probabilities = zip(*nodes, strict=True)
    return Place(
        text, 0, 8, base, len(nodes), list(ids), list(parents), list(probabilities), **more
    )


NODES = [(1, -1, 0.8), (2, 0, 0.4), (3, -1, 0.2), (2, 1, 0.2), (4, 0, 0.1), (0, 3, 0.05), (1, 2, 0)]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        # The text has not grown: the most probable path, its chances one after another.
        (tree([3, 3], 2, NODES), [(1, 0.8), (2, 0.5), (2, 0.5), (0, 0.25)]),
        # What came is in the tree.
        (tree([3, 3, 1], 2, NODES), [(2, 0.5), (2, 0.5), (0, 0.25)]),
        (tree([3, 3, 3], 2, NODES), [(1, 0)]),
        # It left the tree, in the place of 1, and does not repeat itself: an edit.
        (tree([3, 3, 4], 2, NODES), [(2, 0.125), (2, 0.5), (0, 0.25)]),
        # It left the tree before its last token.
        (tree([3, 3, 4, 2], 2, NODES), []),
        # It came to a leaf; what stood in its place first has children.
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
def test_each_way_to_a_draft(place, expected):
    for output in both(operands([place], [0], [1]), 8):
        count = int(output.counts[0])
        assert output.token_ids[0, :count].tolist() == [token for token, _ in expected]
        assert output.probabilities[0, :count].tolist() == pytest.approx([p for _, p in expected])


def expected_of(chances):
    """The tokens that are right, where each is with its chance if those before it are."""
    return sum(math.prod(chances[: i + 1]) for i in range(len(chances)))


@settings(max_examples=120, deadline=None)
@given(st.data(), batches(), st.sampled_from([1, 3, 8]), st.sampled_from([1, 4]))
def test_a_row_takes_the_better_of_two_drafts(data, batch, lookahead, bins):
    held, rows, sampled = batch
    eighths = st.integers(0, 8).map(lambda n: n / 8)

    def drawn(values, *shape):
        size = math.prod(shape)
        flat = data.draw(st.lists(values, min_size=size, max_size=size))
        return np.array(flat).reshape(shape).tolist()

    theirs = drawn(few, len(rows), lookahead)
    for row, ids in zip(rows, theirs, strict=True):
        if 0 <= row < len(held) and data.draw(st.booleans()):
            # The beginning is what is found without them.
            known = held[row].draft(lookahead, SCAN)
            size = data.draw(st.integers(0, len(known)))
            ids[:size] = [token for token, _ in known[:size]]
    acceptance, first = drawn(eighths, lookahead), drawn(eighths, 2, bins)
    head = Head(torch.tensor(theirs), torch.tensor(acceptance), torch.tensor(first))
    for output in both(operands(*batch), lookahead, head=head):
        columns = [each.tolist() for each in output]
        for row, come, other, ids, chances, count, end in zip(
            rows, sampled, theirs, *columns, strict=True
        ):
            place = held[row] if 0 <= row < len(held) else Place()
            own = place.draft(lookahead, SCAN) if come > 0 else []
            own_ids = [token for token, _ in own]
            at = next((i for i, token in enumerate(own_ids) if token != other[i]), None)
            place_of = -1
            if at is not None:
                place_of = min(int(own[at][1] * bins), bins - 1)
                mine = expected_of([first[0][place_of], *(p for _, p in own[at + 1 :])])
                its = expected_of([first[1][place_of], *acceptance[at + 1 :]])
                if abs(mine - its) < 1e-5:
                    continue
            takes_own = at is not None and mine > its
            after = lookahead - len(own)
            assert end[2:] == [
                len(own) if takes_own else 0,
                *(place_of, *other, *own_ids, *[-1] * after),
                *([-1] * TAIL + place.text)[-TAIL:],
            ]
            last = max(place.text[-1], 0) if place.text else 0
            assert ids == ([*own_ids, *[last] * after] if takes_own else other)
            assert count == (len(own) if takes_own else lookahead)
            expected = [p for _, p in own] + [0] * after if takes_own else acceptance
            np.testing.assert_allclose(chances, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("any_order")
def test_a_large_batch_in_any_order():
    generator = np.random.default_rng(0)
    held = []
    for number in range(20):
        text = generator.integers(0, 4, LONGEST - number % 5).tolist()
        parents = [int(generator.integers(-1, node)) for node in range(33)]
        ids = generator.integers(0, 4, 33).tolist()
        falling = sorted(generator.random(33).tolist(), reverse=True)
        base = len(text) - number % 4
        held.append(Place(text, number, 8, base, 33, ids, parents, falling, number))
    rows = generator.permutation(20).tolist()
    batch = held, rows, [1] * 20
    for output in both(operands(*batch), 8):
        assert_drafts(output, *batch, 8)


def test_a_window_of_several_blocks(monkeypatch):
    monkeypatch.setattr(config, "_SCANNED", 4)
    for window in (3, 7, 20):
        scan = {**SCAN, "window": window}
        held = [
            Place([0, 1, 2, 4, 3, 0, 1, 1, 3, 0, 0, 3, 4, 4, 1, 2, 0, 1][:n]) for n in range(18)
        ]
        for place in held:
            place.token_ids, place.parents, place.probabilities = [0], [-1], [1.0]
        batch = held, list(range(18)), [1] * 18
        for output in both(operands(*batch), 8, scan=scan):
            assert_drafts(output, *batch, 8, scan=scan)
