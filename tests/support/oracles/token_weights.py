"""Weights that name tokens: a table for the hashes of a candidate and what precedes it."""

from __future__ import annotations

from collections.abc import Sequence

from fastdraft import Datastore

TOKEN, LAST, SECOND = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
LAST_OF_BOTH, LENGTHS = 0xD6E8FEB86659FD93, 0xA0761D6478BD642F


def names(token: int, last: int, second: int, length: int, rival: int) -> list[int]:
    """The indices of a token's weights behind `second` and `last`, by both lengths' classes."""
    name, before, earlier = (
        (each + 2) * factor for each, factor in ((token, TOKEN), (last, LAST), (second, SECOND))
    )
    both = (last + 2) * LAST_OF_BOTH ^ earlier
    lengths, alone = (16 * length + rival + 1) * LENGTHS, (length + 1) * LENGTHS
    # Each is a line of 32 weights, and one of these by the other's highest bits.
    hashes = (
        (name, None),
        (name ^ before, None),
        (name ^ before, name ^ both),
        (name ^ earlier, None),
        (name, name ^ lengths),
        (before, before ^ lengths),
        (before, both ^ alone),
    )

    def index(line: int, other: int | None) -> int:
        high = line % 2**64 >> 48
        return high if other is None else high // 32 * 32 + (other % 2**64 >> 59)

    return [index(*each) for each in hashes]


class TokenWeights:
    """A table of `size` weights, in parts of 1 / UNITS."""

    RATE, UNITS, LARGEST = 0.12, 8192, 2**15 - 1

    def __init__(self, size: int, learned: TokenWeights | None = None) -> None:
        values = learned.values if learned else [0]
        self.values = [values[i % len(values)] for i in range(size)]

    @classmethod
    def of(cls, store: Datastore, given: TokenWeights | None = None) -> TokenWeights | None:
        """The table of the store's next request, where the one before it got `given`."""
        sizes = [size for size in (1 << 14, 1 << 16) if size <= 12 * len(store)]
        if not sizes or (given and len(given.values) >= sizes[-1]):
            return given
        return cls(sizes[-1], given)

    def weigh(self, indices: Sequence[int]) -> float:
        return sum(self.values[index % len(self.values)] for index in indices) / self.UNITS

    def learn(self, indices: Sequence[int], error: float) -> None:
        step = round(self.RATE * error * self.UNITS)
        for index in indices:
            at = index % len(self.values)
            self.values[at] = max(-self.LARGEST, min(self.values[at] + step, self.LARGEST))
