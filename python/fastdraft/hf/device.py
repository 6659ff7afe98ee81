"""Numbers between host and device: in one copy, and without waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Transfer", "device_of", "in_one_copy", "lines_of", "on_device"]


def device_of(model: Any, home: torch.device) -> torch.device:
    """The device of the model's inputs: `home`, if accelerate keeps its embeddings away."""
    device: torch.device = model.device
    return home if device.type == "meta" else device


def on_device(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Numbers of the host on a device: all in one copy, which nobody waits for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return in_one_copy(device, arrays)


class Transfer:
    """Numbers of the host that go to a device together, as `on_device` sends them."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] = []
        self._sent: list[torch.Tensor] = []

    def add(self, array: NDArray[Any]) -> Callable[[], torch.Tensor]:
        """Adds an array. What is returned gives it on the device, once it has been sent."""
        index = len(self._arrays)
        self._arrays.append(array)
        return lambda: self._sent[index]

    def send(self, device: torch.device) -> None:
        self._sent = on_device(device, *self._arrays)


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


def lines_of(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Lines of `logits`, of which they are a view where all lie side by side."""
    first, count = next(iter(indices), 0), len(indices)
    if list(indices) == list(range(first, first + count)):
        return logits if count == len(logits) else logits[first : first + count]
    # By index: the size of a mask's selection is not known before the device has computed it.
    return logits[on_device(logits.device, np.array(indices))[0]]
