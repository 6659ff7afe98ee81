"""Successors against an oracle, their limits, and drafts from them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdraft import DraftConfig, Engine, Offers, Source, Successors
from fastdraft.errors import InvalidValueError
from oracles import successors as oracle

tokens = st.integers(0, 5)
maybe = st.integers(-1, 5)
# Exact in float32, with products that tie.
probability = st.sampled_from([0.0, 0.00390625, 0.125, 0.25, 0.5, 0.625, 1.0])


def row_of(width: int) -> st.SearchStrategy[tuple[tuple[int, int], list[int], list[float]]]:
    ids = st.permutations(range(9)).map(lambda ids: list(ids[:width]))
    cut = st.integers(0, width)
    return st.tuples(
        st.tuples(maybe, maybe),
        st.tuples(ids, cut).map(lambda each: each[0][: each[1]] + [-1] * (width - each[1])),
        st.lists(probability, min_size=width, max_size=width),
    )


def trees_of(offers: Offers) -> list[list[tuple[int, int, float]]]:
    nodes = list(
        zip(
            np.asarray(offers.token_ids).tolist(),
            np.asarray(offers.parents).tolist(),
            np.asarray(offers.confidences).tolist(),
            strict=True,
        )
    )
    starts = np.asarray(offers.offsets).tolist()
    return [nodes[a:b] for a, b in pairwise(starts)]


@given(
    st.sampled_from([1, 4, 256]),
    st.integers(1, 8).flatmap(lambda width: st.lists(row_of(width), max_size=30)),
    st.lists(st.tuples(maybe, maybe, maybe), max_size=4),
)
def test_trees_are_those_of_the_oracle(slots, rows, ends):
    table, expected = Successors(slots=slots), oracle.Successors(slots)
    for part in (rows[:20], rows[20:]):
        if part:
            contexts, ids, probabilities = zip(*part, strict=True)
            table.learn(contexts, ids, probabilities)
            expected.learn(contexts, ids, probabilities)
    ends = np.array(ends, int).reshape(-1, 3)
    trees = [expected.tree(end) for end in ends.tolist()]
    assert trees_of(table.offers(ends)) == trees
    for nodes in (1, 5, 47):
        assert trees_of(table.offers(ends, nodes=nodes)) == [tree[:nodes] for tree in trees]


@given(
    st.integers(1, 8).flatmap(lambda width: st.lists(st.lists(row_of(width), max_size=6))),
    st.lists(st.tuples(st.integers(0, 3), st.tuples(maybe, maybe, maybe)), max_size=6),
    st.integers(1, 48),
)
def test_one_call_for_several_tables_does_what_one_for_each_does(parts, ends, nodes):
    """Part i is what table i % 4 learns, so that tables come several times."""
    alone, together = ([Successors(slots=64) for _ in range(4)] for _ in range(2))
    for number, part in enumerate(parts):
        if part:
            alone[number % 4].learn(*zip(*part, strict=True))
    rows = [row for part in parts for row in part]
    if rows:
        offsets = np.cumsum([0, *map(len, parts)])
        tables = [together[number % 4] for number in range(len(parts))]
        Successors.learn_each(tables, offsets, *zip(*rows, strict=True))
    found = Successors.offers_each(
        [together[table] for table, _ in ends],
        np.array([end for _, end in ends], int).reshape(-1, 3),
        nodes=nodes,
        kind="logits",
    )
    assert found.kind == "logits"
    assert trees_of(found) == [
        tree for table, end in ends for tree in trees_of(alone[table].offers([end], nodes=nodes))
    ]


def test_a_runner_up_of_the_last_position_is_offered_first():
    table = Successors()
    # After 1, 2 the target was torn between 3, which it emitted, and 4.
    table.learn([[1, 2]], [[3, 4, 5]], [[0.5, 0.4, 0.05]])
    assert trees_of(table.offers([[1, 2, 3]])) == [
        [(4, -1, pytest.approx(0.8)), (5, -1, pytest.approx(0.1))]
    ]


def test_an_engine_drafts_them_and_learns_what_they_are_worth():
    engine = Engine(DraftConfig(tree_budget=32, token_cost=0.003))
    table = Successors()
    request = engine.add_request([1, 2, 3])
    table.learn([[2, 3], [3, 7]], [[7, 8], [9, 6]], [[0.9, 0.05], [0.8, 0.1]])
    drafts = engine.propose_batch([request], offers=table.offers([[1, 2, 3]]))
    assert drafts.tolist()[0][:2] == [7, 9]
    assert (drafts.sources == Source.OFFER).all()
    assert engine.offer_kinds == ("successors",)


def test_slots_are_bounded_and_rounded_up():
    assert Successors(slots=5).slots == 8
    assert Successors(slots=5).num_bytes == 8 * 72
    for slots in (0, -1, 2**24 + 1):
        with pytest.raises(InvalidValueError, match=f"slots must be at .*, got {slots}"):
            Successors(slots=slots)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2, 3]], [[1]], [[0.5]]), "contexts must be rows of 2 tokens"),
        (([[1, 2]], [1], [0.5]), "token_ids must be rows"),
        (([[1, 2]], [[1], [2]], [[0.5], [0.5]]), "a row for each of 1 contexts"),
        (([[1, 2]], [[1]], [[0.5, 0.5]]), "must have one shape"),
        (([[1, 2]], [[*range(9)]], [[0.1] * 9]), "of a context must be at most 8, got 9"),
        (([[1, -2]], [[1]], [[0.5]]), "contexts must be -1 or greater, got -2 at index 1"),
        (([[1, 2]], [[1]], [[1.5]]), "probabilities must be from 0 to 1, got 1.5"),
        (([[1, 2]], [[1]], [[float("nan")]]), "probabilities must be from 0 to 1"),
        (([[1, 2]], [[2**31]], [[0.5]]), "token_ids must be at most 2147483647"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_learned(arguments, message):
    table = Successors()
    with pytest.raises(InvalidValueError, match=message):
        table.learn(*arguments)
    assert trees_of(table.offers([[0, 1, 2]])) == [[]]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 1], "one more than 2 tables and end at 2, got 2 that end at 1"),
        ([], "one more than 2 tables and end at 2, got 0"),
        ([0, 1, 3], "end at 2, got 3 that end at 3"),
        ([0, 3, 2], "offsets must rise from 0, got 2 at index 2"),
        ([1, 1, 2], "offsets must rise from 0, got 1 at index 0"),
        ([-1, 1, 2], "offsets must rise from 0, got -1 at index 0"),
    ],
)
def test_wrong_offsets_are_refused_and_nothing_learned(offsets, message):
    tables = [Successors(slots=8), Successors(slots=8)]
    with pytest.raises(InvalidValueError, match=message):
        Successors.learn_each(tables, offsets, [[1, 2], [1, 2]], [[3], [3]], [[0.5], [0.5]])
    assert trees_of(Successors.offers_each(tables, [[0, 1, 2]] * 2)) == [[], []]


def test_what_calls_for_trees_and_for_several_tables_refuse():
    table = Successors(slots=8)
    with pytest.raises(InvalidValueError, match="ends must be rows of 3 tokens"):
        table.offers([1, 2, 3])
    with pytest.raises(InvalidValueError, match="ends must be -1 or greater, got -5 at index 2"):
        table.offers([[1, 2, -5]])
    with pytest.raises(InvalidValueError, match="probabilities must be from 0 to 1"):
        Successors.learn_each([table, table], [0, 1, 2], [[1, 2]] * 2, [[3]] * 2, [[0.5], [2.0]])
    assert trees_of(table.offers([[0, 1, 2]])) == [[]]
    with pytest.raises(InvalidValueError, match="a row for each of 1 tables, got 2"):
        Successors.offers_each([table], [[0, 1, 2]] * 2)
    for nodes in (0, 49):
        with pytest.raises(InvalidValueError, match=f"nodes must be at .*, got {nodes}"):
            table.offers([[0, 1, 2]], nodes=nodes)
    for wrong in (None, 3):
        with pytest.raises(TypeError, match="tables must be Successors, got <class '"):
            Successors.offers_each([wrong], [[0, 1, 2]])
    with pytest.raises(TypeError, match="__init__"):
        Successors.offers_each([Successors.__new__(Successors)], [[0, 1, 2]])
