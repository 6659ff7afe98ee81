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
"""

from __future__ import annotations

import torch
from torch import Tensor


def cached_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The softmax of the scores times the values, (rows, width, heads, value size).

    query: (rows, heads, width, head size), at most 64 wide; keys and values: (rows, key heads,
        columns, head or value size); consecutive query heads share a key head,
        heads / key heads each.
    scale: of query times key. softcap: s becomes softcap * tanh(s / softcap) of such a score.
    sinks: (heads,), the score of one more key of each head, whose value is zero.

    O(rows * heads * width * columns * size), in float32 (float64 of float64). On a device no value
    is read back; the CPU reads how far the text goes, and leaves out the columns behind it.
    """
    width = query.shape[2]
    if query.device.type == "cpu":
        used = int(seen[..., 0].max()) + width
        keys, values = keys[:, :, :used], values[:, :, :used]
    visible = visible_columns(seen, keys.shape[2])
    attended = attention(query, keys, values, visible, scale=scale, softcap=softcap, sinks=sinks)
    return attended.transpose(1, 2).contiguous()


def visible_columns(seen: Tensor, columns: int) -> Tensor:
    """The mask that `seen` stands for: bool (rows, 1, width, columns)."""
    start, first, new = seen[..., None].unbind(3)  # (rows, 1, width, 1) each
    last = start + seen.shape[2] - 1
    # A column holds the newest token that was written there; none where negative.
    token = last - (last - torch.arange(columns, device=seen.device)) % columns
    bit = new >> (token - start).clamp(min=0) & 1
    return torch.where(token < start, token >= first, bit.bool())


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`cached_attention` with a mask, bool (rows or 1, 1, width, columns).

    Returns (rows, heads, width, value size).
    """
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
