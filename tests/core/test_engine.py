"""The engine as Python sees it, held against the oracles in tests/support/oracles."""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastdraft import Datastore, DraftConfig, DraftStats, Engine, Source
from fastdraft.config import PredictedOutputs, PromptLookup
from fastdraft.errors import (
    FastdraftError,
    InvalidValueError,
    MemoryLimitError,
    RequestLimitError,
    UnknownRequestError,
)
from oracles.acceptance_model import AcceptanceModel
from oracles.calibrated_drafter import CalibratedDrafter
from oracles.prompt_lookup import prompt_lookup
from oracles.running_texts import RunningTexts
from oracles.token_weights import TokenWeights


def texts(max_size: int = 80) -> st.SearchStrategy[list[int]]:
    """Small alphabets and long repeats: where an index goes wrong."""
    small = st.integers(1, 4).flatmap(
        lambda top: st.lists(st.integers(0, top - 1), max_size=max_size)
    )
    motif = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    repeats = st.tuples(motif, st.integers(1, 12), st.lists(st.integers(0, 2), max_size=6)).map(
        lambda parts: parts[0] * parts[1] + parts[2]
    )
    long = st.lists(repeats, max_size=4).map(lambda runs: list(chain(*runs))[:max_size])
    return st.one_of(small, long)


@given(texts(), st.lists(texts(6), max_size=12), st.integers(1, 5), st.integers(1, 12))
def test_prompt_lookup_is_the_oracles(
    prompt: list[int], steps: list[list[int]], max_ngram: int, num_tokens: int
) -> None:
    engine = Engine(DraftConfig.prompt_lookup(max_ngram, num_tokens))
    request = engine.add_request(prompt)
    text = list(prompt)
    for emitted in steps:
        draft = engine.propose(request)
        assert draft.tolist() == prompt_lookup(text, max_ngram, num_tokens)
        assert (draft.probabilities == 1).all()
        engine.observe(request, emitted)
        text += emitted


@settings(max_examples=200, deadline=None)
@given(texts(60), st.integers(1, 5), st.integers(1, 12), st.integers(0, 40))
def test_prompt_lookup_is_transformers(
    text: list[int], max_ngram: int, num_tokens: int, room: int
) -> None:
    torch = pytest.importorskip("torch")
    generators = pytest.importorskip("transformers.generation.candidate_generator")
    if not text:
        return
    max_length = len(text) + 1 + room
    theirs = generators.PromptLookupCandidateGenerator(
        num_output_tokens=num_tokens, max_matching_ngram_size=max_ngram, max_length=max_length
    )
    ids, _ = theirs.get_candidates(torch.tensor([text]))
    engine = Engine(DraftConfig.prompt_lookup(max_ngram, num_tokens))
    draft = engine.propose(engine.add_request(text), limit=room).tolist()
    assert draft == ids[0, len(text) :].tolist()[:room]


class EngineAgainstLists(RuleBasedStateMachine):
    """Any order of calls, against drafters that share what they learned, and perhaps a store."""

    @initialize(
        lookahead=st.integers(1, 8),
        tree_budget=st.none() | st.integers(1, 12),
        shares=st.booleans(),
    )
    def start(self, lookahead: int, tree_budget: int | None, shares: bool) -> None:
        self.lookahead = lookahead
        self.tree = tree_budget is not None
        self.most = tree_budget or lookahead
        self.limit = 120
        self.stores = [Datastore(max_bytes=1 << 22)] if shares else []
        for store in self.stores:
            store.add(range(1000, 2400))  # enough for weights that name tokens
        self.engine = Engine(
            DraftConfig(
                lookahead=lookahead,
                tree_budget=tree_budget,
                token_cost=0,
                max_request_tokens=self.limit,
            ),
            datastores=self.stores,
        )
        self.running = RunningTexts()
        self.acceptance = AcceptanceModel(self.engine.calibration().weights)
        self.named: TokenWeights | None = None
        self.drafters: dict[int, CalibratedDrafter] = {}
        self.counts: dict[int, list[int]] = {}
        self.ended: list[int] = []

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.drafters)))

    def record(self, request: int, emitted: list[int]) -> None:
        drafter = self.drafters[request]
        drafted = len(drafter.draft)
        accepted = drafter.accepted(emitted)
        predicted = sum(node.candidate.source == Source.PREDICTION for node in drafter.draft)
        confirmed = sum(node.candidate.source == Source.PREDICTION for node in accepted)
        if emitted:
            counts = [1, len(emitted), drafted > 0, drafted, len(accepted)]
            counts += [confirmed, predicted - confirmed]
            counts += [
                sum(node.candidate.source == source for node in accepted) for source in Source
            ]
            self.counts[request] = [
                a + b for a, b in zip(self.counts[request], counts, strict=True)
            ]
        drafter.observe(emitted)
        self.running.observe(request, emitted)

    @rule(prompt=texts(40), prediction=st.none() | texts(20))
    def add(self, prompt: list[int], prediction: list[int] | None) -> None:
        request = self.engine.add_request(np.array(prompt, dtype=np.int64), prediction=prediction)
        assert request not in self.drafters
        assert request not in self.ended
        for store in self.stores:
            self.named = TokenWeights.of(store, self.named)
        self.drafters[request] = CalibratedDrafter(
            prompt,
            self.acceptance,
            lookahead=self.lookahead,
            tree=self.tree,
            prediction=prediction or [],
            stores=[
                source for store in self.stores for source in (store, self.running.others(request))
            ],
            named=self.named,
        )
        self.running.add(request, prompt)
        self.counts[request] = [0] * (7 + len(Source))

    @precondition(lambda self: self.drafters)
    @rule(data=st.data(), limit=st.none() | st.integers(0, 10))
    def propose(self, data: st.DataObject, limit: int | None) -> None:
        request = self.pick(data)
        draft = self.engine.propose(request, limit=limit)
        self.drafters[request].follow(draft, self.most if limit is None else min(limit, self.most))

    @precondition(lambda self: self.drafters)
    @rule(data=st.data())
    def propose_batch(self, data: st.DataObject) -> None:
        requests = data.draw(st.lists(st.sampled_from(sorted(self.drafters)), unique=True))
        batch = self.engine.propose_batch(requests)
        assert len(batch) == len(requests)
        for row, request in enumerate(requests):
            row_of_batch = slice(*batch.offsets[row : row + 2].tolist())
            self.drafters[request].follow(batch, self.most, row=row_of_batch)
        assert batch.offsets.tolist() == np.cumsum([0] + [len(d) for d in batch.tolist()]).tolist()

    @precondition(lambda self: self.drafters)
    @rule(data=st.data(), emitted=texts(8))
    def observe(self, data: st.DataObject, emitted: list[int]) -> None:
        request = self.pick(data)
        if data.draw(st.booleans()):
            drafter = self.drafters[request]
            emitted = drafter.path_to(min(len(drafter.draft), 4) - 1) + emitted
        if len(self.drafters[request].text) + len(emitted) > self.limit:
            with pytest.raises(RequestLimitError, match=f"request {request}: max_request_tokens"):
                self.engine.observe(request, emitted)
            return
        self.engine.observe(request, emitted)
        self.record(request, emitted)

    @precondition(lambda self: self.drafters)
    @rule(data=st.data())
    def observe_batch(self, data: st.DataObject) -> None:
        requests = data.draw(st.lists(st.sampled_from(sorted(self.drafters)), unique=True))
        requests = [r for r in requests if len(self.drafters[r].text) + 4 <= self.limit]
        rows = [data.draw(st.lists(st.integers(0, 3), max_size=4)) for _ in requests]
        flat = np.fromiter(chain(*rows), dtype=np.int32)
        offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
        self.engine.observe_batch(np.array(requests, dtype=np.int64), flat, offsets)
        for request, row in zip(requests, rows, strict=True):
            self.record(request, row)

    @precondition(lambda self: self.drafters)
    @rule(data=st.data(), cancel=st.booleans())
    def end(self, data: st.DataObject, cancel: bool) -> None:
        request = self.pick(data)
        stats = self.engine.stats(request)
        if cancel:
            self.engine.cancel(request)
        else:
            assert self.engine.finish(request) == stats
        del self.drafters[request]
        self.running.end(request)
        self.ended.append(request)
        with pytest.raises(UnknownRequestError, match=f"unknown request {request}:"):
            self.engine.finish(request)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert self.engine.num_requests == len(self.drafters)
        assert (self.engine.num_bytes > 0) == bool(self.drafters)
        for request, drafter in self.drafters.items():
            assert self.engine.num_tokens(request) == len(drafter.text)
            assert self.engine.stats(request) == DraftStats(
                *self.counts[request][:7], accepted_by_source=tuple(self.counts[request][7:])
            )


TestEngineAgainstLists = EngineAgainstLists.TestCase
TestEngineAgainstLists.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_torch_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    engine = Engine(DraftConfig(lookahead=1, token_cost=0))
    request = engine.add_request(torch.tensor([1, 2, 1]))
    engine.observe(request, torch.tensor([2, 1]))
    assert engine.propose(request).tolist() == [2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -2], r"prompt_ids must be 0 or greater, got -2 at index 1"),
        ([2**31], r"prompt_ids must be at most 2147483647 .*got 2147483648 at index 0"),
        ([10**30], r"got 1000000000000000000000000000000 at index 0"),
        (np.array([2**40]), r"got 1099511627776 at index 0"),
        (np.array([2**63], dtype=np.uint64), r"got 9223372036854775808 at index 0"),
        ([1, "a"], r"prompt_ids must be integers, got 'a' at index 1"),
        ([1.5], r"prompt_ids must be integers, got 1.5 at index 0"),
        (np.array([1.5]), r"prompt_ids must be one row of integers, got 1 dimensions of float64"),
        (np.zeros((2, 2), dtype=np.int32), r"one row of integers, got 2 dimensions of int32"),
        ("text", r"one row of integers, got 0 dimensions"),
    ],
)
def test_bad_tokens_are_named(ids: object, message: str) -> None:
    engine = Engine()
    with pytest.raises(InvalidValueError, match=message):
        engine.add_request(ids)
    assert engine.num_requests == 0
    assert engine.num_bytes == 0


def test_a_list_that_changes_while_it_is_read_is_refused() -> None:
    ids: list[object] = [1]

    class Emptying:
        def __index__(self) -> int:
            ids.clear()
            return 2

    ids += [Emptying(), 3]
    with pytest.raises(InvalidValueError, match="prompt_ids changed while it was read"):
        Engine().add_request(ids)


class Stopping:
    """A number, or a row of them, whose making is interrupted."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __index__(self) -> int:
        raise self.error

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a caller's own")])
def test_what_a_callers_own_code_raises_stays_what_it_is(error: BaseException) -> None:
    engine = Engine()
    request = engine.add_request([1, 2])
    stopping = Stopping(error)
    calls: list[Callable[[], object]] = [
        lambda: engine.add_request([1, stopping]),
        lambda: engine.add_request(stopping),
        lambda: engine.add_request([1], prediction=[stopping]),
        lambda: engine.propose(stopping),  # type: ignore[arg-type]
        lambda: engine.propose_batch([stopping]),
        lambda: engine.propose_batch(stopping),
        lambda: engine.propose_batch([request], limits=[stopping]),
        lambda: engine.observe(request, [stopping]),
        lambda: engine.observe(request, stopping),
        lambda: engine.observe(stopping, [1]),  # type: ignore[arg-type]
        lambda: engine.observe_batch([request], [1], [0, stopping]),
    ]
    for call in calls:
        with pytest.raises(type(error)) as raised:
            call()
        assert raised.value is error
    assert engine.num_requests == 1
    assert engine.num_tokens(request) == 2


def test_callers_code_may_call_the_engine_meanwhile() -> None:
    engine = Engine(DraftConfig(lookahead=2, token_cost=0))
    request = engine.add_request([1, 2, 3, 1, 2])

    class Calling:
        def __index__(self) -> int:
            engine.observe(request, [3])
            assert engine.propose_batch([request]).tolist() == [[1, 2]]
            return 1

    engine.observe(request, [Calling()])
    assert engine.num_tokens(request) == 7
    assert engine.propose(request).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((1, 2, 3), [1, 2, 3]),
        (range(1, 4), [1, 2, 3]),
        (array.array("i", [1, 2, 3]), [1, 2, 3]),
        (memoryview(array.array("q", [1, 2, 3])), [1, 2, 3]),
        (np.array([1, 2, 3], dtype=np.int32), [1, 2, 3]),
        (np.array([1, 2, 3], dtype=np.uint8), [1, 2, 3]),
        (np.array([1, 2, 3], dtype=np.uint64), [1, 2, 3]),
        (np.array([1, 0, 2, 0, 3], dtype=np.int32)[::2], [1, 2, 3]),
        (np.array([1, 2, 3], dtype=">i4"), [1, 2, 3]),
        (np.array([1, 2, 3], dtype=">u8"), [1, 2, 3]),
        (np.array([1, 2, 3], dtype="<i8")[::-1], [3, 2, 1]),
        (memoryview(b"\0" + np.array([1, 2, 3], np.int32).tobytes())[1:].cast("i"), [1, 2, 3]),
        (np.frombuffer(b"\0" + np.array([7, 8], np.int64).tobytes(), np.int64, 2, 1), [7, 8]),
        (np.array([[1, 2]], dtype=np.int32)[0], [1, 2]),
        (np.array(5, dtype=np.int32), None),
        (np.array([1, 2], dtype=object), None),
        (np.array([True, False]), None),
        (np.array([(1, 2)], dtype=[("a", np.int32), ("b", np.int32)]), None),
        (np.array(["1"]), None),
        (np.array([1], dtype="m8[s]"), None),
        (np.array([1], dtype="M8[s]"), None),
        (b"\1\2", None),
        (None, None),
        ({1: 2}, None),
        ([[1], [2, 3]], None),
    ],
)
def test_rows_of_any_layout_are_taken_and_others_refused(
    ids: object, expected: list[int] | None
) -> None:
    store = Datastore(max_bytes=1 << 20)
    engine = Engine(datastores=[store])
    if expected is None:
        with pytest.raises(InvalidValueError, match="prompt_ids must be"):
            engine.add_request(ids)
        assert engine.num_requests == 0
        return
    request = engine.add_request(ids, prediction=ids, templates=ids)
    engine.observe(request, ids)
    engine.finish(request)
    # A mark stands before each document.
    assert store.read(store.begin + 1, 10).tolist() == expected * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e, r: e.propose(r, limit=-1), "limit must be 0 or greater, got -1"),
        (lambda e, r: e.propose(r, token_cost=-0.5), "token_cost must be .* got -0.5"),
        (lambda e, r: e.propose(r, token_cost=float("nan")), "token_cost must be .* got nan"),
        (lambda e, r: e.propose(r, token_cost=0.1, cost=[1.0]), "either token_cost or cost"),
        (lambda e, r: e.propose(r, cost=[]), "cost must be one row of times.*got 0 values"),
        (lambda e, r: e.propose(r, cost=[1.0, 0.0]), "times above 0, got 0.0.* for 2 tokens"),
        (lambda e, r: e.propose(r, cost=[float("inf")]), "times above 0, got inf"),
        (lambda e, r: e.propose_batch([r], limits=[1, 2]), "limits must have one entry.*got 2"),
        (lambda e, r: e.propose_batch([r], limits=[-3]), "limits must be 0 or greater, got -3"),
        (lambda e, r: e.observe(r, [-1]), "emitted_ids must be 0 or greater, got -1 at index 0"),
        (lambda e, r: e.observe_batch([r], [1], [0]), "one more entry than the 1 requests, got 1"),
        (lambda e, r: e.observe_batch([r], [1], [0, 2]), "offsets must rise from 0 .* got 0 .. 2"),
        (lambda e, r: e.observe_batch([r, r], [1], [0, 3, 1]), "offsets must rise"),
    ],
)
def test_bad_calls_are_named_and_change_nothing(
    call: Callable[[Engine, int], object], message: str
) -> None:
    engine = Engine()
    request = engine.add_request([1, 2, 3])
    with pytest.raises(InvalidValueError, match=message):
        call(engine, request)
    assert engine.num_tokens(request) == 3
    assert engine.stats(request) == DraftStats()


def test_unknown_requests_are_named() -> None:
    engine = Engine()
    gone = engine.add_request([1])
    engine.cancel(gone)
    for request in (gone, -1, 12345, 2**62):
        for call in (
            engine.propose,
            engine.finish,
            engine.cancel,
            engine.stats,
            engine.num_tokens,
            lambda r: engine.propose(r, limit=3),
            lambda r: engine.observe(r, [1]),
            lambda r: engine.observe_batch([r], [1], [0, 1]),
        ):
            with pytest.raises(UnknownRequestError, match=f"unknown request {request}:"):
                call(request)
        assert engine.propose_batch([request]).tolist() == [[]]
    with pytest.raises(OverflowError):
        engine.propose(2**80)
    with pytest.raises(TypeError):
        engine.propose("1")  # type: ignore[arg-type]
    assert issubclass(UnknownRequestError, FastdraftError)


def test_a_row_that_fails_costs_that_row_alone() -> None:
    engine = Engine(DraftConfig(lookahead=16, token_cost=0, max_request_tokens=20))
    requests = [engine.add_request([1, 2, 3] * 5) for _ in range(5)]
    engine.cancel(requests[1])
    drafts = engine.propose_batch(requests)
    assert [len(draft) for draft in drafts.tolist()] == [16, 0, 16, 16, 16]
    rows = [[1], [2], [1] * 6, [7, -8], [9]]
    with pytest.raises(UnknownRequestError) as raised:
        engine.observe_batch(requests, [*chain(*rows)], np.cumsum([0, *map(len, rows)]))
    errors = raised.value.rows
    assert [(row, type(error)) for row, error in errors.items()] == [
        (1, UnknownRequestError),
        (2, RequestLimitError),
        (3, InvalidValueError),
    ]
    assert str(raised.value) == str(errors[1])
    assert f"request {requests[2]}: max_request_tokens is 20" in str(errors[2])
    assert "got -8 at index 1" in str(errors[3])
    del requests[1]
    assert [engine.num_tokens(request) for request in requests] == [16, 15, 15, 16]
    assert [engine.stats(request).drafted for request in requests] == [16, 0, 0, 16]

    # Wrong as a whole: nothing is observed.
    with pytest.raises(InvalidValueError) as refused:
        engine.observe_batch(requests, [1] * 4, [0, 1, 3, 2, 4])
    assert refused.value.rows == {}
    assert [engine.num_tokens(request) for request in requests] == [16, 15, 15, 16]


def test_a_host_that_cuts_drafts_says_what_was_verified() -> None:
    engine = Engine(DraftConfig(lookahead=4, token_cost=0.0))
    ids = [engine.add_request([1, 2], prediction=[7, 8, 9, 4]) for _ in range(2)]
    assert engine.propose_batch(ids).tolist() == [[7, 8, 9, 4]] * 2
    # The first row's draft was cut: its third token is the target's own.
    emitted = [7, 8, 9, 7, 8, 9, 4, 5]
    for wrong, message in ([2], "one entry"), ([-1, 4], "got -1 at index 0"):
        with pytest.raises(InvalidValueError, match=message):
            engine.observe_batch(ids, emitted, [0, 3, 8], drafted=wrong)
    engine.observe_batch(ids, emitted, [0, 3, 8], drafted=[2, 9])
    counts = [engine.finish(request) for request in ids]
    assert [(each.drafted, each.accepted) for each in counts] == [(2, 2), (4, 4)]


def test_limits_leave_everything_before_them_intact() -> None:
    engine = Engine(DraftConfig(max_request_tokens=4, max_bytes=100_000))
    with pytest.raises(RequestLimitError, match=r"max_request_tokens is 4: prompt_ids has 5"):
        engine.add_request(range(5))
    with pytest.raises(RequestLimitError, match=r"max_request_tokens is 4: prediction has 6"):
        engine.add_request([], prediction=range(6))
    request = engine.add_request(range(3))
    with pytest.raises(RequestLimitError, match=r"holds 3 tokens and 2 more"):
        engine.observe(request, [1, 2])
    engine.observe(request, [0])
    assert engine.propose(request, token_cost=0, limit=2).tolist() == [1, 2]

    small = Engine(DraftConfig(max_bytes=100_000))
    kept = small.add_request(range(100))
    with pytest.raises(MemoryLimitError, match=r"max_bytes is 100000: \d+ bytes are in use"):
        small.add_request(range(10_000))
    with pytest.raises(MemoryLimitError, match=r"\d+ of 10000 observed tokens were taken"):
        small.observe(kept, range(10_000))
    assert 100 < small.num_tokens(kept) < 10_000
    assert small.num_bytes <= 100_000


def test_max_bytes_holds_what_short_requests_take_for_drafting() -> None:
    script = """
import resource
from fastdraft import DraftConfig, Engine
from fastdraft.errors import MemoryLimitError

engine = Engine(DraftConfig(max_bytes=8 << 20))
most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
engine.propose(engine.add_request([1, 2, 3, 4] * 4))
before, refused = most(), False
for _ in range(5_000):
    try:
        engine.propose(engine.add_request([1, 2, 3, 4] * 4))
    except MemoryLimitError:
        refused = True
print(most() - before, refused)
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    grown, refused = printed.stdout.split()
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(grown) * unit < 2 * (8 << 20)
    assert refused == b"True"


def test_a_request_without_memory_for_drafting_goes_on_without_drafts() -> None:
    engine = Engine(DraftConfig(max_bytes=200_000, token_cost=0, tree_budget=4096, lookahead=256))
    text = np.random.default_rng(0).integers(0, 4, 200)
    last = engine.add_request(text)
    with pytest.raises(MemoryLimitError, match=r"max_bytes is 200000: \d+ bytes are in use"):
        deque(engine.add_request([1, 2, 3, 4] * 4) for _ in range(100))
    # A large tree takes more memory than the request began with.
    assert len(engine.propose(last)) == 0
    assert engine.propose_batch([last]).offsets.tolist() == [0, 0]
    engine.observe(last, [1])
    assert engine.num_bytes <= 200_000
    # A small one does not.
    assert len(engine.propose(last, limit=4)) == 4
    assert engine.finish(last).emitted == 1


@pytest.mark.parametrize(
    ("config", "prediction"),
    [(DraftConfig.ngram(), []), (DraftConfig.predicted_outputs(), range(700))],
    ids=["ngram", "predicted_outputs"],
)
def test_max_bytes_counts_what_a_drafter_keeps(
    config: DraftConfig, prediction: Sequence[int]
) -> None:
    prompt = np.random.default_rng(0).integers(0, 40, 400).tolist()
    plain, unlimited = Engine(DraftConfig.prompt_lookup()), Engine(config)
    plain.add_request(prompt)
    expected = unlimited.propose(unlimited.add_request(prompt, prediction=prediction)).tolist()
    for max_bytes in range(2_000, 200_000, 499):
        engine = Engine(dataclasses.replace(config, max_bytes=max_bytes))
        try:
            request = engine.add_request(prompt, prediction=prediction)
        except MemoryLimitError:
            assert engine.num_bytes == engine.num_requests == 0
            continue
        break
    assert plain.num_bytes < engine.num_bytes <= max_bytes
    assert engine.propose(request).tolist() == expected
    engine.finish(request)
    assert engine.num_bytes == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftConfig(lookahead=0), "lookahead must be at least 1, got 0"),
        (lambda: DraftConfig(lookahead=70_000), "lookahead must be at most 65536, got 70000"),
        (lambda: DraftConfig(lookahead=1.5), "lookahead must be an integer, got 1.5"),
        (lambda: DraftConfig(lookahead=True), "lookahead must be an integer, got True"),
        (lambda: DraftConfig(token_cost=-1), "token_cost must be .*got -1"),
        (lambda: DraftConfig(token_cost="x"), "token_cost must be .*got 'x'"),
        (
            lambda: DraftConfig(objective="first"),
            "objective must be 'tokens' or 'last', got 'first'",
        ),
        (lambda: DraftConfig(objective=None), "objective must be 'tokens' or 'last', got None"),
        (
            lambda: DraftConfig(objective="last", drafter=PromptLookup()),
            "objective is for the default drafter, got 'last' with PromptLookup",
        ),
        (lambda: DraftConfig(max_bytes=0), "max_bytes must be at least 1, got 0"),
        (lambda: DraftConfig(vocabulary=0), "vocabulary must be at least 1, got 0"),
        (lambda: DraftConfig(vocabulary=2**31 + 1), "vocabulary must be at most 2147483648"),
        (lambda: DraftConfig(threads=-1), "threads must be at least 0, got -1"),
        (lambda: DraftConfig(max_request_tokens=2**26), "max_request_tokens must be at most"),
        (lambda: DraftConfig.prompt_lookup(0), "max_ngram must be at least 1, got 0"),
        (lambda: DraftConfig.prompt_lookup(3, 0), "lookahead must be at least 1, got 0"),
        (lambda: DraftConfig.ngram(0), "order must be at least 1, got 0"),
        (lambda: DraftConfig.ngram(17), "order must be at most 16, got 17"),
        (lambda: DraftConfig.ngram(4, 1.5), "min_probability must be .* from 0 to 1, got 1.5"),
        (lambda: DraftConfig.ngram(4, float("nan")), "min_probability must be .*got nan"),
        (lambda: DraftConfig.ngram(4, "x"), "min_probability must be .*got 'x'"),
        (lambda: DraftConfig.ngram(lookahead=0), "lookahead must be at least 1, got 0"),
        (lambda: DraftConfig.ngram(4, None), "min_probability must be .*got None"),
        (lambda: DraftConfig.predicted_outputs(0), "lookahead must be at least 1, got 0"),
        (lambda: DraftConfig.predicted_outputs(recovery=0), "recovery must be at least 1, got 0"),
        (
            lambda: DraftConfig.predicted_outputs(recovery=1.5),
            "recovery must be an integer, got 1.5",
        ),
        (lambda: DraftConfig(drafter="ngram"), "drafter must be None, PromptLookup, .*got 'ngram'"),
        (
            lambda: DraftConfig(drafter=PredictedOutputs(), tree_budget=8),
            r"tree_budget is for the default drafter, got 8 with PredictedOutputs\(recovery=32\)",
        ),
    ],
)
def test_bad_configurations_are_named(make: Callable[[], DraftConfig], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()


def test_engines_and_live_stores_are_shared_by_copies_and_not_pickled() -> None:
    store = Datastore(max_bytes=1 << 20)
    engine = Engine(datastores=[store])
    assert copy.deepcopy([engine, store]) == [engine, store]
    for shared, what in ((engine, "make one in each process"), (store, "save it")):
        with pytest.raises(TypeError, match=f"cannot be pickled: {what}"):
            pickle.dumps(shared)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_session_ends_the_requests_that_it_added(error: type[BaseException] | None) -> None:
    engine = Engine(datastores=[Datastore(max_bytes=1 << 20)])
    outside = engine.add_request([1, 2])
    ending = contextlib.nullcontext() if error is None else pytest.raises(error)
    with ending, engine.session() as session:
        first, second, third = (session.add_request([number, 5]) for number in range(3))
        assert session.finish(first) == DraftStats()
        session.cancel(second)
        fourth = session.add_request([3])
        engine.finish(third)  # by somebody else, which a session forgives
        assert engine.num_tokens(fourth) == 1
        if error is not None:
            raise error
    assert engine.num_requests == 1
    assert engine.num_tokens(outside) == 2
    with pytest.raises(UnknownRequestError):
        session.cancel(fourth)


def test_configurations_are_values() -> None:
    config = DraftConfig(lookahead=4)
    assert config == pickle.loads(pickle.dumps(config)) == dataclasses.replace(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lookahead = 5  # type: ignore[misc]
    assert Engine(config).config is config
    with pytest.raises(TypeError, match="config must be a DraftConfig, got 4"):
        Engine(4)  # type: ignore[arg-type]


def test_cost_decides_the_length() -> None:
    engine = Engine(DraftConfig(lookahead=16))
    request = engine.add_request([1, 2, 3, 4] * 20)
    free = engine.propose(request, token_cost=0)
    assert len(free) == 16
    assert len(engine.propose(request, token_cost=10)) == 0
    # A token costs what a new engine expects to be emitted meanwhile, 1.5 in the time of a step:
    # it has to be as likely, and more by a premium that fades, worth * (1.3 - 0.3 * worth).
    cost = (1.3 - (1.69 - 1.2 * float(free.probabilities[7:9].mean())) ** 0.5) / 0.6 / 1.5
    priced = engine.propose(request, token_cost=cost)
    assert priced.tolist() == free.tolist()[:8]
    # The same cost as a curve draws the same draft.
    curve = 1 + cost * np.arange(20)
    assert engine.propose(request, cost=curve).tolist() == priced.tolist()
    # A forward that is dear until it is wide: all or nothing.
    step = np.array([1.0] + [1.9] * 30)
    assert len(engine.propose(request, cost=step)) == 16
    # In a padded batch the idle row pays too.
    idle = engine.add_request([5, 6, 7])
    ragged = engine.propose_batch([request, idle], token_cost=0.15)
    padded = engine.propose_batch([request, idle], token_cost=0.15, padded=True)
    assert len(padded.tolist()[0]) < len(ragged.tolist()[0])
    assert padded.tolist()[1] == []


def test_columns_are_read_only_and_outlive_the_engine() -> None:
    engine = Engine(DraftConfig(lookahead=3, token_cost=0))
    request = engine.add_request([1, 2, 1, 2])
    draft, batch = engine.propose(request), engine.propose_batch([request])
    columns = [
        getattr(d, name)
        for d in (draft, batch)
        for name in ("token_ids", "parents", "probabilities", "sources")
    ]
    engine.finish(request)
    del engine, draft, batch
    for column in columns:
        assert len(column) == 3
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    assert columns[0].tolist() == columns[4].tolist() == [1, 2, 1]
    assert [c.dtype for c in columns[:4]] == [np.int32, np.int32, np.float32, np.uint8]


@pytest.mark.parametrize("tree_budget", [None, 8])
def test_nothing_from_the_vocabulary_on_is_drafted(tree_budget: int | None) -> None:
    store = Datastore(max_bytes=1 << 20)
    store.add([1, 2, 3, 4, 100, 5, 6])
    config = DraftConfig(token_cost=0, tree_budget=tree_budget, vocabulary=100)
    engine = Engine(config, datastores=[store])
    request = engine.add_request([7, 1, 2])
    assert engine.propose(request).tolist() == [3, 4]
    assert engine.num_foreign == 1
    assert engine.propose_batch([request]).tolist() == [[3, 4]]
    assert engine.num_foreign == 2
    with pytest.raises(InvalidValueError, match="prediction must be below the vocabulary's 100"):
        engine.add_request([1], prediction=[99, 100])
    # Ids that stand for an image are a prompt's, and no output's.
    seen = engine.add_request([1, 2, 500, 500, 8, 1, 2], datastores=[])
    assert engine.propose(seen).tolist() == []
    assert engine.num_foreign == 2


@pytest.mark.parametrize(
    "config",
    [
        DraftConfig.prompt_lookup(vocabulary=3),
        DraftConfig.ngram(vocabulary=3),
        DraftConfig.predicted_outputs(vocabulary=3),
    ],
)
def test_every_drafter_keeps_to_the_vocabulary(config: DraftConfig) -> None:
    engine = Engine(config)
    request = engine.add_request([1, 2, 0, 3, 1, 2, 0, 3, 1, 2], prediction=[0, 2, 1])
    expected = [0, 2, 1] if isinstance(config.drafter, PredictedOutputs) else [0]
    assert engine.propose(request).tolist() == expected


_CALL_EVERY_MEMBER = """
import itertools, sys
import numpy as np
from fastdraft import _core

ARGUMENTS = [(), *itertools.product([1, [1]]), *itertools.product([1, [1]], repeat=2)]
ARGUMENTS += [([1], [1], [0, 1]), ("x",), (1, 1, 1), (1, 1, 1, 1), (np.zeros(411, np.float32),)]
CALLS = [(arguments, {}) for arguments in ARGUMENTS]
CALLS += [((1,), {"limit": 1}), (([1],), {"prompt_size": 1})]

for kind in (value for value in vars(_core).values() if isinstance(value, type)):
    selves = [[1, 2, 3], None, 1, "x", object(), Exception()]
    if kind is not _core.Draft:
        selves.append(kind.__new__(kind))
        selves.append(type("Sub", (kind,), {}).__new__(type("Sub", (kind,), {})))
        both = _core.Datastore if kind is not _core.Datastore else _core.Engine
        Both = type("Both", (kind, both), {})
        selves.append(Both.__new__(Both))
    else:
        try:
            _core.Draft.__new__(_core.Draft)
        except TypeError:
            pass
        else:
            print("Draft.__new__")
    for name, member in vars(kind).items():
        getters = [member.fget] if isinstance(member, property) else [member]
        if name in ("__init__", "__new__") or not callable(getters[0]):
            continue
        if isinstance(member, staticmethod):
            continue
        for self, (arguments, keywords) in itertools.product(selves, CALLS):
            print(f"{kind.__name__}.{name}", type(self), len(arguments), file=sys.stderr)
            try:
                getters[0](self, *arguments, **keywords)
            except TypeError:
                pass
            except BaseException as error:
                print(f"{kind.__name__}.{name}({type(self)}, {arguments}): {error!r}")
            else:
                print(f"{kind.__name__}.{name}({type(self)}, {arguments}) answered")
"""


def test_members_refuse_any_self_but_an_initialised_one_of_their_class() -> None:
    # In another process, since what is wrong here may end it.
    run = subprocess.run(
        [sys.executable, "-c", _CALL_EVERY_MEMBER], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-300:]
    assert run.stdout == ""
    assert run.stderr.count("Engine.propose ") > 100


def test_an_uninitialised_datastore_is_refused() -> None:
    store = Datastore.__new__(Datastore)
    with pytest.raises(TypeError, match="__init__"):
        Engine(datastores=[store])
    with pytest.raises(TypeError, match="__init__"):
        Engine().add_request([1], datastores=[store])


def test_stats_add_up() -> None:
    one = DraftStats(steps=4, emitted=10, drafts=2, drafted=8, accepted=6)
    two = DraftStats(steps=6, emitted=10, drafts=3, drafted=12, accepted=4)
    both = one + two
    assert both == DraftStats(steps=10, emitted=20, drafts=5, drafted=20, accepted=10)
    assert both.mean_accepted_tokens == 2.0
    assert both.acceptance_length == 3.0
    assert both.acceptance_rate == 0.5
    nothing = DraftStats()
    assert (nothing.mean_accepted_tokens, nothing.acceptance_length) == (1.0, 1.0)
    assert nothing.acceptance_rate == 0.0
