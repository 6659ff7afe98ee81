"""The likeliest tokens beside a verification, against one row's softmax at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft.errors import InvalidValueError
from fastdraft.verification import verify_greedy, verify_sampled

# Small numbers tie; the rest is what models should not give.
logit = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.0, 3.0]) | st.just(math.nan)
rows = st.integers(1, 12).flatmap(
    lambda width: st.lists(st.lists(logit, min_size=width, max_size=width), min_size=1, max_size=5)
)


def oracle(row: list[float], heat: float, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens of a row, and how likely they are."""
    nothing = [(-1, 0.0)] * count
    if any(map(math.isnan, row)) or max(row) == -math.inf:
        return nothing
    total = math.fsum(math.exp((x - max(row)) / heat) for x in row)
    order = sorted((t for t, x in enumerate(row) if x > -math.inf), key=lambda t: -row[t])
    found = [(token, math.exp((row[token] - max(row)) / heat) / total) for token in order[:count]]
    return (found + nothing)[:count]


@settings(deadline=None)
@given(rows, st.integers(1, 8), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_they_are_the_oracles(logits: list[list[float]], count: int, heat: float) -> None:
    x = torch.tensor(logits)
    operands = x, torch.zeros(len(x) - 1, dtype=torch.int64), torch.tensor([0, len(x) - 1])
    zeros = torch.zeros(1, dtype=torch.int64)
    for verified, temperature in (
        (verify_greedy(*operands, likeliest=count), 1.0),
        (
            verify_sampled(
                *operands, temperature=heat, top_k=1, seeds=zeros, positions=zeros, likeliest=count
            ),
            heat or 1.0,
        ),
    ):
        assert verified.likeliest is not None
        token_ids, probabilities = verified.likeliest
        expected = [oracle(row, temperature, count) for row in logits]
        assert token_ids.tolist() == [[token for token, _ in row] for row in expected]
        chances = torch.tensor([[chance for _, chance in row] for row in expected])
        torch.testing.assert_close(probabilities, chances)


def test_tokens_that_are_not_allowed_are_not_among_them() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    allowed = torch.tensor([[0b101]], dtype=torch.int32)
    nothing = torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])
    found = verify_greedy(logits, *nothing, allowed=allowed, likeliest=3).likeliest
    assert found is not None
    assert found.token_ids.tolist() == [[2, 0, -1]]


def test_they_are_left_out_unless_asked_for() -> None:
    nothing = torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])
    assert verify_greedy(torch.zeros(1, 3), *nothing).likeliest is None


@pytest.mark.parametrize("likeliest", [-1, 9, 1.5])
def test_a_wrong_number_is_refused(likeliest: int) -> None:
    nothing = torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])
    with pytest.raises(InvalidValueError, match=f"likeliest must be from 0 to 8, got {likeliest}"):
        verify_greedy(torch.zeros(1, 3), *nothing, likeliest=likeliest)
