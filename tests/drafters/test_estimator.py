"""Learning from judged drafts, on tokens whose probability of acceptance is known."""

from __future__ import annotations

import numpy as np
import pytest

from fastdraft.drafters.estimator import AcceptanceEstimator


def _acceptance(
    estimator: AcceptanceEstimator, confidences: list[float], request: int = 0
) -> float:
    """The probability that a draft of such tokens is accepted whole."""
    belief = estimator.begin(request)
    for confidence in confidences:
        belief = estimator.extended(belief, confidence)
    return float(belief.sum())


def _draft(
    estimator: AcceptanceEstimator,
    random: np.random.Generator,
    *,
    sure: float,
    probability: float,
    request: int = 0,
) -> None:
    length = int(random.integers(1, 6))
    accepted = 0
    while accepted < length and random.random() < probability:
        accepted += 1
    estimator.observe(request, [sure] * min(accepted + 1, length), accepted)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_classes_of_confidence_learn_their_probability(probability: float) -> None:
    random = np.random.default_rng(0)
    estimator = AcceptanceEstimator()
    for number in range(2000):
        _draft(estimator, random, sure=0.45, probability=probability, request=number)
        estimator.forget(number)
        _draft(estimator, random, sure=0.97, probability=0.97, request=number)
        estimator.forget(number)
    learned = np.mean([_acceptance(estimator, [0.45], request) for request in range(3000, 3010)])
    assert learned == pytest.approx(probability, abs=0.08)
    assert _acceptance(estimator, [0.97]) == pytest.approx(0.97, abs=0.04)


def test_a_request_is_judged_by_its_own_drafts() -> None:
    random = np.random.default_rng(0)
    estimator = AcceptanceEstimator()
    before = _acceptance(estimator, [0.8])
    for _ in range(20):
        _draft(estimator, random, sure=0.8, probability=0.95, request=1)
        _draft(estimator, random, sure=0.8, probability=0.4, request=2)
    easy, hard = _acceptance(estimator, [0.8], 1), _acceptance(estimator, [0.8], 2)
    assert hard < 0.6 < before < easy
    # Its evidence fades while nothing is learned, and is gone with it.
    for _ in range(300):
        estimator.pass_by(2)
    assert hard + 0.1 < _acceptance(estimator, [0.8], 2) < easy
    estimator.forget(1)
    assert _acceptance(estimator, [0.8], 1) < easy


def test_accepted_tokens_promise_more_of_those_that_follow() -> None:
    estimator = AcceptanceEstimator()
    assert _acceptance(estimator, [0.7] * 4) > _acceptance(estimator, [0.7]) ** 4


def test_gains_count_further_tokens_as_usual_ones() -> None:
    random = np.random.default_rng(0)
    estimator = AcceptanceEstimator()
    for _ in range(400):
        _draft(estimator, random, sure=0.75, probability=0.75)
    belief = estimator.extended(estimator.begin(0), 0.75)
    gains = estimator.gains(0, belief, 5)
    assert gains.shape == (5,)
    assert gains[0] == pytest.approx(0.75**2, abs=0.1)
    assert (np.diff(gains) > 0).all()
    assert (np.diff(gains, 2) < 0).all()


def test_no_batch_outweighs_earlier_ones() -> None:
    random = np.random.default_rng(5)
    estimator = AcceptanceEstimator()
    requests = range(64)
    for _ in range(40):
        for request in requests:
            _draft(estimator, random, sure=0.97, probability=0.8, request=request)
    learned = _acceptance(estimator, [0.97], 64)
    assert learned == pytest.approx(0.8, abs=0.05)
    # Copies of one prompt, all of which refuse one token.
    for request in requests:
        estimator.observe(request, [0.97], 0)
    assert _acceptance(estimator, [0.97], 65) > 0.8 * learned
