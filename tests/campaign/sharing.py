"""Threads that share engines, datastores and requests, and cancel what others are at."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.errors import UnknownRequestError

__all__ = ["case"]

_SECONDS = 1.0
_ALPHABET = 6


def case(seed: int) -> Counter[str]:
    """One engine, several threads, a second of random calls."""
    chance = random.Random(seed)
    memory = Datastore(max_bytes=chance.choice([1 << 18, 1 << 22]))
    config = chance.choice(
        [
            DraftConfig(),
            DraftConfig(tree_budget=16),
            DraftConfig.prompt_lookup(),
            DraftConfig.ngram(),
        ]
    )
    engine = Engine(config, datastores=[memory])
    shared: list[int] = []
    found: Counter[str] = Counter()
    failures: list[BaseException] = []
    until = time.monotonic() + _SECONDS

    def work(seed: int) -> None:
        of_thread: Counter[str] = Counter()
        try:
            caller = _Caller(engine, memory, shared, random.Random(seed), of_thread)
            while time.monotonic() < until and not failures:
                caller.call()
            caller.end()
        except BaseException as failure:
            failures.append(failure)
        found.update(of_thread)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=work, args=(chance.getrandbits(32),), daemon=True)
            for _ in range(chance.choice([2, 4, 8]))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS + 30)
            assert not thread.is_alive(), "a thread waits for ever"
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]
    for request in shared:
        engine.cancel(request)
    assert engine.num_requests == 0, engine.num_requests
    assert engine.num_bytes == 0, engine.num_bytes
    assert memory.bytes <= memory.max_bytes
    return found


class _Caller:
    """Random calls of one thread. All threads may end a request at any time, but its own."""

    def __init__(
        self,
        engine: Engine,
        memory: Datastore,
        shared: list[int],
        chance: random.Random,
        found: Counter[str],
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._shared = shared
        self._chance = chance
        self._found = found
        self._most = engine.config.tree_budget or engine.config.lookahead
        self._own = engine.add_request(self._text(60))

    def call(self) -> None:
        call = self._chance.choice(
            [
                self._add,
                self._propose,
                self._observe,
                self._batch,
                self._batch,
                self._end,
                self._remember,
            ]
        )
        self._found["calls of threads"] += 1
        try:
            call()
        except UnknownRequestError:
            self._found["requests that vanished"] += 1

    def end(self) -> None:
        self._engine.finish(self._own)

    def _text(self, most: int) -> list[int]:
        motif = [self._chance.randrange(_ALPHABET) for _ in range(self._chance.randint(1, 5))]
        return (motif * most)[: self._chance.randint(0, most)]

    def _add(self) -> None:
        if len(self._shared) < 24:
            self._shared.append(
                self._engine.add_request(self._text(60), prediction=self._text(20) or None)
            )

    def _some(self) -> list[int]:
        known = list(self._shared)
        return self._chance.sample(known, self._chance.randint(0, len(known)))

    def _propose(self) -> None:
        for request in self._some()[:1]:
            self._check(self._engine.propose(request, token_cost=0), self._most)

    def _observe(self) -> None:
        for request in self._some()[:1]:
            self._engine.observe(request, self._text(6))

    def _batch(self) -> None:
        """A row whose request was ended by another thread costs that row alone."""
        requests = self._some()
        own = self._chance.randint(0, len(requests))
        requests.insert(own, self._own)
        limits = [self._chance.randint(0, 20) for _ in requests]
        try:
            batch = self._engine.propose_batch(requests, limits=limits, token_cost=0)
        except UnknownRequestError as error:
            raise AssertionError("a batch failed for a request that vanished") from error
        for limit, draft in zip(limits, batch.tolist(), strict=True):
            assert len(draft) <= min(limit, self._most)
        self._check(batch, self._most * len(requests))
        emitted = [self._text(4) for _ in requests]
        offsets = np.cumsum([0, *map(len, emitted)])
        before = self._engine.num_tokens(self._own)
        failed: Mapping[int, Exception] = {}
        try:
            self._engine.observe_batch(requests, [*itertools.chain(*emitted)], offsets)
        except UnknownRequestError as error:
            failed = error.rows
        assert own not in failed
        assert all(isinstance(error, UnknownRequestError) for error in failed.values())
        self._found["rows that vanished"] += len(failed)
        assert self._engine.num_tokens(self._own) == before + len(emitted[own])
        if before > 500:
            self._engine.finish(self._own)
            self._own = self._engine.add_request(self._text(60))

    def _check(self, draft: Any, most: int) -> None:
        tokens = draft.token_ids
        assert len(tokens) <= most
        assert tokens.max(initial=0) < _ALPHABET and tokens.min(initial=0) >= 0, tokens
        assert np.isfinite(draft.probabilities).all()

    def _end(self) -> None:
        for request in self._some()[: self._chance.randint(0, 3)]:
            try:
                end = self._engine.cancel if self._chance.random() < 0.5 else self._engine.finish
                end(request)
            finally:
                # Several may end it; one takes it off the list.
                with contextlib.suppress(ValueError):
                    self._shared.remove(request)

    def _remember(self) -> None:
        self._memory.add(self._text(200))
        for occurrence in self._memory.find(self._text(8)):
            self._memory.read(occurrence.next, 10)
