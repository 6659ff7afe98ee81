"""Short convolutions (LFM2) in a cache whose rows have lengths of their own.

A convolution looks at the inputs of the last few tokens. Its layer keeps those of each row that a
rejected draft could bring back, and cuts them anew at every forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from transformers import cache_utils
from transformers.cache_utils import Cache

from fastdraft.errors import InvalidValueError
from fastdraft.hf.device import on_device
from fastdraft.hf.interface import CACHE

__all__ = ["STATE", "ConvolutionLayer", "convolution_layer", "is_convolution"]

STATE: Final[Any] = (
    getattr(cache_utils, "LinearAttentionLayer", None)
    if hasattr(Cache, "is_recording_past")
    else None
)
"""The cache layer of a short convolution. Transformers takes tokens back from it since 5.21."""
_BASE: Any = object if STATE is None else STATE


class ConvolutionLayer(_BASE):  # type: ignore[misc]
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


def is_convolution(layer: Any, kind: str | None) -> bool:
    """Whether a layer holds the inputs of one convolution and no other state."""
    return bool(kind == "conv" and type(layer) is STATE and layer.number_of_states == 1)


def convolution_layer(layer: Any, index: int, seen: int) -> ConvolutionLayer:
    """The layer of a convolution whose cache holds `seen` tokens."""
    row_layer = ConvolutionLayer()
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
