"""What the benchmarks share: options, the machine, recorded requests, percentiles, tables, results.

Results name machine, commit and command, and are written as `fastdraft.replay.measurement` does.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastdraft.replay import Record, family_files, read_families
from fastdraft.replay.measurement import describe_machine, paired_ratio, write_results
from fastdraft.replay.run import clock_ns, p50_p99
from fastdraft.replay.tokenizer import TextTokenizer

Row = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose description is a module's first line, with the option --json."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return made


def about(**more: Any) -> Row:
    """Machine, commit and command, which are printed too, and what else is given."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    found = {
        "machine": f"{describe_machine()}, Python {platform.python_version()}",
        "commit": commit or "not a git checkout",
        "command": "python " + shlex.join(sys.argv),
        "load": os.getloadavg()[0],
        **more,
    }
    for key, value in found.items():
        print(f"{key:8} {value}", flush=True)
    return found


def finish(options: argparse.Namespace, results: Row) -> None:
    """Writes the results where --json asks for it."""
    if options.json is not None:
        write_results(options.json, results)


def recorded_families(
    folder: Path, *, names: Sequence[str] = (), references: bool = False
) -> dict[str, list[Record]]:
    """The recorded requests of a folder, by family, as tokens of the demo model."""
    # The demo needs the command line's packages, which serving stacks may lack.
    from fastdraft.demo import ensure_model

    encode = TextTokenizer(ensure_model).encode
    files = family_files([folder])
    chosen = [files[name] for name in names] or [folder]
    return read_families(chosen, encode, references=references)


def percentiles(times: Iterable[int]) -> dict[str, float]:
    """p50 and p99 of single calls in microseconds, from nanoseconds; less the clock's own cost."""
    p50, p99 = p50_p99(np.fromiter(times, np.float64) - clock_ns())
    return {"p50_us": p50 / 1e3, "p99_us": p99 / 1e3}


def interleave(ways: Mapping[str, Callable[[int], Row]], rounds: int) -> dict[str, list[Row]]:
    """Measures all ways in turn, `rounds` times, each time in the opposite order.

    What else runs on the machine meets all alike. A way is called with the number of the round.
    Returns each way's figures of all rounds but the first one, which warms up.
    """
    found: dict[str, list[Row]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            row = ways[name](number)
            if number > 0:
                found[name].append(row)
    return found


def ratio(rows: Sequence[Row], others: Sequence[Row], key: str) -> Row:
    """One side's figure as a multiple of the other's in the same rounds, with its interval."""
    found = paired_ratio([row[key] for row in rows], [row[key] for row in others])
    return {"ratio": found.median, "low": found.low, "high": found.high}


def show(
    title: str,
    columns: Mapping[str, Sequence[str]] | None,
    rows: Sequence[Mapping[str, Any]],
    *,
    digits: int = 2,
) -> None:
    """Prints a table.

    Args:
        title: Stands above it.
        columns: The key of each column in `rows`, by its heading, which may have several lines;
            by default all keys of the first row. A tuple leads into a row's own objects.
        rows: What is missing or None is printed as nothing.
        digits: Of floats, after the point.
    """

    def text(value: Any, *keys: str) -> str:
        for key in keys:
            value = value.get(key, {})
        if value == {}:
            return ""
        if isinstance(value, float):
            return f"{value:.{digits}f}"
        if isinstance(value, dict):
            return ", ".join(f"{key} {text(each)}" for key, each in value.items())
        return "" if value is None else str(value)

    columns = columns or {key: key for key in rows[0]}
    paths = [(key,) if isinstance(key, str) else tuple(key) for key in columns.values()]
    heads = [heading.split("\n") for heading in columns]
    height = max(map(len, heads))
    lines = [
        *zip(*([""] * (height - len(head)) + head for head in heads), strict=True),
        *([text(row, *keys) for keys in paths] for row in rows),
    ]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    print(f"\n{title}")
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        print("  ".join(cells).rstrip(), flush=True)
