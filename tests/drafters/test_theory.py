"""The formulas of speculative decoding, against simulation and the published figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdraft.drafters.theory import best_gamma, expected_tokens, improvement_factor, staged_cost
from fastdraft.errors import InvalidValueError

_ALPHAS = st.floats(0, 1)
_GAMMAS = st.integers(0, 16)
_COSTS = st.floats(0, 2)


def _emitted(random: np.random.Generator, alpha: float, gamma: int, steps: int) -> np.ndarray:
    """Tokens of each step: draft tokens until one is refused, and one of the target's own."""
    accepted = random.random((steps, gamma)) < alpha
    return accepted.cumprod(axis=1).sum(axis=1) + 1


@given(alpha=_ALPHAS, gamma=_GAMMAS)
def test_equation_1_is_a_sum_of_powers(alpha: float, gamma: int) -> None:
    powers = math.fsum(alpha**power for power in range(gamma + 1))
    assert expected_tokens(alpha, gamma) == pytest.approx(powers, rel=1e-9)


@given(alpha=_ALPHAS, c=_COSTS)
def test_the_best_gamma_is_that_of_all_tried(alpha: float, c: float) -> None:
    most = 20
    factors = [improvement_factor(alpha, gamma, c) for gamma in range(most + 1)]
    assert factors[best_gamma(alpha, c, most=most)] == pytest.approx(max(factors), rel=1e-9)


@given(alpha=st.floats(0, 0.99), c=_COSTS)
def test_drafts_help_just_where_alpha_exceeds_c(alpha: float, c: float) -> None:
    assert (best_gamma(alpha, c) > 0) == (alpha > c)
    if alpha > c:
        # Corollary 3.9 of Leviathan et al.
        assert improvement_factor(alpha, best_gamma(alpha, c), c) >= (1 + alpha) / (1 + c) - 1e-12


def test_published_theoretical_speeds() -> None:
    """Figures of Leviathan et al., table 1: operations aside, the speed for given alpha, gamma."""
    assert improvement_factor(0.6, 2, 0.0) == pytest.approx(1.96)
    assert improvement_factor(0.7, 3, 0.0) == pytest.approx(2.53, abs=0.01)
    assert improvement_factor(0.8, 5, 0.0) == pytest.approx(3.69, abs=0.01)
    assert improvement_factor(0.9, 10, 0.0) == pytest.approx(6.86, abs=0.01)


def test_the_reports_theoretical_speeds() -> None:
    """Table 1 of the report: distilgpt2 for gpt2-large, c from its times per token."""
    c = 0.004570 / 0.0327
    for gamma, alpha, speed in [(2, 0.48, 1.338), (3, 0.36, 1.084), (5, 0.23, 0.766)]:
        assert improvement_factor(alpha, gamma, c) == pytest.approx(speed, abs=0.002)


def test_a_staged_draft_model_costs_what_a_simulation_takes() -> None:
    c, sub_c, alpha, gamma = 0.3, 0.05, 0.7, 3
    emitted = _emitted(np.random.default_rng(7), alpha, gamma, 100_000)
    seconds = len(emitted) * (c + gamma * sub_c)
    assert staged_cost(c, alpha=alpha, gamma=gamma, sub_c=sub_c) == pytest.approx(
        seconds / emitted.sum(), rel=0.01
    )
    assert staged_cost(c, alpha=alpha, gamma=0, sub_c=sub_c) == c


def test_perfect_and_free_draft_models_draft_all_they_may() -> None:
    assert best_gamma(1.0, 0.5, most=7) == 7
    assert best_gamma(0.5, 0.0, most=9) == 9
    assert best_gamma(1.0, 1.0) == 0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: expected_tokens(1.5, 3), "alpha must be a number from 0 to 1, got 1.5"),
        (lambda: expected_tokens(0.5, -1), "gamma must be an integer of at least 0, got -1"),
        (lambda: expected_tokens(0.5, 2.0), "gamma must be an integer of at least 0, got 2.0"),
        (lambda: improvement_factor(0.5, 2, math.nan), "c must be a finite number .* got nan"),
        (lambda: best_gamma(True, 0.1), "alpha must be a number from 0 to 1, got True"),
        (lambda: best_gamma(0.5, 0.1, most=-2), "most must be .* got -2"),
        (lambda: staged_cost(0.0, alpha=0.5, gamma=2, sub_c=0.1), "c must be above 0 .* got 0.0"),
    ],
)
def test_bad_input_is_named(call: Any, named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        call()
