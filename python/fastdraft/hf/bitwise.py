"""Forwards that round each token the same way, whatever else is in the forward.

A library chooses how to sum a product by the shapes it is given, so a token's logits differ in
their last bits between a forward over one token and one over nine, or between batches. Inside
`Bitwise` the products of a model run in shapes that do not depend on the forward:

- linear layers over tiles of `TILE` tokens;
- attention over the keys that a query sees, one behind the other from the first one on, in blocks
  of `KEYS` and tiles of queries, in float32: padding, other rows and rejected drafts change neither
  which keys a block has nor the order of its sum;
- functions that a vector unit approximates, such as the exponential, over whole tokens at a time,
  as the last elements of a tensor would be computed in another way.

On a GPU with Triton the kernels of `fastdraft.kernels.products` do so, in tiles of their own; means
too, which torch may divide among programs there by the number of tokens.

Operations on single elements and on single tokens round alike in any shape. Other products are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import language, products

__all__ = ["KEYS", "TILE", "Bitwise"]

TILE: Final = 16
"""Tokens of a linear layer's products."""
KEYS: Final = 128
"""Keys whose values are summed before those of the next ones are added."""

# Elements that torch never divides among threads.
_PIECE: Final = 1 << 15
# A vector unit leaves no element over of tokens with a multiple of these elements.
_VECTOR: Final = 64
# The elements of keys that are copied at a time.
_PRODUCTS: Final = 1 << 22

_F = torch.nn.functional
_APPROXIMATED: Final[frozenset[Any]] = frozenset(
    getattr(module, name)
    for module in (torch, torch.Tensor, torch._C._nn, _F)
    for name in (
        *("celu", "cos", "elu", "erf", "exp", "gelu", "logsigmoid", "mish"),
        *("sigmoid", "silu", "sin", "softplus", "tanh"),
    )
    if hasattr(module, name)
)
_MEANS: Final = frozenset({torch.mean, torch.Tensor.mean})
_LINEAR: Final = frozenset({_F.linear, torch._C._nn.linear})
_ATTENTION: Final = frozenset(
    {_F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention}
)
_MATMUL: Final = frozenset(
    {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}
)
# Sums over more than one token, or whose order torch chooses by the whole shape.
_REFUSED: Final = frozenset(
    {"addbmm", "addmv", "baddbmm", "conv1d", "conv2d", "conv3d", "cumsum", "dot", "einsum"}
    | {"grouped_mm", "_grouped_mm", "inner", "mm", "mv", "scaled_mm", "_scaled_mm", "tensordot"}
)


class Bitwise(TorchFunctionMode):
    """A scope of one thread, in which forwards round by the text alone: see the module.

    Raises:
        InvalidValueError: In a forward, for a product that is not known here, or for one that this
            machine's libraries do not compute alike for each token of a tile.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LINEAR:
            return _linear(*args, **kwargs)
        if func in _ATTENTION:
            return _attention(*args, **kwargs)
        on_device = bool(args) and isinstance(args[0], Tensor) and language.has_kernels(args[0])
        if func in _MEANS and on_device and _is_of_tokens(*args[1:], **kwargs):
            return products.mean(args[0])
        if func in _APPROXIMATED and not on_device:
            return _by_tokens(func, *args, **kwargs)
        if func in (torch.addmm, torch.Tensor.addmm):
            return _addmm(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func in _MATMUL and args[0].shape[-1] == 1:
            return func(*args, **kwargs)  # of one product there is no sum
        if func in _MATMUL or name in _REFUSED:
            raise InvalidValueError(
                "bitwise must be False for a model that multiplies by other than linear layers and "
                f"'sdpa' attention, got torch's {name}"
            )
        return func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., in) to (..., out)."""
    if type(weight) not in (Tensor, torch.nn.Parameter):
        raise InvalidValueError(
            f"bitwise must be False for weights that are quantised, got {type(weight).__name__}"
        )
    kind = (weight.shape, weight.dtype, weight.device, torch.get_num_threads())
    if kind not in _alike:
        x_drawn = _drawn(TILE, weight.shape[1], like=weight)
        what = f"{tuple(weight.shape)} {weight.dtype}"
        _require_alike(lambda tile: _product(tile, weight), x_drawn, what)
        _alike.add(kind)
    out = _product(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], -1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (tokens, in) times weight (out, in): (tokens, out)."""
    if language.has_kernels(x):
        return products.linear(x, weight, bias)
    return _tiled(lambda tile: _F.linear(tile, weight, bias), x)


def _is_of_tokens(dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> bool:
    """True for a mean over the last dimension, which stays."""
    return dim in (-1, [-1], (-1,)) and keepdim and dtype is None


# The kinds of products that were found to be the same for each token of a tile.
_alike: set[Any] = set()


def _require_alike(product: Callable[[Tensor], Tensor], x: Tensor, what: str) -> None:
    """Refuses a machine on which the product (TILE, out) of a token depends on its index in a tile
    x (TILE, in), or on the other tokens there."""
    expected = product(x)
    for shift in range(1, TILE):
        alone = torch.zeros_like(x)
        alone[shift] = x[0]
        moved = product(x.roll(shift, 0)).roll(-shift, 0)
        if not (torch.equal(moved, expected) and torch.equal(product(alone)[shift], expected[0])):
            raise InvalidValueError(
                f"bitwise must be False on this machine: its products of {TILE} tokens with "
                f"{what} round by a token's index among them"
            )


def _drawn(*shape: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(like)


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, **scales: Any) -> Tensor:
    """As `torch.addmm` with a bias for each column."""
    if language.has_kernels(x) and not scales:
        return products.linear(x, weight.T, bias)
    return _tiled(lambda tile: torch.addmm(bias, tile, weight, **scales), x)


def _tiled(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A product of x (tokens, in), from tile to tile, of which the last is filled up."""
    tokens = len(x)
    x = _F.pad(x, (0, 0, 0, -tokens % TILE)).contiguous()
    parts = [product(x[at : at + TILE]) for at in range(0, len(x), TILE)]
    return torch.cat(parts)[:tokens]


def _by_tokens(func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function of elements, of x (..., size)."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    step = max(1, _PIECE // max(size, 1)) if size % _VECTOR == 0 else 1
    parts = [func(flat[at : at + step], *args, **kwargs) for at in range(0, len(flat), step)]
    return torch.cat(parts).view(x.shape) if parts else func(x, *args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `scaled_dot_product_attention`: (rows, heads, queries, size), keys with as many heads or
    fewer."""
    del enable_gqa
    rows, heads, queries, size = query.shape
    if dropout_p or (attn_mask is not None and attn_mask.shape[1] != 1):
        raise InvalidValueError(
            "bitwise must be False for attention with dropout, or with a mask for each head, got "
            f"dropout {dropout_p} and a mask {attn_mask if attn_mask is None else attn_mask.shape}"
        )
    shape = rows, queries, key.shape[2]
    order, empty, hidden = _seen(attn_mask, shape, key.device, is_causal=is_causal)
    scale = size**-0.5 if scale is None else scale
    if language.has_kernels(query):
        seen = (~hidden).sum(-1, dtype=torch.int32)
        return products.attend(query, key, value, order, seen, scale)
    lines = query.float() * scale
    which = torch.arange(rows, device=query.device)
    if order.shape[1] > 1:
        # Each query is a row of its own.
        lines = lines.transpose(1, 2).reshape(rows * queries, heads, 1, size)
        which = which.repeat_interleave(queries)
        order, empty, hidden = (each.flatten(0, 1)[:, None] for each in (order, empty, hidden))
    step = max(1, _PRODUCTS // (key.shape[1] * order.shape[-1] * max(size, value.shape[-1])))
    parts = []
    for at in range(0, len(lines), step):
        own = slice(at, at + step)
        keys, values = (
            _taken(each, which[own], order[own, 0], empty[own, 0]) for each in (key, value)
        )
        parts.append(_attended(lines[own], keys, values, hidden[own]))
    out = torch.cat(parts)
    if len(out) > rows:
        out = out.view(rows, queries, heads, -1).transpose(1, 2)
    return out.to(value.dtype)


def _seen(
    mask: Tensor | None, shape: tuple[int, int, int], device: torch.device, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The columns that each query sees, in order and before all others, whole blocks of them.

    Layers share a mask, so the answer stays with it.

    Args:
        mask: (rows or 1, 1, queries, columns); `None` for that of `is_causal`.
        shape: Rows, queries and columns.

    Returns:
        Columns, (rows, queries, keys), or (rows, 1, keys) where each query of a row sees a first
        part of the same ones; which of them no query sees, of the same shape; and which a query
        does not see, (rows, queries, keys).
    """
    rows, queries, columns = shape
    known = getattr(mask, _SEEN, None)
    if known is not None and known[0] == (mask._version, rows):  # type: ignore[union-attr]
        return known[1]  # type: ignore[no-any-return]
    if mask is None:
        sees = torch.ones(queries, columns, dtype=torch.bool, device=device)
        sees = (sees.tril() if is_causal else sees).expand(rows, -1, -1)
    else:
        sees = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].expand(*shape)
    seen = sees.sum(-1)
    longest = max(-(-int(seen.max()) // KEYS), 1) * KEYS
    # Each query may see a first part of what a row's queries see together.
    together = sees.any(1, keepdim=True)
    ranks = together.cumsum(-1) - 1
    if not bool((sees == (together & (ranks < seen[..., None]))).all()):
        together = sees
    order = torch.argsort(together.to(torch.int8), dim=-1, descending=True, stable=True)
    order = _F.pad(order, (0, max(longest - columns, 0)))[..., :longest]
    steps = torch.arange(longest, device=order.device)
    found = order, steps >= together.sum(-1)[..., None], steps >= seen[..., None]
    if mask is not None and not mask.is_inference():
        setattr(mask, _SEEN, ((mask._version, rows), found))
    return found


# The attribute of a mask under which `_seen` stands.
_SEEN: Final = "_fastdraft_seen"


def _taken(source: Tensor, which: Tensor, order: Tensor, empty: Tensor) -> Tensor:
    """Columns of source (rows, heads, columns, size), of some rows, by order (lines, keys).

    In float32 and in blocks: (lines, heads, blocks, KEYS, size). Zeros for empty ones, which nobody
    may have written.
    """
    taken = source.transpose(1, 2)[which[:, None], order].float()
    taken = taken.masked_fill(empty[..., None, None], 0.0).transpose(1, 2)
    return taken.reshape(*taken.shape[:2], -1, KEYS, taken.shape[-1])


def _attended(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Attention in float32, in tiles of queries, summed in blocks of keys from the first one on.

    query: (rows, heads, queries, size), scaled.
    keys, values: (rows, key heads, blocks, KEYS, size).
    hidden: (rows, queries, keys).
    Returns (rows, heads, queries, size).
    """
    rows, heads, queries, size = query.shape
    key_heads, blocks = keys.shape[1:3]
    groups = heads // key_heads
    # Heads that share keys are more queries.
    lines = query.reshape(rows, key_heads, groups * queries, size)
    hidden = hidden[:, None].expand(-1, groups, -1, -1).reshape(rows, 1, groups * queries, -1)
    missing = -lines.shape[2] % TILE
    lines = _F.pad(lines, (0, 0, 0, missing)).view(rows, key_heads, -1, TILE, size)
    hidden = _F.pad(hidden, (0, 0, 0, missing), value=True).view(rows, 1, -1, TILE, blocks, KEYS)
    step = max(1, _PRODUCTS // keys.numel())
    parts = []
    for at in range(0, lines.shape[2], step):
        tiles = lines[:, :, at : at + step, None]
        scores = _products(tiles, keys[:, :, None].transpose(-1, -2))
        scores = scores.masked_fill(hidden[:, :, at : at + step].transpose(3, 4), -torch.inf)
        most = scores.amax((3, 5), keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = _by_tokens(torch.exp, scores - most)
        sums, above = weights.sum(-1), _products(weights, values[:, :, None])
        total, output = sums[:, :, :, 0], above[:, :, :, 0]
        for block in range(1, blocks):
            total, output = total + sums[:, :, :, block], output + above[:, :, :, block]
        # Any finite number for padding, which sees nothing.
        parts.append(output / total[..., None].clamp_min(torch.finfo(torch.float32).tiny))
    attended = torch.cat(parts, 2).flatten(2, 3)[:, :, : groups * queries]
    return attended.reshape(rows, heads, queries, -1)


def _products(tiles: Tensor, blocks: Tensor) -> Tensor:
    """Products of tiles (rows, heads, tiles, blocks or 1, TILE, in) with blocks (rows, heads, 1,
    blocks, in, out): (rows, heads, tiles, blocks, TILE, out)."""
    kind = (blocks.shape[-2:], blocks.device, torch.get_num_threads())
    if kind not in _alike:
        several = _drawn(3, *blocks.shape[-2:], like=blocks)
        x = _drawn(TILE, blocks.shape[-2], like=blocks)
        what = f"a batch of {tuple(blocks.shape[-2:])} {blocks.dtype}"
        _require_alike(lambda tile: torch.bmm(tile.expand(3, -1, -1), several)[0], x, what)
        _alike.add(kind)
    shape = (*tiles.shape[:3], blocks.shape[3])
    one = tiles.expand(*shape, -1, -1).reshape(-1, *tiles.shape[-2:])
    # `flatten` keeps the strides of the last two dimensions, so a transposed operand stays one.
    other = blocks.expand(*shape, -1, -1).flatten(0, 3)
    return torch.bmm(one, other).view(*shape, TILE, -1)
