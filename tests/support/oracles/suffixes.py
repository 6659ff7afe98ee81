"""The positions where the ends of texts occur in them."""

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
    marked = [end for end in ends if is_marked(text, end, length)]
    return length, ends[0], marked[-1] if marked else ends[0]


def is_marked(text: Sequence[int], end: int, length: int) -> bool:
    """True if the suffix of `length` tokens that ends at `end` was marked when it was indexed.

    The suffixes fall into classes by where else they ended at the time. Only the LATEST_WALK
    classes of the longest ones were marked, the first of which is the whole text's, and the class
    of the last token alone.
    """
    seen = range(min(end + 2, len(text)))
    lengths = {common_suffix(text, max(end, e), min(end, e)) for e in seen if e != end}
    classes = sorted(lengths - {0, end + 1}, reverse=True)
    return len(classes) < LATEST_WALK or length > classes[LATEST_WALK - 1] or length <= classes[-1]


def alike(text: Sequence[int], other: Sequence[int]) -> int:
    """How many of the last tokens of two texts are alike."""
    pairs = zip(reversed(text), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))


def copied(text: Sequence[int], begin: int, count: int) -> list[int]:
    """`count` tokens from text[begin] on; past its end the copy copies itself."""
    grown = list(text)
    for i in range(count):
        grown.append(grown[begin + i])
    return grown[len(text) :]
