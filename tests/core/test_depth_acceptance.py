"""Acceptance by depth, against the same counted one draft after another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdraft._core import DepthAcceptance
from fastdraft.errors import InvalidValueError

LONGEST = 5
HALF_LIFE = 8.0

outcomes = st.integers(0, LONGEST).flatmap(
    lambda judged: st.tuples(st.integers(0, judged), st.just(judged))
)


@given(st.lists(st.lists(outcomes, max_size=9), max_size=9))
def test_each_depth_counts_the_drafts_that_reached_it(steps: list[list[tuple[int, int]]]) -> None:
    learner = DepthAcceptance(LONGEST, half_life=HALF_LIFE)
    reached, right = [0.0] * LONGEST, [0.0] * LONGEST
    for step in steps:
        learner.observe([accepted for accepted, _ in step], [judged for _, judged in step])
        for depth in range(LONGEST):
            kept = 0.5 ** (sum(judged > depth for _, judged in step) / HALF_LIFE)
            reached[depth] *= kept
            right[depth] *= kept
            for accepted, judged in step:
                reached[depth] += depth < judged and depth <= accepted
                right[depth] += depth < accepted
    probability, path, expected = 0.6, 1.0, [1.0]
    for depth, learned in enumerate(learner.probabilities()):
        # A guess that counts as four drafts: as probable as the token before.
        probability = (right[depth] + 4 * probability) / (reached[depth] + 4)
        assert learned == pytest.approx(probability)
        path *= probability
        expected.append(expected[-1] + path)
    assert learner.expected_tokens() == pytest.approx(np.array(expected))


def test_a_part_is_forgotten() -> None:
    learner, new = (DepthAcceptance(LONGEST, half_life=HALF_LIFE) for _ in range(2))
    learner.observe([0] * 20, [LONGEST] * 20)
    low = learner.probabilities()[0]
    learner.forget(0.5)
    assert low < learner.probabilities()[0] < new.probabilities()[0]
    learner.forget(1.0)
    assert learner.probabilities().tolist() == new.probabilities().tolist()


@pytest.mark.parametrize(
    ("accepted", "judged", "message"),
    [
        ([1], [1, 1], "equal length"),
        ([0], [LONGEST + 1], "judged"),
        ([3], [2], "accepted"),
        ([-1], [2], "accepted"),
    ],
)
def test_impossible_outcomes_are_refused(
    accepted: list[int], judged: list[int], message: str
) -> None:
    learner = DepthAcceptance(LONGEST, half_life=HALF_LIFE)
    with pytest.raises(InvalidValueError, match=message):
        learner.observe(accepted, judged)


def test_values_out_of_range_are_refused() -> None:
    for longest, half_life in ((0, HALF_LIFE), (LONGEST, 0.0), (LONGEST, float("nan"))):
        with pytest.raises(InvalidValueError):
            DepthAcceptance(longest, half_life=half_life)
    with pytest.raises(InvalidValueError, match="part"):
        DepthAcceptance(LONGEST, half_life=HALF_LIFE).forget(1.5)
