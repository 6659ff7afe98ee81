"""Carries the counts of drafting from vLLM's engine processes to its API server.

Nothing that an engine returns has room for a drafter's counts. So each engine writes a small file
that the API server maps: its totals, and a table of the requests with a prediction. A file has one
writer, which never waits for readers. A request is found by its ticket, a random number that the
API server sends with the prediction: it depends neither on request ids, which vLLM changes on the
way, nor on the choice of an engine, and nobody can guess another's.

vLLM's own counts of a request (`per_request_spec_decode_metrics`) are no substitute: they do not
say which draft tokens are from its prediction.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import tempfile
from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastdraft.files import TemporaryFolder
from fastdraft.serving.metrics import FIELDS, Totals

__all__ = ["FOLDER_VARIABLE", "Ledger", "LedgerReader", "new_ticket", "share_folder"]

FOLDER_VARIABLE = "FASTDRAFT_VLLM_LEDGER"
"""The environment variable that names the folder of a server's ledgers."""

# Rows are used in turn, so a finished request's counts stay until this many others have come.
_ROWS = 1 << 14
_PAGE = np.dtype(
    [
        ("totals", np.float64, len(FIELDS)),
        ("tickets", np.uint64, _ROWS),
        # Accepted tokens in the upper half, rejected ones in the lower: both change at once.
        ("counts", np.uint64, _ROWS),
    ]
)
_PREFIX = "fastdraft-ledger-"
_SUFFIX = ".ledger"
_INDICES = {field: index for index, field in enumerate(FIELDS)}
_TICKET = re.compile("[0-9a-f]{16}")


def share_folder() -> None:
    """Makes the folder of a server's ledgers, and names it in the environment.

    The server's first process calls it before it starts others: they inherit the name, and the call
    does nothing there. The process that made the folder removes it when it ends; if that process
    was killed, the next server does.
    """
    if FOLDER_VARIABLE in os.environ:
        return
    # In memory if possible: writing to a file waits while the system writes it back to a disk.
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    try:
        folder = TemporaryFolder(_PREFIX, parent)
    except OSError:
        # Without a folder nothing is reported; everything else works.
        return
    os.environ[FOLDER_VARIABLE] = str(folder.path)
    atexit.register(folder.close)


def new_ticket() -> str:
    """A ticket for one request: 16 hexadecimal digits, never all zero."""
    return f"{secrets.randbits(64) or 1:016x}"


class _Page:
    """A ledger's file, mapped."""

    def __init__(self, path: Path, *, create: bool) -> None:
        if create:
            # Written in full: if the disk were full, touching a page later would end the process.
            path.write_bytes(bytes(_PAGE.itemsize))
        mapped = np.asarray(np.memmap(path, _PAGE, "r+" if create else "r", shape=()))
        self.totals: NDArray[np.float64] = mapped["totals"]
        self.tickets: NDArray[np.uint64] = mapped["tickets"]
        self.counts: NDArray[np.uint64] = mapped["counts"]


class Ledger:
    """The ledger of one drafting process, to write to. But for `publish`, from one thread."""

    def __init__(self, folder: Path, *, engine: int = 0) -> None:
        """Starts a ledger in a server's folder.

        `engine` is its number among the data-parallel ones, and the label of its metrics.
        """
        name = f"{engine}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._page = _Page(folder / name, create=True)
        self._free = deque(range(_ROWS))

    @classmethod
    def from_environment(cls, *, engine: int = 0) -> Ledger | None:
        """The ledger of a process that a server started, or None where there is no folder."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            return None
        try:
            return cls(Path(folder), engine=engine)
        except OSError:
            return None

    def open(self, ticket: object) -> int | None:
        """A row for a request with a prediction, for as long as it runs. None for no ticket at all,
        as it may come from anyone, and where all rows are in use."""
        if not isinstance(ticket, str) or not _TICKET.fullmatch(ticket) or not self._free:
            return None
        row = self._free.popleft()
        # Counts first: a reader that finds the ticket finds its counts too.
        self._page.counts[row] = 0
        self._page.tickets[row] = int(ticket, 16)
        return row

    def record(self, row: int, accepted: int, rejected: int) -> None:
        """Notes the counts of the request of `row` so far."""
        self._page.counts[row] = accepted << 32 | rejected

    def close(self, row: int) -> None:
        """Ends a row. What it says can be read until the row is needed again."""
        self._free.append(row)

    def publish(self, totals: Totals) -> None:
        """Notes what the process did in all; the fields that are not given stay.

        Several threads may do so at once, each for fields of its own.
        """
        for field, value in totals.items():
            self._page.totals[_INDICES[field]] = value


class LedgerReader:
    """The ledgers of all engines of a server, to read from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: dict[str, _Page] = {}

    @classmethod
    def from_environment(cls) -> LedgerReader | None:
        """The ledgers of this server, or None where there is no folder."""
        folder = os.environ.get(FOLDER_VARIABLE)
        return None if folder is None else cls(Path(folder))

    def prediction_tokens(self, ticket: str) -> tuple[int, int] | None:
        """The accepted and rejected prediction tokens of the request of `ticket` so far.

        The sums over its choices; None where no engine has noted any. O(engines * rows), some ten
        microseconds an engine.
        """
        number = np.uint64(int(ticket, 16))
        self._look_for_pages()
        counts = [
            int(count)
            for page in self._pages.values()
            for count in page.counts[np.flatnonzero(page.tickets == number)]
        ]
        if not counts:
            return None
        return sum(count >> 32 for count in counts), sum(count & 0xFFFFFFFF for count in counts)

    def totals(self) -> dict[str, Totals]:
        """The totals by engine."""
        self._look_for_pages()
        by_engine: dict[str, NDArray[np.float64]] = {}
        for name, page in sorted(self._pages.items()):
            engine = name.split("-", 1)[0]
            by_engine[engine] = page.totals + by_engine.get(engine, 0.0)
        return {
            engine: dict(zip(FIELDS, values.tolist(), strict=True))
            for engine, values in by_engine.items()
        }

    def _look_for_pages(self) -> None:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        for name in names:
            if name.endswith(_SUFFIX) and name not in self._pages:
                # One that is just being made may be too short: it is looked at again next time.
                try:
                    self._pages[name] = _Page(self._folder / name, create=False)
                except (OSError, ValueError):
                    continue
