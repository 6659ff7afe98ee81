"""The rows of a generation: their texts, seeds, predictions, requests and progress."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
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
    """The rows of a generation: lists with an entry for each of all that are decoded together.

    Lists, since most generations have one row, whose few numbers are dear in arrays.

    Attributes:
        text: (rows, columns) int64, the padded prompts and behind them what each row emits; grows.
        columns: Columns of the prompts in the cache, padding included.
        prompt_columns: Those in the text: of prompts given as embeddings there are fewer.
        positions: How many positions the model has behind each prompt.
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
    positions: list[int]
    prompt_tokens: list[int]
    seeds: list[int]
    requests: list[int]

    def __post_init__(self) -> None:
        count, self.prompt_columns = self.text.shape
        self.emitted = [0] * count
        self.last = [-1] * count
        self.stats: list[DraftStats | None] = [None] * count
        self.scores: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self.logits: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self.logprobs = [array("f") for _ in range(count)]
        self.raw_logprobs = [array("f") for _ in range(count)]

    def __len__(self) -> int:
        return len(self.text)

    def lengths(self, rows: Iterable[int]) -> list[int]:
        """Tokens of some rows, padding included."""
        return [self.emitted[row] + self.prompt_columns for row in rows]

    def position(self, row: int) -> int:
        """The position of a row's next token, padding not counted."""
        return self.prompt_tokens[row] + self.emitted[row]

    def draws(self, rows: Iterable[int], depths: Iterable[int]) -> list[tuple[int, int]]:
        """The seed of some rows, and the position of the token behind `depths` further ones."""
        pairs = zip(rows, depths, strict=True)
        return [(self.seeds[row], self.position(row) + depth) for row, depth in pairs]

    def cached(self, rows: Iterable[int]) -> list[int]:
        """The columns of some rows in the cache: all of the text but the token emitted last."""
        return [self.emitted[row] + self.columns - 1 for row in rows]

    def room(self, rows: Iterable[int]) -> list[int]:
        """How many positions the model has behind the last token of some rows."""
        return [max(self.positions[row] - self.emitted[row], 0) for row in rows]

    def ends(self, rows: Sequence[int], count: int) -> NDArray[np.int64]:
        """The last tokens of some rows, (rows, count), -1 for those before the first column."""
        columns = np.array(self.lengths(rows))[:, None] + np.arange(-count, 0)
        return np.where(columns < 0, -1, self.text[np.array(rows)[:, None], columns.clip(0)])

    def write(self, row: int, tokens: Sequence[int], *, behind: int = 0) -> None:
        """Writes tokens `behind` the end of a row, which does not grow by it."""
        start = self.emitted[row] + self.prompt_columns + behind
        end = start + len(tokens)
        if end > self.text.shape[1]:
            grown = np.zeros((len(self), 2 * end), np.int64)
            grown[:, : self.text.shape[1]] = self.text
            self.text = grown
        self.text[row, start:end] = tokens

    def grow(self, row: int, tokens: Sequence[int]) -> None:
        """Appends tokens, at least one."""
        self.write(row, tokens)
        self.last[row] = tokens[-1]
        self.emitted[row] += len(tokens)


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
    """The part of argument `what` for each row, checked; each request has `copies` rows."""
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
