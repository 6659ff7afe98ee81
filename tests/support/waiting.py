"""Guards for code that must not wait for a device: one raises where a tensor is read, one counts.

On a CPU such calls do not wait, and the guard finds them all the same. On a CUDA device PyTorch's
own mode finds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Methods that read memory past PyTorch's dispatcher, or say that they read it.
_READS = ("item", "tolist", "cpu", "numpy", "__array__", "__dlpack__")
# Operations whose result on the host, or whose result's size, depends on values.
_OPERATIONS = (
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
)


class Waited(AssertionError):
    """Something read a tensor back."""


class _Guard(TorchDispatchMode):
    def __init__(self, waits: Callable[[str], None]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _OPERATIONS:
            self._waits(f"{name} waits for the device")
        if name == "index" and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        ):
            self._waits("an index of booleans waits for the device")
        if name in ("copy_", "_to_copy"):
            there = kwargs.get("device") if name == "_to_copy" else args[1].device
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,)))
            if waits and there is not None and torch.device(there).type != args[0].device.type:
                self._waits("a blocking copy waits for the device")
        return func(*args, **kwargs)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises `Waited` where a value is read back from a tensor, or a copy blocks. In one thread."""

    def refuse(reason: str) -> None:
        raise Waited(reason)

    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _noticing(refuse):
            yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Lists each time that a value is read back from a tensor, or a copy blocks. In one thread.

    One read that goes through others, as `tolist` does, counts once.
    """
    waits: list[str] = []
    with _noticing(waits.append):
        yield waits


# True within a read that was noticed already, or must not be noticed.
_inside = False


@contextmanager
def unnoticed() -> Iterator[None]:
    """Reads by a plain version that stands for work on a device are not noticed."""
    global _inside
    before, _inside = _inside, True
    try:
        yield
    finally:
        _inside = before


def as_on_a_device(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A plain version that stands for a launch on a device, which reads nothing back."""

    def launch(*operands: Any) -> Any:
        with unnoticed():
            return plain(*operands)

    return launch


@contextmanager
def _noticing(waits: Callable[[str], None]) -> Iterator[None]:
    def noticed(reason: str) -> None:
        if not _inside:
            waits(reason)

    def reading(name: str) -> Callable[..., Any]:
        real = getattr(torch.Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            noticed(f"Tensor.{name} waits for the device")
            with unnoticed():
                return real(*args, **kwargs)

        return call

    with (
        _Guard(noticed),
        mock.patch.multiple(torch.Tensor, **{name: reading(name) for name in _READS}),
    ):
        yield
