"""Attention without copies of shared keys, as an attention function of transformers.

For several new tokens with a mask, transformers' 'sdpa' copies the keys and values of the whole
cache for each query head that shares them. This function makes query heads that share keys more
queries of one head, as 'sdpa' does for a single token. It leaves all else to 'sdpa', so it may
stand in for that at any time.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fastdraft.hf.interface import attention_of, set_attention

__all__ = ["STAND_IN", "attending", "shares_keys"]

STAND_IN: Final = "fastdraft"
"""The function's name among those of transformers."""

# A prompt has more tokens than that, and work enough to make the copies nothing.
_FEW: Final = 64

# Arguments of layers that change more than the mask says; they are left to 'sdpa'.
_OTHERWISE: Final = (
    "block_indices",
    "cache",
    "indices",
    "position_bias",
    "s_aux",
    "sinks",
    "softcap",
)

# The attribute of a mask under which `_packed_mask` stands.
_PACKED: Final = "_fastdraft_packed"

_lock = threading.Lock()
# The generations that use the function for the time being, by the configuration's id.
_using: dict[int, set[object]] = {}


def shares_keys(model: Any) -> Any:
    """The configuration of attention where query heads share keys and the function may stand in for
    'sdpa'; else None."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    takes_it = attention_of(config) in ("sdpa", STAND_IN)
    takes_it = takes_it and model.is_backend_compatible()
    return config if takes_it and heads != key_heads else None


@contextlib.contextmanager
def attending(model: Any) -> Iterator[None]:
    """Lets the model attend by this function, if it may; generations at a time share the change."""
    config, generation = shares_keys(model), object()
    if config is None:
        yield
        return
    try:
        with _lock:
            _using.setdefault(id(config), set()).add(generation)
            set_attention(config, STAND_IN)
        yield
    finally:
        # Right wherever an interrupt hits.
        with _lock:
            generations = _using.get(id(config), set())
            generations.discard(generation)
            if not generations:
                _using.pop(id(config), None)
                set_attention(config, "sdpa")


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls attention functions: the result is (rows, tokens, heads, size)."""
    if (
        attention_mask is None
        or attention_mask.dim() != 4
        or attention_mask.shape[1] != 1
        or query.shape[2] > _FEW
        or query.shape[1] == key.shape[1]
        or any(kwargs.get(name) is not None for name in _OTHERWISE)
    ):
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return attended
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    packed = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], groups * width, size),
        key,
        value,
        attn_mask=_packed_mask(attention_mask, groups, query.dtype),
        dropout_p=dropout,
        scale=scaling,
    )
    return packed.reshape(rows, heads, width, -1).transpose(1, 2).contiguous(), None


def _packed_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The mask of the queries of all heads that share keys, to be added.

    All layers of a forward share it: it stays with the mask. A compiler finds that by itself.
    """
    keeps = not (torch.compiler.is_compiling() or mask.is_inference())
    key = (mask._version, groups, dtype) if keeps else None
    known: tuple[Any, Tensor] | None = getattr(mask, _PACKED, None) if keeps else None
    if known is not None and known[0] == key:
        return known[1]
    # All query heads instead of the mask's one; then their tokens one after the other.
    packed = mask.expand(-1, groups, -1, -1)
    if mask.dtype == torch.bool:
        packed = torch.where(packed, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)
    packed = packed.reshape(len(mask), 1, -1, mask.shape[3])
    if keeps:
        setattr(mask, _PACKED, (key, packed))
    return packed


AttentionInterface.register(STAND_IN, _attention_forward)
AttentionMaskInterface.register(STAND_IN, sdpa_mask)
