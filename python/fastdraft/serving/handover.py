"""Hands a request from a server's HTTP front to the drafter, where both run in one process.

A server that passes nothing of a request on to its drafter still runs the request in one context,
and gives that context to the threads that decode.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from fastdraft.errors import InvalidValueError

__all__ = ["ASKED", "Asked", "memory_bytes"]


@dataclass
class Asked:
    """The options of one request for the drafter, and the counts that the drafter returns."""

    params: Mapping[str, Any] = field(default_factory=dict)
    """Its options, as `request_options` takes them."""
    prediction: str | None = None
    """The text that it expects."""
    counts: tuple[int, int] | None = None
    """The accepted and rejected tokens of its prediction: the drafter writes them."""


ASKED: Final[ContextVar[Asked | None]] = ContextVar("fastdraft_asked", default=None)
"""The request that is being answered; None for one that was not sent over HTTP."""


def memory_bytes() -> int:
    """The most memory for text of finished requests: `FASTDRAFT_MEMORY_BYTES`, else 1 GiB.

    Raises:
        InvalidValueError: It is no number.
    """
    value = os.environ.get("FASTDRAFT_MEMORY_BYTES") or str(1 << 30)
    if not value.isdecimal():
        raise InvalidValueError(f"FASTDRAFT_MEMORY_BYTES must be a number of bytes, got {value!r}")
    return int(value)
