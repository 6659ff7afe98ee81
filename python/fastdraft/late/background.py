"""Drafting beside a host that never waits: a thread that owns the engine.

An asynchronous host launches its next step before it knows the last one's tokens. It says how to
read each step's tokens once they arrive, and drafts from the latest continuations:

    drafter = BackgroundDrafter(engine, continuations, numbers, publish)
    number = drafter.add(row, prompt_ids)
    drafter.expect(read)             # after each step; read() gives a Report
    drafter.finish(number)

No call waits for the engine. Drafts are only guesses, so nothing that goes wrong here can change an
output: a step that is late or lost, or an error, costs drafts.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.faults import Faults
from fastdraft.late.continuations import Continuations

__all__ = ["BackgroundDrafter", "BatchEngine", "Report"]

_logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]
Numbers = NDArray[np.int64]

_LARGEST_NUMBER = 2**31 - 1
_drafters: weakref.WeakSet[BackgroundDrafter] = weakref.WeakSet()
_COSTS = "drafting ahead failed; outputs stay as they are"


class BatchEngine(Protocol):
    """The calls of a background drafter, all on its thread: `fastdraft.Engine`, or a host's own
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


class Report(NamedTuple):
    """The tokens that the rows of a step emitted: row rows[i] token_ids[offsets[i]:offsets[i + 1]].

    Attributes:
        rows, numbers: int64, the rows, each once, and the numbers of their requests.
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

    def last(self, sizes: Numbers) -> Report:
        """The last `sizes[i]` tokens of each row, of those rows that have any."""
        known = np.diff(self.offsets)
        steps = np.arange(len(self.token_ids)) - np.repeat(self.offsets[:-1], known)
        taken = sizes > 0
        return Report(
            self.rows[taken],
            self.numbers[taken],
            (self.positions + known - sizes)[taken],
            self.token_ids[steps >= np.repeat(known - sizes, known)],
            np.concatenate([[0], np.cumsum(sizes[taken])]),
            self.drafted[taken],
        )


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    row: int
    text: Sequence[int] | Ids
    """The tokens that it began with, the prompt first."""
    size: int
    prompt_size: int
    options: dict[str, Any]
    id: int = -1
    """The engine's; -1 before the prompt is indexed."""
    missed: list[Report] = field(default_factory=list)
    """Its tokens of the meantime."""


_Queue = deque[tuple[Callable[[], Any], bool]]
"""A call, and whether it gives a report."""


class BackgroundDrafter:
    """Owns an engine in a thread of its own, for hosts that do not wait for drafts.

    The host numbers its rows. A row serves one request at a time; a request that was preempted is
    cancelled, and added anew, when it comes back. Any thread may make any call.

    **Order.** Steps may be repeated or lost. Each says where in the request's text its tokens
    begin, so repeated tokens are left out, and a step from behind a gap is. The next report that
    covers the gap heals it; until then the row keeps its last continuations. A host that repeats
    the last few steps' tokens in each report needs to do no more.

    **Faults.** A request that the engine refuses is drafted for no more. Any other error of a call
    costs the requests in that call their drafts; those that are added later are drafted for. Each
    is counted in `faults`, and logged as a warning.
    """

    def __init__(
        self,
        engine: BatchEngine,
        continuations: Continuations,
        numbers: Ids,
        publish: Callable[[], object],
        *,
        is_expected: Callable[[Exception], bool] = lambda _: False,
        begin: Callable[[], object] = lambda: None,
        start: bool = True,
    ) -> None:
        """Starts the thread.

        Args:
            engine: From now on only this drafter's calls may observe or propose. Its config's
                `tree_budget` and `lookahead` bound the continuations' nodes and depth.
            continuations: The arrays that the thread writes, in any memory, such as pinned memory.
            numbers: (rows,) int32, written too: the number of the request that each row's
                continuations are of; 0 for none.
            publish: Called on the thread with news in the arrays, which stay as they are during the
                call: it copies them, as to a device.
            is_expected: Whether an error of one request is no fault, such as a limit that is set.
            begin: Called first on the thread, such as to choose its device.
            start: False starts no thread: the host calls `run_once`.
        """
        self._faults = Faults(_logger)
        self._engine = engine
        self._out = continuations
        self._numbers = numbers
        self._send = publish
        self._is_expected = is_expected
        self._begin = begin
        self._changed = threading.Condition()
        # The condition's lock guards these.
        self._queue: _Queue = deque()
        self._stopping = self._busy = False
        self._last_number = 0
        # The thread's own: requests by number, and those without an index.
        self._requests: dict[int, _Request] = {}
        self._unindexed: deque[_Request] = deque()
        # By row: the number of its request, the engine's id, and the length of its text; -1 for
        # none.
        rows = len(numbers)
        self._seated = np.full(rows, -1, np.int64)
        self._ids = np.full(rows, -1, np.int64)
        self._lengths = np.zeros(rows, np.int64)
        self._has_news = False
        self._thread: threading.Thread | None = None
        _drafters.add(self)
        if start:
            self._thread = threading.Thread(
                target=self._run, name="fastdraft-background", daemon=True
            )
            self._thread.start()

    @property
    def faults(self) -> int:
        """Errors. Each cost drafts, of a step, of one request, or of all that were running."""
        return self._faults.count

    # Called by the host.

    def add(
        self,
        row: int,
        text: Sequence[int] | Ids,
        *,
        prompt_size: int | None = None,
        **options: Any,
    ) -> int:
        """Gives a row a request, and returns the request's number, 1 or greater.

        text: its token ids so far, read on the thread, so that a long list keeps nobody waiting.
            They must stay; more may be appended, and are not read.
        prompt_size: how many of them are its prompt; None says all.
        options: as for the engine's `add_request`, such as `prediction`, `datastores` and
            `templates`; not copied.

        The request that the row had is cancelled. An error of the engine, as over a limit, is met
        later: the request is then never drafted for.

        Raises:
            InvalidValueError: There is no such row.
        """
        if not 0 <= row < len(self._numbers):
            raise InvalidValueError(f"rows must be from 0 to {len(self._numbers) - 1}, got {row}")
        size = len(text)
        prompt_size = size if prompt_size is None else prompt_size
        with self._changed:
            self._last_number = self._last_number % _LARGEST_NUMBER + 1
            request = _Request(self._last_number, row, text, size, prompt_size, options)
            self._put(lambda: self._add(request))
        return request.number

    def expect(self, read: Callable[[], Report]) -> None:
        """Has the thread call `read` for what a step emitted.

        read: may wait for a device. What was reported before is published first. An error costs
            this report, and is counted.
        """
        with self._changed:
            self._put(read, reports=True)

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

    def drain(self, timeout: float = 60.0) -> bool:
        """Waits until all that was reported is taken and published, at most `timeout` seconds.
        Gives whether it is."""
        if self._thread is None:
            while not self._stopping and self.run_once():
                pass
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._is_idle(), timeout)
            return self._is_idle()

    def stop(self, timeout: float = 5.0) -> bool:
        """Stops the thread after the call of the engine that it is in; what is queued is dropped.

        Running requests stay in the engine. Returns whether the thread has stopped within `timeout`
        seconds. An interpreter that exits stops the threads itself. Further calls do nothing.
        """
        with self._changed:
            self._stopping = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # Called by the thread.

    def run_once(self) -> bool:
        """Does what is queued now: the thread's work, for a drafter that has none.

        Takes all reports that wait, and indexes one prompt at most, since a long one takes a while.
        Returns whether anything is left.
        """
        with self._changed:
            if self._stopping:
                return False
            queue, self._queue = self._queue, deque()
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
        try:
            self._begin()
        except Exception as error:
            self._faults.add(_COSTS, error)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not self._is_idle())
                if self._stopping:
                    return
            self.run_once()

    def _put(self, call: Callable[[], Any], *, reports: bool = False) -> None:
        if not self._stopping:
            self._queue.append((call, reports))
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        return not (self._queue or self._busy or self._unindexed)

    def _take(self, queue: _Queue) -> None:
        ready: list[Report] = []
        for call, reports in queue:
            if self._stopping:
                return
            try:
                if reports:
                    self._publish()  # now: the next line may wait for a whole step
                    ready.append(self._new_of(call()))
                else:
                    # Tokens reported before a request ends belong to it.
                    self._continue(ready)
                    ready = []
                    call()
            except Exception as error:
                self._faults.add(_COSTS, error)
        self._continue(ready)
        if self._unindexed:
            self._index(self._unindexed.popleft())
        self._publish()

    def _new_of(self, report: Report) -> Report:
        """The part of a report that the engine can take now. Requests without index keep theirs."""
        rows, known = report.rows, self._lengths[report.rows]
        ends = report.positions + np.diff(report.offsets)
        follows = (self._seated[rows] == report.numbers) & (report.positions <= known)
        new = np.where(follows, np.maximum(ends - known, 0), 0)
        self._lengths[rows] += new
        is_indexed = self._ids[rows] >= 0
        for i in np.flatnonzero(~is_indexed & (new > 0)):
            part = report.last(np.where(np.arange(len(rows)) == i, new, 0))
            self._requests[int(report.numbers[i])].missed.append(part)
        return report.last(np.where(is_indexed, new, 0))

    def _add(self, request: _Request) -> None:
        other = self._requests.get(int(self._seated[request.row]))
        if other is not None:
            self._give_up(other)
        self._requests[request.number] = request
        self._seated[request.row] = request.number
        self._lengths[request.row] = request.size
        self._unindexed.append(request)

    def _end(self, number: int, end: Callable[[int], object]) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        self._remove(request)
        if request.id >= 0:
            try:
                end(request.id)
            except Exception as error:
                self._give_up(request, error)

    def _give_up(self, request: _Request, error: Exception | None = None) -> None:
        """Drafts for a request no more; `error` is counted, unless it was expected."""
        if error is not None and not self._is_expected(error):
            self._faults.add(_COSTS, error)
        self._remove(request)
        if request.id >= 0:
            # After an error the engine may know the request no more.
            with contextlib.suppress(Exception):
                self._engine.cancel(request.id)

    def _remove(self, request: _Request) -> None:
        """Frees the row of a request."""
        if self._requests.pop(request.number, None) is not None:
            row = request.row
            self._seated[row] = self._ids[row] = -1
            self._out.count[row] = self._numbers[row] = 0
            self._has_news = True

    def _index(self, request: _Request) -> None:
        if request.number not in self._requests:
            return  # it ended
        row, size = request.row, request.prompt_size
        try:
            text = np.asarray(request.text[: request.size], np.int32)
            known = self._engine.add_request(text[:size], **request.options)
        except Exception as error:
            self._give_up(request, error)
            return
        if known is None:
            self._remove(request)
            return
        request.id = self._ids[row] = known
        self._numbers[row] = request.number
        head = np.array([row]), np.array([request.number]), np.array([size])
        begun = Report(*head, text[size:], np.array([0, len(text) - size]), np.zeros(1, np.int64))
        missed, request.missed, request.text = request.missed, [], ()
        self._continue([begun, *missed])

    def _continue(self, reports: list[Report]) -> None:
        """Has the engine observe reports, and renew the continuations of their rows."""
        if not sum(len(each.rows) for each in reports):
            return
        rows = np.concatenate([each.rows for each in reports])
        sizes = np.concatenate([np.diff(each.offsets) for each in reports])
        self._has_news = True
        try:
            self._engine.continue_batch(
                self._ids[rows],
                np.concatenate([each.token_ids for each in reports]),
                np.concatenate([[0], np.cumsum(sizes)]),
                self._out,
                drafted=np.concatenate([each.drafted for each in reports]),
                slots=rows,
            )
        except Exception as error:
            refused = error.rows if isinstance(error, FastdraftError) else {}
            if not refused:
                self._faults.add(_COSTS, error)
            faults = {int(rows[i]): each for i, each in refused.items()}
            for row in sorted(faults or {*rows.tolist()}):
                self._give_up(self._requests[int(self._seated[row])], faults.get(row))

    def _publish(self) -> None:
        if not self._has_news:
            return
        self._has_news = False
        try:
            self._send()
        except Exception as error:
            self._faults.add(_COSTS, error)


@atexit.register
def _stop_all() -> None:
    """Stops all threads: one that comes back from the core to no interpreter aborts the process."""
    for drafter in list(_drafters):
        drafter.stop()
