"""Attention masks for rows of unequal length.

Where all rows are equally long and nothing is padded, the model makes its own mask, and its fast
paths stay open. Otherwise the mask is made here, in the form in which `generate` hands masks to the
model: one tensor, or a dict of them by layer type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastdraft.errors import InvalidValueError

__all__ = ["Masks"]


class Masks:
    """Makes the masks of one generation.

    Args:
        model: The target model.
        visible: (rows, columns) bool, which columns of the prompts may be seen; `None` for all.
        rows: The number of rows.

    Raises:
        InvalidValueError: The rows need a mask and the model's attention takes none of this form.
    """

    def __init__(self, model: Any, *, visible: torch.Tensor | None, rows: int) -> None:
        self._visible = visible
        if visible is None and rows == 1:
            return
        config = model.config.get_text_config(decoder=True)
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise InvalidValueError(
                "batches and padded prompts need attn_implementation 'sdpa' or 'eager', "
                f"got {implementation!r}"
            )
        self._additive_dtype: torch.dtype | None = (
            model.dtype if implementation == "eager" else None
        )
        window = getattr(config, "sliding_window", None)
        layer_types = getattr(config, "layer_types", None)
        if layer_types is not None:
            kinds = sorted(set(layer_types))
        elif window is not None:
            kinds = ["sliding_attention"]
        elif getattr(config, "attention_chunk_size", None) is not None:
            kinds = ["chunked_attention"]
        else:
            kinds = ["full_attention"]
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise InvalidValueError(
                "batches and padded prompts need layers with full or sliding attention, "
                f"got {unknown[0]!r}"
            )
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}

    def of(
        self, rows: Sequence[int], lengths: Sequence[int], width: int, device: torch.device
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """The mask of a forward over `width` new tokens a row.

        Args:
            rows: The rows in the forward, as indices of the batch at the start.
            lengths: Columns that each of them has in the cache.

        Returns:
            (rows, 1, width, longest + width), True or 0 where a query may look; a dict of these by
            layer type when the layers differ; `None` when the model's own mask is right.
        """
        longest = max(lengths)
        if self._visible is None and min(lengths) == longest:
            return None
        columns = torch.arange(longest + width, device=device)
        starts = torch.tensor(lengths, device=device)
        queries = starts[:, None, None] + torch.arange(width, device=device)[None, :, None]
        seen = columns <= queries  # (rows, width, columns)
        if self._visible is not None:
            seen[:, :, : self._visible.shape[1]] &= self._visible[list(rows)][:, None]
        masks = {}
        for kind, window in self._windows.items():
            of_kind = seen if window is None else seen & (columns > queries - window)
            masks[kind] = self._in_form(of_kind[:, None])
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _in_form(self, seen: torch.Tensor) -> torch.Tensor:
        if self._additive_dtype is None:
            return seen
        lowest = torch.finfo(self._additive_dtype).min
        allowed = torch.zeros((), dtype=self._additive_dtype, device=seen.device)
        return torch.where(seen, allowed, lowest)
