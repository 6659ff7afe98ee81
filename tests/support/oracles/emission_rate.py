"""The mean rate at which a request emits tokens."""

from __future__ import annotations


class EmissionRate:
    """Tokens a unit of step time, the last fifty steps or so; 1.5 in the beginning."""

    def __init__(self) -> None:
        self.tokens, self.time = 1.5 * 8, 8.0

    @property
    def value(self) -> float:
        return self.tokens / self.time

    def price(self, token_cost: float) -> float:
        """How likely a draft token must be: up to 1.3 times what is emitted in its time."""
        worth = token_cost * self.value
        return worth * (1.3 - 0.3 * min(worth, 1))

    def add(self, tokens: int, time: float) -> None:
        self.tokens = 0.98 * self.tokens + tokens
        self.time = 0.98 * self.time + time
