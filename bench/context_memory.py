"""How much memory drafters take for a token of context."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import numpy as np

import baselines
from fastdraft import Engine
from fastdraft.replay import PEERS, EnginePeer


def bytes_a_token(drafter: str, text: np.ndarray, context: int, lookahead: int) -> float:
    """What a process grows by for a million tokens in requests of this context.

    To be called in a process of its own. A peer that keeps no index grows by its copy of the
    tokens. lookahead: the longest draft.
    """
    baselines.ensure()
    ours = drafter == "fastdraft"
    peer = EnginePeer(Engine()) if ours else PEERS[drafter](lookahead, context)
    warm = peer.start(text[:context])
    warm.propose(warm.argument)
    before = resident_bytes()
    count = max(1, 1_000_000 // context)
    requests = [peer.start(text[index * 50 :][:context]) for index in range(count)]
    for request in requests:
        request.propose(request.argument)
    return (resident_bytes() - before) / context / count


def resident_bytes() -> int:
    """The process's memory, without what was freed and the allocator keeps for later.

    It keeps some megabytes, as much for few tokens as for many.
    """
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
