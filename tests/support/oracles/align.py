"""The draft that a tree of continuations gives for a text, step by step in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Tree:
    """Continuations of the text of `base` tokens; `parents` may hold anything."""

    base: int
    token_ids: Sequence[int]
    parents: Sequence[int]
    probabilities: Sequence[float]

    def __post_init__(self) -> None:
        self.parents = [min(max(p, -1), node - 1) for node, p in enumerate(self.parents)]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def walk(self, tokens: Sequence[int]) -> int | None:
        """The node that the tokens lead to from the root, -1; None where they leave the tree."""
        node = -1
        for token in tokens:
            fitting = [child for child in self.children(node) if self.token_ids[child] == token]
            if not fitting:
                return None
            node = fitting[0]
        return node

    def below(self, node: int, most: int) -> list[tuple[int, float]]:
        """The tokens along the first children, and their chances."""
        draft: list[tuple[int, float]] = []
        before = 1.0 if node < 0 else self.probabilities[node]
        while len(draft) < most and (children := self.children(node)):
            node = children[0]
            chance = self.probabilities[node]
            draft.append((self.token_ids[node], min(chance / before, 1) if before > 0 else 0))
            before = chance
        return draft


def suffix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens the two have in common at their ends."""
    size = 0
    while size < min(len(one), len(other)) and one[-1 - size] == other[-1 - size]:
        size += 1
    return size


def align(
    text: Sequence[int],
    tree: Tree | None,
    most: int,
    chances: Sequence[float],
    *,
    shortest: int,
    window: int,
    reach: int,
) -> list[tuple[int, float]]:
    """At most `most` tokens, each with its chance; as kernels/align.py defines it."""
    grown = len(text) - tree.base if tree is not None else -1
    if tree is None or not tree.token_ids or not 0 <= tree.base <= len(text) or grown > reach:
        tree = None
    if tree is not None and (node := tree.walk(text[tree.base :])) is not None:
        draft = tree.below(node, most)
        if draft:
            return draft

    best, after = 0, 0
    for end in range(max(len(text) - 1 - window, 0), len(text) - 1):
        match = min(suffix(text[: end + 1], text), len(chances) - 1)
        if match >= max(shortest, best):
            best, after = match, end + 1
    if best:
        repeated = (list(text[after:]) * most)[:most]
        return [(t, chances[min(best + i, len(chances) - 1)]) for i, t in enumerate(repeated)]

    if tree is not None and grown > 0 and (node := tree.walk(text[tree.base : -1])) is not None:
        expected = tree.children(node)
        draft = tree.below(expected[0], most) if expected else []
        return [(t, chances[0] if i == 0 else chance) for i, (t, chance) in enumerate(draft)]
    return []
