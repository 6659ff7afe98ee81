"""How kernels are laid out on a device: a table, no measurement at run time.

What a kernel is compiled for depends on the type of the logits, their strides, the vocabulary and
which operands there are, never on the size of the batch: a server has met all of its kernels once
each was called, which `verification.warm_up` does.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch

from fastdraft.kernels.language import next_power_of_2
from fastdraft.kernels.operands import CHUNK

# Loads of 16 bytes a thread are the widest, four warps of them 2 KiB.
_LOAD_BYTES: Final = 16
WARPS: Final = 4

# Chunks that a program looks at together: one a warp of 32 threads (64 on AMD hold two).
TILE_CHUNKS: Final = WARPS * (2 if torch.version.hip else 1)

# To find the request of a row, each warp reads the first FEW_REQUESTS offsets by itself, without
# barriers: in a small batch the latency counts. The others are read in blocks of REQUESTS.
FEW_REQUESTS: Final = 32
REQUESTS: Final = 1024

# Slots of a draft that are looked at together: what one warp holds needs no barriers.
SLOTS: Final = 32

# Positions of a text that are looked at together: a few a thread.
_SCANNED: Final = 4 * 32 * WARPS

# The wait for a wave's stores on AMD: by the counter of stores, up to gfx9 by that of loads.
WAIT_GFX9: Final = "s_waitcnt vmcnt(0)"
_WAITS: Final = {
    "gfx10": "s_waitcnt_vscnt null, 0x0",
    "gfx11": "s_waitcnt_vscnt null, 0x0",
    "gfx12": "s_wait_storecnt 0x0",
}

# How many programs run at a time: eight on each multiprocessor of a large device. As few as that
# are best all there from the start, since a few left for later would run alone; more of them are
# best short, but not so short that they spend their time on beginning and end.
_RESIDENT: Final = 1024
_MOST_TILES: Final = 6
_SHORT_TILES: Final = 4


class Split(NamedTuple):
    """How rows are split: the programs a row, and the tiles that each goes over."""

    programs: int
    tiles: int


WHOLE: Final = Split(1, 0)
"""A program a row."""


def width(dtype: torch.dtype) -> int:
    """How many logits one load takes."""
    return _LOAD_BYTES // dtype.itemsize


def unit(logits: torch.Tensor) -> int:
    """How many logits are one load: as many as it takes where all rows begin with one, or 1."""
    whole = width(logits.dtype)
    begins = logits.data_ptr() % _LOAD_BYTES == 0 and logits.stride(0) % whole == 0
    return whole if begins and logits.stride(1) == 1 else 1


def split_chunks(rows: int, vocabulary: int) -> Split:
    tiles = -(-vocabulary // (TILE_CHUNKS * CHUNK))
    for each in range(1, _MOST_TILES + 1):
        programs = -(-tiles // each)
        if rows * programs <= _RESIDENT:
            return Split(programs, each)
    return Split(-(-tiles // _SHORT_TILES), _SHORT_TILES)


@functools.cache
def wait_for_stores() -> str | None:
    """The instruction with which an AMD wave waits until its stores have landed; else None."""
    if torch.version.hip is None:
        return None
    architecture = torch.cuda.get_device_properties().gcnArchName
    return _WAITS.get(architecture[:5], WAIT_GFX9)


def scan_block(window: int) -> int:
    """How many of `window` positions are looked at together."""
    return min(next_power_of_2(window), _SCANNED)


def chunks_block(vocabulary: int) -> int:
    """A power of two that is at least the number of chunks."""
    return next_power_of_2(-(-vocabulary // CHUNK))
