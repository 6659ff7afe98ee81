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

In the words of the random contract (see `sampled`), with w the weights of the target's row and S
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

**Where p and q / k are equal up to rounding**, the residual may vanish for all tokens. The
probability of coming there is the sum of that same residual, so nothing but rounding, and any token
that the target could emit keeps the distribution to within it: the recovered token is drawn from p.

**What is not odds.** A token outside the vocabulary, or one whose q is 0 or NaN (all of a row of
draft logits that has NaN, +inf or nothing but -inf), cannot have been drawn, and a row of the
target that is empty or no numbers has no p: the draft ends before that token. At temperature 0 the
target keeps its argmax, whatever q is, and what is emitted is greedy.

**On a device** it takes two launches, or four where a request has filters. The first goes over the
logits and the draft's together and leaves the statistics of both, as sampled verification does for
the logits. The program that leaves a row's last ones
compares p and q of the row's draft token, and the one that does so for a request's last row finds
out which numbers of tokens may be kept. With filters, `filters` comes first, and a launch over the
rows compares. The last launch is over the requests: each of its programs leaves the residual's sums
in some chunks of the rows after these numbers of tokens, on average little more than one row. The
last one to do so decides how many tokens are kept, draws from that row's residual as rows are drawn
from their statistics, or after the whole draft the bonus token, and writes what the request emits.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastdraft.kernels import config, filters, grid, language, statistics
from fastdraft.kernels.acceptance import Chosen, accept, join
from fastdraft.kernels.chunks import as_float, reads_back, slabs, total
from fastdraft.kernels.filters import NEGLIGIBLE, log_softmax_of, weigh_rows
from fastdraft.kernels.grid import Location, Rows
from fastdraft.kernels.language import jit, tl
from fastdraft.kernels.noise import (
    ACCEPT_NOISE,
    ACCEPT_STREAM,
    CHUNK_NOISE,
    CHUNK_STREAM,
    RESIDUAL_CHUNK_NOISE,
    RESIDUAL_CHUNK_STREAM,
    RESIDUAL_TOKEN_NOISE,
    RESIDUAL_TOKEN_STREAM,
    TOKEN_NOISE,
    TOKEN_STREAM,
    exponential_noise,
    noise_of,
)
from fastdraft.kernels.operands import Batch, Sampling, Status, Verified, Warpers
from fastdraft.kernels.sampled import draw_row, race
from fastdraft.kernels.statistics import LOG2_E, OUT, Statistics
from fastdraft.kernels.workspace import Scratch, take_output

# Two rows in the registers at a time, and much besides, want twice the threads.
_LAST_WARPS: Final = 2 * config.WARPS
# Instead of log k: a number of tokens that is not kept, and the whole draft, which is.
_REFUSED = tl.constexpr(1.0)
_WHOLE = tl.constexpr(2.0)


def verify(batch: Batch, sampling: Sampling, draft_logits: Tensor) -> Verified:
    """Rejection sampling of drafts that are chains, as blocks."""
    if language.has_kernels(batch.logits):
        return launch(batch, sampling, draft_logits)
    return plain(batch, sampling, draft_logits)


def plain(batch: Batch, sampling: Sampling, draft_logits: Tensor) -> Verified:
    """Rejection sampling of drafts that are chains, as blocks.

    The logprobs of all tokens, recovered ones too, are those of the target's distribution, which
    they have as a whole. Time is linear in the logits and the draft's, memory in those of one slab.
    """
    logits, draft_ids, offsets, max_draft = batch[:4]
    requests = batch.requests
    if len(draft_ids) == 0:
        # One token of no request, so that there is something to look at where nothing is drafted.
        batch = batch._replace(draft_ids=draft_ids.new_zeros(1))
        draft_logits = draft_logits.new_zeros(1, logits.shape[1])
    drafted = len(batch.draft_ids)

    # Each draft token against its row.
    token = torch.arange(drafted, device=logits.device)
    request = torch.searchsorted(offsets[1:], token, right=True).clamp(max=requests - 1)
    rows = _Drafted(
        batch,
        sampling,
        draft_logits,
        (token + request).clamp(max=len(logits) - 1),
        request,
        token,
    )
    tests = [_ratio_of(rows.of(part)) for part in slabs(drafted, logits)]
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

    # The residual of p, R / S, where a number is not certain; no h is above its k.
    noise = exponential_noise(sampling.seeds, sampling.positions, step, stream=ACCEPT_STREAM)
    is_open = (step < end) & (log_k < 0) & (noise > -log_k)
    slot = request, (token - offsets[request]).clamp(max=max_draft)
    asked = is_open[slot].nonzero()[:, 0] if reads_back(logits) else token
    left = torch.ones(drafted, dtype=torch.float64, device=logits.device)
    for part in slabs(len(asked), logits):
        left[asked[part]] = _left(rows.of(asked[part]), log_k[slot][asked[part]])
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

    def emitted(of_drafted: Any, of_last: Any, fill: float) -> Any:
        if of_drafted is None:
            return None
        values = torch.where(is_last, of_last[:, None], fill)
        return torch.where(accepted, of_drafted[index], values)

    nan = emitted(chosen.maxima, drawn.maxima, 0.0).isnan().any(1)
    return Verified(
        emitted(chosen.tokens, drawn.tokens, -1).int(),
        (last[:, 0] + 1 - stopped.long()).int(),
        (nan * Status.NAN + stopped * Status.EMPTY).int(),
        torch.where(accepted, step, -1)[:, :max_draft].int(),
        emitted(chosen.logprobs, drawn.logprobs, torch.nan),
        emitted(chosen.raw_logprobs, drawn.raw_logprobs, torch.nan),
    )


class _Drafted(NamedTuple):
    """Some rows of a batch, each with a draft token. row, request, token: int64 (n,), indices."""

    batch: Batch
    sampling: Sampling
    draft_logits: Tensor
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
            self.draft_logits[token],
            batch.logprobs,
            batch.raw_logprobs,
        )


class _Rows(NamedTuple):
    """Rows of a batch with what they are verified by, and what that makes of them.

    logits: (n, vocabulary); sampling: of the rows; weights, maximum, by_argmax, best: as
    `weigh_rows` gives them; draft_ids: int64 (n,); draft_logits: (n,
    vocabulary), of these; logprobs, raw_logprobs: as in `Batch`.
    """

    logits: Tensor
    sampling: Sampling
    weights: Tensor
    maximum: Tensor
    by_argmax: Tensor
    best: Tensor
    draft_ids: Tensor
    draft_logits: Tensor
    logprobs: bool
    raw_logprobs: bool

    def log_p(self, tokens: Tensor) -> Tensor:
        """The logarithm of each token's probability under its row's distribution, float64 (n,)."""
        x = as_float(self.logits.gather(1, tokens[:, None])[:, 0])
        heat = torch.where(self.by_argmax, 1.0, self.sampling.warpers.temperature)
        above = (x - self.maximum).double() / heat - total(self.weights).log()
        return torch.where(_weight_of(self.weights, tokens) == 0, -torch.inf, above)

    def log_q(self, tokens: Tensor) -> Tensor:
        """The same under the draft's distribution; -inf or NaN where none has drawn the token."""
        odds = self.odds()
        return _weight_of(odds, tokens).log() - total(odds).log()

    def residual(self, log_k: Tensor) -> Tensor:
        """The r of the random contract, like the weights. log_k: float64 (n,)."""
        odds = self.odds()
        scale = total(self.weights) * torch.exp(-log_k) / total(odds)
        residual = self.weights - odds * scale.to(self.weights.dtype)[:, None, None]
        return torch.where(residual > 0, residual, 0.0)

    def odds(self) -> Tensor:
        """The draft's distribution q up to a factor, like the weights."""
        ones = torch.ones(len(self.draft_logits), device=self.draft_logits.device)
        return weigh_rows(self.draft_logits, Warpers(ones))[0]

    def chosen(self, tokens: Tensor, log_p: Tensor | None = None) -> Chosen:
        logprobs = raw_logprobs = None
        if self.logprobs:
            logprobs = (self.log_p(tokens) if log_p is None else log_p).float()
        if self.raw_logprobs:
            raw_logprobs = log_softmax_of(tokens, self.logits)
        return Chosen(tokens, self.maximum, logprobs, raw_logprobs)


def _ratio_of(rows: _Rows) -> tuple[Tensor, Chosen]:
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


def _weight_of(weights: Tensor, tokens: Tensor) -> Tensor:
    """Each row's weight of its token, float64 (rows,)."""
    return weights.flatten(1).gather(1, tokens[:, None])[:, 0].double()


@jit
def _is_allowed(allowed, token, ALLOWED: tl.constexpr):
    """True if a row's mask allows one token, a scalar."""
    if ALLOWED:
        return ((tl.load(allowed + token // 32) >> (token % 32)) & 1) != 0
    return token == token


@jit
def _first_of(keys, key, location, batch, logits, C):
    """The first token whose logit has the row's key; keys: those of the chunks' maxima."""
    chunk = tl.min(tl.where(keys == key, tl.arange(0, C.BLOCK), C.BLOCK - 1))
    x, token = grid.load_chunk(location, batch, logits, chunk, C)
    return tl.min(tl.min(tl.where(grid.ordered_key(x) == key, token, logits.vocabulary), 1), 0)


@jit
def _draft_statistics(location, draft, scratch):
    """The statistics of the draft logits for a row."""
    chunks = statistics.row_chunks(location.row, draft)
    return Statistics(scratch.draft_maximum + chunks, scratch.draft_sum + chunks)


@jit
def _draft_totals(location, draft, scratch, BLOCK: tl.constexpr):
    """The key of the largest draft logit for a row, and the chunks' sums relative to it."""
    left = _draft_statistics(location, draft, scratch)
    _, key, weights = statistics.totals(left, LOG2_E, draft, BLOCK)
    return key, weights


@jit
def _log_q(location, draft, at, token, scratch, BLOCK: tl.constexpr):
    """The logarithm of a token's probability under the draft's distribution; NaN where it has none.

    at: the draft token that the distribution is of.
    """
    q = tl.load(grid.values_of(draft, at) + token.to(tl.int64) * draft.token_stride).to(tl.float32)
    key, weights = _draft_totals(location, draft, scratch, BLOCK)
    above = q - grid.value_of(key)
    never = tl.exp2(above * LOG2_E) <= NEGLIGIBLE
    return tl.where(never, float("-inf"), above) - tl.log(tl.sum(weights))


@jit
def _test(location, batch, logits, draft, scratch, C):
    """Leaves in `row_ratios` the logarithm of p / q of a row's draft token, NaN where the draft
    ends before it."""
    row, request = location.row, location.request
    at = row - request
    drafted = tl.load(batch.draft_ids + at).to(tl.int64)
    known = (drafted >= 0) & (drafted < logits.vocabulary)
    token = tl.where(known, drafted, 0).to(tl.int32)
    heat = tl.load(batch.temperature + request)
    divisor = statistics.divisor_of(heat)
    keys, key, weights = statistics.totals_of(location, logits, scratch, LOG2_E / divisor, C.BLOCK)

    x = tl.load(grid.values_of(logits, row) + token.to(tl.int64) * logits.token_stride).to(
        tl.float32
    )
    x = tl.where(_is_allowed(grid.mask_of(batch, row), token, C.ALLOWED), x, float("-inf"))
    above = (x - grid.value_of(key)) / divisor
    never = tl.exp(above) <= NEGLIGIBLE
    if scratch.lowest is not None:
        lowest = tl.load(scratch.lowest + row)
        never = never | ~grid.passes(x, token, lowest, tl.load(scratch.last_tied + row))
    log_p = tl.where(never, float("-inf"), above - tl.log(tl.sum(weights)))
    log_q = _log_q(location, draft, at, token, scratch, C.BLOCK)
    ratio = log_p - log_q
    drawn = known & (key > grid.EMPTY_KEY)
    if heat == 0:
        is_best = token == _first_of(keys, key, location, batch, logits, C)
        ratio = tl.where(is_best, 0.0, -float("inf"))
    else:
        drawn = drawn & (key < grid.INFINITE_KEY) & (log_q > float("-inf"))
    tl.store(scratch.row_ratios + row, tl.where(drawn, ratio, float("nan")))
    statistics.leave_token(location, logits, scratch, key, token, log_p, C.BLOCK)


@jit
def _plan(location, batch, scratch, C):
    """Leaves in `row_log_k`, for each number of a request's draft tokens, log k if that number may
    be kept, else `_REFUSED`; `_WHOLE` at the draft's end. It is certain where it is 0 or `_WHOLE`.
    """
    first, size = location.first, location.size
    end = size
    for block in range(0, size, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        ratios = scratch.row_ratios + first + slot
        ratio = tl.load(ratios, mask=slot < size, other=0.0, cache_modifier=".cg")
        end = tl.minimum(end, tl.min(tl.where(ratio != ratio, slot, size)))

    seed = tl.load(batch.seeds + location.request)
    position = tl.load(batch.positions + location.request)
    # log k is how far the sum of the log ratios is below the largest one so far, from 0 up.
    before = (size * 0).to(tl.float32)
    highest = before
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        ratios = scratch.row_ratios + first + slot - 1
        drawn = (slot > 0) & (slot <= end)
        ratio = tl.load(ratios, mask=drawn, other=0.0, cache_modifier=".cg")
        sums = before + tl.cumsum(ratio)
        so_far = tl.where(slot[None, :] <= slot[:, None], sums[None, :], -float("inf"))
        log_k = sums - tl.maximum(tl.max(so_far, 1), highest)
        passed = noise_of(seed, position, slot, ACCEPT_NOISE) > -log_k
        passed = passed & (slot <= end)
        left = tl.where(passed, tl.where(slot == end, _WHOLE, log_k), _REFUSED)
        tl.store(scratch.row_log_k + first + slot, left, mask=slot <= size)
        before = tl.sum(tl.where(slot == block + C.SLOTS - 1, sums, 0.0))
        highest = tl.maximum(highest, tl.max(sums))


@jit
def _test_and_plan(location, batch, logits, draft, scratch, C):
    """`_test` of a row with a draft token, and of a request's last one `_plan`."""
    at = location.row - location.request
    if (at >= 0) & (at < batch.drafted):
        _test(location, batch, logits, draft, scratch, C)
    else:
        tl.store(scratch.row_ratios + location.row, float("nan"))
    if grid.last_to_arrive(scratch.request_arrivals + location.request, location.size, C.WAIT):
        _plan(location, batch, scratch, C)


@jit
def _planned(slot, first, size, scratch):
    """The plan of the slots, from `_plan`; a request without a draft is whole at once."""
    left = tl.load(scratch.row_log_k + first + slot, mask=slot <= size, other=_REFUSED)
    return tl.where(slot == size, tl.where(size == 0, _WHOLE, left), left)


@jit
def _next(slot, log_k, after, size):
    """The first slot beyond `after` that may be kept; size + 1 for none."""
    return tl.min(tl.where((slot > after) & (log_k != _REFUSED), slot, size + 1))


class _Against(NamedTuple):
    """A row that a number of draft tokens leads to, against the next token. Made in kernels.

    refused: whether that token was refused; at: its index; key: of the row's maximum; total: the
    sum of the row's weights; factor: that of the draft's distribution in the residual; draft_top:
    the largest of the draft's logits; lowest, last_tied: what the row's filters keep.
    """

    refused: Any
    at: Any
    key: Any
    total: Any
    factor: Any
    draft_top: Any
    lowest: Any
    last_tied: Any


@jit
def _against(location, batch, log_k, scale, logits, draft, scratch, C):
    slot = location.row - location.first
    at = grid.drafted_at(location, slot + 1)
    refused = (slot < location.size) & (log_k <= 0) & (at >= 0) & (at < batch.drafted)
    at = tl.where(refused, at, 0).to(tl.int64)
    _, key, weights = statistics.totals_of(location, logits, scratch, scale, C.BLOCK)
    total = tl.sum(weights)
    draft_key, draft_weights = _draft_totals(location, draft, scratch, C.BLOCK)
    draft_top = grid.value_of(draft_key)
    factor = total * tl.exp(-log_k) / tl.sum(draft_weights)
    lowest = tl.full((), float("-inf"), tl.float32)
    last_tied = slot * 0
    if scratch.lowest is not None:
        lowest = tl.load(scratch.lowest + location.row)
        last_tied = tl.load(scratch.last_tied + location.row)
    return _Against(refused, at, key, total, factor, draft_top, lowest, last_tied)


@jit
def _residual(x, q, token, against, scale, scratch):
    """max(w - factor q, 0) of logits x and the draft's distribution q, 0 where q is no number."""
    weight = tl.exp2((x - grid.value_of(against.key)) * scale)
    weight = tl.where(weight > NEGLIGIBLE, weight, 0.0)
    if scratch.lowest is not None:
        kept = grid.passes(x, token, against.lowest, against.last_tied)
        weight = tl.where(kept, weight, 0.0)
    q = tl.exp2((q - against.draft_top) * LOG2_E)
    q = tl.where(q <= NEGLIGIBLE, 0.0, q)
    left = weight - q * against.factor
    return tl.where(left > 0, left, 0.0)


@jit
def rejection_rows_kernel(batch, logits, draft, scratch, output, C):
    """The plans of the requests, and the row statistics that they are made of.

    With filters, whose thresholds come between, it leaves the statistics alone.
    """
    part = tl.program_id(0) % batch.programs
    location, used = grid.locate(tl.program_id(0) // batch.programs, batch, C)
    if not used:
        return
    row = location.row
    has_draft = row - location.first < location.size
    statistics.leave_logits(location, batch, logits, scratch, C)
    at = row - location.request
    if has_draft & (at >= 0) & (at < batch.drafted):
        left = _draft_statistics(location, draft, scratch)
        statistics.leave_part(
            draft, grid.values_of(draft, at), left.sum, part, batch.tiles, LOG2_E,
            True, left, left, left.sum, C.CHUNKS, False, False, False,
        )  # fmt: skip
    if scratch.lowest is not None or not has_draft:
        return
    if grid.last_to_arrive(scratch.row_arrivals + row, batch.programs, C.WAIT):
        _test_and_plan(location, batch, logits, draft, scratch, C)


@jit
def rejection_plans_kernel(batch, logits, draft, scratch, output, C):
    """The plans of the requests after filters."""
    location, used = grid.locate(tl.program_id(0), batch, C)
    if used & (location.row - location.first < location.size):
        _test_and_plan(location, batch, logits, draft, scratch, C)


@jit
def _rows_of(request, batch):
    """A request's first row and the size of its draft, in range whatever the offsets hold."""
    rows = batch.rows
    first = tl.minimum(tl.maximum(tl.load(batch.offsets + request) + request, 0), rows - 1)
    first = first.to(tl.int32)
    end = tl.minimum(tl.load(batch.offsets + request + 1) + request + 1, rows).to(tl.int32)
    return first, tl.minimum(tl.maximum(end - first - 1, 0), batch.max_draft)


@jit
def rejection_kernel(batch, logits, draft, scratch, output, C):
    """The emitted tokens of each request, from its plan."""
    program = tl.program_id(0)
    request = program // batch.programs
    part = program % batch.programs
    first, size = _rows_of(request, batch)

    sure = size * 0
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        log_k = _planned(slot, first, size, scratch)
        certain = (log_k == 0) | (log_k == _WHOLE)
        sure = tl.maximum(sure, tl.max(tl.where(certain, slot, 0)))

    chunks = tl.cdiv(logits.vocabulary, grid.CHUNK)
    heat = tl.load(batch.temperature + request)
    scale = statistics.scale_of(heat)
    end_tile = tl.minimum((part + 1) * batch.tiles, tl.cdiv(chunks, C.CHUNKS))
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        log_k = _planned(slot, first, size, scratch)
        kept = _next(slot, log_k, sure - 1, size)
        while kept <= size:
            location = Location(first + kept, request, first, size)
            own_log_k = tl.sum(tl.where(slot == kept, log_k, 0.0))
            against = _against(location, batch, own_log_k, scale, logits, draft, scratch, C)
            if against.refused & (heat != 0):
                values = grid.values_of(logits, location.row)
                odds = grid.values_of(draft, against.at)
                mask = grid.mask_of(batch, location.row)
                left_sum = scratch.residual_sum + statistics.row_chunks(location.row, logits)
                for tile in range(part * batch.tiles, end_tile):
                    unit = statistics.tile_units(tile, logits, C.CHUNKS)
                    x = grid.load_allowed(logits, values, mask, unit, C.ALLOWED)
                    q = grid.load_units(draft, odds, unit, False)
                    token = grid.tokens_of(unit, logits)
                    left = _residual(x, q, token, against, scale, scratch)
                    chunk = tl.arange(0, C.CHUNKS) + tile * C.CHUNKS
                    left = tl.sum(tl.sum(tl.sum(left, 3), 0), 1)
                    tl.store(left_sum + chunk, left, mask=chunk < chunks)
            kept = _next(slot, log_k, kept, size)

    if not grid.last_to_arrive(scratch.request_arrivals + request, batch.programs, C.WAIT):
        return
    # Read again: in registers through the loop above they would leave too few for it.
    first, size = _rows_of(request, batch)
    heat = tl.load(batch.temperature + request)
    scale = statistics.scale_of(heat)
    seed = tl.load(batch.seeds + request)
    index = tl.arange(0, C.BLOCK)
    last = sure
    for block in range(0, size + 1, C.SLOTS):
        slot = block + tl.arange(0, C.SLOTS)
        log_k = _planned(slot, first, size, scratch)
        noise = noise_of(seed, tl.load(batch.positions + request), slot, ACCEPT_NOISE)
        kept = _next(slot, log_k, sure, size)
        while kept <= size:
            location = Location(first + kept, request, first, size)
            left_sum = scratch.residual_sum + statistics.row_chunks(location.row, logits)
            left = tl.load(left_sum + index, mask=index < chunks, other=0.0, cache_modifier=".cg")
            _, _, weights = statistics.totals_of(location, logits, scratch, scale, C.BLOCK)
            below = tl.exp(-tl.sum(tl.where(slot == kept, log_k, 0.0))) - 1
            needed = tl.log(1 + tl.sum(weights) * below / tl.sum(left))
            if tl.sum(tl.where(slot == kept, noise, 0.0)) > needed:
                last = kept
            kept = _next(slot, log_k, kept, size)

    location = Location(first + last, request, first, size)
    row = location.row
    own_log_k = tl.sum(_planned(last + tl.zeros((1,), tl.int32), first, size, scratch))
    against = _against(location, batch, own_log_k, scale, logits, draft, scratch, C)
    refused = against.refused
    left_sum = scratch.residual_sum + statistics.row_chunks(row, logits)
    chunk_stream = tl.where(refused, RESIDUAL_CHUNK_NOISE, CHUNK_NOISE)
    token_stream = tl.where(refused, RESIDUAL_TOKEN_NOISE, TOKEN_NOISE)
    position = tl.load(batch.positions + request) + last
    left_chunks = tl.where(refused & (heat != 0), chunks, 0)
    left = tl.load(left_sum + index, mask=index < left_chunks, other=0.0, cache_modifier=".cg")
    if tl.max(left) > 0:
        ratio = left / noise_of(seed, position, index, RESIDUAL_CHUNK_NOISE)
        _best, chunk = grid.unpack(tl.max(grid.pack(ratio.to(tl.int32, bitcast=True), index)))
        x, token = grid.load_chunk(location, batch, logits, chunk, C)
        odds = grid.values_of(draft, against.at)
        q = grid.load_units(draft, odds, grid.units_of(chunk, logits), False)
        left_of = _residual(x, q, token, against, scale, scratch)
        ratio = left_of / noise_of(seed, position, token, RESIDUAL_TOKEN_NOISE)
        score = tl.where(token < logits.vocabulary, ratio.to(tl.int32, bitcast=True), OUT)
        _best, found = grid.unpack(tl.max(tl.max(grid.pack(score, token), 1), 0))
        value = tl.sum(tl.sum(tl.where(token == found, x, 0.0), 1), 0)
        above = (value - grid.value_of(against.key)) * scale / LOG2_E
        logprob = above - tl.log(against.total)
    else:
        _best, found, logprob = draw_row(
            location, batch, logits, scratch, heat, seed, position, chunk_stream, token_stream, C
        )

    # The last token's row ends the draft, whatever the draft's next token is.
    statistics.leave_token(location, logits, scratch, against.key, found, logprob, C.BLOCK)
    tl.debug_barrier()
    first, _size = _rows_of(request, batch)  # again: kept in registers, it would spill on sm_100
    kept = Location(first, request, first, last)
    accept(kept, batch, logits, scratch, output, C)


def launch(batch: Batch, sampling: Sampling, draft_logits: Tensor) -> Verified:
    """The same, of logits of 16 or 32 bits.

    Two launches without filters, four with one. The logits and the draft's are read once; for each
    request again the row of both that its last token comes from, and those after which it might
    have ended. The results are the workspace's buffers, if there is one.
    """
    logits, warpers = batch.logits, sampling.warpers
    output = take_output(batch)
    scratch = Scratch.take(
        batch,
        *(filters.BUFFERS if warpers.has_filters else ()),
        "draft_maximum",
        "draft_sum",
        "chunk_maximum",
        "chunk_sum",
        "row_arrivals",
        "row_results",
        "row_ratios",
        "row_log_k",
        "residual_sum",
        "request_arrivals",
    )
    shared: dict[str, Any] = {
        "logits": Rows.of(logits),
        "draft": Rows.of(draft_logits, config.width(logits.dtype)),
        "scratch": scratch,
    }
    rows, vocabulary = logits.shape
    split = config.split_chunks(rows, vocabulary)
    grid.run(rejection_rows_kernel, rows, batch, sampling, split=split, **shared)
    if warpers.has_filters:
        filters.launch(batch, sampling, scratch)
        grid.run(rejection_plans_kernel, rows, batch, sampling, **shared)
    split = config.split_chunks(batch.requests, vocabulary)
    last: dict[str, Any] = {"output": output, "num_warps": _LAST_WARPS}
    grid.run(rejection_kernel, batch.requests, batch, sampling, split=split, **last, **shared)
    return output
