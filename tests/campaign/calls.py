"""Random calls on an engine and its datastore, by one caller or by several at once."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastdraft import Datastore, Engine
from fastdraft.config import NgramAutocomplete, PredictedOutputs, PromptLookup
from fastdraft.errors import UnknownRequestError

__all__ = ["DRAFTERS", "Calls"]

DRAFTERS: list[dict[str, Any]] = [
    {},
    {"tree_budget": 16},
    {"drafter": PromptLookup()},
    {"drafter": NgramAutocomplete(3, 0.1)},
    {"drafter": PredictedOutputs(4)},
]
_ALPHABET = 10


class Calls:
    """The calls of one caller. Each checks what it did, also where memory ends in it.

    Args:
        shared: Requests that other callers may end at any time; each caller then has one of its
            own, and a row whose request has vanished costs that row alone. Without them all
            requests are its own.
    """

    def __init__(
        self,
        engine: Engine,
        memory: Datastore,
        chance: random.Random,
        shared: list[int] | None = None,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._chance = chance
        self._shared = shared
        self._most = engine.config.tree_budget or engine.config.lookahead
        self._own = [] if shared is None else [engine.add_request(self._text(60))]

    def draw(self) -> Callable[[], None]:
        """The next call."""
        known = list(self._own if self._shared is None else self._shared)
        some = self._chance.sample(known, self._chance.randint(0, len(known)))
        calls = [self._add, self._step, self._step, self._batch, self._batch, self._end]
        call = self._chance.choice([*calls, self._remember])
        return functools.partial(call, some, self._text(90))

    def check(self) -> None:
        """What holds of an engine that is this caller's alone, whatever failed."""
        assert self._engine.num_requests == len(self._own)
        for request in self._own:
            self._engine.num_tokens(request)
        if self._engine.config.max_bytes is not None:
            assert self._engine.num_bytes <= self._engine.config.max_bytes
        assert self._memory.bytes <= self._memory.max_bytes

    def end(self) -> None:
        """Ends the caller's own requests."""
        for request in self._own:
            stats = self._engine.finish(request)
            assert 0 <= stats.accepted <= min(stats.drafted, stats.emitted)

    def _text(self, most: int) -> list[int]:
        alphabet = self._chance.randint(2, _ALPHABET)
        motif = [self._chance.randrange(alphabet) for _ in range(self._chance.choice([1, 5, most]))]
        return (motif * most)[: self._chance.randint(0, most)]

    def _add(self, _: list[int], text: list[int]) -> None:
        requests = self._own if self._shared is None else self._shared
        if len(requests) < 24:
            requests.append(self._engine.add_request(text, prediction=text[5:30] or None))

    def _step(self, some: list[int], text: list[int]) -> None:
        for request in some[:1]:
            before = self._engine.num_tokens(request)
            self._check(self._engine.propose(request, token_cost=0), self._most)
            try:
                self._engine.observe(request, text)
            except MemoryError:
                assert before <= self._engine.num_tokens(request) <= before + len(text)
                raise
            after = self._engine.num_tokens(request)
            assert after == before + len(text) or self._shared is not None

    def _batch(self, some: list[int], text: list[int]) -> None:
        if self._shared is not None:
            some.insert(self._chance.randint(0, len(some)), self._own[0])
        own = {
            at: self._engine.num_tokens(each) for at, each in enumerate(some) if each in self._own
        }
        limits = [self._chance.randint(0, 20) for _ in some]
        try:
            batch = self._engine.propose_batch(some, limits=limits, token_cost=0)
        except UnknownRequestError as error:
            raise AssertionError("a batch failed for a request that vanished") from error
        drafts = batch.tolist()
        for limit, draft in zip(limits, drafts, strict=True):
            assert len(draft) <= min(limit, self._most)
        self._check(batch, self._most * len(some))
        emitted = [(draft + text)[: self._chance.randint(0, 8)] for draft in drafts]
        offsets = np.cumsum([0, *map(len, emitted)])
        failed: Mapping[int, Exception] = {}
        try:
            self._engine.observe_batch(some, [*itertools.chain(*emitted)], offsets)
        except UnknownRequestError as error:
            failed = error.rows
        assert own.keys().isdisjoint(failed)
        assert all(isinstance(error, UnknownRequestError) for error in failed.values())
        for at, before in own.items():
            assert self._engine.num_tokens(some[at]) == before + len(emitted[at])
        if self._shared is not None and self._engine.num_tokens(self._own[0]) > 500:
            self.end()
            self._own[0] = self._engine.add_request(text)

    def _check(self, draft: Any, most: int) -> None:
        tokens = draft.token_ids
        assert len(tokens) <= most
        assert tokens.max(initial=0) < _ALPHABET and tokens.min(initial=0) >= 0, tokens
        assert np.isfinite(draft.probabilities).all()

    def _end(self, some: list[int], text: list[int]) -> None:
        for request in some[: len(text) % 4]:
            before = self._engine.num_requests
            try:
                (self._engine.finish if len(text) % 2 else self._engine.cancel)(request)
            finally:
                if self._shared is not None:
                    # Several may end it; one takes it off the list.
                    with contextlib.suppress(ValueError):
                        self._shared.remove(request)
                elif self._engine.num_requests < before:
                    self._own.remove(request)

    def _remember(self, _: list[int], text: list[int]) -> None:
        self._memory.add(text * 2)
        for occurrence in self._memory.find(text[:8]):
            self._memory.read(occurrence.next, 10)
