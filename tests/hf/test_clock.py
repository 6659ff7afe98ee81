"""No test of drafts depends on a measured time: one clock times them, and tests set it."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

import fastdraft
from fastdraft import hf, step_latency
from fastdraft.drafters import AssistantModel
from hf_models import repetitive_batch, tiny_model
from step_clock import StepClock

pytestmark = pytest.mark.slow

ROOMS = ("hf", "drafters")


def test_the_rooms_of_drafts_read_no_other_clock() -> None:
    package = Path(fastdraft.__file__).parent
    files = [file for room in ROOMS for file in (package / room).rglob("*.py")]
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Import) and any(each.name == "time" for each in node.names)
            of_module = isinstance(node, ast.ImportFrom) and node.module == "time"
            assert not named, file
            assert not of_module, file


@pytest.mark.parametrize("with_model", [False, True])
def test_what_is_drafted_is_the_same_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, step_clock: StepClock, with_model: bool
) -> None:
    """The engine with its own economics drafts, and the same each time, on any machine."""

    def refuse() -> float:
        raise AssertionError("a test of drafts reads the wall clock")

    assert step_latency.clock is step_clock
    monkeypatch.setattr(time, "perf_counter", refuse)
    inputs, counts = repetitive_batch(2), []
    for _ in range(2):
        model = tiny_model("llama")
        drafter = AssistantModel(tiny_model("llama"), schedule="adaptive") if with_model else None
        output = hf.generate(model, **inputs, do_sample=False, max_new_tokens=40, drafter=drafter)
        counts.append([(each.drafted, each.steps) for each in output.row_stats or []])
    assert counts[0] == counts[1]
    assert sum(drafted for drafted, _ in counts[0]) > 0
