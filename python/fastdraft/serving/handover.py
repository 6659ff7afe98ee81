"""Hands a request from a server's HTTP front to the drafter, where both run in one process.

A server that passes nothing of a request on to its drafter still runs the request in one context,
and gives that context to the threads that decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["ASKED", "Asked"]


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
