"""Contracts of both model runners of vLLM: V1's proposer and V2's speculator keep them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdraft import Datastore
from fastdraft.errors import InvalidValueError
from fastdraft.serving.host import KEY_VARIABLE, Namespace
from fastdraft.serving.ledger import LedgerReader, new_ticket
from fastdraft.serving.request_options import NAMESPACE, REMEMBER
from fastdraft.serving.vllm.requests import SALT
from vllm_host import CYCLE, VOCABULARY, Job, V1Host, V2Host, copying

TEXT = np.random.default_rng(1).permutation(VOCABULARY)[:60].tolist()


def v1(**options: Any) -> V1Host:
    return V1Host(token_cost=0.0, **options)


Make = Callable[..., Any]


@pytest.fixture(params=[v1, V2Host])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a host of either runner."""
    return request.param  # type: ignore[no-any-return]


def accepted(host: Any, text: list[int] = TEXT, **more: Any) -> int:
    """How many draft tokens are accepted of a request whose text repeats nothing."""
    before = host.kept.stats.accepted
    host.add("a", Job(text[:10], text[10:], **more))
    host.run()
    assert host.faults == 0
    return int(host.kept.stats.accepted - before)


@pytest.mark.parametrize(
    ("make_one", "lag"), [(v1, 0), *((V2Host, lag) for lag in (0, 1, 2, "any"))]
)
def test_random_requests_leave_nothing_behind(make_one: Make, lag: int | str) -> None:
    """Chunks of prompts, preemption, aborts, rows that change hands, and V2's thread that lags."""
    random = np.random.default_rng(7)
    host = make_one(memory_bytes=1 << 20)
    names = [str(number) for number in range(1000 if make_one is v1 else 150)]
    preempted: list[str] = []
    while names or host.jobs:
        while names and len(host.jobs) < 6:
            start = int(random.integers(100, 900))
            host.add(names.pop(), Job([*range(start, start + 30)], [*range(start + 5, start + 20)]))
        if preempted and random.random() < 0.5:
            host.resume(preempted.pop())
        said = host.step(prefill=16)
        if isinstance(host, V1Host):
            assert all(len(draft) <= 8 for draft in said.values())
        if isinstance(host, V2Host):
            tasks = len(host.thread.tasks)
            host.thread.run(
                int(random.integers(0, 6)) if lag == "any" else max(tasks - int(lag), 0)
            )
        for name in host.running:
            job = host.jobs[name]
            if job.said >= len(job.output) or random.random() < 0.02:
                host.end(name)
            elif random.random() < 0.02:
                host.preempt(name, takes_back=int(random.integers(0, 3)))
                preempted.append(name)
    host.run()
    host.assert_empty()
    assert host.kept.stats.accepted > (2_000 if make_one is v1 else 150)
    assert 0 < host.kept.memory.bytes <= 1 << 20


def test_text_that_the_host_takes_back_is_forgotten(make: Make) -> None:
    host = make()
    host.add("a", copying(output=60))
    for _ in range(4):
        host.step()
        host.catch_up()
    host.preempt("a", takes_back=7)
    job = host.jobs["a"]
    job.output = job.output[: job.said] + [*range(500, 520)] * 2
    host.resume("a")
    host.step()
    host.catch_up()
    assert host.text_in_engine("a")[1] == len(job.text)
    host.run()
    host.assert_empty()
    assert host.kept.stats.accepted > 20


@pytest.mark.parametrize("most", [0, 2])
def test_draft_tokens_that_were_not_verified_are_not_counted(make: Make, most: int) -> None:
    """vLLM cuts drafts where a step has no room; what follows may still be as drafted."""
    host = make()
    host.most_verified = most
    host.add("a", copying(output=80, max_tokens=80))
    host.run()
    assert host.kept.stats.accepted == host.accepted
    assert (host.accepted > 0) == (most > 0)


def test_tokens_beyond_the_end_are_not_counted() -> None:
    """V2's device goes on to the end of its draft; vLLM cuts off what is beyond `max_tokens`."""
    host = V2Host()
    for most in (3, 17, 20, 25):
        before, held = host.kept.stats, len(host.kept.memory.of(None)[0])
        host.add("a", copying(output=60, max_tokens=most))
        job, accepted = host.jobs["a"], 0
        while job.said < most:
            emitted = host.step().get("a", 0)
            accepted += max(emitted - 1 - max(job.said - most, 0), 0)
            host.catch_up()
        host.end("a")
        host.run()
        after = host.kept.stats
        assert after.emitted - before.emitted == most
        assert after.accepted - before.accepted <= accepted
        assert len(host.kept.memory.of(None)[0]) - held <= len(job.prompt) + most
        assert host.faults == 0


def test_a_limit_of_memory_at_work_is_no_fault(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    host = make(max_bytes=1 << 15)
    for name in "abc":
        host.add(name, copying(output=400))
    host.run()
    assert host.faults == host.kept.refused == 0
    [warning] = [each for each in caplog.records if "max_bytes is reached" in each.message]
    assert warning.exc_info is None
    host.assert_empty()
    # With the room back, new ones are drafted for again.
    before = host.kept.stats.accepted
    host.add("later", copying())
    host.run()
    assert host.kept.stats.accepted > before + 20


def test_a_prediction_is_drafted_and_counted(make: Make, folder: Path) -> None:
    host = make()
    free = len(host.kept._ledger._free)
    ticket = new_ticket()
    arguments = {"prediction_token_ids": [*TEXT[10:30], 5, 6, *TEXT[32:]]}
    host.add("a", Job(TEXT[:10], TEXT[10:], extra_args={**arguments, "prediction_ticket": ticket}))
    host.run()
    counts = LedgerReader(folder).prediction_tokens(ticket)
    assert counts is not None and counts[0] > 35 and counts[1] > 0
    [totals] = LedgerReader(folder).totals().values()
    assert (totals["accepted_prediction_tokens"], totals["rejected_prediction_tokens"]) == counts
    assert totals["requests"] == totals["faults"] == totals["request_bytes"] == 0
    assert totals["datastore_bytes"] > 0 and totals["seconds"] > 0
    assert 35 < sum(counts) <= totals["drafted_tokens"]
    assert totals["steps"] > 5
    assert len(host.kept._ledger._free) == free


def test_finished_requests_are_remembered_unless_they_opt_out(make: Make, tmp_path: Path) -> None:
    corpus = Datastore()
    corpus.add([*range(400, 440)])
    corpus.save(tmp_path / "corpus.fds")
    host = make(datastores=[str(tmp_path / "corpus.fds")])
    # The first leaves nothing, so it cannot help the second, which leaves its text.
    assert accepted(host, extra_args={REMEMBER: 0}) == 0
    assert accepted(host) == 0
    # Nor does it see what others left.
    assert accepted(host, extra_args={REMEMBER: False}) == 0
    assert accepted(host) > 30
    # A corpus is everybody's.
    assert accepted(host, [*range(400, 440)], extra_args={REMEMBER: 0}) > 15


def test_adapters_salts_and_names_remember_apart(make: Make) -> None:
    host = make(shared_namespaces=["everybody"])
    named = {"extra_args": {NAMESPACE: "s"}}
    for owner in ({}, {"adapter": "s"}, {"salt": "s"}, named, {"salt": "s", **named}):
        assert accepted(host, **owner) == 0
        assert accepted(host, **owner) > 30
    # Text in a shared namespace is read by all.
    text = TEXT[::-1]
    assert accepted(host, text, extra_args={NAMESPACE: "everybody"}) == 0
    assert accepted(host, text, salt="another") > 30


def test_replicas_share_their_memory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"memory_url": str(tmp_path)}
    with pytest.raises(InvalidValueError, match=f"needs a key .*{KEY_VARIABLE}, got none"):
        make(**options)
    monkeypatch.setenv(KEY_VARIABLE, "an operator's key")
    one, other = hosts = [make(**options) for _ in range(2)]
    assert accepted(one, salt="s") == 0
    for replica in (host.kept.replica for host in hosts):
        replica.find([Namespace(salt="s")])  # as a first request would: it is fetched from now on
        assert replica.refresh()
    assert accepted(other, salt="another") == 0
    assert accepted(other, salt="s") > 20
    for host in hosts:
        assert not host.kept.replica.faults
        host.kept.replica.close()


def test_a_request_whose_salt_is_unknown_shares_text_with_none(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a vLLM whose requests the entry point no longer finds: a client may then send what
    looks like a salt."""
    host = make()
    for unknown in ({}, {"extra_args": {SALT: "tenant"}}, {"extra_args": {SALT: ["tenant"]}}):
        assert accepted(host, marked=False, **unknown) == 0
        assert accepted(host, salt="tenant") == 0
        assert accepted(host, marked=False, **unknown) == 0
        host.kept.memory.clear()
    [message] = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "nothing is remembered" in message
    assert host.kept.refused == 0


def test_a_request_may_switch_drafts_off(make: Make) -> None:
    host = make()
    host.add("off", copying(extra_args={"fastdraft": "off", "prediction_token_ids": CYCLE * 2}))
    host.run()
    assert host.accepted == host.faults == host.kept.refused == host.kept.stats.drafts == 0
    assert len(host.kept.memory.of(None)[0]) == 0


def test_a_request_may_say_its_longest_draft(make: Make) -> None:
    host = make()
    host.add("a", copying(extra_args={"fastdraft_lookahead": 2}))
    longest = 0
    while host.jobs:
        before = host.jobs["a"].said
        host.step()
        host.catch_up()
        longest = max(longest, host.jobs["a"].said - before)
        if host.jobs["a"].said >= 40:
            host.end("a")
    assert longest == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fastdraft": "of"}, "fastdraft must be 'on' or 'off', got 'of'"),
        ({"fastdraft_lookahead": 0}, "fastdraft_lookahead must be at least 1, got 0; .*'off'"),
        ({"prediction_token_ids": [[1], [2, 3]]}, "must be a list of token ids"),
        ({"prediction_token_ids": [VOCABULARY]}, f"{VOCABULARY}"),
    ],
)
def test_a_bad_argument_costs_drafts_and_is_named(
    make: Make, arguments: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = make()
    host.add("bad", copying(extra_args=arguments))
    host.add("good", copying())
    host.run()
    assert host.accepted > 20
    assert (host.kept.refused, host.faults) == (1, 0)
    [record] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert record.exc_info is not None and record.exc_info[1] is not None
    assert re.search(message, str(record.exc_info[1]))
    assert host.kept.num_requests == host.kept.engine.num_requests == 0


@pytest.mark.parametrize("limits", [{"stop_token_ids": [7, CYCLE[3]]}, {"eos_token_id": CYCLE[3]}])
def test_text_behind_a_stop_token_is_neither_counted_nor_remembered(
    make: Make, limits: dict[str, Any]
) -> None:
    """A draft goes on behind it, and steps that overlap do; vLLM cuts that off."""
    host = make()
    # Then the whole answer is drafted, and known already. A prompt may have the token.
    for new in (60 + 4, 0):
        before, [memory] = host.kept.stats.emitted, host.kept.memory.of(None)
        held = len(memory)
        host.add("a", copying(**limits))
        host.run()
        assert host.kept.stats.emitted - before == 4
        assert len(memory) - held == new
    assert host.accepted > 8 and host.faults == 0


def test_embedded_prompts_are_not_drafted_for(make: Make) -> None:
    host = make()
    changes = {"embedded": ("prompt_token_ids", None), "mixed": ("prompt_is_token_ids", [False])}
    if isinstance(host, V2Host):
        add = host.add_requests

        def add_requests(scheduler_output: Any) -> None:
            for request in scheduler_output.scheduled_new_reqs:
                if request.req_id in changes:
                    setattr(request, *changes[request.req_id])
            add(scheduler_output)

        host.add_requests = add_requests  # type: ignore[method-assign]
    for name in (*changes, "text"):
        host.add(name, copying())
        if isinstance(host, V1Host) and name in changes:
            setattr(host.requests[name], *changes[name])
    host.run()
    assert host.kept.stats.emitted == 40
    assert host.faults == host.kept.num_requests == 0


@pytest.mark.parametrize(
    ("makers", "options", "message"),
    [
        *(
            ([v1, V2Host], *refused)
            for refused in (
                ({"stages": 2}, "pipeline_parallel_size must be 1 .*tensor_parallel_size.*, got 2"),
                ({"hybrid": True}, "recurrent or convolutional state.*got 'LittleForCausalLM'"),
                ({"hybrid": True, "unproven_recurrent": True}, "leaves rejected draft"),  # a CPU
                ({"attention_free": True}, "recurrent or convolutional state.*got 'LittleFor"),
                ({"unknown": 1}, "must be a mapping with keys of"),
            )
        ),
        ([v1], {"coupled_acceptance": True}, "coupled_acceptance must be left out .*V1.* got True"),
        ([v1], {"by_batch_size": [(1, 4, 8)]}, "per_batch_size must be left out: .*got .*1, 4, 8"),
        ([V2Host], {"token_cost": 0.1}, "token_cost must be left out with .*V2, .*got 0.1"),
        ([V2Host], {"objective": "last"}, "objective must be left out with .*V2, .*got 'last'"),
    ],
)
def test_options_that_cannot_be_honoured_end_the_start(
    makers: list[Make], options: dict[str, Any], message: str
) -> None:
    for make_one in makers:
        with pytest.raises(InvalidValueError, match=message):
            make_one(**options)


@pytest.mark.parametrize("runner_type", ["generate", "pooling"])
def test_a_server_that_writes_no_text_says_nothing_of_drafts(
    make: Make, runner_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.fastdraft"):
        make(runner_type=runner_type)
    assert len(caplog.records) == (runner_type == "generate")
