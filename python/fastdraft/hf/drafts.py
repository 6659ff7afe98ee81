"""The drafts of one step: of one row, and of all rows in flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.drafters import Drafts
from fastdraft.errors import InvalidValueError

__all__ = ["FlatDrafts", "RowDraft"]


@dataclass
class RowDraft:
    """What a draft model drafted for one row: a chain.

    Attributes:
        token_ids: The draft tokens.
        probabilities: That each token and all before it are accepted.
        confidences: The model's largest probability at each token's place.
        logits: Where the model sampled, the logits whose softmax each token was drawn from.
        belief: What the model's schedule knows of the draft, a `Belief`.
    """

    token_ids: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    belief: Any = None

    def accepted(self, emitted: Sequence[int]) -> int:
        """How many of the draft tokens were emitted."""
        pairs = zip(self.token_ids, emitted, strict=False)
        count = min(len(self.token_ids), len(emitted))
        return next((at for at, (own, token) in enumerate(pairs) if own != token), count)

    def cut(self, known: int) -> None:
        """Drops the first token from `known` on and all behind it."""
        end = next((at for at, token in enumerate(self.token_ids) if token >= known), None)
        if end is not None:
            for column in (self.token_ids, self.probabilities, self.confidences, self.logits):
                del column[end:]


@dataclass(eq=False)
class FlatDrafts:
    """The drafts of a batch; the arguments are the attributes of `fastdraft.drafters.Drafts`.

    Attributes:
        by_row: The draft tokens of each row.
        longest: The length of the longest draft.
        are_chains: Whether the parent of each draft token is the one before it.
    """

    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    offsets: NDArray[np.int32]
    draft_logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Of so few numbers, lists are made and compared sooner than arrays.
        token_ids = self.token_ids.tolist()
        self.by_row: list[list[int]] = [
            token_ids[start:end] for start, end in pairwise(self.offsets.tolist())
        ]
        self.longest = max(map(len, self.by_row))
        chains = [at for row in self.by_row for at in range(-1, len(row) - 1)]
        self.are_chains = chains == self.parents.tolist()

    @classmethod
    def of_batch(cls, batch: Drafts) -> FlatDrafts:
        """The drafts of any drafter."""
        logits = getattr(batch, "draft_logits", {})
        return cls(batch.token_ids, batch.parents, batch.probabilities, batch.offsets, logits)

    @classmethod
    def of_rows(cls, drafts: Sequence[RowDraft]) -> FlatDrafts:
        """The drafts of rows, one after the other."""

        def flat(column: str, dtype: type) -> NDArray[Any]:
            return np.array([each for draft in drafts for each in getattr(draft, column)], dtype)

        return cls(
            flat("token_ids", np.int32),
            np.array([at - 1 for draft in drafts for at in range(len(draft.token_ids))], np.int32),
            flat("probabilities", np.float32),
            np.cumsum([0, *(len(draft.token_ids) for draft in drafts)], dtype=np.int32),
            {row: torch.stack(draft.logits) for row, draft in enumerate(drafts) if draft.logits},
        )

    def drawn_at(self, depth: int) -> FlatDrafts:
        """Of the drafts that were drawn, the token at this depth alone."""
        at = slice(depth, depth + 1)
        return FlatDrafts.of_rows(
            [
                RowDraft(tokens[at], logits=list(self.draft_logits[row][at]))
                if row in self.draft_logits
                else RowDraft()
                for row, tokens in enumerate(self.by_row)
            ]
        )

    @cached_property
    def counts(self) -> NDArray[np.int32]:
        """The length of each row's draft."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def parents_by_row(self) -> list[list[int]]:
        """The parents of each row's draft tokens."""
        parents = self.parents.tolist()
        return [parents[start:end] for start, end in pairwise(self.offsets.tolist())]

    @cached_property
    def first_lines(self) -> NDArray[np.int64]:
        """The line of logits of each row's last token; those of its draft follow: (rows,)."""
        return self.offsets[:-1].astype(np.int64) + np.arange(len(self.counts))

    def sees(self, width: int) -> NDArray[np.bool_]:
        """Which tokens of a forward see which: a row's last token, its draft, padding.

        Returns:
            (rows, width, width) bool, [b, i, j] where token i sees token j of its row.

        Raises:
            InvalidValueError: A parent does not stand before its child.
        """
        sees = np.tile(np.eye(width, dtype=bool), (len(self.counts), 1, 1))
        for row, parents in zip(sees, self.parents_by_row, strict=True):
            for index, parent in enumerate(parents):
                if not -1 <= parent < index:
                    raise InvalidValueError(
                        "parents must stand before their children, from -1 to "
                        f"{index - 1} for draft token {index}, got {parent}"
                    )
                row[index + 1] |= row[parent + 1]
        return sees

    def child(self, row: int, node: int, token: int) -> int | None:
        """The first child of a row's draft token with this token, as indices within the draft; None
        for none. Those of -1 follow the text."""
        pairs = zip(self.parents_by_row[row], self.by_row[row], strict=True)
        return next((at for at, pair in enumerate(pairs) if pair == (node, token)), None)

    def best_chains(self) -> FlatDrafts:
        """The chain in each draft that promises most accepted tokens.

        A token promises its probability, which is that of its whole path.

        Raises:
            InvalidValueError: A parent does not stand before its child.
        """
        width = self.longest + 1
        sees = self.sees(width)
        places = np.arange(width)
        used = (places > 0) & (places <= self.counts[:, None])  # (rows, width)
        probabilities = np.zeros(used.shape, dtype=np.float64)
        probabilities[used] = self.probabilities
        best = (sees @ probabilities[:, :, None])[:, :, 0].argmax(1)
        chain = sees[np.arange(len(best)), best] & used
        counts = chain.sum(1)
        logits = {row: each[: counts[row]] for row, each in self.draft_logits.items()}
        tokens = chain[used]
        offsets = np.cumsum([0, *counts], dtype=np.int32)
        steps = np.arange(-1, offsets[-1] - 1, dtype=np.int32)
        parents = steps - np.repeat(offsets[:-1], counts)
        return FlatDrafts(
            self.token_ids[tokens], parents, self.probabilities[tokens], offsets, logits
        )
