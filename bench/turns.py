"""What drafters do in turns, and the text that they do it with: see conftest.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import harness

STEPS = 400

Ids = np.ndarray


@dataclass
class Turn:
    """One drafter's part in a round."""

    begin: Callable[[int], Callable[..., Any]]
    """Prepares the round of this number and returns the call that is timed."""
    step: Callable[[], tuple[Any, ...]]
    """Moves on by a token, untimed, and returns the next call's arguments."""
    steps: int = STEPS


def take(turn: Turn, number: int) -> harness.Row:
    """p50 and p99 of a round's calls, in microseconds."""
    clock = time.perf_counter_ns
    call = turn.begin(number)
    times: list[int] = []
    for _ in range(turn.steps):
        arguments = turn.step()
        begin = clock()
        call(*arguments)
        times.append(clock() - begin)
    return harness.percentiles(times)


def chunks(text: Ids, size: int, number: int) -> Iterable[Ids]:
    """`number` documents of `size` tokens from all over the text, an eighth of each replaced."""
    random = np.random.default_rng(0)
    for start in random.integers(0, len(text) - size, number).tolist():
        document = text[start : start + size].copy()
        replaced = random.random(size) < 1 / 8
        document[replaced] = text[random.integers(0, len(text), int(replaced.sum()))]
        yield document
