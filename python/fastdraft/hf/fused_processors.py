"""Logits processors of transformers that verification applies itself, as a patch of the logits.

A generation's processors are a list. Neighbours in it whose effect `Processors` has, in the order
in which it applies them, are applied together: only the logits that they touch are read, for all
positions of all drafts at once: on a device by its kernels, on a CPU by
`fastdraft.hf.host_processors`. The others are called, see `fastdraft.hf.positions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from fastdraft.hf.drafts import FlatDrafts
from fastdraft.hf.host_processors import HostProcessors
from fastdraft.hf.kv_cache import on_device
from fastdraft.kernels.operands import Batch
from fastdraft.kernels.reference import sampling
from fastdraft.verification import Processors
from fastdraft.verification.backend import kernels_for

__all__ = ["FusedProcessors", "Texts"]

# The tokens that a text may grow by before its operands are made anew: each takes an entry, and
# entries without a token cost time too.
_ROOM: Final = 256

# What `Processors` takes, for finite numbers.
_LARGEST: Final = 1e37


@dataclass(frozen=True)
class Texts:
    """The texts of a step's rows, and their drafts.

    Attributes:
        token_ids: (batch, columns) int64, on the host: padded prompts with output.
        rows: The line of each row.
        lengths: The tokens of each, padding included.
        drafts: The drafts.
    """

    token_ids: NDArray[np.int64]
    rows: list[int]
    lengths: list[int]
    drafts: FlatDrafts


class FusedProcessors:
    """Neighbouring processors of transformers, and the `Processors` that has their effect.

    In float32 on a CPU the scores are those of transformers, bit for bit, where the logits are
    finite.

    Args:
        rows: The rows of the batch.
        columns: The tokens of each prompt, padding included.

    Attributes:
        processors: The same, as transformers applies them.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.processors = LogitsProcessorList()
        self._columns = columns
        self._bias: dict[int, float] = {}
        self._penalty: float | None = None
        self._ignored = [0] * rows  # the first tokens of each row, which are not penalised
        self._words: list[list[int]] = []
        self._ends: list[int] = []  # banned from texts shorter than:
        self._shortest = columns
        # transformers refuses ids of sequences that are outside the vocabulary.
        self._highest = -1
        self._made: tuple[list[int], Processors] | None = None  # of these rows
        self._room = 0
        self._on_host: HostProcessors | None = None

    def take(self, processor: Any) -> bool:
        """Adds a processor, unless it is unknown or has to be applied after those it holds."""
        take = _TAKES.get(type(processor))
        if take is None or not take(self, processor):
            return False
        self.processors.append(processor)
        return True

    def _take_bias(self, processor: Any) -> bool:
        biases = processor.sequence_bias
        finite = {ids: value for ids, value in biases.items() if value != -math.inf}
        if not all(len(ids) == 1 and abs(value) < _LARGEST for ids, value in finite.items()):
            return False
        if finite and (self._bias or self._penalty is not None):
            # It would have to be rounded, or penalised, by itself.
            return False
        self._bias.update({ids[0]: value for ids, value in finite.items()})
        self._words += [list(ids) for ids in biases if ids and ids not in finite]
        self._highest = max([self._highest, *(token for ids in biases for token in ids)])
        return True

    def _take_penalty(self, processor: Any) -> bool:
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, torch.Tensor):
            ignored = ignored.tolist()
        elif not isinstance(ignored, list):
            ignored = [ignored or 0] * len(self._ignored)
        if self._penalty is not None or len(ignored) != len(self._ignored):
            return False
        if max(ignored) > self._columns or not 1 / _LARGEST < processor.penalty < _LARGEST:
            return False
        self._penalty = processor.penalty
        self._ignored = [max(count, 0) for count in ignored]
        return True

    def _take_suppressed(self, processor: Any) -> bool:
        self._words += [[token] for token in _known(processor.suppress_tokens)]
        return True

    def _take_beginning(self, processor: Any) -> bool:
        index = processor.begin_index
        if index > self._columns:
            return False
        return self._ban_ends(_known(processor.begin_suppress_tokens), index + 1)

    def _take_length(self, processor: Any) -> bool:
        return self._ban_ends(_known(processor.eos_token_id), processor.min_length)

    def _take_new_length(self, processor: Any) -> bool:
        shortest = processor.prompt_length_to_skip + processor.min_new_tokens
        return self._ban_ends(_known(processor.eos_token_id), shortest)

    def _ban_ends(self, ends: list[int], shortest: int) -> bool:
        """Bans tokens from shorter texts."""
        if shortest <= self._columns:
            return True
        if self._ends and self._ends != ends:
            return False
        self._ends, self._shortest = ends, max(self._shortest, shortest)
        return True

    def patch(self, scores: torch.Tensor, texts: Texts) -> bool:
        """Applies the processors to `scores`, in place and without waiting for the device.

        Args:
            scores: (draft tokens + rows, vocabulary) float32, as `fastdraft.verification` lays them
                out, sharing no memory.
            texts: The texts and drafts of the rows.

        Returns:
            Whether it could: transformers has an error for tokens outside the vocabulary.
        """
        if self._highest >= scores.shape[1]:
            return False
        if not self._reads_all and min(texts.lengths) >= self._shortest:
            return True
        if sampling.reads_back(scores):
            self._patch_on_host(scores, texts)
            return True
        if self._made is None or self._made[0] != texts.rows:
            self._made = list(texts.rows), self._operands(texts, scores.device)
            self._room = _ROOM
        drafts = texts.drafts
        # Copies, since a drafter may hand out read-only arrays.
        arrays = [each.astype(np.int64) for each in (drafts.token_ids, drafts.offsets)]
        if not drafts.are_chains:
            arrays.append(drafts.parents.astype(np.int64))
        ids, offsets, *trees = on_device(scores.device, *arrays)
        parents = trees[0] if trees else None
        batch = Batch(scores, ids, offsets, drafts.longest, parents)
        kernels_for(scores).patch(batch, self._made[1])
        return True

    def _patch_on_host(self, scores: torch.Tensor, texts: Texts) -> None:
        if self._on_host is None:
            self._on_host = HostProcessors(
                scores.shape[1],
                bias=self._bias,
                penalty=self._penalty,
                ignored=self._ignored,
                words=self._words,
                ends=self._ends,
                shortest=self._shortest,
            )
        self._on_host.patch(
            scores.numpy(force=True),
            texts.token_ids,
            rows=texts.rows,
            lengths=texts.lengths,
            drafts=texts.drafts,
        )

    @property
    def _reads_all(self) -> bool:
        """Whether there is something to apply however long the texts are."""
        return bool(self._bias or self._words) or self._penalty is not None

    def _operands(self, texts: Texts, device: torch.device) -> Processors:
        lines = [
            texts.token_ids[row, :length]
            for row, length in zip(texts.rows, texts.lengths, strict=True)
        ]
        rows = len(lines)
        made = Processors.from_requests(
            # A prompt is what is penalised of it.
            [
                line[self._ignored[row] : self._columns]  # type: ignore[misc]
                for line, row in zip(lines, texts.rows, strict=True)
            ],
            [line[self._columns :] for line in lines],  # type: ignore[misc]
            repetition_penalty=1.0 if self._penalty is None else self._penalty,
            logit_bias=[self._bias] * rows,
            bad_words=[self._words] * rows,
            min_tokens=self._shortest - self._columns,
            stop_ids=[self._ends] * rows,
            room=_ROOM,
        )
        longest = made.tail.shape[1]
        if longest and any(self._ignored):
            # A banned sequence may begin among the first tokens, which the penalty ignores.
            tail = np.full((rows, longest), -1, np.int32)
            for of_row, line in zip(tail, lines, strict=True):
                last = line[-longest:]
                of_row[longest - len(last) :] = last
            made = replace(made, tail=torch.from_numpy(tail))
        if device.type == "cpu":
            return made
        sent: dict[str, Any] = {
            each.name: _sent(getattr(made, each.name), device)
            for each in fields(made)
            if isinstance(getattr(made, each.name), torch.Tensor)
        }
        return replace(made, **sent)

    def observe(self, rows: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """Adds what was emitted to the texts of the rows that the latest step had."""
        if self._made is None:
            return
        counts = np.array([len(tokens) for tokens in emitted])
        self._room -= int(counts.max())
        if self._room < 0 or self._made[0] != list(rows):
            self._made = None
            return
        processors = self._made[1]
        if self._penalty is None and not self._ends and not processors.tail.shape[1]:
            return
        token_ids = np.full((len(counts), counts.max()), -1)
        for line, tokens in zip(token_ids, emitted, strict=True):
            line[: len(tokens)] = tokens
        ids, lengths = on_device(processors.sizes.device, token_ids, counts)
        processors.observe(ids.int(), lengths.int())


_TAKES: Final[dict[type, Callable[[FusedProcessors, Any], bool]]] = {
    stock.SequenceBiasLogitsProcessor: FusedProcessors._take_bias,
    stock.NoBadWordsLogitsProcessor: FusedProcessors._take_bias,
    stock.RepetitionPenaltyLogitsProcessor: FusedProcessors._take_penalty,
    stock.SuppressTokensLogitsProcessor: FusedProcessors._take_suppressed,
    stock.SuppressTokensAtBeginLogitsProcessor: FusedProcessors._take_beginning,
    stock.MinLengthLogitsProcessor: FusedProcessors._take_length,
    stock.MinNewTokensLengthLogitsProcessor: FusedProcessors._take_new_length,
}


def _known(token_ids: torch.Tensor) -> list[int]:
    """The ids that can be a token's, each once."""
    return sorted({token for token in token_ids.reshape(-1).tolist() if token >= 0})


def _sent(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, without waiting for what the device has still to do."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        value = value.pin_memory()
    return value.to(device, non_blocking=is_cuda)
