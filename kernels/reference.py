"""Every verification operation in plain, vectorised PyTorch: the definition, and the CPU path.

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

**Trees.** A request's *slots* are the text's last token, slot 0, and its draft tokens, token j in
slot j + 1; they are what a target forward runs over and the logits' rows stand for. `parents`
gives for each draft token the index of its parent within the draft, -1 for the text's last
token; a parent stands before its children. Whatever the values hold, a parent is taken for one
of the slots before its child. Questions about ancestors are answered by doubling: what holds for
a slot and its 2**k - 1 nearest ancestors follows from what holds for half as many of them, here
and at the ancestor half way up.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntFlag
from typing import Final

import torch
from torch import Tensor

CHUNK: Final = 1024
TOKEN_STREAM: Final = 0
CHUNK_STREAM: Final = 1

_NEGLIGIBLE: Final = 2.0**-125

_WORD: Final = 0xFFFFFFFF

# Rows are drawn in slabs of about this many logits: enough to hide the cost of an operator, few
# enough for a slab to stay in a CPU's cache, and for any batch to need little memory beyond its
# logits. No result depends on it.
_SLAB: Final = {"cpu": 1 << 20, "cuda": 1 << 26}

# Where `_threshold` looks first, and for a nucleus in how many columns. No result depends on them.
_COLUMN_HEIGHT: Final = 32
_NUCLEUS: Final = 64


class Status(IntFlag):
    """What verification met in the rows of a request that it reached."""

    NAN = 1
    """A row held NaN: its token is the id of the first one, as torch.argmax has it."""

    EMPTY = 2
    """A row was -inf throughout: it gave no token, and verification ended before it."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random 32-bit words for each counter under a key.

    All operands are int64 tensors that hold unsigned 32-bit words and broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64, which leaves all 64 bits of an unsigned product.
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        c0, c1 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD
        c2, c3 = ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0 = (k0 + 0x9E3779B9) & _WORD
        k1 = (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def exponential(high: Tensor, low: Tensor) -> Tensor:
    """Standard exponential values, float64, of 64 random bits each: from 2**-65 to 53 log 2."""
    uniform = high.double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64
    # The values nearest to 1 would round to it.
    return -torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-53))


def exponential_noise(seeds: Tensor, positions: Tensor, indices: Tensor, *, stream: int) -> Tensor:
    """The noise E(stream, index) of the random contract, float64 (rows, n).

    seeds, positions: int64 (rows,); indices: int64 (n,) or (rows, n).
    """
    counter = (
        indices,
        (positions & _WORD)[:, None],
        ((positions >> 32) & _WORD)[:, None],
        torch.full_like(positions, stream)[:, None],
    )
    key = ((seeds & _WORD)[:, None], ((seeds >> 32) & _WORD)[:, None])
    high, low, _, _ = philox(counter, key)
    return exponential(high, low)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The token and the value of each row's maximum, for logits (rows, vocabulary) of any stride.

    Ties go to the lowest id and NaN is above all, as in torch.argmax, which gives the same tokens
    but looks at one logit at a time on a CPU. int64 (rows,), and the logits' dtype (rows,).
    """
    chunks = _chunked(logits)
    chunk_maximum = chunks.amax(-1)
    chunk = chunk_maximum.argmax(-1)
    token = chunk * chunks.shape[2] + _rows_of(chunks, chunk).argmax(-1)
    return token, chunk_maximum.amax(-1)


def weigh(
    x: Tensor,
    *,
    maximum: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """The weights w of the random contract: the distribution to draw from, up to a factor.

    x: float32 or float64 (rows, chunks, width), like the weights; maximum: (rows,), each row's;
    temperature: float32 (rows,), above 0. top_k: int64 (rows,), 0 for no bound; top_p, min_p:
    float32 (rows,), 1 and 0 for no bound; None where no row has one. They apply in this order, each
    to what the one before has left, top_p to the renormalised rest. A token that ties with the
    last one kept is kept, and so are the token that crosses top_p and the likeliest one.
    """
    weights = x - maximum[:, None, None]
    # exp is up to fifty times slower on a CPU where its result is 0 or below the normal numbers, so
    # it is asked for something just above them, which then is too light to count.
    weights.div_(temperature[:, None, None]).clamp_(min=-87.0).exp_()
    torch.threshold_(weights, _NEGLIGIBLE, 0.0)
    if top_k is not None:
        bounded = (top_k > 0) & (top_k < x[0].numel())
        need = torch.where(bounded, top_k, torch.inf).to(x.dtype)
        few = int(torch.where(bounded, top_k, 1).max()) if _reads_back(x) else 0
        _remove_below(_threshold(x, None, need, maximum, few=few), x, weights)
    if top_p is not None:
        need = torch.where(top_p < 1, top_p * weights.sum(-1).sum(-1), torch.inf).to(x.dtype)
        _remove_below(_threshold(x, weights, need, maximum, few=_NUCLEUS), x, weights)
    if min_p is not None:
        lowest = maximum + temperature * min_p.double().log()
        _remove_below(lowest.to(x.dtype), x, weights)
    return weights


def draw(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token from each row of logits (rows, vocabulary), as the random contract has it.

    temperature: float32 (rows,), 0 for the argmax; top_k, top_p, min_p: as in `weigh`; seeds,
    positions: int64 (rows,). Gives the tokens, int64 (rows,), and the rows' maxima (rows,): -inf
    marks an empty row, whose token means nothing but is in range. Time is linear in the logits,
    memory in those of one slab.
    """
    rows, vocabulary = logits.shape
    slab = max(1, _SLAB.get(logits.device.type, _SLAB["cuda"]) // vocabulary)
    parts = [
        _draw_slab(
            logits[part],
            temperature=temperature[part],
            top_k=None if top_k is None else top_k[part],
            top_p=None if top_p is None else top_p[part],
            min_p=None if min_p is None else min_p[part],
            seeds=seeds[part],
            positions=positions[part],
        )
        for part in (slice(start, start + slab) for start in range(0, rows, slab))
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([maxima for _, maxima in parts])


def accept(
    tokens: Tensor, maxima: Tensor, draft_ids: Tensor, offsets: Tensor, *, max_draft: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compares the target's tokens with the drafts and keeps what plain decoding would emit.

    tokens, maxima: (rows,), the target's token in each row and the row's largest logit, rows laid
    out as `verify_greedy` has them; rows beyond the last request's are ignored. Emitted are the
    draft tokens up to the first that is not the target's, then the target's own token there
    (recovered, or bonus after a whole draft). An empty row that is reached ends the tokens before
    it. A draft is looked at up to max_draft tokens.

    Gives token_ids int32 (requests, max_draft + 1), -1 after the end; lengths int32 (requests,);
    status int32 (requests,), of the rows reached alone: what follows a refused token is no part of
    the text.
    """
    first = offsets[:-1, None]
    size = (offsets[1:, None] - first).clamp(max=max_draft)
    step = torch.arange(max_draft + 1, device=tokens.device)
    row = (first + torch.arange(len(first), device=tokens.device)[:, None] + step).clamp(
        max=len(tokens) - 1
    )
    emitted = tokens[row]
    # One more id, so that there is something to look at where nothing is drafted.
    drafted = torch.nn.functional.pad(draft_ids, (0, 1), value=-1)[
        torch.where(step < size, first + step, len(draft_ids))
    ]
    empty = (maxima == -torch.inf)[row]
    accepted = (emitted == drafted) & (step < size) & ~empty
    last = accepted.cumprod(1).sum(1, keepdim=True)
    stopped = empty.gather(1, last)
    length = last + 1 - stopped.long()
    nan = (maxima.isnan()[row] & (step <= last)).any(1)
    return (
        torch.where(step < length, emitted, -1).int(),
        length[:, 0].int(),
        (nan * Status.NAN + stopped[:, 0] * Status.EMPTY).int(),
    )


def accept_tree(
    tokens: Tensor,
    maxima: Tensor,
    draft_ids: Tensor,
    parents: Tensor,
    offsets: Tensor,
    *,
    max_draft: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compares the target's tokens with drafts that are trees, and keeps one path of each.

    As `accept`, but a slot's token is compared with the target's token in its parent's slot. The
    slots that are the target's choice all the way from the text's last token are a path, as
    siblings have different tokens; where they do not, the earlier of two slots of one depth counts.
    The path's tokens are emitted, then the target's own token after its last one.

    Gives what `accept` gives, and the path, int32 (requests, max_draft): the accepted draft tokens
    as indices within the draft, -1 after the last. O(max_draft log max_draft) a request.
    """
    parent = _parent_slots(parents, offsets, max_draft=max_draft)
    slots = parent.shape[1]
    slot = torch.arange(slots, device=tokens.device)
    root = offsets[:-1, None] + torch.arange(len(parent), device=tokens.device)[:, None]
    row = (root + slot).clamp(max=len(tokens) - 1)
    target = tokens[row]
    empty = (maxima == -torch.inf)[row]

    is_draft = parent != slot
    drafted = _in_slots(draft_ids, offsets, max_draft=max_draft, fill=-1)
    on_path = (drafted == target.gather(1, parent)) & ~empty.gather(1, parent) & is_draft
    on_path[:, 0] = True
    depth = is_draft.long()
    for ancestor in _doubled(parent):
        on_path = on_path & on_path.gather(1, ancestor)
        depth = depth + depth.gather(1, ancestor)

    # The path's slot at each depth. What is not on it goes to a column that is cut off.
    at_depth = torch.full((len(parent), slots + 1), slots, device=tokens.device).scatter_reduce_(
        1, torch.where(on_path, depth, slots), slot.expand_as(parent), "amin"
    )[:, :slots]
    last = torch.where(on_path, depth, 0).amax(1, keepdim=True)
    reached = slot <= last
    at_depth = torch.where(reached, at_depth, 0)
    stopped = empty.gather(1, at_depth.gather(1, last))
    length = last + 1 - stopped.long()
    nan = (maxima.isnan()[row].gather(1, at_depth) & reached).any(1)
    return (
        torch.where(slot < length, target.gather(1, at_depth), -1).int(),
        length[:, 0].int(),
        (nan * Status.NAN + stopped[:, 0] * Status.EMPTY).int(),
        torch.where(reached, at_depth - 1, -1)[:, 1:].int(),
    )


def tree_depths(parents: Tensor, offsets: Tensor, *, max_draft: int) -> Tensor:
    """How many draft tokens lead to each slot, itself included: int64 (requests, max_draft + 1).

    The depth is what a token's position has over that of the text's last token. 0 for the
    text's last token, and in slots past the draft. For a chain, 0, 1, 2, ...

    parents: integer (drafted,); offsets: int64 (requests + 1,). A draft is looked at up to
    max_draft tokens.
    """
    parent = _parent_slots(parents, offsets, max_draft=max_draft)
    depth = (parent != torch.arange(parent.shape[1], device=parent.device)).long()
    for ancestor in _doubled(parent):
        depth = depth + depth.gather(1, ancestor)
    return depth


def tree_attention_mask(parents: Tensor, offsets: Tensor, *, max_draft: int) -> Tensor:
    """Which slots see which: bool (requests, max_draft + 1, max_draft + 1), [b, i, j] for i sees j.

    A token sees itself and its ancestors, the text's last token among them. A slot past the draft
    sees itself alone, so that no row is empty. For a chain, the lower triangle. The text before
    its last token, which all see, is not part of it. Operands as in `tree_depths`.
    """
    parent = _parent_slots(parents, offsets, max_draft=max_draft)
    slots = parent.shape[1]
    seen = torch.eye(slots, dtype=torch.bool, device=parent.device).expand(len(parent), -1, -1)
    for ancestor in _doubled(parent):
        seen = seen | seen.gather(1, ancestor[:, :, None].expand(-1, -1, slots))
    return seen


def compaction_indices(path: Tensor) -> Tensor:
    """Which slot's keys and values each slot has to take over for the accepted text to be in order.

    path: int32 (requests, max_draft), as `accept_tree` gives it. The result is int64 (requests,
    max_draft + 1): 0 for the text's last token, the slots of the path in its order, then each
    slot's own number. Nothing is taken from a slot before the one that takes it.
    """
    slot = torch.arange(path.shape[1] + 1, device=path.device).expand(len(path), -1)
    accepted = torch.nn.functional.pad(path.long() + 1, (1, 0))
    return torch.where(accepted > 0, accepted, slot)


def verify_greedy(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    parents: Tensor | None = None,
    max_draft: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Greedy verification of a ragged batch. The operands are trusted.

    draft_ids: integer (drafted,), flat over the requests; offsets: int64 (requests + 1,); logits:
    (drafted + requests, vocabulary): request b owns rows offsets[b] + b to offsets[b + 1] + b, the
    first for the token after the text's last, row j for the token after draft token j; parents:
    integer (drafted,), None where all drafts are chains.

    Gives what `accept_tree` gives, with None for the path of chains.
    """
    tokens, maxima = argmax(logits)
    return _accept(tokens, maxima, draft_ids, parents, offsets, max_draft=max_draft)


def verify_sampled(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    parents: Tensor | None = None,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    max_draft: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sampled verification of a ragged batch of drafts without probabilities.

    One draw a row, kept while it is the draft's token: a token d is accepted with the target's own
    probability p(d), and a recovered token follows p without d, which is the law of rejection
    sampling for a certain draft, with nothing wasted; of the children of one parent in a tree, all
    together are accepted with the target's probability of the set. The noise of a row is that of
    the position which its token would take: that of the text's next token plus the depth of the
    row's slot. So what is emitted is the same with any draft, chain or tree, and with none.

    The operands are trusted: rows and parents as in `verify_greedy`, the rest as in `draw` but for
    each request; positions: the absolute position of the token after the text's last. Gives what
    `verify_greedy` gives.
    """
    row = torch.arange(len(logits), device=logits.device)
    first = offsets[:-1] + torch.arange(len(offsets) - 1, device=logits.device)
    request = torch.searchsorted(first, row, right=True) - 1
    depth = row - first[request]
    if parents is not None:
        depths = tree_depths(parents, offsets, max_draft=max_draft)
        depth = depths[request, depth.clamp(max=max_draft)]
    tokens, maxima = draw(
        logits,
        temperature=temperature[request],
        top_k=None if top_k is None else top_k[request],
        top_p=None if top_p is None else top_p[request],
        min_p=None if min_p is None else min_p[request],
        seeds=seeds[request],
        positions=positions[request] + depth,
    )
    return _accept(tokens, maxima, draft_ids, parents, offsets, max_draft=max_draft)


def _accept(
    tokens: Tensor,
    maxima: Tensor,
    draft_ids: Tensor,
    parents: Tensor | None,
    offsets: Tensor,
    *,
    max_draft: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if parents is None:
        return *accept(tokens, maxima, draft_ids, offsets, max_draft=max_draft), None
    return accept_tree(tokens, maxima, draft_ids, parents, offsets, max_draft=max_draft)


def _in_slots(values: Tensor, offsets: Tensor, *, max_draft: int, fill: int) -> Tensor:
    """One value for each draft token, flat, as (requests, max_draft + 1); elsewhere `fill`."""
    slot = torch.arange(max_draft + 1, device=values.device)
    first = offsets[:-1, None]
    used = (slot > 0) & (slot <= offsets[1:, None] - first)
    # One more value, so that there is something to look at where nothing is drafted.
    padded = torch.nn.functional.pad(values, (0, 1), value=fill)
    return padded[torch.where(used, first + slot - 1, len(values))]


def _parent_slots(parents: Tensor, offsets: Tensor, *, max_draft: int) -> Tensor:
    """The parent of each slot as a slot, int64 (requests, max_draft + 1).

    The text's last token and slots past the draft are their own parents.
    """
    bounded = parents.long().clamp(-1, max_draft) + 1
    parent = _in_slots(bounded, offsets, max_draft=max_draft, fill=-1)
    slot = torch.arange(max_draft + 1, device=parents.device).expand_as(parent)
    return torch.where(parent < 0, slot, parent.minimum((slot - 1).clamp(min=0)))


def _doubled(parent: Tensor) -> Iterator[Tensor]:
    """The ancestor 1, 2, 4, ... generations up of each slot, until all have come to the root."""
    for _ in range((parent.shape[1] - 1).bit_length()):
        yield parent
        parent = parent.gather(1, parent)


def _chunked(logits: Tensor) -> Tensor:
    """The rows as (rows, chunks, chunk), filled up with -inf; a view where the shape allows one."""
    rows, vocabulary = logits.shape
    width = min(CHUNK, vocabulary)
    chunks = -(-vocabulary // width)
    if chunks * width == vocabulary:
        return logits.reshape(rows, chunks, width)
    filled = logits.new_full((rows, chunks * width), -torch.inf)
    filled[:, :vocabulary] = logits
    return filled.view(rows, chunks, width)


def _rows_of(chunks: Tensor, chunk: Tensor) -> Tensor:
    """The chosen chunk of each row: (rows, chunks, width) and (rows,) to (rows, width)."""
    return chunks[torch.arange(len(chunk), device=chunk.device), chunk]


def _draw_slab(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    x = _chunked(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    _, chunks, width = x.shape
    chunk_maximum = x.amax(-1)
    maximum = chunk_maximum.amax(-1)
    # The weights of rows that argmax decides may be NaN, and are not looked at.
    by_argmax = ((temperature == 0) | ~maximum.isfinite())[:, None]
    weights = weigh(
        x,
        maximum=maximum,
        temperature=torch.where(by_argmax[:, 0], 1.0, temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )

    index = torch.arange(chunks, device=x.device)
    noise = exponential_noise(seeds, positions, index, stream=CHUNK_STREAM)
    race = weights.sum(-1) / noise
    chunk = torch.where(by_argmax, chunk_maximum, race).argmax(-1)

    index = chunk[:, None] * width + torch.arange(width, device=x.device)
    noise = exponential_noise(seeds, positions, index, stream=TOKEN_STREAM)
    race = _rows_of(weights, chunk) / noise
    token = torch.where(by_argmax, _rows_of(x, chunk), race).argmax(-1)
    return chunk * width + token, maximum


def _remove_below(lowest: Tensor, x: Tensor, weights: Tensor) -> None:
    """Makes the weights of all x below their row's lowest value 0."""
    # As numbers, since torch multiplies much faster on a CPU than it fills under a mask.
    weights.mul_(torch.ge(x, lowest[:, None, None], out=torch.empty_like(x)))


def _reads_back(x: Tensor) -> bool:
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
    if not _reads_back(x) or few >= columns or row.shape[1] % _COLUMN_HEIGHT:
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
