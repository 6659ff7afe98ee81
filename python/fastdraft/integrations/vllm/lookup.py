"""The engine's side of vLLM's V2 speculator: requests by place, a step late, on one thread.

The speculator says what happened, in order: requests enter places, leave them and end, and steps
emit tokens. Here the engine hears of it, and its continuations go to the device. All calls come
from one thread; none of them raises.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastdraft import DraftConfig
from fastdraft.errors import FastdraftError
from fastdraft.integrations.vllm.requests import VllmRequests, VllmText
from fastdraft.integrations.vllm.rows import Request
from fastdraft.integrations.vllm.settings import Settings
from fastdraft.integrations.vllm.transfers import EndsCopy, TreeBuffers

__all__ = ["LateRequests"]

_NOWHERE = -1


@dataclass(slots=True)
class _Text(VllmText):
    place: int = _NOWHERE


class LateRequests(VllmRequests[_Text]):
    """The requests of one V2 model runner, known by its ids and by the places of its buffers.

    Args:
        vllm_config: A `vllm.config.VllmConfig`.
        settings: Those in it.
        trees: Where continuations go.
        depth: How far they reach, in tokens.
    """

    def __init__(
        self, vllm_config: Any, settings: Settings, trees: TreeBuffers, *, depth: int
    ) -> None:
        places, nodes = trees.host.token_ids.shape
        config = DraftConfig(lookahead=depth, tree_budget=nodes)
        super().__init__(vllm_config, settings, config, drafts=True)
        self._trees = trees
        self._at: list[_Text | None] = [None] * places
        # By place: the engine's id, the tokens that it has, and those of the draft under way.
        self._ids = np.full(places, _NOWHERE, dtype=np.int64)
        self._known = np.zeros(places, dtype=np.int64)
        self._drafted = np.zeros(places, dtype=np.int64)

    def enter(
        self, key: Hashable, number: int, place: int, request: Request, token_ids: ArrayLike
    ) -> None:
        """A request takes a place: a new one, or one that was preempted and goes on.

        Args:
            key: Its id.
            number: What says at the place that it is this request's.
            place: Its place.
            request: What is known of it.
            token_ids: Its text so far.
        """
        self._guard([], self._enter, key, number, place, request, token_ids)

    def leave(self, keys: Iterable[Hashable]) -> None:
        """Requests that were preempted leave their places. Some may come again."""
        for key in keys:
            text = self._texts.get(key)
            if text is not None:
                self._clear(text)

    def end(self, keys: Iterable[Hashable]) -> None:
        """Requests have finished, or were aborted."""
        keys = list(keys)
        for key in keys:
            if key in self._texts:
                self._clear(self._texts[key])
        self._end(keys)
        self._guard([], self._publish)

    def step(self, copy: EndsCopy, places: NDArray[np.integer]) -> None:
        """Takes what a step emitted, when it is on the host, and looks up continuations.

        Args:
            copy: The ends of the texts; given back.
            places: (rows,), their places.

        Tokens that an earlier copy should have brought are taken from this one, as far back as it
        reaches. A request that lost more goes on without continuations.
        """
        started = time.perf_counter()
        try:
            self._guard([text for text in self._at if text is not None], self._step, copy, places)
        finally:
            copy.free()
        self._steps += 1
        self._seconds += time.perf_counter() - started
        self._guard([], self._publish)

    def _enter(
        self, key: Hashable, number: int, place: int, request: Request, token_ids: ArrayLike
    ) -> None:
        tokens = np.asarray(token_ids, dtype=np.int32)
        text = self._texts.get(key)
        preempted = text is not None and text.place == _NOWHERE and text.request is not None
        if text is not None and not (preempted and text.length <= len(tokens)):
            # The host took tokens back, or changed the prompt. The engine cannot.
            self._drop(key)
            text = None
        if text is None:
            text = self._texts[key] = _Text()
            self._start(text, request, tokens, len(tokens))
        other = self._at[place]
        if other is not None:
            self._clear(other)
        text.place = place
        self._at[place] = text
        self._trees.host.count[place] = 0
        self._trees.requests[place] = number
        self._drafted[place] = 0
        if text.request is not None:
            self._ids[place] = text.request
            new = tokens[text.length :]
            self._continue(np.array([place]), new, np.array([0, len(new)]))
            text.length = len(tokens)
        self._known[place] = text.length
        self._trees.publish()

    def _step(self, copy: EndsCopy, places: NDArray[np.integer]) -> None:
        ends = copy.wait()
        emitted, lengths, drafted = ends[:, :3].astype(np.int64).T
        tails = ends[:, 3:]
        reach = tails.shape[1]
        new = lengths - self._known[places]
        live = (emitted > 0) & (new > 0) & (self._ids[places] != _NOWHERE)
        for place in places[live & (new > reach)]:
            self._lose(self._at[place])
        live &= new <= reach
        if live.any():
            count = new[live]
            which = np.arange(reach) >= reach - count[:, None]
            offsets = np.zeros(len(count) + 1, dtype=np.int64)
            np.cumsum(count, out=offsets[1:])
            self._continue(places[live], tails[live][which], offsets)
            self._known[places[live]] = lengths[live]
        self._drafted[places] = drafted
        self._trees.publish()

    def _continue(
        self, places: NDArray[np.integer], token_ids: NDArray[np.int32], offsets: NDArray[np.int64]
    ) -> None:
        """Passes on what was emitted at places, and writes what may follow.

        Requests that the engine refuses go on without continuations, each a fault.
        """
        try:
            self.engine.continue_batch(
                self._ids[places],
                token_ids,
                offsets,
                self._trees.host,
                drafted=self._drafted[places],
                places=places,
            )
        except FastdraftError as error:
            if not error.rows:
                raise
            for row in error.rows:
                self._fault()
                self._lose(self._at[places[row]])

    def _lose(self, text: _Text | None) -> None:
        if text is not None:
            self._give_up(text)

    def _give_up(self, text: _Text) -> None:
        place = text.place
        super()._give_up(text)
        if place != _NOWHERE:
            self._ids[place] = _NOWHERE
            self._trees.host.count[place] = 0

    def _clear(self, text: _Text) -> None:
        """Frees the place of a text."""
        place, text.place = text.place, _NOWHERE
        if place == _NOWHERE:
            return
        if text.request is not None:
            text.length = int(self._known[place])
        self._ids[place] = _NOWHERE
        self._trees.host.count[place] = 0
        self._at[place] = None

    def _drop(self, key: Hashable) -> None:
        """Forgets a request, and remembers nothing of it."""
        text = self._texts.pop(key)
        self._clear(text)
        self._give_up(text)
        if text.row is not None and self._ledger is not None:
            self._ledger.close(text.row)
