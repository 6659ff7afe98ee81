"""Copies between the device and the background drafter's thread: nobody else waits.

Two ways: the ends of the texts come from the device, and trees go there. On a CUDA device both are
copied on streams of their own, from and to pinned memory. On a CPU streams and events do nothing.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdraft import Continuations
from fastdraft.late.alignment import Trees

__all__ = ["COPIES", "Ends", "EndsCopy", "TreeBuffers"]

COPIES: Final = 128
"""Copies that may be on their way: while the thread indexes long prompts, steps go on. They take 16
bytes a row and token of the longest draft each."""


class EndsCopy:
    """The ends of one step's texts on the host, once they are there."""

    def __init__(
        self, ends: Tensor, bounds: Tensor, event: Any, home: SimpleQueue[EndsCopy]
    ) -> None:
        self._ends, self._bounds = ends, bounds
        self._arrays: tuple[NDArray[np.int32], NDArray[np.int32]] = ends.numpy(), bounds.numpy()
        self._event = event
        self._home = home
        self._rows = 0

    def start(self, ends: Tensor, bounds: Tensor) -> Any:
        """Begins to copy on the current stream; gives the event that ends the copy."""
        self._rows = len(ends)
        self._ends[: self._rows].copy_(ends, non_blocking=True)
        self._bounds[: self._rows + 1].copy_(bounds, non_blocking=True)
        self._event.record()
        return self._event

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ends, (rows, width), and where each row's logits began, (rows + 1,), until `free`.
        Waits for the device, on the calling thread."""
        self._event.synchronize()
        ends, bounds = self._arrays
        return ends[: self._rows], bounds[: self._rows + 1]

    def free(self) -> None:
        """Gives the memory back."""
        self._home.put(self)


class Ends:
    """Copies the ends of texts, (rows, width) at most, to the host. One thread sends, and never
    waits."""

    def __init__(self, device: torch.device, rows: int, width: int) -> None:
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)
        self._last = _event(device)
        self._free: SimpleQueue[EndsCopy] = SimpleQueue()
        pinned: dict[str, Any] = {"dtype": torch.int32, "pin_memory": device.type == "cuda"}
        for _ in range(COPIES):
            memory = torch.empty(rows, width, **pinned), torch.empty(rows + 1, **pinned)
            self._free.put(EndsCopy(*memory, _event(device), self._free))

    def send(self, ends: Tensor, bounds: Tensor) -> EndsCopy | None:
        """Starts to copy ends, and where each row's logits begin, which the current stream writes;
        None if all copies are in use."""
        try:
            copy = self._free.get_nowait()
        except Empty:
            return None
        self._stream.wait_stream(self._streams.current_stream(ends.device))
        with self._streams.stream(self._stream):
            self._last = copy.start(ends, bounds)
        return copy

    def protect(self) -> None:
        """Has the current stream write the ends again only when they are copied."""
        self._last.wait()


class TreeBuffers:
    """The newest trees on the device. One thread publishes, another takes them.

    Neither waits for the other. Of three buffers one holds the newest trees, one may be in use, and
    one is free to be written.

    Args:
        device: Where they go.
        slots, nodes: The most requests, and nodes of a tree.
        more: How many float32 values go there beside them.

    Attributes:
        continuations, numbers: for a `BackgroundDrafter` to write to, in memory that the device
            copies from.
        more: (more,) float32, the values beside them.
    """

    def __init__(self, device: torch.device, slots: int, nodes: int, more: int = 0) -> None:
        pinned: dict[str, Any] = {"dtype": torch.int32, "pin_memory": device.type == "cuda"}
        host = _Buffer(torch.zeros(3 * slots * (1 + nodes) + more, **pinned), slots, nodes)
        *fields, self.numbers = (field.numpy() for field in host.trees)
        self.continuations = Continuations(*fields)
        self.more: NDArray[np.float32] = host.more.numpy()
        self._host = host
        self._buffers = [
            _Buffer(torch.zeros_like(host.flat, device=device), slots, nodes) for _ in range(3)
        ]
        # By buffer: the slots of which it has other nodes than the host.
        self._stale = np.zeros((3, slots), dtype=bool)
        self._staged = torch.empty(slots * (1 + 3 * nodes), **pinned)
        # Made once: to make an array of a tensor counts as a wait.
        self._staged_values, self._node_values = self._staged.numpy(), host.nodes.numpy()
        self._newest = self._in_use = 0
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)
        self._arrived = _event(device)
        self._used = [_event(device) for _ in range(3)]

    def publish(self, slots: NDArray[np.int64]) -> int:
        """Copies to the device what has changed, and makes it the newest. Waits for the copies.

        Args:
            slots: Those whose nodes have changed since the last call.

        Returns:
            The bytes that were copied.
        """
        free = next(each for each in range(3) if each not in (self._newest, self._in_use))
        self._stale[:, slots] = True
        changed = np.flatnonzero(self._stale[free])
        host, n = self._host, len(changed)
        # Their slots, and their nodes behind.
        values = self._node_values[:, changed]
        self._staged_values[:n] = changed
        self._staged_values[n : n + values.size] = values.ravel()
        staged = self._staged[: n + values.size]
        self._used[free].wait(self._stream)
        with self._streams.stream(self._stream):
            buffer = self._buffers[free]
            buffer.head.copy_(host.head, non_blocking=True)
            arrived = staged.to(buffer.flat.device, non_blocking=True)
            buffer.nodes.index_copy_(1, arrived[:n].long(), arrived[n:].view(values.shape))
            self._arrived.record()
        self._arrived.synchronize()
        self._stale[free] = False
        self._newest = free
        return 4 * (len(host.head) + len(staged))

    def take(self) -> tuple[Trees, Tensor]:
        """The newest trees that have arrived, and what goes with them; zeros before any did.

        They are to be read until `release` on the current stream.
        """
        while True:
            self._in_use = newest = self._newest
            # If newer ones arrived in between, the buffer may be written already.
            if newest == self._newest:
                return self._buffers[newest].trees, self._buffers[newest].more

    def release(self) -> None:
        """Says that what the current stream has to do with the trees is under way."""
        self._used[self._in_use].record()


def _event(device: torch.device) -> Any:
    """An event of the device. It sleeps: a thread that spins takes the processor from the host."""
    streams: Any = torch.get_device_module(device)
    return streams.Event(**({"blocking": True} if device.type == "cuda" else {}))


class _Buffer:
    """Trees in one piece of memory, values of which a slot has one at first.

    Attributes:
        flat: int32, all of it.
        head: What is copied each time: the trees' values by slot, and `more`.
        nodes: (3, slots, nodes), a node's token, parent and probability.
        more: float32, what goes with the trees.
        trees: All but `more`.
    """

    def __init__(self, flat: Tensor, slots: int, nodes: int) -> None:
        self.flat = flat
        end = len(flat) - 3 * slots * nodes
        self.head = flat[:end]
        self.more = flat[3 * slots : end].view(torch.float32)
        self.nodes = flat[end:].view(3, slots, nodes)
        bases, counts, requests = flat[: 3 * slots].view(3, slots)
        ids, parents, values = self.nodes
        self.trees = Trees(bases, counts, ids, parents, values.view(torch.float32), requests)
