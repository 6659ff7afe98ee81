"""The acceptance model: its features, and logistic regression over them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from oracles.copy_cursor import CopyCursor


class AcceptanceModel:
    """Logistic regression over one weight for each value of each feature, learned online."""

    RATE = 0.015

    def __init__(self, weights: Mapping[str, Sequence[float]]) -> None:
        self.weights = {name: list(values) for name, values in weights.items()}
        self.now = 0  # how many outcomes were learned
        self.lessons: dict[tuple[int, ...], tuple[int, int]] = {}  # the last of a kind, how many

    def chance(self, evidence: Mapping[str, int]) -> float:
        return 1 / (1 + math.exp(-sum(self.weights[name][v] for name, v in evidence.items())))

    def learn(
        self,
        evidence: Sequence[Mapping[str, int]],
        tokens: Sequence[int],
        moment: int,
        emitted: int,
    ) -> None:
        """Learns which of one node's candidates was emitted, from errors that are taken at once."""
        errors = [
            (token == emitted) - self.chance(values)
            for token, values in zip(tokens, evidence, strict=True)
        ]
        for token, values, error in zip(tokens, evidence, errors, strict=True):
            kind = tuple(values.values())
            alike, copies = self.count(kind, moment), self.count((*kind, token), moment)
            self.now += 1
            for name, value in values.items():
                self.weights[name][value] += self.RATE / max(math.sqrt(alike), copies) * error

    def count(self, kind: tuple[int, ...], moment: int) -> int:
        """How many outcomes of the kind there were since `moment`, with this one."""
        last, count = self.lessons.get(kind, (-1, 0))
        count = count + 1 if last >= moment else 1
        self.lessons[kind] = self.now, count
        return count


def relation(said: int, token: int) -> int:
    return 0 if said < 0 else 1 if said == token else 2


def following_value(cursor: CopyCursor | None, said: int, token: int, depth: int) -> int:
    if cursor is None or said < 0:
        return 0
    length = length_value(cursor.length + depth)
    if said != token:
        return 8 + min(3, length // 3)
    if depth == 0 and cursor.footing == "guessed":
        return 1
    return 2 + min(4, length // 2)


def length_value(length: int) -> int:
    return bisect_right([1, 2, 3, 4, 5, 7, 10, 16, 32], length)


def count_value(count: int) -> int:
    return bisect_right([1, 2, 3, 5], count)


def total_value(total: int) -> int:
    return bisect_right([1, 2, 3, 6, 10], total)
