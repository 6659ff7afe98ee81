"""Continuations, held against the two calls that they stand for."""

from __future__ import annotations

import dataclasses
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdraft import Continuations, Datastore, DraftConfig, Engine
from fastdraft.errors import InvalidValueError, RequestLimitError, UnknownRequestError

FIELDS = tuple(field.name for field in dataclasses.fields(Continuations))


def row_of(out: Continuations, row: int) -> tuple[list[int], list[int], list[float]]:
    count = out.count[row]
    columns = (out.token_ids, out.parents, out.probabilities)
    tokens, parents, probabilities = (column[row, :count].tolist() for column in columns)
    return tokens, parents, probabilities


def flat(rows: list[list[int]]) -> tuple[list[int], list[int]]:
    return list(chain(*rows)), np.cumsum([0, *map(len, rows)]).tolist()


tokens = st.lists(st.integers(0, 3), max_size=12)


@given(
    st.lists(tokens.map(lambda some: some * 2), min_size=1, max_size=4),
    st.lists(st.lists(tokens, min_size=4, max_size=4), min_size=1, max_size=6),
    st.none() | st.integers(1, 24),
    st.integers(1, 10),
    st.integers(1, 30),
    st.booleans(),
)
def test_they_are_observe_batch_and_then_propose_batch(
    prompts: list[list[int]],
    steps: list[list[list[int]]],
    tree_budget: int | None,
    lookahead: int,
    room: int,
    with_store: bool,
) -> None:
    config = DraftConfig(lookahead=lookahead, tree_budget=tree_budget, vocabulary=3)
    engines = []
    for _ in range(2):
        stores = [Datastore()] if with_store else []
        for store in stores:
            store.add([1, 2, 0, 1, 3, 2, 1] * 3)
        engines.append(Engine(config, datastores=stores))
    ahead, oracle = engines
    ours = [ahead.add_request(prompt, prediction=[2, 1, 0, 2]) for prompt in prompts]
    theirs = [oracle.add_request(prompt, prediction=[2, 1, 0, 2]) for prompt in prompts]
    out = Continuations.allocate(len(prompts), room)
    for step in steps:
        emitted, offsets = flat(step[: len(prompts)])
        ahead.continue_batch(ours, emitted, offsets, out)
        oracle.observe_batch(theirs, emitted, offsets)
        limits = [room] * len(prompts)
        drafts = oracle.propose_batch(theirs, limits=limits, token_cost=0.0)
        for row, request in enumerate(theirs):
            assert out.base[row] == oracle.num_tokens(request)
            where = slice(drafts.offsets[row], drafts.offsets[row + 1])
            columns = (drafts.token_ids, drafts.parents, drafts.probabilities)
            assert row_of(out, row) == tuple(column[where].tolist() for column in columns)
            assert (np.diff(row_of(out, row)[2]) <= 0).all()
    assert ahead.calibration() == oracle.calibration()


def test_rows_go_where_they_are_sent() -> None:
    engine = Engine(DraftConfig(lookahead=4, tree_budget=8))
    requests = [engine.add_request([1, 2, 3, 1]), engine.add_request([5, 6, 7, 5, 6])]
    out = Continuations.allocate(4, 8)
    out.base[:] = -7
    engine.continue_batch(requests, [2, 7], [0, 1, 2], out, slots=[3, 1])
    assert out.base.tolist() == [-7, 6, -7, 5]
    assert row_of(out, 3)[0][:2] == [3, 1]
    assert row_of(out, 1)[0][:2] == [5, 6]


def test_a_failing_row_costs_itself_alone() -> None:
    engine = Engine(DraftConfig(lookahead=4, tree_budget=8, max_request_tokens=5))
    good = engine.add_request([1, 2, 1])
    full = engine.add_request([1, 2, 1, 2, 1])
    ended = engine.add_request([1])
    engine.cancel(ended)
    out = Continuations.allocate(3, 8)
    out.count[:] = 9
    with pytest.raises(RequestLimitError) as raised:
        engine.continue_batch([full, good, ended], [2, 2, 2], [0, 1, 2, 3], out)
    assert {row: type(error) for row, error in raised.value.rows.items()} == {
        0: RequestLimitError,
        2: UnknownRequestError,
    }
    assert out.count.tolist()[0::2] == [0, 0]
    assert out.base.tolist() == [0, 4, 0]
    assert row_of(out, 1)[0][0] == 1
    assert engine.num_tokens(full) == 5


def test_rows_of_one_request_take_their_tokens_in_order() -> None:
    engine = Engine(DraftConfig(lookahead=4, tree_budget=8))
    request = engine.add_request([1, 2, 3])
    out = Continuations.allocate(2, 8)
    engine.continue_batch([request, request], [1, 2], [0, 1, 2], out)
    assert out.base.tolist() == [5, 5]
    assert row_of(out, 0) == row_of(out, 1)
    assert row_of(out, 0)[0][0] == 3


def test_all_rows_of_a_request_teach() -> None:
    """The guess before them is compared with what all of them emitted."""
    calibrations = []
    for rows in ([[3, 1, 2, 0], [4]], [[3, 1], [4], [2], [0]]):
        engine = Engine(DraftConfig(lookahead=4, tree_budget=8))
        ids = [engine.add_request([1, 2, 3, 1, 2]), engine.add_request([4, 4, 4])]
        out = Continuations.allocate(4, 8)
        engine.continue_batch(ids, [], [0, 0, 0], out)
        owners = [ids[0], ids[1], ids[0], ids[0]][: len(rows)]
        emitted, offsets = flat(rows)
        engine.continue_batch(owners, emitted, offsets, out)
        calibrations.append(engine.calibration())
        assert engine.stats(ids[0]).steps == len(rows) - 1
    assert calibrations[0] == calibrations[1]


def test_the_last_of_several_rows_for_one_slot_stays() -> None:
    engine = Engine(DraftConfig(lookahead=4, tree_budget=8))
    request = engine.add_request([1, 2, 3])
    other = engine.add_request([7, 8, 7])
    out = Continuations.allocate(2, 8)
    requests = [other, request, request]
    engine.continue_batch(requests, [8, 1, 2], [0, 1, 2, 3], out, slots=[0, 0, 0])
    assert out.base.tolist() == [5, 0]
    assert row_of(out, 0)[0][0] == 3
    assert engine.num_tokens(other) == 4


def test_the_host_says_what_was_verified() -> None:
    engine = Engine(DraftConfig(lookahead=4, tree_budget=8))
    request = engine.add_request([1, 2, 3], prediction=[7, 8, 9, 4])
    out = Continuations.allocate(1, 8)
    engine.continue_batch([request], [], [0, 0], out)
    assert row_of(out, 0)[0][:2] == [7, 8]
    # The host drafted 7, 8, 9 and the target kept the first two.
    engine.continue_batch([request], [7, 8, 5], [0, 3], out, drafted=[3])
    engine.continue_batch([request], [6], [0, 1], out)
    stats = engine.finish(request)
    assert (stats.steps, stats.emitted, stats.drafts) == (2, 4, 1)
    assert (stats.drafted, stats.accepted) == (3, 2)
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (2, 1)


def test_rejected_tokens_of_a_prediction_are_counted_behind_another_likely_token() -> None:
    """The host drafted from an older guess than the one in which the prediction comes second."""
    engine = Engine(DraftConfig(lookahead=4, tree_budget=8))
    text = [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]
    request = engine.add_request(text, prediction=[20, 21, 22, 23])
    out = Continuations.allocate(1, 8)
    engine.continue_batch([request], [], [0, 0], out)
    children = [t for t, above in zip(*row_of(out, 0)[:2], strict=True) if above < 0]
    assert children[0] == 8 and 20 in children
    engine.continue_batch([request], [9], [0, 1], out, drafted=[1])
    stats = engine.finish(request)
    assert (stats.drafted, stats.accepted) == (1, 0)
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (0, 1)


def test_it_learns_from_emitted_tokens_whatever_was_verified() -> None:
    engine = Engine(DraftConfig(lookahead=4, tree_budget=8))
    before = engine.calibration()
    request = engine.add_request([1, 2, 3, 1, 2])
    out = Continuations.allocate(1, 8)
    engine.continue_batch([request], [], [0, 0], out)
    assert engine.calibration() == before
    engine.continue_batch([request], [3, 1], [0, 2], out, drafted=[0])
    assert engine.calibration() != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": [0, 2, 1]}, "offsets must rise"),
        ({"offsets": [0, 1]}, "one more entry"),
        ({"slots": [0, 2]}, r"slots must be below the 2 rows .* got 2 at index 1"),
        ({"slots": [-1, 0]}, "got -1 at index 0"),
        ({"slots": [0]}, "slots must have one entry"),
        ({"drafted": [0, -1]}, "drafted must be 0 or greater, got -1 at index 1"),
        ({"drafted": [0]}, "drafted must have one entry"),
    ],
)
def test_wrong_arguments_change_nothing(change: dict[str, list[int]], message: str) -> None:
    engine = Engine(DraftConfig(lookahead=4, tree_budget=8))
    requests = [engine.add_request([1, 2]), engine.add_request([3])]
    out = Continuations.allocate(2, 4)
    out.count[:] = 9
    arguments = {"offsets": [0, 1, 1], **change}
    with pytest.raises(InvalidValueError, match=message) as raised:
        engine.continue_batch(requests, [1], out=out, **arguments)
    assert not raised.value.rows
    assert [engine.num_tokens(request) for request in requests] == [2, 1]
    assert out.count.tolist() == [9, 9]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("fault", ["kind", "shape", "strides", "read-only", "no array"])
def test_arrays_that_do_not_fit_are_refused(name: str, fault: str) -> None:
    engine = Engine(DraftConfig(lookahead=4, tree_budget=8))
    request = engine.add_request([1, 2, 1])
    good = Continuations.allocate(2, 4)
    array = getattr(good, name)
    wrong = {
        "kind": array.astype(np.float64),
        "shape": array[None],
        "strides": np.zeros(tuple(2 * side for side in array.shape), array.dtype)[
            (slice(None, None, 2),) * array.ndim
        ],
        "read-only": array.copy(),
        "no array": None,
    }[fault]
    if fault == "read-only":
        wrong.flags.writeable = False
    with pytest.raises(InvalidValueError, match="of the continuations must"):
        engine.continue_batch([request], [2], [0, 1], dataclasses.replace(good, **{name: wrong}))
    assert engine.num_tokens(request) == 3
