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


def longest_draft(text: Sequence[int], lookahead: int) -> list[int]:
    """The default drafter's draft from a request's own text, when every token is free."""
    length, _, latest = repeated_suffix(text)
    return copied(text, latest + 1, lookahead) if length else []
