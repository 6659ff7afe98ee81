"""A generation seen from outside: its model's forwards, and the calls of its streamer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

__all__ = ["Recorder", "counted_forwards"]


@contextmanager
def counted_forwards(model: Any) -> Iterator[list[int]]:
    """A list that gets the number of tokens a row with each forward of the model."""
    widths: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _, arguments, __: widths.append(arguments[0].shape[1])
    )
    yield widths
    handle.remove()


class Recorder(BaseStreamer):
    """A streamer that remembers every call, and the number of forwards before it.

    Args:
        forwards: Has an entry for each forward.
    """

    def __init__(self, forwards: list[int] | None = None) -> None:
        self.calls: list[Any] = []
        self.forwards_at: list[int] = []
        self._forwards = [] if forwards is None else forwards

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())
        self.forwards_at.append(len(self._forwards))

    def end(self) -> None:
        self.calls.append("end")
