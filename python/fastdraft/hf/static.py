"""Steps of fixed shapes: a static cache, and forwards that can be compiled.

`generate` with `cache_implementation="static"` promises buffers that never grow and never move, so
that the model's forward can be compiled, and on a GPU captured as a graph. A step with drafts keeps
that promise. A forward has one of a few widths, `WIDTHS`, and as many rows as the batch at the
start or the next power of two from the running ones on; rows that have ended pad it. Each shape is
compiled once, through the model's own `get_compiled_call`. What changes from step to step, tokens,
lengths and masks, are tensors that the forward is given.

Rows that have ended leave at once where nothing has to be compiled for fewer rows. Else they stay
until padding has taken as much time as a compilation: whether one pays depends on how much is left
to decode, now and in later generations, which nobody knows. What compiling for fewer rows has taken
is made up for before still fewer rows are compiled.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from fastdraft import step_latency
from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.hf.interface import CACHE
from fastdraft.hf.kv_cache import SHARING, on_device
from fastdraft.hf.masks import Masks
from fastdraft.hf.step import CachedModel, lines_of, padded

__all__ = [
    "WIDTHS",
    "StaticModel",
    "StaticRowCache",
    "compiled_call",
    "compiling",
    "require_fixed_shapes",
]

WIDTHS: Final = (1, 4, 8, 16, 32)
"""Tokens a row that a forward may have. Each takes a compilation, so they are few."""

# A first run compiles; on a GPU the second warms up and the third records a graph.
_COLD_RUNS: Final = {"cpu": 1}
_COLD_RUNS_ELSEWHERE: Final = 3

_COMPILATIONS: Final = 128

_Buffers = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Compiled:
    """What is known of a compiled forward from one generation to the next.

    Attributes:
        buffers: The keys and values of the layers of its latest generation. A CUDA graph remembers
            where they lie: for others, each shape would be recorded again.
        runs: How often it has run, by the shape of its tokens and cache, rows first.
        compiling: The seconds that the latest compilation took.
        padding: The seconds that padding rows have taken of its steps, less those that it took to
            compile for fewer rows.
    """

    buffers: list[_Buffers] = field(default_factory=list)
    runs: Counter[tuple[int, ...]] = field(default_factory=Counter)
    compiling: float = math.inf
    padding: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether to compile for fewer rows."""
        return self.padding >= self.compiling


_compiled: weakref.WeakKeyDictionary[Any, Compiled] = weakref.WeakKeyDictionary()


@dataclass
class _Places:
    """Where the next forward writes; shared by the layers that hold the same tokens.

    Attributes:
        columns: The columns of a layer's buffers. Token t of a row stands in column t % columns.
        rows, at: (rows, 1) and (rows, width) int64; `None` for the prompt.
        length: Tokens of the longest row before it, an int for the prompt, later a tensor: a number
            that changes from step to step would be compiled into the forward.
    """

    columns: int
    rows: torch.Tensor | None = None
    at: torch.Tensor | None = None
    length: Any = 0


class _StaticRowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer, (rows, heads, columns, head size) each.

    Forwards see the first rows of the buffers, all of them at the start. A layer with a sliding
    window holds the window and the widest draft, as a ring: what a draft overwrites is out of every
    later query's sight, even if the draft is rejected.
    """

    keys: Any
    values: Any

    def __init__(self, places: _Places, *, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places
        self.is_sliding = is_sliding
        self.earlier: _Buffers | None = None  # of an earlier generation, to be used again
        self.buffers: _Buffers | None = None  # of all rows

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        earlier, self.earlier = self.earlier or (None, None), None
        columns = self.places.columns
        self.buffers = (
            _buffer(key_states, columns, earlier[0]),
            _buffer(value_states, columns, earlier[1]),
        )
        self.keys, self.values = self.buffers
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, at = self.places.rows, self.places.at
        if rows is None or at is None:
            return self._begin(key_states, value_states)
        # Layers may be spread over devices.
        rows, at = rows.to(self.keys.device), at.to(self.keys.device)
        self.keys[rows, :, at] = key_states.transpose(1, 2)
        self.values[rows, :, at] = value_states.transpose(1, 2)
        return self.keys, self.values

    def _begin(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the prompts, which see themselves alone."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[-2]
        held = min(length, self.places.columns)
        at = torch.arange(length - held, length, device=key_states.device) % self.places.columns
        self.keys[:, :, at] = key_states[:, :, length - held :]
        self.values[:, :, at] = value_states[:, :, length - held :]
        self.places.length = length
        return key_states, value_states

    def move(self, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for buffer in (self.keys, self.values):
            at = [index.to(buffer.device) for index in (rows, sources, targets)]
            buffer[at[0], :, at[2]] = buffer[at[0], :, at[1]]

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], count: int) -> None:
        """Copies rows to the places of others, and shows forwards the first `count` from now on."""
        assert self.buffers is not None
        for buffer in self.buffers:
            for source, target in zip(sources, targets, strict=True):
                buffer[target].copy_(buffer[source])
        self.keys, self.values = (_first_rows(buffer, count) for buffer in self.buffers)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """For the prompts; later forwards are given their masks."""
        return query_length, 0

    def get_seq_length(self) -> Any:
        return self.places.length

    def get_max_length(self) -> int:
        return self.places.columns


class StaticRowCache(Cache):
    """A cache of fixed buffers whose rows have lengths of their own.

    Args:
        prepared: The cache that `generate` made. Its layers say what the model needs, and its
            length how long a text may become.

    Attributes:
        places: Where forwards write, by whether a layer has a sliding window.

    Raises:
        InvalidValueError: The cache cannot be decoded from, with what to do instead.
    """

    def __init__(self, prepared: StaticCache) -> None:
        if getattr(prepared, "_is_user_defined", False):
            raise InvalidValueError(
                f"{CACHE} must be a DynamicCache, got StaticCache; leave it out and pass "
                "cache_implementation='static'"
            )
        if prepared.offloading:
            raise InvalidValueError(
                "a static cache must stay on the model's device, got offloaded StaticCache; use "
                "cache_implementation='static'"
            )
        # Where all layers have a window, the cache does not tell.
        whole = [layer.max_cache_len for layer in prepared.layers if type(layer) is StaticLayer]
        longest = max(whole, default=math.inf)
        self.places: dict[bool, _Places] = {}
        layers = [self._layer(layer, index, longest) for index, layer in enumerate(prepared.layers)]
        super().__init__(layers=layers)

    def _layer(self, layer: Any, index: int, longest: float) -> Any:
        if isinstance(layer, SHARING):
            return layer
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise InvalidValueError(
                "a static cache needs layers of full or sliding attention, "
                f"got layer {index} with {type(layer).__name__}; leave cache_implementation unset"
            )
        # Of a layer with a window, its length or the window, whichever is shorter.
        columns = layer.max_cache_len + WIDTHS[-1] - 1
        is_sliding = type(layer) is StaticSlidingWindowLayer and layer.max_cache_len < longest
        places = self.places.setdefault(is_sliding, _Places(columns))
        if places.columns != columns:
            raise InvalidValueError(
                "a static cache needs sliding windows of one size, got "
                f"{places.columns - WIDTHS[-1] + 1} and {layer.max_cache_len}; "
                "leave cache_implementation unset"
            )
        return _StaticRowLayer(places, is_sliding=is_sliding)

    def planned(self, lengths: NDArray[np.int64], width: int) -> list[NDArray[np.int64]]:
        """What `prepare` takes for a forward of `width` tokens, of row b from lengths[b] on."""
        tokens = lengths[:, None] + np.arange(width)
        columns = [tokens % places.columns for places in self.places.values()]
        return [np.array(lengths.max()), *columns]

    def prepare(self, numbers: Sequence[torch.Tensor]) -> None:
        """Says where the next forward writes: the numbers of `planned`, on the device."""
        longest, *columns = numbers
        for places, at in zip(self.places.values(), columns, strict=True):
            if places.rows is None or len(places.rows) != len(at):
                places.rows = torch.arange(len(at), device=at.device)[:, None]
                torch._dynamo.mark_static(places.rows)
            places.at, places.length = at, longest
            torch._dynamo.mark_static(at)

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], count: int) -> None:
        """Copies rows to the places of others that have ended.

        Args:
            sources, targets: The row that each of some places takes over; no place is both.
            count: How many rows forwards have from now on, the first ones.
        """
        for layer in self.layers:
            if isinstance(layer, _StaticRowLayer):
                layer.move_rows(sources, targets, count)

    def compact(self, rows: Sequence[int], lengths: Sequence[int], kept: NDArray[np.int64]) -> None:
        """Moves what the latest forward wrote, so that accepted tokens stand behind each other.

        Args:
            rows: The places of the rows that took part.
            lengths: Tokens of each before the forward.
            kept: (rows, tokens), which of a row's new tokens is to stand in each of the places
                from there on.
        """
        slots, places = np.nonzero(kept != np.arange(kept.shape[1]))
        if len(slots) == 0:
            return
        starts = np.asarray(lengths)[slots]
        moves = np.stack([np.asarray(rows)[slots], starts + kept[slots, places], starts + places])
        layers = [layer for layer in self.layers if isinstance(layer, _StaticRowLayer)]
        for ring in self.places.values():
            wrapped = np.stack([moves[0], moves[1] % ring.columns, moves[2] % ring.columns])
            (indices,) = on_device(layers[0].keys.device, wrapped)
            for layer in layers:
                if layer.places is ring:
                    layer.move(*indices)

    def take_buffers(self, compiled: Compiled) -> None:
        """Uses those that an earlier generation has kept, where they are of the right size."""
        layers = [layer for layer in self.layers if isinstance(layer, _StaticRowLayer)]
        earlier, compiled.buffers = compiled.buffers, []
        for layer, buffers in zip(layers, earlier, strict=False):
            layer.earlier = buffers

    def keep_buffers(self, compiled: Compiled) -> None:
        """Keeps them for the next generation. The last ones kept stay."""
        layers = [layer for layer in self.layers if isinstance(layer, _StaticRowLayer)]
        compiled.buffers = [layer.buffers for layer in layers if layer.buffers is not None]


def _buffer(states: torch.Tensor, columns: int, earlier: torch.Tensor | None) -> torch.Tensor:
    """Zeros for the keys or values of one layer, where `earlier` lies if it fits."""
    shape = (*states.shape[:2], columns, states.shape[3])
    # Zeros: a masked column still takes part in probabilities x values, where 0 x NaN is NaN.
    if (
        earlier is not None
        and earlier.shape == shape
        and (earlier.dtype, earlier.device) == (states.dtype, states.device)
        and earlier.is_inference() == torch.is_inference_mode_enabled()
    ):
        return earlier.zero_()
    return _fixed(states.new_zeros(shape))


def _first_rows(buffer: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows of a buffer, in its memory.

    A tensor of its own: what is compiled for it serves a batch of so many rows at the start too.
    """
    return buffer if count == len(buffer) else _fixed(buffer[:count].data)


def _fixed(buffer: torch.Tensor) -> torch.Tensor:
    torch._dynamo.mark_static(buffer)
    # Written in place by every forward, which a CUDA graph allows where it does not move.
    torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer


@dataclass
class StaticModel(CachedModel):
    """A causal language model whose forwards have fixed shapes. Its cache is a `StaticRowCache`.

    Attributes:
        call: The model, or its compiled forward.
        batch: The number of rows at the start.
        compiled: What is known of `call`; `None` where it is the model.
        padding: As `Masks.padding` gives it where attention goes by lengths; `None` for masks.
    """

    call: Callable[..., Any] = field(kw_only=True)
    batch: int = field(kw_only=True)
    compiled: Compiled | None = field(kw_only=True, default=None)
    padding: NDArray[np.int64] | None = field(kw_only=True, default=None)
    widths = WIDTHS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lengths = np.zeros(self.batch, dtype=np.int64)
        # The row in each place of the cache that forwards see, and the place of each row.
        self._rows = np.arange(self.batch)
        self._places = np.arange(self.batch)

    def rows_in_forward(self, running: int) -> int:
        most = len(self._rows)
        wanted = min(_power_of_two(running), most)
        if self.compiled is None or self.compiled.pays:
            return wanted
        columns = self._shape(0, 0)[2:]
        known = {shape[0] for shape in self.compiled.runs if shape[2:] == columns}
        return min((rows for rows in known if wanted <= rows < most), default=most)

    def is_warm(self, rows: int, width: int) -> bool:
        """Whether a forward of this shape has been compiled, and its time says what it costs."""
        cold = _COLD_RUNS.get(self.device.type, _COLD_RUNS_ELSEWHERE)
        return self.compiled is None or self.compiled.runs[self._shape(rows, width)] >= cold

    def observe(self, running: int, rows: int, seconds: float) -> None:
        if self.compiled is not None:
            wanted = min(_power_of_two(running), rows)
            self.compiled.padding += seconds * (1 - wanted / rows)

    def _shape(self, rows: int, width: int) -> tuple[int, ...]:
        return (rows, width, *(each.columns for each in self.cache.places.values()))

    def _leave(self, running: Sequence[int], count: int) -> None:
        """Leaves `count` rows to the forwards, the running ones among them."""
        late = [row for row in running if self._places[row] >= count]
        ended = np.flatnonzero(~np.isin(self._rows[:count], running))[: len(late)]
        self.cache.move_rows(self._places[late].tolist(), ended.tolist(), count)
        self._rows[ended] = late
        self._places[late] = ended
        self._rows = self._rows[:count]

    def forward(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        rows: Sequence[int],
        cached: Sequence[int],
        width: int | None = None,
        wanted: Sequence[int] | None = None,
        trees: NDArray[np.bool_] | None = None,
        floors: Sequence[int] | None = None,
    ) -> torch.Tensor:
        width = width or max(map(len, tokens))
        if width not in self.widths:
            raise FastdraftError(
                f"a forward of fixed shapes takes {', '.join(map(str, self.widths))} tokens a row, "
                f"got {width}: did the drafter keep to its limits?"
            )
        count = self.rows_in_forward(len(rows))
        if count < len(self._rows):
            self._leave(rows, count)
        own_ids, depths, used = padded(tokens, width)
        self._lengths[rows] = cached
        lengths, places = self._lengths[self._rows], self._places[rows]
        input_ids, steps = np.zeros((2, count, width), dtype=np.int64)
        input_ids[places] = own_ids
        steps[places] = depths if trees is None else trees.sum(-1) - 1
        positions = self._positions(steps + lengths[:, None], self._rows.tolist())
        written = self.cache.planned(lengths, width)
        columns = {each: held.columns for each, held in self.cache.places.items()}
        if self.padding is None:
            sees = None
            if trees is not None:
                sees = np.zeros((count, width, width), dtype=bool)
                sees[places] = trees
            seen = self.masks.fixed_numbers(lengths, steps, columns=columns, trees=sees)
        else:
            # As bits which tokens of the forward each one sees.
            powers = 1 << np.arange(width, dtype=np.int64)
            bits = np.ones_like(steps)
            bits[places] = (2 << depths) - 1 if trees is None else trees @ powers
            hidden = self.padding if len(self.padding) == 1 else self.padding[self._rows]
            seen = self.masks.sights(lengths, steps, bits, hidden)
        # One copy in.
        sent = on_device(self.device, input_ids, positions, *written, *seen)
        ids, position_ids = sent[:2]
        self.cache.prepare(sent[2 : 2 + len(written)])
        others = sent[2 + len(written) :]
        kwargs = dict(self.kwargs)
        if self.padding is None:
            kwargs["attention_mask"] = self.masks.fixed(
                others, self._rows.tolist(), columns=columns
            )
        else:
            kwargs["attention_mask"] = self.masks.by_kind(others)
        kwargs["position_ids"] = position_ids
        if "logits_to_keep" in kwargs:
            # All: a number that changes with the width would be compiled as one of any value.
            kwargs["logits_to_keep"] = 0
        inputs = self._inputs(ids, kwargs)
        logits = self._called(inputs, self._shape(count, width))
        flat = logits.flatten(0, 1)
        if used is not None or len(rows) < count or count < self.batch:
            lines = places[:, None] * width + np.arange(width)
            flat = lines_of(flat, lines.ravel() if used is None else lines[used])
        return flat.to(self.home)

    def _called(self, inputs: dict[str, Any], shape: tuple[int, ...]) -> torch.Tensor:
        compiled = self.compiled
        logits: torch.Tensor
        if compiled is None:
            logits = self.call(**inputs, return_dict=True).logits
            return logits
        for tensor in _tensors(inputs):
            torch._dynamo.mark_static(tensor)
        is_new, started = shape not in compiled.runs, step_latency.clock()
        logits = self.call(**inputs, return_dict=True).logits
        if is_new:
            compiled.compiling = step_latency.clock() - started
            if shape[0] < self.batch:
                compiled.padding -= compiled.compiling
        compiled.runs[shape] += 1
        return logits

    def compact(self, rows: Sequence[int], cached: Sequence[int], kept: NDArray[np.int64]) -> None:
        self.cache.compact(self._places[rows], cached, kept)

    def keep(self, slots: Sequence[int]) -> None:
        """Rows that have ended leave with the next forward, if it has fewer rows."""


def _power_of_two(number: int) -> int:
    """The least one from `number` on."""
    return 1 << (number - 1).bit_length()


def require_fixed_shapes(
    model: Any, config: GenerationConfig, model_kwargs: dict[str, Any], masks: Masks
) -> None:
    """Raises InvalidValueError for what steps of fixed shapes cannot do, and says what to do."""
    otherwise = "leave cache_implementation unset"
    if masks.needed is not None:
        raise InvalidValueError(f"a static cache needs {masks.needed}; {otherwise}")
    if model_kwargs.get("position_ids") is None:
        raise InvalidValueError(
            f"a static cache needs a model that takes position_ids, got {type(model).__name__}; "
            f"{otherwise}"
        )
    if config.prefill_chunk_size is not None:
        raise InvalidValueError(
            "prefill_chunk_size must be unset with a static cache, got "
            f"{config.prefill_chunk_size}; or {otherwise}"
        )


def compiled_call(
    model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], Compiled | None]:
    """The model's compiled forward where plain `generate` compiles, else the model.

    Returns:
        The forward, and what is known of it; `None` for the model.
    """
    if not model._valid_auto_compile_criteria(model_kwargs, config):
        return model, None
    call = model.get_compiled_call(config.compile_config)
    return call, _compiled.setdefault(call, Compiled())


@contextlib.contextmanager
def compiling(*, is_compiled: bool) -> Iterator[None]:
    """Allows as many compilations as there are shapes, for several models and batches.

    Behind PyTorch's limit, 8 a process for the forwards of all models, nothing would be compiled.
    """
    if not is_compiled:
        yield
        return
    limit = max(torch._dynamo.config.recompile_limit, _COMPILATIONS)
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


def _tensors(inputs: Any) -> list[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    if isinstance(inputs, dict):
        return [tensor for value in inputs.values() for tensor in _tensors(value)]
    return []
