"""What passes between the device and the background drafter's thread: nobody else waits.

Two ways: the ends of the texts come from the device, and trees go there. On a CUDA device both are
copied on streams of their own, from and to pinned memory. On a CPU the same steps are plain copies.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdraft import Continuations
from fastdraft.alignment import Trees

__all__ = ["COPIES", "Ends", "EndsCopy", "TreeBuffers"]

COPIES: Final = 128
"""Copies that may be on their way: while the thread indexes long prompts, steps go on. They take 16
bytes a row and token of the longest draft each."""
# Its streams and events have no types.
_cuda: Any = torch.cuda


class EndsCopy:
    """The ends of one step's texts on the host, once they are there."""

    def __init__(self, tensor: Tensor, event: Any, home: SimpleQueue[EndsCopy]) -> None:
        self._tensor = tensor
        self._array: NDArray[np.int32] = tensor.numpy()
        self._event = event
        self._home = home
        self._rows = 0

    def start(self, ends: Tensor, stream: Any) -> Any:
        """Begins to copy; gives what says that it is done, None where it is done at once."""
        self._rows = len(ends)
        self._tensor[: self._rows].copy_(ends, non_blocking=True)
        if self._event is not None:
            self._event.record(stream)
        return self._event

    def wait(self) -> NDArray[np.int32]:
        """The ends, (rows, width), until `free`. Waits for the device, on the calling thread."""
        if self._event is not None:
            self._event.synchronize()
        return self._array[: self._rows]

    def free(self) -> None:
        """Gives the memory back."""
        self._home.put(self)


class Ends:
    """Copies the ends of texts, (rows, width) at most, to the host. One thread sends, and never
    waits."""

    def __init__(self, device: torch.device, rows: int, width: int) -> None:
        self._cuda = device.type == "cuda"
        self._stream: Any = _cuda.Stream(device) if self._cuda else None
        self._last: Any = None
        self._free: SimpleQueue[EndsCopy] = SimpleQueue()
        for _ in range(COPIES):
            tensor = torch.empty(rows, width, dtype=torch.int32, pin_memory=self._cuda)
            # One that sleeps: a thread that spins takes the processor from the host's own.
            event = _cuda.Event(blocking=True) if self._cuda else None
            self._free.put(EndsCopy(tensor, event, self._free))

    def send(self, ends: Tensor) -> EndsCopy | None:
        """Starts to copy ends that the current stream writes; None if all copies are in use."""
        try:
            copy = self._free.get_nowait()
        except Empty:
            return None
        if self._cuda:
            self._stream.wait_stream(_cuda.current_stream(ends.device))
            with _cuda.stream(self._stream):
                self._last = copy.start(ends, self._stream)
        else:
            copy.start(ends, None)
        return copy

    def protect(self) -> None:
        """Has the current stream write the ends again only when they are copied."""
        if self._last is not None:
            _cuda.current_stream().wait_event(self._last)


class TreeBuffers:
    """The newest trees on the device. One thread publishes, another takes them.

    Neither waits for the other. Of three buffers one holds the newest trees, one may be in use, and
    one is free to be written.

    Args:
        device: Where they go.
        places, nodes: The most requests, and nodes of a tree.
        more: How many float32 values go there beside them.

    Attributes:
        continuations, numbers: for a `BackgroundDrafter` to write to, in memory that the device
            copies from.
        more: (more,) float32, the values beside them.
    """

    def __init__(self, device: torch.device, places: int, nodes: int, more: int = 0) -> None:
        self._cuda = device.type == "cuda"
        # All fields in one piece of memory, so that one copy carries them.
        begin = 3 * places * (1 + nodes)
        self._host = torch.zeros(begin + more, dtype=torch.int32, pin_memory=self._cuda)
        *fields, self.numbers = (
            field.numpy() for field in _trees_in(self._host[:begin], places, nodes)
        )
        self.continuations = Continuations(*fields)
        self.more: NDArray[np.float32] = self._host[begin:].view(torch.float32).numpy()
        self._begin = begin
        self._buffers = [torch.zeros_like(self._host, device=device) for _ in range(3)]
        self._trees = [_trees_in(each[:begin], places, nodes) for each in self._buffers]
        self._newest = self._in_use = 0
        self._stream: Any = _cuda.Stream(device) if self._cuda else None
        self._arrived: Any = _cuda.Event(blocking=True) if self._cuda else None
        self._used: list[Any] = [_cuda.Event() if self._cuda else None for _ in range(3)]

    def publish(self) -> None:
        """Copies all to the device, and makes it the newest. Waits for the copy."""
        free = next(each for each in range(3) if each not in (self._newest, self._in_use))
        if self._cuda:
            self._stream.wait_event(self._used[free])
            with _cuda.stream(self._stream):
                self._buffers[free].copy_(self._host, non_blocking=True)
                self._arrived.record(self._stream)
            self._arrived.synchronize()
        else:
            self._buffers[free].copy_(self._host)
        self._newest = free

    def take(self) -> tuple[Trees, Tensor]:
        """The newest trees that have arrived, and what goes with them; zeros before any did.

        They are to be read until `release` on the current stream.
        """
        while True:
            self._in_use = newest = self._newest
            # If newer ones came in between, the buffer may be written already.
            if newest == self._newest:
                more = self._buffers[newest][self._begin :].view(torch.float32)
                return self._trees[newest], more

    def release(self) -> None:
        """Says that what the current stream has to do with the trees is under way."""
        if self._cuda:
            self._used[self._in_use].record(_cuda.current_stream())


def _trees_in(flat: Tensor, places: int, nodes: int) -> Trees:
    """The fields of trees that lie in `flat` one after another."""
    columns = flat[: 3 * places].view(3, places)
    ids, parents, chances = flat[3 * places :].view(3, places, nodes)
    return Trees(columns[0], columns[1], ids, parents, chances.view(torch.float32), columns[2])
