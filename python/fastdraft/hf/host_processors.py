"""Logits processors on the host: a patch of the logits in numpy, where these are on a CPU.

What the processors touch of a row of logits is little, and a CPU does little work faster in a few
operations than in the many that kernels for all rows and slots at once are made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft.hf.drafts import FlatDrafts

__all__ = ["HostProcessors"]


@dataclass
class _Seen:
    """The different tokens of a text that are penalised.

    Attributes:
        length: How much of the text has been looked at.
        ids: (n,) int64, in any order.
    """

    length: int
    tokens: set[int] = field(default_factory=set)
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


class HostProcessors:
    """What the processors of a generation do, in the order in which they do it.

    Args:
        vocabulary: The number of logits in a row. Other tokens are left out.
        bias: What is added to the logits of tokens.
        penalty: The repetition penalty; `None` for none.
        ignored: The first tokens of each row's text, which are not penalised.
        words: The banned sequences.
        ends: Tokens that are banned from texts shorter than `shortest`.
        shortest: The same.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        bias: dict[int, float],
        penalty: float | None,
        ignored: Sequence[int],
        words: Iterable[Sequence[int]],
        ends: Iterable[int],
        shortest: int,
    ) -> None:
        self._vocabulary = vocabulary
        self._biased = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self._penalty = None if penalty is None else np.float32(penalty)
        self._seen = [_Seen(length) for length in ignored]
        self._ends = [token for token in ends if token < vocabulary]
        self._shortest = shortest
        single: set[int] = set()
        # By their tokens before the last, and these by their number.
        self._longer: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for word in words:
            *before, last = word
            if last >= vocabulary:
                continue
            if before:
                of_length = self._longer.setdefault(len(before), {})
                of_length.setdefault(tuple(before), []).append(last)
            else:
                single.add(last)
        self._single = np.array(sorted(single), np.int64)

    def patch(
        self,
        logits: NDArray[np.float32],
        token_ids: NDArray[np.int64],
        *,
        rows: Sequence[int],
        lengths: Sequence[int],
        drafts: FlatDrafts,
    ) -> None:
        """Applies the processors to the logits (draft tokens + rows, vocabulary), in place.

        The other arguments are those of `Texts`. Linear in the tokens of the texts, for each of the
        logits' rows, and in the square of a draft's length.
        """
        paths = _paths(drafts)
        if len(self._biased):
            logits[:, self._biased] += self._bias
        if self._penalty is not None:
            self._penalise(logits, token_ids, paths, rows=rows, lengths=lengths)
        if len(self._single):
            logits[:, self._single] = -math.inf
        banned: list[tuple[int, int]] = []
        longest = max(self._longer, default=0)
        line = 0
        for row, length, of_row in zip(rows, lengths, paths, strict=True):
            tail: list[int] = token_ids[row, max(length - longest, 0) : length].tolist()
            for path in of_row:
                if length + len(path) < self._shortest:
                    banned += ((line, token) for token in self._ends)
                if longest:
                    text = tail + path
                    for before, words in self._longer.items():
                        # Where the text is shorter, this is, and stands in no table.
                        lasts = words.get(tuple(text[-before:]), ())
                        banned += ((line, token) for token in lasts)
                line += 1
        if banned:
            lines, tokens = zip(*banned, strict=True)
            logits[list(lines), list(tokens)] = -math.inf

    def _penalise(
        self,
        logits: NDArray[np.float32],
        token_ids: NDArray[np.int64],
        paths: Sequence[Sequence[Sequence[int]]],
        *,
        rows: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        line = 0
        new: list[tuple[int, int]] = []  # lines and tokens of drafts that no text has
        for row, length, of_row in zip(rows, lengths, paths, strict=True):
            seen = self._updated(row, token_ids, length)
            end = line + len(of_row)
            self._penalise_at(logits, (slice(line, end), seen.ids))
            for path in of_row:
                others = {token for token in path if token not in seen.tokens}
                new += ((line, token) for token in others if token < self._vocabulary)
                line += 1
        if new:
            lines, tokens = zip(*new, strict=True)
            self._penalise_at(logits, (list(lines), list(tokens)))

    def _penalise_at(self, logits: NDArray[np.float32], index: Any) -> None:
        values = logits[index]
        assert self._penalty is not None
        with np.errstate(over="ignore"):
            logits[index] = np.where(values < 0, values * self._penalty, values / self._penalty)

    def _updated(self, row: int, token_ids: NDArray[np.int64], length: int) -> _Seen:
        """What is penalised of a row's text, after it has grown."""
        seen = self._seen[row]
        if length > seen.length:
            grown = set(token_ids[row, seen.length : length].tolist()) - seen.tokens
            seen.tokens |= grown
            fitting = [token for token in grown if token < self._vocabulary]
            seen.ids = np.concatenate([seen.ids, np.array(fitting, np.int64)])
            seen.length = length
        return seen


def _paths(drafts: FlatDrafts) -> list[list[list[int]]]:
    """The draft tokens that lead to each line of logits, by row."""
    parents = None if drafts.are_chains else drafts.parents.tolist()
    found: list[list[list[int]]] = []
    for tokens, (start, end) in zip(drafts.by_row, pairwise(drafts.offsets.tolist()), strict=True):
        paths: list[list[int]] = [[]]
        places = range(-1, end - start - 1) if parents is None else parents[start:end]
        for token, parent in zip(tokens, places, strict=True):
            paths.append([*paths[parent + 1], token])
        found.append(paths)
    return found
