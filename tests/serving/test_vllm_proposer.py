"""The vLLM proposer, called as vLLM's model runner calls it, without vLLM."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdraft import Datastore
from fastdraft.errors import InvalidValueError
from fastdraft.serving.host import Namespace
from fastdraft.serving.ledger import FOLDER_VARIABLE, Ledger, LedgerReader, new_ticket
from fastdraft.serving.request_options import NAMESPACE
from fastdraft.serving.vllm import FastdraftProposer, Settings, proposer
from fastdraft.serving.vllm.requests import SALT
from fastdraft.serving.vllm.step_times import StepTimes, captured_sizes, seconds_of_a_line
from vllm_host import VOCABULARY, Clock, Host, Job, StairsClock, config, graphs

CYCLE = list(range(100, 120))


@pytest.fixture(autouse=True)
def no_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)


def copying(*, output: int = 40, **kwargs: Any) -> Job:
    return Job(CYCLE * 3, (CYCLE * 20)[:output], **kwargs)


def test_ten_thousand_requests_leave_the_engine_empty() -> None:
    """With chunks of prompts, preemption, aborts and moving rows, and everything is drafted."""
    random = np.random.default_rng(7)
    drafter = FastdraftProposer(config(token_cost=0.02, memory_bytes=1 << 20))
    host = Host(drafter)
    names = (str(number) for number in range(10_000))
    preempted: list[str] = []
    more = True
    while more or host.jobs:
        while more and len(host.input_batch.req_ids) < 8 and len(host.jobs) < 8:
            name = next(names, None)
            if name is None:
                more = False
                break
            start = int(random.integers(100, 900))
            host.add(name, Job([*range(start, start + 30)], [*range(start + 5, start + 15)]))
        if preempted and random.random() < 0.5:
            host.resume(preempted.pop())
        for draft in host.step(prefill=16).values():
            assert len(draft) <= 8
        running = list(host.input_batch.req_ids)
        for name in running:
            job = host.jobs[name]
            if job.said >= len(job.output) or random.random() < 0.01:
                host.end(name)
            elif random.random() < 0.01:
                host.preempt(name)
                preempted.append(name)
    host.step()
    assert drafter.faults == 0
    assert drafter.num_requests == drafter.engine.num_requests == 0
    assert drafter.engine.num_bytes == 0
    assert drafter.stats.accepted > 20_000
    assert 0 < drafter.memory.bytes <= 1 << 20


def test_ends_are_noticed_at_once_where_the_runner_is_known() -> None:
    drafter = FastdraftProposer(config())
    host = Host(drafter)
    host.add("a", copying())
    host.step()
    assert drafter.num_requests == 1
    host.end("a")
    host.execute_model(SimpleNamespace(finished_req_ids={"a"}))
    assert drafter.num_requests == 0
    assert host.executed == 2
    host.step()
    # The id comes again, for another text.
    host.add("a", Job([1, 2, 3], [4, 5]))
    host.run()
    assert drafter.faults == 0


def test_drafts_end_where_the_model_or_the_request_does() -> None:
    drafter = FastdraftProposer(config(token_cost=0.0, length=100))
    host = Host(drafter, length=100)
    assert host.effective_drafter_max_model_len == 100 + 8
    # vLLM finds out how long a text may be once the model is loaded.
    host.update_max_model_len(90)
    assert host.effective_drafter_max_model_len == 90 + 8
    host.update_max_model_len(100)
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


@pytest.mark.parametrize("most", [0, 2])
def test_draft_tokens_that_were_not_verified_are_not_counted(most: int) -> None:
    """vLLM cuts drafts where a step has no room; what follows may still be as drafted."""
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    host.most_verified = most
    host.add("a", copying(output=80, max_tokens=80))
    host.run()
    assert drafter.stats.accepted == host.accepted
    assert (host.accepted > 0) == (most > 0)


@pytest.mark.parametrize(("most", "indexed"), [(1, False), (2, False), (3, True)])
def test_requests_without_room_for_a_draft_are_not_indexed(
    most: int, indexed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step emits a token more than it drafts, and the first one comes with the prompt."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    ticket = new_ticket()
    arguments = {"prediction_token_ids": CYCLE, "prediction_ticket": ticket}
    host.add("a", copying(output=most, max_tokens=most, extra_args=arguments))
    host.step()
    assert drafter.engine.num_requests == int(indexed)
    host.run()
    assert (len(drafter.memory.of(None)[0]) > 0) == indexed
    assert drafter.faults == drafter.num_requests == 0
    # Whoever expects a text hears what became of it.
    assert LedgerReader(tmp_path).prediction_tokens(ticket) == (int(indexed), 0)


@pytest.mark.parametrize(("room", "indexed"), [(2, False), (3, True)])
def test_prompts_that_leave_no_room_in_the_model_are_not_indexed(room: int, indexed: bool) -> None:
    drafter = FastdraftProposer(config(token_cost=0.0, length=60 + room))
    host = Host(drafter, length=60 + room)
    host.add("a", copying(output=room))
    host.step()
    assert drafter.engine.num_requests == int(indexed)
    host.run()
    assert drafter.faults == drafter.num_requests == 0


def test_prediction_is_drafted_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    ticket = new_ticket()
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    expected = [*range(200, 240)]
    host.add(
        "a",
        Job(
            [1, 2, 3],
            [*expected[:20], 5, *expected[21:]],
            extra_args={"prediction_token_ids": expected, "prediction_ticket": ticket},
        ),
    )
    host.run()
    stats = drafter.stats
    assert stats.accepted_prediction_tokens > 25
    assert stats.rejected_prediction_tokens > 0
    reader = LedgerReader(tmp_path)
    counts = (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens)
    assert reader.prediction_tokens(ticket) == counts
    totals = reader.totals()["0"]
    assert (totals["accepted_prediction_tokens"], totals["rejected_prediction_tokens"]) == counts
    assert totals["requests"] == totals["faults"] == totals["request_bytes"] == 0
    assert totals["datastore_bytes"] > 0
    assert totals["steps"] > 5
    assert totals["seconds"] > 0


def test_finished_requests_are_remembered_unless_told_otherwise(tmp_path: Path) -> None:
    text = [*range(300, 340)]
    path = tmp_path / "corpus.fds"
    corpus = Datastore()
    corpus.add([*range(400, 440)])
    corpus.save(path)
    drafter = FastdraftProposer(config(token_cost=0.0, datastores=[str(path)]))
    host = Host(drafter)

    def drafted(prompt: list[int], output: list[int], *, remember: object) -> int:
        before = drafter.stats.accepted
        host.add("a", Job(prompt, output, extra_args={"fastdraft_remember": remember}))
        host.run()
        return drafter.stats.accepted - before

    # What it leaves nothing of cannot help the next, which leaves something.
    assert drafted(text[:10], text[10:], remember=0) == 0
    assert drafted(text[:10], text[10:], remember=1) == 0
    # Nor does it see what others left.
    assert drafted(text[:10], text[10:], remember=False) == 0
    assert drafted(text[:10], text[10:], remember=True) > 20
    # A corpus is everybody's.
    assert drafted([*range(400, 410)], [*range(410, 440)], remember=0) > 20


def test_adapters_remember_apart() -> None:
    text = [*range(300, 340)]
    drafter = FastdraftProposer(config(token_cost=0.0, adapters=2))
    host = Host(drafter)

    def drafted(adapter: str | None) -> int:
        before = drafter.stats.accepted
        host.add("a", Job(text[:10], text[10:], adapter=adapter))
        host.run()
        return drafter.stats.accepted - before

    for adapter in ("pirate", None, "lawyer"):
        assert drafted(adapter) == 0
        assert drafted(adapter) > 20
    assert drafter.faults == 0


def test_requests_that_run_at_once_are_all_remembered() -> None:
    texts = [[*range(start, start + 40)] for start in (300, 400, 500)]
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    for expected in (0, 60):
        for number, text in enumerate(texts):
            host.add(str(number), Job(text[:10], text[10:]))
        host.run()
        assert drafter.stats.accepted >= expected
    assert len(drafter.memory.of(None)[0]) >= 120


def test_salts_and_names_remember_apart() -> None:
    text = [*range(300, 340)]
    drafter = FastdraftProposer(config(token_cost=0.0, shared_namespaces=["everybody"]))
    host = Host(drafter)

    def drafted(salt: str | None = None, **params: Any) -> int:
        before = drafter.stats.accepted
        host.add("a", Job(text[:10], text[10:], extra_args=params, salt=salt))
        host.run()
        return drafter.stats.accepted - before

    named = {NAMESPACE: "s"}
    for salt, params in ((None, {}), ("s", {}), (None, named), ("s", named)):
        assert drafted(salt, **params) == 0
        assert drafted(salt, **params) > 20
    # What enters a shared namespace is read by all.
    text = [*range(400, 440)]
    assert drafted(**{NAMESPACE: "everybody"}) == 0
    assert drafted("another") > 20
    assert drafter.faults == 0


def test_memory_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [*range(300, 340)]
    settings = {"token_cost": 0.0, "memory_url": str(tmp_path)}
    with pytest.raises(InvalidValueError, match="needs a key in the environment's FASTDRAFT_MEMO"):
        FastdraftProposer(config(**settings))
    monkeypatch.setenv("FASTDRAFT_MEMORY_KEY", "an operator's key")
    for expected in (False, True):
        drafter = FastdraftProposer(config(**settings))
        host = Host(drafter)
        assert drafter.replica is not None
        drafter.replica.find([Namespace(salt="s")])
        assert drafter.replica.refresh()  # what was saved has been read
        host.add("a", Job(text[:10], text[10:], salt="s"))
        host.run()
        assert (drafter.stats.accepted > 20) == expected
        drafter.replica.close()
    with pytest.raises(InvalidValueError, match="memory_url must be left out with external_launch"):
        FastdraftProposer(config(executor="external_launcher", **settings))


def test_replicas_share_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [*range(300, 340)]
    settings = {"token_cost": 0.0, "memory_url": str(tmp_path)}
    with pytest.raises(InvalidValueError, match="needs a key in the environment's FASTDRAFT_MEMO"):
        FastdraftProposer(config(**settings))
    monkeypatch.setenv("FASTDRAFT_MEMORY_KEY", "an operator's key")
    replicas = [FastdraftProposer(config(**settings)) for _ in range(2)]

    def accepted(drafter: FastdraftProposer, salt: str) -> int:
        before = drafter.stats.accepted
        host = Host(drafter)
        host.add("a", Job(text[:10], text[10:], salt=salt))
        host.run()
        assert drafter.replica is not None and drafter.replica.refresh()
        return drafter.stats.accepted - before

    assert accepted(replicas[0], "s") == 0
    assert accepted(replicas[1], "another") == 0
    for drafter in replicas:
        assert drafter.replica is not None
        drafter.replica.find([Namespace(salt="s")])
        drafter.replica.refresh()
    assert accepted(replicas[1], "s") > 20
    for drafter in replicas:
        assert drafter.replica is not None and not drafter.replica.faults
        drafter.replica.close()


def test_memory_of_many_adapters_stays_within_its_bytes() -> None:
    """Each is remembered, and those that nobody asked for in a while are not."""
    drafter = FastdraftProposer(config(token_cost=0.0, adapters=1, memory_bytes=1 << 19))
    host = Host(drafter)
    random = np.random.default_rng(0)

    def run(adapter: str | None, job: Job) -> int:
        before = drafter.stats.accepted
        job.adapter = adapter
        host.add("a", job)
        host.run()
        assert drafter.memory.bytes <= 1 << 19
        return drafter.stats.accepted - before

    for number in range(30):
        for adapter in ("busy", f"once {number}", None):
            run(adapter, Job(random.integers(0, VOCABULARY, 400).tolist(), CYCLE[:5]))
    copied = random.integers(0, VOCABULARY, 40).tolist()
    run("busy", Job(copied[:10], copied[10:]))
    run("another", Job(copied[:10], copied[10:]))
    assert run("busy", Job(copied[:10], copied[10:])) > 20
    assert drafter.faults == 0


@pytest.mark.parametrize("off", ["off", False, 0])
def test_a_request_may_switch_drafts_off(off: object) -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    arguments = {"fastdraft": off, "prediction_token_ids": (CYCLE * 20)[:40]}
    host.add("off", copying(extra_args=arguments))
    host.add("on", copying(extra_args={"fastdraft": "on"}))
    host.step()
    assert drafter.engine.num_requests == 1
    drafts = host.step()
    assert drafts["off"] == []
    assert drafts["on"]
    host.run()
    assert drafter.faults == drafter.num_requests == 0


def test_a_request_may_say_its_longest_draft() -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    for longest in (1, 3, 100):
        host.add(str(longest), copying(extra_args={"fastdraft_lookahead": longest}))
    host.step()
    host.step()
    drafts = host.step()
    assert [len(drafts[name]) for name in ("1", "3", "100")] == [1, 3, 8]
    host.run()
    assert drafter.faults == drafter.num_requests == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fastdraft": "of"}, "fastdraft must be 'on' or 'off', got 'of'"),
        ({"fastdraft_lookahead": 0}, "fastdraft_lookahead must be at least 1, got 0; .*'off'"),
        ({"fastdraft_lookahead": "4"}, "fastdraft_lookahead must be an integer, got '4'"),
        ({"fastdraft_lookahead": True}, "fastdraft_lookahead must be an integer, got True"),
    ],
)
def test_a_bad_argument_costs_drafts_and_is_named(
    arguments: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    host.add("bad", copying(extra_args=arguments))
    host.add("good", copying())
    host.step()
    drafts = host.step()
    assert drafts["bad"] == []
    assert drafts["good"]
    assert (drafter.refused, drafter.faults) == (1, 0)
    [record] = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.exc_info is not None
    assert re.search(message, str(record.exc_info[1]))


def test_embedded_prompts_are_not_drafted_for() -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    host.add("embedded", copying())
    host.requests["embedded"].prompt_token_ids = None
    host.add("mixed", copying())
    host.requests["mixed"].prompt_is_token_ids = [False] * 60
    host.add("text", copying())
    host.step()
    drafts = host.step()
    assert drafts["embedded"] == drafts["mixed"] == []
    assert drafts["text"]
    host.run()
    assert drafter.faults == drafter.num_requests == 0


def test_text_that_the_host_takes_back_is_forgotten() -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    host.add("a", copying(output=60))
    for _ in range(4):
        host.step()
    job = host.jobs["a"]
    job.said -= 7
    job.output = job.output[: job.said] + [*range(500, 520)] * 2
    host.drafts = {}
    host.lengths[0] = len(job.text)
    job.computed = len(job.text) - 1
    host.run()
    assert drafter.faults == drafter.num_requests == 0
    assert drafter.stats.accepted > 20


def cycle_with_errors(random: np.random.Generator, errors: float) -> list[int]:
    """An output that repeats the cycle, but for a share of random tokens."""
    return [
        int(token) if random.random() < 1 - errors else int(random.integers(VOCABULARY))
        for token in CYCLE * 60
    ]


@pytest.mark.parametrize(("slope", "pays"), [(0.001, True), (1.0, False)])
def test_drafting_follows_the_measured_times(
    slope: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where verification takes as long as decoding nothing is drafted."""
    clock = Clock(slope)
    monkeypatch.setattr(proposer, "time", clock)
    host = Host(FastdraftProposer(config(length=4096)), length=4096)
    random = np.random.default_rng(0)
    for number in range(8):
        host.add(str(number), Job(CYCLE * 3, cycle_with_errors(random, 0.2)))
    drafted = []
    while all(job.said < len(job.output) for job in host.jobs.values()):
        drafts = host.step()
        drafted.append(sum(map(len, drafts.values())) / len(drafts))
        clock.forward(sum(1 + len(draft) for draft in drafts.values()))
    late = np.mean(drafted[len(drafted) // 2 :])
    assert late > 2 if pays else late < 0.3


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
    host = Host(FastdraftProposer(config(length=4096)), rows=32, length=4096)
    random = np.random.default_rng(0)
    for number in range(32):
        text = CYCLE * 60 if number < copying else random.integers(200, VOCABULARY, 1000).tolist()
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


@pytest.mark.parametrize("chunk", [3, 40], ids=["short prompts", "chunks of a long prompt"])
@pytest.mark.parametrize(("slope", "pays"), [(0.001, True), (1.0, False)])
def test_the_cost_is_learned_while_prompts_keep_coming(
    slope: float, pays: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is without a prompt, as under load. Beside 40 tokens of one a few more cost little,
    whatever a token costs."""
    clock = Clock(slope)
    monkeypatch.setattr(proposer, "time", clock)
    host = Host(FastdraftProposer(config(length=4096)), rows=16, length=4096)
    host.clock = clock
    random = np.random.default_rng(0)
    for number in range(8):
        host.add(str(number), Job(CYCLE * 3, cycle_with_errors(random, 0.4)))
    host.step()
    decoders = list(host.jobs)
    drafted = []
    while all(host.jobs[name].said < len(host.jobs[name].output) for name in decoders):
        if len(host.jobs) == len(decoders):
            size = 3 if chunk == 3 else 4000
            prompt = random.integers(0, VOCABULARY, size).tolist()
            host.add(f"prompt {len(drafted)}", Job(prompt, [5]))
        drafts = host.step(prefill=chunk)
        drafted.append(sum(len(drafts[name]) for name in decoders) / 8)
        for name in host.jobs.keys() - set(decoders):
            if host.jobs[name].said:
                host.end(name)
    late = np.mean(drafted[len(drafted) // 2 :])
    if chunk == 3:
        assert late > 2 if pays else late < 0.3
    else:
        assert late > 1
    # Where drafts pay, hardly a step goes without to learn the cost of one.
    assert np.mean(np.array(drafted) == 0) < 0.1 or not pays


def serve_on_stairs(
    monkeypatch: pytest.MonkeyPatch, mode: str, pieces: float, **options: Any
) -> tuple[StairsClock, FastdraftProposer]:
    """Five requests with errors, whose forwards are padded to 8, 24, 40 or 45 tokens."""
    sizes = [8, 24, 40, 45]
    clock = StairsClock(sizes, even=5 * 9, pieces=pieces)
    monkeypatch.setattr(proposer, "time", clock)
    drafter = FastdraftProposer(config(length=4096, graphs=graphs(sizes, mode)))
    host = Host(drafter, length=4096)
    host.clock = clock
    random = np.random.default_rng(0)
    for number in range(5):
        job = Job(CYCLE * 3, cycle_with_errors(random, 0.3)[:500], **options)
        host.add(str(number), job)
    while all(job.said < len(job.output) for job in host.jobs.values()):
        host.step()
    assert drafter.faults == 0
    return clock, drafter


def test_free_places_up_to_a_captured_size_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _ = serve_on_stairs(monkeypatch, "PIECEWISE", 1.0)
    late = clock.seen[len(clock.seen) // 2 :]
    on_an_edge = [tokens in clock.sizes or tokens == 5 for tokens in late]
    assert np.mean(on_an_edge) > 0.7


@pytest.mark.parametrize(("pieces", "even"), [(2.0, True), (1.0, False)])
def test_all_rows_get_the_longest_draft_where_its_graph_is_faster(
    pieces: float, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, drafter = serve_on_stairs(monkeypatch, "FULL and PIECEWISE", pieces)
    late = clock.seen[len(clock.seen) // 2 :]
    share = np.mean([tokens == clock.even for tokens in late])
    assert share > 0.8 if even else share < 0.5
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


def test_prompts_that_keep_coming_do_not_stop_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts are not measured; what one costs without drafts stays unknown."""
    clock = Clock(0.001)
    monkeypatch.setattr(proposer, "time", clock)
    host = Host(FastdraftProposer(config()))
    drafted = 0
    host.add("long", copying(output=400))
    for number in range(30):
        host.add(str(number), Job([7, 8, 9], [5]))
        drafts = host.step()
        clock.forward(sum(1 + len(draft) for draft in drafts.values()))
        drafted += bool(drafts["long"])
        host.end(str(number))
    assert drafted >= 25


def test_ranks_that_schedule_alone_draft_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = []
    for slope in (0.001, 1.0):
        clock = Clock(slope)
        monkeypatch.setattr(proposer, "time", clock)
        host = Host(FastdraftProposer(config(executor="external_launcher")))
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


def test_requests_beyond_the_memory_go_on_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    one = FastdraftProposer(config(memory_bytes=0))
    host = Host(one)
    host.add("a", copying())
    host.step()
    room = one.engine.num_bytes

    drafter = FastdraftProposer(config(memory_bytes=0, max_bytes=3 * room, token_cost=0.0))
    host = Host(drafter)
    for number in range(8):
        host.add(str(number), copying(output=200))
    host.run()
    assert drafter.faults > 0
    assert drafter.stats.accepted > 0
    assert drafter.num_requests == drafter.engine.num_requests == 0
    assert all("without drafts" in each for each in warnings(caplog))
    # With the room back, new ones are drafted for again.
    before = drafter.stats.accepted
    host.add("later", copying())
    host.run()
    assert drafter.stats.accepted > before + 20


def test_a_corrupt_row_costs_its_own_drafts_alone(caplog: pytest.LogCaptureFixture) -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
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


def test_a_broken_ledger_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
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


def test_a_closed_datastore_stops_nothing() -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    host.add("a", copying())
    host.step()
    drafter.memory.of(None)[0].close()
    host.add("b", copying())
    host.run()
    assert drafter.stats.accepted > 40
    assert drafter.num_requests == drafter.engine.num_requests == 0


@pytest.mark.parametrize(
    "prediction", ["text", [1.5], [[1, 2], [3, 4]], [[1], [2, 3]], [-1], [VOCABULARY], {"a": 1}]
)
def test_a_bad_prediction_costs_drafts_and_nothing_else(prediction: object) -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
    host.add("bad", copying(extra_args={"prediction_token_ids": prediction}))
    host.add("good", copying(extra_args={"prediction_token_ids": []}))
    host.step()
    drafts = host.step()
    assert drafts["bad"] == []
    assert drafts["good"]
    host.run()
    assert (drafter.refused, drafter.faults) == (1, 0)
    assert drafter.num_requests == drafter.engine.num_requests == 0


def test_tokens_beyond_the_vocabulary_are_never_drafted(tmp_path: Path) -> None:
    corpus = Datastore()
    corpus.add([300, 301, 302, VOCABULARY + 5, VOCABULARY + 6] * 3)
    corpus.save(tmp_path / "foreign.fds")
    settings = {"datastores": [str(tmp_path / "foreign.fds")], "token_cost": 0.0}
    drafter = FastdraftProposer(config(**settings))
    host = Host(drafter)
    host.add("a", Job([300, 301], [302, 303, 304]))
    host.add("b", copying())
    drafts = host.step()
    assert drafts["a"] == []
    assert drafts["b"]
    assert drafter.faults == 1


def test_a_host_that_changed_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    with pytest.raises(AttributeError):
        drafter.attach(SimpleNamespace(requests={}))
    # Without the entry point nobody tells whose rows they are.
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(InvalidValueError, match="has to name fastdraft, got 'other'"):
        drafter.load_model()


def test_a_request_whose_salt_is_unknown_shares_text_with_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a vLLM whose requests the entry point no longer finds: a client may then send what
    looks like a salt."""
    text = [*range(300, 340)]
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)

    def drafted(**more: Any) -> int:
        before = drafter.stats.accepted
        host.add("a", Job(text[:10], text[10:], **more))
        host.run()
        return drafter.stats.accepted - before

    unknown: dict[str, Any]
    for unknown in ({}, {"extra_args": {SALT: "tenant"}}, {"extra_args": {SALT: ["tenant"]}}):
        assert drafted(marked=False, **unknown) == 0
        assert drafted(salt="tenant") == 0
        drafter.memory.clear()
    assert drafted(salt="tenant") == 0
    assert drafted(marked=False, extra_args={SALT: "tenant"}) == 0
    assert drafted(salt="tenant") > 20
    [message] = warnings(caplog)
    assert "nothing is remembered" in message
    assert drafter.faults == drafter.refused == 0


def test_what_cannot_be_read_at_all_costs_drafts() -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    Host(drafter)
    assert drafter.propose([[1], [2]], None, None) == [[], []]  # type: ignore[arg-type]
    assert drafter.faults == 1


def test_a_long_prompt_is_indexed_beside_the_steps() -> None:
    drafter = FastdraftProposer(config(token_cost=0.0, length=200_000))
    host, gate = Host(drafter, length=200_000), threading.Event()
    assert drafter._thread is not None
    long = np.random.default_rng(0).integers(0, VOCABULARY, 100_000).tolist()
    drafter._thread.submit(gate.wait)
    host.add("long", Job(long, long[500:540]))
    host.add("other", copying(output=60))
    for _ in range(3):
        drafts = host.step()
    assert drafts["other"] and not drafts["long"]
    assert host.jobs["long"].said == 3
    gate.set()
    drafter.drain()
    assert host.step()["long"] == long[504:512]
    host.run()
    drafter.drain()
    assert drafter.stats.emitted == 100
    assert len(drafter.memory.of(None)[0]) > 100_000
    assert drafter.faults == drafter.num_requests == drafter.engine.num_requests == 0


def test_a_broken_step_is_forgotten_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    drafter = FastdraftProposer(config(token_cost=0.0))
    host = Host(drafter)
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
        ({"memory_bytes": 5}, "memory_bytes must be 0, or enough for some text, got 5"),
        ({"datastores": 5}, "datastores must be a list of paths, got 5"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 2}, "pipeline_parallel_size must be 1 .*tensor_parallel_size.*, got 2"),
        (
            {"by_batch_size": [(1, 4, 8), (5, 64, 2)]},
            "num_speculative_tokens_per_batch_size must be left out: .* got .*5, 64, 2",
        ),
        ({"hybrid": True}, "recurrent or convolutional state.*got LittleForCausalLM"),
        ({"attention_free": True}, "recurrent or convolutional state.*got LittleForCausalLM"),
    ],
)
def test_what_cannot_be_honoured_ends_the_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        FastdraftProposer(config(**options))


def test_settings_are_optional() -> None:
    assert Settings.of(SimpleNamespace()) == Settings()
    assert Settings.of(SimpleNamespace(additional_config={"other": 1})) == Settings()
    with pytest.raises(InvalidValueError, match="must be a mapping"):
        Settings.of(SimpleNamespace(additional_config={"fastdraft": 5}))


def test_the_ledger_gives_rows_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    drafter = FastdraftProposer(config())
    host = Host(drafter)
    ledger = drafter._ledger
    assert isinstance(ledger, Ledger)
    free = len(ledger._free)
    for number in range(20):
        arguments = {"prediction_token_ids": CYCLE, "prediction_ticket": new_ticket()}
        host.add(str(number), copying(output=10, extra_args=arguments))
        host.run()
    assert len(ledger._free) == free


def test_a_request_whose_end_fails_costs_the_others_that_end_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = FastdraftProposer(config(token_cost=0.02))
    host = Host(drafter)
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
