"""The record of a measurement: the machine, the versions, and a file of its results."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fastdraft

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Ratio", "describe_machine", "paired_ratio", "results_text", "versions", "write_results"]

LINE_WIDTH = 160
DIGITS = 4


def describe_machine() -> str:
    """The processor, the cores that this process may use, and the system, in one line."""
    name = platform.processor() or platform.machine()
    cores = os.cpu_count() or 1
    if sys.platform == "linux":
        # `platform` knows the architecture only.
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
        cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} {'core' if cores == 1 else 'cores'}, {platform.platform()}"


def versions(*others: str) -> dict[str, str | None]:
    """Versions of fastdraft, of what it works with and of other packages; None for what is not
    installed."""
    found: dict[str, str | None] = {
        "fastdraft": fastdraft.__version__,
        "python": platform.python_version(),
    }
    for package in ("numpy", "torch", "transformers", "gguf", *others):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


class Ratio(NamedTuple):
    """How many times as large one figure is as another, over interleaved rounds.

    Attributes:
        median: Over the rounds.
        low, high: The ends of a 95 % confidence interval, or the least and the greatest of fewer
            than six rounds.
    """

    median: float
    low: float
    high: float


def paired_ratio(figures: Sequence[float], others: Sequence[float]) -> Ratio:
    """The figures of one side over those that the other side had in the same rounds.

    The interval's ends are two of the rounds' ratios, in order of size, so it holds for any
    distribution.
    """
    ratios = sorted(one / other for one, other in zip(figures, others, strict=True))
    count = len(ratios)
    # How many ratios lie outside the interval at each end, by the binomial distribution.
    cut, probability = 0, 0.5**count
    while cut + 1 < count / 2 and probability + math.comb(count, cut + 1) * 0.5**count <= 0.025:
        cut += 1
        probability += math.comb(count, cut) * 0.5**count
    return Ratio(statistics.median(ratios), ratios[cut], ratios[-1 - cut])


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Writes results as JSON. Raises OSError."""
    path.write_text(results_text(results) + "\n", "utf-8")


def results_text(results: dict[str, Any]) -> str:
    """Results as JSON that a person can review: one row a line, and no digits that are noise.

    What fits into `LINE_WIDTH` stands on one line. Floats keep `DIGITS` significant digits, or all
    those before the point.
    """
    return _lines(json.loads(json.dumps(results), parse_float=_rounded), indent=1)


def _rounded(text: str) -> float:
    value = float(text)
    return round(value) if abs(value) >= 10**DIGITS else float(f"{value:.{DIGITS}g}")


def _lines(value: Any, *, indent: int) -> str:
    whole = json.dumps(value, ensure_ascii=False)
    if len(whole) + indent <= LINE_WIDTH or not isinstance(value, (dict, list)):
        return whole
    if isinstance(value, dict):
        opening, closing = "{}"
        items = [
            f"{json.dumps(key)}: {_lines(each, indent=indent + 1)}" for key, each in value.items()
        ]
    else:
        opening, closing = "[]"
        items = [_lines(each, indent=indent + 1) for each in value]
    return opening + (",\n" + " " * indent).join(items) + closing
