"""The drafts of one step, in the flat arrays in which a drafter hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.drafters import Drafts
from fastdraft.errors import InvalidValueError
from fastdraft.hf.rows import UNLIMITED

__all__ = ["RowDraft", "StepDrafts", "shared_length"]


@dataclass
class RowDraft:
    """A chain that a draft model drafted for one row.

    Attributes:
        token_ids: The draft tokens.
        probabilities: That each token and all before it are accepted.
        confidences: The model's largest probability at each token.
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
        return shared_length(self.token_ids, emitted)

    def cut(self, known: int) -> None:
        """Drops the first token from `known` on and all behind it."""
        end = next((at for at, token in enumerate(self.token_ids) if token >= known), None)
        if end is not None:
            for column in (self.token_ids, self.probabilities, self.confidences, self.logits):
                del column[end:]


@dataclass(eq=False)
class StepDrafts:
    """The drafts of a batch; the arguments are the attributes of `fastdraft.drafters.Drafts`.

    A row's *node* is the index of a token in its draft, -1 for the text's last token.

    Attributes:
        counts: The length of each row's draft.
        longest: That of the longest.
        are_chains: Whether the parent of each draft token is the one before it.
    """

    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    offsets: NDArray[np.int32]
    draft_logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = [end - start for start, end in pairwise(self.offsets.tolist())]
        self.longest = max(self.counts)
        chains = [parent for count in self.counts for parent in range(-1, count - 1)]
        self.are_chains = bool(self.parents.tolist() == chains)

    @classmethod
    def of(cls, batch: Drafts) -> StepDrafts:
        """The drafts of any drafter."""
        if not len(batch.token_ids):
            return cls.nothing(len(batch.offsets) - 1)
        logits = getattr(batch, "draft_logits", {})
        return cls(batch.token_ids, batch.parents, batch.probabilities, batch.offsets, logits)

    @classmethod
    @lru_cache(maxsize=64)
    def nothing(cls, rows: int) -> StepDrafts:
        """No draft token for any of these rows: the same object each time."""
        return cls.of_chains([0] * rows)

    @classmethod
    def of_chains(
        cls,
        counts: Sequence[int],
        token_ids: Any = (),
        probabilities: Any = (),
        draft_logits: dict[int, torch.Tensor] | None = None,
    ) -> StepDrafts:
        """Chains of `counts` tokens each, one row's after the other."""
        offsets = np.array([0, *accumulate(counts)], np.int32)
        return cls(
            np.asarray(token_ids, np.int32),
            _steps(offsets) - 1,
            np.asarray(probabilities, np.float32),
            offsets,
            draft_logits or {},
        )

    @classmethod
    def of_rows(cls, drafts: Sequence[RowDraft]) -> StepDrafts:
        """The drafts of rows, one after the other."""
        return cls.of_chains(
            [len(draft.token_ids) for draft in drafts],
            [token for draft in drafts for token in draft.token_ids],
            [each for draft in drafts for each in draft.probabilities],
            {row: torch.stack(draft.logits) for row, draft in enumerate(drafts) if draft.logits},
        )

    @cached_property
    def first_lines(self) -> list[int]:
        """The line of logits of each row's last token; those of its draft follow."""
        return [start + row for row, start in enumerate(self.offsets[:-1].tolist())]

    def tolist(self) -> list[list[int]]:
        """The draft tokens of each row."""
        token_ids = self.token_ids.tolist()
        return [token_ids[start:end] for start, end in pairwise(self.offsets.tolist())]

    def sees(self, width: int) -> NDArray[np.bool_]:
        """Which tokens of a forward see which: a row's last token, its draft, padding.

        Returns:
            (rows, width, width) bool, [b, i, j] where token i sees token j of its row.

        Raises:
            InvalidValueError: A parent does not stand before its child.
        """
        self._require_order()
        counts = np.array(self.counts)
        sees = np.tile(np.eye(width, dtype=bool), (len(counts), 1, 1))
        for node in range(self.longest):
            (rows,) = np.nonzero(counts > node)
            sees[rows, node + 1] |= sees[rows, self.parents[self.offsets[rows] + node] + 1]
        return sees

    def _require_order(self) -> None:
        """Refuses a parent that does not stand before its child."""
        steps = _steps(self.offsets)
        wrong = (self.parents < -1) | (self.parents >= steps)
        if wrong.any():
            at = int(wrong.argmax())
            raise InvalidValueError(
                f"parents must stand before their children, from -1 to {steps[at] - 1} for draft "
                f"token {steps[at]}, got {self.parents[at]}"
            )

    def contexts(self, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """The two tokens before each line of logits, (lines, 2), given the last (rows, 2) of the
        texts."""
        firsts = np.array(self.first_lines)
        contexts = np.empty((len(firsts) + len(self.token_ids), 2), np.int64)
        contexts[firsts] = ends
        drafted = np.ones(len(contexts), bool)
        drafted[firsts] = False
        contexts[drafted, 1] = self.token_ids
        parents = np.repeat(firsts, self.counts) + 1 + self.parents
        contexts[drafted, 0] = contexts[parents, 1]
        return contexts

    def child(self, row: int, node: int, token: int) -> int | None:
        """The child of a row's node that is this token; None for none."""
        own = slice(self.offsets[row], self.offsets[row + 1])
        (found,) = np.nonzero((self.parents[own] == node) & (self.token_ids[own] == token))
        return int(found[0]) if len(found) else None

    def chain(self, row: int, node: int, size: int) -> list[int]:
        """A row's node and those that most probably follow it, `size` or fewer."""
        own = slice(self.offsets[row], self.offsets[row + 1])
        if self.are_chains:
            return list(range(node, min(node + size, self.counts[row])))
        chain = [node]
        while len(chain) < size:
            (children,) = np.nonzero(self.parents[own] == chain[-1])
            if not len(children):
                break
            best = self.probabilities[own][children].argmax()
            chain.append(int(children[best]))
        return chain

    def block(
        self, rows: Sequence[int], nodes: Sequence[int], size: int
    ) -> tuple[list[list[int]], list[int], StepDrafts]:
        """The chain of one node of each of these rows, as `chain` has it; the lines of logits of
        all chains; and the drafts behind the nodes."""
        chains = [self.chain(row, node, size) for row, node in zip(rows, nodes, strict=True)]
        firsts = [self.first_lines[row] + 1 for row in rows]
        lines = [first + node for first, own in zip(firsts, chains, strict=True) for node in own]
        return chains, lines, self.along(rows, [own[1:] for own in chains])

    def along(self, rows: Sequence[int], nodes: Sequence[Sequence[int]]) -> StepDrafts:
        """Chains of some rows' nodes."""
        flat = [
            int(self.offsets[row]) + node
            for row, own in zip(rows, nodes, strict=True)
            for node in own
        ]
        logits = {
            at: self.draft_logits[row][list(own)]
            for at, (row, own) in enumerate(zip(rows, nodes, strict=True))
            if own and row in self.draft_logits
        }
        counts = list(map(len, nodes))
        return StepDrafts.of_chains(counts, self.token_ids[flat], self.probabilities[flat], logits)

    def best_chains(self) -> StepDrafts:
        """The chain in each draft that goes on with the most probable child.

        Raises:
            InvalidValueError: A parent does not stand before its child.
        """
        self._require_order()
        rows = range(len(self.counts))
        return self.along(rows, [self.chain(row, -1, UNLIMITED)[1:] for row in rows])


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts share at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (own, token) in pairs if own != token), min(len(one), len(other)))


def _steps(offsets: NDArray[np.int32]) -> NDArray[np.int32]:
    """0, 1, 2, ... within each row."""
    steps: NDArray[np.int32] = np.arange(offsets[-1], dtype=np.int32)
    return steps - np.repeat(offsets[:-1], offsets[1:] - offsets[:-1])
