"""A key-value cache whose rows have lengths of their own.

Every layer is one buffer of shape (rows, heads, capacity, head size). New keys and values are
written behind each row's own text, and a rejected token is forgotten by not counting it: the next
step writes over it. Nothing is copied at a step but the new tokens, and the accepted ones of a tree
once more, to the places that follow the text. Sliding-window layers are kept in full, since a
window that has let go of a token cannot take back a rejected one; the mask keeps the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from fastdraft.errors import InvalidValueError

__all__ = ["RowCache", "places_after"]

_SMALLEST_CAPACITY = 64

# Layers that use the keys and values of another layer; transformers 5.19 has no entry for them.
_SHARING: tuple[type, ...] = tuple(
    kind for kind in (getattr(cache_utils, "DummyLayer", None),) if kind is not None
)


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[torch.Tensor] = []  # keys and values: (rows, heads, capacity, head size)
        self.rows = 0
        # Columns in use by the longest row. The model reads it to place queries in its own masks.
        self.length = 0
        # (rows, columns) to write to, each (rows, width); None when all rows write to the same.
        self.places: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.rows = key_states.shape[0]
        capacity = max(_SMALLEST_CAPACITY, 2 * key_states.shape[-2])
        self.buffers = [_buffer(states, capacity) for states in (key_states, value_states)]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.length
        end = start + key_states.shape[-2]
        if end > self.buffers[0].shape[-2]:
            self.buffers = [_grown(buffer, end) for buffer in self.buffers]
        keys, values = (buffer[: self.rows, :, :end] for buffer in self.buffers)
        if self.places is None:
            keys[:, :, start:] = key_states
            values[:, :, start:] = value_states
        else:
            rows, columns = (place.to(keys.device) for place in self.places)
            keys[rows, :, columns] = key_states.transpose(1, 2)
            values[rows, :, columns] = value_states.transpose(1, 2)
        self.length = end
        # Some models look at these themselves.
        self.keys, self.values = keys, values
        return keys, values

    def move(self, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for buffer in self.buffers:
            at = [index.to(buffer.device) for index in (rows, sources, targets)]
            buffer[at[0], :, at[2]] = buffer[at[0], :, at[1]]

    def keep(self, slots: Sequence[int]) -> None:
        for buffer in self.buffers:
            for slot, source in enumerate(slots):
                if slot != source:
                    buffer[slot] = buffer[source]
        self.rows = len(slots)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """The cache of a batch whose rows grow and end at different times.

    Args:
        prepared: The cache that `generate` made or was given. Its layers say what the model needs;
            tokens that it holds already are copied.

    Raises:
        InvalidValueError: A layer holds state that cannot take back a rejected token.
    """

    def __init__(self, prepared: Cache) -> None:
        if type(prepared) is not DynamicCache or prepared.offloading:
            offloaded = "offloaded " if getattr(prepared, "offloading", False) else ""
            raise InvalidValueError(
                "past_key_values must be a DynamicCache, got "
                f"{offloaded}{type(prepared).__name__}; leave cache_implementation unset"
            )
        if prepared.layer_class_to_replicate is None:
            super().__init__(layers=[])
        else:
            super().__init__(layer_class_to_replicate=_RowLayer)
        self.layers.extend(_row_layer(layer, index) for index, layer in enumerate(prepared.layers))

    def prepare(self, lengths: Sequence[int], width: int, device: torch.device) -> None:
        """Says where the next forward writes: row b from column lengths[b] on, `width` columns."""
        longest = max(lengths)
        places = None
        if min(lengths) != longest:
            starts = torch.tensor(lengths, device=device)
            rows = torch.arange(len(lengths), device=device)
            columns = starts[:, None] + torch.arange(width, device=device)  # (rows, width)
            places = (rows[:, None].expand_as(columns), columns)
        for layer in self._row_layers():
            layer.length = longest
            layer.places = places

    def compact(self, lengths: Sequence[int], kept: torch.Tensor, device: torch.device) -> None:
        """Moves what the latest forward wrote, so that accepted tokens stand behind each other.

        Args:
            lengths: Where the forward wrote in each row, as in `prepare`.
            kept: (rows, tokens) int64, which of a row's new tokens is to stand in each of the
                places from there on.
        """
        rows, places = (kept != torch.arange(kept.shape[1])).nonzero(as_tuple=True)
        if len(rows) == 0:
            return
        starts = torch.tensor(lengths)[rows]
        sources, targets = starts + kept[rows, places], starts + places
        indices = [index.to(device) for index in (rows, sources, targets)]
        for layer in self._row_layers():
            layer.move(*indices)

    def keep(self, slots: Sequence[int]) -> None:
        """Drops all rows but `slots` and moves these to the front. Copies only rows that move.

        Args:
            slots: What each remaining slot holds from now on, as an index among the present rows;
                a slot keeps its own row or takes over a later one.
        """
        for layer in self._row_layers():
            layer.keep(slots)

    def write_back(self, cache: DynamicCache, length: int) -> None:
        """Hands the first `length` tokens of a single row to `cache`, as `generate` leaves it."""
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, _RowLayer) or not layer.is_initialized:
                continue
            if index == len(cache.layers):
                cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
            target: Any = cache.layers[index]
            start = 0
            if isinstance(target, DynamicSlidingWindowLayer):
                target.cumulative_length = length
                start = max(0, length - target.sliding_window + 1)
            if not target.is_initialized:
                target.lazy_initialization(*layer.buffers)
            target.keys, target.values = (
                buffer[:1, :, start:length].clone() for buffer in layer.buffers
            )

    def _row_layers(self) -> list[_RowLayer]:
        return [layer for layer in self.layers if isinstance(layer, _RowLayer)]


def places_after(ended: Sequence[bool]) -> list[int]:
    """The slots that stay, for `RowCache.keep`: the last ones in the places that became free."""
    staying = [slot for slot, over in enumerate(ended) if not over]
    late = [slot for slot in staying if slot >= len(staying)]
    return [late.pop() if ended[slot] else slot for slot in range(len(staying))]


def _row_layer(layer: Any, index: int) -> Any:
    if isinstance(layer, _SHARING):
        return layer
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise InvalidValueError(
            "model must have a state that can take back a rejected token, "
            f"got layer {index} with {type(layer).__name__}"
        )
    row_layer = _RowLayer()
    seen = layer.get_seq_length()
    if seen:
        held = layer.keys.shape[-2]
        # Between turns a window lets go of what no later token looks at: the mask hides its zeros.
        if held < min(seen, getattr(layer, "sliding_window", seen + 1) - 1):
            raise InvalidValueError(
                f"past_key_values must hold all of its {seen} tokens, or a sliding window's, "
                f"got layer {index} with the last {held}"
            )
        states = (layer.keys, layer.values)
        row_layer.update(*(pad(state, (0, 0, seen - held, 0)) for state in states))
    return row_layer


def _buffer(states: torch.Tensor, capacity: int) -> torch.Tensor:
    # Zeros: a masked column still takes part in probabilities x values, where 0 x NaN is NaN.
    rows, heads, _, size = states.shape
    return states.new_zeros((rows, heads, capacity, size))


def _grown(buffer: torch.Tensor, needed: int) -> torch.Tensor:
    grown = _buffer(buffer, max(needed, 2 * buffer.shape[-2]))
    grown[:, :, : buffer.shape[-2]] = buffer
    return grown
