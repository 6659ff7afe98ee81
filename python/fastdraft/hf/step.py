"""One forward of a model over rows of unequal length.

The target's decoding loop and the stages of draft models both run on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin

from fastdraft.hf.device import Transfer, device_of, lines_of
from fastdraft.hf.interface import CACHE
from fastdraft.hf.masks import Masks
from fastdraft.hf.rows import UNLIMITED
from fastdraft.hf.vocabulary import vocabulary_size

__all__ = ["CachedModel"]


@dataclass
class CachedModel:
    """A causal language model and the key-value cache of its rows.

    Attributes:
        model: The model.
        cache: A `RowCache` or `StaticRowCache`, the keys and values of each row.
        masks: Makes the attention masks that the model cannot make itself.
        first_positions: (..., rows or 1, 1) int64, the position of the first token in the cache, of
            each row or of all; `None` for a model that positions tokens by the cache's length.
        kwargs: Further arguments of every forward, as `generate` prepares them.
        home: The device on which the logits are wanted.
        last_offset: The largest position behind `first_positions`; later tokens get it too.
        takes_trees: Whether a draft may be a tree.
        device: The device of the model's inputs.
        vocabulary: How many token ids the model takes.
        widths: The tokens a row that a forward may have, rising from 1; `None` for any number.
    """

    widths: ClassVar[tuple[int, ...] | None] = None

    model: Any
    cache: Any
    masks: Masks
    first_positions: torch.Tensor | None
    kwargs: dict[str, Any]
    home: torch.device
    last_offset: int = UNLIMITED
    takes_trees: bool = False

    def __post_init__(self) -> None:
        self.device = device_of(self.model, self.home)
        self.vocabulary = vocabulary_size(self.model)
        # The host adds to these, and sends tokens and positions in one copy.
        self._first: NDArray[np.int64] | None = None
        if self.first_positions is not None:
            self._first = self.first_positions.numpy(force=True)
        # The inputs of the first forward, of which few change; None where the model has to be asked
        # each time.
        self._known_inputs: dict[str, Any] | None = {} if _prepares_plainly(self.model) else None

    def _positions(self, offsets: NDArray[np.int64], rows: Sequence[int]) -> NDArray[np.int64]:
        """The positions of tokens that stand `offsets` behind their rows' first, (..., width)."""
        first = self._first
        assert first is not None
        if first.shape[-2] > 1:
            first = first[..., rows, :]
        return first + offsets

    def _inputs(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the model, as its `prepare_inputs_for_generation` says.

        Args:
            input_ids: (rows, width), contiguous.
            kwargs: Those of `self.kwargs`, and what changes from forward to forward.
        """
        if self._known_inputs:
            known = {**self._known_inputs, "input_ids": input_ids}
            for name in _CHANGING:
                if kwargs.get(name) is None:
                    known.pop(name, None)
                else:
                    known[name] = kwargs[name]
            return known
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            input_ids, **{CACHE: self.cache}, **kwargs
        )
        # Some models put their own number of logits here, or leave positions to the cache.
        if "logits_to_keep" in kwargs:
            inputs["logits_to_keep"] = kwargs["logits_to_keep"]
        if kwargs.get("position_ids") is not None and inputs.get("position_ids") is None:
            inputs["position_ids"] = kwargs["position_ids"]
        if self._known_inputs is not None:
            given = {CACHE: self.cache, **kwargs}
            passed_on = all(inputs.get(name) is given.get(name) for name in _PASSED_ON)
            new = dict.fromkeys(("input_ids", *(name for name in _CHANGING if name in inputs)))
            self._known_inputs = {**inputs, **new} if passed_on else None
        return inputs

    def rows_in_forward(self, running: int) -> int:
        """The rows of a forward when `running` rows have not ended."""
        return running

    def is_warm(self, width: int) -> bool:
        """Says whether the time of a forward of this width is what it costs."""
        return True

    def compact(self, rows: Sequence[int], cached: Sequence[int], kept: NDArray[np.int64]) -> None:
        """Moves accepted tokens behind each other, as `RowCache.compact`, in these rows."""
        self.cache.compact(self._slots(rows), cached, kept)

    def keep(self, slots: Sequence[int]) -> None:
        """Drops the rows that have ended, as `RowCache.keep`."""
        self.cache.keep(slots)

    def forward(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        rows: Sequence[int],
        cached: Sequence[int],
        width: int = 0,
        wanted: Sequence[int] | None = None,
        trees: NDArray[np.bool_] | None = None,
        floors: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The logits (positions, vocabulary) after the tokens, each row's together.

        Args:
            tokens: The new tokens of each row in the order of the cache, at least one.
            rows: The index of each row in the batch at the start.
            cached: Tokens of each row in the cache.
            width: The tokens to which rows are padded, if they are not longer.
            wanted: The logits are wanted after the last n tokens of each row; `None` for all.
            trees: As in `StepDrafts.sees`; `None` where each token follows the one before it.
            floors: As in `RowCache.plan`.
        """
        counts = list(map(len, tokens))
        width = max(width, *counts)
        # Padding repeats a row's last token.
        input_ids = np.array([[*row, *[row[-1]] * (width - len(row))] for row in tokens], np.int64)
        steps = np.arange(width)[None]
        depths, used, columns = steps, None, None
        if min(counts) < width or wanted is not None:
            ends = np.array(counts)[:, None]
            # Padding has the position of the row's last token: a later one may not exist.
            used = steps < ends
            depths = np.minimum(steps, ends - 1)
            if wanted is not None:
                used &= steps >= ends - np.array(wanted)[:, None]
                columns = np.flatnonzero(used.any(0))
                used = used[:, columns]
        if trees is not None:
            depths = trees.sum(-1) - 1
        logits = self._run(
            input_ids,
            depths,
            rows=rows,
            cached=cached,
            trees=trees,
            floors=floors,
            columns=columns,
            counts=counts,
        )
        flat = logits.flatten(0, 1)
        if used is not None or len(rows) < logits.shape[0]:
            width = logits.shape[1]
            lines = np.array(self._slots(rows))[:, None] * width + np.arange(width)
            chosen = lines.ravel() if used is None else lines[used]
            flat = lines_of(flat, chosen.tolist())
        return flat.to(self.home)

    def _slots(self, rows: Sequence[int]) -> Sequence[int]:
        """The slot of each row in the forwards and the cache."""
        return range(len(rows))

    def _run(
        self,
        input_ids: NDArray[np.int64],
        depths: NDArray[np.int64],
        *,
        rows: Sequence[int],
        cached: Sequence[int],
        trees: NDArray[np.bool_] | None,
        floors: Sequence[int] | None = None,
        columns: NDArray[np.int64] | None = None,
        counts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """One forward: the logits (rows, width, vocabulary), or of some columns.

        Args:
            input_ids: (rows, width).
            depths: (rows or 1, width), how far each token's position is behind the row's first.
        """
        width = input_ids.shape[1]
        transfer = Transfer()
        ids = transfer.add(input_ids)
        self.cache.plan(transfer, cached, width, floors, counts)
        mask = self.masks.plan(
            transfer, rows, cached, depths, frames=self.cache.frames, trees=trees
        )
        positions = cut = None
        if self._first is not None:
            offsets = depths + np.array(cached)[:, None]
            if self.last_offset < UNLIMITED:
                offsets = np.minimum(offsets, self.last_offset)
            positions = transfer.add(self._positions(offsets, rows))
        if columns is not None and len(columns) < width:
            cut = transfer.add(columns)
        transfer.send(self.device)

        self.cache.prepare()
        kwargs = {**self.kwargs, "attention_mask": None if mask is None else mask()}
        if positions is not None:
            kwargs["position_ids"] = positions()
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = width if cut is None else cut()
        logits = self._called(self._inputs(ids(), kwargs))
        if cut is not None and logits.shape[1] == width:
            # A model that cannot choose gives all.
            logits = logits[:, cut().to(logits.device)]
        return logits

    def _called(self, inputs: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = self.model(**inputs, return_dict=True).logits
        return logits


# Inputs of a forward that this module makes anew each time, besides the tokens.
_CHANGING = ("attention_mask", "position_ids", "logits_to_keep")
_PASSED_ON = (CACHE, *_CHANGING)


def _prepares_plainly(model: Any) -> bool:
    """Says whether the model prepares its inputs by transformers' default.

    Then its inputs are what it is given, and need not be prepared at every step.
    """
    own = getattr(model.prepare_inputs_for_generation, "__func__", None)
    return own is GenerationMixin.prepare_inputs_for_generation and not model.is_remote_code()
