"""Memory that verification on a device works in: made once and used at every step, or for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastdraft.errors import InvalidValueError
from fastdraft.kernels.operands import CHUNK, Batch, Verified

T = TypeVar("T")

# Parts of a chunk that filters look at on their own.
PARTS: Final = 16
# The most of a row's likeliest tokens.
LIKELIEST: Final = 8
# Views that a workspace keeps, for batches of different sizes, a kilobyte or so each.
_MOST_VIEWS: Final = 1024


class Size(NamedTuple):
    """The size of a batch, or the largest one."""

    rows: int
    vocabulary: int
    requests: int
    max_draft: int

    @property
    def lengths(self) -> dict[str, int]:
        """The largest values of the buffers' dimensions."""
        return {
            **self._asdict(),
            "chunks": -(-self.vocabulary // CHUNK),
            "parts": PARTS,
            "likeliest": LIKELIEST,
            "emitted": self.max_draft + 1,
        }


class Buffer(NamedTuple):
    """A buffer's type, by its dimensions. One that starts at zero is zero again after each
    verification."""

    dimensions: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    zero: bool = False

    def make(self, lengths: dict[str, int], device: torch.device) -> Tensor:
        shape = [lengths[each] for each in self.dimensions]
        return (torch.zeros if self.zero else torch.empty)(shape, dtype=self.dtype, device=device)


_ROWS: Final = ("rows",)
_CHUNKS: Final = ("rows", "chunks")
_PARTS: Final = ("rows", "chunks", "parts")
_REQUESTS: Final = ("requests",)
_EMITTED: Final = ("requests", "emitted")
BUFFERS: Final = {
    # Packed, the key of each row's maximum and the row's token.
    "row_results": Buffer(_ROWS, torch.int64),
    "row_logprobs": Buffer(_ROWS),
    "row_raw_logprobs": Buffer(_ROWS),
    # How many programs have left their part of a row, of a request.
    "row_arrivals": Buffer(_ROWS, torch.int32, zero=True),
    "request_arrivals": Buffer(_REQUESTS, torch.int32, zero=True),
    # Row statistics: of each chunk the maximum m and the sum of exp((x - m) / T); the same of the
    # unchanged logits, at temperature 1.
    "chunk_maximum": Buffer(_CHUNKS),
    "chunk_sum": Buffer(_CHUNKS),
    "raw_maximum": Buffer(_CHUNKS),
    "raw_sum": Buffer(_CHUNKS),
    # The tokens that the filters of a row keep: the logits above `lowest`, and of those equal to it
    # the tokens up to `last_tied`. On the way there: the maxima of the parts, the parts that
    # matter, and how many of each equal `lowest`.
    "lowest": Buffer(_ROWS),
    "last_tied": Buffer(_ROWS, torch.int32),
    "part_maximum": Buffer(_PARTS),
    "part_list": Buffer(_PARTS, torch.int32),
    "part_tied": Buffer(_PARTS, torch.int8),
    # Rejection sampling: log(p / q) of each row's draft token; log k of each number of draft tokens
    # that may be kept, see `rejection._plan`; maxima and sums of the draft logits' chunks; sums of
    # the residual's chunks.
    "row_ratios": Buffer(_ROWS),
    "row_log_k": Buffer(_ROWS),
    "draft_maximum": Buffer(_CHUNKS),
    "draft_sum": Buffer(_CHUNKS),
    "residual_sum": Buffer(_CHUNKS),
    # Results.
    "token_ids": Buffer(_EMITTED, torch.int32),
    "lengths": Buffer(_REQUESTS, torch.int32),
    "status": Buffer(_REQUESTS, torch.int32),
    "path": Buffer(("requests", "max_draft"), torch.int32),
    "logprobs": Buffer(_EMITTED),
    "raw_logprobs": Buffer(_EMITTED),
    "likeliest_ids": Buffer(("rows", "likeliest"), torch.int32),
    "likeliest_probabilities": Buffer(("rows", "likeliest")),
}


class Workspace:
    """Scratch memory and results of verification on one device, for batches up to a size.

    A verification with a workspace allocates nothing and gives its results in the workspace's
    memory: the next verification with it overwrites them. It serves one stream at a time. Its
    memory stays where it is, so a CUDA graph may hold on to it.

    Args:
        device: that of the logits.
        max_rows: the most rows of logits in a batch: drafted tokens and requests together.
        max_requests: the most requests in a batch.
        vocabulary: the most logits in a row.
        max_draft: the longest draft; the results of the whole workspace have max_draft + 1 columns.

    Raises:
        InvalidValueError: a size is below 1, max_draft below 0.

    Attributes:
        size: The largest batch.
        device: The device.
        kernels: Compiled kernels and what they are launched with, by what they were compiled for.
        has_checked: Whether operands on the CPU have been checked whole in a verification with it.
            Later ones are checked in shape and type alone, as operands on a device are.

    It takes about 175 bytes for each 1024 logits of the largest batch.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        max_rows: int,
        max_requests: int,
        vocabulary: int,
        max_draft: int,
    ) -> None:
        for name, value, least in (
            ("max_rows", max_rows, 1),
            ("max_requests", max_requests, 1),
            ("vocabulary", vocabulary, 1),
            ("max_draft", max_draft, 0),
        ):
            if value < least:
                raise InvalidValueError(f"{name} must be at least {least}, got {value}")
        self.size = Size(max_rows, vocabulary, max_requests, max_draft)
        # As tensors have it: "cuda" is the current one.
        self.device = torch.empty(0, device=device).device
        self.has_checked = False
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[object, ...], Any] = {}
        self.kernels: dict[tuple[object, ...], tuple[Any, ...]] = {}
        if self.device.type != "cpu":
            for name in BUFFERS:
                self._buffer(name)
        if self.device.type == "cuda":
            # Zero on whatever stream they are used.
            torch.cuda.current_stream(self.device).synchronize()

    def _buffer(self, name: str) -> Tensor:
        if name not in self._buffers:
            # On a CPU, where the plain version needs none.
            self._buffers[name] = BUFFERS[name].make(self.size.lengths, self.device).flatten()
        return self._buffers[name]

    def has_room(self, size: Size) -> bool:
        """True if a batch of this size fits."""
        # Asked at every step: a loop would take four times as long.
        rows, vocabulary, requests, max_draft = self.size
        return (
            size[0] <= rows
            and size[1] <= vocabulary
            and size[2] <= requests
            and size[3] <= max_draft
        )

    def take(self, name: str, size: Size) -> Tensor:
        """The buffer of a name for a batch of a size, contiguous."""
        lengths = size.lengths
        shape = [lengths[each] for each in BUFFERS[name].dimensions]
        return self._buffer(name)[: math.prod(shape)].view(shape)

    def kept(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """The result of `make` for this key, which has the batch's size.

        Sizes come again at every step, and the views of a verification take longer to make than its
        launches.
        """
        found: T | None = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
                self.kernels.clear()
            found = self._views[key] = make()
        return found


class Scratch(NamedTuple):
    """The buffers that the kernels of one verification work in, as `BUFFERS` has them.

    None for those that it does not need. Contiguous, in the batch's size.
    """

    row_results: Tensor | None = None
    row_logprobs: Tensor | None = None
    row_raw_logprobs: Tensor | None = None
    row_arrivals: Tensor | None = None
    request_arrivals: Tensor | None = None
    chunk_maximum: Tensor | None = None
    chunk_sum: Tensor | None = None
    raw_maximum: Tensor | None = None
    raw_sum: Tensor | None = None
    lowest: Tensor | None = None
    last_tied: Tensor | None = None
    part_maximum: Tensor | None = None
    part_list: Tensor | None = None
    part_tied: Tensor | None = None
    row_ratios: Tensor | None = None
    row_log_k: Tensor | None = None
    draft_maximum: Tensor | None = None
    draft_sum: Tensor | None = None
    residual_sum: Tensor | None = None

    @classmethod
    def take(cls, batch: Batch, *names: str) -> Scratch:
        """The named ones, and what log-probabilities need if the batch asks for them."""
        if batch.logprobs:
            names += ("row_logprobs",)
        if batch.raw_logprobs:
            names += ("row_raw_logprobs", "raw_maximum", "raw_sum")
        return take(batch, names, lambda of: cls(**{name: of(name) for name in names}))

    def only(self, batch: Batch, *names: str) -> Scratch:
        def make(_: object) -> Scratch:
            return Scratch(**{name: getattr(self, name) for name in names})

        return take(batch, names, make)


def take_output(batch: Batch) -> Verified:
    """The results of a verification, which kernels fill."""
    logprobs, raw_logprobs = batch.logprobs, batch.raw_logprobs

    def make(of: Callable[[str], Tensor]) -> Verified:
        return Verified(
            of("token_ids"),
            of("lengths"),
            of("status"),
            of("path"),
            of("logprobs") if logprobs else None,
            of("raw_logprobs") if raw_logprobs else None,
        )

    return take(batch, (Verified, logprobs, raw_logprobs), make)


def take(batch: Batch, key: tuple[object, ...], make: Callable[[Callable[[str], Tensor]], T]) -> T:
    """The result of `make` for buffers in the batch's size, which it is given by name.

    They are the workspace's, and then made once for a key and size, or new ones.
    """
    rows, vocabulary = batch.logits.shape
    size = Size(rows, vocabulary, batch.requests, batch.max_draft)
    workspace, device = batch.workspace, batch.logits.device
    if workspace is not None:
        return workspace.kept((*size, *key), lambda: make(lambda name: workspace.take(name, size)))
    lengths = size.lengths
    return make(lambda name: BUFFERS[name].make(lengths, device))
