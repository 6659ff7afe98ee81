"""The engine as the first stage of a generation with draft models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft import Engine
from fastdraft.hf.drafts import RowDraft, StepDrafts

__all__ = ["EngineStage"]


class EngineStage:
    """The engine as the first stage: its draft of a step serves while the emitted tokens follow it.

    It learns from the target's tokens alone, and numbers requests in its own way.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids: dict[int, int] = {}
        self._chains: dict[int, list[int]] = {}

    def add(self, request: int, prompt_ids: Any, **options: Any) -> None:
        """Adds a request, as `Engine.add_request`."""
        self._ids[request] = self._engine.add_request(prompt_ids, **options)

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
            ids = [self._ids[request] for request in asked]
            batch = self._engine.propose_batch(ids, cost=np.repeat(step, running), padded=True)
            chains = StepDrafts.of(batch).best_chains()
            self._chains |= zip(asked, chains.tolist(), strict=True)
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
        """Tells the tokens that the target emitted, as `Engine.observe_batch`."""
        for request in requests:
            self._chains.pop(request, None)
        ids = [self._ids[request] for request in requests]
        self._engine.observe_batch(ids, emitted_ids, offsets)

    def end(self, request: int, *, finished: bool) -> None:
        """Finishes a request, or cancels it."""
        (self._engine.finish if finished else self._engine.cancel)(self._ids[request])
