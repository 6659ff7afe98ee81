"""Counter-based random numbers: the noise of the random contract."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# What the noise is for. A stream of its own makes each use independent of all others.
TOKEN_STREAM: Final = 0
CHUNK_STREAM: Final = 1
ACCEPT_STREAM: Final = 2
RESIDUAL_TOKEN_STREAM: Final = 3
RESIDUAL_CHUNK_STREAM: Final = 4

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


def exponential(high: Tensor, low: Tensor) -> Tensor:
    """Standard exponential values, float64, of 64 random bits each: from 2**-65 to 53 log 2."""
    uniform = high.double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64
    # The values nearest to 1 would round to it.
    return -torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-53))


def exponential_noise(
    seeds: Tensor, positions: Tensor, indices: Tensor, *, stream: int | Tensor
) -> Tensor:
    """The noise E(stream, index) of the random contract, float64 (rows, n).

    seeds, positions: int64 (rows,); indices: int64 (n,) or (rows, n); stream: one for all rows, or
    int64 (rows,).
    """
    streams = stream if isinstance(stream, Tensor) else torch.full_like(positions, stream)
    counter = (
        indices,
        (positions & _WORD)[:, None],
        ((positions >> 32) & _WORD)[:, None],
        streams[:, None],
    )
    key = ((seeds & _WORD)[:, None], ((seeds >> 32) & _WORD)[:, None])
    high, low, _, _ = philox(counter, key)
    return exponential(high, low)
