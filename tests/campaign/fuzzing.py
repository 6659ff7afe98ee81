"""The libFuzzer targets of tests/cpp/fuzz, a while at a time, each time from another seed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

__all__ = ["case", "targets"]

_SECONDS = 20


def targets() -> list[Path]:
    """Those that `cmake --build --preset fuzz` has built."""
    built = sorted(path for path in Path("build/fuzz").glob("fuzz_*") if path.is_file())
    if not built:
        raise FileNotFoundError("no fuzzer in build/fuzz: make campaign builds them")
    return built


def case(seed: int) -> Counter[str]:
    target = targets()[seed % len(targets())].resolve()
    corpus = Path("build/campaign") / target.name
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [target, corpus.resolve(), f"-seed={seed % 2**31 + 1}"]
        command += [f"-max_total_time={_SECONDS}", "-print_final_stats=1"]
        # libFuzzer takes the most memory that this process ever had for the target's own.
        command += ["-rss_limit_mb=0", "-malloc_limit_mb=2048"]
        done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{target.name}:\n{done.stderr[-3000:]}"
    runs = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert runs, done.stderr[-500:]
    return Counter({f"executions of {target.name}": int(runs[1])})
