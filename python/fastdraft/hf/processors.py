"""Logits processors and stopping criteria, called at every position of a draft or along its path.

A processor is called with the text so far and the scores of the next token. A step that verifies a
draft has several such positions a row. Where all processors and criteria are transformers' own and
known to be functions of one row's text and scores, each is called for all positions, with the text
followed by the draft tokens that lead there; positions with a text of equal length share a call.
Only positions are asked about that the accepted path may reach next: see `Decoding._follow`.

All others may keep a memory, look at a row's index, or fail at a text that they forbid. If there is
one, they are called as plain decoding calls them: with the whole batch, once for each length of
text, in order. So rows go on together: a step ends at the first mismatch of any row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
)

from fastdraft.errors import InvalidValueError
from fastdraft.hf.device import on_device
from fastdraft.hf.rows import UNLIMITED, Rows
from fastdraft.verification import warp

__all__ = ["PositionCriteria", "PositionProcessors", "Positions", "Warping"]

# These treat each text alike, whichever row of the batch it is, and remember nothing. What a class
# of the caller's reads is not known, whatever it inherits from: types are compared, here and below.
_KNOWN = (
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.ExponentialDecayLengthPenalty,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.MinPLogitsWarper,
    processors.NoBadWordsLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.WatermarkLogitsProcessor,
)


class Positions:
    """Positions in the texts of a step, each with the text before it.

    Args:
        texts: The rows of the batch.
        rows: Those that tokens stand behind, as indices of the batch.
        tails: The tokens behind the text of each.
        counts: How many positions each has: the last one behind its tail, the others before
            its last tokens.

    Attributes:
        rows: The row of each position.
    """

    def __init__(
        self,
        texts: Rows,
        rows: Sequence[int],
        tails: Sequence[Sequence[int]],
        counts: Sequence[int],
    ) -> None:
        starts = texts.lengths(rows)
        ends = np.array(starts) + list(map(len, tails))
        self._texts = np.zeros((len(rows), ends.max()), np.int64)
        for line, row, start, end, tail in zip(self._texts, rows, starts, ends, tails, strict=True):
            line[:start] = texts.text[row, :start]
            line[start:end] = tail
        self._lines = np.repeat(np.arange(len(rows)), counts)
        behind = [np.arange(1 - count, 1) for count in counts]
        self._lengths = ends[self._lines] + np.concatenate(behind)
        self.rows = np.array(rows)[self._lines]

    def ends(self, count: int) -> NDArray[np.int64]:
        """The last tokens before each position, (positions, count), -1 before the text."""
        columns = self._lengths[:, None] + np.arange(-count, 0)
        texts = self._texts[self._lines[:, None], columns.clip(0)]
        return np.where(columns < 0, -1, texts)

    def by_length(
        self, device: torch.device
    ) -> Iterator[tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]]:
        """The positions whose text is equally long, on the host and on the device, and their texts;
        shortest first."""
        members = [np.flatnonzero(self._lengths == each) for each in np.unique(self._lengths)]
        texts = [self._texts[self._lines[own], : self._lengths[own[0]]] for own in members]
        sent = on_device(device, *members, *texts)
        return zip(members, sent[: len(members)], sent[len(members) :], strict=True)


# In the order in which verification applies them, with the names of what they hold.
_WARPERS = {
    processors.TemperatureLogitsWarper: "temperature",
    processors.TopKLogitsWarper: "top_k",
    processors.TopPLogitsWarper: "top_p",
    processors.MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True)
class Warping:
    """The warpers that verification applies itself, while it reads the logits."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def split(cls, processors: LogitsProcessorList) -> tuple[LogitsProcessorList, Warping]:
        """The processors without the last ones that verification applies itself, and these."""
        order = list(_WARPERS)
        start, found = len(processors), dict[str, Any]()
        while start > 0 and type(last := processors[start - 1]) in order and _removes(last):
            kind = type(last)
            found[_WARPERS[kind]] = getattr(last, _WARPERS[kind])
            del order[order.index(kind) :]
            start -= 1
        return LogitsProcessorList(processors[:start]), cls(**found)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores (positions, vocabulary) after the warpers."""
        if self == Warping():
            return scores
        return warp(scores, **self.of_rows(len(scores), scores.device))

    def of_rows(self, rows: int, device: torch.device) -> dict[str, Any]:
        """The options of verification, as tensors (rows,) where they do something."""
        options: dict[str, Any] = {
            "temperature": torch.full((rows,), self.temperature, dtype=torch.float32, device=device)
        }
        if self.top_k:
            options["top_k"] = torch.full((rows,), self.top_k, device=device)
        for name, value, off in (("top_p", self.top_p, 1.0), ("min_p", self.min_p, 0.0)):
            if value != off:
                options[name] = torch.full((rows,), value, dtype=torch.float32, device=device)
        return options


def _removes(warper: Any) -> bool:
    """Says whether a warper gives filtered tokens no probability and keeps only what it must."""
    gives_nothing = getattr(warper, "filter_value", -torch.inf) == -torch.inf
    return gives_nothing and getattr(warper, "min_tokens_to_keep", 1) == 1


class PositionProcessors:
    """The logits processors of a generation.

    Args:
        processors: The processors, in the order in which transformers applies them.

    Attributes:
        all: All of them, to be called as plain decoding calls them.
        along_path: Whether one of them has to be called so.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.all: Any = processors
        self._known = [each for each in processors if type(each) in _KNOWN]
        self.along_path = len(self._known) < len(processors)

    def __bool__(self) -> bool:
        return bool(self.all)

    def at_positions(self, logits: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The scores (positions, vocabulary), float32, after the known processors."""
        scores = torch.empty_like(logits, dtype=torch.float32)
        for members, lines, text in positions.by_length(logits.device):
            rows = positions.rows[members]
            call: Any = LogitsProcessorList(_of_rows(each, rows) for each in self._known)
            # Copies, since processors may write to what they are given.
            scores[lines] = call(text, logits[lines].to(torch.float32))
        return scores


def _of_rows(processor: Any, rows: NDArray[np.int64]) -> Any:
    """The processor for these rows: a repetition penalty may ignore some tokens of each."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    of_rows = copy.copy(processor)
    of_rows.prompt_ignore_length = ignored[rows.tolist()]
    return of_rows


class _NoScores:
    """Stands for the scores that stopping criteria do not get, and says so where one reads them."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InvalidValueError(
            "stopping criteria must not read scores, which speculative decoding does not give them"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __torch_function__ = _refuse


class PositionCriteria:
    """The stopping criteria of a generation, by what they read.

    Attributes:
        max_length: The most tokens of a row, padding included; `None` for no bound.
        eos_ids: The tokens that end a row.
        along_path: Whether one of them has to be called as plain decoding calls it.
        read_text: Whether there are others than these bounds.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.max_length: int | None = None
        self.eos_ids: frozenset[int] = frozenset()
        self._timers: list[MaxTimeCriteria] = []
        self._others: list[StoppingCriteria] = []
        for each in criteria:
            if type(each) is MaxLengthCriteria:
                self.max_length = min(each.max_length, self.max_length or each.max_length)
            elif type(each) is EosTokenCriteria:
                self.eos_ids |= frozenset(each.eos_token_id.reshape(-1).tolist())
            elif type(each) is MaxTimeCriteria:
                self._timers.append(each)
            else:
                self._others.append(each)
        self.along_path = any(type(each) is not StopStringCriteria for each in self._others)
        self.read_text = bool(self._others)

    def out_of_time(self) -> bool:
        if not self._timers:
            return False
        nothing = torch.empty((1, 0), dtype=torch.int64, device="cpu")
        return any(bool(timer(nothing, None)) for timer in self._timers)

    def stop_at(self, tokens: Sequence[int], length: int) -> int:
        """How many of a row's emitted tokens stand when one of them, or the length, ends it; more
        than it has where nothing does.

        Args:
            tokens: The tokens that the row grew by, at least one.
            length: Its length before them, padding included.
        """
        stop = UNLIMITED if self.max_length is None else max(self.max_length - length, 1)
        if self.eos_ids.isdisjoint(tokens):
            return stop
        return min(stop, 1 + next(at for at, token in enumerate(tokens) if token in self.eos_ids))

    def stops(self, positions: Positions, device: torch.device) -> NDArray[np.bool_]:
        """Says whether each position, its text ending with the token just emitted, ends its row."""
        stops = np.zeros(len(positions.rows), bool)
        for members, _, text in positions.by_length(device):
            stops[members] = self.stop_rows(text)
        return stops

    def stop_rows(self, text: torch.Tensor) -> NDArray[np.bool_]:
        """Says whether the criteria that read the text end each row of `text` (rows, length)."""
        stops = np.zeros(len(text), bool)
        for criterion in self._others:
            # Some answer for all rows at once, with a bool or a tensor without dimensions.
            answer: Any = criterion(text, _NoScores())
            ended = torch.as_tensor(answer, device=text.device).expand(len(text))
            stops |= ended.numpy(force=True).astype(bool)
        return stops
