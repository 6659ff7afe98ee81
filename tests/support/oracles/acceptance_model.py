"""The acceptance model: its features, and logistic regression over them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from oracles.copy_cursor import CopyCursor
from oracles.token_weights import TokenWeights


class Sample:
    """Which outcomes are learned: all that surprise, and one of four expected ones, for four."""

    EXPECTED = 2.005  # log-odds from which an outcome is expected

    def __init__(self) -> None:
        self.random, self.left = 0, 4

    def times(self, weight: float, accepted: bool) -> int:
        if (weight if accepted else -weight) < self.EXPECTED:
            return 1
        self.left -= 1
        if self.left > 0:
            return 0
        self.random = (self.random * 1664525 + 1013904223) % 2**32
        self.left = 1 + ((self.random >> 16) * 7 >> 16)
        return 4


def logistic(weight: float) -> float:
    return 1 / (1 + math.exp(-weight))


class AcceptanceModel:
    """Logistic regression over one weight for each value of each feature, learned online."""

    RATE, PATH_RATE = 0.015, 0.02
    DEPTHS = (4, 8, 16, 24, 40)
    PATHS = 24

    def __init__(self, weights: Mapping[str, Sequence[float]]) -> None:
        self.weights = {name: list(values) for name, values in weights.items()}
        self.now = 0  # how many outcomes were learned
        # By kind: when its last outcome was learned, and of how many requests.
        self.learned: dict[tuple[int, ...], tuple[int, int]] = {}

    def weigh(self, evidence: Mapping[str, int]) -> float:
        return sum(self.weights[name][v] for name, v in evidence.items())

    def learn(
        self,
        outcomes: Sequence[tuple[int, Mapping[str, int], float, Sequence[int]]],
        version: int,
        begun: int,
        emitted: int,
        sample: Sample,
        named: TokenWeights | None = None,
    ) -> None:
        """Learns which of one node's candidates was emitted, from errors that are taken at once.

        Each candidate is a token, its evidence, what that weighed when it was predicted, at
        `version`, and its indices in `named`. The step began to be learned at `begun`.
        """

        def current(values: Mapping[str, int], indices: Sequence[int]) -> float:
            return logistic(self.weigh(values) + (named.weigh(indices) if named else 0.0))

        samples = [
            (
                token,
                values,
                sample.times(weight, token == emitted),
                current(values, indices),
                indices,
            )
            for token, values, weight, indices in outcomes
        ]
        for token, values, times, probability, indices in samples:
            if times == 0:
                continue
            kind = tuple(v for name, v in values.items() if "ngram" not in name)
            alike = self.count(kind, version, begun)
            copies = self.count((*kind, token), version, begun)
            self.now += 1
            step = times * self.RATE / max(math.sqrt(alike), copies)
            for name, value in values.items():
                self.weights[name][value] += step * ((token == emitted) - probability)
            if named:
                named.learn(indices, times * ((token == emitted) - probability))

    def count(self, kind: tuple[int, ...], version: int, begun: int) -> int:
        """How many requests have taught one of the kind since `version`, this one included."""
        last, requests = self.learned.get(kind, (-1, 0))
        requests = requests if last >= version else 0
        requests += requests == 0 or last < begun
        self.learned[kind] = self.now, requests
        return requests

    def path_probability(self, depth: int, path: float, tree: bool) -> float:
        """The probability that a draft is accepted up to a token whose path has this product."""
        corrections = self.weights["path"]
        correction = sum(part * corrections[at] for at, part in self.bins(depth, path))
        probability = path + correction * (4 * path * (1 - path) if tree else 1)
        return min(max(probability, 0.0), 1.0)

    def learn_path(self, depth: int, path: float, tree: bool, accepted: bool) -> None:
        error = accepted - self.path_probability(depth, path, tree)
        for at, part in self.bins(depth, path):
            self.weights["path"][at] += self.PATH_RATE * part * error

    def bins(self, depth: int, path: float) -> list[tuple[int, float]]:
        """The corrections on both sides of a path, and how close it is to each."""
        low = min(int(path * self.PATHS), self.PATHS - 1)
        part = path * self.PATHS - low
        first = bisect_right(self.DEPTHS, depth) * (self.PATHS + 1) + low
        return [(first, 1 - part), (first + 1, part)]


def relation(said: int, token: int) -> int:
    return 0 if said < 0 else 1 if said == token else 2


def following_value(cursor: CopyCursor | None, said: int, token: int, depth: int) -> int:
    if cursor is None or said < 0:
        return 0
    length = length_value(cursor.length + depth)
    if said != token:
        return 8 + min(3, length // 3)
    if depth == 0 and cursor.kind == "guessed":
        return 1
    return 2 + min(4, length // 2)


def length_value(length: int) -> int:
    return bisect_right([1, 2, 3, 4, 5, 7, 10, 16, 32], length)


def count_value(count: int) -> int:
    return bisect_right([1, 2, 3, 5], count)


def total_value(total: int) -> int:
    return bisect_right([1, 2, 3, 6, 10], total)
