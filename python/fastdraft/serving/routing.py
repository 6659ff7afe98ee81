"""Which replica a request goes to: the one that knows its prompt, as long as it has room."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from fastdraft.errors import InvalidValueError

__all__ = ["choose_server"]


def choose_server(prompt_ids: ArrayLike, loads: Mapping[str, int], *, spread: float = 1.25) -> str:
    """The server for a request: requests of a prompt go to one, as long as it has room.

    Each prompt ranks the servers in an order of its own (rendezvous hashing): nobody keeps a table,
    and when a server leaves only its own prompts go elsewhere. The first in this order is taken
    whose load stays within `spread` times the mean. A full server's requests go to the next one,
    which knows the prompt too from then on.

    >>> choose_server([1, 2, 3], {"first": 9, "second": 0})
    'second'

    Args:
        prompt_ids: (tokens,), the prompt of the request's first turn.
        loads: The requests that each server has, by its name. Prompts rank names, so keep these
            over restarts.
        spread: At least 1. More keeps prompts together, less balances loads.

    Raises:
        InvalidValueError: `spread` is below 1, or there is no server.

    O(servers + tokens).
    """
    if not spread >= 1:
        raise InvalidValueError(f"spread must be at least 1, got {spread!r}")
    if not loads:
        raise InvalidValueError("loads must have a server, got none")
    most = spread * (sum(loads.values()) + 1) / len(loads)
    # One whose load is at most the mean has room.
    room = [name for name, load in loads.items() if load < most]
    prompt = np.asarray(prompt_ids, np.int32).tobytes()
    key = hashlib.blake2b(prompt, digest_size=16).digest()
    return max(room, key=lambda name: hashlib.blake2b(name.encode(), key=key).digest())
