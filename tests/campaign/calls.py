"""Random calls on an engine and its datastore."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from fastdraft import Datastore, Engine, Offers
from fastdraft.config import NgramAutocomplete, PredictedOutputs, PromptLookup

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
    """Each call checks what it did, also where memory ends in it."""

    def __init__(self, engine: Engine, memory: Datastore, rng: random.Random) -> None:
        self._engine = engine
        self._memory = memory
        self._rng = rng
        self._most = engine.config.tree_budget or engine.config.lookahead
        self._requests: list[int] = []

    def draw(self) -> Callable[[], None]:
        """The next call."""
        some = self._rng.sample(self._requests, self._rng.randint(0, len(self._requests)))
        calls = [self._add, self._step, self._step, self._batch, self._batch, self._end]
        if self._engine.config.drafter is None:
            calls.append(self._offer)
        call = self._rng.choice([*calls, self._remember])
        return functools.partial(call, some, self._text(90))

    def check(self) -> None:
        """Asserts what holds of an engine whatever failed."""
        assert self._engine.num_requests == len(self._requests)
        for request in self._requests:
            self._engine.num_tokens(request)
        for kind in self._engine.offer_kinds:
            self._engine.propose_batch([], offers=Offers.of_rows(kind, []))
        if self._engine.config.max_bytes is not None:
            assert self._engine.num_bytes <= self._engine.config.max_bytes
        assert self._memory.bytes <= self._memory.max_bytes

    def end(self) -> None:
        """Ends all requests."""
        for request in self._requests:
            stats = self._engine.finish(request)
            assert 0 <= stats.accepted <= min(stats.drafted, stats.emitted)

    def _text(self, most: int) -> list[int]:
        alphabet = self._rng.randint(2, _ALPHABET)
        motif = [self._rng.randrange(alphabet) for _ in range(self._rng.choice([1, 5, most]))]
        return (motif * most)[: self._rng.randint(0, most)]

    def _add(self, _: list[int], text: list[int]) -> None:
        if len(self._requests) < 24:
            self._requests.append(self._engine.add_request(text, prediction=text[5:30] or None))

    def _step(self, some: list[int], text: list[int]) -> None:
        for request in some[:1]:
            before = self._engine.num_tokens(request)
            self._check(self._engine.propose(request, token_cost=0), self._most)
            try:
                self._engine.observe(request, text)
            except MemoryError:
                assert before <= self._engine.num_tokens(request) <= before + len(text)
                raise
            assert self._engine.num_tokens(request) == before + len(text)

    def _batch(self, some: list[int], text: list[int]) -> None:
        before = [self._engine.num_tokens(request) for request in some]
        limits = [self._rng.randint(0, 20) for _ in some]
        batch = self._engine.propose_batch(some, limits=limits, token_cost=0)
        drafts = batch.tolist()
        for limit, draft in zip(limits, drafts, strict=True):
            assert len(draft) <= min(limit, self._most)
        self._check(batch, self._most * len(some))
        emitted = [(draft + text)[: self._rng.randint(0, 8)] for draft in drafts]
        offsets = np.cumsum([0, *map(len, emitted)])
        self._engine.observe_batch(some, [*itertools.chain(*emitted)], offsets)
        for request, size, tokens in zip(some, before, emitted, strict=True):
            assert self._engine.num_tokens(request) == size + len(tokens)

    def _offer(self, some: list[int], text: list[int]) -> None:
        """Kinds that are new are added; whatever fails in that, they can be used afterwards."""
        kind = f"{self._rng.randrange(16):x}" * 40  # so long a name takes memory of its own
        offers = Offers.of_rows(kind, [text[:8]] * len(some))
        self._check(self._engine.propose_batch(some, offers=offers), self._most * len(some))

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
                if self._engine.num_requests < before:
                    self._requests.remove(request)

    def _remember(self, _: list[int], text: list[int]) -> None:
        self._memory.add(text * 2)
        for occurrence in self._memory.find(text[:8]):
            self._memory.read(occurrence.next, 10)
