"""The noise of the random contract: counter-based random numbers, Philox4x32-10.

On a device the words are the same bits as in the plain version, which is float64, and the values,
float32, are within 2**-22 of them in relative size over the whole range, from 2**-65 up: a race of
ratios then has the same winner but where the two best are that close.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fastdraft import _core
from fastdraft.kernels.language import jit, tl

# The uses of noise. A stream of its own makes each use independent of all others.
TOKEN_STREAM: Final = 0
CHUNK_STREAM: Final = 1
ACCEPT_STREAM: Final = 2
RESIDUAL_TOKEN_STREAM: Final = 3
RESIDUAL_CHUNK_STREAM: Final = 4
# The same for kernels.
TOKEN_NOISE = tl.constexpr(TOKEN_STREAM)
CHUNK_NOISE = tl.constexpr(CHUNK_STREAM)
ACCEPT_NOISE = tl.constexpr(ACCEPT_STREAM)
RESIDUAL_TOKEN_NOISE = tl.constexpr(RESIDUAL_TOKEN_STREAM)
RESIDUAL_CHUNK_NOISE = tl.constexpr(RESIDUAL_CHUNK_STREAM)

_WORD: Final = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random 32-bit words for each counter under a key.

    All operands are int64 tensors that hold unsigned 32-bit words and broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64, which leaves all 64 bits of an unsigned product.
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        c0, c1 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD
        c2, c3 = ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0 = (k0 + 0x9E3779B9) & _WORD
        k1 = (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(high: Tensor, low: Tensor) -> Tensor:
    """The numbers u of the contract, float64, of 64 random bits each: from 2**-65 to 1 - 2**-53."""
    # The values nearest to 1 would round to it.
    found = high.double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64
    return found.clamp_(max=1.0 - 2.0**-53)


def exponential(u: Tensor) -> Tensor:
    """Standard exponential values of the numbers u, which they overwrite: up to 53 log 2."""
    return u.neg_().log1p_().neg_()


def uniform_noise(seeds: Tensor, positions: Tensor, indices: Tensor, streams: Tensor) -> Tensor:
    """The u of `exponential_noise`, float64 (rows, n); streams: int64 (rows,)."""
    counter = (
        indices,
        (positions & _WORD)[:, None],
        ((positions >> 32) & _WORD)[:, None],
        streams[:, None],
    )
    high, low, _, _ = philox(counter, ((seeds & _WORD)[:, None], ((seeds >> 32) & _WORD)[:, None]))
    return uniform(high, low)


def exponential_noise(
    seeds: Tensor, positions: Tensor, indices: Tensor, *, stream: int | Tensor
) -> Tensor:
    """The noise E(stream, index) of the random contract, float64 (rows, n).

    seeds, positions: int64 (rows,); indices: int64 (n,) or (rows, n); stream: one for all rows, or
    int64 (rows,).
    """
    streams = stream if isinstance(stream, Tensor) else torch.full_like(positions, stream)
    operands = (seeds, positions, indices, streams)
    if positions.device.type == "cpu":
        # The same bits in a tenth of the time: a draw is hundreds of operations on few numbers.
        u = torch.from_numpy(_core.uniform_noise(*(each.numpy() for each in operands)))
    else:
        u = uniform_noise(*operands)
    return exponential(u)


@jit
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


@jit
def exponential_of(high, low):
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


@jit
def noise_of(seed, position, index, stream):
    """The noise E(stream, index), float32 in index's shape; operands as in `random_words`."""
    high, low = random_words(seed, position, index, stream)
    return exponential_of(high, low)
