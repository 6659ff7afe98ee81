"""Memories whose process is killed at any instant, and started again."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from killed_memory import check_killed

__all__ = ["case"]

_KILLS = 10


def case(seed: int) -> Counter[str]:
    """A folder, and several processes that are killed one after another."""
    with tempfile.TemporaryDirectory() as folder:
        saved = check_killed(Path(folder), _KILLS, seed)
    return Counter({"processes killed while they saved": _KILLS, "documents saved": saved})
