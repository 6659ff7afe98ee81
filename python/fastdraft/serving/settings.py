"""An operator's settings of the memory, the same for all hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from fastdraft import Memory
from fastdraft.errors import InvalidValueError

__all__ = [
    "COMMON_NGRAMS",
    "MemorySettings",
    "bytes_of_environment",
    "memory_bytes_of_environment",
    "ngrams_of_environment",
]

COMMON_NGRAMS = "common"
"""The setting for the table that `common_ngrams` makes of the target's tokenizer, if it can."""


def ngrams_of_environment() -> str | None:
    """`FASTDRAFT_NGRAMS` as a setting: a path; by default the common table; "none" for none."""
    value = os.environ.get("FASTDRAFT_NGRAMS") or COMMON_NGRAMS
    return None if value == "none" else value


def bytes_of_environment(variable: str) -> int | None:
    """A number of bytes; None where the variable is not set. Raises InvalidValueError."""
    value = os.environ.get(variable)
    if not value:
        return None
    if not value.isdecimal():
        raise InvalidValueError(f"{variable} must be a number of bytes, got {value!r}")
    return int(value)


def memory_bytes_of_environment() -> int:
    """`FASTDRAFT_MEMORY_BYTES`, else `MemorySettings.memory_bytes`. Raises InvalidValueError."""
    given = bytes_of_environment("FASTDRAFT_MEMORY_BYTES")
    return MemorySettings.memory_bytes if given is None else given


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """The text that requests are drafted from, besides their own.

    Raises:
        InvalidValueError: A bad value.
    """

    memory_bytes: int = 1 << 30
    """The most memory for the text of finished requests, from which later ones are drafted; 0
    remembers nothing."""
    datastores: Sequence[str] = ()
    """Paths of frozen datastores, of the target's tokenizer."""
    ngrams: str | None = COMMON_NGRAMS
    """The path of a table of n-grams, of the target's tokenizer; "common" for the one that comes
    with fastdraft, None for none."""
    shared_namespaces: Sequence[str] = ()
    """Names of namespaces that all requests read, besides their own."""
    memory_url: str | None = None
    """The folder, or a URL such as s3://bucket/folder, in which the memory is kept and shared with
    other replicas; its key is the environment's `FASTDRAFT_MEMORY_KEY`. None keeps the memory in
    this process alone."""
    max_bytes: int | None = None
    """The most memory for the indexes of running requests; beyond it new ones go undrafted."""

    def __post_init__(self) -> None:
        if isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int):
            raise InvalidValueError(f"memory_bytes must be an integer, got {self.memory_bytes!r}")
        try:
            Memory(self.memory_bytes)
        except InvalidValueError:
            raise InvalidValueError(
                f"memory_bytes must be 0, or enough for some text, got {self.memory_bytes}"
            ) from None
        if not isinstance(self.memory_url, (str, os.PathLike, type(None))):
            raise InvalidValueError(f"memory_url must be a URL or a path, got {self.memory_url!r}")
        if not isinstance(self.ngrams, (str, os.PathLike, type(None))):
            raise InvalidValueError(f"ngrams must be a path, got {self.ngrams!r}")
        if self.memory_url is not None and not self.memory_bytes:
            raise InvalidValueError(
                "memory_url must be left out where memory_bytes is 0, which remembers nothing, "
                f"got {str(self.memory_url)!r}"
            )
        for name, kind, listed in (
            ("datastores", (str, os.PathLike), "paths"),
            ("shared_namespaces", str, "names"),
        ):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or not all(isinstance(v, kind) for v in value):
                raise InvalidValueError(f"{name} must be a list of {listed}, got {value!r}")
