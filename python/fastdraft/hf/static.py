"""Steps of fixed shapes: a static cache, and forwards that can be compiled.

`generate` with `cache_implementation="static"` promises buffers that never grow and never move, so
that the model's forward can be compiled, and on a GPU captured as a graph. A step with drafts keeps
that promise. A forward has one of a few widths, `WIDTHS`, and as many rows as the batch; those that
have ended pad it, as in plain `generate`. Each shape is compiled once, through the model's own
`get_compiled_call`. What changes from step to step, tokens, lengths and masks, are tensors that the
forward is given.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.hf.device import Transfer
from fastdraft.hf.interface import CACHE, compiled_forward, is_callers_own
from fastdraft.hf.kv_cache import SHARING, Frame, RaggedCache, RowLayer
from fastdraft.hf.masks import Masks
from fastdraft.hf.step import CachedModel

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

_COMPILATIONS: Final = 128

_Buffers = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Compiled:
    """State of a compiled forward, kept from one generation to the next.

    Attributes:
        buffers: The keys and values of the layers of its latest generation. A CUDA graph remembers
            where they lie: for others, each shape would be recorded again.
        runs: How often it has run, by the shape of its tokens and cache, rows first.
    """

    buffers: list[_Buffers] = field(default_factory=list)
    runs: Counter[tuple[int, ...]] = field(default_factory=Counter)


_compiled: weakref.WeakKeyDictionary[Any, Compiled] = weakref.WeakKeyDictionary()


@dataclass
class _Writes:
    """The columns that the next forward writes; shared by the layers that hold the same tokens.

    Attributes:
        columns: The columns of a layer's buffers.
        is_ring: Whether token t of a row stands in column t % columns; else in column t.
        rows, at: (rows, 1) and (rows, width) int64; `None` for the prompt.
        length: Tokens of the longest row before it, an int for the prompt, later a tensor: a number
            that changes from step to step would be compiled into the forward.
    """

    columns: int
    is_ring: bool
    rows: torch.Tensor | None = None
    at: torch.Tensor | None = None
    length: Any = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Writes:
        """Itself: a model that repeats its layers copies those of the cache in its first forward,
        and the copies write where the others do."""
        return self


class _StaticRowLayer(RowLayer):  # type: ignore[no-untyped-call]
    """The keys and values of one layer, (rows, heads, columns, head size) each.

    A layer with a sliding window holds the window and the widest draft, as a ring: what a draft
    overwrites is out of every later query's sight, even if the draft is rejected.
    """

    def __init__(self, writes: _Writes, window: int | None) -> None:
        super().__init__(window)
        self.writes = writes
        self.earlier: _Buffers | None = None  # of an earlier generation, to be used again

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        earlier, self.earlier = self.earlier or (None, None), None
        columns = self.writes.columns
        self.keys = _buffer(key_states, columns, earlier[0])
        self.values = _buffer(value_states, columns, earlier[1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, at = self.writes.rows, self.writes.at
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
        held = min(length, self.writes.columns)
        at = torch.arange(length - held, length, device=key_states.device) % self.writes.columns
        self.keys[:, :, at] = key_states[:, :, length - held :]
        self.values[:, :, at] = value_states[:, :, length - held :]
        self.writes.length = length
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """For the prompts; later forwards are given their masks."""
        return query_length, 0

    def get_seq_length(self) -> Any:
        return self.writes.length

    def get_max_length(self) -> int:
        return self.writes.columns


class StaticRowCache(RaggedCache):
    """A cache of fixed buffers whose rows have lengths of their own.

    Args:
        prepared: The cache that `generate` made. Its layers say what the model needs, and its
            length how long a text may become.

    Raises:
        InvalidValueError: The cache cannot be decoded from, with what to do instead.
    """

    def __init__(self, prepared: StaticCache) -> None:
        if is_callers_own(prepared):
            raise InvalidValueError(
                f"{CACHE} must be a DynamicCache, got StaticCache; leave it out and pass "
                "cache_implementation='static'"
            )
        if prepared.offloading:
            raise InvalidValueError(
                "a static cache must stay on the model's device, got offloaded StaticCache; use "
                "cache_implementation='static'"
            )
        # If all layers have a window, the cache does not say.
        whole = [layer.max_cache_len for layer in prepared.layers if type(layer) is StaticLayer]
        longest = max(whole, default=math.inf)
        self._writes: dict[int | None, _Writes] = {}
        layers = [self._layer(layer, index, longest) for index, layer in enumerate(prepared.layers)]
        super().__init__(layers=layers)
        self._longest: Callable[[], torch.Tensor]
        self._at: dict[int | None, Callable[[], torch.Tensor]] = {}

    def _layer(self, layer: Any, index: int, longest: float) -> Any:
        if isinstance(layer, SHARING):
            return layer
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise InvalidValueError(
                "a static cache needs layers of full or sliding attention, "
                f"got layer {index} with {type(layer).__name__}; leave cache_implementation unset"
            )
        # A layer with a window gives the text's length or the window, whichever is shorter.
        size = layer.max_cache_len
        is_ring = type(layer) is StaticSlidingWindowLayer and size < longest
        window = size if is_ring else None
        writes = self._writes.setdefault(window, _Writes(size + WIDTHS[-1] - 1, is_ring))
        windows = [each for each in self._writes if each is not None]
        if len(windows) > 1:
            raise InvalidValueError(
                f"a static cache needs sliding windows of one size, got {windows[0]} and {size}; "
                "leave cache_implementation unset"
            )
        return _StaticRowLayer(writes, window)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The columns of its layers, which with rows and tokens make a forward's shape."""
        return tuple(writes.columns for writes in self._writes.values())

    def plan(
        self,
        transfer: Transfer,
        lengths: Sequence[int],
        width: int,
        floors: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        """As `RowCache.plan`."""
        starts = np.array(lengths)
        self._longest = transfer.add(np.array(starts.max()))
        tokens = starts[:, None] + np.arange(width)
        for window, writes in self._writes.items():
            firsts = starts + width - writes.columns if writes.is_ring else np.zeros_like(starts)
            self.frames[window] = Frame(firsts.tolist(), writes.columns, writes.is_ring)
            self._at[window] = transfer.add(self.frames[window].columns_of(tokens))

    def prepare(self) -> None:
        longest = self._longest()
        for window, writes in self._writes.items():
            at = self._at[window]()
            if writes.rows is None or len(writes.rows) != len(at):
                writes.rows = torch.arange(len(at), device=at.device)[:, None]
                torch._dynamo.mark_static(writes.rows)
            writes.at, writes.length = at, longest
            torch._dynamo.mark_static(at)

    def take_buffers(self, compiled: Compiled) -> None:
        """Uses those that an earlier generation has kept, where they are of the right size."""
        earlier, compiled.buffers = compiled.buffers, []
        for layer, buffers in zip(self._own(), earlier, strict=False):
            layer.earlier = buffers

    def keep_buffers(self, compiled: Compiled) -> None:
        """Keeps them for the next generation. The last ones kept stay."""
        compiled.buffers = [(each.keys, each.values) for each in self._own() if each.is_initialized]

    def _own(self) -> list[_StaticRowLayer]:
        """The layers but for those that use the keys and values of others."""
        return [layer for layer in self.layers if isinstance(layer, _StaticRowLayer)]


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
    buffer = states.new_zeros(shape)
    torch._dynamo.mark_static(buffer)
    # Every forward writes to it, which a CUDA graph allows while it does not move.
    torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer


@dataclass
class StaticModel(CachedModel):
    """A causal language model whose forwards have fixed shapes. Its cache is a `StaticRowCache`.

    Attributes:
        call: The model, or its compiled forward.
        batch: The number of rows at the start.
        compiled: What is known of `call`; `None` where it is the model.
    """

    call: Callable[..., Any] = field(kw_only=True)
    batch: int = field(kw_only=True)
    compiled: Compiled | None = field(kw_only=True, default=None)
    widths = WIDTHS

    def __post_init__(self) -> None:
        super().__post_init__()
        # No forward follows for a row that ends at once.
        self._lengths = np.full(self.batch, self.cache.get_seq_length())

    def rows_in_forward(self, running: int) -> int:
        return self.batch

    def is_warm(self, width: int) -> bool:
        """Says whether a forward of this width has been compiled, so that its time is its cost."""
        # A first run compiles; on a GPU the second warms up and the third records a graph.
        cold = 1 if self.device.type == "cpu" else 3
        return self.compiled is None or self.compiled.runs[self._shape(width)] >= cold

    def _shape(self, width: int) -> tuple[int, ...]:
        return self.batch, width, *self.cache.sizes

    def _run(
        self,
        input_ids: NDArray[np.int64],
        depths: NDArray[np.int64],
        *,
        rows: Sequence[int],
        cached: Sequence[int],
        trees: NDArray[np.bool_] | None,
        **_: Any,
    ) -> torch.Tensor:
        width = input_ids.shape[1]
        if width not in self.widths:
            raise FastdraftError(
                f"a forward of fixed shapes takes {', '.join(map(str, self.widths))} tokens a row, "
                f"got {width}: did the drafter keep to its limits?"
            )
        self._lengths[rows] = cached
        all_ids, all_depths = np.zeros((2, self.batch, width), np.int64)
        all_ids[rows], all_depths[rows] = input_ids, depths
        sees = None
        if trees is not None:
            sees = np.zeros((self.batch, width, width), bool)
            sees[rows] = trees
        return super()._run(
            all_ids,
            all_depths,
            rows=range(self.batch),
            cached=self._lengths.tolist(),
            trees=sees,
        )

    def _slots(self, rows: Sequence[int]) -> Sequence[int]:
        return rows

    def _called(self, inputs: dict[str, Any]) -> torch.Tensor:
        if "logits_to_keep" in inputs:
            # All: a number that changes with the width would be compiled as one of any value.
            inputs["logits_to_keep"] = 0
        if self.compiled is not None:
            for leaf in tree_leaves(inputs):
                if isinstance(leaf, torch.Tensor):
                    torch._dynamo.mark_static(leaf)
        logits: torch.Tensor = self.call(**inputs, return_dict=True).logits
        if self.compiled is not None:
            self.compiled.runs[self._shape(inputs["input_ids"].shape[1])] += 1
        return logits

    def keep(self, slots: Sequence[int]) -> None:
        """Rows that have ended stay."""


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
    call = compiled_forward(model, config, model_kwargs)
    return (model, None) if call is None else (call, _compiled.setdefault(call, Compiled()))


def compiling(*, is_compiled: bool) -> AbstractContextManager[None]:
    """Allows as many compilations as there are shapes, for several models and batches.

    Behind PyTorch's limit, 8 a process for the forwards of all models, nothing would be compiled.
    """
    if not is_compiled:
        return nullcontext()
    limit = max(torch._dynamo.config.recompile_limit, _COMPILATIONS)
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=limit)
    return patched
