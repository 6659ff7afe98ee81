"""A table of n-grams, counted in dictionaries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

ORDERS, MOST, LEAST, DISCOUNT, LEAST_TEXTS = 3, 8, 0.02, 0.75, 2
Context = tuple[int, ...]


def count(
    texts: Sequence[Sequence[int]], groups: Sequence[int]
) -> dict[Context, list[tuple[int, int]]]:
    """For each context that the table has, its successors with their probabilities in half bits."""
    tokens = Counter(token for text in texts for token in text)
    shorter: dict[Context, dict[int, float]] = {
        (): {token: times / tokens.total() for token, times in tokens.items()}
    }
    table: dict[Context, list[tuple[int, int]]] = {}
    for order in range(1, ORDERS + 1):
        seen: dict[Context, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for text, group in zip(texts, groups, strict=True):
            for i in range(order, len(text)):
                seen[tuple(text[i - order : i])][text[i]].add(group)
        probabilities = {}
        for context, behind in seen.items():
            total = sum(map(len, behind.values()))
            left = DISCOUNT * len(behind) / total
            probabilities[context] = {
                token: (len(of) - DISCOUNT) / total + left * shorter[context[1:]][token]
                for token, of in behind.items()
            }
            kept = [
                (-probability, token)
                for token, probability in probabilities[context].items()
                if probability >= LEAST and len(behind[token]) >= LEAST_TEXTS
            ]
            if kept and (order == 1 or context[1:] in table):
                table[context] = [
                    (token, min(11, max(0, round_away(-2 * math.log2(-negative)))))
                    for negative, token in sorted(kept)[:MOST]
                ]
        shorter = probabilities
    return table


def round_away(value: float) -> int:
    """To the nearest integer; halves away from 0, as C has it."""
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def guess(
    table: dict[Context, list[tuple[int, int]]], text: Sequence[int], most: int
) -> list[tuple[int, int, int]]:
    """The most probable tokens: token, order and half bits."""
    found: dict[int, tuple[int, int, int]] = {}
    for order in range(min(ORDERS, len(text)), 0, -1):
        for token, half_bits in table.get(tuple(text[len(text) - order :]), []):
            found.setdefault(token, (token, order, half_bits))
    return list(found.values())[:most]
