"""One token from each row of logits: the largest, or one drawn as the random contract has it.

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
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastdraft.kernels.operands import Likeliest, Sampling, Warpers
from fastdraft.kernels.reference.noise import CHUNK_STREAM, TOKEN_STREAM, exponential_noise

CHUNK: Final = 1024

_NEGLIGIBLE: Final = 2.0**-125

# Rows are drawn in slabs of about this many logits: enough to hide the cost of an operator, few
# enough for a slab to stay in a CPU's cache, and for any batch to need little memory beyond its
# logits. No result depends on it.
_SLAB: Final = {"cpu": 1 << 20, "cuda": 1 << 26}

# Where `_threshold` looks first, and for a nucleus in how many columns. No result depends on them.
_COLUMN_HEIGHT: Final = 32
_NUCLEUS: Final = 64


class Chosen(NamedTuple):
    """The token chosen from each row of logits, and what is known of it.

    tokens: int64 (rows,); that of an empty row means nothing, but is in range.
    maxima: (rows,), the largest logit of each row that is allowed, in float32 or float64 where it
        was drawn from; -inf marks an empty row.
    logprobs: float32 (rows,), the log-probability of the token under the distribution that it was
        chosen from, for an argmax the softmax at temperature 1; NaN where the row has no softmax.
        None unless asked for.
    raw_logprobs: the same under the softmax of the logits as they came, with all tokens allowed.
    """

    tokens: Tensor
    maxima: Tensor
    logprobs: Tensor | None
    raw_logprobs: Tensor | None


def argmax(
    logits: Tensor,
    allowed: Tensor | None = None,
    *,
    logprobs: bool = False,
    raw_logprobs: bool = False,
) -> Chosen:
    """The token and the value of each row's maximum, for logits (rows, vocabulary) of any stride.

    Ties go to the lowest id and NaN is above all, as in torch.argmax, which gives the same tokens
    but looks at one logit at a time on a CPU. allowed: as in `mask`.
    """
    if allowed is None and not logprobs and not raw_logprobs:
        return Chosen(*_largest(chunked(logits)), None, None)
    parts = []
    for part in slabs(len(logits), logits):
        raw = logits[part]
        x = raw if allowed is None else mask(raw, allowed[part])
        token, maximum = _largest(chunked(x))
        logprob = log_softmax_of(token, x) if logprobs else None
        raw_logprob = None
        if raw_logprobs:
            same = logprobs and allowed is None
            raw_logprob = logprob if same else log_softmax_of(token, raw)
        parts.append(Chosen(token, maximum, logprob, raw_logprob))
    return join(parts)


def mask(logits: Tensor, allowed: Tensor) -> Tensor:
    """A copy of logits (rows, vocabulary) with -inf where a token is not allowed.

    allowed: int32 (rows, ceil(vocabulary / 32)); bit t % 32 of word t // 32 is 1 where token t is.
    """
    bit = torch.arange(32, dtype=torch.int32, device=allowed.device)
    bits = ((allowed[:, :, None] >> bit) & 1).flatten(1)[:, : logits.shape[1]]
    return torch.where(bits.bool(), logits, -torch.inf)


def as_float(logits: Tensor) -> Tensor:
    """The logits in float32, or in float64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def weigh(x: Tensor, *, maximum: Tensor, warpers: Warpers) -> Tensor:
    """The weights w of the random contract: the distribution to draw from, up to a factor.

    x: float32 or float64 (rows, chunks, width), like the weights; maximum: (rows,), each row's;
    warpers: of rows, with temperatures above 0. The filters apply in the order top_k, top_p, min_p,
    each to what the one before has left, top_p to the renormalised rest. The token that crosses
    top_p is kept, and so is the likeliest one. Of tokens with equal logits, top_p keeps no more
    than it needs, those with the lowest ids; top_k and min_p keep all.
    """
    temperature, top_k, top_p, min_p = warpers
    weights = x - maximum[:, None, None]
    # exp is up to fifty times slower on a CPU where its result is 0 or below the normal numbers, so
    # it is asked for something just above them, which then is too light to count.
    weights.div_(temperature[:, None, None]).clamp_(min=-87.0).exp_()
    torch.threshold_(weights, _NEGLIGIBLE, 0.0)
    if top_k is not None:
        bounded = (top_k > 0) & (top_k < x[0].numel())
        need = torch.where(bounded, top_k, torch.inf).to(x.dtype)
        if reads_back(x):
            few = int(torch.where(bounded, top_k, 1).max())
            lowest = x.flatten(1).topk(few).values.gather(1, top_k.clamp(1, few)[:, None] - 1)
            lowest = torch.where(bounded, lowest[:, 0], -torch.inf)
        else:
            lowest = _threshold(x, None, need, maximum, few=0)
        _remove_below(lowest, x, weights)
    if top_p is not None:
        need = torch.where(top_p < 1, top_p * weights.sum(-1).sum(-1), torch.inf).to(x.dtype)
        lowest = _threshold(x, weights, need, maximum, few=_NUCLEUS)
        _remove_below(lowest, x, weights)
        _cut_ties(lowest, need, x, weights)
    if min_p is not None:
        lowest = (maximum + temperature * min_p.double().log()).to(x.dtype)
        _remove_below(lowest, x, weights)
    return weights


def weigh_rows(
    logits: Tensor, warpers: Warpers, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The distribution of each row of logits (rows, vocabulary). allowed: as in `mask`.

    Gives the weights (rows, chunks, width); the maxima (rows,); which rows their argmax decides
    alone, bool (rows,), since their temperature is 0 or their maximum is not finite: their weights
    are those of temperature 1, or mean nothing; the argmax of each row, int64 (rows,).
    """
    x = as_float(logits)
    x = chunked(x if allowed is None else mask(x, allowed))
    best, maximum = _largest(x)
    by_argmax = (warpers.temperature == 0) | ~maximum.isfinite()
    # The distribution of an argmax, for its logprob, is the softmax at temperature 1, nothing
    # removed.
    usable = Warpers(
        *(
            None if option is None else torch.where(by_argmax, off, option)
            for option, off in zip(warpers, (1.0, 0, 1.0, 0.0), strict=True)
        )  # type: ignore[arg-type]
    )
    return weigh(x, maximum=maximum, warpers=usable), maximum, by_argmax, best


def warp(logits: Tensor, warpers: Warpers) -> Tensor:
    """The scores of rows of logits (rows, vocabulary), whose softmax is the distribution to draw
    from: divided by the temperature, above 0, and -inf for what the filters remove.

    Where there are filters, they also remove what is less than 2**-125 times as likely as the
    likeliest token.
    """
    scores = as_float(logits) / warpers.temperature[:, None]
    if not warpers.has_filters:
        return scores
    for part in slabs(len(logits), logits):
        weights, _, by_argmax, _ = weigh_rows(logits[part], warpers.of(part))
        removed = (weights.flatten(1)[:, : logits.shape[1]] == 0) & ~by_argmax[:, None]
        scores[part].masked_fill_(removed, -torch.inf)
    return scores


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
            above = (_at(x, token) - maximum).double() / heat
            logprob = (above - total(weights).log()).float()
        raw = log_softmax_of(token, x) if raw_logprobs else None
        parts.append(Chosen(token, maximum, logprob, raw))
    return join(parts)


def likeliest_of(
    logits: Tensor,
    count: int,
    temperature: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Likeliest:
    """The `count` likeliest tokens of each row of logits (rows, vocabulary).

    temperature: float32 (rows,), 0 counts as 1, like None; allowed: as in `mask`.
    """
    parts = []
    for part in slabs(len(logits), logits):
        x = as_float(logits[part])
        x = chunked(x if allowed is None else mask(x, allowed[part]))
        heat = torch.ones_like(x[:, 0, 0])
        if temperature is not None:
            heat = torch.where(temperature[part] == 0, heat, temperature[part].to(x.dtype))
        maximum = x.amax(-1).amax(-1)
        sums = total(weigh(x, maximum=maximum, warpers=Warpers(heat)))
        # The chunks of the largest maxima hold them all; of equal chunks the first.
        order = x.amax(-1).sort(descending=True, stable=True).indices[:, :count].sort().values
        rest = x.gather(1, order[:, :, None].expand(-1, -1, x.shape[2]))
        tokens, chances = [], []
        for _ in range(count):
            place, value = _largest(rest)
            rest.flatten(1).scatter_(1, place[:, None], -torch.inf)
            chunk = order.gather(1, place[:, None] // x.shape[2])[:, 0]
            token = chunk * x.shape[2] + place % x.shape[2]
            can_come = maximum.isfinite() & (value > -torch.inf)
            chance = ((value - maximum).double() / heat).exp() / sums
            tokens.append(torch.where(can_come, token, -1).int())
            chances.append(torch.where(can_come, chance, 0.0).float())
        parts.append(Likeliest(torch.stack(tokens, 1), torch.stack(chances, 1)))
    return Likeliest(*map(torch.cat, zip(*parts, strict=True)))


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
    return chunk * width + (_rows_of(weights, chunk) / noise).argmax(-1)


def chunked(logits: Tensor) -> Tensor:
    """The rows as (rows, chunks, chunk), filled up with -inf; a view where the shape allows one."""
    rows, vocabulary = logits.shape
    width = min(CHUNK, vocabulary)
    chunks = -(-vocabulary // width)
    if chunks * width == vocabulary:
        return logits.reshape(rows, chunks, width)
    filled = logits.new_full((rows, chunks * width), -torch.inf)
    filled[:, :vocabulary] = logits
    return filled.view(rows, chunks, width)


def slabs(rows: int, logits: Tensor) -> Iterator[slice]:
    """Slices that cut so many rows of the size and on the device of the logits' into slabs."""
    slab = max(1, _SLAB.get(logits.device.type, _SLAB["cuda"]) // logits.shape[1])
    return (slice(start, start + slab) for start in range(0, rows, slab))


def _rows_of(chunks: Tensor, chunk: Tensor) -> Tensor:
    """The chosen chunk of each row: (rows, chunks, width) and (rows,) to (rows, width)."""
    return chunks[torch.arange(len(chunk), device=chunk.device), chunk]


def join(parts: list[Chosen]) -> Chosen:
    tokens, maxima, logprobs, raw_logprobs = zip(*parts, strict=True)
    return Chosen(
        torch.cat(tokens),
        torch.cat(maxima),
        None if logprobs[0] is None else torch.cat(logprobs),
        None if raw_logprobs[0] is None else torch.cat(raw_logprobs),
    )


def _largest(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """The token and the value of the maximum of rows (rows, chunks, width)."""
    chunk_maximum = chunks.amax(-1)
    chunk = chunk_maximum.argmax(-1)
    token = chunk * chunks.shape[2] + _rows_of(chunks, chunk).argmax(-1)
    return token, chunk_maximum.amax(-1)


def total(weights: Tensor) -> Tensor:
    return weights.sum(-1).double().sum(-1)


def log_softmax_of(token: Tensor, logits: Tensor) -> Tensor:
    """The log-probability of a token of each row, float32 (rows,), at temperature 1."""
    # The maximum first: where it is huge, it would swallow the rest.
    x = as_float(logits)
    maximum = x.amax(-1)
    weights = weigh(chunked(x), maximum=maximum, warpers=Warpers(torch.ones_like(maximum)))
    return (_at(logits, token).double() - maximum.double() - total(weights).log()).float()


def _at(logits: Tensor, token: Tensor) -> Tensor:
    return as_float(logits.gather(1, token[:, None])[:, 0])


def _remove_below(lowest: Tensor, x: Tensor, weights: Tensor) -> None:
    """Makes the weights of all x below their row's lowest value 0."""
    # As numbers, since torch multiplies much faster on a CPU than it fills under a mask.
    weights.mul_(torch.ge(x, lowest[:, None, None], out=torch.empty_like(x)))


def _cut_ties(lowest: Tensor, need: Tensor, x: Tensor, weights: Tensor) -> None:
    """Makes the weights of those last tokens at `lowest` 0 without which `need` is met too."""
    at_lowest = torch.where(x == lowest[:, None, None], weights, 0.0).amax(-1).amax(-1)
    surplus = (weights.sum(-1).sum(-1) - need) / at_lowest
    rows = torch.arange(len(x), device=x.device)
    if reads_back(x):
        rows = (surplus >= 1).nonzero()[:, 0]
        if not len(rows):
            return
    tied = x[rows].flatten(1) == lowest[rows, None]
    place = tied.cumsum(1)
    kept = (place[:, -1] - torch.where(surplus >= 1, surplus, 0)[rows].long()).clamp(min=1)
    cut = tied & (place > kept[:, None])
    weights[rows] = weights[rows].masked_fill(cut.view(-1, *x.shape[1:]), 0.0)


def reads_back(x: Tensor) -> bool:
    """Whether a value may steer what is computed next: on a CPU, where that waits for nothing."""
    return x.device.type == "cpu"


def _threshold(
    x: Tensor, weights: Tensor | None, need: Tensor, maximum: Tensor, *, few: int
) -> Tensor:
    """The largest value of each row of x that, with all above it, weighs at least `need`.

    x, weights: (rows, chunks, width), None for weights of 1; need, maximum: (rows,), in x's
    dtype. The maximum where nothing is needed, -inf where the row does not weigh as much.

    On a CPU, the answer is first sought in a part of the row. Laid out in columns of
    `_COLUMN_HEIGHT` values, the `few` columns of largest maxima hold the `few` largest values and
    all that are above the least of these maxima, so an answer from there up is the row's.
    """
    row = x.flatten(1)
    columns = row.shape[1] // _COLUMN_HEIGHT
    if not reads_back(x) or few >= columns or row.shape[1] % _COLUMN_HEIGHT:
        return _bisect(x, weights, need, maximum)
    table = x.view(len(x), _COLUMN_HEIGHT, columns)
    best = table.amax(1).topk(few, sorted=True)
    index = best.indices[:, None, :].expand(-1, _COLUMN_HEIGHT, -1)
    held = None if weights is None else weights.view(table.shape).gather(2, index)
    found = _bisect(table.gather(2, index), held, need, maximum)
    open_rows = ((found < best.values[:, -1]) & need.isfinite()).nonzero()[:, 0]
    if len(open_rows):
        held = None if weights is None else weights[open_rows]
        found[open_rows] = _bisect(x[open_rows], held, need[open_rows], maximum[open_rows])
    return found


def _bisect(x: Tensor, weights: Tensor | None, need: Tensor, maximum: Tensor) -> Tensor:
    """`_threshold` by halving, exact after as many passes as a value has bits."""
    lowest = _ordered_key(torch.full_like(maximum, -torch.inf))
    above = _ordered_key(maximum) + 1
    kept = torch.empty_like(x)
    for _ in range(8 * x.element_size()):
        middle = (lowest & above) + ((lowest ^ above) >> 1)  # their mean, without overflow
        torch.ge(x, _value_of(middle, x.dtype)[:, None, None], out=kept)
        if weights is not None:
            kept.mul_(weights)
        enough = kept.sum(-1).sum(-1) >= need
        lowest = torch.where(enough, middle, lowest)
        above = torch.where(enough, above, middle)
    return _value_of(lowest, x.dtype)


def _ordered_key(value: Tensor) -> Tensor:
    """int64 keys in the order of the float32 or float64 values they stand for."""
    integer = torch.int32 if value.dtype == torch.float32 else torch.int64
    bits = value.view(integer).long()
    return bits ^ ((bits >> 63) & torch.iinfo(integer).max)


def _value_of(key: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_ordered_key`."""
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    return (key ^ ((key >> 63) & torch.iinfo(integer).max)).to(integer).view(dtype)
