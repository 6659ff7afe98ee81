"""Guesses from outside: what a neural drafter or any other one offers the engine to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from numpy.typing import ArrayLike

__all__ = ["Offers"]


@dataclass(frozen=True, eq=False)
class Offers:
    """What a drafter of one kind guesses for the next step of each row of a batch.

    Row r's tokens are token_ids[offsets[r]:offsets[r + 1]], a chain or a tree, 1,024 at most. A row
    without tokens has no offer. The engine weighs them with its own evidence: how much more likely
    a token becomes that is offered, and how much less another one, is learned for each kind from
    what the target emits.

    Attributes:
        kind: The drafter's name, such as "eagle".
        token_ids: The tokens of all rows, one row after another.
        offsets: Where each row begins, and the end of the last: one more than rows. By default all
            tokens are one row.
        parents: For each token the index of its parent in the row, before its own; -1 for the
            last token of the request's text. By default each row is a chain.
        confidences: How sure the drafter is of each token where those before it are right, from 0
            to 1, such as its probability. They need not be calibrated. By default it does not say.
        time: What making the offers took, for all rows together: in the unit of the cost curve, or
            with a constant token cost as a fraction of a step without drafts.
        drawn: Whether each token was drawn at random from the drafter's distribution, to be
            verified against it by `verify_rejection`. A row with such an offer, a chain, drafts
            just that: to choose among drawn tokens, or to cut them by what they are, would bias the
            output. So ask `wants` first.
    """

    kind: str
    token_ids: ArrayLike
    offsets: ArrayLike | None = None
    parents: ArrayLike | None = None
    confidences: ArrayLike | None = None
    time: float = 0.0
    drawn: bool = False

    def __post_init__(self) -> None:
        if self.offsets is None:
            object.__setattr__(self, "offsets", [0, len(self.token_ids)])  # type: ignore[arg-type]

    @classmethod
    def of_rows(
        cls,
        kind: str,
        rows: Sequence[Sequence[int]],
        *,
        parents: Sequence[Sequence[int]] | None = None,
        confidences: Sequence[Sequence[float]] | None = None,
        time: float = 0.0,
        drawn: bool = False,
    ) -> Offers:
        """The same from a list for each row."""
        return cls(
            kind,
            [token for row in rows for token in row],
            list(accumulate(map(len, rows), initial=0)),
            None if parents is None else [parent for row in parents for parent in row],
            None if confidences is None else [each for row in confidences for each in row],
            time,
            drawn,
        )
