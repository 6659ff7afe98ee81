"""The background drafter: reports late, lost, twice and in any order, against an engine that sees
each text in order; and real threads."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastdraft import Continuations, Datastore, DraftConfig, Engine
from fastdraft.background import BackgroundDrafter, Report, Snapshot
from fastdraft.errors import InvalidValueError

ROWS, NODES = 3, 12
CONFIG = DraftConfig(lookahead=6, tree_budget=NODES)


class Reports:
    """A request as the host knows it: its text, and the reports of its steps."""

    def __init__(self, number: int, prompt: list[int], prompt_size: int | None = None) -> None:
        self.number = number
        self.prompt_size = len(prompt) if prompt_size is None else prompt_size
        self.text = list(prompt)
        self.told = len(prompt)  # how far the drafter can know the text
        self.on_the_way: list[tuple[int, list[int]]] = []


def tree_of(out: Continuations, row: int) -> list[Any]:
    count = out.count[row]
    return [
        out.base[row],
        out.token_ids[row, :count].tolist(),
        out.parents[row, :count].tolist(),
        out.probabilities[row, :count].tolist(),
    ]


def drain(drafter: BackgroundDrafter) -> None:
    while drafter.run_once():
        pass


class LateReports(RuleBasedStateMachine):
    """Whatever happens to reports, a row's tree is one of a beginning of its own text."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(CONFIG)
        self.drafter = BackgroundDrafter(self.engine, rows=ROWS, nodes=NODES, start=False)
        self.rows: dict[int, Reports] = {}
        self.strays: list[tuple[int, int, int, list[int]]] = []  # of requests that have ended
        self.suspended: list[Reports] = []
        self.held: list[tuple[Snapshot, list[Any], int]] = []
        self.version = 0

    @rule(row=st.integers(0, ROWS - 1), prompt=st.lists(st.integers(0, 2), max_size=12))
    def add(self, row: int, prompt: list[int]) -> None:
        self.forget(row)
        self.rows[row] = Reports(self.drafter.add(row, prompt), prompt)

    def forget(self, row: int) -> Reports | None:
        each = self.rows.pop(row, None)
        if each is not None:
            self.strays += [(row, each.number, *report) for report in each.on_the_way]
        return each

    @precondition(lambda self: self.strays)
    @rule(data=st.data())
    def report_of_an_ended_request(self, data: st.DataObject) -> None:
        stray = self.strays.pop(data.draw(st.integers(0, len(self.strays) - 1)))
        row, number, position, tokens = stray
        self.drafter.observe([row], [number], [position], tokens, [0, len(tokens)])

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), emitted=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def step(self, data: st.DataObject, emitted: list[int]) -> None:
        """The target emits tokens; their report is on its way."""
        each = self.rows[data.draw(st.sampled_from(sorted(self.rows)))]
        each.on_the_way.append((len(each.text), emitted))
        each.text += emitted

    @precondition(lambda self: any(each.on_the_way for each in self.rows.values()))
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives", "later", "twice", "lost"]))
    def report(self, data: st.DataObject, fate: str) -> None:
        """Any of the reports of any rows arrive together, or are lost."""
        rows = [row for row, each in self.rows.items() if each.on_the_way]
        chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
        columns: list[Any] = [[], [], [], []]
        offsets = [0]
        for row in chosen:
            each = self.rows[row]
            which = data.draw(st.integers(0, len(each.on_the_way) - 1))
            position, tokens = each.on_the_way[which]
            if fate != "twice":
                del each.on_the_way[which]
            for column, value in zip(columns, (row, each.number, position), strict=False):
                column.append(value)
            columns[3] += tokens
            offsets.append(offsets[-1] + len(tokens))
        places, numbers, positions, tokens = columns
        if fate == "later":
            arrays = [np.array(column, np.int64) for column in (places, numbers, positions)]
            nothing = np.zeros(len(places), np.int64)
            report = Report(*arrays, np.array(tokens, np.int32), np.array(offsets), nothing)
            self.drafter.expect(lambda: report)
        elif fate != "lost":
            self.drafter.observe(places, numbers, positions, tokens, offsets)

    @rule(row=st.integers(0, ROWS - 1), how=st.sampled_from(["finish", "cancel"]))
    def end(self, row: int, how: str) -> None:
        each = self.forget(row)
        getattr(self.drafter, how)(each.number if each else 0)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        """A request is preempted: what is on its way may arrive or not."""
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.suspended.append(self.rows[row])
        self.forget(row)
        self.drafter.suspend(self.suspended[-1].number)

    @precondition(lambda self: self.suspended)
    @rule(data=st.data(), row=st.integers(0, ROWS - 1), takes_back=st.integers(0, 3))
    def resume(self, data: st.DataObject, row: int, takes_back: int) -> None:
        """It comes back in any row; the host may have taken tokens back."""
        each = self.suspended.pop(data.draw(st.integers(0, len(self.suspended) - 1)))
        self.forget(row)
        size = max(len(each.text) - takes_back, each.prompt_size)
        text = each.text[:size]
        number = self.drafter.resume(row, each.number, list(text))
        self.rows[row] = Reports(number, text, prompt_size=each.prompt_size)

    @precondition(lambda self: self.suspended)
    @rule(data=st.data(), how=st.sampled_from(["finish", "cancel"]))
    def end_suspended(self, data: st.DataObject, how: str) -> None:
        each = self.suspended.pop(data.draw(st.integers(0, len(self.suspended) - 1)))
        getattr(self.drafter, how)(each.number)

    @rule()
    def run(self) -> None:
        self.drafter.run_once()

    @precondition(lambda self: len(self.held) < 2)
    @rule()
    def acquire(self) -> None:
        snapshot = self.drafter.acquire()
        self.held.append((snapshot, self.seen(snapshot), snapshot.version))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        snapshot, seen, version = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert (self.seen(snapshot), snapshot.version) == (seen, version)
        self.drafter.release(snapshot)

    @rule()
    def heal(self) -> None:
        """The host tells all that is missing; then nothing is."""
        drain(self.drafter)
        for row, (number, length) in self.drafter.behind().items():
            each = self.rows[row]
            assert each.number == number
            missing = each.text[length:]
            self.drafter.observe([row], [number], [length], missing, [0, len(missing)])
        drain(self.drafter)
        assert not self.drafter.behind()

    @invariant()
    def trees_belong_to_their_texts(self) -> None:
        snapshot = self.drafter.acquire()
        assert snapshot.version >= self.version
        self.version = snapshot.version
        for row, each in self.rows.items():
            if snapshot.requests[row] != each.number:
                continue
            base, *tree = tree_of(snapshot.continuations, row)
            assert base <= len(each.text)
            # Everything that a lone text teaches is where its tokens stand.
            assert set(tree[0]) <= set(each.text[:base])
            assert all(parent < node for node, parent in enumerate(tree[1]))
        self.drafter.release(snapshot)
        assert self.drafter.faults == 0

    def seen(self, snapshot: Snapshot) -> list[Any]:
        trees = [tree_of(snapshot.continuations, row) for row in range(ROWS)]
        return [snapshot.requests.tolist(), trees]

    def teardown(self) -> None:
        """In the end all texts are whole, and nothing of the ended requests is left."""
        for row, each in self.rows.items():
            text = each.text
            self.drafter.observe([row], [each.number], [0], text, [0, len(text)])
        drain(self.drafter)
        for snapshot, _, _ in self.held:
            self.drafter.release(snapshot)
        drain(self.drafter)
        snapshot = self.drafter.acquire()
        numbers = [self.rows[row].number if row in self.rows else 0 for row in range(ROWS)]
        assert snapshot.requests.tolist() == numbers
        for row, each in self.rows.items():
            assert snapshot.continuations.base[row] == len(each.text)
        for each in self.suspended:
            self.drafter.cancel(each.number)
        drain(self.drafter)
        assert self.engine.num_requests == len(self.rows)
        for each in self.rows.values():
            self.drafter.finish(each.number)
        drain(self.drafter)
        assert self.engine.num_requests == 0


TestLateReports = LateReports.TestCase


def test_in_order_it_is_the_engine() -> None:
    """Steps in order give what the engine gives, whether they are taken one by one or together."""
    prompts = [[1, 2, 3, 1, 2], [4, 5, 4]]
    steps = [[[3, 1], [5]], [[2], [4, 5, 4]], [[3], [5]]]
    engine = Engine(CONFIG)
    requests = [engine.add_request(prompt) for prompt in prompts]
    out = Continuations.allocate(2, NODES)
    engine.continue_batch(requests, [], [0, 0, 0], out)
    drafter = BackgroundDrafter(Engine(CONFIG), rows=2, nodes=NODES, start=False)
    numbers = [drafter.add(row, prompt) for row, prompt in enumerate(prompts)]
    drain(drafter)
    positions = [len(prompt) for prompt in prompts]
    for step in steps:
        tokens, sizes = step[0] + step[1], [len(each) for each in step]
        offsets = np.cumsum([0, *sizes])
        engine.continue_batch(requests, tokens, offsets, out, drafted=[1, 0])
        drafter.observe([0, 1], numbers, positions, tokens, offsets, drafted=[1, 0])
        drafter.run_once()
        snapshot = drafter.acquire()
        assert [tree_of(snapshot.continuations, row) for row in (0, 1)] == [
            tree_of(out, row) for row in (0, 1)
        ]
        drafter.release(snapshot)
        positions = [before + size for before, size in zip(positions, sizes, strict=True)]
    assert drafter.counts.steps == 6


def test_finished_texts_enter_their_stores_and_cancelled_ones_do_not() -> None:
    store = Datastore()
    drafter = BackgroundDrafter(Engine(CONFIG), rows=2, nodes=NODES, start=False)
    numbers = [drafter.add(row, [1, 2, 3], datastores=[store]) for row in (0, 1)]
    drain(drafter)
    drafter.observe([0], numbers[:1], [3], [4, 5], [0, 2])
    drafter.cancel(numbers[1])
    drafter.finish(numbers[0])
    drain(drafter)
    assert store.num_documents == 1
    reader = Engine(CONFIG, datastores=[store])
    # What was reported before the end is in it.
    assert reader.propose(reader.add_request([2, 3]), token_cost=0.0).tolist()[:2] == [4, 5]


def test_requests_bring_what_they_are_drafted_from() -> None:
    drafter = BackgroundDrafter(Engine(CONFIG), rows=2, nodes=NODES, start=False)
    drafter.add(0, [1, 2, 3], prediction=[5, 6, 7])
    drafter.add(1, [1, 2, 3], templates=[2, 3, 8, 9])
    drain(drafter)
    out = drafter.acquire().continuations
    assert [tree_of(out, row)[1][0] for row in (0, 1)] == [5, 8]


def test_reports_of_the_rows_last_request_are_left_out() -> None:
    drafter = BackgroundDrafter(Engine(CONFIG), rows=2, nodes=NODES, start=False)
    old = [drafter.add(row, [1, 2]) for row in (0, 1)]
    new = drafter.add(0, [1, 2])
    for _ in range(2):  # before the new prompt is indexed, and after
        drafter.observe([0, 1], old, [2, 2], [9, 9], [0, 1, 2])
        drain(drafter)
        drafter.observe([0], old[:1], [2], [9], [0, 1])
        drain(drafter)
    snapshot = drafter.acquire()
    assert snapshot.requests.tolist() == [new, old[1]]
    assert snapshot.continuations.base.tolist() == [2, 3]
    assert drafter.counts.repeated == 5


def test_a_request_that_fails_is_drafted_for_no_more(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(DraftConfig(lookahead=6, tree_budget=NODES, max_request_tokens=4))
    drafter = BackgroundDrafter(engine, rows=3, nodes=NODES, start=False)
    numbers = [drafter.add(row, prompt) for row, prompt in enumerate([[1, 2, 1], [1], [1] * 5])]
    drain(drafter)
    with caplog.at_level(logging.WARNING):
        drafter.observe([0, 1], numbers[:2], [3, 1], [2, 1, 2, 1], [0, 2, 4])
        drain(drafter)
        drafter.observe([0, 1], numbers[:2], [5, 3], [1, 1], [0, 1, 2])
        drain(drafter)
    snapshot = drafter.acquire()
    assert snapshot.requests.tolist() == [0, numbers[1], 0]
    assert snapshot.continuations.count[0] == snapshot.continuations.count[2] == 0
    assert snapshot.continuations.base[1] == 4
    assert drafter.faults == 2
    assert engine.num_requests == 1
    assert len(caplog.records) == 2


def test_any_other_error_costs_the_requests_in_the_call_their_drafts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        """An engine whose batch call fails as a whole, which the real one never does here."""

        def __init__(self) -> None:
            self.real = Engine(CONFIG)
            self.fails = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def continue_batch(self, *args: Any, **kwargs: Any) -> None:
            if self.fails:
                raise RuntimeError("broken")
            self.real.continue_batch(*args, **kwargs)

    engine: Any = Failing()
    drafter = BackgroundDrafter(engine, rows=2, nodes=NODES, start=False)
    number = drafter.add(0, [1, 2, 1, 2])
    drain(drafter)
    engine.fails = True
    for position in (4, 5):
        drafter.observe([0], [number], [position], [1], [0, 1])
        drain(drafter)
    assert drafter.faults == 1
    assert len(caplog.records) == 1
    snapshot = drafter.acquire()
    assert snapshot.requests.tolist() == [0, 0]
    assert not snapshot.continuations.count.any()
    assert engine.num_requests == 0
    # Later ones are drafted for.
    engine.fails = False
    number = drafter.add(1, [1])
    drain(drafter)
    assert drafter.acquire().requests.tolist() == [0, number]


def test_news_wait_for_a_free_snapshot() -> None:
    snapshots = [Snapshot.allocate(1, NODES) for _ in range(3)]
    drafter = BackgroundDrafter(Engine(CONFIG), snapshots=snapshots, start=False)
    number = drafter.add(0, [1, 2, 1, 2])
    held = []
    for position in range(4, 8):
        drain(drafter)
        held.append(drafter.acquire())
        drafter.observe([0], [number], [position], [1], [0, 1])
    drain(drafter)
    assert [each.continuations.base[0] for each in held] == [4, 5, 6, 6]
    for each in held:
        drafter.release(each)
    drain(drafter)
    assert drafter.acquire().continuations.base[0] == 8
    with pytest.raises(InvalidValueError, match="released already"):
        drafter.release(held[0])


def test_too_many_waiting_steps_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdraft.background.MOST_QUEUED", 2)
    monkeypatch.setattr("fastdraft.background.MOST_WAITING", 2)
    drafter = BackgroundDrafter(Engine(CONFIG), rows=1, nodes=NODES, start=False)
    number = drafter.add(0, [1, 2])
    drain(drafter)
    for position in range(2, 6):
        drafter.observe([0], [number], [position], [1], [0, 1])
    drain(drafter)
    assert drafter.counts.dropped == 2
    assert drafter.acquire().continuations.base[0] == 4
    # Of the steps that wait for a lost one the latest two are kept.
    for position in range(5, 9):
        drafter.observe([0], [number], [position], [1], [0, 1])
        drain(drafter)
    assert drafter.behind() == {0: (number, 4)}
    drafter.observe([0], [number], [4], [1, 1], [0, 2])
    drain(drafter)
    assert drafter.behind() == {0: (number, 6)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [3]}, "rows must be from 0 to 2"),
        ({"rows": [-1]}, "rows must be from 0 to 2"),
        ({"rows": [0, 1]}, "one entry for each row"),
        ({"drafted": [1, 2]}, "one entry for each row"),
        ({"drafted": [-1]}, "0 or greater"),
        ({"positions": [-1]}, "0 or greater"),
        ({"offsets": [0, 1]}, "offsets must"),
        ({"offsets": [0, 1, 2]}, "offsets must"),
    ],
)
def test_reports_that_do_not_fit_are_refused(change: dict[str, list[int]], message: str) -> None:
    drafter = BackgroundDrafter(Engine(CONFIG), rows=3, nodes=NODES, start=False)
    report = {"rows": [0], "numbers": [1], "positions": [4], "token_ids": [1, 2], "offsets": [0, 2]}
    with pytest.raises(InvalidValueError, match=message):
        drafter.observe(**{**report, **change})


@pytest.mark.parametrize("shapes", [[(2, 4)] * 2, [(2, 4), (2, 4), (2, 5)]])
def test_snapshots_must_be_three_of_one_shape(shapes: list[tuple[int, int]]) -> None:
    snapshots = [Snapshot.allocate(*shape) for shape in shapes]
    with pytest.raises(InvalidValueError, match="at least 3 of one shape"):
        BackgroundDrafter(Engine(CONFIG), snapshots=snapshots, start=False)


def wait_until(happens: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_real_threads_never_see_half_a_snapshot() -> None:
    """Every tree of row r holds tokens of row r's request alone: they are its own number."""
    rows, steps = 4, 60
    engine = Engine(CONFIG)
    drafter = BackgroundDrafter(engine, rows=rows, nodes=NODES)
    ended = threading.Event()
    failures: list[str] = []

    def read() -> None:
        versions = [0]
        while not ended.is_set():
            snapshot = drafter.acquire()
            for row in range(rows):
                number = int(snapshot.requests[row])
                tokens = tree_of(snapshot.continuations, row)[1]
                if number and set(tokens) - {number}:
                    failures.append(f"row {row} of request {number} has {tokens}")
            if snapshot.version < versions[-1]:
                failures.append(f"version {snapshot.version} after {versions[-1]}")
            versions.append(snapshot.version)
            drafter.release(snapshot)

    def write(row: int) -> None:
        generator = np.random.default_rng(row)
        for _ in range(6):
            number = drafter.add(row, [])
            length = 0
            for _ in range(steps):
                size = int(generator.integers(1, 4))
                position, length = length, length + size
                start = position if generator.random() < 0.8 else max(0, position - 3)
                if generator.random() < 0.9:
                    drafter.observe(
                        [row], [number], [start], [number] * (length - start), [0, length - start]
                    )
            drafter.observe([row], [number], [0], [number] * length, [0, length])

            def is_told(number: int = number, length: int = length) -> bool:
                snapshot = drafter.acquire()
                told = snapshot.requests[row] == number
                told &= snapshot.continuations.base[row] == length
                drafter.release(snapshot)
                return bool(told)

            wait_until(is_told)
            drafter.finish(number)

    writers = [threading.Thread(target=write, args=(row,)) for row in range(rows)]
    reader = threading.Thread(target=read)
    reader.start()
    for each in writers:
        each.start()
    for each in writers:
        each.join(60)
        assert not each.is_alive()
    wait_until(lambda: engine.num_requests == 0)
    ended.set()
    reader.join(60)
    assert drafter.stop()
    assert not failures
    assert drafter.faults == 0
    assert drafter.counts.published > 0


def test_stop_ends_a_busy_thread_and_may_be_repeated() -> None:
    drafter = BackgroundDrafter(Engine(CONFIG), rows=1, nodes=NODES)
    number = drafter.add(0, list(range(50_000)))
    for position in range(50_000, 51_000):
        drafter.observe([0], [number], [position], [1], [0, 1])
    assert drafter.stop(timeout=20)
    assert drafter.stop()
    version = drafter.acquire().version
    drafter.observe([0], [number], [0], [1], [0, 1])
    assert not drafter.run_once()
    assert drafter.acquire().version == version


def test_steps_of_one_request_that_are_taken_together_all_teach() -> None:
    """As if the target had emitted them in one step; all steps are counted."""
    prompt, first, second = [1, 2, 3, 1, 2], [3, 1], [2, 0, 3]
    together = BackgroundDrafter(Engine(CONFIG), rows=2, nodes=NODES, start=False)
    at_once = BackgroundDrafter(Engine(CONFIG), rows=2, nodes=NODES, start=False)
    for drafter in (together, at_once):
        numbers = [drafter.add(row, prompt) for row in (0, 1)]
        drain(drafter)
        if drafter is at_once:
            tokens = first + second
            drafter.observe([0, 1], numbers, [5, 5], [*tokens, 3], [0, 5, 6])
        else:
            drafter.observe([0, 1], numbers, [5, 5], [*first, 3], [0, 2, 3])
            drafter.observe([0], numbers[:1], [7], second, [0, 3])
        drain(drafter)
    assert together._engine.calibration() == at_once._engine.calibration()
    assert together.counts.steps == 3


def test_a_report_that_repeats_earlier_tokens_is_counted_once() -> None:
    engine = Engine(CONFIG)
    drafter = BackgroundDrafter(engine, rows=1, nodes=NODES, start=False)
    number = drafter.add(0, [1, 2])
    drain(drafter)
    drafter.observe([0], [number], [2], [1, 2, 1], [0, 3], drafted=[4])
    drafter.observe([0], [number], [2], [1, 2, 1, 2, 2], [0, 5], drafted=[3])
    drafter.observe([0], [number], [1], [2, 1, 2, 1, 2, 2], [0, 6], drafted=[3])
    drain(drafter)
    [request] = drafter._requests.values()
    stats = engine.stats(request.id)
    assert (stats.emitted, stats.drafted, stats.steps) == (5, 7, 2)
    assert (drafter.counts.steps, drafter.counts.repeated) == (2, 1)


def test_a_report_that_cannot_be_read_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    drafter = BackgroundDrafter(Engine(CONFIG), rows=1, nodes=NODES, start=False)
    number = drafter.add(0, [1, 2])
    drain(drafter)

    def broken() -> Report:
        raise RuntimeError("no device")

    drafter.expect(broken)
    drafter.observe([0], [number], [2], [1], [0, 1])
    drain(drafter)
    assert drafter.faults == len(caplog.records) == 1
    assert drafter.acquire().continuations.base[0] == 3


def test_an_expected_report_is_waited_for_after_all_else_is_published() -> None:
    seen: list[int] = []
    drafter = BackgroundDrafter(
        Engine(CONFIG),
        rows=1,
        nodes=NODES,
        published=lambda snapshot: seen.append(int(snapshot.continuations.base[0])),
        start=False,
    )
    number = drafter.add(0, [1, 2])
    drain(drafter)
    drafter.observe([0], [number], [2], [1], [0, 1])

    def read() -> Report:
        assert seen == [2, 3]
        one = np.array([0]), np.array([number]), np.array([3])
        return Report(*one, np.array([2], np.int32), np.array([0, 1]), np.array([0]))

    drafter.expect(read)
    drain(drafter)
    assert seen == [2, 3, 4]
    assert drafter.faults == 0


def test_a_request_may_be_refused_without_a_fault() -> None:
    class Refusing:
        def add_request(self, prompt_ids: Any, **options: Any) -> None:
            assert options == {"why": "no"}

        def finish(self, request: int) -> None:
            raise AssertionError("it was never added")

        cancel = finish

    engine: Any = Refusing()
    drafter = BackgroundDrafter(engine, rows=1, nodes=NODES, start=False)
    number = drafter.add(0, [1, 2], why="no")
    drafter.observe([0], [number], [2], [1], [0, 1])
    drain(drafter)
    drafter.suspend(number)
    drafter.resume(0, number, [1, 2])
    drafter.finish(number)
    drain(drafter)
    assert drafter.faults == 0
    assert not drafter._requests and not drafter._at


def test_what_is_published_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Snapshot) -> None:
        raise RuntimeError("no device")

    drafter = BackgroundDrafter(Engine(CONFIG), rows=1, nodes=NODES, published=broken, start=False)
    drafter.add(0, [1, 2])
    drain(drafter)
    assert drafter.faults == len(caplog.records) == 1


def test_drain_waits_for_a_thread() -> None:
    drafter = BackgroundDrafter(Engine(CONFIG), rows=1, nodes=NODES)
    number = drafter.add(0, [1, 2] * 1000)
    free = threading.Event()

    def read() -> Report:
        assert free.wait(20)
        one = np.array([0]), np.array([number]), np.array([2000])
        return Report(*one, np.array([1], np.int32), np.array([0, 1]), np.array([0]))

    drafter.expect(read)
    assert not drafter.drain(timeout=0.05)
    free.set()
    assert drafter.drain(timeout=20)
    assert drafter.acquire().continuations.base[0] == 2001
    assert drafter.stop(timeout=20)
