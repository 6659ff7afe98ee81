"""The background drafter: reports late, lost, twice and in any order, against an engine that sees
each text in order; and real threads."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastdraft import Continuations, Datastore, DraftConfig, Engine
from fastdraft.errors import InvalidValueError, MemoryLimitError
from fastdraft.late.background import BackgroundDrafter, Report

ROWS, NODES = 3, 12
CONFIG = DraftConfig(lookahead=6, tree_budget=NODES)


def tree_of(out: Continuations, row: int) -> list[Any]:
    count = out.count[row]
    return [
        out.base[row],
        out.token_ids[row, :count].tolist(),
        out.parents[row, :count].tolist(),
        out.probabilities[row, :count].tolist(),
    ]


class Host:
    """A drafter's rows, whose thread works when a test says so, and what was published of them."""

    def __init__(self, engine: Any = None, *, rows: int = 2, start: bool = False) -> None:
        self.engine = Engine(CONFIG) if engine is None else engine
        self.out = Continuations.allocate(rows, NODES)
        self.numbers = np.zeros(rows, np.int32)
        self.trees: list[Any] = [None] * rows
        self.seen = [0] * rows  # numbers
        self.drafter = BackgroundDrafter(
            self.engine, self.out, self.numbers, self.publish, start=start
        )
        self.add, self.run_once = self.drafter.add, self.drafter.run_once

    def publish(self) -> None:
        self.trees = [tree_of(self.out, row) for row in range(len(self.numbers))]
        self.seen = self.numbers.tolist()

    @property
    def bases(self) -> list[int]:
        return [tree[0] for tree in self.trees]

    def report(self, *rows: tuple[Any, ...], expect: bool = True) -> Report:
        """(row, number, position, tokens) of each, and how many draft tokens were verified."""
        slots, numbers, positions, tokens, *rest = zip(*rows, strict=True)
        offsets = np.cumsum([0, *map(len, tokens)])
        drafted = np.array(rest[0] if rest else [0] * len(rows), np.int64)
        columns = [np.array(column, np.int64) for column in (slots, numbers, positions)]
        report = Report(*columns, np.array([*itertools.chain(*tokens)], np.int32), offsets, drafted)
        if expect:
            self.drafter.expect(lambda: report)
        return report

    def drain(self) -> None:
        while self.drafter.run_once():
            pass


class Text:
    """A request as the host knows it: its text, and the reports of its steps on the way."""

    def __init__(self, number: int, text: list[int], prompt_size: int) -> None:
        self.number = number
        self.text = list(text)
        self.prompt_size = prompt_size
        self.on_the_way: list[tuple[int, list[int]]] = []


class LateReports(RuleBasedStateMachine):
    """Whatever happens to reports, a row's tree is one of a beginning of its own text."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(rows=ROWS)
        self.rows: dict[int, Text] = {}
        self.strays: list[tuple[int, int, int, list[int]]] = []  # of requests that have ended
        self.preempted: list[Text] = []

    @rule(row=st.integers(0, ROWS - 1), prompt=st.lists(st.integers(0, 2), max_size=12))
    def add(self, row: int, prompt: list[int]) -> None:
        self.forget(row)
        self.rows[row] = Text(self.host.add(row, prompt), prompt, len(prompt))

    def forget(self, row: int) -> Text | None:
        each = self.rows.pop(row, None)
        if each is not None:
            self.strays += [(row, each.number, *report) for report in each.on_the_way]
        return each

    @precondition(lambda self: self.strays)
    @rule(data=st.data())
    def report_of_an_ended_request(self, data: st.DataObject) -> None:
        stray = self.strays.pop(data.draw(st.integers(0, len(self.strays) - 1)))
        self.host.report(stray)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), emitted=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def step(self, data: st.DataObject, emitted: list[int]) -> None:
        """The target emits tokens; their report is on its way."""
        each = self.rows[data.draw(st.sampled_from(sorted(self.rows)))]
        each.on_the_way.append((len(each.text), emitted))
        each.text += emitted

    @precondition(lambda self: any(each.on_the_way for each in self.rows.values()))
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives", "twice", "lost"]))
    def report(self, data: st.DataObject, fate: str) -> None:
        """Any of the reports of any rows arrive together, or are lost."""
        rows = [row for row, each in self.rows.items() if each.on_the_way]
        parts = []
        for row in data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True)):
            each = self.rows[row]
            which = data.draw(st.integers(0, len(each.on_the_way) - 1))
            parts.append((row, each.number, *each.on_the_way[which]))
            if fate != "twice":
                del each.on_the_way[which]
        if fate != "lost":
            self.host.report(*parts)

    @rule(row=st.integers(0, ROWS - 1), how=st.sampled_from(["finish", "cancel"]))
    def end(self, row: int, how: str) -> None:
        each = self.forget(row)
        getattr(self.host.drafter, how)(each.number if each else 0)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.preempted.append(self.rows[row])
        self.forget(row)
        self.host.drafter.cancel(self.preempted[-1].number)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data(), row=st.integers(0, ROWS - 1), takes_back=st.integers(0, 3))
    def resume(self, data: st.DataObject, row: int, takes_back: int) -> None:
        """It comes back in any row; the host may have taken tokens back."""
        each = self.preempted.pop(data.draw(st.integers(0, len(self.preempted) - 1)))
        self.forget(row)
        text = each.text[: max(len(each.text) - takes_back, each.prompt_size)]
        number = self.host.add(row, list(text), prompt_size=each.prompt_size)
        self.rows[row] = Text(number, text, each.prompt_size)

    @rule()
    def run(self) -> None:
        self.host.run_once()

    @rule()
    def heal(self) -> None:
        """The host reports all that may be missing; then nothing is."""
        self.host.drain()
        for row, each in self.rows.items():
            self.host.report((row, each.number, 0, each.text))
        self.host.drain()
        if self.rows:
            assert {row: self.host.bases[row] for row in self.rows} == {
                row: len(each.text) for row, each in self.rows.items()
            }

    @invariant()
    def trees_belong_to_their_texts(self) -> None:
        for row, each in self.rows.items():
            if self.host.seen[row] != each.number:
                continue
            base, *tree = self.host.trees[row]
            assert base <= len(each.text)
            # Everything that a lone text teaches is where its tokens stand.
            assert set(tree[0]) <= set(each.text[:base])
            assert all(parent < node for node, parent in enumerate(tree[1]))
        assert self.host.drafter.faults == 0

    def teardown(self) -> None:
        """In the end all texts are whole, and nothing of the ended requests is left."""
        self.heal()
        numbers = [self.rows[row].number if row in self.rows else 0 for row in range(ROWS)]
        assert self.host.seen == numbers
        assert self.host.engine.num_requests == len(self.rows)
        for each in self.rows.values():
            self.host.drafter.finish(each.number)
        self.host.drain()
        assert self.host.engine.num_requests == 0


TestLateReports = LateReports.TestCase


def test_in_order_it_is_the_engine() -> None:
    """Steps in order give what the engine gives, whether they are taken one by one or together."""
    prompts = [[1, 2, 3, 1, 2], [4, 5, 4]]
    steps = [[[3, 1], [5]], [[2], [4, 5, 4]], [[3], [5]]]
    engine = Engine(CONFIG)
    requests = [engine.add_request(prompt) for prompt in prompts]
    out = Continuations.allocate(2, NODES)
    engine.continue_batch(requests, [], [0, 0, 0], out)
    host = Host()
    numbers = [host.add(row, prompt) for row, prompt in enumerate(prompts)]
    host.drain()
    positions = [len(prompt) for prompt in prompts]
    for step in steps:
        offsets = np.cumsum([0, *map(len, step)])
        engine.continue_batch(requests, step[0] + step[1], offsets, out, drafted=[1, 0])
        host.report(*zip((0, 1), numbers, positions, step, (1, 0), strict=True))
        host.run_once()
        assert host.trees == [tree_of(out, row) for row in (0, 1)]
        positions = [before + len(each) for before, each in zip(positions, step, strict=True)]
    assert sum(host.engine.stats(request).steps for request in (0, 1)) == 6


def test_finished_texts_enter_their_stores_and_cancelled_ones_do_not() -> None:
    store = Datastore()
    host = Host()
    numbers = [host.add(row, [1, 2, 3], datastores=[store]) for row in (0, 1)]
    host.drain()
    host.report((0, numbers[0], 3, [4, 5]))
    host.drafter.cancel(numbers[1])
    host.drafter.finish(numbers[0])
    host.drain()
    assert store.num_documents == 1
    reader = Engine(CONFIG, datastores=[store])
    # The last report before the end is in it.
    assert reader.propose(reader.add_request([2, 3]), token_cost=0.0).tolist()[:2] == [4, 5]


def test_requests_bring_what_they_are_drafted_from() -> None:
    host = Host()
    host.add(0, [1, 2, 3], prediction=[5, 6, 7])
    host.add(1, [1, 2, 3], templates=[2, 3, 8, 9])
    host.drain()
    assert [tree[1][0] for tree in host.trees] == [5, 8]


def test_tokens_emitted_before_a_request_was_added_are_no_part_of_its_prompt() -> None:
    host = Host(rows=1)
    text = [1, 2, 3, 4, 5]
    host.add(0, text, prompt_size=3)
    text.append(6)  # the host's own list grows
    host.drain()
    assert host.bases == [5]
    assert host.engine.stats(0).emitted == 2


def test_a_request_that_fails_is_drafted_for_no_more(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(DraftConfig(lookahead=6, tree_budget=NODES, max_request_tokens=4))
    host = Host(engine, rows=3)
    numbers = [host.add(row, prompt) for row, prompt in enumerate([[1, 2, 1], [1], [1] * 5])]
    host.drain()
    with caplog.at_level(logging.WARNING):
        host.report((0, numbers[0], 3, [2, 1]), (1, numbers[1], 1, [2, 1]))
        host.drain()
        host.report((0, numbers[0], 5, [1]), (1, numbers[1], 3, [1]))
        host.drain()
    assert host.seen == [0, numbers[1], 0]
    assert host.out.count[0] == host.out.count[2] == 0
    assert host.bases[1] == 4
    assert host.drafter.faults == 2
    assert engine.num_requests == 1
    assert len(caplog.records) == 2


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


def test_any_other_error_costs_the_requests_in_the_call_their_drafts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine: Any = Failing()
    host = Host(engine)
    number = host.add(0, [1, 2, 1, 2])
    host.drain()
    engine.fails = True
    for position in (4, 5):
        host.report((0, number, position, [1]))
        host.drain()
    assert host.drafter.faults == len(caplog.records) == 1
    assert host.seen == [0, 0]
    assert not host.out.count.any()
    assert engine.num_requests == 0
    # Later ones are drafted for.
    engine.fails = False
    number = host.add(1, [1])
    host.drain()
    assert host.seen == [0, number]


@pytest.mark.parametrize("row", [-1, 2])
def test_rows_that_there_are_not_are_refused(row: int) -> None:
    with pytest.raises(InvalidValueError, match=f"rows must be from 0 to 1, got {row}"):
        Host().add(row, [])


def wait_until(happens: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_real_threads_never_publish_half_a_tree() -> None:
    """Every tree of row r holds tokens of row r's request alone: they are its own number."""
    rows, steps = 4, 60
    host = Host(rows=rows, start=True)
    failures: list[str] = []
    keep = host.publish

    def publish() -> None:
        keep()
        for row, (number, tree) in enumerate(zip(host.seen, host.trees, strict=True)):
            if number and set(tree[1]) - {number}:
                failures.append(f"row {row} of request {number} has {tree[1]}")

    host.drafter._send = publish

    def write(row: int) -> None:
        generator = np.random.default_rng(row)
        for _ in range(6):
            number = host.add(row, [])
            length = 0
            for _ in range(steps):
                size = int(generator.integers(1, 4))
                position, length = length, length + size
                start = position if generator.random() < 0.8 else max(0, position - 3)
                if generator.random() < 0.9:
                    host.report((row, number, start, [number] * (length - start)))
            host.report((row, number, 0, [number] * length))

            def is_published(number: int = number, length: int = length) -> bool:
                return host.seen[row] == number and host.bases[row] == length

            wait_until(is_published)
            host.drafter.finish(number)

    writers = [threading.Thread(target=write, args=(row,)) for row in range(rows)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(60)
        assert not each.is_alive()
    wait_until(lambda: host.engine.num_requests == 0)
    assert host.drafter.stop()
    assert not failures
    assert host.drafter.faults == 0


def test_an_interpreter_that_exits_stops_the_threads_first() -> None:
    """One that comes back from the core later would abort the process."""
    script = """
import atexit
drafters = []
atexit.register(lambda: print(drafters[0]._thread.is_alive()))  # the first is called last
import numpy as np
from fastdraft import Continuations, DraftConfig, Engine
from fastdraft.late.background import BackgroundDrafter
engine = Engine(DraftConfig(tree_budget=8))
drafter = BackgroundDrafter(
    engine, Continuations.allocate(2, 8), np.zeros(2, np.int32), lambda: None
)
drafters.append(drafter)
drafter.add(0, np.arange(3_000_000, dtype=np.int32) % 9999)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_stop_ends_a_busy_thread_and_may_be_repeated() -> None:
    host = Host(rows=1, start=True)
    number = host.add(0, list(range(50_000)))
    for position in range(50_000, 51_000):
        host.report((0, number, position, [1]))
    assert host.drafter.stop(timeout=20)
    assert host.drafter.stop()
    bases = host.out.base.tolist()
    host.report((0, number, 0, [1]))
    assert not host.run_once()
    assert host.out.base.tolist() == bases


def test_steps_of_one_request_that_are_taken_together_all_teach() -> None:
    """As if the target had emitted them in one step; all steps are counted."""
    prompt, first, second = [1, 2, 3, 1, 2], [3, 1], [2, 0, 3]
    together, at_once = Host(), Host()
    for host in (together, at_once):
        numbers = [host.add(row, prompt) for row in (0, 1)]
        host.drain()
        if host is at_once:
            host.report((0, numbers[0], 5, first + second), (1, numbers[1], 5, [3]))
        else:
            host.report((0, numbers[0], 5, first), (1, numbers[1], 5, [3]))
            host.report((0, numbers[0], 7, second))
        host.drain()
    assert together.engine.calibration() == at_once.engine.calibration()
    assert [together.engine.stats(request).steps for request in (0, 1)] == [2, 1]


@pytest.mark.parametrize("indexed", [True, False])
def test_a_report_that_repeats_earlier_tokens_is_counted_once(indexed: bool) -> None:
    host = Host(rows=1)
    number = host.add(0, [1, 2])
    if indexed:
        host.drain()
    host.report((0, number, 2, [1, 2, 1], 4))
    host.report((0, number, 2, [1, 2, 1, 2, 2], 3))
    host.report((0, number, 1, [2, 1, 2, 1, 2, 2], 3))
    host.drain()
    stats = host.engine.stats(0)
    assert (stats.emitted, stats.drafted, stats.steps) == (5, 7, 2)


def test_a_report_that_cannot_be_read_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(rows=1)
    number = host.add(0, [1, 2])
    host.drain()

    def broken() -> Report:
        raise RuntimeError("no device")

    host.drafter.expect(broken)
    host.report((0, number, 2, [1]))
    host.drain()
    assert host.drafter.faults == len(caplog.records) == 1
    assert host.bases == [3]


def test_a_report_is_waited_for_after_all_else_is_published() -> None:
    host = Host(rows=1)
    number = host.add(0, [1, 2])
    host.drain()
    host.drafter.cancel(number)
    number = host.add(0, [1, 2, 3])

    def read() -> Report:
        assert host.seen == [0]
        return host.report((0, number, 3, [2]), expect=False)

    host.drafter.expect(read)
    host.drain()
    assert host.bases == [4]
    assert host.drafter.faults == 0


def test_a_request_may_be_refused_without_a_fault() -> None:
    class Refusing:
        def add_request(self, prompt_ids: Any, **options: Any) -> None:
            assert options == {"why": "no"}

        def finish(self, request: int) -> None:
            raise AssertionError("it was never added")

        cancel = finish

    host = Host(Refusing(), rows=1)
    number = host.add(0, [1, 2], why="no")
    host.report((0, number, 2, [1]))
    host.drain()
    host.drafter.finish(number)
    host.drain()
    assert host.drafter.faults == 0
    assert not host.drafter._requests and host.drafter._seated.tolist() == [-1]


def test_what_is_published_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(rows=1)

    def broken() -> None:
        raise RuntimeError("no device")

    host.drafter._send = broken
    host.add(0, [1, 2])
    host.drain()
    assert host.drafter.faults == len(caplog.records) == 1


def test_drain_waits_for_a_thread() -> None:
    host = Host(rows=1, start=True)
    number = host.add(0, [1, 2] * 1000)
    free = threading.Event()

    def read() -> Report:
        assert free.wait(20)
        return host.report((0, number, 2000, [1]), expect=False)

    host.drafter.expect(read)
    assert not host.drafter.drain(timeout=0.05)
    free.set()
    assert host.drafter.drain(timeout=20)
    assert host.bases == [2001]
    assert host.drafter.stop(timeout=20)


def test_a_limit_that_is_set_is_no_fault_and_the_thread_begins_first() -> None:
    out, calls = Continuations.allocate(1, NODES), []
    engine = Engine(DraftConfig(lookahead=6, tree_budget=NODES, max_bytes=1 << 14))

    def begin() -> None:
        calls.append(threading.current_thread().name)

    drafter = BackgroundDrafter(
        engine,
        out,
        np.zeros(1, np.int32),
        lambda: None,
        is_expected=lambda error: isinstance(error, MemoryLimitError),
        begin=begin,
    )
    number = drafter.add(0, [1, 2, 3])
    assert drafter.drain()
    row, text = np.zeros(1, np.int64), np.arange(2000, dtype=np.int32)
    grown = Report(row, row + number, row + 3, text, np.array([0, len(text)]), row)
    drafter.expect(lambda: grown)
    assert drafter.drain()
    assert calls == ["fastdraft-background"]
    assert (engine.num_requests, drafter.faults) == (0, 0)
    assert drafter.stop()
