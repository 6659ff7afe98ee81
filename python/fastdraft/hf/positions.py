"""Logits processors and stopping criteria, at every position of a draft.

The usual processors are applied by verification itself, see `fastdraft.hf.fused_processors`; the
others are called. A processor of transformers is called with the text so far and the scores of the
next token. A step that verifies a draft has several such positions a row, so each processor sees,
for each of them, the text followed by the draft tokens that lead there, as it would in plain
decoding. Positions with a text of equal length share a call. Processors and criteria must be
functions of what they are called with; one that remembers its earlier calls would take the drafts
that were rejected for text.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
)

from fastdraft.errors import InvalidValueError
from fastdraft.hf.fused_processors import FusedProcessors, Texts
from fastdraft.hf.grammar import Grammar, texts_of_step
from fastdraft.hf.kv_cache import on_device
from fastdraft.kernels import reference
from fastdraft.kernels.operands import Warpers

__all__ = ["PositionCriteria", "PositionProcessors", "Positions", "Warping"]

# These read the scores alone, so one call takes all positions. What a class of the caller's reads
# is not known, whatever it inherits from: types are compared, here and below.
_WITHOUT_TEXT = (
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
    processors.MinPLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TypicalLogitsWarper,
)
# These run a second model or keep a history from call to call.
_WITH_MEMORY = (
    processors.SynthIDTextWatermarkLogitsProcessor,
    processors.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
# These treat each text alike, whichever row of the batch it is.
_WITHOUT_ROW_INDEX = (
    *_WITHOUT_TEXT,
    processors.ExponentialDecayLengthPenalty,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.WatermarkLogitsProcessor,
)


@dataclass(frozen=True)
class Positions:
    """The positions of one step: for each, its row and the text before it.

    Attributes:
        text: (lines, columns) int64, padded prompts with output and draft.
        rows: The row of each position, an index of the batch.
        lengths: The number of tokens before each position, padding included.
        lines: The line of `text` that begins with them; `None` where lines are rows.
        batch: The number of rows in the batch.
    """

    text: torch.Tensor
    rows: Sequence[int]
    lengths: Sequence[int]
    batch: int
    lines: Sequence[int] | None = None

    def texts(self) -> Iterator[tuple[int, list[int]]]:
        """For each position its row, and the text before it; waits for the device."""
        text = self.text.tolist()
        line_of = self.rows if self.lines is None else self.lines
        for row, line, length in zip(self.rows, line_of, self.lengths, strict=True):
            yield row, text[line][:length]

    def by_length(self, *, in_place: bool) -> list[tuple[list[int], list[int], torch.Tensor]]:
        """Groups the positions whose text is equally long, shortest first.

        Args:
            in_place: Whether each row of the batch must stand at its own index; the rows that have
                no position of this length then hold a copy of one that has, and the positions of
                one row, as a tree has them, go to groups of their own.

        Returns:
            For each group its positions, the index of each within the text of the group, and that
            text.
        """
        line_of = self.rows if self.lines is None else self.lines
        members: dict[tuple[int, int], list[int]] = {}
        turns: Counter[tuple[int, int]] = Counter()
        for position, at in enumerate(zip(self.rows, self.lengths, strict=True)):
            members.setdefault((at[1], turns[at]), []).append(position)
            turns[at] += in_place
        groups = []
        for length, turn in sorted(members):
            positions = members[length, turn]
            lines = [line_of[position] for position in positions]
            if in_place and self.batch > 1:
                rows = [self.rows[position] for position in positions]
                line_of_row = [lines[0]] * self.batch
                for row, line in zip(rows, lines, strict=True):
                    line_of_row[row] = line
                groups.append((positions, rows, self._lines(line_of_row, length)))
            else:
                groups.append((positions, list(range(len(lines))), self._lines(lines, length)))
        return groups

    def _lines(self, lines: list[int], length: int) -> torch.Tensor:
        """The first tokens of some lines of text."""
        if len(lines) == 1:
            return self.text[lines[0] : lines[0] + 1, :length]
        # An index of the host's would be copied while the host waits.
        (index,) = on_device(self.text.device, np.array(lines))
        return self.text[index, :length]


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
        return reference.warp(scores, self.of_lines(len(scores), scores.device))

    def of_lines(self, lines: int, device: torch.device) -> Warpers:
        """The operands of verification for so many lines of scores."""

        def each(value: float, off: float, dtype: torch.dtype) -> torch.Tensor | None:
            if value == off:
                return None
            return torch.full((lines,), value, dtype=dtype, device=device)

        return Warpers(
            torch.full((lines,), self.temperature, dtype=torch.float32, device=device),
            each(self.top_k, 0, torch.int64),
            each(self.top_p, 1.0, torch.float32),
            each(self.min_p, 0.0, torch.float32),
        )


def _removes(warper: Any) -> bool:
    """Whether a warper gives what it filters no probability, and keeps no more than it must."""
    gives_nothing = getattr(warper, "filter_value", -torch.inf) == -torch.inf
    return gives_nothing and getattr(warper, "min_tokens_to_keep", 1) == 1


@dataclass(frozen=True)
class _Run:
    """Neighbouring processors that are applied together: as `fused` does it, or by being called.

    A grammar is one of its own.
    """

    processors: LogitsProcessorList
    fused: FusedProcessors | None = None
    grammar: Grammar | None = None

    @property
    def reads_text(self) -> bool:
        return any(type(each) not in _WITHOUT_TEXT for each in self.processors)

    @property
    def in_place(self) -> bool:
        """Whether each row of the batch must stand at its own index."""
        return any(not _ignores_row_index(each) for each in self.processors)


class PositionProcessors:
    """The logits processors of a generation.

    Args:
        processors: The processors, in the order in which transformers applies them.
        rows: The rows of the batch.
        columns: The tokens of each prompt, padding included.

    Raises:
        InvalidValueError: A processor keeps a memory from call to call.
    """

    def __init__(self, processors: LogitsProcessorList, *, rows: int, columns: int) -> None:
        for processor in processors:
            if isinstance(processor, _WITH_MEMORY):
                raise InvalidValueError(
                    "logits processors must be functions of text and scores, got "
                    f"{type(processor).__name__}, which remembers earlier calls"
                )
        self._runs: list[_Run] = []
        for processor in processors:
            if isinstance(processor, Grammar):
                processor.begin(rows, columns)
                self._runs.append(_Run(LogitsProcessorList([processor]), grammar=processor))
                continue
            last = self._runs[-1] if self._runs else None
            if last is not None and last.fused is not None and last.fused.take(processor):
                continue
            fused = FusedProcessors(rows, columns)
            if fused.take(processor):
                self._runs.append(_Run(fused.processors, fused))
                continue
            reads_text = type(processor) not in _WITHOUT_TEXT
            is_called = last is not None and last.fused is None and last.grammar is None
            if last is None or not is_called or last.reads_text != reads_text:
                self._runs.append(_Run(LogitsProcessorList()))
            self._runs[-1].processors.append(processor)

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def grammar(self) -> Grammar | None:
        """The first of the grammars that answers are held to."""
        return next((run.grammar for run in self._runs if run.grammar is not None), None)

    def observe(self, rows: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """Tells what the rows of the latest step have emitted."""
        for run in self._runs:
            if run.fused is not None:
                run.fused.observe(rows, emitted)

    def __call__(
        self,
        scores: torch.Tensor,
        positions: Callable[[], Positions],
        texts: Texts | None = None,
    ) -> torch.Tensor:
        """The processed scores (positions, vocabulary), of the type that the processors return.

        Args:
            scores: May be written to.
            positions: Makes the positions, for processors that read them.
            texts: The same as texts and drafts, where the positions are those of a whole step; its
                known processors are then applied without being called.
        """
        made: Positions | None = None
        is_own = True
        for run in self._runs:
            if run.fused is not None and texts is not None and scores.dtype == torch.float32:
                if not is_own:
                    # What a processor returns may be its own.
                    scores = scores.clone(memory_format=torch.contiguous_format)
                    is_own = True
                if run.fused.patch(scores, texts):
                    continue
            if run.grammar is not None:
                if texts is not None:
                    lines = texts_of_step(texts.token_ids, texts.rows, texts.lengths, texts.drafts)
                else:
                    made = made or positions()
                    lines = made.texts()
                scores, is_own = run.grammar.masked(scores, lines), True
                continue
            is_own = False
            if not run.reads_text:
                scores = run.processors(_no_text(scores), scores)
                continue
            made = made or positions()
            scores = _with_text(run, made, scores)
        return scores


def _with_text(run: _Run, positions: Positions, scores: torch.Tensor) -> torch.Tensor:
    """The scores as processors that read the text give them: one call for each length of text."""
    call: Callable[[Any, Any], torch.Tensor] = run.processors
    groups = positions.by_length(in_place=run.in_place)
    _, indices, text = groups[0]
    if len(groups) == 1 and indices == list(range(len(text))):
        return call(text, scores)
    places, parts = [], []
    for members, indices, text in groups:
        place, index = on_device(scores.device, np.array(members), np.array(indices))
        of_group = scores[place]
        if len(text) != len(members):
            full = of_group[:1].repeat(len(text), 1)
            full[index] = of_group
            of_group = full
        places.append(place)
        parts.append(call(text, of_group)[index])
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    scores = torch.empty_like(scores, dtype=dtype)
    for place, part in zip(places, parts, strict=True):
        scores[place] = part.to(dtype)
    return scores


def _no_text(scores: torch.Tensor) -> Any:
    """Texts without tokens, for processors that do not read them."""
    return torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)


def _ignores_row_index(processor: LogitsProcessor) -> bool:
    if type(processor) not in _WITHOUT_ROW_INDEX:
        return False
    return not isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)


class _NoScores:
    """Stands for the scores that stopping criteria do not get, and says so where one reads them."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InvalidValueError(
            "stopping criteria must not read scores, which speculative decoding does not give them"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __torch_function__ = _refuse


class PositionCriteria:
    """The stopping criteria of a generation, told apart by what they read."""

    def __init__(self, criteria: StoppingCriteriaList, rows: int) -> None:
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
        self._in_place = rows > 1

    @property
    def read_text(self) -> bool:
        return bool(self._others)

    def out_of_time(self) -> bool:
        if not self._timers:
            return False
        nothing = torch.empty((1, 0), dtype=torch.int64, device="cpu")
        return any(bool(timer(nothing, None)) for timer in self._timers)

    def stop_at(self, emitted: Sequence[int], length: int) -> int | None:
        """How many emitted tokens stand when one of them, or the length, ends the row; else `None`.

        Args:
            emitted: The tokens that one row grew by.
            length: The row's length before them, padding included.
        """
        stop = None
        if self.max_length is not None and len(emitted) >= self.max_length - length:
            stop = max(self.max_length - length, 1)
        if not self.eos_ids.isdisjoint(emitted):
            first = next(at for at, token in enumerate(emitted, 1) if token in self.eos_ids)
            stop = first if stop is None else min(first, stop)
        return stop

    def stops(self, positions: Positions) -> list[bool]:
        """Whether each position, its text ending with the token just emitted, ends its row."""
        stops = [False] * len(positions.rows)
        for members, indices, text in positions.by_length(in_place=self._in_place):
            for criterion in self._others:
                # Some answer for all rows at once, with a bool or a tensor without dimensions.
                ended = torch.as_tensor(criterion(text, _NoScores()), device=text.device).expand(
                    len(text)
                )
                for member, index in zip(members, indices, strict=True):
                    stops[member] = stops[member] or bool(ended[index])
        return stops
