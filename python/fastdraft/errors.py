"""The errors of fastdraft. Each message names the value received and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "DatastoreClosedError",
    "DatastoreError",
    "FastdraftError",
    "InvalidValueError",
    "MemoryLimitError",
    "RequestLimitError",
    "UnknownRequestError",
]


class FastdraftError(Exception):
    """The base of all errors that fastdraft raises on purpose."""

    rows: Mapping[int, Exception] = MappingProxyType({})
    """The errors of the rows of a batch, by their index, if `Engine.observe_batch` raised it for
    some; all others were observed. Else empty, and the call changed nothing or is one of a single
    request."""


class InvalidValueError(FastdraftError, ValueError):
    """A value outside its range or of the wrong shape or kind."""


class UnknownRequestError(FastdraftError, LookupError):
    """A request id that was never given out, or has been finished or cancelled."""


class RequestLimitError(FastdraftError):
    """More tokens than `DraftConfig.max_request_tokens` for one request."""


class MemoryLimitError(FastdraftError, MemoryError):
    """More bytes than `DraftConfig.max_bytes` for one engine, or than the machine gives."""


class DatastoreError(FastdraftError, OSError):
    """A file that is no datastore, a damaged or foreign one, or one that cannot be written."""


class DatastoreClosedError(FastdraftError, ValueError):
    """A datastore that was closed."""
