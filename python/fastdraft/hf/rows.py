"""The rows of a generation: their texts, seeds, predictions, requests and progress."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft import DraftStats
from fastdraft.errors import InvalidValueError
from fastdraft.hf.vocabulary import expected_ids

__all__ = ["UNLIMITED", "Rows", "row_seeds", "row_texts"]

UNLIMITED = int(np.iinfo(np.int32).max)


@dataclass
class Rows:
    """The rows of a generation, in arrays (rows,) of all that are decoded together.

    Attributes:
        text: (rows, columns) int64, the padded prompts and behind them what each row emits; grows.
        columns: Columns of the prompts in the cache, padding included.
        prompt_columns: Those in the text: of prompts given as embeddings there are fewer.
        places: How many tokens the model can place behind each prompt.
        prompt_tokens: Tokens of each prompt, padding not counted.
        seeds: The seed of each row's samples.
        requests: Its id at the drafter.
        emitted: How many tokens it has grown by.
        last: The last of them.
        stats: What its drafts were worth, once it has ended.
        scores: The processed scores that its tokens were chosen from, (tokens, vocabulary) each,
            those of the last step maybe of more tokens than it keeps; when they are kept.
        logits: The same before any processor.
        logprobs: The log-probabilities of its emitted tokens, when they are kept.
        raw_logprobs: The same before any processor.
    """

    text: NDArray[np.int64]
    columns: int
    places: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    seeds: NDArray[np.int64]
    requests: NDArray[np.int64]

    def __post_init__(self) -> None:
        count, self.prompt_columns = self.text.shape
        self.emitted = np.zeros(count, np.int64)
        self.last = np.full(count, -1, np.int64)
        self.stats: list[DraftStats | None] = [None] * count
        self.scores: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self.logits: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self.logprobs = [array("f") for _ in range(count)]
        self.raw_logprobs = [array("f") for _ in range(count)]

    def __len__(self) -> int:
        return len(self.text)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, padding included."""
        lengths: NDArray[np.int64] = self.emitted + self.prompt_columns
        return lengths

    @property
    def cached(self) -> NDArray[np.int64]:
        """The columns of each in the cache: all of its text but the token emitted last."""
        return self.emitted + (self.columns - 1)

    @property
    def room(self) -> NDArray[np.int64]:
        """How many tokens the model can place behind each row's last one."""
        room: NDArray[np.int64] = np.maximum(self.places - self.emitted, 0)
        return room

    def ends(self, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """The last tokens of some rows, (rows, count), -1 for those before the first column."""
        columns = self.lengths[rows, None] + np.arange(-count, 0)
        return np.where(columns < 0, -1, self.text[rows[:, None], columns.clip(0)])

    def write(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int32],
        counts: NDArray[np.int64],
        *,
        behind: int = 0,
    ) -> None:
        """Writes the first `counts` (rows,) of tokens (rows, width) `behind` the ends of some rows,
        which do not grow by it."""
        starts = self.lengths[rows] + behind
        needed = int((starts + counts).max())
        if needed > self.text.shape[1]:
            grown = np.zeros((len(self), 2 * needed), np.int64)
            grown[:, : self.text.shape[1]] = self.text
            self.text = grown
        steps = np.arange(tokens.shape[1])
        kept = steps < counts[:, None]
        self.text[np.repeat(rows, counts), (starts[:, None] + steps)[kept]] = tokens[kept]

    def grow(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int32], counts: NDArray[np.int64]
    ) -> None:
        """Appends the first `counts` (rows,) of tokens (rows, width), each at least 1."""
        self.write(rows, tokens, counts)
        self.last[rows] = tokens[np.arange(len(rows)), counts - 1]
        self.emitted[rows] += counts


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
