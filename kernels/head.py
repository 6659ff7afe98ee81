"""Sampling from a language model's head without its logits: a design, and its plain version alone.

The head's product writes a row of logits, which verification reads once more. A product whose
epilogue leaves the row statistics of each chunk, 8 bytes for 2 KiB of bfloat16 logits, needs to
write none: a row is drawn from its statistics and the one chunk that wins, whose logits are
computed again from `CHUNK` rows of the head. Ranks that share the head exchange statistics instead
of logits: 1.2 kB a row at a vocabulary of 151,936.

Filters, masks and the log-probabilities of other tokens need the logits; temperatures, greedy rows
and the drawn token's log-probability do not. How much a product loses to such an epilogue, only a
GPU can tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdraft.kernels.chunks import as_float, chunk_of
from fastdraft.kernels.noise import CHUNK_STREAM, TOKEN_STREAM, exponential_noise
from fastdraft.kernels.operands import CHUNK, Sampling


def leave_statistics(hidden: Tensor, head: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Each chunk's largest logit m and its sum of exp((x - m) / divisor), (rows, chunks) both.

    hidden: (rows, width); head: (vocabulary, width); divisor: (rows,), the temperature.
    """
    maxima, sums = [], []
    for part in head.split(CHUNK):
        x = as_float(hidden @ part.T)
        maxima.append(x.amax(1))
        sums.append(((x - maxima[-1][:, None]) / divisor[:, None]).exp().sum(1))
    return torch.stack(maxima, 1), torch.stack(sums, 1)


def draw(hidden: Tensor, shards: Sequence[Tensor], sampling: Sampling) -> Tensor:
    """The token of each row as `sampled.draw` gives it without filters, int64 (rows,).

    hidden: (rows, width), with finite logits; shards: of the head, one a rank, (tokens, width)
    each, all but the last of whole chunks; sampling: of rows.
    """
    temperature, seeds, positions = sampling.warpers.temperature, sampling.seeds, sampling.positions
    is_greedy = (temperature == 0)[:, None]
    divisor = torch.where(temperature == 0, 1.0, temperature)
    left = [leave_statistics(hidden, shard, divisor) for shard in shards]
    maxima, sums = (torch.cat(each, 1) for each in zip(*left, strict=True))  # what ranks exchange
    sums = sums * ((maxima - maxima.amax(1, keepdim=True)) / divisor[:, None]).exp()
    index = torch.arange(maxima.shape[1], device=hidden.device)
    noise = exponential_noise(seeds, positions, index, stream=CHUNK_STREAM)
    chunk = torch.where(is_greedy, maxima, sums / noise).argmax(1)

    # The rank that has the chunk computes it again.
    token = chunk[:, None] * CHUNK + torch.arange(CHUNK, device=hidden.device)
    head = torch.cat(list(shards))
    rows = head[token.clamp(max=len(head) - 1)]
    x = as_float((rows @ hidden[:, :, None])[:, :, 0])
    x = torch.where(token < len(head), x, -torch.inf)
    weights = ((x - chunk_of(maxima, chunk)[:, None]) / divisor[:, None]).exp()
    noise = exponential_noise(seeds, positions, token, stream=TOKEN_STREAM)
    best = torch.where(is_greedy, x, weights / noise).argmax(1)
    return chunk * CHUNK + best
