"""Sampled verification: a draw from each row, against the draft.

**The random contract.** The token drawn from a row of logits depends on the row, the seed and the
absolute position of that token alone, never on the draft, the batch or the device. It is a
Gumbel draw in two levels, over chunks of `CHUNK` consecutive token ids (the last one may be
shorter), with M the largest logit of the row and T the temperature:

    w_t  = exp((x_t - M) / T), or 0 where that is 2**-125 or less, or where top-k, top-p or min-p
           removes the token
    c*   = argmax over the chunks c of     sum(w_t for t in c) / E(1, c)
    t*   = argmax over the tokens t in c* of  w_t / E(0, t)

E(stream, index) is standard exponential noise, and argmax of w / E is the same choice as argmax of
log w + Gumbel noise, as -log E is Gumbel noise. Both levels together draw t with probability
softmax(x / T)_t exactly, for the noise of one chunk and one value a chunk instead of noise for the
whole vocabulary (Gumbel-max trick, Gumbel 1954; split by groups as in Maddison et al., A* sampling,
2014).

The noise is counter-based (Philox4x32-10, Salmon et al., Parallel random numbers: as easy as 1, 2,
3, 2011), with

    key     = (low, high) 32 bits of the seed
    counter = (index: the token's or chunk's id, low and high 32 bits of the position, stream)
    u       = (word0 * 2**32 + word1 + 1/2) * 2**-64,  E = -log1p(-u)

All 64 bits are needed: the winner of a race over a vocabulary is decided where u is tiny.

**Precision.** Weights and their sums are float32 (float64 for float64 logits), as on any fast path;
noise and races are float64 here. They are written as a race of ratios because a ratio keeps a
relative precision of 2**-24 in float32, where x + Gumbel loses digits to the size of the sum: a
float32 kernel draws the same token unless the two best ratios lie within a few 2**-24 of each
other, which has about that probability. Weights relative to the maximum do not overflow, whatever
the logits and the temperature, and what is too small to matter is 0 at a fixed bound, well before
float32 loses digits.

**Rows that are not numbers.** A row whose maximum is NaN or +inf has no softmax: it gives the
token of torch.argmax (the first NaN, or else the first +inf), whatever the temperature. A row
of nothing but -inf is empty and gives no token.

**On a device** it takes one launch, or three where a request has filters. The first goes over the
logits once and leaves row statistics (see `statistics`). With them a row is drawn from one chunk
alone: the chunk by a race over the chunks' sums, the token by a race in that chunk, read again. The
program that leaves a row's last statistics does it, and the one that finishes a request's last row
compares the tokens with the draft. With filters, `filters` then says from which logit on a row is
kept and what is left of the sums, and a launch over the rows draws.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastdraft.kernels import config, filters, grid, language, likeliest, statistics, trees
from fastdraft.kernels.acceptance import Chosen, accept, emit, join
from fastdraft.kernels.chunks import chunk_of, rows_of, slabs, total
from fastdraft.kernels.filters import NEGLIGIBLE, log_softmax_of, logit_of, weigh_rows
from fastdraft.kernels.language import jit, tl
from fastdraft.kernels.noise import (
    CHUNK_NOISE,
    CHUNK_STREAM,
    TOKEN_NOISE,
    TOKEN_STREAM,
    exponential_noise,
    noise_of,
)
from fastdraft.kernels.operands import Batch, Sampling, Verified
from fastdraft.kernels.statistics import LOG2_E, OUT
from fastdraft.kernels.workspace import Scratch, take_output


def verify(batch: Batch, sampling: Sampling) -> Verified:
    """Sampled verification of drafts without probabilities."""
    if language.has_kernels(batch.logits):
        return launch(batch, sampling)
    return plain(batch, sampling)


def plain(batch: Batch, sampling: Sampling) -> Verified:
    """Sampled verification of drafts without probabilities.

    One draw a row, kept while it is the draft's token: a token d is accepted with the target's own
    probability p(d), and a recovered token follows p without d, which is the distribution of
    rejection sampling for a certain draft, with nothing wasted; of the children of one parent in a
    tree, all together are accepted with the target's probability of the set. The noise of a row is
    that of the position which its token would take: that of the text's next token plus the depth of
    the row's slot. So what is emitted is the same with any draft, chain or tree, and with none.
    """
    of_rows = sampling
    if len(batch.logits) > batch.requests:
        request, depth = rows_of(len(batch.logits), batch.offsets)
        if batch.parents is not None:
            depths = trees.depths(batch.parents, batch.offsets, max_draft=batch.max_draft)
            depth = depths[request, depth.clamp(max=batch.max_draft)]
        of_rows = sampling.of(request)
        of_rows = of_rows._replace(positions=of_rows.positions + depth)
    emitted = emit(draw(batch.logits, of_rows, batch.allowed, **batch.wanted), batch)
    return emitted._replace(likeliest=likeliest.plain(batch, of_rows.warpers.temperature))


def draw(
    logits: Tensor,
    sampling: Sampling,
    allowed: Tensor | None = None,
    *,
    logprobs: bool = False,
    raw_logprobs: bool = False,
) -> Chosen:
    """One token from each row of logits (rows, vocabulary), as the random contract has it.

    sampling: of rows; allowed: as in `mask`. Time is linear in the logits, memory in those of one
    slab.
    """
    parts = []
    for part in slabs(len(logits), logits):
        x, drawn_by = logits[part], sampling.of(part)
        weights, maximum, by_argmax, best = weigh_rows(
            x, drawn_by.warpers, None if allowed is None else allowed[part]
        )
        drawn = race(weights, drawn_by, token_stream=TOKEN_STREAM, chunk_stream=CHUNK_STREAM)
        token = torch.where(by_argmax, best, drawn)
        logprob = None
        if logprobs:
            heat = torch.where(by_argmax, 1.0, drawn_by.warpers.temperature)
            above = (logit_of(x, token) - maximum).double() / heat
            logprob = (above - total(weights).log()).float()
        raw = log_softmax_of(token, x) if raw_logprobs else None
        parts.append(Chosen(token, maximum, logprob, raw))
    return join(parts)


def race(
    weights: Tensor,
    sampling: Sampling,
    *,
    token_stream: int | Tensor,
    chunk_stream: int | Tensor,
) -> Tensor:
    """One token from each row of weights (rows, chunks, width), as the random contract draws it.

    sampling: of rows; the streams of the noise: one for all rows, or int64 (rows,).
    Gives the tokens, int64 (rows,); what a row without a weight above 0 gives means nothing, but
    is in range where the weights are numbers.
    """
    _, chunks, width = weights.shape
    seeds, positions = sampling.seeds, sampling.positions
    index = torch.arange(chunks, device=weights.device)
    noise = exponential_noise(seeds, positions, index, stream=chunk_stream)
    chunk = (weights.sum(-1) / noise).argmax(-1)
    index = chunk[:, None] * width + torch.arange(width, device=weights.device)
    noise = exponential_noise(seeds, positions, index, stream=token_stream)
    return chunk * width + (chunk_of(weights, chunk) / noise).argmax(-1)


@jit
def draw_row(location, batch, logits, scratch, heat, seed, position, chunk_stream, token_stream, C):
    """One token of a row, as the random contract has it: (its key, token, log-probability).

    The key is that of the row's maximum. heat: the temperature, 0 for the argmax. The streams are
    those of the noise.
    """
    divisor = statistics.divisor_of(heat)
    keys, key, weights = statistics.totals_of(location, logits, scratch, LOG2_E / divisor, C.BLOCK)
    # Without a finite maximum there is no softmax.
    by_argmax = (heat == 0) | (key >= grid.INFINITE_KEY) | (key <= grid.EMPTY_KEY)
    index = tl.arange(0, C.BLOCK)
    score = keys
    if not C.GREEDY:
        ratio = weights / noise_of(seed, position, index, chunk_stream)
        ratio = tl.where(keys == OUT, OUT, ratio.to(tl.int32, bitcast=True))
        score = tl.where(by_argmax, keys, ratio)
    _, chunk = grid.unpack(tl.max(grid.pack(score, index)))

    x, token = grid.load_chunk(location, batch, logits, chunk, C)
    score = grid.ordered_key(x)
    maximum = grid.value_of(key)
    if not C.GREEDY:
        weight = tl.exp((x - maximum) / divisor)
        kept = weight > NEGLIGIBLE
        if scratch.lowest is not None:
            lowest = tl.load(scratch.lowest + location.row)
            kept = kept & grid.passes(x, token, lowest, tl.load(scratch.last_tied + location.row))
        weight = tl.where(kept, weight, 0.0)
        ratio = weight / noise_of(seed, position, token, token_stream)
        score = tl.where(by_argmax, score, ratio.to(tl.int32, bitcast=True))
    score = tl.where(token < logits.vocabulary, score, OUT)
    _, chosen = grid.unpack(tl.max(tl.max(grid.pack(score, token), 1), 0))
    value = tl.sum(tl.sum(tl.where(token == chosen, x, 0.0), 1), 0)
    return key, chosen, (value - maximum) / divisor - tl.log(tl.sum(weights))


@jit
def _finish_row(location, batch, logits, scratch, output, C):
    """Draws a row's token and, for the request's last row, writes what the request emits."""
    request = location.request
    seed = location.first.to(tl.int64)
    position = seed
    if not C.GREEDY:
        seed = tl.load(batch.seeds + request)
        position = tl.load(batch.positions + request) + grid.depth_of(location, batch)
    heat = grid.temperature_of(location, batch, C.GREEDY)
    key, token, logprob = draw_row(
        location, batch, logits, scratch, heat, seed, position, CHUNK_NOISE, TOKEN_NOISE, C
    )
    statistics.leave_token(location, logits, scratch, key, token, logprob, C.BLOCK)
    if grid.last_to_arrive(scratch.request_arrivals + request, location.size + 1, C.WAIT):
        accept(location, batch, logits, scratch, output, C)


@jit
def statistics_kernel(batch, logits, draft, scratch, output, C):
    """Leaves row statistics, whatever of them scratch has room for."""
    location, used = grid.locate(tl.program_id(0) // batch.programs, batch, C)
    if used:
        statistics.leave_logits(location, batch, logits, scratch, C)


@jit
def draw_kernel(batch, logits, draft, scratch, output, C):
    """The emitted tokens, from row statistics."""
    location, used = grid.locate(tl.program_id(0), batch, C)
    if used:
        _finish_row(location, batch, logits, scratch, output, C)


@jit
def sampled_kernel(batch, logits, draft, scratch, output, C):
    """Both together."""
    location, used = grid.locate(tl.program_id(0) // batch.programs, batch, C)
    if not used:
        return
    statistics.leave_logits(location, batch, logits, scratch, C)
    if grid.last_to_arrive(scratch.row_arrivals + location.row, batch.programs, C.WAIT):
        _finish_row(location, batch, logits, scratch, output, C)


def launch(batch: Batch, sampling: Sampling | None) -> Verified:
    """The same of logits of 16 or 32 bits; the argmax of all rows without sampling.

    One launch without filters, three with one, and one more for the likeliest tokens; the logits
    are read once, and a chunk of each row again, and by filters some parts. The results are the
    workspace's buffers, if there is one.
    """
    has_filters = sampling is not None and sampling.warpers.has_filters
    left = filters.BUFFERS if has_filters else ("row_arrivals",)
    scratch = Scratch.take(
        batch, *left, "chunk_maximum", "chunk_sum", "row_results", "request_arrivals"
    )
    rows, output = len(batch.logits), take_output(batch)
    if sampling is None or not has_filters:
        split = config.split_chunks(*batch.logits.shape)
        shared: dict[str, Any] = {"scratch": scratch, "output": output, "split": split}
        grid.run(sampled_kernel, rows, batch, sampling, **shared)
        found = likeliest.launch(batch, sampling, scratch)
    else:
        leave_statistics(batch, sampling, scratch)
        found = likeliest.launch(batch, sampling, scratch)
        filters.launch(batch, sampling, scratch)
        grid.run(draw_kernel, rows, batch, sampling, scratch=scratch, output=output)
    return output if found is None else output._replace(likeliest=found)


def leave_statistics(batch: Batch, sampling: Sampling, scratch: Scratch) -> None:
    """Leaves the statistics of all rows that count in scratch. One launch."""
    rows, split = len(batch.logits), config.split_chunks(*batch.logits.shape)
    grid.run(statistics_kernel, rows, batch, sampling, scratch=scratch, split=split)
