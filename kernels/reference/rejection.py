"""Rejection sampling: what the target makes of drafts whose tokens were drawn from known odds.

A draft is verified as a block (Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami and Suresh, Block
verification accelerates speculative decoding, 2025, algorithm 2). With q(d_j) the probability that
draft token j, from 1, was drawn with, and p(d_j) the target's own, the first j tokens have

    k_0 = 1,  k_j = min(1, k_(j-1) p(d_j) / q(d_j))

which is the probability that at least j tokens are kept. How many are is decided from the last
token back, each number j with the probability h_j that makes k_j come true:

    r_t  = max(p_t - q_t / k_j, 0), of all tokens t after j draft tokens;  R_j their sum
    h_j  = R_j / (R_j + 1 / k_j - 1);  after the last draft token q = 0, so h_j = k_j

The largest j that is kept stays, 0 if none. The token after it is recovered from its r, normalised;
after the whole draft the bonus token comes from p. What is emitted, and then sampled on, has
exactly the target's distribution, whatever q is (theorem 1). On average as many tokens are kept as
any verification of one draft can keep, and never fewer than token by token, where k_j is the
product of min(1, p / q) (theorem 2). Where a draft ends may depend on its tokens so far.

In the words of the random contract (see `sampling`), with w the weights of the target's row and S
their sum; E(2, j) is the noise of the position of the request's next token, the other noise that of
the position of the token that is drawn:

    j is kept   iff  E(2, j) > log(1 + S (1 / k_j - 1) / R_j)
    recovered   c* = argmax over the chunks c of    sum(r_t for t in c) / E(4, c)
                t* = argmax over the tokens in c*   r_t / E(3, t)
                r_t = max(w_t - S q_t / k_j, 0), and R_j is their sum here
    bonus       as `draw` has it: what sampling without a draft gives at that position

-E is the logarithm of a uniform number, and above -2**-65 never, so j is always kept where k_j = 1,
as where the target likes all j tokens no less than the drafter, and a token with p(d) = 0 never,
not even where a number is tiny. The noise of acceptance, of the residual and of the bonus are
independent. That which the draft was drawn with has to be, too, **and new in each step**: how many
tokens were kept depends on those that were not, so noise that has drawn a refused token is spent.
The noise of acceptance is new in each step as well, since the position of the next token is.

**Where p and q / k are equal up to rounding**, the residual may vanish for all tokens. The chance
of coming there is the sum of that same residual, so nothing but rounding, and any token that the
target could emit keeps the distribution to within it: the recovered token is drawn from p.

**What is not odds.** A token outside the vocabulary, or one whose q is 0 or NaN (all of a row of
draft logits that has NaN, +inf or nothing but -inf), cannot have been drawn, and a row of the
target that is empty or no numbers has no p: the draft ends before that token. At temperature 0 the
target keeps its argmax, whatever q is, and what is emitted is greedy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft.kernels.operands import Batch, DraftDistribution, Sampling, Status, Verified, Warpers
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
    reads_back,
    slabs,
    total,
    weigh_rows,
)


def verify_rejection(
    batch: Batch, sampling: Sampling, draft_distribution: DraftDistribution
) -> Verified:
    """Rejection sampling of drafts that are chains, as blocks.

    The logprobs of all tokens, recovered ones too, are those of the target's distribution, which
    they have as a whole. Time is linear in the logits and the draft's, memory in those of one slab.
    """
    logits, draft_ids, offsets, max_draft = batch[:4]
    requests = batch.requests
    if len(draft_ids) == 0:
        # One token of no request, so that there is something to look at where nothing is drafted.
        batch = batch._replace(draft_ids=draft_ids.new_zeros(1))
        values = draft_distribution.values.new_zeros(1, logits.shape[1])
        draft_distribution = draft_distribution._replace(values=values)
    drafted = len(batch.draft_ids)

    # Each draft token against its row.
    token = torch.arange(drafted, device=logits.device)
    request = torch.searchsorted(offsets[1:], token, right=True).clamp(max=requests - 1)
    rows = _Drafted(
        batch,
        sampling,
        draft_distribution,
        (token + request).clamp(max=len(logits) - 1),
        request,
        token,
    )
    tests = [_test(rows.of(part)) for part in slabs(drafted, logits)]
    chosen = join([each for _, each in tests])

    # A column for each number of tokens that may be kept.
    first = offsets[:-1, None]
    size = (offsets[1:, None] - first).clamp(max=max_draft)
    step = torch.arange(max_draft + 1, device=logits.device)
    index = (first + step).clamp(max=drafted - 1)
    log_ratios = torch.cat([log_ratio for log_ratio, _ in tests])[index]
    end = ((step < size) & ~log_ratios.isnan()).cumprod(1).sum(1, keepdim=True)
    log_k = torch.zeros(requests, max_draft + 1, dtype=torch.float64, device=logits.device)
    for j in range(max_draft):
        log_k[:, j + 1] = (log_k[:, j] + log_ratios[:, j]).clamp(max=0.0)

    # What the draft leaves of p, R / S, where a number is not certain; no h is above its k.
    noise = exponential_noise(sampling.seeds, sampling.positions, step, stream=ACCEPT_STREAM)
    is_open = (step < end) & (log_k < 0) & (noise > -log_k)
    place = request, (token - offsets[request]).clamp(max=max_draft)
    asked = is_open[place].nonzero()[:, 0] if reads_back(logits) else token
    left = torch.ones(drafted, dtype=torch.float64, device=logits.device)
    for part in slabs(len(asked), logits):
        left[asked[part]] = _left(rows.of(asked[part]), log_k[place][asked[part]])
    left = torch.where(step < end, left[index], 1.0)
    passed = noise > torch.log1p(torch.expm1(-log_k) / left)
    kept = torch.where(step < end, (log_k == 0) | is_open & passed, (step == end) & passed)
    last = torch.where(kept, step, 0).amax(1, keepdim=True)

    # The row that each request's last token is drawn from: the one after the tokens kept.
    request = torch.arange(requests, device=logits.device)
    token = (first + last)[:, 0]
    rows = rows._replace(row=token + request, request=request, token=token.clamp(max=drafted - 1))
    refused, last_log_k = (last < end)[:, 0], log_k.gather(1, last)[:, 0]
    drawn = join(
        [
            _draw_last(rows.of(part), refused[part], last[part, 0], last_log_k[part])
            for part in slabs(requests, logits)
        ]
    )

    accepted = step < last
    stopped = drawn.maxima == -torch.inf
    is_last = (step == last) & ~stopped[:, None]

    def emitted(of_drafted: Tensor, of_last: Tensor, fill: float) -> Tensor:
        values = torch.where(is_last, of_last[:, None], fill)
        return torch.where(accepted, of_drafted[index], values)

    nan = emitted(chosen.maxima, drawn.maxima, 0.0).isnan().any(1)
    return Verified(
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


class _Drafted(NamedTuple):
    """Some rows of a batch, each with a draft token. row, request, token: int64 (n,), indices."""

    batch: Batch
    sampling: Sampling
    draft_distribution: DraftDistribution
    row: Tensor
    request: Tensor
    token: Tensor

    def of(self, part: Tensor | slice) -> _Rows:
        """A part of the rows, weighed."""
        batch, row, token = self.batch, self.row[part], self.token[part]
        logits, sampling = batch.logits[row], self.sampling.of(self.request[part])
        allowed = None if batch.allowed is None else batch.allowed[row]
        return _Rows(
            logits,
            sampling,
            *weigh_rows(logits, sampling.warpers, allowed),
            batch.draft_ids[token].long(),
            self.draft_distribution._replace(values=self.draft_distribution.values[token]),
            batch.logprobs,
            batch.raw_logprobs,
        )


class _Rows(NamedTuple):
    """Rows of a batch with what they are verified by, and what that makes of them.

    logits: (n, vocabulary); sampling: of the rows; weights, maximum, by_argmax, best: as
    `weigh_rows` gives them; draft_ids: int64 (n,); draft_distribution: of these; logprobs,
    raw_logprobs: as in `Batch`.
    """

    logits: Tensor
    sampling: Sampling
    weights: Tensor
    maximum: Tensor
    by_argmax: Tensor
    best: Tensor
    draft_ids: Tensor
    draft_distribution: DraftDistribution
    logprobs: bool
    raw_logprobs: bool

    def log_p(self, tokens: Tensor) -> Tensor:
        """The logarithm of each token's probability under its row's distribution, float64 (n,)."""
        x = as_float(self.logits.gather(1, tokens[:, None])[:, 0])
        heat = torch.where(self.by_argmax, 1.0, self.sampling.warpers.temperature)
        above = (x - self.maximum).double() / heat - total(self.weights).log()
        return torch.where(_at(self.weights, tokens) == 0, -torch.inf, above)

    def log_q(self, tokens: Tensor) -> Tensor:
        """The same under the draft's distribution; -inf or NaN where none has drawn the token."""
        if not self.draft_distribution.is_logits:
            return _at(self.draft_distribution.values, tokens).log()
        odds = _odds(self.draft_distribution)
        return _at(odds, tokens).log() - total(odds).log()

    def residual(self, log_k: Tensor) -> Tensor:
        """The r of the random contract, like the weights. log_k: float64 (n,)."""
        odds = _odds(self.draft_distribution)
        scale = total(self.weights) * torch.exp(-log_k)
        if self.draft_distribution.is_logits:
            scale = scale / total(odds)
        residual = self.weights - odds * scale.to(self.weights.dtype)[:, None, None]
        return torch.where(residual > 0, residual, 0.0)

    def chosen(self, tokens: Tensor, log_p: Tensor | None = None) -> Chosen:
        logprobs = raw_logprobs = None
        if self.logprobs:
            logprobs = (self.log_p(tokens) if log_p is None else log_p).float()
        if self.raw_logprobs:
            raw_logprobs = log_softmax_of(tokens, self.logits)
        return Chosen(tokens, self.maximum, logprobs, raw_logprobs)


def _test(rows: _Rows) -> tuple[Tensor, Chosen]:
    """The logarithm of each draft token's p / q, float64 (rows,), NaN where the draft ends before
    it; and the draft tokens as chosen."""
    tokens = rows.draft_ids.clamp(0, rows.logits.shape[1] - 1)
    log_p, log_q = rows.log_p(tokens), rows.log_q(tokens)
    is_known, is_greedy = tokens == rows.draft_ids, rows.sampling.warpers.temperature == 0
    matches = torch.where(tokens == rows.best, 0.0, -torch.inf).double()
    log_ratio = torch.where(is_greedy, matches, log_p - log_q)
    drawn = torch.where(
        is_greedy, rows.maximum != -torch.inf, rows.maximum.isfinite() & (log_q > -torch.inf)
    )
    return torch.where(is_known & drawn, log_ratio, torch.nan), rows.chosen(tokens, log_p)


def _left(rows: _Rows, log_k: Tensor) -> Tensor:
    """R / S of the random contract, float64 (rows,)."""
    return total(rows.residual(log_k)) / total(rows.weights)


def _draw_last(rows: _Rows, refused: Tensor, depth: Tensor, log_k: Tensor) -> Chosen:
    """The recovered token of each row whose draft token was refused, the bonus token of others.

    depth: int64 (rows,), how many draft tokens were kept; log_k: float64 (rows,), of that number.
    """
    residual = rows.residual(log_k)
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
