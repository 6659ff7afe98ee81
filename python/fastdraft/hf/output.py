"""The output of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fastdraft import DraftStats
from fastdraft.errors import InvalidValueError
from fastdraft.hf.loop import Decoding
from fastdraft.hf.processors import PositionCriteria
from fastdraft.stats import AssistantStats

__all__ = ["SpeculativeOutput", "by_step", "pad_token_id", "padded_sequences"]


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of transformers' `generate` as a dict, and the statistics of the drafts.

    `scores` and `logits` hold, where asked for, one float32 tensor (rows, vocabulary) for each new
    token. Where a row had ended they are zeros: plain decoding's are what the model says behind
    padding. `cache`, called `past_key_values` before transformers 5.24, is given for a single row.

    Attributes:
        logprobs: With `logprobs=True`, for each row of `sequences` the log-probabilities of its new
            tokens in the distribution that they were chosen from, with logits processors,
            temperature and filters: float32 (new tokens,), on the CPU. For greedy decoding, with
            logits processors, at temperature 1.
        raw_logprobs: The same under the softmax of the model's own logits.
        stats: The sum over all rows.
        row_stats: One for each row of `sequences`.
        assistants: One for each draft model, the smallest first; `None` without.
    """

    logprobs: list[torch.Tensor] | None = None
    raw_logprobs: list[torch.Tensor] | None = None
    stats: DraftStats | None = None
    row_stats: list[DraftStats] | None = None
    assistants: list[AssistantStats] | None = None


def pad_token_id(config: GenerationConfig, criteria: PositionCriteria, rows: int) -> int:
    """The id that fills rows that end early."""
    if rows > 1 and criteria.read_text and not criteria.eos_ids:
        raise InvalidValueError(
            "stopping criteria of a batch need eos_token_id and pad_token_id, "
            f"which fill the rows that end early, got eos_token_id={config.eos_token_id}"
        )
    pad = config.pad_token_id
    if pad is None and config.eos_token_id is not None:
        pad = torch.as_tensor(config.eos_token_id).reshape(-1)[0]
    return 0 if pad is None else int(pad)


def padded_sequences(decoding: Decoding, padding: int) -> torch.Tensor:
    """The texts of all rows, int64 (rows, longest), padded on the right."""
    rows = decoding.rows
    ends = rows.lengths(range(len(rows)))
    lines = [torch.from_numpy(rows.text[row, :end]) for row, end in enumerate(ends)]
    return pad_sequence(lines, batch_first=True, padding_value=padding)


def by_step(kept: Sequence[list[torch.Tensor]], counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Tensors kept of each row, (tokens, vocabulary) in parts, as (rows, vocabulary) tensors."""
    rows = [torch.cat(parts)[:count] for parts, count in zip(kept, counts, strict=True)]
    return pad_sequence(rows).unbind()
