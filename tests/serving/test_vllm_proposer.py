"""The vLLM proposer, called as vLLM's model runner calls it, without vLLM."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdraft.errors import InvalidValueError
from fastdraft.serving.ledger import LedgerReader, new_ticket
from fastdraft.serving.vllm import FastdraftProposer, Settings
from fastdraft.serving.vllm.interface import captured_sizes
from fastdraft.serving.vllm.v1 import proposer
from fastdraft.serving.vllm.v1.step_times import StepTimes, seconds_of_a_line
from vllm_host import CYCLE, VOCABULARY, Clock, Job, StairsClock, V1Host, config, copying, graphs


def test_ends_are_noticed_at_once_where_the_runner_is_known() -> None:
    host = V1Host()
    drafter = host.proposer
    host.add("a", copying())
    host.step()
    assert drafter.num_requests == 1
    host.end("a")
    host.execute_model(
        SimpleNamespace(
            finished_req_ids={"a"}, num_scheduled_tokens={}, scheduled_spec_decode_tokens={}
        )
    )
    assert drafter.num_requests == 0
    assert host.executed == 2
    host.step()
    # The id comes again, for another text.
    host.add("a", Job([1, 2, 3], [4, 5]))
    host.run()
    assert drafter.faults == 0


def test_drafts_end_where_the_model_or_the_request_does() -> None:
    host = V1Host(token_cost=0.0, length=100)
    drafter = host.proposer
    # A row near its end keeps no other from being drafted for.
    assert host._input_fits_in_drafter(SimpleNamespace(max_seq_len=100))
    assert not host._input_fits_in_drafter(None)
    host.add("long", copying(output=100 - 60))
    host.add("short", copying(output=6, max_tokens=6))
    while host.jobs:
        for name, draft in host.step().items():
            job = host.jobs[name]
            room = min(100 - len(job.text), len(job.output) - job.said)
            assert len(draft) <= max(room - 1, 0)
        for name in [n for n, job in host.jobs.items() if job.said >= len(job.output)]:
            host.end(name)
    assert drafter.stats.accepted > 20


def test_drafts_end_where_vllm_v1_would_count_them_wrongly() -> None:
    """It masks what ends a text by the length before the draft, and counts a thought's drafts."""
    host = V1Host(token_cost=0.0)
    host.add("least", copying(output=40, min_tokens=20))
    host.add("thinking", copying(output=40, thinking_token_budget=30))
    host.add("unlimited", copying(output=40, thinking_token_budget=-1))
    longest = dict.fromkeys(host.jobs, 0)
    while host.jobs["least"].said < 40:
        for name, draft in host.step().items():
            said = host.jobs[name].said
            longest[name] = max(longest[name], len(draft))
            if name == "least" and said < 20:
                assert said + len(draft) < 20
    assert longest == {"least": 8, "thinking": 0, "unlimited": 8}
    assert host.proposer.faults == 0


@pytest.mark.parametrize(("most", "indexed"), [(1, False), (2, False), (3, True)])
def test_requests_without_room_for_a_draft_are_not_indexed(
    most: int, indexed: bool, folder: Path
) -> None:
    """A step emits a token more than it drafts, and the first one comes with the prompt."""
    host = V1Host(token_cost=0.0)
    drafter = host.proposer
    ticket = new_ticket()
    arguments = {"prediction_token_ids": CYCLE, "prediction_ticket": ticket}
    host.add("a", copying(output=most, max_tokens=most, extra_args=arguments))
    host.step()
    assert drafter.engine.num_requests == int(indexed)
    host.run()
    assert (len(drafter.memory.of(None)[0]) > 0) == indexed
    assert drafter.faults == drafter.num_requests == 0
    # Whoever expects a text hears what became of it.
    assert LedgerReader(folder).prediction_tokens(ticket) == (int(indexed), 0)


def cycle_with_errors(random: np.random.Generator, errors: float) -> list[int]:
    """An output that repeats the cycle, but for a share of random tokens."""
    return [
        int(token) if random.random() < 1 - errors else int(random.integers(VOCABULARY))
        for token in CYCLE * 60
    ]


@pytest.mark.parametrize(
    "chunk", [0, 3, 40], ids=["no prompts", "short prompts", "chunks of a long prompt"]
)
@pytest.mark.parametrize(("slope", "pays"), [(0.001, True), (1.0, False)])
def test_drafting_follows_the_measured_times(
    slope: float, pays: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If verification takes as long as decoding, nothing is drafted. Each step may have a prompt,
    as under load: beside 40 tokens of one a few more cost little, whatever a token costs."""
    clock = Clock(slope)
    monkeypatch.setattr(proposer, "time", clock)
    host = V1Host(rows=16, length=4096)
    host.clock = clock
    random = np.random.default_rng(0)
    for number in range(8):
        host.add(str(number), Job(CYCLE * 3, cycle_with_errors(random, 0.4)))
    host.step()
    decoders = list(host.jobs)
    drafted = []
    while all(host.jobs[name].said < len(host.jobs[name].output) for name in decoders):
        if chunk and len(host.jobs) == len(decoders):
            size = 3 if chunk == 3 else 4000
            prompt = random.integers(0, VOCABULARY, size).tolist()
            host.add(f"prompt {len(drafted)}", Job(prompt, [5]))
        drafts = host.step(prefill=chunk or 1 << 20)
        drafted.append(sum(len(drafts[name]) for name in decoders) / 8)
        for name in host.jobs.keys() - set(decoders):
            if host.jobs[name].said:
                host.end(name)
    late = np.mean(drafted[len(drafted) // 2 :])
    if chunk == 40:
        assert late > 1
    else:
        assert late > 2 if pays else late < 0.3
    # If drafts pay, hardly a step goes without to learn the cost of one.
    assert np.mean(np.array(drafted) == 0) < 0.1 or not pays


@pytest.mark.parametrize(
    ("line", "shares"), [(0.0, True), (1e-6, True), (2e-4, False)], ids=["free", "cheap", "dear"]
)
@pytest.mark.parametrize("copying", [1, 32])
def test_the_price_of_log_probabilities_cuts_long_drafts(
    copying: int, line: float, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are taken at as many lines for each of 32 rows as the longest draft has tokens, and
    one: of 32 rows one with a draft pays for all, 32 with drafts share."""
    clock = Clock(0.001)
    monkeypatch.setattr(proposer, "time", clock)
    monkeypatch.setattr(proposer, "seconds_of_a_line", lambda *_: line)
    host = V1Host(rows=32, length=4096)
    random = np.random.default_rng(0)
    for number in range(32):
        text = CYCLE * 30 if number < copying else random.integers(200, VOCABULARY, 500).tolist()
        host.add(str(number), Job(text[:60], text[60:]))
        host.input_batch.num_logprobs[str(number)] = 0
    longest, seconds = [], []
    while all(job.said < len(job.output) for job in host.jobs.values()):
        drafts = host.step()
        longest.append(max(map(len, drafts.values())))
        started = clock.now
        clock.forward(sum(1 + len(draft) for draft in drafts.values()))
        clock.now += line * 32 * (1 + longest[-1])
        seconds.append(clock.now - started)
    late = np.mean(longest[len(longest) // 2 :])
    if shares or copying == 32:
        assert late > 7
    else:
        # 32 lines take 6.4 ms, a forward 10: for a token of one row in 32 that does not pay.
        assert late < 0.5


@pytest.mark.parametrize("seed", range(40))
def test_lengths_with_log_probabilities_are_the_best_of_all(seed: int) -> None:
    """Against every length tried."""
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 9))
    drafted = int(random.integers(1, rows + 1))
    line = float(random.uniform(0, 0.02))
    times = StepTimes("cpu", line_seconds=line)
    for width in (1, 1, 1, 3, 5, 9):
        decoded = dict.fromkeys(range(rows), width)
        times.add_forward(decoded)
        lines = rows * width
        times.observe(decoded, rows, 0.05 + 0.01 * width + line * lines, lines=lines)
    seconds = times.curve(rows, drafted, 8)
    assert seconds is not None
    # The price of lines is in none of them.
    assert 0.05 < seconds[drafted - 1] < 0.07
    sizes = random.integers(0, 9, drafted)
    drafts = [np.sort(random.random(size))[::-1].astype(np.float32) for size in sizes]

    def speed(longest: int) -> float:
        kept = [draft[:longest] for draft in drafts]
        took = seconds[drafted + sum(map(len, kept)) - 1] + line * rows * (1 + longest)
        return float((drafted + sum(draft.sum() for draft in kept)) / took)

    offsets = np.cumsum([0, *sizes], dtype=np.int32)
    found = times.best_longest(rows, offsets, np.concatenate(drafts))
    speeds = [speed(longest) for longest in range(max(sizes) + 1)]
    assert speeds[found] == pytest.approx(max(speeds), rel=1e-6)


def test_a_line_takes_some_time() -> None:
    assert 0 < seconds_of_a_line("cpu", 100_000) < 0.1


def serve_on_stairs(
    monkeypatch: pytest.MonkeyPatch, mode: str, pieces: float, **options: Any
) -> tuple[StairsClock, FastdraftProposer]:
    """Five requests with errors, whose forwards are padded to 8, 24, 40 or 45 tokens."""
    sizes = [8, 24, 40, 45]
    clock = StairsClock(sizes, even=5 * 9, pieces=pieces)
    monkeypatch.setattr(proposer, "time", clock)
    host = V1Host(length=4096, graphs=graphs(sizes, mode))
    drafter = host.proposer
    host.clock = clock
    random = np.random.default_rng(0)
    for number in range(5):
        job = Job(CYCLE * 3, cycle_with_errors(random, 0.3)[:500], **options)
        host.add(str(number), job)
    while all(job.said < len(job.output) for job in host.jobs.values()):
        host.step()
    assert drafter.faults == 0
    return clock, drafter


def test_free_slots_up_to_a_captured_size_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _ = serve_on_stairs(monkeypatch, "PIECEWISE", 1.0)
    late = clock.seen[len(clock.seen) // 2 :]
    on_an_edge = [tokens in clock.sizes or tokens == 5 for tokens in late]
    assert np.mean(on_an_edge) > 0.7


def test_all_rows_get_the_longest_draft_where_its_graph_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, drafter = serve_on_stairs(monkeypatch, "FULL and PIECEWISE", 2.0)
    late = clock.seen[len(clock.seen) // 2 :]
    assert np.mean([tokens == clock.even for tokens in late]) > 0.8
    assert drafter.stats.accepted > 1000


def test_rows_that_may_not_get_the_longest_draft_get_none_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = {"fastdraft_lookahead": 3}
    clock, _ = serve_on_stairs(monkeypatch, "FULL and PIECEWISE", 2.0, extra_args=limit)
    assert max(clock.seen[1:]) <= 5 * 4


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("FULL and PIECEWISE", ([1, 2, 4], True)),
        ("FULL and NONE", ([], False)),
        ("PIECEWISE", ([1, 2, 4], False)),
        ("FULL", ([1, 2, 4], False)),
        ("NONE", ([], False)),
    ],
)
def test_captured_sizes_are_vllms(mode: str, expected: tuple[list[int], bool]) -> None:
    assert captured_sizes(config(graphs=graphs([1, 2, 4], mode))) == expected
    assert captured_sizes(config(graphs=graphs([], mode))) == ([], False)
    assert captured_sizes(config()) == ([], False)


def test_ranks_that_schedule_alone_draft_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = []
    for slope in (0.001, 1.0):
        clock = Clock(slope)
        monkeypatch.setattr(proposer, "time", clock)
        host = V1Host(executor="external_launcher")
        for number in range(4):
            host.add(str(number), Job(CYCLE[number:] * 3, CYCLE[number:] * 6))
        seen = []
        for _ in range(10):
            seen.append(host.step())
            clock.forward(sum(1 + len(draft) for draft in seen[-1].values()))
        drafts.append(seen)
    assert drafts[0] == drafts[1]
    assert any(drafts[0][-1].values())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_corrupt_row_costs_its_own_drafts_alone(caplog: pytest.LogCaptureFixture) -> None:
    host = V1Host(token_cost=0.0)
    drafter = host.proposer
    host.add("good", copying(output=300))
    host.add("bad", copying())
    host.add("fine", copying(output=300))
    host.step()
    job = host.jobs["bad"]
    job.output[job.said + 1 :] = [-1, *job.output[job.said + 2 :]]
    while job.said < 20:
        drafts = host.step()
    assert drafts["bad"] == []
    assert drafts["good"] and drafts["fine"]
    assert drafter.faults == 1
    assert len(warnings(caplog)) == 1
    host.run()
    assert drafter.num_requests == drafter.engine.num_requests == 0


@pytest.mark.usefixtures("folder")
def test_a_broken_ledger_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = V1Host(token_cost=0.0)
    drafter = host.proposer
    extra_args = {"prediction_token_ids": [*range(200, 240)], "prediction_ticket": new_ticket()}
    host.add("a", copying(extra_args=extra_args))
    host.add("b", copying())

    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    for name in ("record", "close", "publish"):
        monkeypatch.setattr(drafter._ledger, name, broken)
    host.run()
    assert drafter.faults > 0
    assert drafter.num_requests == drafter.engine.num_requests == 0


def test_a_host_that_changed_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    with pytest.raises(AttributeError):
        drafter.attach(SimpleNamespace(requests={}))
    # Without the entry point nobody tells whose rows they are.
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(InvalidValueError, match="has to name fastdraft, got 'other'"):
        drafter.load_model()


def test_operands_that_cannot_be_read_cost_drafts() -> None:
    drafter = V1Host(token_cost=0.0).proposer
    assert drafter.propose([[1], [2]], None, None) == [[], []]  # type: ignore[arg-type]
    assert drafter.faults == 1


def test_a_broken_step_is_forgotten_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    host = V1Host(token_cost=0.0)
    drafter = host.proposer
    host.add("a", copying())
    host.step()
    lost = host.requests.pop("a")
    host.add("b", copying())
    host.requests.pop("b")
    assert host.step() == {"a": [], "b": []}
    assert drafter.faults == 1
    host.requests["a"] = lost
    host.end("b")
    host.run()
    host.add("c", copying())
    host.run()
    assert drafter.stats.accepted > 20
    assert drafter.num_requests == drafter.engine.num_requests == 0
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": 1}, "mapping with keys of .*'memory_bytes'.* got {'memory': 1}"),
        ({"shared_namespaces": "one"}, "shared_namespaces must be a list of names, got 'one'"),
        ({"memory_url": 5}, "memory_url must be a URL or a path, got 5"),
        ({"memory_bytes": -1}, "memory_bytes must be 0, or enough for some text, got -1"),
        ({"ngrams": 5}, "ngrams must be a path, got 5"),
        (
            {"memory_bytes": 0, "memory_url": "s3://x"},
            "memory_url must be left out where memory_bytes is 0, .* got 's3://x'",
        ),
        ({"memory_bytes": "1 GB"}, "memory_bytes must be an integer, got '1 GB'"),
        ({"datastores": "code.fds"}, "datastores must be a list of paths, got 'code.fds'"),
        ({"token_cost": -1.0}, "token_cost must be a finite number of at least 0, got -1.0"),
        ({"max_bytes": 0}, "max_bytes must be at least 1, got 0"),
    ],
)
def test_bad_settings_end_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        FastdraftProposer(config(**settings))


def test_settings_are_optional() -> None:
    assert Settings.of(SimpleNamespace(additional_config={"other": 1})) == Settings()
    with pytest.raises(InvalidValueError, match="must be a mapping"):
        Settings.of(SimpleNamespace(additional_config={"fastdraft": 5}))


def test_a_request_whose_end_fails_costs_the_others_that_end_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = V1Host(token_cost=0.02)
    drafter = host.proposer
    for name in ("a", "b", "c"):
        host.add(name, copying())
    host.step()
    finish = drafter.engine.finish
    ended: list[int] = []

    def failing(request: int) -> Any:
        ended.append(request)
        if len(ended) == 1:
            raise RuntimeError
        return finish(request)

    monkeypatch.setattr(drafter.engine, "finish", failing)
    host.end("a")
    host.end("b")
    host.step()
    host.step()
    assert drafter.faults == 1
    assert drafter.num_requests == drafter.engine.num_requests == 1
    assert any(host.step().values())
