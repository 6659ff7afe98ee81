"""Threads that share engines, datastores and requests, and cancel what others are at."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

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
    seeds = [chance.getrandbits(32) for _ in range(chance.choice([2, 4, 8]))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(seeds)) as threads:
            callers = [_Caller(engine, memory, shared, random.Random(each)) for each in seeds]
            found = sum(threads.map(_Caller.run, callers), Counter[str]())
    finally:
        sys.setswitchinterval(before)
    for request in shared:
        engine.cancel(request)
    assert engine.num_requests == 0, engine.num_requests
    assert engine.num_bytes == 0, engine.num_bytes
    assert memory.bytes <= memory.max_bytes
    return found


class _Caller:
    """Random calls of one thread. All threads may end a request at any time, but its own."""

    def __init__(
        self, engine: Engine, memory: Datastore, shared: list[int], chance: random.Random
    ) -> None:
        self._engine, self._memory, self._shared, self._chance = engine, memory, shared, chance
        self._most = engine.config.tree_budget or engine.config.lookahead
        self._own = engine.add_request(self._text(60))
        self._found: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        until = time.monotonic() + _SECONDS
        calls = [self._add, self._observe, self._batch, self._batch, self._end, self._remember]
        while time.monotonic() < until:
            self._found["calls of threads"] += 1
            try:
                self._chance.choice(calls)()
            except UnknownRequestError:
                self._found["requests that vanished"] += 1
        self._engine.finish(self._own)
        return self._found

    def _text(self, most: int) -> list[int]:
        motif = [self._chance.randrange(_ALPHABET) for _ in range(self._chance.randint(1, 5))]
        return (motif * most)[: self._chance.randint(0, most)]

    def _some(self) -> list[int]:
        known = list(self._shared)
        return self._chance.sample(known, self._chance.randint(0, len(known)))

    def _add(self) -> None:
        if len(self._shared) < 24:
            self._shared.append(
                self._engine.add_request(self._text(60), prediction=self._text(20) or None)
            )

    def _observe(self) -> None:
        for request in self._some()[:1]:
            draft = self._engine.propose(request, token_cost=0)
            assert len(draft) <= self._most
            assert set(draft.tolist()) <= set(range(_ALPHABET))
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
            assert set(draft) <= set(range(_ALPHABET))
        assert np.isfinite(batch.probabilities).all()
        emitted = [self._text(4) for _ in requests]
        before = self._engine.num_tokens(self._own)
        try:
            self._engine.observe_batch(
                requests, [*itertools.chain(*emitted)], np.cumsum([0, *map(len, emitted)])
            )
        except UnknownRequestError as error:
            assert own not in error.rows
            assert all(isinstance(each, UnknownRequestError) for each in error.rows.values())
            self._found["rows that vanished"] += len(error.rows)
        assert self._engine.num_tokens(self._own) == before + len(emitted[own])
        if before > 500:
            self._engine.finish(self._own)
            self._own = self._engine.add_request(self._text(60))

    def _end(self) -> None:
        for request in self._some()[: self._chance.randint(0, 3)]:
            try:
                self._chance.choice([self._engine.cancel, self._engine.finish])(request)
            finally:
                # Several may end it; one takes it off the list.
                with contextlib.suppress(ValueError):
                    self._shared.remove(request)

    def _remember(self) -> None:
        self._memory.add(self._text(200))
        for occurrence in self._memory.find(self._text(8)):
            self._memory.read(occurrence.next, 10)
