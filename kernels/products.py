"""Products whose rounding does not depend on the batch: `fastdraft.hf.bitwise` on a device.

A token's sum runs over tiles of fixed shapes in one order, whatever else is in the forward: linear
layers without a split of their inputs, attention a query and key head per program over blocks of
`KEYS` keys, means over blocks of `VALUES`. No choice is made by the number of tokens, so that a
kernel exists once for each type and size of layer. The plain versions are torch's `linear`,
`scaled_dot_product_attention` and `mean`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastdraft.kernels.language import jit, next_power_of_2, tl

__all__ = ["attend", "linear", "mean"]

# Tokens and outputs of a program of a linear layer, and inputs that it adds at a time.
TOKENS = tl.constexpr(64)
OUTPUTS = tl.constexpr(64)
INPUTS = tl.constexpr(64)
KEYS = tl.constexpr(32)
VALUES = tl.constexpr(1024)
# The fewest rows, columns and inputs of a product that tensor cores take.
_LEAST = 16
# float32, not TF32, which rounds operands.
_EXACT = tl.constexpr("ieee")
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (tokens, in) times weight (out, in), in any strides: (tokens, out)."""
    tokens, size = x.shape
    outputs = len(weight)
    out = x.new_empty(tokens, outputs)
    grid = (-(-outputs // OUTPUTS.value), -(-tokens // TOKENS.value))
    if tokens:
        linear_kernel[grid](
            *(x, weight, bias, out, tokens, outputs, size),
            *(*x.stride(), *weight.stride()),
            num_warps=4,
            num_stages=3,
        )
    return out


@jit(do_not_specialize=["tokens"])
def linear_kernel(
    x, weight, bias, out, tokens, outputs, size, x_token, x_input, weight_output, weight_input
):
    column = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for begin in range(0, size, INPUTS):
        at = begin + tl.arange(0, INPUTS)
        there = at < size
        left = tl.load(
            x + token[:, None] * x_token + at[None, :] * x_input,
            mask=(token < tokens)[:, None] & there[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + column[None, :] * weight_output + at[:, None] * weight_input,
            mask=(column < outputs)[None, :] & there[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=_EXACT)
    if bias is not None:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + token[:, None] * outputs + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(token < tokens)[:, None] & (column < outputs)[None, :],
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, order: Tensor, seen: Tensor, scale: float
) -> Tensor:
    """Attention of each query over the keys that it sees: (rows, heads, queries, value size).

    query: (rows, heads, queries, size); key, value: (rows, key heads, columns, size).
    order: int64 (rows, queries or 1, n): the columns that a query sees, before all others.
    seen: int32 (rows, queries): how many it sees. One that sees none gets zeros.
    """
    rows, heads, queries, size = query.shape
    key_heads, width = key.shape[1], value.shape[-1]
    lines = query.transpose(1, 2).contiguous()
    key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (key, value))
    order = order.expand(rows, queries, -1)
    out = lines.new_empty(rows, queries, heads, width)
    if lines.numel():
        attention_kernel[rows * queries, key_heads](
            *(lines, key, value, order, seen.contiguous(), out, scale, queries),
            *(*key.stride()[:3], *value.stride()[:3], *order.stride()[:2]),
            GROUP=heads // key_heads,
            SIZE=size,
            WIDTH=width,
            BLOCK_HEADS=_block(heads // key_heads),
            BLOCK_SIZE=_block(size),
            BLOCK_WIDTH=_block(width),
            num_warps=4,
            num_stages=1,
        )
    return out.transpose(1, 2)


def _block(number: int) -> int:
    return max(_LEAST, next_power_of_2(number))


@jit(do_not_specialize=["queries"])
def attention_kernel(
    query,
    key,
    value,
    order,
    seen,
    out,
    scale,
    queries,
    key_row,
    key_head,
    key_column,
    value_row,
    value_head,
    value_column,
    order_row,
    order_query,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row, head = line // queries, tl.program_id(1)
    # Heads that share keys are the rows of a product.
    group = tl.arange(0, BLOCK_HEADS)
    first = (line * tl.num_programs(1) + head) * GROUP + group
    at, to = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_WIDTH)
    own = tl.load(
        query + first[:, None] * SIZE + at[None, :],
        mask=(group < GROUP)[:, None] & (at < SIZE)[None, :],
        other=0.0,
    )
    order += row * order_row + line % queries * order_query
    key += row * key_row + head * key_head
    value += row * value_row + head * value_head
    count = tl.load(seen + line)
    most = tl.full((BLOCK_HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    sums = tl.zeros((BLOCK_HEADS, BLOCK_WIDTH), tl.float32)
    for begin in range(0, count, KEYS):
        index = begin + tl.arange(0, KEYS)
        there = index < count
        column = tl.load(order + index, mask=there, other=0)
        keys = tl.load(
            key + column[None, :] * key_column + at[:, None],
            mask=there[None, :] & (at < SIZE)[:, None],
            other=0.0,
        )
        scores = tl.dot(own, keys, input_precision=_EXACT) * scale
        scores = tl.where(there[None, :], scores, -float("inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - now[:, None])
        shrunk = tl.exp(most - now)
        values = tl.load(
            value + column[:, None] * value_column + to[None, :],
            mask=there[:, None] & (to < WIDTH)[None, :],
            other=0.0,
        )
        added = tl.dot(weights.to(values.dtype), values, input_precision=_EXACT)
        total = total * shrunk + tl.sum(weights, 1)
        sums = sums * shrunk[:, None] + added
        most = now
    tl.store(
        out + first[:, None] * WIDTH + to[None, :],
        (sums / tl.maximum(total, _TINY)[:, None]).to(out.dtype.element_ty),
        mask=(group < GROUP)[:, None] & (to < WIDTH)[None, :],
    )


def mean(x: Tensor) -> Tensor:
    """Over the last dimension of x (..., size): (..., 1)."""
    size = x.shape[-1]
    flat = x.reshape(-1, size).contiguous()
    out = x.new_empty(*x.shape[:-1], 1)
    if flat.numel():
        mean_kernel[math.prod(x.shape[:-1]),](flat, out, size, num_warps=4)
    return out


@jit
def mean_kernel(x, out, size):
    line = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((VALUES,), tl.float32)
    for begin in range(0, size, VALUES):
        at = begin + tl.arange(0, VALUES)
        sums += tl.load(x + line * size + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + line, (tl.sum(sums) / size).to(out.dtype.element_ty))
