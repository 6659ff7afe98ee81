"""One thread that does things in order, for a caller that never waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["TaskThread"]

_logger = logging.getLogger(__name__)


class TaskThread:
    """Runs tasks one after another on a thread of its own. It ends with the process."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., object], *args: Any) -> None:
        """Has `call(*args)` run after all that was submitted before. Never waits."""
        self._tasks.put((call, args))

    def drain(self, timeout: float) -> bool:
        """Waits until all that was submitted is done; whether it was, after so many seconds."""
        done = threading.Event()
        self.submit(done.set)
        return done.wait(timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Ends the thread after what was submitted, or lets go of it after so many seconds."""
        self._tasks.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            call, args = task
            try:
                call(*args)
            except Exception:
                _logger.exception("fastdraft: a task failed; the next ones go on")
