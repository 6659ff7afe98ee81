"""Lookups beside a draft head of vLLM's: what is learned for the choice between their drafts.

The kernel `align` takes for each row the draft that more tokens are expected of. For that it has to
know how often the head is right at each depth, and which of the two is right where they differ.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdraft._core import DepthAcceptance
from fastdraft.late.alignment import width_beside_head

__all__ = ["BINS", "HeadRecord"]

BINS: Final = 8
"""Bins of the probability of a looked-up token."""

# After as many drafts a count is worth half.
_HALF_LIFE: Final = 512.0
# A guess about a difference, made before any was seen, counts as this many.
_GUESSED: Final = 4.0

Rows = NDArray[np.int64]


class HeadRecord:
    """How often a head's drafts were right, and lookups that differ from them.

    It learns of both whichever was verified, as far as the emitted tokens reach.

    Attributes:
        width: The values that `align` writes for a row between its counts and its last tokens.
    """

    def __init__(self, lookahead: int, slots: int) -> None:
        self._lookahead = lookahead
        self._acceptance = DepthAcceptance(lookahead, half_life=_HALF_LIFE)
        # By bin, of the positions where the drafts first differ: their number, and those where the
        # lookup was right, and the head.
        self._differed: NDArray[np.float64] = np.zeros(BINS)
        self._first: NDArray[np.float64] = np.zeros((2, BINS))
        # By slot, of the step under way: whose text it follows, its length, a bin and two drafts.
        self._numbers: Rows = np.zeros(slots, dtype=np.int64)
        self._lengths: Rows = np.zeros(slots, dtype=np.int64)
        self.width = width_beside_head(lookahead)
        self._drafts: NDArray[np.int32] = np.zeros((slots, self.width), dtype=np.int32)

    def observe(
        self,
        slots: Rows,
        numbers: Rows,
        emitted: Rows,
        lengths: Rows,
        verified: Rows,
        drafts: NDArray[np.int32],
        tails: NDArray[np.int32],
    ) -> None:
        """Learns from what a step emitted, and keeps its drafts until the next one.

        Args:
            slots, numbers: (rows,), where the requests are, and their numbers.
            emitted, lengths: (rows,), the tokens that each emitted, and that its text has then.
            verified: (rows,), how many draft tokens of each the step verified.
            drafts: (rows, width), what `align` has drafted since.
            tails: (rows, n), the last tokens of the texts.
        """
        known = (self._numbers[slots] == numbers) & (self._lengths[slots] == lengths - emitted)
        self._learn(self._drafts[slots][known], emitted[known], verified[known], tails[known])
        self._numbers[slots], self._lengths[slots] = numbers, lengths
        self._drafts[slots] = drafts

    def _learn(
        self, drafts: NDArray[np.int32], emitted: Rows, verified: Rows, tails: NDArray[np.int32]
    ) -> None:
        rows, lookahead = len(drafts), self._lookahead
        bins, head, lookup = np.split(drafts, [1, 1 + lookahead], axis=1)
        depth, width = np.arange(lookahead), tails.shape[1]
        observed = np.take_along_axis(
            tails, np.minimum(width - emitted[:, None] + depth, width - 1), axis=1
        )
        judged = np.minimum(emitted, verified)
        right = np.cumprod((depth < judged[:, None]) & (head == observed), axis=1).sum(axis=1)
        self._acceptance.observe(right, judged)
        reached = depth < np.minimum(right + 1, judged)[:, None]
        # The head's tokens before the first difference are those of the lookup too.
        differ = np.flatnonzero(bins[:, 0] >= 0)
        at = ((lookup != head) & (lookup >= 0))[differ].argmax(axis=1)
        known = reached[differ, at]
        differ, at = differ[known], at[known]
        here = bins[differ, 0]
        decay = 0.5 ** (rows / _HALF_LIFE)
        self._differed = decay * self._differed + np.bincount(here, minlength=BINS)
        for first, draft in zip(self._first, (lookup, head), strict=True):
            first *= decay
            first += np.bincount(here[draft[differ, at] == observed[differ, at]], minlength=BINS)

    def table(self) -> NDArray[np.float32]:
        """`Head.acceptance` and `Head.first`, one after the other: (lookahead + 2 * BINS,)."""
        acceptance = self._acceptance.probabilities()
        # Two independent drafts are never both right where they differ.
        lookup, head = (np.arange(BINS) + 0.5) / BINS, acceptance[0]
        guessed = np.stack([lookup * (1 - head), head * (1 - lookup)]) / (1 - lookup * head)
        first = (self._first + _GUESSED * guessed) / (self._differed + _GUESSED)
        return np.concatenate([acceptance, *first]).astype(np.float32)
