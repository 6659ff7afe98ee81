"""The noise of the random contract on the device: Philox words, and exponential values of them.

`fastdraft.kernels.reference.noise` defines both, in float64. Here the words are the same bits, and
the values, float32, are within 2**-22 of them in relative size over the whole range, from 2**-65
up: a race of ratios then has the winner of the reference but where the two best are that close.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastdraft.kernels.reference import noise

TOKEN_STREAM = tl.constexpr(noise.TOKEN_STREAM)
CHUNK_STREAM = tl.constexpr(noise.CHUNK_STREAM)
ACCEPT_STREAM = tl.constexpr(noise.ACCEPT_STREAM)
RESIDUAL_TOKEN_STREAM = tl.constexpr(noise.RESIDUAL_TOKEN_STREAM)
RESIDUAL_CHUNK_STREAM = tl.constexpr(noise.RESIDUAL_CHUNK_STREAM)


@triton.jit
def random_words(seed, position, index, stream):
    """The 64 random bits of the contract, as two uint32 words, the high one first.

    seed, position: int64 scalars; index: int32, a block of tokens or chunks. Philox4x32-10.
    """
    c0 = index.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + (position >> 32).to(tl.uint32)
    c3 = tl.zeros_like(c0) + stream
    k0 = tl.zeros_like(c0) + seed.to(tl.uint32)
    k1 = tl.zeros_like(c0) + (seed >> 32).to(tl.uint32)
    a = tl.zeros_like(c0) + 0xD2511F53
    b = tl.zeros_like(c0) + 0xCD9E8D57
    for _ in tl.static_range(10):
        high_a = tl.umulhi(c0, a)
        high_b = tl.umulhi(c2, b)
        low_a = c0 * a
        low_b = c2 * b
        c0 = high_b ^ c1 ^ k0
        c1 = low_b
        c2 = high_a ^ c3 ^ k1
        c3 = low_a
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1


@triton.jit
def exponential(high, low):
    """-log1p(-u) for u = (high * 2**32 + low + 1/2) * 2**-64, float32.

    Where u is above 1/2, 1 - u = m * 2**-k is known to all its bits too, with m from 1/2 to 1:
    k log 2 - log1p(-(1 - m)) then, so one polynomial on [0, 1/2] serves both. No logarithm of the
    hardware is used: it is accurate in absolute terms alone, which near u = 0 is not enough, and
    there the winners of a race are found.
    """
    bits = (high.to(tl.int64) << 32) | low.to(tl.int64)
    flipped = bits < 0
    bits = tl.where(flipped, ~bits, bits)
    # At most 1/2: u, or 1 - u.
    small = (bits.to(tl.float32) + 0.5) * 5.421010862427522e-20  # 2**-64

    # small = m * 2**-k
    pattern = small.to(tl.int32, bitcast=True)
    k = 126 - (pattern >> 23)
    m = ((pattern & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    t = tl.where(flipped, 1.0 - m, small)

    # (-log1p(-t) - t) / t**2 by least squares in relative error, at most 2**-29.
    q = tl.full(t.shape, 2.128572463989258, tl.float32)
    q = q * t - 3.5426032543182373
    q = q * t + 3.0937905311584473
    q = q * t - 1.2715190649032593
    q = q * t + 0.5445889830589294
    q = q * t + 0.09462123364210129
    q = q * t + 0.207860067486763
    q = q * t + 0.24951289594173431
    q = q * t + 0.3333481550216675
    q = q * t + 0.49999985098838806
    value = t + t * t * q
    return tl.where(flipped, k.to(tl.float32) * 0.6931471805599453 + value, value)


@triton.jit
def exponential_noise(seed, position, index, stream):
    """The noise E(stream, index), float32 in index's shape; operands as in `random_words`."""
    high, low = random_words(seed, position, index, stream)
    return exponential(high, low)
