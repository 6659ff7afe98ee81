"""The tests of the kernels, run where the kernels run: on the GPU, else in Triton's interpreter.

python bench/gpu_correctness.py --json correctness.json
python bench/gpu_correctness.py --rehearsal      # a few of them
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch

import harness
from harness import Row

ROOT = Path(__file__).parents[1]
FAILURES = 10  # as many are told, and so many end the run
LONGEST = 600  # characters of a failure
FEW = ("tests/kernels/test_noise.py", "tests/kernels/test_tree.py")


def read(report: Path) -> Row:
    """Counts and the first failures of a report in JUnit's form."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [(case, bad) for case in cases for bad in case if bad.tag in ("failure", "error")]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "failures": [
            {
                "test": f"{case.get('classname')}::{case.get('name')}",
                "message": (bad.get("message") or bad.text or "")[:LONGEST],
            }
            for case, bad in failed[:FAILURES]
        ],
    }


def run(tests: list[str], environment: dict[str, str]) -> Row:
    """Runs tests in a process of their own, several at a time where pytest-xdist is there."""
    side_by_side = []
    if importlib.util.find_spec("xdist") is not None:
        side_by_side = ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--maxfail={FAILURES}"]
        command += [*side_by_side, f"--junit-xml={report}", *tests]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        found = read(report) if report.exists() else {"passed": 0, "failed": 0}
    found["status"] = done.returncode
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rehearsal", action="store_true", help="a few tests alone")
    arguments = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    report = harness.about(interpreted=not torch.cuda.is_available())
    report.update(run([*FEW] if arguments.rehearsal else ["tests/kernels"], environment))
    report["correct"] = report["status"] == 0
    harness.finish(arguments, report)
    sys.exit(int(not report["correct"]))


if __name__ == "__main__":
    main()
