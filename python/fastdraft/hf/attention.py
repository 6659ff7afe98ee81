"""Attention by lengths in place of masks, as an attention function of transformers: 'fastdraft'.

A mask of a step over a static cache has a value for each new token and each column, and where there
is one, transformers copies the keys and values for each query head that shares them. This function
takes what `Masks.sights` makes instead: three numbers for each new token, which are `seen` of
`fastdraft.kernels.attention`. They travel in the mask's place, as a tensor of four
dimensions, which models hand on as it is, and are told from masks by their type, int64.

All other masks are served too, those of prompts and of models that other loops decode, so the
function may stand in for 'sdpa' at any time. Where a few new tokens come with a mask, it does what
'sdpa' does for a single one: query heads that share keys become more queries of one head, and
nothing is copied.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import attention, language

__all__ = ["ATTENTION", "attending", "shares_keys", "takes_sights"]

ATTENTION: Final = "fastdraft"
"""The function's name for `attn_implementation`."""

# What layers hand to attention functions that this one knows nothing of.
_UNKNOWN: Final = re.compile(r"\b(position_bias|block_indices|indices|sinks)=")
# What this one knows, and 'sdpa' leaves out: the result would be another.
_LEFT_OUT_BY_SDPA: Final = re.compile(r"\b(softcap|s_aux)=")
# How they hand on the mask, and what else may happen to it; that of an encoder is another matter.
_HANDED_ON: Final = re.compile(r"attention_interface\([^)]*\battention_mask\b")
_CHANGED: Final = re.compile(r"\battention_mask\s*([\[+*]|=(?!\s*(encoder_)?attention_mask\b))")

# A prompt has more tokens than that, and work enough to make the copies nothing.
_FEW: Final = 64

# The attribute of a mask under which `_packed_mask` stands.
_PACKED: Final = "_fastdraft_packed"

_lock = threading.Lock()
# Of configurations that use the function for the time being, by id: what they used before, and the
# generations that use them.
_using: dict[int, tuple[str, set[object]]] = {}


def takes_sights(model: Any) -> bool:
    """Whether the model's forwards over a static cache take lengths in place of masks.

    They do where the user has chosen the function, and in place of 'sdpa' where Triton has a kernel
    for it; never in place of 'eager'. Models whose layers do not look the function up, hand it what
    it does not know, or do more with a mask than to pass it on, keep their masks.
    """
    config = model.config.get_text_config(decoder=True)
    replaces_sdpa = config._attn_implementation == "sdpa"
    if replaces_sdpa:
        probe = torch.empty(0, dtype=model.dtype, device=model.device)
        if not language.has_kernels(probe):
            return False
    elif config._attn_implementation != ATTENTION:
        return False
    sources = _sources_of_attention(model)
    return bool(sources) and all(
        _is_served(source, replaces_sdpa)
        and _HANDED_ON.search(source)
        and not _CHANGED.search(source)
        for source in sources
    )


def shares_keys(model: Any) -> bool:
    """Whether query heads share keys, and the function may stand in for 'sdpa' with its masks."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if config._attn_implementation != "sdpa" or heads in (
        None,
        getattr(config, "num_key_value_heads", None) or heads,
    ):
        return False
    sources = _sources_of_attention(model)
    return bool(sources) and all(_is_served(source, True) for source in sources)


def _sources_of_attention(model: Any) -> list[str]:
    """The source of each kind of attention layer; none where they do not look functions up.

    As transformers asks whether a model has such functions at all: by the source.
    """
    config = model.config.get_text_config(decoder=True)
    layers = [
        each
        for each in model.modules()
        if hasattr(each, "layer_idx") and "Attention" in type(each).__name__
    ]
    if not getattr(model, "_supports_attention_backend", False) or not all(
        getattr(each, "config", None) is config for each in layers
    ):
        return []
    try:
        kinds: set[Any] = {type(each) for each in layers}
        return [_source(kind) for kind in kinds]
    except (OSError, TypeError):
        return []


@functools.cache
def _source(kind: Any) -> str:
    return inspect.getsource(kind.forward)


def _is_served(source: str, replaces_sdpa: bool) -> bool:
    """Whether the function knows all that a layer hands to it."""
    return not (_UNKNOWN.search(source) or (replaces_sdpa and _LEFT_OUT_BY_SDPA.search(source)))


@contextlib.contextmanager
def attending(model: Any, *, stands_in: bool) -> Iterator[None]:
    """Lets the model attend by this function, if so; generations at a time share the change."""
    if not stands_in:
        yield
        return
    config, generation = model.config.get_text_config(decoder=True), object()
    try:
        with _lock:
            before, generations = _using.setdefault(
                id(config), (config._attn_implementation, set())
            )
            generations.add(generation)
            config._attn_implementation = ATTENTION
        yield
    finally:
        # Right wherever an interrupt came.
        with _lock:
            before, generations = _using.get(id(config), (config._attn_implementation, set()))
            generations.discard(generation)
            if not generations:
                _using.pop(id(config), None)
                config._attn_implementation = before


def _cached_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    operands = attention.Operands(query, keys, values, scale, softcap, sinks)
    return attention.cached_attention(operands, seen)


# For a compiler one call, of which it knows the result's shape.
_operation = torch.library.custom_op(
    "fastdraft::cached_attention",
    _cached_attention,
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor keys, Tensor values, Tensor seen, float scale, float? softcap, "
        "Tensor? sinks) -> Tensor"
    ),
)


@_operation.register_fake
def _(query: Tensor, _keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    rows, heads, width, _size = query.shape
    return query.new_empty(rows, width, heads, values.shape[3])


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
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        # Calls of an operation cost time of their own where nothing is compiled.
        call = _operation if torch.compiler.is_compiling() else _cached_attention
        return call(query, key, value, attention_mask, scale, softcap, sinks), None
    if softcap is None and sinks is None:
        if _packs(query, key, attention_mask, kwargs):
            assert attention_mask is not None
            packed = _packed(query, key, value, attention_mask, dropout=dropout, scale=scale)
            return packed.transpose(1, 2).contiguous(), None
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return attended
    if dropout > 0:
        raise InvalidValueError(f"{ATTENTION!r} attention has no dropout, got {dropout}")
    visible = attention_mask
    if visible is None:
        tokens, columns = query.shape[2], key.shape[2]
        visible = torch.ones(tokens, columns, dtype=torch.bool, device=query.device)
        if kwargs.get("is_causal", getattr(module, "is_causal", True)):
            visible = visible.tril(columns - tokens)
    operands = attention.Operands(query, key, value, scale, softcap, sinks)
    result = attention.attention(operands, visible)
    return result.transpose(1, 2).contiguous(), None


def _packs(query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether heads that share keys are to become queries of one head."""
    return (
        mask is not None
        and mask.dim() == 4
        and mask.shape[1] == 1
        and query.shape[2] <= _FEW
        and query.shape[1] > key.shape[1]
        and kwargs.get("position_bias") is None
        and kwargs.get("cache") is None
    )


def _packed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, dropout: float, scale: float
) -> Tensor:
    """Masked attention, (rows, heads, tokens, size), over keys and values of fewer heads.

    Repeated for every query head, as 'sdpa' has them, they are a copy of the whole cache.
    """
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], groups * width, size),
        key,
        value,
        attn_mask=_packed_mask(mask, groups, query.dtype),
        dropout_p=dropout,
        scale=scale,
    )
    return attended.reshape(rows, heads, width, value.shape[3])


def _packed_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The mask of the queries of all heads that share keys, to be added.

    All layers of a forward share it: it stays with the mask. A compiler finds that by itself.
    """
    keeps = not (torch.compiler.is_compiling() or mask.is_inference())
    key = (mask._version, groups, dtype) if keeps else None
    known: tuple[Any, Tensor] | None = getattr(mask, _PACKED, None) if keeps else None
    if known is not None and known[0] == key:
        return known[1]
    # Query heads in the place of the mask's one, behind which the tokens of all of them stand.
    packed = mask.expand(-1, groups, -1, -1)
    if mask.dtype == torch.bool:
        packed = torch.where(packed, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)
    packed = packed.reshape(len(mask), 1, -1, mask.shape[3])
    if keeps:
        setattr(mask, _PACKED, (key, packed))
    return packed


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
