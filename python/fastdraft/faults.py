"""Errors that cost drafts and nothing else: each is counted, and every kind is logged."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter

__all__ = ["Faults"]


class Faults:
    """Counts errors and logs them as warnings: of each kind the first, then the 2nd, 4th, 8th...

    So an error of every step floods no log, and none hides another one. Errors are of one kind if
    their type, their line of code, and what they cost are the same. Thread-safe.

    Args:
        logger: Where they are logged.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._kinds: Counter[tuple[object, ...]] = Counter()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many there were."""
        with self._lock:
            return self._kinds.total()

    def add(self, what: str, error: BaseException | None = None) -> None:
        """Counts one.

        Args:
            what: What happened, and what it costs.
            error: The exception; by default the one that is being handled, if any.
        """
        error = error or sys.exc_info()[1]
        trace = None if error is None else error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        line = None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        with self._lock:
            kind = (what, type(error), line)
            self._kinds[kind] += 1
            times = self._kinds[kind]
        if times & (times - 1) == 0:
            often = "" if times == 1 else f" ({times} times so far)"
            self._logger.warning("fastdraft: %s%s", what, often, exc_info=error)
