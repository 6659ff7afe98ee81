"""Settings from environment variables, for which SGLang's worker has no options."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from fastdraft.errors import InvalidValueError
from fastdraft.serving.host import Target
from fastdraft.serving.settings import (
    COMMON_NGRAMS,
    MemorySettings,
    bytes_of_environment,
    memory_bytes_of_environment,
    ngrams_of_environment,
)

__all__ = ["drafts_from_logits", "is_set", "memory_settings", "ranks_of", "target_of"]

_logger = logging.getLogger(__name__)


def memory_settings(server_args: Any) -> MemorySettings:
    """The settings of the memory. Raises InvalidValueError."""
    url = os.environ.get("FASTDRAFT_MEMORY_URL") or None
    ranks = ranks_of(server_args)
    if url is not None and ranks > 1:
        # Each rank would read at its own time.
        raise InvalidValueError(
            f"FASTDRAFT_MEMORY_URL must not be set with tp_size {ranks}, whose ranks must all "
            f"draft the same, got {url!r}"
        )
    ngrams = ngrams_of_environment()
    if ngrams == COMMON_NGRAMS and ranks > 1:
        ngrams = None  # where one of their machines cannot make it, they would draft differently
    try:
        return MemorySettings(
            memory_bytes=memory_bytes_of_environment(),
            datastores=_names("FASTDRAFT_DATASTORES", os.pathsep),
            ngrams=ngrams,
            shared_namespaces=_names("FASTDRAFT_SHARED_NAMESPACES", ","),
            memory_url=url,
            max_bytes=bytes_of_environment("FASTDRAFT_MAX_BYTES"),
        )
    except InvalidValueError as error:
        said = re.sub("memory_(bytes|url)", lambda name: f"FASTDRAFT_{name[0].upper()}", str(error))
        raise InvalidValueError(said) from error


def drafts_from_logits(server_args: Any) -> bool:
    """True to draft from the target's logits. Raises InvalidValueError."""
    wanted = is_set("FASTDRAFT_LOGITS", default=True)
    ranks = ranks_of(server_args)
    if wanted and ranks > 1:
        # The logits of ranks may differ in rounding, and all must draft the same.
        _logger.info("fastdraft: with tp_size %d nothing is drafted from the logits", ranks)
        return False
    return wanted


def is_set(variable: str, *, default: bool) -> bool:
    """True if it is 1. Raises InvalidValueError."""
    value = os.environ.get(variable) or str(int(default))
    if value not in ("0", "1"):
        raise InvalidValueError(f"{variable} must be 0 or 1, got {value!r}")
    return value == "1"


def target_of(server_args: Any) -> Target:
    """The model that the server's own arguments name."""
    model = str(getattr(server_args, "model_path", ""))
    tokenizer = str(getattr(server_args, "tokenizer_path", None) or model)
    return Target(model, tokenizer, getattr(server_args, "revision", None))


def ranks_of(server_args: Any) -> int:
    """How many ranks of one model there are, which must all draft the same."""
    return int(getattr(server_args, "tp_size", 1))


def _names(variable: str, separator: str) -> list[str]:
    return [name for name in os.environ.get(variable, "").split(separator) if name]
