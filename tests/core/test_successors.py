"""Successors against an oracle, their limits, and drafts from them."""

from __future__ import annotations

import threading
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
chances = st.sampled_from([0.0, 0.00390625, 0.125, 0.25, 0.5, 0.625, 1.0])


def row_of(width: int) -> st.SearchStrategy[tuple[tuple[int, int], list[int], list[float]]]:
    ids = st.permutations(range(9)).map(lambda ids: list(ids[:width]))
    cut = st.integers(0, width)
    return st.tuples(
        st.tuples(maybe, maybe),
        st.tuples(ids, cut).map(lambda each: each[0][: each[1]] + [-1] * (width - each[1])),
        st.lists(chances, min_size=width, max_size=width),
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
    found = trees_of(table.offers(np.array(ends, int).reshape(-1, 3)))
    assert found == [expected.tree(end) for end in ends]


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
    for slots in (0, -1, 2**24 + 1):
        with pytest.raises(InvalidValueError, match=f"slots must be 1 to 16777216, got {slots}"):
            Successors(slots=slots)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2, 3]], [[1]], [[0.5]]), "contexts must be rows of 2 tokens"),
        (([[1, 2]], [1], [0.5]), "token_ids must be rows"),
        (([[1, 2]], [[1], [2]], [[0.5], [0.5]]), "a row for each of 1 contexts"),
        (([[1, 2]], [[1]], [[0.5, 0.5]]), "must have one shape"),
        (([[1, 2]], [[*range(9)]], [[0.1] * 9]), "at most 8 successors, got 9"),
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


def test_wrong_ends_are_refused():
    with pytest.raises(InvalidValueError, match="ends must be rows of 3 tokens"):
        Successors().offers([1, 2, 3])
    with pytest.raises(InvalidValueError, match="ends must be -1 or greater, got -5 at index 2"):
        Successors().offers([[1, 2, -5]])


def test_threads_share_a_table():
    table = Successors(slots=64)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 20, (200, 6))
    rows = tokens[:, :2], tokens[:, 2:], random.random((200, 4))
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                table.learn(*rows)
                table.offers(tokens[:, :3])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
