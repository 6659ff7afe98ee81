"""Whether a model can decode drafts, asked of the model itself before a generation begins.

A draft is verified in one forward over several tokens behind a cache, and right only where that
says what forwards over one token each would: the model must run on what it is given, no token may
see a later one, and nothing may hang on a window whose mask is left to the cache.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from fastdraft.errors import InvalidValueError
from fastdraft.hf.interface import CACHE, unfit
from fastdraft.hf.vocabulary import vocabulary_size

__all__ = ["require_draftable"]

# What makes the mask of a window in transformers.
_WINDOW_MASK = "create_sliding_window_causal_mask"
# How many columns more than its window a layer is asked over.
_BEHIND = 16

# The questions that a model has answered well, each with what the answer depends on.
_answered: weakref.WeakKeyDictionary[Any, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def require_draftable(
    model: Any,
    *,
    prepared: Cache,
    position_ids: torch.Tensor | None,
    kwargs: dict[str, Any],
    max_length: int,
    device: torch.device,
) -> None:
    """Raises InvalidValueError when the model cannot verify drafts.

    Runs the model only where its modules do not tell, once over two tokens for each such question.

    Args:
        model: The model.
        prepared: The cache that `generate` prepared for it.
        position_ids: Those of the prompts; `None` for a model that takes none.
        kwargs: What every forward takes besides, as `generate` prepared it.
        max_length: How long the text may become.
        device: Where the model takes its inputs.
    """
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    if CACHE not in parameters:
        raise unfit(
            f"model must keep its keys and values in the cache that it is given, got {name}, "
            "which does not"
        )
    places = None
    if position_ids is not None:
        places = torch.arange(2, device="cpu").expand(*position_ids.shape[:-2], 1, 2)
    _require_plain_inputs(model, places, kwargs, device)
    if model.training:
        return  # Dropout would answer at random.
    config = model.config.get_text_config(decoder=True)
    circumstances = config._attn_implementation, getattr(config, "is_decoder", None)
    answered = _answered.setdefault(model, set())
    ask = functools.partial(
        _ask, model, places=places, kwargs=kwargs, prepared=prepared, device=device
    )

    if ("causal", *circumstances) not in answered:
        flags = {each.is_causal for each in model.modules() if hasattr(each, "is_causal")}
        if flags != {True} and _differ(ask(columns=1)):
            raise InvalidValueError(
                f"model must be causal, got {name}, in which a token depends on those behind it "
                "(an encoder without is_decoder=True?)"
            )
        answered.add(("causal", *circumstances))

    windows = [_window(layer) for layer in prepared.layers]
    widest = max((window for window in windows if window is not None), default=max_length)
    if max_length > widest and ("windows", widest, *circumstances) not in answered:
        if not _masks_windows(model) and _differ(ask(columns=widest + _BEHIND, windows=windows)):
            raise InvalidValueError(
                "model must mask what a sliding window hides, got "
                f"{name}, which leaves that to the cache; keep max_length within {widest}, "
                f"got {max_length}"
            )
        answered.add(("windows", widest, *circumstances))


def _require_plain_inputs(
    model: Any, places: torch.Tensor | None, kwargs: dict[str, Any], device: torch.device
) -> None:
    """Refuses a model that runs on other tokens or another cache than it is given."""
    cache = DynamicCache()
    ids = torch.ones((1, 2), dtype=torch.int64, device=device)
    inputs = _inputs(model, ids, cache, places, kwargs)
    given = inputs.get("input_ids")
    if (
        # Also by no other name: PEFT's prefix takes the one of before transformers 5.24.
        [id(each) for each in inputs.values() if isinstance(each, Cache)] != [id(cache)]
        or inputs.get("inputs_embeds") is not None
        or given is None
        or not torch.equal(given, ids)
    ):
        raise unfit(
            "model must be run on the text and the cache that it is given, got "
            f"{type(model).__name__}, which prepares others (prompt or prefix tuning?)"
        )


def _inputs(
    model: Any,
    ids: torch.Tensor,
    cache: Cache,
    places: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """What a forward over `ids` takes."""
    options = dict(kwargs)
    if places is not None:
        options["position_ids"] = places.to(ids.device)
    if "logits_to_keep" in options:
        options["logits_to_keep"] = ids.shape[1]
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        ids, **{CACHE: cache}, attention_mask=None, **options
    )
    return inputs


def _masks_windows(model: Any) -> bool:
    """Whether the model's code makes the masks of windows, as transformers' own does."""
    sources = {type(each).__module__ for each in model.modules()}
    return any(hasattr(sys.modules.get(source), _WINDOW_MASK) for source in sources)


def _window(layer: Any) -> int | None:
    """How many tokens the layer's queries see in plain decoding; `None` for all."""
    return layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None


def _ask(
    model: Any,
    *,
    places: torch.Tensor | None,
    kwargs: dict[str, Any],
    prepared: Cache,
    device: torch.device,
    columns: int,
    windows: list[int | None] | None = None,
) -> torch.Tensor:
    """The logits (2, vocabulary) after the first of two tokens behind a cache.

    The rows differ in the second token, or with `windows` in what stands behind these.
    """
    first, second, other = (vocabulary_size(model) // part for part in (2, 3, 5))
    ids = torch.tensor(
        [[first, second], [first, other if windows is None else second]], device="cpu"
    )
    cache = _probe_cache(prepared, columns, windows)
    name = type(model).__name__
    try:
        inputs = _inputs(model, ids.to(device), cache, places, kwargs)
        logits: torch.Tensor = model(**inputs, return_dict=True).logits
    except Exception as error:
        raise unfit(
            f"model must run on several tokens behind its cache, got {name}, which fails: {error!r}"
        ) from error
    if logits.shape[:2] != ids.shape:
        raise InvalidValueError(
            f"model must give logits for each of several tokens behind its cache, got {name}, "
            f"which gives shape {tuple(logits.shape)} for {tuple(ids.shape)} tokens"
        )
    if not any(isinstance(each, _ProbeLayer) and each.is_initialized for each in cache.layers):
        raise unfit(
            f"model must keep its keys and values in the cache that it is given, got {name}, "
            "which does not"
        )
    return logits[:, 0]


def _differ(logits: torch.Tensor) -> bool:
    """Whether two rows differ by more than rounding."""
    rounding = torch.finfo(logits.dtype).eps ** 0.5
    spread = logits.max() - logits.min()
    return bool((logits[0] - logits[1]).abs().max() > rounding * spread)


class _ProbeLayer(DynamicLayer):
    """Holds `columns` columns of zeros; the first `hidden` values of the second row are loud."""

    def __init__(self, columns: int, hidden: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._columns = columns
        self._hidden = hidden

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (
            states.new_zeros((*states.shape[:2], self._columns, states.shape[3]))
            for states in (key_states, value_states)
        )
        # Loud enough to be heard among all columns, and within float16.
        self.values[1:, :, : self._hidden] = min(float(self._columns), 3e4)

    def get_seq_length(self) -> int:
        return self._columns


def _probe_cache(prepared: Cache, columns: int, windows: list[int | None] | None) -> Cache:
    """A cache that says it holds `columns` columns, in as many layers as the prepared one."""
    kind: Any = functools.partial(_ProbeLayer, columns)
    if not prepared.layers:
        return Cache(layer_class_to_replicate=kind)
    layers = []
    for place, layer in enumerate(prepared.layers):
        window = None if windows is None else windows[place]
        hidden = 0 if window is None else columns - window + 1
        layers.append(kind(hidden) if isinstance(layer, DynamicLayer) else layer)
    return Cache(layers=layers)
