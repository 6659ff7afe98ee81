"""Guesses that stay useful while the text goes on: trees, in arrays of the caller's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Continuations"]


@dataclass(frozen=True, slots=True, eq=False)
class Continuations:
    """Likely continuations of each row of a batch: a tree, computed from the row's text.

    `Engine.continue_batch` writes to the arrays, so they may lie in any memory, such as
    pinned memory that a device copies from. All are C-contiguous.

    Attributes:
        base: (rows,) int32: the length of the text that the row's tree follows, prompt and output.
        count: (rows,) int32: the row's nodes; 0 where nothing is expected. What lies behind them
            has no meaning.
        token_ids: (rows, nodes) int32.
        parents: (rows, nodes) int32: the index of each node's parent in its row; -1 for a node that
            follows the text. A parent stands before its children; siblings have different tokens.
        probabilities: (rows, nodes) float32: that the target emits the whole path to the node. They
            fall along the row.
    """

    base: NDArray[np.int32]
    count: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]

    @classmethod
    def allocate(cls, rows: int, nodes: int) -> Continuations:
        """Makes empty ones in ordinary memory."""
        return cls(
            np.zeros(rows, np.int32),
            np.zeros(rows, np.int32),
            np.zeros((rows, nodes), np.int32),
            np.zeros((rows, nodes), np.int32),
            np.zeros((rows, nodes), np.float32),
        )
