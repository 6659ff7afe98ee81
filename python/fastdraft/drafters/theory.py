"""The gain of drafting with a model, from the rates and costs that the literature gives names to.

- alpha: the probability that the target accepts a draft token whose predecessors it accepted, taken
  as the same and independent for all tokens;
- gamma: the draft tokens of a step;
- c, the cost coefficient: the time of a draft model's forward over that of the target's.

Sources: Y. Leviathan, M. Kalman and Y. Matias, Fast Inference from Transformers via Speculative
Decoding, ICML 2023, whose equation (1) and theorem 3.8 the report of N. Sakhreliya, P. Jain and
A. Gupta on speculative decoding, 2024, has as its equation (1) and theorem 6.1. Both take a target
forward over gamma + 1 tokens to last as long as one over a single token.
"""

from __future__ import annotations

import math

from fastdraft.errors import InvalidValueError

__all__ = ["best_gamma", "expected_tokens", "improvement_factor", "staged_cost"]


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens that a target step emits on average: (1 - alpha^(gamma + 1)) / (1 - alpha).

    Equation (1) of both sources: the accepted tokens, and the recovered or bonus token. gamma + 1
    for an alpha of 1, its limit.

    Args:
        alpha: From 0 to 1.
        gamma: At least 0; 0 is plain decoding.

    Raises:
        InvalidValueError: A number is out of its range.
    """
    _check_alpha("alpha", alpha)
    _check_gamma("gamma", gamma)
    # The sum of the powers keeps its digits where 1 - alpha loses them.
    if alpha > 0.999:
        return math.fsum(alpha**power for power in range(gamma + 1))
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def improvement_factor(alpha: float, gamma: int, c: float) -> float:
    """How many times faster than plain decoding drafting is.

    (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)), theorem 6.1 of the report and theorem 3.8
    of Leviathan et al.: a step emits `expected_tokens` and takes gamma draft forwards and one of
    the target. Below 1 where drafting costs more than it gains.

    Args:
        alpha, gamma: As for `expected_tokens`.
        c: The cost coefficient, at least 0.

    Raises:
        InvalidValueError: A number is out of its range.
    """
    _check_cost("c", c)
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def best_gamma(alpha: float, c: float, *, most: int = 64) -> int:
    """The gamma from 0 to `most` whose `improvement_factor` is greatest; the least of equal ones.

    0, plain decoding, just where alpha <= c (corollary 3.9 of Leviathan et al.). The emitted tokens
    are concave in gamma and the time is linear, so the factor rises to its maximum and then falls:
    O(gamma).

    Args:
        alpha, c: As for `improvement_factor`. Of a perfect or free draft model no gamma is best,
            and `most` is given.
        most: The longest draft, at least 0.

    Raises:
        InvalidValueError: A number is out of its range.
    """
    _check_alpha("alpha", alpha)
    _check_cost("c", c)
    _check_gamma("most", most)
    # One more draft token adds alpha^(gamma + 1) tokens and c of time; it pays while that is more
    # than what the step has made of its time so far.
    gamma, tokens, gain = 0, 1.0, alpha
    while gamma < most and gain * (gamma * c + 1) > tokens * c:
        gamma += 1
        tokens += gain
        gain *= alpha
    return gamma


def staged_cost(c: float, *, alpha: float, gamma: int, sub_c: float) -> float:
    """The cost coefficient of a draft model that is itself sped up by drafts of a smaller one.

    c / improvement_factor(alpha, gamma, sub_c / c): what `c` is in the other functions where three
    models are staged, as in tables 5 and 6 of the report.

    Args:
        c: Of the draft model alone, above 0.
        alpha: How often the draft model accepts the smaller one's tokens.
        gamma: Draft tokens of the smaller model for each forward of the draft model.
        sub_c: The smaller model's cost coefficient, like `c` relative to the target.

    Raises:
        InvalidValueError: A number is out of its range.
    """
    _check_cost("c", c)
    _check_cost("sub_c", sub_c)
    if c == 0:
        raise InvalidValueError(f"c must be above 0 for a staged draft model, got {c!r}")
    return c / improvement_factor(alpha, gamma, sub_c / c)


def _check_alpha(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidValueError(f"{name} must be a number from 0 to 1, got {value!r}")


def _check_cost(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InvalidValueError(f"{name} must be a finite number of at least 0, got {value!r}")


def _check_gamma(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidValueError(f"{name} must be an integer of at least 0, got {value!r}")
