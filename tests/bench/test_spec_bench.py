"""bench/spec_bench.py counts what Spec-Bench counts."""

from __future__ import annotations

import json

import numpy as np
import pytest

import spec_bench
from fastdraft import DraftStats
from fastdraft.replay import RecordError


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_categories_belong_to_six_tasks():
    assert {spec_bench.task_of(each) for each in spec_bench.MT_BENCH} == {"mt_bench"}
    assert [spec_bench.task_of(each) for each in spec_bench.TASKS[1:]] == [*spec_bench.TASKS[1:]]
    assert spec_bench.task_of("mt_bench/coding") == "mt_bench"
    assert spec_bench.task_of("spec_bench/rag") == "rag"
    assert spec_bench.task_of("code_edit") is None


def test_the_mean_is_over_steps_and_not_over_answers():
    answers = [DraftStats(steps=1, emitted=9), DraftStats(steps=9, emitted=9)]
    assert spec_bench.summary({"rag": answers}, 0.0)["overall"]["mat"] == 1.8
    low, high = spec_bench.interval(answers)
    assert low == 1.0
    assert high == 9.0


def test_recorded_answers_of_the_model_alone_are_replayed(tmp_path, capsys):
    ids = np.arange(40).tolist()
    record = {"task": "spec_bench/rag", "model": "vicuna-7b-v1.3", "prompt_ids": ids}
    copied = {**record, "output_ids": ids[10:31]}
    write_lines(
        tmp_path / "rag.jsonl", [copied, {**copied, "model": "other"}, {**copied, "task": "x/y"}]
    )
    result = tmp_path / "result.json"
    arguments = ["--json", str(result), "recorded", "--data", str(tmp_path)]
    spec_bench.main([*arguments, "--token-cost", "0"])
    written = json.loads(result.read_text())
    assert written["answers"] == {"rag": 1}
    rows = {row["drafter"]: row for row in written["rows"]}
    # One token of the prefill, then 20 in two steps at best.
    assert rows["fastdraft, chains"]["rag"]["mat"] == rows["fastdraft, chains"]["overall"]["mat"]
    assert rows["fastdraft, chains"]["rag"]["mat"] > 2
    assert "rag" in capsys.readouterr().out


def test_other_tasks_are_grouped_by_the_longest_beginning(tmp_path):
    names = "humaneval-python", "humaneval-rust", "gsm8k", "gsm8k_program", "other"
    ids = {"prompt_ids": list(range(30)), "output_ids": list(range(9, 25))}
    write_lines(tmp_path / "answers.jsonl", [{"task": name, **ids} for name in names])
    result = tmp_path / "result.json"
    spec_bench.main(["--json", str(result), "tasks", "--data", str(tmp_path)])
    written = json.loads(result.read_text())
    assert written["answers"] == {"HumanEval": 1, "HumanEval in Rust": 1, "GSM8K": 2}
    rows = [row for row in written["rows"] if row["drafter"] == "fastdraft, chains"]
    assert [row["token_cost"] for row in rows] == [*spec_bench.TOKEN_COSTS]
    # The outputs copy their prompts.
    assert all(row["GSM8K"]["mat"] > 2 and row["GSM8K"]["speed"] > 1.5 for row in rows)


def test_a_folder_without_such_answers_is_refused(tmp_path):
    write_lines(tmp_path / "other.jsonl", [{"prompt_ids": [1], "output_ids": [2]}])
    for part, missing in (("recorded", "questions by vicuna-7b"), ("tasks", "one of HumanEval")):
        with pytest.raises(RecordError, match=missing):
            spec_bench.main([part, "--data", str(tmp_path)])
