"""Successors: what the target's logits said may come next, to draft from."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fastdraft import _core
from fastdraft.errors import InvalidValueError
from fastdraft.offers import Offers

__all__ = ["Successors"]


class Successors(_core.Successors):
    """The likeliest next tokens at the positions that the target has seen lately.

    A verification computes logits for each token of a draft, rejected ones too. `learn` keeps the
    likeliest tokens of each; where a text comes to such tokens again, `offers` makes a tree of them
    for `Engine.propose_batch`, together with the runners-up of the text's last position. Useful for
    drafts that are trees, where a draft token costs little.

    After Token Recycling (Luo et al., 2024, arXiv:2408.08696) and LogitSpec (Liu et al., 2025,
    arXiv:2507.01449).

    Requests share what they learn from: give requests that must not see each other one each.
    Calls from several threads take turns.

    Args:
        slots: Contexts that the table has room for, rounded up to a power of two; each takes 72
            bytes. Newer contexts push out older ones.

    Raises:
        InvalidValueError: `slots` is below 1 or above 2**24.
    """

    def __init__(self, *, slots: int = 32768) -> None:
        super().__init__(slots=slots)

    def learn(self, contexts: ArrayLike, token_ids: ArrayLike, probabilities: ArrayLike) -> None:
        """Learns what may follow. Of equal contexts the last row counts.

        Args:
            contexts: (rows, 2) integers, the last two tokens at a position; -1 for one that does
                not exist.
            token_ids: (rows, n) integers, n at most 8: tokens that may follow, different ones in
                each row; a negative one ends its row.
            probabilities: (rows, n), how likely each is, from 0 to 1.

        Raises:
            InvalidValueError: A shape, id or probability is wrong. Nothing is learned then.
        """
        contexts, token_ids = _rows(contexts, "contexts", 2), _rows(token_ids, "token_ids")
        probabilities = np.asarray(probabilities, np.float32)
        if not len(contexts) == len(token_ids) or token_ids.shape != probabilities.shape:
            raise InvalidValueError(
                "token_ids and probabilities must have one shape, with a row for each of "
                f"{len(contexts)} contexts, got {token_ids.shape} and {probabilities.shape}"
            )
        self._learn(contexts.ravel(), token_ids.ravel(), probabilities.ravel())

    def offers(self, ends: ArrayLike, *, kind: str = "successors") -> Offers:
        """What may follow texts, a tree of at most 48 tokens for each: about 10 us.

        Args:
            ends: (rows, 3) integers, the last three tokens of each text; -1 for one that does not
                exist. A row whose last one is -1 gets no tree.
            kind: Of the offers.

        Raises:
            InvalidValueError: `ends` has another shape or ids below -1.
        """
        token_ids, offsets, parents, confidences = self._trees(_rows(ends, "ends", 3).ravel())
        return Offers(kind, token_ids, offsets, parents, confidences)


def _rows(values: ArrayLike, what: str, columns: int | None = None) -> np.ndarray:
    rows = np.asarray(values)
    if rows.ndim != 2 or rows.shape[1] != (columns or rows.shape[1]):
        wide = "" if columns is None else f" of {columns} tokens"
        raise InvalidValueError(f"{what} must be rows{wide}, got shape {rows.shape}")
    return rows
