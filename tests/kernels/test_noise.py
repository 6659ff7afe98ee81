"""The noise on the device against the reference's, in words and in values."""

from __future__ import annotations

from decimal import Decimal, getcontext

import pytest
import torch
import triton
import triton.language as tl

from fastdraft.kernels import noise

COUNT = 4096


@triton.jit
def words_kernel(seed, position, words, values, stream: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    high, low = noise.random_words(tl.load(seed), tl.load(position), index, stream)
    tl.store(words + index, high.to(tl.int64))
    tl.store(words + SIZE + index, low.to(tl.int64))
    value = noise.noise_of(tl.load(seed), tl.load(position), index, stream)
    tl.store(values + index, value)


@triton.jit
def exponential_kernel(high, low, values, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    words = tl.load(high + index).to(tl.uint32), tl.load(low + index).to(tl.uint32)
    tl.store(values + index, noise.exponential_of(words[0], words[1]))


@pytest.mark.parametrize(
    ("seed", "position", "stream"),
    [(0, 0, 0), (-1, 2**40 + 7, 1), (2**63 - 1, 2**31, 3), (-(2**63), 2**62, 4), (7, 5, 2)],
)
def test_noise_is_the_reference(seed, position, stream):
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    words, values = torch.zeros(2, COUNT, dtype=torch.int64), torch.zeros(COUNT)
    words_kernel[(1,)](seeds, positions, words, values, stream, COUNT)

    index, low, high = torch.arange(COUNT), 2**32 - 1, 32
    expected = noise.philox(
        (index, positions & low, positions >> high & low, torch.tensor(stream)),
        (seeds & low, seeds >> high & low),
    )
    assert torch.equal(words[0], expected[0])
    assert torch.equal(words[1], expected[1])
    exact = noise.exponential_noise(seeds, positions, index, stream=stream)[0]
    assert float(((values - exact) / exact).abs().max()) < 2**-22


def test_noise_is_accurate_at_both_ends_and_in_between():
    getcontext().prec = 60
    near = [0, 1, 2, 3, 2**16, 2**30]
    ends = [base + sign * step for base in (0, 2**31, 2**32) for step in near for sign in (-1, 1)]
    highs = sorted({high for high in ends if 0 <= high < 2**32} | {2**bit for bit in range(32)})
    words = [(high, low) for high in highs for low in (0, 1, 2**31, 2**32 - 1)]
    size = 512
    assert len(words) <= size
    high, low = torch.ones(2, size, dtype=torch.int64)
    high[: len(words)], low[: len(words)] = torch.tensor(words).t()
    values = torch.zeros(size)
    exponential_kernel[(1,)](high, low, values, size)
    for (high, low), value in zip(words, values.tolist(), strict=False):
        uniform = (high * 2**32 + low + Decimal("0.5")) / 2**64
        exact = -(1 - uniform).ln()
        assert abs(Decimal(value) - exact) < exact / 2**22, (high, low)
