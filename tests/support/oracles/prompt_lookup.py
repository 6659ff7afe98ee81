"""Prompt lookup: what follows the leftmost earlier occurrence."""

from __future__ import annotations

from collections.abc import Sequence


def prompt_lookup(text: Sequence[int], max_ngram: int, num_tokens: int) -> list[int]:
    """The tokens behind the leftmost earlier occurrence of the longest n-gram that ends `text`."""
    size = len(text)
    for ngram in range(min(max_ngram, size - 1), 0, -1):
        for begin in range(size - ngram):
            if text[begin : begin + ngram] == text[size - ngram :]:
                return list(text[begin + ngram : begin + ngram + num_tokens])
    return []
