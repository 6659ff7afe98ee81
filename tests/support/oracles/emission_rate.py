"""The mean rate at which a request emits tokens."""

from __future__ import annotations


class EmissionRate:
    """Tokens a unit of step time, the last fifty steps or so; 1.5 in the beginning."""

    def __init__(self) -> None:
        self.tokens, self.time = 1.5 * 8, 8.0

    @property
    def value(self) -> float:
        return self.tokens / self.time

    @property
    def price(self) -> float:
        """What a draft has to gain for a unit of step time: 1.2 times the rate."""
        return 1.2 * self.value

    def add(self, tokens: int, time: float) -> None:
        self.tokens = 0.98 * self.tokens + tokens
        self.time = 0.98 * self.time + time
