"""What `import fastdraft` costs beyond `import numpy`: each in processes of their own."""

from __future__ import annotations

import statistics
import subprocess
import sys

import harness

_PROGRAM = """
from time import perf_counter
begin = perf_counter()
import numpy
middle = perf_counter()
import fastdraft
print(1e3 * (middle - begin), 1e3 * (perf_counter() - middle))
"""


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--processes", type=int, default=20)
    arguments = parser.parse_args()
    results = harness.about()
    numpy: list[float] = []
    fastdraft: list[float] = []
    for _ in range(arguments.processes):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
        )
        first, second = map(float, done.stdout.split())
        numpy.append(first)
        fastdraft.append(second)
    for name, times in (("numpy", numpy), ("fastdraft after it", fastdraft)):
        results[name] = {"median_ms": statistics.median(times), "least_ms": min(times)}
        print(f"import {name}: median {statistics.median(times):.1f} ms, least {min(times):.1f} ms")
    harness.finish(arguments, results)


if __name__ == "__main__":
    main()
