"""Twelve operations of the core take the committed numbers of instructions."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import instructions

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="Valgrind is not installed")
def test_no_operation_takes_more_or_fewer_instructions_than_is_committed():
    for step in ("--preset release", "--build --preset release --target bench_operations"):
        subprocess.run(["cmake", *step.split()], cwd=ROOT, check=True, capture_output=True)
    counted = instructions.count(ROOT / "build" / "release" / "bench_operations")
    committed = json.loads(instructions.COUNTED.read_text("utf-8"))
    if counted["compiler"] != committed["compiler"]:
        pytest.skip(f"the committed counts are of the compiler {committed['compiler']}")
    assert instructions.differences(counted["instructions"], committed["instructions"]) == {}


def test_a_difference_of_more_than_five_percent_is_named():
    committed = {"propose": 1000, "observe": 200}
    assert instructions.differences({"propose": 1049, "observe": 191}, committed) == {}
    found = instructions.differences({"propose": 1051, "observe": 189}, committed)
    assert found == {"propose": pytest.approx(0.051), "observe": pytest.approx(-0.055)}
