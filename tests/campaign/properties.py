"""The tests of the suite that draw random cases: one room's, each time from another seed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

__all__ = ["case"]

TESTS = Path(__file__).parents[1]


def case(seed: int) -> Counter[str]:
    """One file's tests with @given, by way of Hypothesis."""
    files = sorted(
        path
        for room in ("core", "fleet", "hf", "replay", "serving", "verification")
        for path in (TESTS / room).glob("test_*.py")
        if "from hypothesis import" in path.read_text("utf-8")
    )
    file = files[seed % len(files)]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis"]
    done = subprocess.run(
        [*command, f"--hypothesis-seed={seed}", "-p", "no:cacheprovider", str(file)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    [passed] = re.findall(r"(\d+) passed", done.stdout)
    return Counter({f"runs of {file.parent.name}/{file.name}": int(passed)})
