"""The rows of a generation: their seeds, predictions, requests and progress."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft import DraftStats
from fastdraft.drafters import Drafter
from fastdraft.errors import InvalidValueError
from fastdraft.hf.vocabulary import expected_ids

__all__ = ["UNLIMITED", "Row", "cancelling", "row_seeds", "row_texts"]

UNLIMITED = int(np.iinfo(np.int32).max)


@dataclass
class Row:
    """One row of the batch.

    Attributes:
        index: Its place in the batch that the caller passed.
        columns: Columns of its prompt in the cache, padding included.
        places: How many tokens the model can place behind the prompt.
        prompt_tokens: Tokens of its prompt, padding not counted.
        seed: The seed of its samples.
        request: Its id at the drafter; -1 before it has one.
        emitted: How many tokens it has grown by.
        last_token: The last of them.
        stats: What its drafts were worth, once it has ended.
        scores: The processed scores that its tokens were chosen from, (tokens, vocabulary) each,
            those of the last step maybe of more tokens than it keeps; when they are kept.
        logits: The same before any processor.
        logprobs: The log-probabilities of its emitted tokens, when they are kept.
        raw_logprobs: The same before any processor.
    """

    index: int
    columns: int
    places: int
    prompt_tokens: int
    seed: int
    request: int = -1
    emitted: int = 0
    last_token: int = -1
    stats: DraftStats | None = None
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    raw_logprobs: array[float] = field(default_factory=lambda: array("f"))

    @property
    def cached(self) -> int:
        """Its columns in the cache: all of its text but the token emitted last."""
        return self.columns + self.emitted - 1

    @property
    def room(self) -> int:
        """How many tokens the model can place behind the last one."""
        return max(self.places - self.emitted, 0)


@contextlib.contextmanager
def cancelling(drafter: Drafter) -> Iterator[list[Row]]:
    """Gives a list for the rows of a generation, and leaves no request of theirs at the drafter.

    Whatever is raised, an interrupt too, the requests of rows that have not ended are cancelled.
    The caller hears of that error, not of one that the drafter raises then.
    """
    rows: list[Row] = []
    try:
        yield rows
    finally:
        for row in rows:
            if row.stats is None and row.request >= 0:
                with contextlib.suppress(Exception):
                    drafter.cancel(row.request)


def row_seeds(
    seed: int | Sequence[int] | None, generator: torch.Generator | None, rows: int
) -> list[int]:
    """The seed of each row; drawn from the generator where none is given."""
    if seed is None:
        device = "cpu" if generator is None else generator.device
        drawn = torch.randint(2**63 - 1, (rows,), generator=generator, device=device)
        return list(drawn.tolist())
    if isinstance(seed, (int, np.integer)):
        return [(_checked_seed(seed) + row) % 2**63 for row in range(rows)]
    if len(seed) != rows:
        raise InvalidValueError(f"seed must hold one seed for each of {rows} rows, got {len(seed)}")
    return [_checked_seed(each) for each in seed]


def _checked_seed(seed: Any) -> int:
    if not 0 <= int(seed) < 2**63:
        raise InvalidValueError(f"seed must be from 0 to 2**63 - 1, got {seed}")
    return int(seed)


def row_texts(
    what: str, given: Any, rows: int, copies: int, model: Any
) -> list[NDArray[np.int64] | None]:
    """What the argument `what` gives each row, checked; each request has `copies` rows."""
    if given is None:
        return [None] * rows
    if isinstance(given, torch.Tensor):
        given = given.numpy(force=True)
    requests = rows // copies
    if isinstance(given, np.ndarray):
        single = given.ndim == 1
    else:
        single = not given or isinstance(given[0], (int, np.integer))
    of_requests = [given] * requests if single else list(given)
    if len(of_requests) != requests:
        raise InvalidValueError(
            f"{what} must be one sequence for all or one for each of {requests} rows, "
            f"got {len(of_requests)}"
        )
    checked = [None if ids is None else expected_ids(ids, model, what) for ids in of_requests]
    return [ids for ids in checked for _ in range(copies)]
