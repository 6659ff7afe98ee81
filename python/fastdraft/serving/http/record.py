"""Records requests with their answers, for `fastdraft replay`."""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fastdraft.errors import InvalidValueError

__all__ = ["RECORD_VARIABLE", "Record"]

RECORD_VARIABLE: Final = "FASTDRAFT_RECORD"
"""In the environment: the file that requests are appended to."""

_logger = logging.getLogger(__name__)


class Record:
    """A file of JSON lines that only its owner may read; several processes may append to it.

    Raises:
        InvalidValueError: The file cannot be written.
    """

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
            os.fchmod(self._file, 0o600)
        except OSError as error:
            raise InvalidValueError(f"{RECORD_VARIABLE}: {error}") from error
        self._thread = ThreadPoolExecutor(1, "fastdraft-record")

    def append(self, request: bytes, answer: bytes) -> None:
        """Appends the bodies of a request and of its answer, a document or a stream of events.

        Returns at once; a thread writes. What it cannot write is logged and fails no request.
        """
        self._thread.submit(self._append, request, answer)

    def close(self) -> None:
        """Waits until all is written, and closes the file."""
        self._thread.shutdown()
        os.close(self._file)

    def _append(self, request: bytes, answer: bytes) -> None:
        try:
            line = {"request": json.loads(request), "response": answer.decode()}
            data = memoryview(json.dumps(line).encode() + b"\n")
            while data:
                data = data[os.write(self._file, data) :]
        except Exception as error:
            _logger.warning("a request was not recorded: %s", error)
