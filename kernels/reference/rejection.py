"""Rejection sampling: what the target makes of drafts whose tokens were drawn from known odds.

A draft token d that was drawn with probability q(d), where the target's own is p(d), is accepted
with probability min(1, p(d) / q(d)). The first token refused is recovered from the residual, the
positive part of p - q, normalised; after a whole draft the bonus token is drawn from p. What is
emitted has exactly the target's law, whatever q is (Leviathan, Kalman and Matias, Fast inference
from transformers via speculative decoding, 2023, appendix A.1; Chen et al., Accelerating large
language model decoding with speculative sampling, 2023).

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
target could emit keeps the law to within it: the recovered token is drawn from p.

**What is not odds.** A token outside the vocabulary, or one whose q is NaN (all of a row of
draft logits that has NaN, +inf or nothing but -inf), cannot have been drawn: it is refused,
and the recovered token is drawn from p, which is lossless too. Rows of the target that are not
numbers, and those of temperature 0, accept their argmax and recover with it, as in `draw`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from fastdraft.kernels.reference.acceptance import Emitted, Status
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
from torch import Tensor


class _Law(NamedTuple):
    """What makes a law of rows of logits, as `draw` takes it."""

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    allowed: Tensor | None

    def of(self, request: Tensor, row: Tensor) -> _Law:
        """One entry for each of some rows: of the tokens allowed its own, else its request's."""
        top_k, top_p, min_p = (
            None if option is None else option[request]
            for option in (self.top_k, self.top_p, self.min_p)
        )
        allowed = None if self.allowed is None else self.allowed[row]
        return _Law(self.temperature[request], top_k, top_p, min_p, allowed)


def verify_rejection(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    draft_probs: Tensor | None = None,
    draft_logits: Tensor | None = None,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    allowed: Tensor | None = None,
    logprobs: bool = False,
    raw_logprobs: bool = False,
    max_draft: int,
) -> Emitted:
    """Rejection sampling of a ragged batch of drafts that are chains. The operands are trusted.

    draft_probs: floating (drafted, vocabulary), row i the law that draft token i was drawn from; or
    draft_logits, which softmax turns into it. The rest is as in `verify_sampled`. The logprobs of
    all tokens, recovered ones too, are those of the target's law, which they have as a whole. Time
    is linear in the logits and the draft's, memory in those of one slab.
    """
    draft = draft_probs if draft_logits is None else draft_logits
    assert draft is not None
    if len(draft_ids) == 0:
        # One token of no request, so that there is something to look at where nothing is drafted.
        draft_ids, draft = draft_ids.new_zeros(1), draft.new_zeros(1, draft.shape[1])
    requests = len(offsets) - 1
    law = _Law(temperature, top_k, top_p, min_p, allowed)

    # Each draft token against its row.
    token = torch.arange(len(draft_ids), device=logits.device)
    request = torch.searchsorted(offsets[1:], token, right=True).clamp(max=requests - 1)
    row = (token + request).clamp(max=len(logits) - 1)
    noise = exponential_noise(
        seeds[request],
        positions[request] + token - offsets[request],
        token.new_zeros(1),
        stream=ACCEPT_STREAM,
    )
    passed = torch.empty_like(token, dtype=torch.bool)
    drafted = []
    for part in slabs(len(token), logits):
        passed[part], chosen = _test(
            logits[row[part]],
            draft_ids[part].long(),
            draft[part],
            noise[part, 0],
            law.of(request[part], row[part]),
            is_logits=draft_logits is not None,
            logprobs=logprobs,
            raw_logprobs=raw_logprobs,
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
                logits[row[part]],
                draft_ids[token[part]].long(),
                draft[token[part]],
                refused[part],
                law.of(request[part], row[part]),
                seeds=seeds[part],
                positions=(positions + last[:, 0])[part],
                is_logits=draft_logits is not None,
                logprobs=logprobs,
                raw_logprobs=raw_logprobs,
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


def _test(
    logits: Tensor,
    draft_ids: Tensor,
    draft: Tensor,
    noise: Tensor,
    law: _Law,
    *,
    is_logits: bool,
    logprobs: bool,
    raw_logprobs: bool,
) -> tuple[Tensor, Chosen]:
    """Whether each row accepts its draft token, bool (rows,); and the draft tokens as chosen."""
    weights, maximum, by_argmax, best = weigh_rows(logits, **law._asdict())
    tokens = draft_ids.clamp(0, logits.shape[1] - 1)
    log_p = _log_p(tokens, logits, weights, maximum, by_argmax, law.temperature)
    if is_logits:
        odds = _odds(draft, is_logits=True)
        log_q = _at(odds, tokens).log() - total(odds).log()
    else:
        log_q = _at(draft, tokens).log()
    passed = torch.where(by_argmax, tokens == best, noise > log_q - log_p)
    passed &= (tokens == draft_ids) & (maximum != -torch.inf)
    return passed, Chosen(
        tokens,
        maximum,
        log_p.float() if logprobs else None,
        log_softmax_of(tokens, as_float(logits)) if raw_logprobs else None,
    )


def _draw_last(
    logits: Tensor,
    draft_ids: Tensor,
    draft: Tensor,
    refused: Tensor,
    law: _Law,
    *,
    seeds: Tensor,
    positions: Tensor,
    is_logits: bool,
    logprobs: bool,
    raw_logprobs: bool,
) -> Chosen:
    """The recovered token of each row whose draft token was refused, the bonus token of others."""
    weights, maximum, by_argmax, best = weigh_rows(logits, **law._asdict())
    odds = _odds(draft, is_logits=is_logits)
    scale = total(weights)
    if is_logits:
        scale = scale / total(odds)
    tokens = draft_ids.clamp(0, logits.shape[1] - 1)
    was_drawn = (tokens == draft_ids) & ~_at(odds, tokens).isnan()
    # Nothing is more than NaN, so nothing is left of p where there is no q to take from it.
    scale = torch.where(was_drawn, scale, torch.nan).to(weights.dtype)[:, None, None]
    residual = weights - odds * scale
    residual = torch.where(residual > 0, residual, 0.0)
    left = (residual > 0).flatten(1).any(1)
    drawn = race(
        torch.where((refused & left)[:, None, None], residual, weights),
        seeds=seeds,
        positions=positions,
        token_stream=torch.where(refused, RESIDUAL_TOKEN_STREAM, TOKEN_STREAM),
        chunk_stream=torch.where(refused, RESIDUAL_CHUNK_STREAM, CHUNK_STREAM),
    )
    drawn = torch.where(by_argmax, best, drawn)
    log_p = _log_p(drawn, logits, weights, maximum, by_argmax, law.temperature)
    return Chosen(
        drawn,
        maximum,
        log_p.float() if logprobs else None,
        log_softmax_of(drawn, as_float(logits)) if raw_logprobs else None,
    )


def _log_p(
    tokens: Tensor,
    logits: Tensor,
    weights: Tensor,
    maximum: Tensor,
    by_argmax: Tensor,
    temperature: Tensor,
) -> Tensor:
    """The logarithm of each token's probability under its row's law, float64 (rows,)."""
    x = as_float(logits.gather(1, tokens[:, None])[:, 0])
    above = (x - maximum).double() / torch.where(by_argmax, 1.0, temperature)
    removed = _at(weights, tokens) == 0
    return torch.where(removed, -torch.inf, above - total(weights).log())


def _odds(draft: Tensor, *, is_logits: bool) -> Tensor:
    """The draft's law q up to a factor, (rows, chunks, width); probabilities as they are."""
    if not is_logits:
        # Below 0 is only what fills the last chunk up.
        return chunked(draft.to(torch.promote_types(draft.dtype, torch.float32))).clamp(min=0.0)
    ones = torch.ones(len(draft), device=draft.device)
    return weigh_rows(draft, temperature=ones, top_k=None, top_p=None, min_p=None)[0]


def _at(weights: Tensor, tokens: Tensor) -> Tensor:
    """Each row's weight of its token, float64 (rows,)."""
    return weights.flatten(1).gather(1, tokens[:, None])[:, 0].double()
