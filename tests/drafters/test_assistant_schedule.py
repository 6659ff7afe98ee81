"""Schedules on simulated targets: how near the adaptive one comes to the best there is."""

from __future__ import annotations

import numpy as np
import pytest

from fastdraft.drafters.schedule import SCHEDULES, DraftTime, Schedule
from fastdraft.drafters.theory import best_gamma, improvement_factor


def _schedule(name: str, num_tokens: int) -> Schedule:
    return SCHEDULES[name][0](num_tokens)


def _speed(
    schedule: Schedule,
    *,
    alphas: list[float],
    c: float,
    steps: int,
    more: float = 0.0,
    informative: bool = False,
    seed: int = 0,
) -> float:
    """Tokens in the time of a plain step, where text of each alpha comes in runs.

    `more` is what a draft token adds to the target's forward. An informative model is as sure of a
    token as the token is probable to be accepted.
    """
    random = np.random.default_rng(seed)
    step = 1 + more * np.arange(65)
    time = DraftTime(step=step, draft=c)
    tokens = seconds = 0.0
    for number in range(steps):
        alpha = alphas[(number // 25) % len(alphas)]
        [most] = schedule.numbers([0], time)
        probabilities: list[float] = []
        sure: list[float] = []
        belief = schedule.estimator.begin(0)
        while len(probabilities) < most:
            probability = float(random.beta(4 * alpha, 4 - 4 * alpha)) if informative else alpha
            probabilities.append(probability)
            sure.append(probability if informative else 0.5)
            belief = schedule.estimator.extended(belief, sure[-1])
            room = most - len(probabilities)
            if not room or not schedule.goes_on([(0, belief)], len(probabilities), time, most=room):
                break
        accepted = 0
        while accepted < len(probabilities) and random.random() < probabilities[accepted]:
            accepted += 1
        took = len(probabilities) * c + step[len(probabilities)]
        if probabilities:
            judged = sure[: accepted + 1]
            schedule.observe(0, judged, accepted, len(probabilities))
        if number >= steps // 5:
            tokens += accepted + 1
            seconds += took
    return tokens / seconds


@pytest.mark.parametrize(("alpha", "c"), [(0.2, 0.02), (0.7, 0.2), (0.95, 0.02), (0.95, 0.2)])
def test_the_adaptive_schedule_reaches_what_theory_promises(alpha: float, c: float) -> None:
    best = improvement_factor(alpha, best_gamma(alpha, c, most=16), c)
    speed = _speed(_schedule("adaptive", 16), alphas=[alpha], c=c, steps=2000)
    assert speed > 0.97 * best


@pytest.mark.parametrize("informative", [False, True])
@pytest.mark.parametrize(
    ("alphas", "c", "more"), [([0.8, 0.05], 0.1, 0.0), ([0.95, 0.6, 0.2], 0.2, 0.02)]
)
def test_the_adaptive_schedule_is_better_than_any_constant_one(
    alphas: list[float], c: float, more: float, informative: bool
) -> None:
    def speed(schedule: Schedule) -> float:
        return _speed(schedule, alphas=alphas, c=c, more=more, steps=1000, informative=informative)

    constants = [speed(_schedule("constant", gamma)) for gamma in (1, 2, 3, 4, 6, 9, 16)]
    assert speed(_schedule("adaptive", 16)) > max(constants)


@pytest.mark.parametrize("c", [0.5, 3.0])
def test_an_assistant_that_does_not_pay_costs_next_to_nothing(c: float) -> None:
    speed = _speed(_schedule("adaptive", 16), alphas=[0.1], c=c, steps=2000)
    assert speed > 0.97


def test_an_assistant_that_begins_to_pay_is_noticed() -> None:
    schedule = _schedule("adaptive", 16)
    _speed(schedule, alphas=[0.05], c=0.2, steps=300)
    speed = _speed(schedule, alphas=[0.9], c=0.2, steps=2000)
    assert speed > 0.9 * improvement_factor(0.9, best_gamma(0.9, 0.2, most=16), 0.2)


def test_the_heuristic_schedule_counts_for_each_request() -> None:
    schedule = _schedule("heuristic", 5)
    time = DraftTime(step=np.ones(65), draft=0.1, running=3)
    schedule.observe(1, [0.5] * 5, 5, 5)
    schedule.observe(2, [0.5], 0, 5)
    assert schedule.numbers([0, 1, 2], time) == [5, 7, 4]
    for _ in range(9):
        schedule.observe(2, [0.5], 0, 1)
    assert schedule.numbers([2], time) == [1]
    schedule.forget(2)
    assert schedule.numbers([2], time) == [5]


def test_draft_time_counts_wider_forwards() -> None:
    step = np.array([1.0, 1.5, 1.5, 2.0, 3.0])
    assert DraftTime(step=step, draft=0.25).more(0, 3).tolist() == [0.75, 1.0, 1.75]
    assert DraftTime(step=step, draft=0.25).more(2, 2).tolist() == [0.75, 2.0]
