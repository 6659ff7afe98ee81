"""The position at which an output goes on in a text that it copies from."""

from __future__ import annotations

from collections.abc import Sequence

from oracles.suffixes import alike, repeated_suffix


class CopyCursor:
    """The position at which the output goes on in a text that it copies from."""

    WINDOW, PATIENCE, SETTLED, LONGEST = 32, 32, 3, 8

    def __init__(self, start: int) -> None:
        self.position = start
        self.length = 0
        self.kind = "guessed"
        self.parted_at = start
        self.since = 0
        self.begun = False

    def advance(
        self, text: Sequence[int], limit: int, output: Sequence[int], jump: tuple[int, int]
    ) -> None:
        """Takes the last token of `output`; `jump`: position and length of a match elsewhere."""
        if 0 <= self.position < limit and text[self.position] == output[-1]:
            settled = self.length >= self.SETTLED
            self.position, self.length = self.position + 1, self.length + 1
            if settled or self.kind == "guessed":
                self.kind = "following"
            if not settled and jump[1] > self.length + self.SETTLED:
                (self.position, self.length), self.kind = jump, "jumped"
            return
        if self.length >= self.SETTLED:
            self.parted_at, self.since, self.begun = self.position, 0, True
        self.since += self.begun
        patient = self.parted_at >= 0 and self.since <= self.PATIENCE
        matches = self.nearby(text, limit, output) if patient else [(-1, 0)]
        (self.position, self.length), self.kind = max(matches, key=self.preference), "following"
        if self.length == 0:
            (self.position, self.length), self.kind = jump, "jumped"
        if self.length == 0:
            self.kind = "guessed"
            self.position = min(self.parted_at + self.since, limit) if patient else -1

    def nearby(
        self, text: Sequence[int], limit: int, output: Sequence[int]
    ) -> list[tuple[int, int]]:
        first = max(1, self.parted_at - self.WINDOW)
        final = min(limit, self.parted_at + self.WINDOW)
        lengths = {
            position: min(self.LONGEST, alike(text[:position], output))
            for position in range(first, final + 1)
        }
        return [(-1, 0), *lengths.items()]

    def preference(self, match: tuple[int, int]) -> tuple[int, int, bool]:
        """The longest, of these the nearest, of these the later."""
        position, length = match
        return length, -abs(position - self.parted_at), position > self.parted_at


class OwnCopy(CopyCursor):
    """The position at which the copy that a text makes of its own past goes on."""

    SHORTEST_JUMP = 4

    def __init__(self) -> None:
        super().__init__(-1)

    def follow(self, text: Sequence[int]) -> None:
        length, _, latest = repeated_suffix(text)
        jump = (latest + 1, length) if length >= self.SHORTEST_JUMP else (-1, 0)
        self.advance(text, len(text) - 1, text, jump)


class Prediction(CopyCursor):
    """The position at which the output goes on in the text that the caller expects."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(0)
        self.tokens = list(tokens)
        self.output: list[int] = []

    def follow(self, text: Sequence[int]) -> None:
        self.output.append(text[-1])
        # The longest suffix of the output that stands in the prediction, leftmost.
        ends = range(1, len(self.tokens) + 1)
        lengths = {end: alike(self.tokens[:end], self.output) for end in ends}
        length = max(lengths.values(), default=0)
        first = next((end for end in ends if lengths[end] == length), -1)
        self.advance(self.tokens, len(self.tokens), text, (first, length) if length else (-1, 0))
