"""Attention masks for rows of unequal length, and for drafts that are trees.

Where all rows are equally long, nothing is padded and every draft is a chain, the model makes its
own mask, and its fast paths stay open. Otherwise the mask is made here, in the form in which
`generate` hands masks to the model: one tensor, or a dict of them by layer type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.errors import InvalidValueError
from fastdraft.hf.attention import STAND_IN
from fastdraft.hf.device import Transfer
from fastdraft.hf.interface import attention_of
from fastdraft.hf.kv_cache import Frame

__all__ = ["Masks"]

# Layers whose masks are made here.
_KINDS: Final = ("full_attention", "indexed_attention", "sliding_attention")
# Layers that take no mask: a state, or nothing at all, stands for the tokens before.
_WITHOUT: Final = ("conv", "linear_attention", "mlp", "moe")
_HYBRID: Final = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}

Mask = torch.Tensor | dict[str, torch.Tensor]
_Sent = Callable[[], torch.Tensor]


class Masks:
    """Makes the masks of one generation.

    Args:
        model: The target model.
        visible: (rows, columns), which columns of the prompts may be seen; `None` for all.
        rows: The number of rows.
        is_fixed: Whether the cache is static: its forwards are given a mask always.

    Attributes:
        visible: The same, bool, on the host.
        needed: What the masks made here need and the model lacks; `None` where it takes them.
        hides: Whether some columns may not be seen.

    Raises:
        InvalidValueError: The rows need a mask and the model's attention takes none of this form,
            or a column is hidden behind one that may be seen.
    """

    def __init__(
        self, model: Any, *, visible: torch.Tensor | None, rows: int, is_fixed: bool = False
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        implementation = attention_of(config)
        self._additive_dtype: torch.dtype | None = (
            model.dtype if implementation == "eager" else None
        )
        window = getattr(config, "sliding_window", None)
        # GPT-Neo's layers mask by column themselves, and call their kinds otherwise.
        layer_types = getattr(config, "layer_types", None) or getattr(
            config, "attention_layers", None
        )
        named = set(layer_types or ())
        self._without = sorted(named.intersection(_WITHOUT))
        if layer_types is not None:
            # A hybrid layer is an attention layer, too.
            kinds = sorted({_HYBRID.get(name, name) for name in named} - set(_WITHOUT))
        elif window is not None:
            kinds = ["sliding_attention"]
        elif getattr(config, "attention_chunk_size", None) is not None:
            kinds = ["chunked_attention"]
        else:
            kinds = ["full_attention"]
        unknown = [kind for kind in kinds if kind not in _KINDS]
        needed = None
        if implementation not in ("sdpa", "eager", STAND_IN):
            needed = f"attn_implementation 'sdpa' or 'eager', got {implementation!r}"
        elif unknown:
            needed = f"layers with full or sliding attention, got {unknown[0]!r}"
        if needed is not None and (visible is not None or rows > 1):
            raise InvalidValueError(f"batches and padded prompts need {needed}")
        self.needed = needed
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        self._is_fixed = is_fixed
        self._columns = torch.empty(0, dtype=torch.int64, device="cpu")

        self.visible = None if visible is None else visible.bool().numpy(force=True)
        self.hides = self.visible is not None and not self.visible.all()
        # How many columns at the front of each prompt are padding.
        self._padding = np.zeros(rows, np.int64)
        if self.visible is not None:
            begun = np.cumsum(self.visible, 1) > 0
            self._padding = (~begun).sum(1)
            if not self.visible[begun].all():
                row, column = np.argwhere(begun & ~self.visible)[0]
                raise InvalidValueError(
                    "attention_mask must hide padding at the front alone, got row "
                    f"{row}, which hides column {column} behind others: pad on the left"
                )

    def plan(
        self,
        transfer: Transfer,
        rows: Sequence[int],
        lengths: Sequence[int],
        depths: NDArray[np.int64],
        *,
        frames: Mapping[int | None, Frame],
        trees: NDArray[np.bool_] | None = None,
    ) -> Callable[[], Mask] | None:
        """Plans the mask of a forward.

        Args:
            transfer: Takes the numbers that have to be on the device.
            rows: The rows in the forward, as indices of the batch at the start.
            lengths: Tokens that each of them has in the cache.
            depths: (rows or 1, width), how far each new token's position is behind the first's.
            frames: What the forward sees of the cache, by the windows of its layers. A cache of
                layers without windows serves windowed attention too.
            trees: As in `StepDrafts.sees`; `None` where each new token sees those before it.

        Returns:
            What makes the mask once the transfer is sent: (rows, 1, width, columns), True or 0
            where a query may look, or a dict of these by layer type when the layers differ. `None`
            when the model's own mask is right.
        """
        needs_none = not self._is_fixed and trees is None and self.visible is None
        if not self._windows or (needs_none and _are_alike(lengths, frames)):
            return None
        width = depths.shape[1]
        starts = np.array(lengths)[:, None]
        padding = self._padding[list(rows)][:, None]
        masks = []
        for window in self._windows.values():
            frame, near, oldest = _frame_of(window, frames, lengths, width), trees, padding
            if window is not None:
                oldest = np.maximum(padding, starts + depths - (window - 1))
            if near is not None and window is not None and window < width:
                near = near & (depths[:, :, None] - depths[:, None] < window)
            # Each new token sees itself and those before it, or as `near` says.
            ends = starts + depths + 1 if near is None else starts
            planned: dict[str, _Sent] = {"ends": transfer.add(ends[:, None, :, None])}
            # The columns of a ring that hold no token yet seem to hold those before the first.
            if frame.is_ring or (oldest > 0).any():
                planned["oldest"] = transfer.add(oldest[:, None, :, None])
            if any(frame.firsts):
                planned["firsts"] = transfer.add(np.array(frame.firsts)[:, None, None, None])
            if near is not None:
                slots = frame.columns_of(starts + np.arange(width))
                planned["slots"] = transfer.add(slots[:, None, None])
                planned["near"] = transfer.add(near[:, None])
            masks.append(functools.partial(self._mask, frame, **planned))
        return lambda: self._by_kind([mask() for mask in masks])

    def _mask(
        self,
        frame: Frame,
        *,
        ends: _Sent,
        oldest: _Sent | None = None,
        firsts: _Sent | None = None,
        slots: _Sent | None = None,
        near: _Sent | None = None,
    ) -> torch.Tensor:
        """The mask of one kind of layer. What is not given changes nothing.

        Args:
            frame: The columns of these layers.
            ends: (rows, 1, width or 1, 1): the cached tokens before these are seen,
            oldest: of the same shape, and from these on.
            firsts: (rows, 1, 1, 1), as in `Frame`.
            slots: (rows, 1, 1, width), the column of each new token.
            near: (rows, 1, width, width), which new token sees which.
        """
        count = frame.columns
        if len(self._columns) < count:
            self._columns = torch.arange(2 * count, device=ends().device)
        tokens: torch.Tensor = self._columns[:count]
        if firsts is not None:
            start = firsts()
            tokens = start + ((tokens - start) % count if frame.is_ring else tokens)
        seen: torch.Tensor = tokens < ends()
        if oldest is not None:
            seen = seen & (tokens >= oldest())
        if slots is not None and near is not None:
            shape = (-1, -1, near().shape[2], -1)
            seen = seen.expand(shape).scatter(3, slots().expand(shape), near().bool())
        if self._additive_dtype is None:
            return seen
        lowest = torch.finfo(self._additive_dtype).min
        allowed = torch.zeros((), dtype=self._additive_dtype, device=seen.device)
        return torch.where(seen, allowed, lowest)

    def _by_kind(self, masks: Sequence[torch.Tensor]) -> Mask:
        """The masks of all kinds of layers, as a forward takes them."""
        if len(masks) == 1:
            return masks[0]
        of_kinds: dict[str, Any] = dict(zip(self._windows, masks, strict=True))
        return of_kinds | dict.fromkeys(self._without)


def _are_alike(lengths: Sequence[int], frames: Mapping[int | None, Frame]) -> bool:
    """Says whether all rows hold the same tokens in the same columns."""
    if len(lengths) == 1:
        return True
    numbers = [lengths, *(frame.firsts for frame in frames.values())]
    return all(min(each) == max(each) for each in numbers)


def _frame_of(
    window: int | None, frames: Mapping[int | None, Frame], lengths: Sequence[int], width: int
) -> Frame:
    """The columns that a forward sees of the layers with a window."""
    default = Frame([0] * len(lengths), max(lengths) + width)
    return frames.get(window) or frames.get(None) or next(iter(frames.values()), default)
