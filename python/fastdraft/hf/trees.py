"""Drafts that are trees: where their tokens stand in a forward, and the best chain in each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.drafters import Drafts
from fastdraft.verification import tree_attention_mask

__all__ = ["TreeLayout", "are_chains", "best_chains"]


@dataclass(frozen=True)
class TreeLayout:
    """How the tokens of a forward stand to each other: each row's last token, its draft, padding.

    Attributes:
        depths: (rows, width) int64, how far each stands behind the row's last token in the text.
        sees: (rows, width, width) bool, [b, i, j] where token i sees token j of its row.

    Both are on the CPU.
    """

    depths: torch.Tensor
    sees: torch.Tensor

    @classmethod
    def of(
        cls, parents: NDArray[np.int32], offsets: NDArray[np.int32], *, width: int
    ) -> TreeLayout:
        """The layout of the drafts in a forward over `width` tokens a row.

        Args:
            parents: The parent of each draft token, an index within its row's draft or -1.
            offsets: Where each row's draft begins, of length rows + 1.

        Raises:
            InvalidValueError: A parent does not stand before its child.
        """
        # Copies, since a drafter may hand out read-only arrays.
        sees = tree_attention_mask(
            torch.tensor(parents, device="cpu"),
            torch.tensor(offsets, device="cpu"),
            max_draft=width - 1,
        )
        return cls(depths=sees.sum(-1) - 1, sees=sees)


def are_chains(parents: NDArray[np.int32], offsets: NDArray[np.int32]) -> bool:
    """Whether the parent of each draft token is the one before it."""
    first = np.repeat(offsets[:-1], np.diff(offsets))
    return np.array_equal(parents, np.arange(-1, len(parents) - 1) - first)


def best_chains(batch: Drafts) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The chain in each draft that promises most accepted tokens: its tokens, flat, and offsets.

    A token promises its probability, which is that of its whole path.

    Raises:
        InvalidValueError: A parent does not stand before its child.
    """
    drafted = np.diff(batch.offsets)
    width = int(drafted.max()) + 1
    sees = TreeLayout.of(batch.parents, batch.offsets, width=width).sees.numpy()
    places = np.arange(width)
    used = (places > 0) & (places <= drafted[:, None])  # (rows, width)
    token_ids = np.zeros(used.shape, dtype=np.int32)
    probabilities = np.zeros(used.shape, dtype=np.float64)
    token_ids[used], probabilities[used] = batch.token_ids, batch.probabilities
    best = (sees @ probabilities[:, :, None])[:, :, 0].argmax(1)
    chain = sees[np.arange(len(best)), best] & used
    offsets = np.zeros(len(batch.offsets), dtype=np.int32)
    np.cumsum(chain.sum(1), out=offsets[1:])
    return token_ids[chain], offsets
