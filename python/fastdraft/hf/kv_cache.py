"""A key-value cache whose rows have lengths of their own.

Every layer is one buffer of shape (rows, heads, columns, head size). New keys and values are
written behind each row's own text, and a rejected token is forgotten by not counting it: the next
step writes over it. Copied at a step are the new tokens, and the accepted ones of a tree once more,
to the places that follow the text.

A sliding-window layer holds of each row what the next token can look at, and what later forwards
write behind it. Where that fills the buffer, every row moves its window to the front; so a row's
first column holds another token than the next row's, and `RowCache.frames` says which.

A full buffer grows by a sixteenth, at least by 32 columns, but never beyond the longest text of the
generation, and only one buffer grows at a time. So the cache takes little more memory than a
DynamicCache, which copies itself whole at every step.

A short convolution (LFM2) looks at the inputs of the last few tokens. Its layer keeps those of each
row that a rejected draft could bring back, and cuts them anew at every forward.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from fastdraft.hf.interface import CACHE

__all__ = ["SHARING", "Frame", "RowCache", "on_device", "on_host", "places_after"]

# A buffer has room for so much more than it needs, as a share of that.
_SLACK: Final = 16
# And for at least so many columns: buffers of short texts would grow at every other step.
_LEAST_SLACK: Final = 32

# Layers that use the keys and values of another layer; transformers 5.19 has no entry for them.
SHARING: tuple[type, ...] = tuple(
    kind for kind in (getattr(cache_utils, "DummyLayer", None),) if kind is not None
)


# The cache layer of a short convolution. Transformers takes tokens back from it since 5.21.
_STATE: Any = (
    getattr(cache_utils, "LinearAttentionLayer", None)
    if hasattr(Cache, "is_recording_past")
    else None
)
_STATE_BASE: Any = object if _STATE is None else _STATE


class Frame(NamedTuple):
    """What a forward sees of a layer: columns, and of each row which token its first one holds."""

    firsts: list[int]
    columns: int


class _Plan(NamedTuple):
    """Where a forward writes in the layers of one window, and what it sees of them.

    Attributes:
        bases: The token that the first column of each row's buffer holds.
        capacity: The columns of the buffers.
        moves: By how many columns the buffers' contents move to the front: of all rows, or which
            column each is to hold, (rows, capacity).
        start: The column to write to; where rows write to different ones, the least.
        places: The columns to write to, (rows, heads, width, head size) of most layers; None when
            all rows write to the same.
        seen: The columns that are seen: the first, and the one behind the last.
        length: Tokens of the longest row, the new ones too.
    """

    bases: list[int]
    capacity: int
    moves: int | torch.Tensor
    start: int
    places: torch.Tensor | None
    seen: tuple[int, int]
    length: int

    @property
    def frame(self) -> Frame:
        first, end = self.seen
        return Frame([base + first for base in self.bases], end - first)


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer.

    Args:
        window: How many tokens a query sees, itself among them; None for all.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.is_sliding = window is not None
        self.buffers: list[torch.Tensor] = []  # keys and values: (rows, heads, columns, head size)
        self.bases: list[int] = []
        # Tokens of the longest row. The model reads it to place queries in its own masks.
        self.length = 0
        # Of the next forward; None when all rows go on behind `length`, with nothing rejected.
        self.plan: _Plan | None = None

    @property
    def capacity(self) -> int:
        return self.buffers[0].shape[-2] if self.buffers else 0

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
            plan = self.planned(lengths, lengths, key_states.shape[-2], None, key_states.device)
        if plan.capacity != self.capacity or plan.bases != self.bases:
            # Views of the buffers, which must not outlive them.
            self.keys = self.values = None
            for index, buffer in enumerate(self.buffers):
                # One after the other, so that no more than one is there twice.
                self.buffers[index] = _moved(buffer, plan)
                del buffer
        first, end = plan.seen
        used = self.buffers
        if used[0].shape[0] > len(plan.bases):
            used = [buffer[: len(plan.bases)] for buffer in used]
        if plan.places is None:
            width = key_states.shape[-2]
            used[0].narrow(2, plan.start, width).copy_(key_states)
            used[1].narrow(2, plan.start, width).copy_(value_states)
        else:
            for buffer, states in zip(used, (key_states, value_states), strict=True):
                places = plan.places.to(buffer.device)
                if places.shape != states.shape:
                    places = places[:, :1, :, :1].expand_as(states)
                buffer.scatter_(2, places, states)
        self.bases, self.length = plan.bases, plan.length
        # Some models look at these themselves.
        self.keys = used[0].narrow(2, first, end - first)
        self.values = used[1].narrow(2, first, end - first)
        return self.keys, self.values

    def planned(
        self,
        lengths: Sequence[int],
        floors: Sequence[int],
        width: int,
        most: int | None,
        device: torch.device,
    ) -> _Plan:
        """Plans a forward of `width` tokens, of row b from token lengths[b] on.

        Args:
            floors: No forward from the next one on begins before these.
            most: Columns that the buffers can come to need, if that is known.
        """
        bases = self.bases or [0] * len(lengths)
        capacity = self.capacity
        starts = [length - base for length, base in zip(lengths, bases, strict=True)]
        moves: int | torch.Tensor = 0
        needed = max(starts) + width
        if needed > capacity:
            old, bases = bases, [0] * len(lengths)
            if self.window is not None:
                oldest = [min(pair) - self.window + 1 for pair in zip(lengths, floors, strict=True)]
                bases = [max(pair) for pair in zip(oldest, old, strict=True)]
            starts = [length - base for length, base in zip(lengths, bases, strict=True)]
            needed = max(starts) + width
            slack = max(needed // _SLACK, _LEAST_SLACK)
            if self.window is not None and needed > self.window:
                # Of a forward that is longer than the window, little is needed afterwards.
                slack = self.window // _SLACK if width <= self.window else 0
            capacity = needed + slack
            if most is not None:
                capacity = max(needed, min(capacity, most))
            shifts = [new - before for new, before in zip(bases, old, strict=True)]
            moves = shifts[0]
            if min(shifts) < max(shifts):
                columns = np.array(shifts)[:, None] + np.arange(capacity)
                (moves,) = on_device(device, columns.clip(max=max(self.capacity - 1, 0)))
        places = None
        if min(starts) < max(starts):
            columns = np.array(starts)[:, None] + np.arange(width)
            (places,) = on_device(device, columns[:, None, :, None])
            if self.buffers:
                # Once for all layers that are alike.
                _, heads, _, size = self.buffers[0].shape
                places = places.expand(-1, heads, -1, size)
        first = 0 if self.window is None else max(min(starts) - self.window + 1, 0)
        seen = (first, max(starts) + width)
        return _Plan(bases, capacity, moves, min(starts), places, seen, length=max(lengths) + width)

    def move(self, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for buffer in self.buffers:
            at = [index.to(buffer.device) for index in (rows, sources, targets)]
            buffer[at[0], :, at[2]] = buffer[at[0], :, at[1]]

    def keep(self, slots: Sequence[int]) -> None:
        for buffer in self.buffers:
            for slot, source in enumerate(slots):
                if slot != source:
                    buffer[slot] = buffer[source]
        if self.bases:
            self.bases = [self.bases[slot] for slot in slots]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As a DynamicCache has it. Right where rows are equally long, as for the model's masks."""
        seen = self.length if self.window is None else min(self.length, self.window - 1)
        return seen + query_length, self.length - seen

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class _ConvolutionRowLayer(_STATE_BASE):  # type: ignore[misc]
    """The inputs of a causal convolution, of each row those of the last tokens.

    Column c of row b holds the input of token firsts[b] + c. Before the first token are zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        # Tells the model to call `update_conv_state` in every forward, also over a single token.
        self.record_past = True
        self.states: torch.Tensor | None = None
        self.firsts: list[int] = []
        self.length = 0
        # Where the next forward writes, and how far before that a later one may begin.
        self._next: tuple[list[int], int] | None = None

    def prepare(self, lengths: Sequence[int], floors: Sequence[int]) -> None:
        """As `RowCache.prepare`."""
        furthest = max(length - floor for length, floor in zip(lengths, floors, strict=True))
        self._next = list(lengths), max(furthest, 0)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        """The inputs that the new tokens look at.

        Args:
            conv_states: (rows, channels, new tokens).
            conv_kernel_size: Of how many tokens an output is made, its own among them.

        Returns:
            (rows, channels, conv_kernel_size - 1 + new tokens).
        """
        rows, width = conv_states.shape[0], conv_states.shape[2]
        lengths, furthest = self._next or ([self.length] * rows, 0)
        # A forward needs one input less; `write_back` needs as many as the kernel has.
        behind = conv_kernel_size + furthest
        held = conv_states.new_zeros((*conv_states.shape[:2], behind))
        if self.states is not None:
            held = _columns_from(
                self.states[:rows],
                [
                    length - behind - first
                    for length, first in zip(lengths, self.firsts, strict=True)
                ],
                behind,
            )
        self.states = torch.cat([held, conv_states], dim=2)
        self.firsts = [length - behind for length in lengths]
        self.length = max(lengths) + width
        self.conv_kernel_size[state_idx] = conv_kernel_size
        self.has_previous_state[state_idx] = True
        return self.states[:, :, behind - conv_kernel_size + 1 :]

    def keep(self, slots: Sequence[int]) -> None:
        if self.states is not None:
            self.states = self.states[list(slots)]
            self.firsts = [self.firsts[slot] for slot in slots]

    def write_back(self, target: Any, length: int) -> None:
        """Hands the inputs of a single row's last tokens over, as `RowCache.write_back`."""
        assert self.states is not None
        size = self.conv_kernel_size[0]
        states = _columns_from(self.states[:1], [length - size - self.firsts[0]], size)
        held = target.conv_states[0]
        if held is None or held.shape != states.shape:
            target.lazy_initialization(conv_states=states, conv_kernel_size=size)
        target.conv_states[0].copy_(states)
        target.has_previous_state[0] = True
        self.states = None


class RowCache(Cache):
    """The cache of a batch whose rows grow and end at different times.

    Args:
        prepared: The cache that `generate` made or was given. Its layers say what the model needs.
            Tokens that it holds already are taken over at the first forward, and it is empty from
            then on until `write_back`: they are never held twice.
        new_tokens: How many tokens a row grows by at most, once the prompts are in the cache; None
            where that is not known.
        layer_types: What the model's configuration calls its layers, in which `conv` is a short
            convolution; None for attention alone.

    Attributes:
        frames: What the next forward sees of the layers, by their windows.

    Raises:
        InvalidValueError: A layer holds state that cannot take back a rejected token.
    """

    def __init__(
        self,
        prepared: Cache,
        *,
        new_tokens: int | None = None,
        layer_types: Sequence[str] | None = None,
    ) -> None:
        if type(prepared) is not DynamicCache or prepared.offloading:
            offloaded = "offloaded " if getattr(prepared, "offloading", False) else ""
            raise InvalidValueError(
                f"{CACHE} must be a DynamicCache, got "
                f"{offloaded}{type(prepared).__name__}; leave cache_implementation unset"
            )
        if prepared.layer_class_to_replicate is None:
            super().__init__(layers=[])
        else:
            super().__init__(layer_class_to_replicate=_RowLayer)
        # A convolution's layer does not store how long the text is; an attention layer does.
        lengths = [
            layer.get_seq_length() for layer in prepared.layers if isinstance(layer, DynamicLayer)
        ]
        # A model that repeats layers has more of them than it names: Dory.
        kinds = dict(enumerate(layer_types or ()))
        for index, layer in enumerate(prepared.layers):
            if lengths and _is_convolution(layer, kinds.get(index)):
                self.layers.append(_convolution_layer(layer, index, lengths[0]))
            else:
                self.layers.append(_row_layer(layer, index))
        self.frames: dict[int | None, Frame] = {}
        self._prepared: DynamicCache | None = prepared
        self._windows: dict[int | None, list[_RowLayer]] = {}
        self._convolutions: list[_ConvolutionRowLayer] = []
        self._grouped = 0
        self._new_tokens = new_tokens
        self._most: int | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._prepared is not None:
            for layer in self._prepared.layers:
                if isinstance(layer, DynamicLayer):
                    _empty(layer)
                elif _STATE is not None and isinstance(layer, _STATE):
                    layer.reset()
            self._prepared = None
        if layer_idx < len(self.layers):
            of_layer: Any = self.layers[layer_idx]
            keys, values = of_layer.update(key_states, value_states, *args, **kwargs)
        else:
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def prepare(
        self,
        lengths: Sequence[int],
        width: int,
        device: torch.device,
        *,
        floors: Sequence[int] | None = None,
    ) -> None:
        """Says where the next forward writes: row b from token lengths[b] on, `width` tokens.

        Args:
            floors: No forward from the next one on begins before these; `None` for `lengths`.
        """
        if self._new_tokens is not None and self._most is None:
            self._most = max(lengths) + self._new_tokens
        most = self._most
        if most is not None and len(lengths) > 1:
            # A draft may be as wide as the one of a row that has further to go.
            most += width
        self.frames = {}
        for window, layers in self._by_window().items():
            plan = layers[0].planned(lengths, floors or lengths, width, most, device)
            self.frames[window] = plan.frame
            for layer in layers:
                layer.plan = plan
                layer.length = max(lengths)
        for state in self._convolutions:
            state.prepare(lengths, floors or lengths)

    def compact(
        self, lengths: Sequence[int], kept: NDArray[np.int64], device: torch.device
    ) -> None:
        """Moves what the latest forward wrote, so that accepted tokens stand behind each other.

        Args:
            lengths: Where the forward wrote in each row, as in `prepare`.
            kept: (rows, tokens), which of a row's new tokens is to stand in each of the places
                from there on.
        """
        rows, places = np.nonzero(kept != np.arange(kept.shape[1]))
        if len(rows) == 0:
            return
        assert not self._convolutions, "convolutions take no trees"
        for layers in self._by_window().values():
            starts = (np.array(lengths) - np.array(layers[0].bases))[rows]
            indices = on_device(device, rows, starts + kept[rows, places], starts + places)
            for layer in layers:
                layer.move(*indices)

    def keep(self, slots: Sequence[int]) -> None:
        """Drops all rows but `slots` and moves these to the front. Copies only rows that move.

        Args:
            slots: What each remaining slot holds from now on, as an index among the present rows;
                a slot keeps its own row or takes over a later one.
        """
        for layers in self._by_window().values():
            for layer in layers:
                layer.keep(slots)
        for state in self._convolutions:
            state.keep(slots)

    def write_back(self, cache: DynamicCache, length: int) -> None:
        """Hands the first `length` tokens of a single row to `cache`, as `generate` leaves it.

        Layer after layer, and without them this cache is of no use any more.
        """
        for index, layer in enumerate(self.layers):
            if isinstance(layer, _ConvolutionRowLayer):
                layer.write_back(cache.layers[index], length)
                continue
            if not isinstance(layer, _RowLayer) or not layer.buffers:
                continue
            if index == len(cache.layers):
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
            held = slice(start - layer.bases[0], length - layer.bases[0])
            target.values = layer.buffers.pop()[:1, :, held].clone()
            target.keys = layer.buffers.pop()[:1, :, held].clone()

    def _by_window(self) -> dict[int | None, list[_RowLayer]]:
        """The layers by their windows: those of one window hold the same tokens."""
        for layer in self.layers[self._grouped :]:
            # The first forward may add layers.
            if isinstance(layer, _RowLayer):
                self._windows.setdefault(layer.window, []).append(layer)
            elif isinstance(layer, _ConvolutionRowLayer):
                self._convolutions.append(layer)
        self._grouped = len(self.layers)
        return self._windows


def places_after(ended: Sequence[bool]) -> list[int]:
    """The slots that stay, for `RowCache.keep`: the last ones in the places that became free."""
    staying = [slot for slot, over in enumerate(ended) if not over]
    late = [slot for slot in staying if slot >= len(staying)]
    return [late.pop() if ended[slot] else slot for slot in range(len(staying))]


def _row_layer(layer: Any, index: int) -> Any:
    if isinstance(layer, SHARING):
        return layer
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise InvalidValueError(
            "model must have a state that can take back a rejected token, "
            f"got layer {index} with {type(layer).__name__}"
        )
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    row_layer = _RowLayer(window)
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
        row_layer.bases = [seen - held] * layer.keys.shape[0]
        row_layer.length = seen
        row_layer.is_initialized = True
    return row_layer


def _is_convolution(layer: Any, kind: str | None) -> bool:
    """Whether a layer holds the inputs of one convolution and no other state."""
    return bool(kind == "conv" and type(layer) is _STATE and layer.number_of_states == 1)


def _convolution_layer(layer: Any, index: int, seen: int) -> _ConvolutionRowLayer:
    """The layer of a convolution whose cache holds `seen` tokens."""
    row_layer = _ConvolutionRowLayer()
    if seen:
        if not layer.has_previous_state[0]:
            raise InvalidValueError(
                f"{CACHE} must hold the convolutions' inputs of its {seen} tokens, got "
                f"layer {index} without"
            )
        size = layer.conv_kernel_size[0]
        # A copy: the prepared layer's own is emptied, and stays at its place in memory.
        row_layer.states = layer.conv_states[0][:, :, -size:].clone()
        row_layer.firsts = [seen - size] * len(row_layer.states)
        row_layer.length = seen
        row_layer.conv_kernel_size[0] = size
        row_layer.has_previous_state[0] = True
    return row_layer


def _columns_from(states: torch.Tensor, firsts: Sequence[int], count: int) -> torch.Tensor:
    """Columns firsts[b] to firsts[b] + count of each row; zeros stand for negative columns."""
    missing = max(0, -min(firsts))
    if missing:
        states = torch.nn.functional.pad(states, (missing, 0))
    if min(firsts) == max(firsts):
        return states.narrow(2, firsts[0] + missing, count)
    (columns,) = on_device(states.device, np.array(firsts)[:, None] + missing + np.arange(count))
    return states.gather(2, columns[:, None].expand(-1, states.shape[1], -1))


def _empty(layer: Any) -> None:
    layer.keys = layer.values = None
    layer.is_initialized = False
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = 0


def on_host(values: Any) -> torch.Tensor:
    """A copy of numbers on the CPU, whatever torch's default device is."""
    return torch.tensor(values, device="cpu")


def on_device(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Numbers of the host on a device: all in one copy, which nobody waits for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return in_one_copy(device, arrays)


def in_one_copy(device: torch.device, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """As `on_device`, where the device has memory of its own."""
    numbers = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    is_cuda = device.type == "cuda"
    if is_cuda:
        # From other memory the driver would wait for all that the device has still to do.
        numbers = numbers.pin_memory()
    numbers = numbers.to(device, non_blocking=is_cuda)
    parts = torch.split(numbers, [array.size for array in arrays])
    # As tensors of their own: what is compiled for a view expects all numbers to be as many again.
    return [part.view(array.shape).data for part, array in zip(parts, arrays, strict=True)]


def _moved(buffer: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """A buffer of the plan's capacity, with the columns of `buffer` where they are to stand."""
    _, heads, _, size = buffer.shape
    rows = len(plan.bases)
    if isinstance(plan.moves, torch.Tensor):
        columns = plan.moves.to(buffer.device)[:, None, :, None]
        return buffer[:rows].gather(2, columns.expand(rows, heads, plan.capacity, size))
    moved = buffer.new_empty((rows, heads, plan.capacity, size))
    kept = min(buffer.shape[-2] - plan.moves, plan.capacity)
    moved[:, :, :kept] = buffer[:rows, :, plan.moves : plan.moves + kept]
    # Zeros: a masked column still takes part in probabilities x values, where 0 x NaN is NaN.
    moved[:, :, kept:] = 0
    return moved
