"""A key-value cache whose rows have lengths of their own.

Every layer is one buffer of shape (rows, heads, columns, head size). New keys and values are
written behind each row's own text, and a rejected token is forgotten by not counting it: the next
step writes over it. Copied at a step are the new tokens, and the accepted ones of a tree once more,
to the columns that follow the text.

A sliding-window layer holds of each row what the next token can look at, and what later forwards
write behind it. Where that fills the buffer, every row moves its window to the front; so a row's
first column holds another token than the next row's, and `RowCache.frames` says which.

A full buffer grows by a sixteenth, at least by 32 columns, but never beyond the longest text of the
generation, and only one buffer grows at a time. So the cache takes little more memory than a
DynamicCache, which copies itself whole at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from fastdraft.errors import InvalidValueError
from fastdraft.hf.device import Transfer, on_device
from fastdraft.hf.interface import CACHE
from fastdraft.hf.recurrent import STATE, Beginning, Commits, RecurrentLayer, States

__all__ = ["SHARING", "Frame", "RaggedCache", "RowCache", "RowLayer", "compacted_slots"]

# The part of what it needs by which a buffer is larger.
_SLACK: Final = 16
# At least by these columns: buffers of short texts would grow at every other step.
_LEAST_SLACK: Final = 32

# Layers that use the keys and values of another layer; transformers 5.19 has no entry for them.
SHARING: tuple[type, ...] = tuple(
    kind for kind in (getattr(cache_utils, "DummyLayer", None),) if kind is not None
)


_INDEXED: Any = getattr(cache_utils, "DynamicIndexedLayer", None)
_HYBRID = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
# Layers whose kind says what they hold; a model's own kinds may hold more. Not every version of
# transformers has all of them, and states are known where `STATE` is.
_KNOWN: Final = {DynamicLayer, DynamicSlidingWindowLayer, _INDEXED, STATE} | {
    getattr(cache_utils, name, None) for name in _HYBRID if STATE is not None
}


class Frame(NamedTuple):
    """The part of the layers of one window that a forward sees.

    Attributes:
        firsts: Of each row, the oldest token that has a column; it may lie before the text.
        columns: How many columns there are.
        is_ring: Whether token t stands in column t % columns, not in column t - first.
    """

    firsts: Sequence[int]
    columns: int
    is_ring: bool = False

    def columns_of(
        self, tokens: NDArray[np.int64], rows: Sequence[int] | slice = slice(None)
    ) -> NDArray[np.int64]:
        """The columns of tokens (rows, n) of all rows, or of some."""
        firsts: NDArray[np.int64] = np.array(self.firsts)[rows, None]
        return tokens % self.columns if self.is_ring else tokens - firsts


class _Layout(NamedTuple):
    """The tokens that a layer's buffers hold.

    Attributes:
        bases: The token that the first column of each row's buffer holds.
        capacity: The columns of the buffers.
    """

    bases: list[int]
    capacity: int


@dataclass
class _Plan:
    """The columns of the layers of one window that a forward writes and sees.

    Attributes:
        layout: The layout of the buffers.
        start: The column to write to; where rows write to different ones, the least.
        targets: (rows, 1, width, 1), the columns to write to, and then what gives them on the
            device; None when all rows write to the same.
        first, columns: The columns that are seen: the first one, and how many.
        length: Tokens of the longest row, the new ones too.
    """

    layout: _Layout
    start: int
    targets: Any
    first: int
    columns: int
    length: int

    @property
    def frame(self) -> Frame:
        return Frame([base + self.first for base in self.layout.bases], self.columns)


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer, (rows, heads, columns, head size) of what forwards see.

    Args:
        window: How many tokens a query sees, itself among them; None for all.
    """

    keys: Any
    values: Any

    def __init__(self, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.is_sliding = window is not None

    def move(self, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies columns over others."""
        for seen in (self.keys, self.values):
            at = [index.to(seen.device) for index in (rows, sources, targets)]
            seen[at[0], :, at[2]] = seen[at[0], :, at[1]]


class _GrowingLayer(RowLayer):  # type: ignore[no-untyped-call]
    """A layer whose buffers grow with the text."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__(window)
        self.buffers: list[torch.Tensor] = []  # keys and values: (rows, heads, columns, head size)
        self.layout = _Layout([], 0)
        # Tokens of the longest row. The model reads it for its own masks.
        self.length = 0
        # For the next forward; None when all rows go on behind `length`, with nothing rejected.
        self.plan: _Plan | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.buffers = [
            states.new_empty((*states.shape[:2], 0, states.shape[3]))
            for states in (key_states, value_states)
        ]
        self.keys, self.values = self.buffers
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.plan
        if plan is None:
            lengths = [self.length] * key_states.shape[0]
            plan = self.planned(lengths, lengths, key_states.shape[-2], None)
        if plan.layout != self.layout:
            # Views of the buffers, which must not outlive them.
            self.keys = self.values = None
            for index, buffer in enumerate(self.buffers):
                # One after the other, so that no more than one is there twice.
                self.buffers[index] = _moved(buffer, self.layout, plan.layout)
                del buffer
            self.layout = plan.layout
        keys, values = self.buffers
        rows = key_states.shape[0]
        if keys.shape[0] > rows:
            keys, values = keys[:rows], values[:rows]
        if plan.targets is None:
            keys.narrow(2, plan.start, key_states.shape[2]).copy_(key_states)
            values.narrow(2, plan.start, key_states.shape[2]).copy_(value_states)
        else:
            targets = plan.targets().to(keys.device)
            keys.scatter_(2, targets.expand_as(key_states), key_states)
            values.scatter_(2, targets.expand_as(value_states), value_states)
        self.length = plan.length
        # Some models look at these themselves.
        self.keys = keys.narrow(2, plan.first, plan.columns)
        self.values = values.narrow(2, plan.first, plan.columns)
        return self.keys, self.values

    def planned(
        self, lengths: Sequence[int], floors: Sequence[int], width: int, most: int | None
    ) -> _Plan:
        """Plans a forward of `width` tokens, of row b from token lengths[b] on.

        Args:
            floors: No forward from the next one on begins before these.
            most: Columns that the buffers can come to need, if that is known.
        """
        layout = self.layout
        bases = layout.bases or [0] * len(lengths)
        starts = list(map(sub, lengths, bases))
        if max(starts) + width > layout.capacity:
            if self.window is not None:
                oldest = [min(pair) - self.window + 1 for pair in zip(lengths, floors, strict=True)]
                bases = list(map(max, oldest, bases))
                starts = list(map(sub, lengths, bases))
            needed = max(starts) + width
            slack = max(needed // _SLACK, _LEAST_SLACK)
            if self.window is not None and needed > self.window:
                # Little of a forward longer than the window is needed afterwards.
                slack = self.window // _SLACK if width <= self.window else 0
            capacity = needed + slack
            if most is not None:
                capacity = max(needed, min(capacity, most))
            layout = _Layout(bases, capacity)
        start, last = min(starts), max(starts)
        targets = None
        if start < last:
            targets = (np.array(starts)[:, None] + np.arange(width))[:, None, :, None]
        first = 0 if self.window is None else max(start - self.window + 1, 0)
        columns = last + width - first
        return _Plan(layout, start, targets, first, columns, length=max(lengths) + width)

    def keep(self, slots: Sequence[int]) -> None:
        for buffer in self.buffers:
            for slot, source in enumerate(slots):
                if slot != source:
                    buffer[slot] = buffer[source]
        if self.buffers:
            bases, capacity = self.layout
            self.layout = _Layout([bases[slot] for slot in slots], capacity)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As a DynamicCache has it. Right where rows are equally long, as for the model's masks."""
        seen = self.length if self.window is None else min(self.length, self.window - 1)
        return seen + query_length, self.length - seen

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class _IndexedLayer(_GrowingLayer):  # type: ignore[no-untyped-call]
    """A layer whose indexer keeps keys of its own, in the same columns."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer = _GrowingLayer()

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """The indexer's keys (rows, tokens, size), old and new."""
        self.indexer.plan = self.plan
        keys = indexer_key_states[:, None]
        # A layer holds keys and values; the indexer has no values.
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]

    def move(self, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        super().move(rows, sources, targets)
        self.indexer.move(rows, sources, targets)

    def keep(self, slots: Sequence[int]) -> None:
        super().keep(slots)
        self.indexer.keep(slots)


class _HybridLayer(RecurrentLayer, _GrowingLayer):  # type: ignore[no-untyped-call]
    """A layer of attention beside a recurrent one."""

    lazy_initialization = _GrowingLayer.lazy_initialization

    def __init__(self, window: int | None, count: int) -> None:
        _GrowingLayer.__init__(self, window)
        RecurrentLayer.__init__(self, count)


class RaggedCache(Cache):
    """A cache whose rows have lengths of their own: what `RowCache` and `StaticRowCache` share.

    Before each forward `plan` adds numbers to a transfer, and `prepare` finds them on the device.

    Attributes:
        frames: What the next forward sees of the layers, by their windows.
        has_recurrent_layers: Whether some layers have states, which would hold all of a tree.
    """

    has_recurrent_layers = False

    def __init__(self, *, layers: list[Any], layer_class_to_replicate: Any = None) -> None:
        # Not the next class in line: a model's own kind of cache makes its layers itself.
        if layer_class_to_replicate is None:
            Cache.__init__(self, layers=layers)
        else:
            Cache.__init__(self, layer_class_to_replicate=layer_class_to_replicate)
            self.layers = layers
        self.frames: dict[int | None, Frame] = {}
        self._windows: dict[int | None, list[Any]] = {}
        self._grouped = 0

    def by_window(self) -> dict[int | None, list[Any]]:
        """The layers of attention by their windows: those of one window hold the same tokens."""
        for layer in self.layers[self._grouped :]:
            # The first forward may add layers.
            if isinstance(layer, RowLayer):
                self._windows.setdefault(layer.window, []).append(layer)
        self._grouped = len(self.layers)
        return self._windows

    def prepare(self) -> None:
        """Takes what `plan` has sent."""

    @property
    def commits(self) -> bool:
        """True if there are recurrent states, which cannot be cropped."""
        return False

    def starts(self, lengths: list[int]) -> list[int]:
        """The token from which each row has to be forwarded, as `Commits.starts`: `lengths` itself
        without recurrent states."""
        return lengths

    def compact(self, rows: Sequence[int], lengths: Sequence[int], kept: NDArray[np.int64]) -> None:
        """Moves what the latest forward wrote, so that accepted tokens stand behind each other.

        Args:
            rows: The rows that took part, by their slots in the cache.
            lengths: Tokens of each before the forward.
            kept: (rows, tokens), which of a row's new tokens is to stand in each of the columns
                from there on.
        """
        steps = np.arange(kept.shape[1])
        moved, at = np.nonzero(kept != steps)
        if len(moved) == 0:
            return
        starts = np.array(lengths)[:, None]
        for window, layers in self.by_window().items():
            # An excerpt of a model writes to the first layers only.
            layers = [layer for layer in layers if layer.is_initialized]
            frame = self.frames[window]
            indices = [
                frame.columns_of(starts + tokens, rows)[moved, at] for tokens in (kept, steps)
            ]
            sent = on_device(layers[0].keys.device, np.array(rows)[moved], *indices)
            for layer in layers:
                layer.move(*sent)


class RowCache(RaggedCache):
    """A cache that grows with the text.

    Args:
        prepared: The cache that `generate` made or was given. Its layers say what the model needs.
            Tokens that it holds already are held twice from the first forward on, unless
            `take_over` empties it until `write_back`.
        new_tokens: How many tokens a row grows by at most, once the prompts are in the cache; None
            where that is not known.

    Raises:
        InvalidValueError: A layer holds state that cannot take back a rejected token.
    """

    def __init__(self, prepared: Cache, *, new_tokens: int | None = None) -> None:
        if not isinstance(prepared, DynamicCache) or prepared.offloading:
            offloaded = "offloaded " if getattr(prepared, "offloading", False) else ""
            raise InvalidValueError(
                f"{CACHE} must be a DynamicCache, got "
                f"{offloaded}{type(prepared).__name__}; leave cache_implementation unset"
            )
        # A recurrent layer does not store how long the text is; an attention layer does.
        lengths = [
            layer.get_seq_length() for layer in prepared.layers if isinstance(layer, DynamicLayer)
        ]
        layers = [
            _row_layer(layer, index, max(lengths, default=0))
            for index, layer in enumerate(prepared.layers)
        ]
        adds_layers = prepared.layer_class_to_replicate is not None
        super().__init__(
            layers=layers, layer_class_to_replicate=_GrowingLayer if adds_layers else None
        )
        self._recurrent = [each for each in layers if isinstance(each, RecurrentLayer)]
        self._states: list[States] = [each.states for each in self._recurrent]
        self._own: list[str] = []
        if type(prepared) is not DynamicCache:
            # A model's own kind of cache, which holds states in lists beside the layers.
            for name in vars(prepared).keys() - vars(DynamicCache()).keys():
                if isinstance(value := getattr(prepared, name), list):
                    setattr(self, name, list(value))
                    self._states.append(States(getattr(self, name)))
                    self._own.append(name)
        self.has_recurrent_layers = bool(self._states)
        self._commits = Commits()
        self._beginning: Beginning | None = None
        self._prepared = prepared
        self._new_tokens = new_tokens
        self._most: int | None = None

    @classmethod
    def of(cls, prepared: Cache, **options: Any) -> RowCache:
        """The cache of rows, of the prepared one's class too where a model asks for that."""
        if not isinstance(prepared, DynamicCache) or type(prepared) is DynamicCache:
            return cls(prepared, **options)
        kind: type[RowCache] = type(cls.__name__, (cls, type(prepared)), {})
        return kind(prepared, **options)

    @property
    def commits(self) -> bool:
        return self.has_recurrent_layers and any(self._states)

    def starts(self, lengths: list[int]) -> list[int]:
        return self._commits.starts(lengths) if self.commits else lengths

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row, which not every layer counts."""
        if layer_idx == 0:
            recurrent = (max(layer.seen.values()) for layer in self._recurrent)
            attending = (each.length for each in self.layers if isinstance(each, _GrowingLayer))
            return max([*recurrent, *attending], default=0)
        return int(super().get_seq_length(layer_idx))

    def take_over(self) -> None:
        """Leaves the tokens of the prepared cache to this one alone."""
        for layer in self._prepared.layers:
            if isinstance(layer, DynamicLayer):
                _empty(layer)
            if _is_recurrent(layer):
                STATE.reset(layer)

    def plan(
        self,
        transfer: Transfer,
        lengths: Sequence[int],
        width: int,
        floors: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Plans the next forward: it writes `width` tokens, of row b from token lengths[b] on.

        Args:
            transfer: Takes the numbers that have to be on the device.
            floors: No forward from the next one on begins before these; `None` for `lengths`.
            counts: How many of the tokens of each row are no padding; `None` for all.
        """
        if self._new_tokens is not None and self._most is None:
            self._most = max(lengths) + self._new_tokens
        most = self._most
        if most is not None and len(lengths) > 1:
            # A draft may be as wide as the one of a row that has further to go.
            most += width
        self.frames = {}
        for window, layers in self.by_window().items():
            plan = layers[0].planned(lengths, floors or lengths, width, most)
            self.frames[window] = plan.frame
            if plan.targets is not None:
                plan.targets = transfer.add(plan.targets)
            for layer in layers:
                layer.plan = plan
                layer.length = max(lengths)
        for layer in self._recurrent:
            layer.prepare_states(lengths, floors or lengths)
        self._beginning = None
        if self.commits:
            self._beginning = self._commits.plan(
                transfer, lengths, counts or [width] * len(lengths), width, floors or lengths
            )

    def prepare(self) -> None:
        if self._beginning is not None:
            for states in self._states:
                states.begin(self._beginning)

    def keep(self, slots: Sequence[int]) -> None:
        """Drops all rows but `slots` and moves these to the front. Copies only rows that move.

        Args:
            slots: What each remaining slot holds from now on, as an index among the present rows;
                a slot keeps its own row or takes over a later one.
        """
        for layers in self.by_window().values():
            for layer in layers:
                layer.keep(slots)
        for recurrent in self._recurrent:
            recurrent.keep_states(slots)
        for states in self._states:
            states.keep(slots)
        self._commits.keep(slots)

    def write_back(self, cache: DynamicCache, length: int) -> None:
        """Hands the first `length` tokens of a single row to `cache`, as `generate` leaves it.

        Layer after layer, and without them this cache is of no use any more.
        """
        for name in self._own:
            setattr(cache, name, getattr(self, name))
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentLayer):
                layer.write_states(cache.layers[index], length)
            if not isinstance(layer, _GrowingLayer) or not layer.buffers:
                continue
            while index >= len(cache.layers):
                made: Any = (
                    DynamicLayer()  # type: ignore[no-untyped-call]
                    if layer.window is None
                    else DynamicSlidingWindowLayer(layer.window)
                )
                cache.layers.append(made)
            target: Any = cache.layers[index]
            start = 0
            if isinstance(target, DynamicSlidingWindowLayer):
                target.cumulative_length = length
                start = max(0, length - target.sliding_window + 1)
            if not target.is_initialized:
                target.lazy_initialization(*layer.buffers)
            layer.keys = layer.values = None
            base = layer.layout.bases[0]
            held = slice(start - base, length - base)
            target.values = layer.buffers.pop()[:1, :, held].clone()
            target.keys = layer.buffers.pop()[:1, :, held].clone()
            # Some layers attend to what the indexer of another one has chosen.
            if isinstance(layer, _IndexedLayer) and layer.indexer.buffers:
                target.indexer_keys = layer.indexer.buffers.pop(0)[:1, 0, held].clone()
                target.is_indexer_initialized = True


def compacted_slots(ended: Sequence[bool]) -> list[int]:
    """The slots that stay, for `RowCache.keep`: the last ones move to slots that became free."""
    staying = [slot for slot, over in enumerate(ended) if not over]
    late = [slot for slot in staying if slot >= len(staying)]
    return [late.pop() if ended[slot] else slot for slot in range(len(staying))]


def _is_recurrent(layer: Any) -> bool:
    return STATE is not None and isinstance(layer, STATE)


def _row_layer(layer: Any, index: int, length: int) -> Any:
    """The layer of a cache of `length` tokens, as a layer whose rows have lengths of their own."""
    if isinstance(layer, SHARING):
        return layer
    if type(layer) not in _KNOWN:
        raise InvalidValueError(
            "model must have a state that can take back a rejected token, "
            f"got layer {index} with {type(layer).__name__}"
        )
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    attends = isinstance(layer, DynamicLayer)
    row_layer: Any
    if type(layer) is _INDEXED:
        row_layer = _IndexedLayer()
        if layer.get_seq_length():
            row_layer.indexer.lazy_initialization(
                layer.indexer_keys[:, None], layer.indexer_keys[:, None, :, :0]
            )
            row_layer.indexer.update(
                layer.indexer_keys[:, None], layer.indexer_keys[:, None, :, :0]
            )
    elif attends and not _is_recurrent(layer):
        row_layer = _GrowingLayer(window)
    else:
        count = layer.number_of_states
        row_layer = _HybridLayer(window, count) if attends else RecurrentLayer(count)
        row_layer.read_states(layer, index, length)
        if not attends:
            return row_layer
    seen = layer.get_seq_length()
    if seen:
        held = layer.keys.shape[-2]
        needed = seen if window is None else min(seen, window - 1)
        if held < needed:
            raise InvalidValueError(
                f"{CACHE} must hold the last {needed} of its {seen} tokens, got layer "
                f"{index} with {held}"
            )
        row_layer.keys, row_layer.values = layer.keys, layer.values
        row_layer.buffers = [layer.keys, layer.values]
        row_layer.layout = _Layout([seen - held] * layer.keys.shape[0], held)
        row_layer.length = seen
        row_layer.is_initialized = True
    return row_layer


def _empty(layer: Any) -> None:
    layer.keys = layer.values = None
    layer.is_initialized = False
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = 0


def _moved(buffer: torch.Tensor, old: _Layout, new: _Layout) -> torch.Tensor:
    """The contents of a buffer in a new layout."""
    _, heads, held, size = buffer.shape
    rows = len(new.bases)
    moves = list(map(sub, new.bases, old.bases or new.bases))
    if max(moves) > min(moves):
        columns = np.array(moves)[:, None] + np.arange(new.capacity)
        columns = columns.clip(max=max(held - 1, 0))[:, None, :, None]
        (sources,) = on_device(buffer.device, columns)
        return buffer[:rows].gather(2, sources.expand(rows, heads, new.capacity, size))
    move = moves[0]
    moved = buffer.new_empty((rows, heads, new.capacity, size))
    kept = min(held - move, new.capacity)
    moved[:, :, :kept] = buffer[:rows, :, move : move + kept]
    # Zeros: a masked column still takes part in probabilities x values, where 0 x NaN is NaN.
    moved[:, :, kept:] = 0
    return moved
