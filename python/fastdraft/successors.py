"""Successors: what the target's logits said may come next, to draft from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from fastdraft import _core
from fastdraft.errors import InvalidValueError
from fastdraft.offers import Offers

__all__ = ["Successors"]

_NODES = 48  # the most of a tree


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
        self._learn(*_learned(contexts, token_ids, probabilities))

    @staticmethod
    def learn_each(
        tables: Iterable[Successors],
        offsets: ArrayLike,
        contexts: ArrayLike,
        token_ids: ArrayLike,
        probabilities: ArrayLike,
    ) -> None:
        """The same for several tables in one call, without the GIL.

        Args:
            tables: One for each request, for example.
            offsets: Table i learns rows offsets[i] to offsets[i + 1] - 1 of the arrays: integers,
                one more than tables, that rise from 0 to the number of rows.
            contexts: As in `learn`.
            token_ids: As in `learn`.
            probabilities: As in `learn`.

        Raises:
            InvalidValueError: A shape, offset, id or probability is wrong. Nothing is learned then.
        """
        learned = _learned(contexts, token_ids, probabilities)
        _core.Successors._learn_each(tuple(tables), offsets, *learned)

    def offers(self, ends: ArrayLike, *, nodes: int = _NODES, kind: str = "successors") -> Offers:
        """What may follow texts, a tree for each: about 10 us.

        Args:
            ends: (rows, 3) integers, the last three tokens of each text; -1 for one that does not
                exist. A row whose last one is -1 gets no tree.
            nodes: The most tokens of a tree, 1 to 48: the first ones on the most probable paths.
            kind: Of the offers.

        Raises:
            InvalidValueError: `ends` has another shape or ids below -1, or `nodes` is out of range.
        """
        return Offers(kind, *self._trees(_rows(ends, "ends", 3).ravel(), nodes))

    @staticmethod
    def offers_each(
        tables: Iterable[Successors],
        ends: ArrayLike,
        *,
        nodes: int = _NODES,
        kind: str = "successors",
    ) -> Offers:
        """The same from a table for each row, in one call without the GIL.

        Raises:
            InvalidValueError: As `offers`, or there is not one table for each row.
        """
        ends = _rows(ends, "ends", 3).ravel()
        return Offers(kind, *_core.Successors._trees_each(tuple(tables), ends, nodes))


def _learned(
    contexts: ArrayLike, token_ids: ArrayLike, probabilities: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What contexts are followed by, checked and flat."""
    contexts, token_ids = _rows(contexts, "contexts", 2), _rows(token_ids, "token_ids")
    probabilities = np.asarray(probabilities, np.float32)
    if not len(contexts) == len(token_ids) or token_ids.shape != probabilities.shape:
        raise InvalidValueError(
            "token_ids and probabilities must have one shape, with a row for each of "
            f"{len(contexts)} contexts, got {token_ids.shape} and {probabilities.shape}"
        )
    return contexts.ravel(), token_ids.ravel(), probabilities.ravel()


def _rows(values: ArrayLike, what: str, columns: int | None = None) -> np.ndarray:
    rows = np.asarray(values)
    if rows.ndim != 2 or rows.shape[1] != (columns or rows.shape[1]):
        wide = "" if columns is None else f" of {columns} tokens"
        raise InvalidValueError(f"{what} must be rows{wide}, got shape {rows.shape}")
    return rows
