"""How many times as large one figure is as another, with an interval."""

from __future__ import annotations

import numpy as np
import pytest

from fastdraft.replay.measurement import paired_ratio


def test_each_round_counts_by_its_own_ratio() -> None:
    # Rounds that a busy machine slows by ten slow both sides.
    assert paired_ratio([2, 40, 6], [1, 10, 2]) == (3, 2, 4)


@pytest.mark.parametrize(("rounds", "outside"), [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5)])
def test_the_interval_s_ends_are_two_of_the_ratios(rounds: int, outside: int) -> None:
    """As tables of the sign test have them."""
    found = paired_ratio(range(1, rounds + 1), [1] * rounds)
    assert (found.low, found.high) == (1 + outside, rounds - outside)


@pytest.mark.parametrize("rounds", [6, 11, 20])
def test_the_interval_holds_the_median_of_a_skewed_distribution(rounds: int) -> None:
    draws = np.random.default_rng(0).lognormal(sigma=2, size=(4_000, rounds))
    found = [paired_ratio(row.tolist(), [1] * rounds) for row in draws]
    assert np.mean([low <= 1 <= high for _, low, high in found]) >= 0.95
