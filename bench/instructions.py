"""Counts the instructions of twelve operations, which do not depend on what else a machine does.

    python bench/instructions.py build/release/bench_operations --json results.json

`bench_operations` is what CMake builds of bench/cpp/operations.cc (`make bench`). Callgrind, of
Valgrind, counts a call's instructions with all that it calls. The committed counts are of the
compiler that they name; tests/bench/test_instructions.py allows 5 % more or less. A commit that
means to change a count writes bench/results/instructions.json anew.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import harness

COUNTED = Path(__file__).parent / "results" / "instructions.json"
TOLERANCE = 0.05


def count(program: Path) -> harness.Row:
    """The compiler, and the instructions a call of each operation.

    Raises subprocess.CalledProcessError where the program fails, and FileNotFoundError without
    Valgrind.
    """

    def output(*command: str | Path) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile"
        made = output("valgrind", "--tool=callgrind", f"--callgrind-out-file={profile}", program)
        # All functions, of all files, the smallest too.
        listing = output("callgrind_annotate", "--inclusive=yes", "--threshold=100", profile)
    compiler, *lines = made.splitlines()
    calls = {name: int(times) for name, times in map(str.split, lines)}
    # A function stands once for each file that parts of it come from; the whole is the largest.
    found = dict.fromkeys(calls, 0)
    for instructions, name in re.findall(r"^ *([\d,]+) .*:operation_(\w+)", listing, re.MULTILINE):
        found[name] = max(found[name], int(instructions.replace(",", "")))
    counts = {name: round(found[name] / times) for name, times in calls.items()}
    return {"compiler": compiler, "instructions": counts}


def differences(counts: Mapping[str, int], committed: Mapping[str, int]) -> dict[str, float]:
    """By what share of the committed count each operation's differs, where that is too much."""
    assert counts.keys() == committed.keys()
    shares = {name: counts[name] / committed[name] - 1 for name in counts}
    return {name: share for name, share in shares.items() if abs(share) > TOLERANCE}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("program", type=Path, help="bench_operations, compiled for release")
    options = parser.parse_args()
    counts = count(options.program)
    harness.show(f"Instructions a call, {counts['compiler']}", None, [counts["instructions"]])
    harness.finish(options, counts)


if __name__ == "__main__":
    main()
