"""Drafting beside a host that never waits: a thread that owns the engine.

An asynchronous host launches its next step before it knows the last one's tokens. It reports
steps as their tokens arrive, and takes whatever continuations are newest when it drafts:

    drafter = BackgroundDrafter(engine, rows=64, nodes=128)
    number = drafter.add(row, prompt_ids)
    drafter.observe([row], [number], [position], token_ids, [0, len(token_ids)])   # after each step
    snapshot = drafter.acquire()     # whole and unchanging until it is released
    ...                              # copy it to the device, align drafts with it
    drafter.release(snapshot)
    drafter.finish(number)

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
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastdraft.continuations import Continuations
from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.faults import Faults

__all__ = ["BackgroundCounts", "BackgroundDrafter", "BatchEngine", "Report", "Snapshot"]

_logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]
Numbers = NDArray[np.int64]

MOST_QUEUED = 65536
"""Rows of steps that may wait for the thread; further steps are dropped, as if they were lost."""
MOST_WAITING = 256
"""Steps of one request that may wait for a lost one, or for a long prompt's index, before the
oldest of them is dropped."""
_LARGEST_NUMBER = 2**31 - 1
_COSTS = "drafting ahead failed; outputs stay as they are"


class BatchEngine(Protocol):
    """What a background drafter calls, all on its thread: `fastdraft.Engine`, or a host's own
    layer over one, which may take other options and keep its own counts."""

    @property
    def add_request(self) -> Callable[..., int | None]:
        """Called with a prompt and the options of the request. Gives its id; None for one that is
        not to be drafted for."""

    @property
    def continue_batch(self) -> Callable[..., None]:
        """See `Engine.continue_batch`."""

    def finish(self, request: int, /) -> object:
        """Ends a request; its text may be remembered."""

    def cancel(self, request: int, /) -> object:
        """Ends a request; nothing is remembered."""


@dataclass(slots=True)
class BackgroundCounts:
    """What happened so far.

    Attributes:
        steps: Rows of steps whose tokens the engine took.
        repeated: Rows of steps that told nothing new: duplicates, and steps of ended requests.
        dropped: Rows of steps that were given up, because too many were waiting.
        published: How often new continuations were made available.
    """

    steps: int = 0
    repeated: int = 0
    dropped: int = 0
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


class Report(NamedTuple):
    """What the rows of a step emitted: row rows[i] token_ids[offsets[i]:offsets[i + 1]].

    Attributes:
        rows, numbers: int64, the rows and the numbers of their requests.
        positions: int64, the length of each request's text before these tokens, prompt included.
        token_ids, offsets: int32 and int64, the tokens of all rows.
        drafted: int64, how many draft tokens each row had verified, for the engine's counts.
    """

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
    """A request, and its pieces that came before an earlier one, by their position."""

    number: int
    prompt_ids: ArrayLike
    options: dict[str, Any]
    row: int | None
    id: int = -1
    """The engine's; -1 before the prompt is indexed."""
    length: int = 0
    """Of its text, as far as the engine has it, while it has no row."""
    prompt_size: int = 0
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
                yield _Piece(length, tokens, piece.drafted)
                length += len(tokens)

    def forget(self) -> None:
        """Drops the oldest pieces where too many wait."""
        while len(self.waiting) > MOST_WAITING:
            del self.waiting[min(self.waiting)]


class _Expected(NamedTuple):
    """A report that is still on its way."""

    read: Callable[[], Report]


_Entry = Report | _Expected | Callable[[], object]


class BackgroundDrafter:
    """Owns an engine in a thread of its own, for hosts that do not wait for drafts.

    The host numbers its rows. A row serves one request at a time; a request that is preempted gives
    its row up, and may come back in another. Any thread may make any call.

    **Order.** Steps may arrive late, twice, in any order, or not at all. Each says where in the
    request's text its tokens begin, so repeated tokens are left out and a step from behind a gap
    waits. The next report that covers the gap heals it; `behind` tells which rows miss what. Until
    then the row keeps its last continuations. A host that repeats the last few steps' tokens in
    each report needs to do no more.

    **Memory.** A snapshot is written only while it is neither the newest nor acquired, and becomes
    the newest under a lock that its reader takes too. So what `acquire` returns is whole, happened
    before the call, and stays as it is until `release`. Both sides hold the lock for a few
    instructions, never while the engine works. The host calls `release` when the device has copied
    the arrays. Where all snapshots are acquired, news wait for the next release.

    **Faults.** A request that the engine refuses is drafted for no more. Any other error of a call
    costs the requests in that call their drafts; those that are added later are drafted for. Each
    is counted in `faults`, and logged as a warning.

    Attributes:
        counts: What happened so far.
    """

    def __init__(
        self,
        engine: BatchEngine,
        *,
        rows: int | None = None,
        nodes: int = 128,
        snapshots: Sequence[Snapshot] = (),
        published: Callable[[Snapshot], object] | None = None,
        start: bool = True,
    ) -> None:
        """Starts the thread.

        Args:
            engine: From now on only this drafter's calls may observe or propose. Its config's
                `tree_budget` and `lookahead` bound the continuations' nodes and depth.
            rows, nodes: The shape of the continuations, where no `snapshots` are given.
            snapshots: At least three of one shape, in the host's memory, such as pinned memory. One
                is the newest, one is written, and the rest may be acquired at the same time.
            published: Called on the thread with each new snapshot, which stays as it is during the
                call. It may copy it to a device.
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
        self._faults = Faults(_logger)
        self._engine = engine
        self._published = published
        self._shape: tuple[int, int] = shapes.pop()
        self._changed = threading.Condition()
        # The condition's lock guards these.
        self._queue: deque[_Entry] = deque()
        self._queued_rows = 0
        self._stopping = self._busy = False
        self._numbers = 0
        self._free = list(snapshots)
        self._newest = self._free.pop()
        self._missing: dict[int, tuple[int, int]] = {}
        # The thread's own: requests by number, and by row those that have one.
        self._requests: dict[int, _Request] = {}
        self._at: dict[int, _Request] = {}
        # By row: the engine's id, -1 before the prompt is indexed; the length of its text; and
        # whether some of its pieces wait for an earlier one.
        self._ids = np.full(self._shape[0], -1, np.int64)
        self._lengths = np.zeros(self._shape[0], np.int64)
        self._waits = np.zeros(self._shape[0], np.bool_)
        self._unindexed: deque[_Request] = deque()
        self._working = Snapshot.allocate(*self._shape)
        self._has_news = False
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(
                target=self._run, name="fastdraft-background", daemon=True
            )
            self._thread.start()

    @property
    def faults(self) -> int:
        """Errors. Each cost drafts, of a step, of one request, or of all that were running."""
        return self._faults.count

    # What the host calls.

    def add(self, row: int, prompt_ids: ArrayLike, **options: Any) -> int:
        """Gives a row a request, and returns the request's number, 1 or greater.

        prompt_ids: read on the thread, so that a long list keeps nobody waiting. Leave it as it is;
            tokens that were emitted already may stand, or be appended, at its end.
        options: as for the engine's `add_request`, such as `prediction`, `datastores` and
            `templates`; not copied.

        The request that the row had is cancelled. An error of the engine, as over a limit, is met
        later: the request is then never drafted for.

        Raises:
            InvalidValueError: There is no such row.
        """
        self._check_row(row)
        with self._changed:
            number = self._next_number()
            request = _Request(number, prompt_ids, options, row)
            self._put(lambda: self._add(request))
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
        """Reports what a step emitted; see `Report` for the arguments, which are copied.

        To heal a gap, report more: the tokens from any earlier position on. `drafted` is counted
        for the rows of which something is new.

        Raises:
            InvalidValueError: The arrays do not belong together, or there is no such row.
        """
        report = Report(
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

    def expect(self, read: Callable[[], Report]) -> None:
        """Has the thread call `read` for a report that is still on its way.

        read: may wait for a device. What was reported before is published first. An error costs
            this report, and is counted.
        """
        with self._changed:
            self._put(_Expected(read))

    def suspend(self, number: int) -> None:
        """A preempted request gives its row up. The engine keeps its text for `resume`."""
        with self._changed:
            self._put(lambda: self._suspend(number))

    def resume(self, row: int, number: int, token_ids: ArrayLike) -> int:
        """Gives a row a request that was suspended, and returns the request's new number.

        token_ids: its text as it is now, prompt included, read on the thread as in `add`. Where it
            is shorter than what was reported, the request begins anew: the engine takes no token
            back.

        The request that the row had is cancelled. A request that ended or failed stays so.

        Raises:
            InvalidValueError: There is no such row.
        """
        self._check_row(row)
        with self._changed:
            new = self._next_number()
            self._put(lambda: self._resume(row, number, new, token_ids))
        return new

    def finish(self, number: int) -> None:
        """Ends a request after all that was reported so far; its text enters its datastores.

        Does nothing for a request that has ended. One that ends before its prompt was indexed
        leaves nothing.
        """
        with self._changed:
            self._put(lambda: self._end(number, self._engine.finish))

    def cancel(self, number: int) -> None:
        """Ends a request; its text enters no datastore. Else as `finish`."""
        with self._changed:
            self._put(lambda: self._end(number, self._engine.cancel))

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
                self._changed.notify_all()

    def behind(self) -> dict[int, tuple[int, int]]:
        """The rows that miss tokens: for each the number of its request, and the text's length
        from which on they are missing."""
        with self._changed:
            return dict(self._missing)

    def drain(self, timeout: float = 60.0) -> bool:
        """Waits until all that was reported is taken and published; whether it is, after so many
        seconds."""
        if self._thread is None:
            while not self._stopping and self.run_once():
                pass
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._is_idle(), timeout)
            return self._is_idle()

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
            if self._stopping:
                return False
            queue, self._queue = self._queue, deque()
            self._queued_rows = 0
            self._busy = True
        try:
            self._take(queue)
        except Exception as error:
            self._faults.add(_COSTS, error)
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            return bool(self._queue or self._unindexed)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and self._is_idle():
                    self._changed.wait()
                if self._stopping:
                    return
            self.run_once()

    def _next_number(self) -> int:
        self._numbers = self._numbers % _LARGEST_NUMBER + 1
        return self._numbers

    def _put(self, entry: _Entry) -> None:
        if not self._stopping:
            self._queue.append(entry)
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        return not (self._queue or self._busy or self._unindexed or self._can_publish())

    def _can_publish(self) -> bool:
        return self._has_news and bool(self._free)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self._shape[0]:
            raise InvalidValueError(f"rows must be from 0 to {self._shape[0] - 1}, got {row}")

    def _take(self, queue: deque[_Entry]) -> None:
        ready: list[Report] = []
        for entry in queue:
            if self._stopping:
                return
            try:
                if not isinstance(entry, Report):
                    # What was reported before a request ends belongs to it.
                    self._continue(ready)
                    ready = []
                if isinstance(entry, Report):
                    ready += self._follow(entry)
                elif isinstance(entry, _Expected):
                    self._publish()  # now: the next line may wait for a whole step
                    ready += self._follow(entry.read())
                else:
                    entry()
            except Exception as error:
                self._faults.add(_COSTS, error)
        self._continue(ready)
        if self._unindexed:
            self._index(self._unindexed.popleft())
        missing = {
            row: (self._at[row].number, int(self._lengths[row]))
            for row in np.flatnonzero(self._waits & (self._ids >= 0)).tolist()
        }
        with self._changed:
            self._missing = missing
        self._publish()

    def _follow(self, report: Report) -> list[Report]:
        """What of a report the engine can take now, and what waited for it."""
        rows, sizes = report.rows, np.diff(report.offsets)
        known = self._lengths[rows]
        # Most rows go on where the engine's text ends, or before: these are taken together.
        together = (self._ids[rows] >= 0) & (self._working.requests[rows] == report.numbers)
        together &= ~self._waits[rows] & (report.positions <= known)
        if len(np.unique(rows)) < len(rows):
            together[:] = False
        new = np.where(together, np.maximum(report.positions + sizes - known, 0), 0)
        self.counts.repeated += int(np.count_nonzero(together & (sizes > 0) & (new == 0)))
        found = []
        taken = new > 0
        if taken.any():
            place = np.arange(len(report.token_ids)) - np.repeat(report.offsets[:-1], sizes)
            offsets = np.concatenate([[0], np.cumsum(new[taken])])
            found.append(
                Report(
                    rows[taken],
                    report.numbers[taken],
                    known[taken],
                    report.token_ids[place >= np.repeat(sizes - new, sizes)],
                    offsets,
                    report.drafted[taken],
                )
            )
            self._lengths[rows[taken]] += new[taken]
        for i in np.flatnonzero(~together).tolist():
            request = self._at.get(int(rows[i]))
            if request is None or request.number != report.numbers[i]:
                self.counts.repeated += 1
                continue
            start, end = report.offsets[i : i + 2]
            if start == end:
                continue
            position = int(report.positions[i])
            request.keep(_Piece(position, report.token_ids[start:end], int(report.drafted[i])))
            pieces = self._ready(request)
            self.counts.repeated += not pieces and position not in request.waiting
            found += pieces
        return found

    def _ready(self, request: _Request) -> list[Report]:
        """What of the waiting pieces of a request in a row the engine can take now."""
        row = request.row
        assert row is not None
        found = []
        if self._ids[row] >= 0:
            for piece in request.take(int(self._lengths[row])):
                size = len(piece.token_ids)
                one = np.array([row]), np.array([request.number]), np.array([piece.position])
                found.append(
                    Report(*one, piece.token_ids, np.array([0, size]), np.array([piece.drafted]))
                )
                self._lengths[row] += size
        request.forget()
        self._waits[row] = bool(request.waiting)
        return found

    def _add(self, request: _Request) -> None:
        self._requests[request.number] = request
        self._seat(request)
        self._unindexed.append(request)

    def _suspend(self, number: int) -> None:
        request = self._requests.get(number)
        if request is not None:
            self._unseat(request)

    def _resume(self, row: int, number: int, new: int, token_ids: ArrayLike) -> None:
        request = self._requests.pop(number, None)
        if request is None:
            return
        # What is on its way, or published, of the text before is not taken for the text now.
        self._requests[new] = request
        self._unseat(request)
        request.number, request.row = new, row
        self._seat(request)
        if request.id < 0:
            # The prompt was not indexed yet; what was emitted behind it is missing.
            self._restart(request, token_ids, np.size(request.prompt_ids))
            return
        text = np.asarray(token_ids, np.int32)
        if request.length > len(text):
            with contextlib.suppress(Exception):
                self._engine.cancel(request.id)
            request.id = -1
            self._restart(request, text, request.prompt_size)
            return
        request.keep(_Piece(request.length, text[request.length :], 0))
        self._go_on(request)

    def _restart(self, request: _Request, token_ids: ArrayLike, prompt_size: int) -> None:
        """Has a request indexed, whose text is as given."""
        text = np.asarray(token_ids, np.int32)
        request.prompt_ids = text[:prompt_size]
        request.keep(_Piece(prompt_size, text[prompt_size:], 0))
        self._unindexed.append(request)

    def _end(self, number: int, end: Callable[[int], object]) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        self._remove(request)
        if request.id < 0:
            return
        try:
            end(request.id)
        except Exception as error:
            self._give_up(request, error)

    def _give_up(self, request: _Request, error: Exception | None = None) -> None:
        """Drafts for a request no more; `error` is counted."""
        if error is not None:
            self._faults.add(_COSTS, error)
        self._remove(request)
        if request.id >= 0:
            # After an error the engine may know the request no more.
            with contextlib.suppress(Exception):
                self._engine.cancel(request.id)

    def _remove(self, request: _Request) -> None:
        self._requests.pop(request.number, None)
        self._unseat(request)

    def _seat(self, request: _Request) -> None:
        """Gives a request its row."""
        assert request.row is not None
        other = self._at.get(request.row)
        if other is not None:
            self._give_up(other)
        self._at[request.row] = request

    def _unseat(self, request: _Request) -> None:
        """Frees the row of a request."""
        row, request.row = request.row, None
        if row is None:
            return
        if request.id >= 0:
            request.length = int(self._lengths[row])
        request.waiting.clear()
        del self._at[row]
        self._ids[row] = -1
        self._waits[row] = False
        self._working.continuations.count[row] = 0
        self._working.requests[row] = 0
        self._has_news = True

    def _index(self, request: _Request) -> None:
        if request.id >= 0 or request.row is None:
            return  # it ended, or was suspended
        try:
            prompt = np.asarray(request.prompt_ids, np.int32)
            known = self._engine.add_request(prompt, **request.options)
        except Exception as error:
            self._give_up(request, error)
            return
        if known is None:
            self._remove(request)
            return
        request.id = known
        request.length = request.prompt_size = len(prompt)
        request.prompt_ids = ()
        self._go_on(request)

    def _go_on(self, request: _Request) -> None:
        """Has a request that the engine knows drafted for in its row."""
        row = request.row
        assert row is not None
        self._ids[row] = request.id
        self._lengths[row] = request.length
        self._working.requests[row] = request.number
        nothing = np.array([row]), np.array([request.number]), self._lengths[row : row + 1].copy()
        none = np.zeros(0, np.int32), np.zeros(2, np.int64), np.zeros(1, np.int64)
        self._continue([Report(*nothing, *none), *self._ready(request)])

    def _continue(self, reports: list[Report]) -> None:
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
        except Exception as error:
            refused = error.rows if isinstance(error, FastdraftError) else {}
            if not refused:
                self._faults.add(_COSTS, error)
            for row in sorted({int(rows[i]) for i in refused or range(len(rows))}):
                self._give_up(self._at[row], error if refused else None)

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
        if self._published is not None:
            try:
                self._published(snapshot)
            except Exception as error:
                self._faults.add(_COSTS, error)


def _check(report: Report, rows: int) -> None:
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
