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

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.parents[node]), self.token_ids[node]]

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
    shortest_path: int,
) -> list[tuple[int, float]]:
    """At most `most` tokens, each with its chance; as kernels/reference/align.py defines it."""
    if tree is not None and tree.token_ids:
        if tree.base == len(text):
            return tree.below(-1, most)
        nodes = [node for node in range(len(tree.token_ids)) if tree.children(node)]
        for node in nodes:
            if 0 <= tree.base < len(text) and tree.path(node) == list(text[tree.base :]):
                return tree.below(node, most)
        common = {node: suffix(tree.path(node), text) for node in nodes}
        longest = max(common.values(), default=0)
        if longest >= shortest_path:
            return tree.below(next(node for node in nodes if common[node] == longest), most)

    best, after = 0, 0
    for end in range(max(len(text) - 1 - window, 0), len(text) - 1):
        match = min(suffix(text[: end + 1], text), len(chances))
        if match >= max(shortest, best):
            best, after = match, end + 1
    if not best:
        return []
    repeated = list(text[after:]) * most
    return [(token, chances[best - 1]) for token in repeated[:most]]
