"""The tests of the kernels, run where the kernels run: on the GPU, else in Triton's interpreter.

python bench/gpu_correctness.py --json correctness.json
python bench/gpu_correctness.py --rehearsal      # a few of them
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import harness
import outcome_log
from harness import Row

ROOT = Path(__file__).parents[1]
FAILURES = 10  # as many are told, and so many end the run
LONGEST = 600  # characters of a failure
EVERY = 5.0  # seconds until what has come is kept
FEW = ("tests/kernels/test_noise.py", "tests/kernels/test_tree.py")


def read(log: Path) -> Row:
    """Counts and the first failures of what `outcome_log` has written so far."""
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    tests = [json.loads(line) for line in lines]
    failed = [test for test in tests if test["outcome"] == "failed"]
    return {
        "passed": sum(test["outcome"] == "passed" for test in tests),
        "failed": len(failed),
        "skipped": sum(test["outcome"] == "skipped" for test in tests),
        "failures": [
            {"test": test["test"], "message": test["message"][:LONGEST]}
            for test in failed[:FAILURES]
        ],
    }


def run(
    tests: list[str],
    environment: dict[str, str],
    *,
    keep: Callable[[Row], None] = lambda _: None,
) -> Row:
    """Runs tests in a process of their own, several at a time where pytest-xdist is there.

    What has come is given to `keep` every few seconds, in case there is no time for the rest.
    """
    side_by_side = []
    if importlib.util.find_spec("xdist") is not None:
        side_by_side = ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "tests.jsonl"
        # What a machine's own libraries warn of is no failure.
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", f"--maxfail={FAILURES}"]
        command += [*side_by_side, "-p", outcome_log.__name__, *tests]
        paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
        environment = {
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            outcome_log.VARIABLE: str(log),
        }
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        while process.poll() is None:
            keep(read(log))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EVERY)
        return {**read(log), "status": process.returncode}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rehearsal", action="store_true", help="a few tests alone")
    arguments = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    report = harness.about(interpreted=not torch.cuda.is_available())

    def keep(found: Row) -> None:
        report.update(found, correct=not found["failed"] and not found.get("status"))
        harness.finish(arguments, report)

    tests = [*FEW] if arguments.rehearsal else ["tests/kernels"]
    keep(run(tests, environment, keep=keep))
    sys.exit(int(not report["correct"]))


if __name__ == "__main__":
    main()
