"""The tokens that may follow by the target's logits: a dictionary by slot, and best-first trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NODES, DEPTH, LEAST = 48, 6, np.float32(0.004)


class Successors:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.table: dict[int, tuple[tuple[int, int], list[tuple[int, np.float32]]]] = {}

    def slot(self, context: tuple[int, int]) -> int:
        key = (context[0] % 2**32) << 32 | context[1]
        return ((key ^ key >> 29) * 0x9E3779B97F4A7C15 % 2**64 >> 32) % self.slots

    def learn(
        self,
        contexts: Sequence[tuple[int, int]],
        token_ids: Sequence[Sequence[int]],
        probabilities: Sequence[Sequence[float]],
    ) -> None:
        for (before, last), ids, values in zip(contexts, token_ids, probabilities, strict=True):
            known = ids.index(-1) if -1 in ids else len(ids)
            follow = list(zip(ids[:known], map(np.float32, values), strict=False))
            for context in dict.fromkeys([(-1, last), (before, last)]) if last >= 0 else ():
                self.table[self.slot(context)] = context, follow

    def after(self, before: int, last: int) -> list[tuple[int, np.float32]]:
        for context in (before, last), (-1, last):
            found = self.table.get(self.slot(context))
            if found is not None and found[0] == context:
                return found[1]
        return []

    def tree(self, end: tuple[int, int, int]) -> list[tuple[int, int, float]]:
        """The (token, parent, confidence) of each node."""
        first, before, last = end
        if last < 0:
            return []
        likely = self.after(first, before) if before >= 0 else []
        rest = np.float32(1)
        for token, probability in likely:
            rest -= probability if token == last else np.float32(0)
        expected: dict[int, np.float32] = {}
        runners_up = [
            (token, min(np.float32(1), probability / max(rest, np.float32(1e-6))))
            for token, probability in likely
            if token != last
        ]
        for token, probability in [*self.after(before, last), *runners_up]:
            expected[token] = max(expected.get(token, probability), probability)
        waiting = [
            (probability, last, token, -1, 1, probability)
            for token, probability in expected.items()
        ]
        nodes: list[tuple[int, int, float]] = []
        while len(nodes) < NODES:
            waiting = [each for each in waiting if each[0] >= LEAST]
            if not waiting:
                break
            best = max(waiting, key=lambda each: each[0])  # the first of equals
            waiting.remove(best)
            path, parent_token, token, parent, depth, confidence = best
            nodes.append((token, parent, float(confidence)))
            if depth < DEPTH:
                waiting += [
                    (path * probability, token, follower, len(nodes) - 1, depth + 1, probability)
                    for follower, probability in self.after(parent_token, token)
                ]
        return nodes
