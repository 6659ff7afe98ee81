"""The engine in a generation with draft models: beside them, or as their first stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft import DraftBatch, DraftStats, Engine
from fastdraft.hf.drafts import FlatDrafts, RowDraft

__all__ = ["EngineRequests", "EngineStage"]


class EngineRequests:
    """An engine's requests for the rows of one generation, numbered from 0 as they are added."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids: list[int] = []

    @property
    def drafts_trees(self) -> bool:
        return self._engine.config.tree_budget is not None

    @property
    def longest(self) -> int:
        """The most tokens of a chain."""
        config = self._engine.config
        return min(config.lookahead, config.tree_budget or config.lookahead)

    def add(self, prompt_ids: Any, **options: Any) -> None:
        """Adds the next request, as `Engine.add_request`."""
        self._ids.append(self._engine.add_request(prompt_ids, **options))

    def wants(self, kind: str, requests: Sequence[int], **options: Any) -> list[bool]:
        """As `Engine.wants`."""
        wanted: list[bool] = self._engine.wants(kind, self._of(requests), **options).tolist()
        return wanted

    def propose(self, requests: Sequence[int], **options: Any) -> DraftBatch:
        """As `Engine.propose_batch`."""
        return self._engine.propose_batch(self._of(requests), **options)

    def observe(
        self, requests: Sequence[int], emitted_ids: NDArray[np.int32], offsets: NDArray[np.int32]
    ) -> None:
        """As `Engine.observe_batch`."""
        self._engine.observe_batch(self._of(requests), emitted_ids, offsets)

    def finish(self, request: int) -> DraftStats:
        """As `Engine.finish`."""
        return self._engine.finish(self._ids[request])

    def cancel(self, request: int) -> None:
        """As `Engine.cancel`."""
        self._engine.cancel(self._ids[request])

    def _of(self, requests: Sequence[int]) -> list[int]:
        return [self._ids[each] for each in requests]


class EngineStage(EngineRequests):
    """The engine as the first stage: its draft of a step serves while the emitted tokens follow it.

    It learns from the target's tokens alone.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._chains: dict[int, list[int]] = {}

    def draft(
        self,
        pending: dict[int, list[int]],
        limits: dict[int, int],
        *,
        step: NDArray[np.float64],
        running: int,
    ) -> tuple[dict[int, RowDraft], float]:
        """As `Stage.draft`."""
        asked = [request for request in pending if request not in self._chains]
        if asked:
            batch = self.propose(asked, cost=np.repeat(step, running), padded=True)
            drafts = FlatDrafts.of_batch(batch)
            chains = drafts if drafts.are_chains else drafts.best_chains()
            self._chains |= zip(asked, chains.by_row, strict=True)
        found = {}
        for request, tokens in pending.items():
            chain, start = self._chains[request], len(tokens)
            follows = chain[:start] == tokens
            found[request] = RowDraft(chain[start : start + limits[request]] if follows else [])
        return found, 0.0

    def learn(self, request: int, draft: RowDraft, emitted: Sequence[int]) -> None:
        """As `Stage.learn`: the engine learns nothing here."""

    def observe(
        self, requests: Sequence[int], emitted_ids: NDArray[np.int32], offsets: NDArray[np.int32]
    ) -> None:
        for request in requests:
            self._chains.pop(request, None)
        super().observe(requests, emitted_ids, offsets)
