"""What the environment says, where SGLang's worker has no option."""

from __future__ import annotations

import logging
import os
from typing import Any, Final

from fastdraft import Memory
from fastdraft.errors import InvalidValueError
from fastdraft.fleet import Replica
from fastdraft.serving.host import share

__all__ = ["bytes_of", "drafts_from_logits", "names_of", "replica_of"]

_MEMORY_URL: Final = "FASTDRAFT_MEMORY_URL"

_logger = logging.getLogger(__name__)


def bytes_of(variable: str) -> int | None:
    """A number of bytes from the environment; None where it is not set."""
    value = os.environ.get(variable)
    if not value:
        return None
    if not value.isdecimal():
        raise InvalidValueError(f"{variable} must be a number of bytes, got {value!r}")
    return int(value)


def names_of(variable: str, separator: str) -> list[str]:
    """Names or paths from the environment; none where it is not set."""
    return [name for name in os.environ.get(variable, "").split(separator) if name]


def drafts_from_logits(server_args: Any) -> bool:
    """Whether to draft from the target's logits. Raises InvalidValueError."""
    value = os.environ.get("FASTDRAFT_LOGITS") or "1"
    if value not in ("0", "1"):
        raise InvalidValueError(f"FASTDRAFT_LOGITS must be 0 or 1, got {value!r}")
    ranks = getattr(server_args, "tp_size", 1)
    if value == "1" and ranks > 1:
        # What each rank reads may differ in rounding, and all must draft the same.
        _logger.info("fastdraft: with tp_size %d nothing is drafted from the logits", ranks)
        return False
    return value == "1"


def replica_of(memory: Memory, server_args: Any) -> Replica | None:
    """Shares the memory where the environment says so. Raises InvalidValueError."""
    url = os.environ.get(_MEMORY_URL)
    if not url or not memory.max_bytes:
        return None
    ranks = getattr(server_args, "tp_size", 1)
    if ranks > 1:
        # Each rank would read at its own time.
        raise InvalidValueError(
            f"{_MEMORY_URL} must not be set with tp_size {ranks}, whose ranks must all draft the "
            f"same, got {url!r}"
        )
    model = str(getattr(server_args, "model_path", ""))
    return share(
        memory,
        url,
        model=model,
        tokenizer=str(getattr(server_args, "tokenizer_path", None) or model),
        revision=getattr(server_args, "revision", None),
    )
