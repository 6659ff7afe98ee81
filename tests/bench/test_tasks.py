"""bench/tasks.py groups recorded answers by the task that they name."""

from __future__ import annotations

import json
import sys

import pytest

import tasks
from fastdraft.replay import RecordError


def write(folder, *names):
    lines = [
        json.dumps({"task": name, "prompt_ids": list(range(30)), "output_ids": list(range(9, 25))})
        for name in names
    ]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")


def test_records_are_grouped_by_the_longest_beginning(tmp_path):
    write(tmp_path, "humaneval-python", "humaneval-rust", "gsm8k", "gsm8k_program", "other")
    found = tasks.recorded_tasks(tmp_path)
    assert {name: len(records) for name, records in found.items()} == {
        "HumanEval": 1,
        "HumanEval in Rust": 1,
        "GSM8K": 2,
    }


def test_results_have_each_task_and_drafter(tmp_path, monkeypatch, capsys):
    write(tmp_path, "gsm8k", "gsm8k")
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["tasks.py", "--data", str(tmp_path), "--json", str(result)])
    tasks.main()
    rows = json.loads(result.read_text())["rows"]
    ours = [row for row in rows if row["drafter"] == "fastdraft, chains"]
    assert [row["task"] for row in ours] == ["GSM8K"] * len(tasks.TOKEN_COSTS)
    # The outputs copy their prompts.
    assert all(row["mat"] > 2 and row["speed"] > 1.5 for row in ours)
    assert "GSM8K" in capsys.readouterr().out


def test_a_folder_without_such_answers_is_refused(tmp_path):
    write(tmp_path, "other")
    with pytest.raises(RecordError, match="HumanEval"):
        tasks.recorded_tasks(tmp_path)
