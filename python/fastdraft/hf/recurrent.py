"""Layers that hold a state instead of keys and values, in a cache whose rows have own lengths.

A convolution looks at the inputs of the last few tokens. Its layer keeps those of each row that a
rejected draft could bring back, and cuts them anew at every forward.

A recurrent state cannot be cropped: it forgets what it was before a token. So it is kept twice, as
it is now and as it was at the latest commit. Where a draft is accepted whole, the present state is
right, and the next forward commits it. Otherwise the next forward begins at the commit, with the
accepted tokens since then, the pending ones, before its own.

So a single row needs no forward for its state alone: a step without a draft commits. In a batch a
row that is narrower than the forward cannot commit, as padding changes its state too; there a
forward over pending tokens alone commits the rows that fill it, once pending tokens have cost as
much time as it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import cache_utils
from transformers.cache_utils import Cache

from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.hf.device import Transfer, on_device
from fastdraft.hf.interface import CACHE

__all__ = ["STATE", "Beginning", "Commits", "RecurrentLayer", "States"]

STATE: Final[Any] = (
    getattr(cache_utils, "LinearAttentionLayer", None)
    if hasattr(Cache, "is_recording_past")
    else None
)
"""The cache layer of convolutions and recurrent states, as transformers has it since 5.21."""
_BASE: Any = object if STATE is None else STATE


class Beginning(NamedTuple):
    """How the states of a forward begin. Of each, `None` stands for no row, True for all; else it
    gives a bool tensor (rows,) on the device.

    Attributes:
        back: The rows that go back to their latest commit.
        commits: The rows whose states are committed, after that.
        copies: Whether the forward may write to the tensors that were committed.
    """

    back: Any
    commits: Any
    copies: bool


class Commits:
    """The length of text that the recurrent states of each row stand for: now, and at its latest
    commit."""

    def __init__(self) -> None:
        self._now: list[int] | None = None
        self._committed: list[int] = []

    def starts(self, lengths: list[int]) -> list[int]:
        """The token from which each row has to be forwarded, so that it goes on behind `lengths`.

        Those between are pending: they have been forwarded before, and stand in the cache of
        attention layers.
        """
        if self._now is None:
            return lengths
        rows = zip(lengths, self._now, self._committed, strict=True)
        return [now if 0 <= now <= length else committed for length, now, committed in rows]

    def plan(
        self,
        transfer: Transfer,
        lengths: Sequence[int],
        counts: Sequence[int],
        width: int,
        floors: Sequence[int],
    ) -> Beginning:
        """Plans a forward of `width` tokens, as `RowCache.plan`."""
        if self._now is None:
            self._now, self._committed = list(lengths), [-1] * len(lengths)
        starts = np.array(lengths)
        back = starts != self._now
        if (starts != self._committed)[back].any():
            row = int(np.flatnonzero(back & (starts != self._committed))[0])
            raise FastdraftError(
                f"row {row} of recurrent layers must go on at token {self._now[row]} or "
                f"{self._committed[row]}, got {starts[row]}"
            )
        commits = starts <= floors
        # A forward over a single token may update states where they are.
        overwrites = width == 1
        whole = np.array(counts) == width
        self._now = np.where(whole, starts + width, -1).tolist()
        self._committed = np.where(commits, -1 if overwrites else starts, self._committed).tolist()
        copies = overwrites and not commits.all()
        if copies:
            self._committed = np.where(commits, starts, self._committed).tolist()
        return Beginning(_some(transfer, back), _some(transfer, commits), copies)

    def keep(self, slots: Sequence[int]) -> None:
        if self._now is not None:
            self._now = [self._now[slot] for slot in slots]
            self._committed = [self._committed[slot] for slot in slots]


def _some(transfer: Transfer, rows: NDArray[np.bool_]) -> Any:
    """Rows as `Beginning` has them."""
    if not rows.any():
        return None
    return True if rows.all() else transfer.add(rows)


class States:
    """The recurrent states of a cache or one of its layers, (rows, ...) each.

    Args:
        now: The list or dict in which the model finds them and leaves them.
    """

    def __init__(self, now: Any) -> None:
        self._now = now
        self._committed: dict[int, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return any(True for _ in self._items())

    def _items(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Their keys and values at present."""
        keys = list(self._now) if isinstance(self._now, dict) else range(len(self._now))
        return ((key, self._now[key]) for key in keys if isinstance(self._now[key], torch.Tensor))

    def begin(self, beginning: Beginning) -> None:
        for key, state in self._items():
            committed = self._committed.get(key, state)
            state = _where(beginning.back, committed, state)
            self._committed[key] = _where(beginning.commits, state, committed)
            self._now[key] = state.clone() if beginning.copies else state

    def keep(self, slots: Sequence[int]) -> None:
        """As `RowCache.keep`."""
        for key, state in self._items():
            self._now[key] = state[list(slots)]
        for key, state in self._committed.items():
            self._committed[key] = state[list(slots)]


def _where(rows: Any, chosen: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The states `chosen` in these rows, as `Beginning` has them, else the other ones."""
    if rows is None or rows is True:
        return other if rows is None else chosen
    mask: torch.Tensor = rows().to(chosen.device)
    return torch.where(mask.view(-1, *[1] * (chosen.dim() - 1)), chosen, other)


class RecurrentLayer(_BASE):  # type: ignore[misc]
    """The inputs of causal convolutions, of each row those of the last tokens, and the recurrent
    states.

    Column c of row b holds the input of token firsts[b] + c. Before the first token are zeros.

    Args:
        count: How many convolutions or states of each kind the layer has at most.
    """

    def __init__(self, count: int = 1) -> None:
        super().__init__(number_of_states=count)
        # Tells the model to call `update_conv_state` in every forward, also over a single token.
        self.record_past = True
        self.firsts: dict[int, list[int]] = {}
        # Tokens of the longest row.
        self.seen = dict.fromkeys(range(count), 0)
        self.states = States(self.recurrent_states)
        # The tokens that the next forward writes from, and how far before a later one may begin.
        self._next: tuple[list[int], int] | None = None

    def prepare_states(self, lengths: Sequence[int], floors: Sequence[int]) -> None:
        """As `RowCache.plan`."""
        furthest = max(length - floor for length, floor in zip(lengths, floors, strict=True))
        self._next = list(lengths), max(furthest, 0)
        self.seen = dict.fromkeys(self.seen, max(lengths))

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
        lengths, furthest = self._next or ([self.seen[state_idx]] * rows, 0)
        # A forward needs one input less; `write_states` needs as many as the kernel has.
        behind = conv_kernel_size + furthest
        held = conv_states.new_zeros((*conv_states.shape[:2], behind))
        earlier = self.conv_states[state_idx]
        if earlier is not None:
            firsts = self.firsts[state_idx]
            starts = [at - behind - first for at, first in zip(lengths, firsts, strict=True)]
            held = _columns_from(earlier[:rows], starts, behind)
        inputs = torch.cat([held, conv_states], dim=2)
        self.conv_states[state_idx] = inputs
        self.firsts[state_idx] = [length - behind for length in lengths]
        self.seen[state_idx] = max(lengths) + width
        self.conv_kernel_size[state_idx] = conv_kernel_size
        self.has_previous_state[state_idx] = True
        return inputs[:, :, behind - conv_kernel_size + 1 :]

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        earlier = self.recurrent_states[state_idx]
        state = recurrent_states if earlier is None else recurrent_states.to(earlier.dtype)
        # Replaces the earlier one, which stays the committed state.
        self.recurrent_states[state_idx] = state
        return state

    def keep_states(self, slots: Sequence[int]) -> None:
        """As `RowCache.keep`, of the convolutions' inputs."""
        for index, inputs in self.conv_states.items():
            if inputs is not None:
                self.conv_states[index] = inputs[list(slots)]
                self.firsts[index] = [self.firsts[index][slot] for slot in slots]

    def read_states(self, source: Any, index: int, length: int) -> None:
        """Takes the states of layer `index` of a cache that holds `length` tokens."""
        if not all(source.has_previous_state.values()):
            if length:
                raise InvalidValueError(
                    f"{CACHE} must hold the states of its {length} tokens, got layer {index} "
                    "without"
                )
            return
        # Copies: the source's own are emptied, and do not move in memory.
        for at, states in source.conv_states.items():
            if states is not None:
                size = source.conv_kernel_size[at]
                self.conv_states[at] = states[:, :, -size:].clone()
                self.firsts[at] = [length - size] * len(states)
                self.seen[at] = length
                self.conv_kernel_size[at] = size
        for at, states in source.recurrent_states.items():
            self.recurrent_states[at] = None if states is None else states.clone()
        self.has_previous_state.update(source.has_previous_state)

    def write_states(self, target: Any, length: int) -> None:
        """Hands the states of a single row over, as `RowCache.write_back`."""
        for at in range(self.number_of_states):
            inputs, self.conv_states[at] = self.conv_states[at], None
            if inputs is not None:
                size = self.conv_kernel_size[at]
                states = _columns_from(inputs[:1], [length - size - self.firsts[at][0]], size)
                held = target.conv_states[at]
                if held is None or held.shape != states.shape:
                    STATE.lazy_initialization(
                        target, conv_states=states, state_idx=at, conv_kernel_size=size
                    )
                target.conv_states[at].copy_(states)
            state, self.recurrent_states[at] = self.recurrent_states[at], None
            if state is not None:
                if target.recurrent_states[at] is None:
                    STATE.lazy_initialization(target, recurrent_states=state, state_idx=at)
                target.recurrent_states[at].copy_(state)
            target.has_previous_state[at] = self.has_previous_state[at]


def _columns_from(states: torch.Tensor, firsts: Sequence[int], count: int) -> torch.Tensor:
    """Columns firsts[b] to firsts[b] + count of each row; zeros stand for negative columns."""
    missing = max(0, -min(firsts))
    if missing:
        states = torch.nn.functional.pad(states, (missing, 0))
    if min(firsts) == max(firsts):
        return states.narrow(2, firsts[0] + missing, count)
    (columns,) = on_device(states.device, np.array(firsts)[:, None] + missing + np.arange(count))
    return states.gather(2, columns[:, None].expand(-1, states.shape[1], -1))
