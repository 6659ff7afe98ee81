"""What the microbenchmarks share: text, peers, and calls that are measured in turns.

    pytest bench --figures results.json

The engine and its peers take turns: a round is some hundred steps of one drafter, then of the next,
so that a busy machine slows all alike. The table at the end and `--figures` have medians over the
rounds, and how many times as long a peer takes, with a 95 % interval. Then pytest-benchmark times
the engine's call alone, to compare two commits: `--benchmark-autosave`, `pytest-benchmark compare`.
Peers that are not installed and cannot be built are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# One thread a library: set before any of them is loaded.
os.environ.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1")

import numpy as np
import pytest

import baselines
import corpus
import harness
from fastdraft.replay.measurement import write_results
from harness import Row
from turns import Turn, take

ROUNDS = 16

Benchmark = Any
_FIGURES = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastdraft")
    group.addoption("--figures", type=Path, metavar="FILE", help="write medians and ratios there")
    group.addoption("--data", type=Path, metavar="FOLDER", help="recorded requests, to replay some")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = []


def pytest_terminal_summary(config: pytest.Config) -> None:
    rows = config.stash[_FIGURES]
    if rows:
        columns = {"": "case", "drafter": "drafter", "p50, us": "p50_us", "p99, us": "p99_us"}
        columns |= {"times as long, p50": "p50_ratio", "p99": "p99_ratio", "figure": "figure"}
        harness.show("Medians over rounds in turns", columns, rows)
    file = config.getoption("--figures")
    if file is not None:
        write_results(file, {**harness.about(), "rows": rows})


@pytest.fixture(scope="session")
def text() -> np.ndarray:
    return corpus.tokens(2_200_000)


@pytest.fixture(scope="session", autouse=True)
def peers() -> None:
    """Makes the peers importable; a peer that is missing says so when it is asked for."""
    baselines.ensure()


@pytest.fixture
def add_figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Adds a row to the table and the file of figures."""

    def add(drafter: str, **figures: Any) -> None:
        case = request.node.name.removeprefix("test_")
        request.config.stash[_FIGURES].append({"case": case, "drafter": drafter, **figures})

    return add


@pytest.fixture
def in_turns(benchmark: Benchmark, add_figures: Callable[..., None]) -> Callable[..., None]:
    """Measures turns by drafters' names, the first one under pytest-benchmark."""

    def measure(turns: dict[str, Turn], rounds: int = ROUNDS) -> None:
        found = harness.interleave(
            {name: partial(take, turn) for name, turn in turns.items()}, rounds
        )
        ours = next(iter(turns))
        for name, rows in found.items():
            figures: Row = {key: float(np.median([row[key] for row in rows])) for key in rows[0]}
            if name != ours:
                for key in rows[0]:
                    ratio = harness.ratio(rows, found[ours], key)
                    figures[key.replace("us", "ratio")] = ratio
            add_figures(name, **figures)
        turn = turns[ours]
        call = turn.begin(0)
        benchmark.pedantic(call, setup=lambda: (turn.step(), {}), rounds=turn.steps)

    return measure
