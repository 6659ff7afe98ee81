"""A model and the cache of its rows: forwards over rows of unequal length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastdraft.hf.kv_cache import RowCache
from fastdraft.hf.masks import Masks
from fastdraft.hf.trees import TreeLayout

__all__ = ["RowModel"]


class RowModel:
    """Answers the logits of the tokens that follow what its cache holds.

    Args:
        model: A causal language model.
        cache: Holds the keys and values of each row.
        masks: Makes the attention masks that the model cannot make itself.
        kwargs: What every forward takes besides, as `generate` prepares it.
        device: Where the model takes its inputs.
        home: Where the logits are wanted.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache: RowCache,
        masks: Masks,
        kwargs: dict[str, Any],
        device: torch.device,
        home: torch.device,
    ) -> None:
        self.cache = cache
        self.masks = masks
        self.device = device
        self._home = home
        self._model = model
        self._kwargs = kwargs

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        rows: Sequence[int],
        cached: Sequence[int],
        positions: torch.Tensor | None,
        trees: TreeLayout | None = None,
        columns: torch.Tensor | None = None,
        floors: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The logits after each token, of shape (rows, width, vocabulary).

        Args:
            input_ids: (rows, width) int64, for each row of the cache, in its order.
            rows: Which of the rows at the start these are.
            cached: Columns of each row in the cache.
            positions: (..., rows or 1, width) int64, where the tokens stand in their texts; `None`
                for a model that places tokens by what the cache holds.
            trees: How the tokens stand to each other; `None` where each follows the one before.
            columns: int64, the columns of `input_ids` whose logits are wanted; `None` for all. A
                model that cannot choose gives all.
            floors: As in `RowCache.prepare`.
        """
        width = input_ids.shape[1]
        self.cache.prepare(cached, width, self.device, floors=floors)
        kwargs = dict(self._kwargs)
        kwargs["attention_mask"] = self.masks.of(
            rows, cached, width, self.device, frames=self.cache.frames, trees=trees
        )
        if positions is not None:
            kwargs["position_ids"] = positions
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = width if columns is None else columns.to(self.device)
        inputs = self._model.prepare_inputs_for_generation(
            input_ids.to(self.device), past_key_values=self.cache, **kwargs
        )
        logits: torch.Tensor = self._model(**inputs, return_dict=True).logits
        if columns is not None and logits.shape[1] == width > len(columns):
            logits = logits[:, columns.to(logits.device)]
        return logits.to(self._home)
