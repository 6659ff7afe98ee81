"""The n-gram autocomplete: the most frequent continuation in the prompt."""

from __future__ import annotations

from collections.abc import Sequence


class NgramModel:
    """The tokens that follow each n-gram of a prompt, for contexts shorter than `order`."""

    def __init__(self, prompt: Sequence[int], order: int) -> None:
        self.order = order
        self.following: dict[tuple[int, ...], list[int]] = {}
        for end, token in enumerate(prompt):
            for begin in range(max(0, end - order + 1), end + 1):
                self.following.setdefault(tuple(prompt[begin:end]), []).append(token)

    def suggest(
        self, text: Sequence[int], min_probability: float, limit: int
    ) -> list[tuple[int, float]]:
        """The tokens to draft after `text`, each with the probability that all are right so far."""
        grown = tuple(text)
        path = 1.0
        suggested: list[tuple[int, float]] = []
        while len(suggested) < limit and () in self.following:
            begin = max(0, len(grown) - self.order + 1)
            while grown[begin:] not in self.following:
                begin += 1
            seen = self.following[grown[begin:]]
            # The most frequent one; of several that which was seen last.
            _, index = max((seen.count(token), index) for index, token in enumerate(seen))
            path *= seen.count(seen[index]) / len(seen)
            if path < min_probability:
                break
            grown += (seen[index],)
            suggested.append((seen[index], path))
        return suggested
