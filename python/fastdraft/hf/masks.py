"""Attention masks for rows of unequal length, and for drafts that are trees.

Where all rows are equally long, nothing is padded and every draft is a chain, the model makes its
own mask, and its fast paths stay open. Otherwise the mask is made here, in the form in which
`generate` hands masks to the model: one tensor, or a dict of them by layer type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.errors import InvalidValueError
from fastdraft.hf.attention import ATTENTION
from fastdraft.hf.kv_cache import Frame, on_device

__all__ = ["Masks"]

# Of layers whose masks are made here.
_KINDS: Final = ("full_attention", "sliding_attention")


class _New(NamedTuple):
    """The new tokens of a forward, in the four dimensions of masks.

    Attributes:
        places: (rows, 1, width, 1), the place of each in its text.
        starts: (rows, 1, 1, 1), how many tokens stand before them; None where nobody asks.
        trees: (rows, 1, width, width) bool, as in `Masks.of`.
    """

    places: torch.Tensor
    starts: torch.Tensor | None
    trees: torch.Tensor | None

    @classmethod
    def of(cls, numbers: Sequence[torch.Tensor]) -> _New:
        """Of the numbers of `_numbers`, and any behind them, on the device."""
        places, starts, trees, *_ = *numbers, None, None
        return cls(places, starts, None if trees is None else trees.bool())


class Masks:
    """Makes the masks of one generation.

    Args:
        model: The target model.
        visible: (rows, columns), which columns of the prompts may be seen; `None` for all.
        rows: The number of rows.

    Attributes:
        visible: The same, bool.
        needed: What the masks made here need and the model lacks; `None` where it takes them.

    Raises:
        InvalidValueError: The rows need a mask and the model's attention takes none of this form.
    """

    def __init__(self, model: Any, *, visible: torch.Tensor | None, rows: int) -> None:
        self.visible = None if visible is None else visible.bool()
        config = model.config.get_text_config(decoder=True)
        implementation = config._attn_implementation
        self._additive_dtype: torch.dtype | None = (
            model.dtype if implementation == "eager" else None
        )
        window = getattr(config, "sliding_window", None)
        # GPT-Neo's layers mask by column themselves, and call their kinds otherwise.
        layer_types = getattr(config, "layer_types", None) or getattr(
            config, "attention_layers", None
        )
        # Convolutions take no mask of these; of a tree's tokens they would see other branches.
        self._has_convolutions = "conv" in (layer_types or ())
        if layer_types is not None:
            kinds = sorted(set(layer_types) - {"conv"})
        elif window is not None:
            kinds = ["sliding_attention"]
        elif getattr(config, "attention_chunk_size", None) is not None:
            kinds = ["chunked_attention"]
        else:
            kinds = ["full_attention"]
        unknown = [kind for kind in kinds if kind not in _KINDS]
        needed = None
        if implementation not in ("sdpa", "eager", ATTENTION):
            needed = f"attn_implementation 'sdpa', 'eager' or {ATTENTION!r}, got {implementation!r}"
        elif unknown:
            needed = f"layers with full or sliding attention, got {unknown[0]!r}"
        elif getattr(config, "alibi", False):
            needed = "positions that do not depend on the mask, got ALiBi"
        if needed is not None and (visible is not None or rows > 1):
            raise InvalidValueError(f"batches and padded prompts need {needed}")
        self.needed = needed
        # Of rows and what may be seen of their prompts.
        self._chosen: tuple[list[int], torch.Tensor] | None = None
        # Of a static cache: the numbers of columns, by how many there are, and which may be seen.
        self._columns: dict[int, torch.Tensor] = {}
        self._shown: tuple[torch.Tensor, torch.Tensor] | None = None
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}

    @property
    def takes_trees(self) -> bool:
        """Whether the model's layers take the masks of trees."""
        return self.needed is None and not self._has_convolutions

    def of(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        width: int,
        device: torch.device,
        *,
        frames: Mapping[int | None, Frame],
        trees: NDArray[np.bool_] | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """The mask of a forward over `width` new tokens a row.

        Args:
            rows: The rows in the forward, as indices of the batch at the start.
            lengths: Tokens that each of them has in the cache.
            frames: What the forward sees of the cache, by the windows of its layers. A cache of
                layers without windows serves windowed attention too.
            trees: As in `FlatDrafts.sees`; `None` where each new token sees those before it.

        Returns:
            (rows, 1, width, columns), True or 0 where a query may look; a dict of these by layer
            type when the layers differ; `None` when the model's own mask is right.
        """
        longest = max(lengths)
        uniform = min(lengths) == longest and all(
            min(frame.firsts) == max(frame.firsts) for frame in frames.values()
        )
        if trees is None and self.visible is None and uniform:
            return None
        whole = frames.get(None, Frame([0] * len(rows), longest + width))
        of_kinds = {kind: frames.get(window, whole) for kind, window in self._windows.items()}
        firsts = [np.array(frame.firsts)[:, None, None, None] for frame in of_kinds.values()]
        starts = np.array(lengths)[:, None, None, None]
        depths = np.arange(width)[None] if trees is None else trees.sum(-1) - 1
        numbers = _numbers(starts, depths, trees, needs_starts=trees is not None)
        if trees is not None:
            firsts += [starts - first + np.arange(width) for first in firsts]
        sent = on_device(device, *numbers, *firsts)
        new, others = _New.of(sent[: len(numbers)]), sent[len(numbers) :]
        slots: Sequence[torch.Tensor | None] = others[len(of_kinds) :] or [None] * len(of_kinds)
        visible = self._visible_of(rows)
        masks = []
        for (kind, frame), first, at in zip(of_kinds.items(), others, slots, strict=False):
            columns = torch.arange(frame.columns, device=device)
            if any(frame.firsts):
                columns = first + columns
            masks.append(self._mask(kind, columns, new, at, visible))
        return self.by_kind(masks)

    def _visible_in(
        self, rows: Sequence[int], count: int, device: torch.device
    ) -> torch.Tensor | None:
        """What some rows may see of so many columns, behind the prompts all."""
        of_prompts = self._visible_of(rows)
        if of_prompts is None:
            return None
        known = self._shown
        if known is None or known[0] is not of_prompts or known[1].shape[3] != count:
            behind = count - of_prompts.shape[3]
            shown = torch.nn.functional.pad(of_prompts, (0, behind), value=True).to(device)
            known = self._shown = of_prompts, shown
        return known[1]

    def by_kind(self, masks: Sequence[torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
        """The masks of all kinds of layers, as a forward takes them."""
        if len(masks) == 1:
            return masks[0]
        of_kinds: dict[str, Any] = dict(zip(self._windows, masks, strict=True))
        if self._has_convolutions:
            of_kinds["conv"] = None
        return of_kinds

    def _visible_of(self, rows: Sequence[int]) -> torch.Tensor | None:
        """What may be seen of some rows' prompts. The rows change when one ends."""
        if self.visible is None:
            return None
        chosen = list(rows)
        if self._chosen is None or self._chosen[0] != chosen:
            self._chosen = chosen, self.visible[chosen][:, None, None]
        return self._chosen[1]

    def fixed_numbers(
        self,
        lengths: NDArray[np.int64],
        depths: NDArray[np.int64],
        *,
        columns: Mapping[bool, int],
        trees: NDArray[np.bool_] | None = None,
    ) -> list[NDArray[np.int64]]:
        """What `fixed` makes the mask of a forward from; to be sent to the device before.

        Args:
            lengths: (rows,), the tokens of each row in the cache.
            depths: (rows, width), by how much the position of each new token is further on.
            columns: The columns of the cache's layers, by whether these have a sliding window.
            trees: As in `of`.
        """
        starts = lengths[:, None, None, None]
        needs_starts = trees is not None or True in columns
        numbers = _numbers(starts, depths, trees, needs_starts=needs_starts)
        if trees is not None:
            places = starts + np.arange(depths.shape[1])
            numbers += [places % _columns(columns, window) for window in self._windows.values()]
        return numbers

    def fixed(
        self,
        numbers: Sequence[torch.Tensor],
        rows: Sequence[int],
        *,
        columns: Mapping[bool, int],
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask of a forward over a `StaticRowCache`, all its columns.

        Nothing is read back from the device.

        Args:
            numbers: Those of `fixed_numbers`, on the device.
            rows: As in `of`.
            columns: As in `fixed_numbers`.
        """
        new = _New.of(numbers)
        device = new.places.device
        slots: Sequence[torch.Tensor | None] = numbers[3:] or [None] * len(self._windows)
        masks = []
        for (kind, window), at in zip(self._windows.items(), slots, strict=True):
            count = _columns(columns, window)
            if count not in self._columns:
                self._columns[count] = torch.arange(count, device=device)
            tokens = self._columns[count]
            if window is None or True not in columns:
                visible = self._visible_in(rows, count, device)
            else:
                # A column holds the newest token that is written there; none yet where negative.
                assert new.starts is not None
                last = new.starts + (new.places.shape[2] - 1)
                tokens = last - (last - tokens) % count
                visible = self._visible_of(rows)
            masks.append(self._mask(kind, tokens, new, at, visible))
        return self.by_kind(masks)

    def padding(self) -> NDArray[np.int64] | None:
        """How many columns at the front of each prompt are padding, (rows,) or (1,).

        None if a prompt has hidden columns after its first visible token.
        """
        if self.visible is None:
            return np.zeros(1, np.int64)
        visible = self.visible.numpy(force=True)
        first = visible.argmax(1)
        hidden_behind = (np.cumsum(visible, 1) > 0) & ~visible
        return None if hidden_behind.any() else first.astype(np.int64)

    def sights(
        self,
        lengths: NDArray[np.int64],
        depths: NDArray[np.int64],
        new: NDArray[np.int64],
        padding: NDArray[np.int64],
    ) -> list[NDArray[np.int64]]:
        """What stands in the place of `fixed` for attention by lengths.

        Args:
            lengths, depths: As in `fixed_numbers`.
            new: (rows, width), as bits which of the new tokens each of them sees.
            padding: As in `padding`.

        Returns:
            For each kind of layer (rows, 1, width, 3), `seen` of
            `fastdraft.kernels.attention`; `by_kind` makes the mask of them.
        """
        starts = np.broadcast_to(lengths[:, None], depths.shape)
        width = depths.shape[1]
        sights = []
        for window in self._windows.values():
            first, near = np.broadcast_to(padding[:, None], depths.shape), new
            if window is not None:
                first = np.maximum(first, starts + depths - (window - 1))
                if window < width:
                    is_near = depths[:, :, None] - depths[:, None] < window
                    near = new & (is_near << np.arange(width)).sum(-1)
            sights.append(np.stack([starts, first, near], axis=-1)[:, None])
        return sights

    def _mask(
        self,
        kind: str,
        columns: torch.Tensor,
        new: _New,
        slots: torch.Tensor | None,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """The mask of one kind of layer.

        Args:
            columns: (columns,) where column t holds token t of each row. (rows, 1, 1, columns)
                otherwise: the tokens that were written to them, in that order; negative for none.
            slots: (rows, 1, 1, width), the column of each new token; `None` without trees.
            visible: (rows, 1, 1, first columns or prompts' columns); `None` for all.
        """
        places, starts, trees = new
        if trees is None or starts is None or slots is None:
            seen = columns <= places
        else:
            width = places.shape[2]
            seen = (columns < starts).repeat(1, 1, width, 1)
            seen.scatter_(3, slots.expand(-1, -1, width, -1), trees)
        if columns.dim() == 1:
            if visible is not None:
                count = visible.shape[3]
                of_prompts = seen if count == len(columns) else seen[..., :count]
                of_prompts &= visible.to(seen.device)
        else:
            shown = columns >= 0
            if visible is not None:
                prompts = visible.to(columns.device)
                last = prompts.shape[3] - 1
                shown &= prompts.gather(3, columns.clamp(min=0, max=last)) | (columns > last)
            seen &= shown
        window = self._windows[kind]
        if window is not None:
            keys = columns
            if slots is not None:
                # A token of a tree stands in one column and takes the place of another in the text.
                keys = columns.expand(len(places), 1, 1, -1)
                keys = keys.scatter(3, slots, places.transpose(2, 3))
            seen &= keys > places - window
        return self._in_form(seen)

    def _in_form(self, seen: torch.Tensor) -> torch.Tensor:
        if self._additive_dtype is None:
            return seen
        lowest = torch.finfo(self._additive_dtype).min
        allowed = torch.zeros((), dtype=self._additive_dtype, device=seen.device)
        return torch.where(seen, allowed, lowest)


def _numbers(
    starts: NDArray[np.int64],
    depths: NDArray[np.int64],
    trees: NDArray[np.bool_] | None,
    *,
    needs_starts: bool,
) -> list[NDArray[np.int64]]:
    """The numbers of `_New`, on the host: starts (rows, 1, 1, 1), depths (rows or 1, width)."""
    numbers = [starts + depths[:, None, :, None]]
    if needs_starts:
        numbers.append(starts)
    if trees is not None:
        numbers.append(trees[:, None].astype(np.int64))
    return numbers


def _columns(columns: Mapping[bool, int], window: int | None) -> int:
    """How many columns the layers with such a window have."""
    return columns[window is not None and True in columns]
