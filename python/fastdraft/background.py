"""Drafting beside a host that never waits: a thread that owns the engine.

An asynchronous host launches its next step before it knows the last one's tokens. It reports
steps as their tokens arrive, and takes whatever continuations are newest when it drafts:

    drafter = BackgroundDrafter(engine, rows=64, nodes=128)
    number = drafter.add(row, prompt_ids)
    drafter.observe([row], [number], [position], token_ids, [0, len(token_ids)])   # after each step
    snapshot = drafter.acquire()     # whole and unchanging until it is released
    ...                              # copy it to the device, align drafts with it
    drafter.release(snapshot)
    drafter.finish(row, number)

No call waits for the engine. Drafts are only guesses, so nothing that goes wrong here can change an
output: a step that is late or lost, or an error, costs drafts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastdraft._core import Datastore, Engine
from fastdraft.continuations import Continuations
from fastdraft.errors import FastdraftError, InvalidValueError

__all__ = ["BackgroundCounts", "BackgroundDrafter", "Snapshot"]

_logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]
Numbers = NDArray[np.int64]

MOST_QUEUED = 65536
"""Rows of steps that may wait for the thread; further steps are dropped, as if they were lost."""
MOST_WAITING = 64
"""Steps of one request that may wait for a lost one before the oldest of them is dropped."""


@dataclass(slots=True)
class BackgroundCounts:
    """What happened so far.

    Attributes:
        steps: Rows of steps whose tokens the engine took.
        repeated: Rows of steps that told nothing new: duplicates, and steps of ended requests.
        dropped: Rows of steps that were given up, because too many were waiting.
        faults: Errors. Each ended the drafting for one request, or for all.
        published: How often new continuations were made available.
    """

    steps: int = 0
    repeated: int = 0
    dropped: int = 0
    faults: int = 0
    published: int = 0


@dataclass(eq=False)
class Snapshot:
    """Continuations of all rows at one moment.

    Attributes:
        version: Rises with each snapshot; 0 is the empty one that a drafter begins with.
        continuations: The arrays, one row for each row of the host.
        requests: (rows,) int32: the number of the request that each row's continuations are of; 0
            for none. A row may have changed hands since.
    """

    version: int
    continuations: Continuations
    requests: NDArray[np.int32]
    _readers: int = field(default=0, repr=False)

    @classmethod
    def allocate(cls, rows: int, nodes: int) -> Snapshot:
        """Makes an empty one in ordinary memory."""
        return cls(0, Continuations.allocate(rows, nodes), np.zeros(rows, np.int32))


class _Report(NamedTuple):
    """What the rows of a step emitted; see `BackgroundDrafter.observe`."""

    rows: Numbers
    numbers: Numbers
    positions: Numbers
    token_ids: Ids
    offsets: Numbers
    drafted: Numbers


class _Piece(NamedTuple):
    """A row's part of a report."""

    position: int
    token_ids: Ids
    drafted: int


@dataclass(slots=True, eq=False)
class _Request:
    """A request in its row, and its pieces that came before an earlier one, by their position."""

    number: int
    prompt_ids: Ids
    prediction: ArrayLike | None
    datastores: Sequence[Datastore] | None
    templates: ArrayLike | None
    waiting: dict[int, _Piece] = field(default_factory=dict)

    def keep(self, piece: _Piece) -> None:
        known = self.waiting.get(piece.position)
        if known is None or len(known.token_ids) < len(piece.token_ids):
            self.waiting[piece.position] = piece

    def take(self, length: int) -> Iterator[_Piece]:
        """The pieces that go on behind a text of `length` tokens, in order, cut to what is new."""
        for position in sorted(self.waiting):
            if position > length:
                return
            piece = self.waiting.pop(position)
            known = length - position
            if known < len(piece.token_ids):
                tokens = piece.token_ids[known:]
                yield _Piece(length, tokens, piece.drafted if known == 0 else 0)
                length += len(tokens)

    def forget(self) -> None:
        """Drops the oldest pieces where too many wait."""
        while len(self.waiting) > MOST_WAITING:
            del self.waiting[min(self.waiting)]


class BackgroundDrafter:
    """Owns an engine in a thread of its own, for hosts that do not wait for drafts.

    The host numbers its rows; a row serves one request at a time. Any thread may make any call.

    **Order.** Steps may arrive late, twice, in any order, or not at all. Each says where in the
    request's text its tokens begin, so repeated tokens are left out and a step from behind a gap
    waits. The next report that covers the gap heals it; `behind` tells which rows miss what. Until
    then the row keeps its last continuations.

    **Memory.** A snapshot is written only while it is neither the newest nor acquired, and becomes
    the newest under a lock that its reader takes too. So what `acquire` returns is whole, happened
    before the call, and stays as it is until `release`. Both sides hold the lock for a few
    instructions, never while the engine works. The host calls `release` when the device has copied
    the arrays. Where all snapshots are acquired, news wait for the next release.

    **Faults.** A request that fails is drafted for no more; any other error ends the drafting for
    all. Each is counted in `counts.faults`, and the first one is logged as a warning.

    Attributes:
        counts: What happened so far.
        disabled: Whether an error ended the drafting for all.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        rows: int | None = None,
        nodes: int = 128,
        snapshots: Sequence[Snapshot] = (),
        start: bool = True,
    ) -> None:
        """Starts the thread.

        Args:
            engine: From now on only this drafter's calls may observe or propose. Its config's
                `tree_budget` and `lookahead` bound the continuations' nodes and depth.
            rows, nodes: The shape of the continuations, where no `snapshots` are given.
            snapshots: At least three of one shape, in the host's memory, such as pinned memory. One
                is the newest, one is written, and the rest may be acquired at the same time.
            start: False starts no thread: the host calls `run_once`.

        Raises:
            InvalidValueError: Fewer than three snapshots, of several shapes, or no rows.
        """
        if not snapshots:
            if rows is None or rows < 1 or nodes < 1:
                raise InvalidValueError(f"rows and nodes must be at least 1, got {rows}, {nodes}")
            snapshots = [Snapshot.allocate(rows, nodes) for _ in range(4)]
        shapes = {each.continuations.token_ids.shape for each in snapshots}
        if len(snapshots) < 3 or len(shapes) != 1:
            raise InvalidValueError(
                f"snapshots must be at least 3 of one shape, got {len(snapshots)} of {shapes}"
            )
        self.counts = BackgroundCounts()
        self.disabled = False
        self._engine = engine
        self._shape: tuple[int, int] = shapes.pop()
        self._changed = threading.Condition()
        # The condition's lock guards these.
        self._queue: deque[Callable[[], object] | _Report] = deque()
        self._queued_rows = 0
        self._stopping = False
        self._numbers = 0
        self._free = list(snapshots)
        self._newest = self._free.pop()
        self._missing: dict[int, tuple[int, int]] = {}
        # The thread's own.
        self._requests: dict[int, _Request] = {}
        # By row: the engine's id, -1 before the prompt is indexed, and the length of its text.
        self._ids = np.full(self._shape[0], -1, np.int64)
        self._lengths = np.zeros(self._shape[0], np.int64)
        self._unindexed: deque[tuple[int, _Request]] = deque()
        self._working = Snapshot.allocate(*self._shape)
        self._has_news = False
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(
                target=self._run, name="fastdraft-background", daemon=True
            )
            self._thread.start()

    # What the host calls.

    def add(
        self,
        row: int,
        prompt_ids: ArrayLike,
        *,
        prediction: ArrayLike | None = None,
        datastores: Sequence[Datastore] | None = None,
        templates: ArrayLike | None = None,
    ) -> int:
        """Gives a row a request, and returns the request's number, 1 or greater.

        prompt_ids: copied; tokens that were emitted already may stand at its end.
        prediction, datastores, templates: as for `Engine.add_request`; not copied.

        The request that the row had is cancelled. An error of the engine, as over a limit, is met
        later: the request is then never drafted for.

        Raises:
            InvalidValueError: There is no such row, or the prompt is no row of integers.
        """
        self._check_row(row)
        text = np.array(prompt_ids, np.int32)
        if text.ndim != 1:
            raise InvalidValueError(f"prompt_ids must be one row of integers, got {text.shape}")
        with self._changed:
            self._numbers += 1
            number = self._numbers
            request = _Request(number, text, prediction, datastores, templates)
            self._put(lambda: self._add(row, request))
        return number

    def observe(
        self,
        rows: ArrayLike,
        numbers: ArrayLike,
        positions: ArrayLike,
        token_ids: ArrayLike,
        offsets: ArrayLike,
        drafted: ArrayLike | None = None,
    ) -> None:
        """Reports what a step emitted: row rows[i] token_ids[offsets[i]:offsets[i + 1]].

        All are copied. To heal a gap, report more: the tokens from any earlier position on.

        Args:
            rows, numbers: The rows and the numbers of their requests.
            positions: The length of each request's text before these tokens, prompt included.
            token_ids, offsets: The tokens of all rows.
            drafted: How many draft tokens each row had verified, for the engine's counts.

        Raises:
            InvalidValueError: The arrays do not belong together, or there is no such row.
        """
        report = _Report(
            np.array(rows, np.int64),
            np.array(numbers, np.int64),
            np.array(positions, np.int64),
            np.array(token_ids, np.int32),
            np.array(offsets, np.int64),
            np.array(np.zeros(np.shape(rows)) if drafted is None else drafted, np.int64),
        )
        _check(report, self._shape[0])
        with self._changed:
            if self._queued_rows + len(report.rows) > MOST_QUEUED:
                self.counts.dropped += len(report.rows)
                return
            self._queued_rows += len(report.rows)
            self._put(report)

    def finish(self, row: int, number: int) -> None:
        """Ends a request after all that was reported so far; its text enters its datastores.

        Does nothing where the row has another request by now. A request that ends before its prompt
        was indexed leaves nothing.
        """
        self._check_row(row)
        with self._changed:
            self._put(lambda: self._end(row, number, self._engine.finish))

    def cancel(self, row: int, number: int) -> None:
        """Ends a request; its text enters no datastore. Else as `finish`."""
        self._check_row(row)
        with self._changed:
            self._put(lambda: self._end(row, number, self._engine.cancel))

    def acquire(self) -> Snapshot:
        """The newest continuations, which stay as they are until they are released."""
        with self._changed:
            self._newest._readers += 1
            return self._newest

    def release(self, snapshot: Snapshot) -> None:
        """Gives back what `acquire` returned; once for each time."""
        with self._changed:
            if snapshot._readers < 1:
                raise InvalidValueError("the snapshot must be acquired, and was released already")
            snapshot._readers -= 1
            if snapshot._readers == 0 and snapshot is not self._newest:
                self._free.append(snapshot)
                self._changed.notify()

    def behind(self) -> dict[int, tuple[int, int]]:
        """The rows that miss tokens: for each the number of its request, and the text's length
        from which on they are missing."""
        with self._changed:
            return dict(self._missing)

    def stop(self, timeout: float = 5.0) -> bool:
        """Stops the thread after the call of the engine that it is in; what is queued is dropped.

        Running requests stay in the engine. Returns whether the thread has stopped within `timeout`
        seconds; it is a daemon, so a process can end without. Further calls do nothing, and
        `acquire` returns what is newest.
        """
        with self._changed:
            self._stopping = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # What the thread does.

    def run_once(self) -> bool:
        """Does what is queued now: the thread's work, for a drafter that has none.

        Takes all reports that wait, and indexes one prompt at most, since a long one takes a while.
        Returns whether anything is left.
        """
        with self._changed:
            queue, self._queue = self._queue, deque()
            self._queued_rows = 0
        try:
            self._take(queue)
        except Exception as error:
            self._disable(error)
        with self._changed:
            return bool(self._queue or self._unindexed)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._queue or self._unindexed or self._can_publish()):
                    self._changed.wait()
                if self._stopping:
                    return
            self.run_once()

    def _put(self, entry: Callable[[], object] | _Report) -> None:
        if not self._stopping and not self.disabled:
            self._queue.append(entry)
            self._changed.notify()

    def _can_publish(self) -> bool:
        return self._has_news and bool(self._free)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self._shape[0]:
            raise InvalidValueError(f"rows must be from 0 to {self._shape[0] - 1}, got {row}")

    def _take(self, queue: deque[Callable[[], object] | _Report]) -> None:
        ready: list[_Report] = []
        for entry in queue:
            if isinstance(entry, _Report):
                ready += self._follow(entry)
                continue
            # What was reported before a request ends belongs to it.
            self._continue(ready)
            ready = []
            entry()
        self._continue(ready)
        if self._unindexed:
            self._index(*self._unindexed.popleft())
        missing = {
            row: (each.number, int(self._lengths[row]))
            for row, each in self._requests.items()
            if each.waiting and self._ids[row] >= 0
        }
        with self._changed:
            self._missing = missing
        self._publish()

    def _follow(self, report: _Report) -> list[_Report]:
        """What of a report the engine can take now, and what waited for it."""
        rows, tokens = report.rows, np.diff(report.offsets)
        known = self._ids[rows] >= 0
        known &= self._working.requests[rows] == report.numbers
        known &= self._lengths[rows] == report.positions
        distinct = len(np.unique(rows)) == len(rows)
        if distinct and known.all() and not any(self._requests[row].waiting for row in rows):
            self._lengths[rows] += tokens
            return [report]
        found = []
        for i, row in enumerate(rows.tolist()):
            request = self._requests.get(row)
            position = int(report.positions[i])
            if request is None or request.number != report.numbers[i]:
                self.counts.repeated += 1
                continue
            start, end = report.offsets[i : i + 2]
            if start == end:
                continue
            request.keep(_Piece(position, report.token_ids[start:end], int(report.drafted[i])))
            pieces = self._ready(row, request)
            request.forget()
            self.counts.repeated += not pieces and position not in request.waiting
            found += pieces
        return found

    def _ready(self, row: int, request: _Request) -> list[_Report]:
        """What of a request's waiting pieces the engine can take now."""
        if self._ids[row] < 0:
            return []
        found = []
        for piece in request.take(int(self._lengths[row])):
            size = len(piece.token_ids)
            one = np.array([row]), np.array([request.number]), np.array([piece.position])
            found.append(
                _Report(*one, piece.token_ids, np.array([0, size]), np.array([piece.drafted]))
            )
            self._lengths[row] += size
        return found

    def _add(self, row: int, request: _Request) -> None:
        self._drop(row, self._engine.cancel)
        self._requests[row] = request
        self._unindexed.append((row, request))

    def _end(self, row: int, number: int, end: Callable[[int], object]) -> None:
        request = self._requests.get(row)
        if request is not None and request.number == number:
            self._drop(row, end)

    def _drop(self, row: int, end: Callable[[int], object]) -> None:
        if self._requests.pop(row, None) is None:
            return
        known = int(self._ids[row])
        self._ids[row] = -1
        self._working.continuations.count[row] = 0
        self._working.requests[row] = 0
        self._has_news = True
        if known >= 0:
            end(known)

    def _index(self, row: int, request: _Request) -> None:
        if self._requests.get(row) is not request:
            return  # it ended before
        try:
            self._ids[row] = self._engine.add_request(
                request.prompt_ids,
                prediction=request.prediction,
                datastores=request.datastores,
                templates=request.templates,
            )
        except FastdraftError as error:
            self._fault(error)
            self._drop(row, self._engine.cancel)
            return
        self._lengths[row] = len(request.prompt_ids)
        self._working.requests[row] = request.number
        request.prompt_ids = np.zeros(0, np.int32)
        nothing = np.array([row]), np.array([request.number]), self._lengths[row : row + 1].copy()
        none = np.zeros(0, np.int32), np.zeros(2, np.int64), np.zeros(1, np.int64)
        self._continue([_Report(*nothing, *none), *self._ready(row, request)])

    def _continue(self, reports: list[_Report]) -> None:
        """Has the engine observe reports, and renew the continuations of their rows."""
        if not reports:
            return
        rows = np.concatenate([each.rows for each in reports])
        sizes = np.concatenate([np.diff(each.offsets) for each in reports])
        self._has_news = True
        self.counts.steps += int(np.count_nonzero(sizes))
        try:
            self._engine.continue_batch(
                self._ids[rows],
                np.concatenate([each.token_ids for each in reports]),
                np.concatenate([[0], np.cumsum(sizes)]),
                self._working.continuations,
                drafted=np.concatenate([each.drafted for each in reports]),
                places=rows,
            )
        except FastdraftError as error:
            if not error.rows:
                raise
            for row in sorted({int(rows[i]) for i in error.rows}):
                self._fault(error)
                self._drop(row, self._engine.cancel)

    def _publish(self) -> None:
        with self._changed:
            if not self._can_publish():
                return
            snapshot = self._free.pop()
        snapshot.continuations.copy_from(self._working.continuations)
        snapshot.requests[:] = self._working.requests
        self._has_news = False
        with self._changed:
            snapshot.version = self._newest.version + 1
            before, self._newest = self._newest, snapshot
            if before._readers == 0:
                self._free.append(before)
            self.counts.published += 1

    def _fault(self, error: Exception) -> None:
        if self.counts.faults == 0:
            _logger.warning(
                "drafting ahead failed; outputs stay as they are, further faults are only counted",
                exc_info=error,
            )
        self.counts.faults += 1

    def _disable(self, error: Exception) -> None:
        self._fault(error)
        with self._changed:
            self.disabled = True
            self._queue.clear()
        self._unindexed.clear()
        for row in list(self._requests):
            with contextlib.suppress(Exception):
                self._drop(row, self._engine.cancel)
        self._publish()


def _check(report: _Report, rows: int) -> None:
    """Raises InvalidValueError for arrays that do not belong together."""
    size = report.rows.shape
    columns = (report.rows, report.numbers, report.positions, report.drafted)
    if len(size) != 1 or any(each.shape != size for each in columns):
        raise InvalidValueError(
            "rows, numbers, positions and drafted must have one entry for each row, "
            f"got {[each.shape for each in columns]}"
        )
    at, tokens = report.offsets, len(report.token_ids)
    fits = at.shape == (size[0] + 1,) and at[0] == 0 and at[-1] == tokens
    if not fits or (np.diff(at) < 0).any():
        raise InvalidValueError(
            f"offsets must have one entry more than the {size[0]} rows and rise from 0 to the "
            f"number of token_ids, {tokens}, got {at.tolist()}"
        )
    if size[0] and not 0 <= report.rows.min() <= report.rows.max() < rows:
        raise InvalidValueError(f"rows must be from 0 to {rows - 1}, got {report.rows.tolist()}")
    if (report.positions < 0).any() or (report.drafted < 0).any():
        raise InvalidValueError(
            "positions and drafted must be 0 or greater, "
            f"got {report.positions.tolist()} and {report.drafted.tolist()}"
        )
