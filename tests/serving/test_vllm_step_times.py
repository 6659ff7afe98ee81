"""Step times learned of a host whose steps are stairs are worth almost an oracle's knowledge.

The host pads each forward to the next size of which it has captured a graph, and runs steps whose
rows all have the longest draft in faster graphs of their own. A row's draft tokens are right with
known probabilities, which change from step to step; verified are those that make
emitted tokens - rate * time greatest, the engine's rule with a premium of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable

import numpy as np
import pytest

from fastdraft.serving.vllm.v1.step_times import StepTimes

LOOKAHEAD = 8
PREMIUM = 1.2
CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))  # vLLM's default
ROWS_AND_PROMPTS = [(1, 0), (8, 0), (20, 0), (1, 100), (20, 100)]


def seconds(tokens: int, pieces: float, *, even: bool) -> float:
    """A step's mean time, as an H100's; without a graph of its own `pieces` times as much."""
    index = bisect.bisect_left(CAPTURED, tokens)
    padded = CAPTURED[index] if index < len(CAPTURED) else tokens
    one_graph = even and tokens <= CAPTURED[-1]
    return (7.1e-3 + 0.021e-3 * padded) * (1.0 if one_graph else pieces)


def keep(probabilities: np.ndarray, seconds: np.ndarray, rate: float) -> np.ndarray:
    """How many tokens of each row pay; `seconds` by all tokens of the step."""
    rows = len(probabilities)
    order = np.argsort(-probabilities, axis=None, kind="stable")
    gain = np.concatenate([[0.0], np.cumsum(probabilities.ravel()[order])])
    value = gain - PREMIUM * rate * seconds[rows - 1 : rows + probabilities.size]
    count = len(value) - 1 - int(np.argmax(value[::-1]))  # the most tokens of equals
    kept: np.ndarray = np.bincount(order[:count] // LOOKAHEAD, minlength=rows)
    return kept


def speed(times: StepTimes | None, rows: int, prompts: int, pieces: float) -> float:
    """Tokens a second of 1,200 steps with `prompts` tokens of prompts each; the oracle's for
    None."""
    random, noise = np.random.default_rng(0), np.random.default_rng(1)
    widest = rows * (1 + LOOKAHEAD)
    true = np.array([seconds(n + prompts, pieces, even=False) for n in range(1, widest + 1)])
    true_even = seconds(widest, pieces, even=True)
    emitted, elapsed = 0.0, 0.0
    recent = np.array([8.0 * rows, 8.0 * seconds(rows, pieces, even=False)])
    for _ in range(1200):
        quality = random.beta(0.7, 0.7, (rows, 1))
        right = (random.random((rows, LOOKAHEAD)) < quality).cumprod(1).sum(1)
        probabilities = quality ** np.arange(1, LOOKAHEAD + 1)
        kept, even, rate = np.zeros(rows, np.int64), False, recent[0] / recent[1]
        if times is None:
            kept = keep(probabilities, true if prompts else np.minimum(true, true_even), rate)
            even = not prompts and true_even < true[rows + kept.sum() - 1]
        elif (cost := times.curve(rows, rows, LOOKAHEAD, even=True)) is not None:
            kept = keep(probabilities, cost, rate)
            even = times.is_better_even(int(rows + kept.sum()))
        if even:
            kept = np.full(rows, LOOKAHEAD)
        tokens = int(rows + kept.sum())
        took = seconds(tokens + prompts, pieces, even=tokens == widest and not prompts)
        took *= float(np.exp(0.03 * noise.standard_normal()))
        if times is not None:
            decoded: dict[Hashable, int] = {row: 1 + int(kept[row]) for row in range(rows)}
            times.add_forward({**decoded, "prompt": prompts} if prompts else decoded)
            times.observe(decoded, rows, took, 1 + LOOKAHEAD)
        step = float((1 + np.minimum(kept, right)).sum())
        emitted, elapsed = emitted + step, elapsed + took
        recent = 0.98 * recent + [step, took]
    return emitted / elapsed


def learned() -> StepTimes:
    return StepTimes("cuda", CAPTURED, even_graphs=True)


# Between even costs of a piece and very uneven ones, few sizes.
@pytest.mark.parametrize(
    ("rows", "prompts", "pieces"),
    [
        *((*size, pieces) for size in ROWS_AND_PROMPTS for pieces in (1.0, 1.3)),
        *((*size, 1.12) for size in ((8, 0), (20, 100))),
        (200, 0, 1.3),
        (200, 100, 1.0),
    ],
)
def test_within_two_percent_of_the_oracle(rows: int, prompts: int, pieces: float) -> None:
    oracle = speed(None, rows, prompts, pieces)
    assert speed(learned(), rows, prompts, pieces) >= 0.98 * oracle


def test_a_host_that_hides_its_stairs_is_served_worse() -> None:
    """The worth of the sizes: without them free slots stay empty."""
    assert speed(learned(), 8, 0, 1.12) > 1.03 * speed(StepTimes("cuda"), 8, 0, 1.12)
