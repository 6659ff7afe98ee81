"""The drafter of a generation that runs draft models, alone or beside the engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft import DraftStats
from fastdraft.drafters import AssistantModel, Staged
from fastdraft.drafters.estimator import Belief
from fastdraft.drafters.schedule import DraftTime
from fastdraft.hf.draft_models.engine import EngineRequests, EngineStage
from fastdraft.hf.draft_models.stage import Scoring, Stage
from fastdraft.hf.drafts import FlatDrafts, RowDraft
from fastdraft.hf.vocabulary import draft_vocabularies
from fastdraft.stats import AssistantStats

__all__ = ["ModelDrafter"]


class ModelDrafter:
    """Drafts for the rows of one generation, with draft models and with the engine.

    A `Drafter`. In each step the engine drafts for a row where its draft promises more than the
    model's, which takes time of its own, and else the model does. A model that fails is left out of
    the rest of the generation.

    Args:
        assistant: The draft models.
        target: The target model.
        tokenizer: The target's tokenizer, or `None`.
        rows: How many requests there will be.
        seeds: The seed of each request; `None` for greedy generation.

    Attributes:
        scoring: Shapes the models' logits; to be set before the first draft.
        weighs_cost: Whether the drafts depend on the time of the target's forwards.

    Raises:
        InvalidValueError: A draft model does not fit the target.
    """

    def __init__(
        self,
        assistant: AssistantModel | Staged,
        *,
        target: Any,
        tokenizer: Any,
        rows: int,
        seeds: list[int] | None,
    ) -> None:
        staged = assistant if isinstance(assistant, Staged) else Staged([assistant])
        models = staged.models
        vocabularies = draft_vocabularies(models, target, tokenizer)
        lookup = models[-1].lookup
        self.scoring: Scoring | None = None
        self.weighs_cost = models[-1].schedule.weighs_cost or lookup is not None
        self._lookup = None if lookup is None else EngineRequests(lookup)
        self._lookup_estimator = models[-1].lookup_estimator
        self._engine_stage = None if staged.engine is None else EngineStage(staged.engine)
        self._engines = [each for each in (self._lookup, self._engine_stage) if each is not None]
        self._texts: list[list[int]] = []
        self._stats: list[DraftStats] = []
        self._found: dict[int, RowDraft] = {}  # the engine's drafts of this step
        self._drafts: dict[int, RowDraft] = {}  # those that are verified

        # Their parameters, and in the end the target's.
        self._sizes = [_parameters(each) for each in (*(each.model for each in models), target)]
        lower: Stage | EngineStage | None = self._engine_stage
        self._stages: list[Stage] = []
        for level, each in enumerate(models):
            lower = Stage(
                each,
                texts=self._texts,
                rows=rows,
                seeds=seeds,
                scoring=self._score,
                vocabulary=vocabularies[level],
                level=len(models) - 1 - level,
                ratio=self._sizes[level] / self._sizes[level + 1],
                lower=lower,
            )
            self._stages.append(lower)
        self._stage: Stage | None = self._stages[-1]

    @property
    def assistants(self) -> list[AssistantStats]:
        """What the drafts of each model were worth so far, the smallest model first."""
        return [stage.stats for stage in self._stages]

    def add_request(self, prompt_ids: Any, *, prediction: Any = None, templates: Any = None) -> int:
        """As `Drafter.add_request`; requests are numbered from 0."""
        for engine in self._engines:
            engine.add(prompt_ids, prediction, templates)
        self._texts.append(np.asarray(prompt_ids).tolist())
        self._stats.append(DraftStats())
        return len(self._texts) - 1

    def propose_batch(
        self,
        requests: Sequence[int],
        *,
        limits: NDArray[np.int32] | None = None,
        cost: NDArray[np.float64] | None = None,
        padded: bool = False,
    ) -> FlatDrafts:
        """As `Drafter.propose_batch`. Needs limits and a cost, whose whole widths it reads."""
        assert cost is not None and limits is not None
        step = cost[len(requests) - 1 :: len(requests)]
        self._found = dict.fromkeys(requests, RowDraft())
        if self._lookup is not None:
            self._found = self._lookup.drafts(requests, limits=limits, cost=cost, padded=padded)
        self._drafts = dict(self._found)
        self._draft(dict(zip(requests, limits.tolist(), strict=True)), step)
        return FlatDrafts.of_rows([self._drafts[request] for request in requests])

    def _draft(self, limits: dict[int, int], step: NDArray[np.float64]) -> None:
        """Lets the model draft where that promises more than what the engine found."""
        stage = self._stage
        if stage is None:
            return
        time = stage.time(step)
        asked: dict[int, int] = {}
        width = 1
        for request, limit in limits.items():
            found = self._found[request]
            if found.token_ids and self._rate(request, found, time) >= stage.rate(request, time):
                width = max(width, 1 + len(found.token_ids))
            elif limit > 0:
                asked[request] = limit
        try:
            drafts = stage.draft(
                {request: [] for request in asked},
                asked,
                step=step,
                running=len(limits),
                width=width,
            )
        except Exception as error:
            # Out of memory, or whatever a model may raise: the target can do without its drafts.
            warnings.warn(
                f"the assistant failed and is left out of this generation: {error!r}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._stage = None
            for each in self._stages:
                each.close()
            return
        self._drafts |= {request: draft for request, draft in drafts.items() if draft.token_ids}

    def _rate(self, request: int, found: RowDraft, time: DraftTime) -> float:
        """Tokens a second with a draft of the engine, as in `Schedule.rate`.

        The engine's own probabilities are calibrated over all requests. For this one they may be
        too high, and the model could draft instead: so its recent acceptance counts here.
        """
        estimator = self._lookup_estimator
        empty = estimator.begin((self, request))
        beliefs: list[Belief] = []
        for parent, confidence in zip(found.parents, found.confidences, strict=True):
            before = beliefs[parent] if parent >= 0 else empty
            beliefs.append(estimator.extended(before, confidence))
        emitted = 1 + float(sum(belief.sum() for belief in beliefs))
        return emitted / time.target(len(beliefs))

    def observe_batch(
        self,
        requests: Sequence[int],
        emitted_ids: NDArray[np.int32],
        offsets: NDArray[np.int32],
    ) -> None:
        """As `Drafter.observe_batch`."""
        for engine in self._engines:
            engine.observe(requests, emitted_ids, offsets)
        for slot, request in enumerate(requests):
            self._observe(request, emitted_ids[offsets[slot] : offsets[slot + 1]].tolist())

    def _observe(self, request: int, emitted: list[int]) -> None:
        nothing = RowDraft()
        found, draft = self._found.pop(request, nothing), self._drafts.pop(request, nothing)
        if self._lookup is not None:
            # Learns from a draft of the engine, whether or not it was verified.
            key = (self, request)
            if found.token_ids:
                accepted, judged = found.judged(emitted)
                confidences = [found.confidences[index] for index in judged]
                self._lookup_estimator.observe(key, confidences, len(accepted))
            else:
                self._lookup_estimator.pass_by(key)
        if self._stage is not None and draft is not found:
            self._stage.learn(request, draft, emitted)
        accepted, _ = draft.judged(emitted)
        predicted = len(draft.predicted.intersection(accepted))
        self._stats[request] += DraftStats(
            steps=1,
            emitted=len(emitted),
            drafts=int(bool(draft.token_ids)),
            drafted=len(draft.token_ids),
            accepted=len(accepted),
            accepted_prediction_tokens=predicted,
            rejected_prediction_tokens=len(draft.predicted) - predicted,
        )
        self._texts[request] += emitted

    def finish(self, request: int) -> DraftStats:
        """As `Drafter.finish`."""
        self._end(request, cancelled=False)
        return self._stats[request]

    def cancel(self, request: int) -> None:
        """As `Drafter.cancel`."""
        self._end(request, cancelled=True)

    def _end(self, request: int, *, cancelled: bool) -> None:
        for engine in self._engines:
            engine.end(request, cancelled=cancelled)
        self._lookup_estimator.forget((self, request))
        for stage in self._stages:
            stage.end(request)

    def _score(self, *arguments: Any) -> torch.Tensor:
        assert self.scoring is not None
        return self.scoring(*arguments)

    def warn_of_size(self) -> None:
        """Warns where a draft model is bigger than the target, with the cost that was measured."""
        target = self._sizes[-1]
        for stage, size in zip(self._stages, self._sizes, strict=False):
            c = stage.stats.c
            if size > target and c is not None:
                warnings.warn(
                    f"the assistant has {size} parameters and the target {target}: a draft token "
                    f"takes {c:.2f} of a target forward",
                    UserWarning,
                    stacklevel=2,
                )


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
