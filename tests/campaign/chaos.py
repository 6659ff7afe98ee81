"""Replicas that come and go over a store that fails in all ways that stores fail in."""

from __future__ import annotations

import logging
from collections import Counter

from chaotic_fleet import check_chaos

__all__ = ["case"]

_DOCUMENTS = 1000


def case(seed: int) -> Counter[str]:
    """A fleet and its documents."""
    logging.disable(logging.WARNING)
    return check_chaos(seed, _DOCUMENTS)
