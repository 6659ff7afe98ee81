"""Attention masks for rows of unequal length, and for drafts that are trees.

Where all rows are equally long, nothing is padded and every draft is a chain, the model makes its
own mask, and its fast paths stay open. Otherwise the mask is made here, in the form in which
`generate` hands masks to the model: one tensor, or a dict of them by layer type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.errors import InvalidValueError
from fastdraft.hf.attention import ATTENTION
from fastdraft.hf.kv_cache import Frame, on_device

__all__ = ["Masks"]

# Of layers whose masks are made here. Of what they may see, indexed ones choose themselves.
_KINDS: Final = ("full_attention", "sliding_attention", "indexed_attention")


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
        if layer_types is not None:
            kinds = sorted(set(layer_types))
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
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}

    @property
    def takes_trees(self) -> bool:
        """Whether the model's attention takes the masks of trees."""
        return self.needed is None

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
        depths = np.arange(width) if trees is None else trees.sum(-1) - 1
        starts = np.array(lengths)[:, None]
        numbers = [starts, starts + depths]  # of the queries, their places in their texts
        numbers += [np.array(frame.firsts)[:, None] for frame in of_kinds.values()]
        if trees is not None:
            numbers.append(trees.astype(np.int64))
        first_new, queries, *firsts = on_device(device, *numbers)
        sees = None if trees is None else firsts.pop().bool()
        visible = self._visible_of(rows)
        masks = {}
        for first, (kind, frame) in zip(firsts, of_kinds.items(), strict=True):
            columns = torch.arange(frame.columns, device=device)
            if any(frame.firsts):
                columns = first + columns
            slots = None
            if sees is not None:
                slots = first_new - first + torch.arange(width, device=device)
            masks[kind] = self._mask(kind, columns, first_new, queries, sees, slots, visible)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _visible_of(self, rows: Sequence[int]) -> torch.Tensor | None:
        """What may be seen of some rows' prompts. The rows change when one ends."""
        if self.visible is None:
            return None
        chosen = list(rows)
        if self._chosen is None or self._chosen[0] != chosen:
            self._chosen = chosen, self.visible[chosen]
        return self._chosen[1]

    def fixed(
        self,
        lengths: torch.Tensor,
        depths: torch.Tensor,
        *,
        columns: Mapping[bool, int],
        trees: torch.Tensor | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask of a forward over a `StaticRowCache`, all its columns and all rows.

        Nothing is read back from the device.

        Args:
            lengths: (rows,) int64, the tokens of each row in the cache.
            depths: (rows, width) int64, by how much the position of each new token is further on.
            columns: The columns of the cache's layers, by whether these have a sliding window.
            trees: As in `of`, on the device of `lengths`.
        """
        starts = lengths[:, None]
        queries = starts + depths
        steps = torch.arange(depths.shape[1], device=lengths.device)
        last = starts + depths.shape[1] - 1
        masks = {}
        for kind, window in self._windows.items():
            count = columns.get(window is not None, columns.get(False))
            assert count is not None
            # A column holds the newest token that is written there; none yet where negative.
            tokens = last - (last - torch.arange(count, device=lengths.device)) % count
            slots = None if trees is None else (starts + steps) % count
            visible = self.visible
            masks[kind] = self._mask(kind, tokens, starts, queries, trees, slots, visible)
        return masks if len(masks) > 1 else next(iter(masks.values()))

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
        lengths: torch.Tensor,
        depths: torch.Tensor,
        new: torch.Tensor,
        padding: torch.Tensor,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """What stands in the place of `fixed` for attention by lengths.

        Args:
            lengths, depths: As in `fixed`.
            new: (rows, width) int64, as bits which of the new tokens each of them sees.
            padding: On the device of `lengths`, as in `padding`.

        Returns:
            (rows, 1, width, 3) int64, `seen` of `fastdraft.kernels.reference.attention`; a dict of
            these by layer type when the layers differ.
        """
        starts = lengths[:, None].expand_as(depths)
        width = depths.shape[1]
        sights = {}
        for kind, window in self._windows.items():
            first, near = padding[:, None].expand_as(depths), new
            if window is not None:
                first = torch.maximum(first, starts + depths - (window - 1))
                if window < width:
                    is_near = depths[:, :, None] - depths[:, None] < window
                    near = new & (is_near << torch.arange(width, device=new.device)).sum(-1)
            sights[kind] = torch.stack([starts, first, near], dim=-1)[:, None]
        return sights if len(sights) > 1 else next(iter(sights.values()))

    def _mask(
        self,
        kind: str,
        columns: torch.Tensor,
        starts: torch.Tensor,
        queries: torch.Tensor,
        trees: torch.Tensor | None,
        slots: torch.Tensor | None,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        seen, keys = self._seen(columns, starts, queries, trees, slots, visible)
        window = self._windows[kind]
        if window is not None:
            seen &= keys[..., None, :] > queries[..., None] - window
        return self._in_form(seen[:, None])

    def _seen(
        self,
        columns: torch.Tensor,
        starts: torch.Tensor,
        queries: torch.Tensor,
        trees: torch.Tensor | None,
        slots: torch.Tensor | None,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each query sees without windows, (rows, width, columns), and the keys' places.

        Args:
            columns: (rows, columns), the tokens that were written to the columns, in that order;
                negative where there is none. (columns,) where column t holds token t of each row.
            starts: (rows, 1), how many tokens stand before the first query.
            queries: (rows, width), the place of each query in its text.
            trees: (rows, width, width) bool, as in `of`.
            slots: (rows, width), the column of each query; `None` without trees.
            visible: (rows, columns of the prompts); `None` for all.
        """
        keys = columns
        if trees is None or slots is None:
            seen = keys[..., None, :] <= queries[..., None]
        else:
            # A token of a tree stands in one column and takes the place in the text of another.
            width = queries.shape[1]
            keys = columns.expand(len(starts), -1).scatter(1, slots, queries)
            seen = (columns < starts)[:, None].repeat(1, width, 1)
            seen.scatter_(2, slots[:, None].expand(-1, width, -1), trees)
        if columns.dim() == 1:
            if visible is not None:
                of_prompts = seen[..., : visible.shape[1]]
                of_prompts &= visible.to(seen.device)[:, None]
            return seen, keys
        shown = columns >= 0
        if visible is not None:
            prompts = visible.to(columns.device)
            last = prompts.shape[1] - 1
            shown &= prompts.gather(1, columns.clamp(min=0, max=last)) | (columns > last)
        seen &= shown[:, None]
        return seen, keys

    def _in_form(self, seen: torch.Tensor) -> torch.Tensor:
        if self._additive_dtype is None:
            return seen
        lowest = torch.finfo(self._additive_dtype).min
        allowed = torch.zeros((), dtype=self._additive_dtype, device=seen.device)
        return torch.where(seen, allowed, lowest)
