"""The engine's side of vLLM's V2 speculator: what the background drafter's thread calls.

The drafter follows the texts of requests. Here are their settings, their memory and their counts,
and the reports of steps that come from the device. All calls come from the drafter's thread.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastdraft import DraftConfig
from fastdraft.late.background import Report
from fastdraft.serving.request_options import UNLIMITED
from fastdraft.serving.vllm.interface import VllmConfig
from fastdraft.serving.vllm.requests import Request, VllmRequests, VllmText
from fastdraft.serving.vllm.settings import Settings
from fastdraft.serving.vllm.v2.device_buffers import EndsCopy
from fastdraft.serving.vllm.v2.head_record import HeadRecord

__all__ = ["LateRequests"]


class LateRequests(VllmRequests[VllmText]):
    """The requests of one V2 model runner, by the engine's ids: a `BatchEngine`.

    Args:
        vllm_config, settings: See `VllmRequests`.
        slots: The most requests at once.
        nodes: The most nodes of a tree of continuations.
        depth: How far they reach, in tokens.
        head: What is learned of a head beside it; None without one.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: Settings,
        *,
        slots: int,
        nodes: int,
        depth: int,
        head: HeadRecord | None = None,
    ) -> None:
        config = DraftConfig(lookahead=depth, tree_budget=nodes)
        super().__init__(vllm_config, settings, config, drafts=True, in_step=True)
        self._head = head
        # By slot, of the step under way: the tokens of its draft, and whose it is.
        self._drafted = np.zeros(slots, dtype=np.int64)
        self._drafting = np.zeros(slots, dtype=np.int64)
        # And the tokens at which its text ends, if a stop token has come.
        self._stopped_at = np.zeros(slots, dtype=np.int64)
        # The slots whose continuations have changed since `changed` was called.
        self._changed: list[NDArray[np.int64]] = []

    def add_request(self, prompt_ids: ArrayLike, *, request: Request, length: int) -> int | None:
        """Starts to draft for a request whose text has `length` tokens by now; None where its
        settings say no, or are wrong."""
        text = VllmText()
        self._start(text, request, np.asarray(prompt_ids, dtype=np.int32), length)
        if text.request is None:
            self._ended(text)
            return None
        self._texts[text.request] = text
        return text.request

    def continue_batch(self, *args: Any, slots: NDArray[np.int64], **options: Any) -> None:
        """As `Engine.continue_batch`; its time is counted."""
        started = time.perf_counter()
        self._changed.append(slots)
        try:
            self.engine.continue_batch(*args, slots=slots, **options)
        finally:
            self._seconds += time.perf_counter() - started

    def changed(self) -> NDArray[np.int64]:
        """The slots whose continuations have changed since the last call."""
        slots, self._changed = self._changed, []
        return np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64)

    def finish(self, request: int) -> None:
        """Ends a request, so that it is remembered."""
        self._end([request])

    def cancel(self, request: int) -> None:
        """Ends a request; nothing is remembered."""
        text = self._texts.pop(request, None)
        if text is not None:
            self._give_up(text)
            self._ended(text)

    def read(
        self,
        copy: EndsCopy,
        slots: NDArray[np.int64],
        numbers: NDArray[np.int64],
        longest: NDArray[np.int64],
        stops: NDArray[np.object_],
    ) -> Report:
        """The tokens that a step emitted, on the host. Waits for the device.

        Each row repeats its last tokens as far back as the copy reaches, so that a step that was
        lost before it is made good.

        Args:
            copy: The ends of the texts; given back.
            slots, numbers: (rows,), where they are, and the background drafter's numbers.
            longest: (rows,), the tokens at which the texts end. vLLM cuts off what the step has
                emitted beyond them, and so does this.
            stops: (rows,), the tokens, as a frozenset, behind which vLLM ends each text.
        """
        try:
            ends, bounds = copy.wait()
            # The last of a row's logits are for the token behind its draft. Some of what was
            # drafted may not be verified, and padding may be.
            verified = np.diff(bounds).astype(np.int64) - 1
            emitted, lengths, drafted = ends[:, :3].astype(np.int64).T
            beside = 0 if self._head is None else self._head.width
            drafts, last = np.split(ends[:, 3:], [beside], axis=1)
            if self._head is not None:
                self._head.observe(slots, numbers, emitted, lengths, verified, drafts, last)
            stopped = self._stop(slots, numbers, stops, emitted, lengths, last)
            longest = np.minimum(longest, stopped)
            over = np.maximum(lengths - longest, 0)
            lengths -= over
            reach = last.shape[1] - over
            sizes = np.where(emitted > over, np.maximum(np.minimum(lengths, reach), 0), 0)
            columns, ends_at = np.arange(last.shape[1]), reach[:, None]
            tails = last[(columns < ends_at) & (columns >= ends_at - sizes[:, None])]
            # One token follows a draft, and must have room too.
            drafted = np.minimum(drafted, np.maximum(longest - lengths - 1, 0))
            before = np.where(self._drafting[slots] == numbers, self._drafted[slots], 0)
            before = np.minimum(before, verified)
            self._drafted[slots], self._drafting[slots] = drafted, numbers
        finally:
            copy.free()
        self._steps += 1
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return Report(slots, numbers, lengths - sizes, tails, offsets, before)

    def _stop(
        self,
        slots: NDArray[np.int64],
        numbers: NDArray[np.int64],
        stops: NDArray[np.object_],
        emitted: NDArray[np.int64],
        lengths: NDArray[np.int64],
        last: NDArray[np.int32],
    ) -> NDArray[np.int64]:
        """The tokens at which texts end by a stop token, in this step or an earlier one.

        The device goes on behind it: to the end of its draft, and until vLLM ends the request.
        """
        width = last.shape[1]
        is_stop = np.zeros(last.shape, dtype=bool)
        for each in {*stops}:
            rows = np.array([other == each for other in stops])
            is_stop[rows] = np.isin(last[rows], [*each])
        is_stop &= np.arange(width) >= width - emitted[:, None]
        known = np.where(self._drafting[slots] == numbers, self._stopped_at[slots], UNLIMITED)
        found = np.where(is_stop.any(1), lengths - width + 1 + is_stop.argmax(1), UNLIMITED)
        self._stopped_at[slots] = ends = np.minimum(known, found)
        return ends

    def publish(self) -> None:
        """Writes the counts into the ledger."""
        self._guard([], self._publish)
