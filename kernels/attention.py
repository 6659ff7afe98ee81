"""Attention of the new tokens of a step to a cache whose rows have lengths of their own.

A step has `width` new tokens a row: the text's last token and a draft, a chain or a tree. Their
keys and values stand in the cache already. Token t of a row's text stands in column t % columns, so
layers with a sliding window keep a ring; the new tokens count on from the text's, in their order.

No mask is passed. What each query sees are three numbers, `seen`, int64 (rows, 1, width, 3):

- start: how many tokens stand before the new ones, the same for all queries of a row;
- first: of these, the query sees the ones from `first` on, which is behind padding on the left and
  no further back than the window;
- new: it sees the new token j, which is token start + j of the row, where bit j is set.

Each query sees at least one token, and start + width - first is at most the number of columns.

**On a device** the new tokens of a step are few, so a row and key head alone give it too little to
do: the cache's tokens are split among programs, each of which goes over its part with a running
softmax (Milakov and Gimelshein, 2018; flash-decoding, Dao et al., 2023), and a second launch
combines the parts. All query heads that share a key head are queries of the same program, which
reads each key once. A program goes over tokens, not columns: from the first that one of its queries
sees to the last new one. So a long buffer costs nothing until it is filled, and of padding and
beyond windows nothing is read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft.kernels import config, language
from fastdraft.kernels.language import jit, next_power_of_2, tl

LOG2_E = tl.constexpr(1.4426950408889634)
SEEN = tl.constexpr(3)  # numbers a query


class Operands(NamedTuple):
    """What attends to what.

    query: (rows, heads, width, head size), at most 64 wide; keys and values: (rows, key heads,
        columns, head or value size); consecutive query heads share a key head,
        heads / key heads each.
    scale: of query times key. softcap: s becomes softcap * tanh(s / softcap) of such a score.
    sinks: (heads,), the score of one more key of each head, whose value is zero.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def cached_attention(operands: Operands, seen: Tensor) -> Tensor:
    """The softmax of the scores times the values, (rows, width, heads, value size).

    O(rows * heads * width * columns * size), in float32 (float64 of float64). Heads of more than
    256 values have no kernel.
    """
    largest = max(operands.query.shape[3], operands.values.shape[3])
    is_served = language.has_kernels(operands.query) and largest <= config.LARGEST_HEAD
    return launch(operands, seen) if is_served else plain(operands, seen)


def plain(operands: Operands, seen: Tensor) -> Tensor:
    """The definition. A CPU reads how far the text goes, and leaves out the columns behind it."""
    query, keys, values = operands[:3]
    width = query.shape[2]
    if query.device.type == "cpu":
        used = int(seen[..., 0].max()) + width
        keys, values = keys[:, :, :used], values[:, :, :used]
    visible = visible_columns(seen, keys.shape[2])
    attended = attention(operands._replace(keys=keys, values=values), visible)
    return attended.transpose(1, 2).contiguous()


def visible_columns(seen: Tensor, columns: int) -> Tensor:
    """The mask that `seen` stands for: bool (rows, 1, width, columns)."""
    start, first, new = seen[..., None].unbind(3)  # (rows, 1, width, 1) each
    last = start + seen.shape[2] - 1
    # A column holds the newest token that was written there; none where negative.
    token = last - (last - torch.arange(columns, device=seen.device)) % columns
    bit = new >> (token - start).clamp(min=0) & 1
    return torch.where(token < start, token >= first, bit.bool())


def attention(operands: Operands, visible: Tensor) -> Tensor:
    """`cached_attention` with a mask, bool (rows or 1, 1, width, columns).

    Returns (rows, heads, width, value size).
    """
    query, keys, values, scale, softcap, sinks = operands
    rows, heads, width, size = query.shape
    key_heads, columns, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    exact = torch.promote_types(query.dtype, torch.float32)
    # The heads that share a key head are so many queries more of one head: nothing is repeated.
    packed = query.to(exact).reshape(rows, key_heads, -1, size)
    scores = (packed @ keys.to(exact).transpose(2, 3)) * scale
    scores = scores.view(rows, heads, width, columns)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # Not -inf: a query that sees nothing, as padding does, gets an average, and no NaN.
    scores = scores.masked_fill(~visible, torch.finfo(exact).min)
    if sinks is not None:
        sink = sinks.to(exact)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., :columns].reshape(rows, key_heads, -1, columns)
    attended = (weights @ values.to(exact)).view(rows, heads, width, value_size)
    return attended.to(query.dtype)


@jit
def _weights(dot, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log 2, for `exp2`."""
    scores = dot * scale
    if SOFTCAP:
        # tanh, from an exponential that may be infinite
        scores = softcap - 2 * softcap / (tl.exp2(scores * (2 * LOG2_E / softcap)) + 1)
    return scores * LOG2_E


@jit
def _with_sink(maximum, total, sinks, head, used):
    """The maximum and the sum of weights with one more key, and the factor for what was summed."""
    sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2_E
    highest = tl.maximum(maximum, sink)
    factor = tl.exp2(maximum - highest)
    return total * factor + tl.exp2(sink - highest), factor


@jit(
    do_not_specialize=("width", "columns", "blocks", "splits"),
    do_not_specialize_on_alignment=("seen", "sinks"),
)
def attention_kernel(
    query, keys, values, seen, sinks, output, sums,
    query_row, query_head, query_token, key_row, key_head, key_column,
    value_row, value_head, value_column,
    key_heads, width, columns, scale, softcap, blocks, splits,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr,
    SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    split = program % splits
    block = program // splits % blocks
    pair = program // splits // blocks
    row = (pair // key_heads).to(tl.int64)
    key = pair % key_heads

    index = block * QUERIES + tl.arange(0, QUERIES)
    used = index < width * GROUP
    slot = index // GROUP
    head = key * GROUP + index % GROUP
    sight = seen + (row * width + tl.where(used, slot, 0)) * SEEN
    start = tl.load(seen + row * width * SEEN).to(tl.int32)
    first = tl.load(sight + 1).to(tl.int32)
    new = tl.load(sight + 2)
    if not WIDE:
        new = new.to(tl.int32)

    end = start + width
    begin = tl.min(first)
    # All of them are fewer than the columns, so they go around the buffer's end at most once.
    before = begin - begin % columns
    tiles = (end - begin + TOKENS - 1) // TOKENS
    each = (tiles + splits - 1) // splits * TOKENS
    begin += split * each
    end = tl.minimum(begin + each, end)

    size = tl.arange(0, SIZE_BLOCK)
    value_size = tl.arange(0, VALUE_BLOCK)
    lane = tl.arange(0, TOKENS)
    place = row * query_row + head * query_head + slot * query_token
    mask = used[:, None] & (size < SIZE)[None, :]
    q = tl.load(query + place[:, None] + size[None, :], mask=mask, other=0.0)
    keys += row * key_row + key.to(tl.int64) * key_head
    values += row * value_row + key.to(tl.int64) * value_head

    maximum = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    attended = tl.zeros((QUERIES, VALUE_BLOCK), tl.float32)
    for token in tl.range(begin, end, TOKENS, num_stages=STAGES):
        at = token + lane
        inside = at < end
        column = at - before
        column = tl.where(column < columns, column, column - columns).to(tl.int64)
        k = tl.load(
            keys + column[:, None] * key_column + size[None, :],
            mask=inside[:, None] & (size < SIZE)[None, :],
            other=0.0,
        )
        v = tl.load(
            values + column[:, None] * value_column + value_size[None, :],
            mask=inside[:, None] & (value_size < VALUE_SIZE)[None, :],
            other=0.0,
        )
        dot = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = _weights(dot, scale, softcap, SOFTCAP)
        bit = tl.minimum(tl.maximum(at - start, 0), 63 if WIDE else 31).to(new.dtype)
        is_new = (at >= start)[None, :]
        visible = tl.where(
            is_new, (new[:, None] >> bit[None, :]) & 1 != 0, at[None, :] >= first[:, None]
        )
        scores = tl.where(visible & inside[None, :], scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        # -inf where nothing has been seen yet, which takes part in no difference.
        level = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - level[:, None])
        factor = tl.exp2(maximum - level)
        total = total * factor + tl.sum(weights, 1)
        attended = attended * factor[:, None]
        attended = tl.dot(weights.to(v.dtype), v, attended, input_precision="ieee")
        maximum = highest

    if SPLIT:
        part = (pair * blocks + block).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
        part = part * splits + split
        tl.store(sums + part * 2, maximum)
        tl.store(sums + part * 2 + 1, total)
    else:
        if SINKS:
            total, factor = _with_sink(maximum, total, sinks, head, used)
            attended = attended * factor[:, None]
        attended = attended / total[:, None]
        part = (row * width + slot) * (key_heads * GROUP) + head
    tl.store(
        output + part[:, None] * VALUE_SIZE + value_size[None, :],
        attended.to(output.dtype.element_ty),
        mask=used[:, None] & (value_size < VALUE_SIZE)[None, :],
    )


@jit(do_not_specialize=("width", "blocks", "splits"), do_not_specialize_on_alignment=("sinks",))
def combine_kernel(
    parts, sums, sinks, output, key_heads, width, blocks, splits,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program for each query of each head, in the order of `output`."""
    program = tl.program_id(0)
    heads = key_heads * GROUP
    head = program % heads
    slot = program // heads % width
    pair = program // heads // width * key_heads + head // GROUP
    index = slot * GROUP + head % GROUP
    part = ((pair * blocks).to(tl.int64) * QUERIES + index) * splits

    lane = tl.arange(0, PARTS)
    size = tl.arange(0, VALUE_BLOCK)
    used = lane < splits
    maxima = tl.load(sums + (part + lane) * 2, mask=used, other=float("-inf"))
    totals = tl.load(sums + (part + lane) * 2 + 1, mask=used, other=0.0)
    maximum = tl.max(maxima)
    factors = tl.exp2(maxima - maximum)
    total = tl.sum(totals * factors)
    attended = tl.zeros((VALUE_BLOCK,), tl.float32)
    for split in range(splits):
        factor = tl.sum(tl.where(lane == split, factors, 0.0))
        each = tl.load(parts + (part + split) * VALUE_SIZE + size, mask=size < VALUE_SIZE, other=0)
        attended += each * factor
    if SINKS:
        total, factor = _with_sink(maximum, total, sinks, head, True)
        attended = attended * factor
    place = program.to(tl.int64) * VALUE_SIZE + size
    attended = (attended / total).to(output.dtype.element_ty)
    tl.store(output + place, attended, mask=size < VALUE_SIZE)


def launch(operands: Operands, seen: Tensor) -> Tensor:
    """The same, in one launch or two.

    Allocates the result and, in two launches, the parts; nothing depends on what is in a tensor, so
    it can be captured in a CUDA graph.
    """
    query, keys, values, scale, softcap, sinks = operands
    rows, heads, width, size = query.shape
    key_heads, columns, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    query, keys, values = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (query, keys, values)
    )
    seen = seen.contiguous()
    group = heads // key_heads
    blocks = {"SIZE_BLOCK": size, "VALUE_BLOCK": value_size}
    blocks = {name: max(next_power_of_2(each), 16) for name, each in blocks.items()}
    plan = config.split_attention(
        rows * key_heads, width * group, columns, max(blocks.values()), query.dtype
    )
    output = query.new_empty(rows, width, heads, value_size)
    parts, sums = output, output
    is_split = plan.splits > 1
    if is_split:
        programs = rows * key_heads * plan.blocks * plan.queries
        sums = query.new_empty(programs, plan.splits, 2, dtype=torch.float32)
        parts = query.new_empty(programs, plan.splits, value_size, dtype=torch.float32)
    shared = {
        "GROUP": group,
        "QUERIES": plan.queries,
        "VALUE_SIZE": value_size,
        "VALUE_BLOCK": blocks["VALUE_BLOCK"],
    }
    has_sinks = sinks is not None
    with torch.cuda.device_of(query):
        attention_kernel[(rows * key_heads * plan.blocks * plan.splits,)](
            query,
            keys,
            values,
            seen,
            sinks if has_sinks else query,
            parts,
            sums,
            *query.stride()[:3],
            *keys.stride()[:3],
            *values.stride()[:3],
            key_heads,
            width,
            columns,
            scale,
            softcap or 0.0,
            plan.blocks,
            plan.splits,
            **shared,
            TOKENS=plan.tokens,
            SIZE=size,
            SIZE_BLOCK=blocks["SIZE_BLOCK"],
            SOFTCAP=softcap is not None,
            SINKS=has_sinks and not is_split,
            SPLIT=is_split,
            WIDE=width > 32,
            STAGES=config.ATTENTION_STAGES,
            num_warps=plan.warps,
        )
        if is_split:
            combine_kernel[(rows * width * heads,)](
                parts,
                sums,
                sinks if has_sinks else query,
                output,
                key_heads,
                width,
                plan.blocks,
                plan.splits,
                **shared,
                SINKS=has_sinks,
                PARTS=next_power_of_2(plan.splits),
                num_warps=1,
            )
    return output
