"""Servers take turns, get the same requests, and are compared run by run."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_vllm
import serving
from fastdraft.replay import Record

SPEEDS = {"plain": [10.0, 20.0, 30.0], "ngram": [30.0, 22.0, 30.0], "head": [5.0, 4.0, 3.0]}


class Server(str):
    """The name of a method."""

    def drafter(self) -> str | None:
        return None


class Tokenizer:
    def __init__(self, path: Path) -> None:
        assert path == Path("MODEL")

    def decode(self, ids: list[int]) -> str:
        return f"{ids}"


def options(**more: Any) -> argparse.Namespace:
    given = {
        "model": "MODEL", "methods": list(SPEEDS), "head": {"method": "eagle3"}, "rows": [2],
        "workloads": ["recorded", "agents"], "runs": 3, "prompt_tokens": 8, "new_tokens": 5,
        "least_requests": 4, "warm_up": 8, "data": Path("DATA"),
    }  # fmt: skip
    return argparse.Namespace(**{**given, **more})


def families(count: int) -> dict[str, list[Record]]:
    def record(number: int, session: str | None, length: int = 4) -> Record:
        ids = np.full(length, number, np.int32)
        return Record(f"{number}", ids, ids, session=session)

    return {
        "chat": [record(number, None) for number in range(count)] + [record(9, None, 9)],
        "agent": [record(100 + number, f"{number // 2}") for number in range(count)],
    }


def test_methods_take_turns_with_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    asked: dict[str, list[Any]] = {name: [] for name in SPEEDS}

    @contextlib.contextmanager
    def started_server(method: Any, *_: Any) -> Iterator[Server]:
        name = "plain" if method[0] is None else method[0]["method"]
        started.append("head" if name == "eagle3" else name)
        yield Server(started[-1])

    def drive(name: str, *arguments: Any) -> Any:
        file = arguments[arguments.index("--dataset-path") + 1]
        prompts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
        asked[name].append(prompts)
        run = (len(asked[name]) - 1) // 3  # a warm-up and two measurements
        texts = [name, *prompts[1:]] if run == 2 and name == "head" else prompts
        figures = dict.fromkeys(serving.FIGURES, SPEEDS[name][run])
        return {**figures, "generated_texts": texts}

    monkeypatch.setattr(serving, "serving", started_server)
    monkeypatch.setattr(serving, "drive", drive)
    monkeypatch.setattr(serving, "TextTokenizer", Tokenizer)
    kept: list[Any] = []
    found = serving.measure(families(40), options(), kept.append)
    assert started == [
        *("plain", "ngram", "head"), *("ngram", "head", "plain"), *("head", "plain", "ngram")
    ]  # fmt: skip
    assert asked["plain"] == asked["ngram"] == asked["head"]
    measured = [prompts for index, prompts in enumerate(asked["plain"]) if index % 3]
    recorded, agents = measured[::2], measured[1::2]
    # None comes twice, but for those of agents, which do at once.
    assert len({prompt for prompts in recorded for prompt in prompts}) == 12
    assert "[100," not in str(recorded)
    assert "[9, 9, 9, 9, 9, 9, 9, 9, 9]" not in str(recorded)
    assert all(prompts[:2] == prompts[2:] for prompts in agents)
    assert agents[0][0] == "[100, 100, 100, 100]"
    assert [row["workload"] for row in found["rows"]] == ["recorded", "agents"]
    for row in found["rows"]:
        assert row["ngram"]["output_throughput"] == [30, 22, 30]
        assert row["ngram"]["output_throughput_of_plain"] == [1.1, 1.0, 3.0]
        assert row["head"]["tokens_per_step"] == [4, 3, 5]
        equal = [row[name]["equal"] for name in SPEEDS]
        assert equal == [12, 12, 11]
        assert row["head"]["answers"] == 12
    # The results after each run are kept.
    assert [rows[0]["plain"]["output_throughput"] for rows in kept] == [
        [10, 10, 10], [15, 10, 20], [20, 10, 30],
    ]  # fmt: skip
    narrow = gpu_vllm.narrow(kept[-1], [*SPEEDS])
    assert [(row["workload"], row["method"], row["of_plain"]) for row in narrow][:3] == [
        ("recorded", "plain", 1.0), ("recorded", "ngram", 1.1), ("recorded", "head", 0.2),
    ]  # fmt: skip


def test_too_few_requests_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "TextTokenizer", Tokenizer)
    with pytest.raises(SystemExit, match="too few requests for agents have at most 8 tokens"):
        serving.measure(families(8), options(workloads=["agents"], runs=9))


def test_wrong_answers_are_no_near_ties() -> None:
    def answer(*token_ids: int) -> gpu_vllm.Answer:
        return gpu_vllm.Answer([*token_ids], [{4: -0.1, 5: -0.2}, {6: -0.1, 7: -3.0}, {8: 0.0}])

    expected = answer(4, 6, 8)
    for found, near, wrong in (
        (expected, 0, 0),
        (answer(5, 6, 8), 1, 0),
        (answer(4, 7, 8), 0, 1),  # another token was much more probable
        (answer(9, 6, 8), 0, 1),  # not among the most probable ones
        (answer(4, 6), 0, 1),  # ended too early
    ):
        row = gpu_vllm.compared([expected], [found])
        assert row == {"answers": 1, "equal": 1 - near - wrong, "near": near, "wrong": wrong}
