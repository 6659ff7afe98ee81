"""The engine in a generation with draft models: beside them, or as their first stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft import DraftBatch, Engine, Source
from fastdraft.hf.drafts import FlatDrafts, RowDraft

__all__ = ["EngineRequests", "EngineStage"]


class EngineRequests:
    """An engine's requests for the rows of one generation, numbered from 0 as they are added."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids: list[int] = []

    def add(self, prompt_ids: Any, prediction: Any, templates: Any) -> None:
        """Adds the next request."""
        request = self._engine.add_request(prompt_ids, prediction=prediction, templates=templates)
        self._ids.append(request)

    def propose(self, requests: Sequence[int], **options: Any) -> DraftBatch:
        """As `Engine.propose_batch`."""
        return self._engine.propose_batch([self._ids[each] for each in requests], **options)

    def observe(
        self, requests: Sequence[int], emitted_ids: NDArray[np.int32], offsets: NDArray[np.int32]
    ) -> None:
        """As `Engine.observe_batch`."""
        self._engine.observe_batch([self._ids[each] for each in requests], emitted_ids, offsets)

    def end(self, request: int, *, cancelled: bool) -> None:
        """Finishes or cancels a request."""
        (self._engine.cancel if cancelled else self._engine.finish)(self._ids[request])

    def drafts(self, requests: Sequence[int], **options: Any) -> dict[int, RowDraft]:
        """The engine's draft for each of `requests`."""
        batch = self.propose(requests, **options)
        token_ids, parents = batch.token_ids.tolist(), batch.parents.tolist()
        probabilities = batch.probabilities.tolist()
        predicted = batch.sources == Source.PREDICTION
        drafts = {}
        for request, (start, end) in zip(requests, pairwise(batch.offsets.tolist()), strict=True):
            draft = drafts[request] = RowDraft(
                token_ids[start:end],
                parents[start:end],
                probabilities[start:end],
                predicted=frozenset(np.flatnonzero(predicted[start:end]).tolist()),
            )
            before = [*draft.probabilities, 1.0]  # the text's last token is parent -1
            draft.confidences = [
                # At the end of a long draft both probabilities may be rounded to 0.
                min(probability / (before[parent] or 1.0), 1.0)
                for probability, parent in zip(draft.probabilities, draft.parents, strict=True)
            ]
        return drafts


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
    ) -> dict[int, RowDraft]:
        """As `Stage.draft`."""
        asked = [request for request in pending if request not in self._chains]
        if asked:
            batch = self.propose(asked, cost=np.repeat(step, running), padded=True)
            drafts = FlatDrafts.of_batch(batch)
            chains = drafts if drafts.are_chains else drafts.best_chains()
            self._chains |= zip(asked, chains.by_row(), strict=True)
        found = {}
        for request, tokens in pending.items():
            chain, start = self._chains[request], len(tokens)
            follows = chain[:start] == tokens
            ids = chain[start : start + limits[request]] if follows else []
            found[request] = RowDraft(ids, list(range(-1, len(ids) - 1)))
        return found

    def learn(self, request: int, draft: RowDraft, emitted: Sequence[int]) -> None:
        """As `Stage.learn`: the engine learns nothing here."""

    def observe(
        self, requests: Sequence[int], emitted_ids: NDArray[np.int32], offsets: NDArray[np.int32]
    ) -> None:
        for request in requests:
            self._chains.pop(request, None)
        super().observe(requests, emitted_ids, offsets)
