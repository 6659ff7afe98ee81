"""Rejection sampling: what the target makes of drafts whose tokens were drawn from known odds.

A draft token d that was drawn with probability q(d), where the target's own is p(d), is accepted
with probability min(1, p(d) / q(d)). The first token refused is recovered from the residual, the
positive part of p - q, normalised; after a whole draft the bonus token is drawn from p. What is
emitted has exactly the target's distribution, whatever q is (Leviathan, Kalman and Matias, Fast
inference from transformers via speculative decoding, 2023, appendix A.1; Chen et al., Accelerating
large language model decoding with speculative sampling, 2023).

In the words of the random contract (see `sampling`), with w the weights of the target's row, S
their sum, and E(stream, index) the noise of the token's position:

    d is accepted  iff  E(2, 0) > log q(d) - log p(d)
    recovered      c* = argmax over the chunks c of    sum(r_t for t in c) / E(4, c)
                   t* = argmax over the tokens in c*   r_t / E(3, t)
                   r_t = max(w_t - S q_t, 0)
    bonus          as `draw` has it: what sampling without a draft gives at that position

-E is the logarithm of a uniform number, and above -2**-65 never, so a token that the target likes
no less than the drafter is always accepted, and one with p(d) = 0 never, not even where u is tiny.
The noise of acceptance, of the residual and of the bonus are independent. That which the draft was
drawn with has to be, too.

**Where p and q are equal up to rounding**, the residual may vanish for all tokens. The chance of
coming there is the sum of that same residual, so nothing but rounding, and any token that the
target could emit keeps the distribution to within it: the recovered token is drawn from p.

**What is not odds.** A token outside the vocabulary, or one whose q is NaN (all of a row of
draft logits that has NaN, +inf or nothing but -inf), cannot have been drawn: it is refused,
and the recovered token is drawn from p, which is lossless too. Rows of the target that are not
numbers, and those of temperature 0, accept their argmax and recover with it, as in `draw`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft.kernels.operands import Batch, DraftDistribution, Emitted, Sampling, Status, Warpers
from fastdraft.kernels.reference.noise import (
    ACCEPT_STREAM,
    CHUNK_STREAM,
    RESIDUAL_CHUNK_STREAM,
    RESIDUAL_TOKEN_STREAM,
    TOKEN_STREAM,
    exponential_noise,
)
from fastdraft.kernels.reference.sampling import (
    Chosen,
    as_float,
    chunked,
    join,
    log_softmax_of,
    race,
    slabs,
    total,
    weigh_rows,
)


def verify_rejection(
    batch: Batch, sampling: Sampling, draft_distribution: DraftDistribution
) -> Emitted:
    """Rejection sampling of drafts that are chains.

    The logprobs of all tokens, recovered ones too, are those of the target's distribution, which
    they have as a whole. Time is linear in the logits and the draft's, memory in those of one slab.
    """
    logits, draft_ids, offsets, max_draft = batch[:4]
    draft, requests = draft_distribution.values, batch.requests
    if len(draft_ids) == 0:
        # One token of no request, so that there is something to look at where nothing is drafted.
        draft_ids, draft = draft_ids.new_zeros(1), draft.new_zeros(1, draft.shape[1])

    # Each draft token against its row.
    token = torch.arange(len(draft_ids), device=logits.device)
    request = torch.searchsorted(offsets[1:], token, right=True).clamp(max=requests - 1)
    row = (token + request).clamp(max=len(logits) - 1)
    noise = exponential_noise(
        sampling.seeds[request],
        sampling.positions[request] + token - offsets[request],
        token.new_zeros(1),
        stream=ACCEPT_STREAM,
    )
    passed = torch.empty_like(token, dtype=torch.bool)
    drafted = []
    for part in slabs(len(token), logits):
        passed[part], chosen = _test(
            _Rows.of(batch, sampling, row[part], request[part]),
            draft_ids[part].long(),
            DraftDistribution(draft[part], draft_distribution.is_logits),
            noise[part, 0],
        )
        drafted.append(chosen)

    first = offsets[:-1, None]
    size = (offsets[1:, None] - first).clamp(max=max_draft)
    step = torch.arange(max_draft + 1, device=logits.device)
    index = (first + step).clamp(max=len(token) - 1)
    accepted = (passed[index] & (step < size)).cumprod(1).bool()
    last = accepted.sum(1, keepdim=True)

    # The row that each request's last token is drawn from: the first refused, or the bonus row.
    request = torch.arange(requests, device=logits.device)
    row = (first + last)[:, 0] + request
    token = (first + last)[:, 0].clamp(max=len(token) - 1)
    refused = (last < size)[:, 0]
    drawn = join(
        [
            _draw_last(
                _Rows.of(batch, sampling, row[part], request[part]),
                draft_ids[token[part]].long(),
                DraftDistribution(draft[token[part]], draft_distribution.is_logits),
                refused[part],
                last[part, 0],
            )
            for part in slabs(requests, logits)
        ]
    )

    chosen = join(drafted)
    stopped = drawn.maxima == -torch.inf
    is_last = (step == last) & ~stopped[:, None]

    def emitted(of_drafted: Tensor, of_last: Tensor, fill: float) -> Tensor:
        values = torch.where(is_last, of_last[:, None], fill)
        return torch.where(accepted, of_drafted[index], values)

    nan = emitted(chosen.maxima, drawn.maxima, 0.0).isnan().any(1)
    return Emitted(
        emitted(chosen.tokens, drawn.tokens, -1).int(),
        (last[:, 0] + 1 - stopped.long()).int(),
        (nan * Status.NAN + stopped * Status.EMPTY).int(),
        None,
        None
        if chosen.logprobs is None or drawn.logprobs is None
        else emitted(chosen.logprobs, drawn.logprobs, torch.nan),
        None
        if chosen.raw_logprobs is None or drawn.raw_logprobs is None
        else emitted(chosen.raw_logprobs, drawn.raw_logprobs, torch.nan),
    )


class _Rows(NamedTuple):
    """Rows of a batch with what they are verified by, and what that makes of them.

    logits: (n, vocabulary); sampling: of the rows; weights, maximum, by_argmax, best: as
    `weigh_rows` gives them; logprobs, raw_logprobs: as in `Batch`.
    """

    logits: Tensor
    sampling: Sampling
    weights: Tensor
    maximum: Tensor
    by_argmax: Tensor
    best: Tensor
    logprobs: bool
    raw_logprobs: bool

    @classmethod
    def of(cls, batch: Batch, sampling: Sampling, row: Tensor, request: Tensor) -> _Rows:
        logits, sampling = batch.logits[row], sampling.of(request)
        allowed = None if batch.allowed is None else batch.allowed[row]
        weighed = weigh_rows(logits, sampling.warpers, allowed)
        return cls(logits, sampling, *weighed, batch.logprobs, batch.raw_logprobs)

    def log_p(self, tokens: Tensor) -> Tensor:
        """The logarithm of each token's probability under its row's distribution, float64 (n,)."""
        x = as_float(self.logits.gather(1, tokens[:, None])[:, 0])
        heat = torch.where(self.by_argmax, 1.0, self.sampling.warpers.temperature)
        above = (x - self.maximum).double() / heat - total(self.weights).log()
        return torch.where(_at(self.weights, tokens) == 0, -torch.inf, above)

    def chosen(self, tokens: Tensor, log_p: Tensor | None = None) -> Chosen:
        logprobs = raw_logprobs = None
        if self.logprobs:
            logprobs = (self.log_p(tokens) if log_p is None else log_p).float()
        if self.raw_logprobs:
            raw_logprobs = log_softmax_of(tokens, self.logits)
        return Chosen(tokens, self.maximum, logprobs, raw_logprobs)


def _test(
    rows: _Rows, draft_ids: Tensor, draft_distribution: DraftDistribution, noise: Tensor
) -> tuple[Tensor, Chosen]:
    """Whether each row accepts its draft token, bool (rows,); and the draft tokens as chosen."""
    tokens = draft_ids.clamp(0, rows.logits.shape[1] - 1)
    log_p = rows.log_p(tokens)
    if draft_distribution.is_logits:
        odds = _odds(draft_distribution)
        log_q = _at(odds, tokens).log() - total(odds).log()
    else:
        log_q = _at(draft_distribution.values, tokens).log()
    passed = torch.where(rows.by_argmax, tokens == rows.best, noise > log_q - log_p)
    passed &= (tokens == draft_ids) & (rows.maximum != -torch.inf)
    return passed, rows.chosen(tokens, log_p)


def _draw_last(
    rows: _Rows,
    draft_ids: Tensor,
    draft_distribution: DraftDistribution,
    refused: Tensor,
    depth: Tensor,
) -> Chosen:
    """The recovered token of each row whose draft token was refused, the bonus token of others.

    depth: int64 (rows,), how many draft tokens come before the row's.
    """
    odds = _odds(draft_distribution)
    scale = total(rows.weights)
    if draft_distribution.is_logits:
        scale = scale / total(odds)
    tokens = draft_ids.clamp(0, rows.logits.shape[1] - 1)
    was_drawn = (tokens == draft_ids) & ~_at(odds, tokens).isnan()
    # Nothing is more than NaN, so nothing is left of p where there is no q to take from it.
    scale = torch.where(was_drawn, scale, torch.nan).to(rows.weights.dtype)[:, None, None]
    residual = rows.weights - odds * scale
    residual = torch.where(residual > 0, residual, 0.0)
    left = (residual > 0).flatten(1).any(1)
    drawn = race(
        torch.where((refused & left)[:, None, None], residual, rows.weights),
        rows.sampling._replace(positions=rows.sampling.positions + depth),
        token_stream=torch.where(refused, RESIDUAL_TOKEN_STREAM, TOKEN_STREAM),
        chunk_stream=torch.where(refused, RESIDUAL_CHUNK_STREAM, CHUNK_STREAM),
    )
    return rows.chosen(torch.where(rows.by_argmax, rows.best, drawn))


def _odds(draft_distribution: DraftDistribution) -> Tensor:
    """The draft's distribution q up to a factor, (rows, chunks, width); probabilities as they
    are."""
    values = draft_distribution.values
    if not draft_distribution.is_logits:
        # Below 0 is only what fills the last chunk up.
        return chunked(as_float(values)).clamp(min=0.0)
    return weigh_rows(values, Warpers(torch.ones(len(values), device=values.device)))[0]


def _at(weights: Tensor, tokens: Tensor) -> Tensor:
    """Each row's weight of its token, float64 (rows,)."""
    return weights.flatten(1).gather(1, tokens[:, None])[:, 0].double()
