"""What the index and the drafters promise, the slow and obvious way."""

from __future__ import annotations

from collections.abc import Sequence

LATEST_WALK = 32
"""SuffixAutomaton::kLatestWalk."""


def common_suffix(text: Sequence[int], end: int, other: int) -> int:
    """How many tokens that end at position `end` and at the earlier `other` are alike."""
    length = 0
    while length <= other and text[end - length] == text[other - length]:
        length += 1
    return length


def repeated_suffix(text: Sequence[int]) -> tuple[int, int, int]:
    """The longest suffix of `text` that also ends earlier in it.

    Returns its length, and where its first and its latest earlier occurrence end, as the index
    knows them; (0, -1, -1) where no token repeats.
    """
    last = len(text) - 1
    lengths = [common_suffix(text, last, end) for end in range(last)]
    length = max(lengths, default=0)
    if length == 0:
        return 0, -1, -1
    ends = [end for end in range(last) if lengths[end] == length]
    marked = [end for end in ends if length > unmarked_length(text, end)]
    return length, ends[0], marked[-1] if marked else ends[0]


def unmarked_length(text: Sequence[int], end: int) -> int:
    """The length up to which the suffixes that end at `end` went unmarked when it was indexed.

    The suffixes fall into classes by where else they ended at the time. Only the LATEST_WALK
    classes of the longest ones were marked.
    """
    seen = range(min(end + 2, len(text)))
    lengths = {common_suffix(text, max(end, e), min(end, e)) for e in seen if e != end} - {0}
    classes = sorted(lengths, reverse=True)
    return classes[LATEST_WALK - 1] if len(classes) >= LATEST_WALK else 0


def copied(text: Sequence[int], begin: int, count: int) -> list[int]:
    """`count` tokens from text[begin] on; past its end the copy copies itself."""
    grown = list(text)
    for i in range(count):
        grown.append(grown[begin + i])
    return grown[len(text) :]


def prompt_lookup(text: Sequence[int], max_ngram: int, num_tokens: int) -> list[int]:
    """What follows the leftmost earlier occurrence of the longest n-gram that ends `text`."""
    size = len(text)
    for ngram in range(min(max_ngram, size - 1), 0, -1):
        for begin in range(size - ngram):
            if text[begin : begin + ngram] == text[size - ngram :]:
                return list(text[begin + ngram : begin + ngram + num_tokens])
    return []


class CopyCursor:
    """Where the output goes on in a text that it copies from, here its own past."""

    WINDOW, PATIENCE, SETTLED, LONGEST, SHORTEST_JUMP = 32, 32, 3, 8, 4

    def __init__(self) -> None:
        self.position = -1
        self.length = 0
        self.parted_at = -1
        self.since = 0

    def advance(self, text: Sequence[int]) -> None:
        """Takes the last token of `text`, an output token."""
        last = len(text) - 1
        length, _, latest = repeated_suffix(text)
        jump = (latest + 1, length) if length >= self.SHORTEST_JUMP else (-1, 0)
        if 0 <= self.position < last and text[self.position] == text[last]:
            unsettled = self.length < self.SETTLED
            self.position, self.length = self.position + 1, self.length + 1
            if unsettled and jump[1] > self.length + self.SETTLED:
                self.position, self.length = jump
            return
        if self.length >= self.SETTLED:
            self.parted_at, self.since = self.position, 0
        self.since += 1
        patient = self.parted_at >= 0 and self.since <= self.PATIENCE
        self.position, self.length = (
            max(self.nearby(text), key=self.preference) if patient else (-1, 0)
        )
        if self.length == 0:
            self.position, self.length = jump
        if self.length == 0 and patient:
            self.position = min(self.parted_at + self.since, last)

    def nearby(self, text: Sequence[int]) -> list[tuple[int, int]]:
        last = len(text) - 1
        first = max(1, self.parted_at - self.WINDOW)
        final = min(last, self.parted_at + self.WINDOW)
        lengths = {
            position: min(self.LONGEST, common_suffix(text, last, position - 1))
            for position in range(first, final + 1)
        }
        return [(-1, 0), *lengths.items()]

    def preference(self, place: tuple[int, int]) -> tuple[int, int, bool]:
        """The longest, of these the nearest, of these the later."""
        position, length = place
        return length, -abs(position - self.parted_at), position > self.parted_at


def drafts(text: Sequence[int], cursor: CopyCursor, lookahead: int) -> list[list[int]]:
    """What the default drafter may draft from a request's own text when every token is free."""
    length, _, latest = repeated_suffix(text)
    begins = [latest + 1] if length else []
    if 0 <= cursor.position < len(text):
        begins.append(cursor.position)
    return [copied(text, begin, lookahead) for begin in begins] or [[]]
