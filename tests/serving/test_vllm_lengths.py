"""The length of drafts follows what they had accepted and what steps take."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdraft.errors import InvalidValueError
from fastdraft.serving.vllm.plugin import METHOD
from fastdraft.serving.vllm.v2.lengths import (
    DraftLengths,
    draft_schedule,
    follow_batches,
    give_lengths,
)
from fastdraft.step_latency import StepLatency
from vllm_host import config

LENGTHS = (2, 5, 8)


def seconds(rows: int, length: int, token: float) -> float:
    return 0.007 + token * rows * (1 + length)


def serve(
    probability: float, token: float, rows: int, *, steps: int = 600, lengths: Any = LENGTHS
) -> tuple[list[int], float]:
    """The lengths chosen where each token is right with a probability; and tokens a second late."""
    random = np.random.default_rng(1)
    latency = StepLatency("cuda")
    chooser = DraftLengths(lengths, latency)
    chosen: list[int] = []
    tokens = elapsed = 0.0
    for step in range(steps):
        length = chooser.choose(rows)
        right = (random.random((rows, max(length, 1))) < probability).cumprod(1).sum(1)
        accepted = np.minimum(right, length)
        took = seconds(rows, length, token) * float(np.exp(0.03 * random.standard_normal()))
        latency.observe(rows, 1 + length, took)
        chooser.observe(length, accepted if length else [])
        chosen.append(length)
        if step >= steps // 3:
            tokens += float((1 + accepted).sum())
            elapsed += took
    return chosen, tokens / elapsed


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("probability", [0.02, 0.4, 0.7, 0.95])
def test_the_choice_is_almost_the_best(rows: int, probability: float) -> None:
    """The one with the most tokens a second; an oracle knows times and probabilities."""
    token = 2.1e-5

    def speed(length: int) -> float:
        emitted = sum(probability**i for i in range(length + 1))
        return rows * emitted / seconds(rows, length, token)

    best = max(map(speed, (0, *LENGTHS)))
    # Steps of thousands of tokens are feared, and the longest ones not always tried.
    least = 0.96 if rows <= 64 else 0.9
    assert serve(probability, token, rows)[1] > least * best


def test_probes_become_rare_where_drafts_do_not_pay() -> None:
    chosen, _ = serve(0.02, 1e-4, 64, steps=3000)
    assert 3 <= np.count_nonzero(chosen) <= 14
    assert max(chosen[100:]) == 2


def test_drafts_begin_when_they_pay_again() -> None:
    latency = StepLatency("cuda")
    chooser = DraftLengths(LENGTHS, latency)
    for probability in (0.0, 1.0):
        late = []
        for _ in range(400):
            length = chooser.choose(16)
            accepted = [round(probability * length)] * 16 if length else []
            latency.observe(16, 1 + length, seconds(16, length, 1e-4))
            chooser.observe(length, accepted)
            late.append(length)
        assert (np.mean(late[200:]) > 6) == (probability == 1.0)


@given(st.integers(1, 64), st.integers(1, 600), st.booleans())
def test_a_schedule_names_each_length_for_some_rows(longest: int, rows: int, always: bool) -> None:
    """As vLLM reads it: ranges that follow one another from 1 on, the last one to the most rows."""
    schedule = draft_schedule(longest, rows, always=always)
    begins, ends, lengths = zip(*schedule, strict=True)
    assert begins == (1, *(end + 1 for end in ends[:-1]))
    assert ends[-1] == rows
    assert all(begin <= end for begin, end, _ in schedule)
    assert lengths[0] == longest
    assert list(lengths) == sorted(set(lengths), reverse=True)
    assert rows == 1 or lengths[-1] == always


def vllm_config(
    *,
    v2: bool = True,
    replicas: int = 1,
    method: str = "ngram_gpu",
    model: str = METHOD,
    **options: Any,
) -> Any:
    made = config(**options)
    made.use_v2_model_runner = v2
    made.parallel_config.data_parallel_size = replicas
    made.speculative_config.method, made.speculative_config.model = method, model
    return made


def test_lengths_are_given_where_the_user_named_none() -> None:
    made = vllm_config(lookahead=6, rows=4)
    for _ in range(2):
        give_lengths(made)
        given_lengths = made.speculative_config.num_speculative_tokens_per_batch_size
        assert given_lengths == draft_schedule(6, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "ngram_gpu"},
        {"replicas": 2},
        {"executor": "external_launcher"},
        {"by_batch_size": [(1, 4, 6)]},
        {"method": "ngram"},
    ],
)
def test_elsewhere_vllm_keeps_what_it_was_given(options: Any) -> None:
    made = vllm_config(**options)
    give_lengths(made)
    named = made.speculative_config.num_speculative_tokens_per_batch_size
    assert named == options.get("by_batch_size")


def test_a_configuration_without_drafts_stays_as_it_is() -> None:
    made = vllm_config()
    made.speculative_config = None
    give_lengths(made)


def test_the_other_model_runner_ends_the_start() -> None:
    with pytest.raises(InvalidValueError, match="must keep to Model Runner V2"):
        give_lengths(vllm_config(v2=False))


class Scheduler:
    """vLLM's, as far as it is read."""

    def __init__(self, by_batch_size: Any, **options: Any) -> None:
        self.vllm_config = config(by_batch_size=by_batch_size, **options)
        self.dynamic_sd_lookup: Any = "vLLM's own"
        self.requests: dict[str, Any] = {}
        self.updated = 0

    def update_from_output(self, scheduled: Any, output: Any) -> str:
        self.updated += 1
        return "outputs"


def a_step(
    scheduler: Scheduler, drafts: dict[str, int], accepted: dict[str, int], prompt: int = 0
) -> None:
    tokens = {key: 1 + length for key, length in drafts.items()}
    if prompt:
        tokens["prompt"] = prompt
    scheduled = SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens={k: [-1] * length for k, length in drafts.items() if length},
    )
    output = SimpleNamespace(
        sampled_token_ids=[[7] * (1 + accepted.get(key, -1)) for key in tokens],
        req_id_to_index={key: index for index, key in enumerate(tokens)},
    )
    assert scheduler.update_from_output(scheduled, output) == "outputs"


def serve_scheduled(
    scheduler: Scheduler, clock: Any, rows_of_steps: Iterable[str], *, good: bool
) -> list[int]:
    """The lengths chosen for steps whose drafts are all right, or all wrong; some have a prompt."""
    follow_batches(scheduler)
    chosen = []
    for step, rows in enumerate(rows_of_steps):
        length = scheduler.dynamic_sd_lookup[len(rows)]
        clock.now += 0.01 + 0.001 * len(rows) * (1 + length)
        accepted = dict.fromkeys(rows, length if good else 0)
        a_step(scheduler, dict.fromkeys(rows, length), accepted, prompt=20 * (step % 7 == 0))
        chosen.append(length)
    assert scheduler.updated == len(chosen)
    return chosen


@pytest.mark.parametrize("good", [True, False])
def test_a_scheduler_follows_the_drafts(good: bool, clock: Any) -> None:
    scheduler = Scheduler(draft_schedule(6, 3), chooses_lengths=True)
    chosen = serve_scheduled(scheduler, clock, ["abcd"] * 300, good=good)
    assert set(chosen) <= {0, 3, 6}
    late = np.mean(chosen[100:])
    assert late > 5 if good else late < 0.5


@pytest.mark.parametrize("good", [True, False])
def test_each_step_of_a_model_with_recurrent_layers_has_drafts(good: bool, clock: Any) -> None:
    """In spite of all that is learned of them, of prompts, of new requests and of untimed steps."""
    made = vllm_config(hybrid=True, lookahead=6, rows=4)
    give_lengths(made)
    named = made.speculative_config.num_speculative_tokens_per_batch_size
    assert [length for *_, length in named] == [6, 3, 1]
    scheduler = Scheduler(named, hybrid=True, chooses_lengths=True)
    rows = ("abcd"[: 1 + step % 4] if step % 50 else "xyz" for step in range(400))
    chosen = serve_scheduled(scheduler, clock, rows, good=good)
    assert set(chosen) <= {1, 3, 6} and min(chosen) == 1
    assert (np.mean(chosen[200:]) > 4) == good


def test_tokens_beyond_the_end_of_a_request_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM cuts them off, so a longer draft brings no more."""
    learned: list[list[int]] = []
    monkeypatch.setattr(
        DraftLengths,
        "observe",
        lambda *given: learned.append(given[-1]),
    )
    scheduler = Scheduler(draft_schedule(6, 3), chooses_lengths=True)
    follow_batches(scheduler)
    for name, said in (("a", 5), ("b", 9), ("c", 10)):
        scheduler.requests[name] = SimpleNamespace(max_tokens=10, num_output_tokens=said)
    a_step(scheduler, dict.fromkeys("abcd", 6), dict.fromkeys("abcd", 6))
    assert learned == [[4, 0, 6]]


@pytest.mark.parametrize(
    "by_batch_size",
    [
        None,
        [[1, 4, 6]],
        [(1, 1, 6), (2, 2, 3), (3, 3, 0)],
    ],
)
def test_a_list_of_the_users_own_is_vllms_to_follow(by_batch_size: Any) -> None:
    scheduler = Scheduler(by_batch_size)
    follow_batches(scheduler)
    assert scheduler.dynamic_sd_lookup == "vLLM's own"
    assert "update_from_output" not in vars(scheduler)


def test_a_changed_scheduler_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(draft_schedule(6, 2), chooses_lengths=True)
    follow_batches(scheduler)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            nothing: Any = SimpleNamespace()
            assert scheduler.update_from_output(nothing, nothing) == "outputs"
    assert len(caplog.records) == 2  # not the third
    assert scheduler.dynamic_sd_lookup[4] in (0, 6)


def test_new_requests_are_not_judged_by_earlier_ones() -> None:
    latency = StepLatency("cuda")
    chooser = DraftLengths(LENGTHS, latency)
    for accepted in [0] * 200:
        length = chooser.choose(1)
        latency.observe(1, 1 + length, seconds(1, length, 1e-3))
        chooser.observe(length, [accepted] if length else [])
    assert not any(chooser.choose(1) for _ in range(8))
    chooser.forget(1.0)
    assert chooser.choose(1) > 0
