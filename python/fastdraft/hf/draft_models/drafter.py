"""The drafter of a generation that runs draft models, alone or beside the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft import DraftBatch, DraftStats, Offers
from fastdraft.drafters import AssistantModel, Staged
from fastdraft.hf.draft_models.engine import EngineStage
from fastdraft.hf.draft_models.stage import Scoring, Stage
from fastdraft.hf.drafts import RowDraft, StepDrafts
from fastdraft.hf.vocabulary import draft_vocabularies
from fastdraft.stats import AssistantStats

__all__ = ["ModelDrafter"]

_KIND: Final = "assistant"


class ModelDrafter:
    """Drafts for the rows of one generation, with draft models and with the engine.

    A `Drafter`. In each step the engine says for which rows the model's draft pays, and gets it as
    an offer. Greedily the engine drafts from both. When sampling, such a row drafts just what the
    model drew: choosing among drawn tokens would bias the output. A model that fails is left out of
    the rest of the generation.

    Args:
        assistant: The draft models.
        target: The target model.
        tokenizer: The target's tokenizer, or `None`.
        rows: How many requests there will be.
        seeds: The seed of each request; `None` for greedy generation.

    Attributes:
        weighs_cost: Whether the drafts depend on the time of the target's forwards.
        has_engine: Whether an engine drafts, too.

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
        self.weighs_cost = models[-1].schedule.weighs_cost or models[-1].lookup is not None
        self._samples = seeds is not None
        self._lookup = models[-1].lookup
        self._engine_stage = None if staged.engine is None else EngineStage(staged.engine)
        self.has_engine = self._lookup is not None or self._engine_stage is not None
        self._seeds = seeds
        self._texts: dict[int, list[int]] = {}
        self._stats: dict[int, DraftStats] = {}  # without an engine beside the models
        self._drafts: dict[int, RowDraft] = {}  # the model's, of this step

        # Their parameters, and in the end the target's.
        sizes = [_parameters(each) for each in (*(each.model for each in models), target)]
        lower: Stage | EngineStage | None = self._engine_stage
        self._stages: list[Stage] = []
        for level, each in enumerate(models):
            lower = Stage(
                each,
                rows=rows,
                samples=self._samples,
                vocabulary=vocabularies[level],
                level=len(models) - 1 - level,
                ratio=sizes[level] / sizes[level + 1],
                lower=lower,
            )
            self._stages.append(lower)
        self._stage: Stage | None = self._stages[-1]

    def shape_by(self, scoring: Scoring) -> None:
        """Shapes the models' logits so. To be called before the first draft."""
        for stage in self._stages:
            stage.scoring = scoring

    @property
    def assistants(self) -> list[AssistantStats]:
        """Statistics of each model's drafts so far, the smallest model first."""
        return [stage.stats for stage in self._stages]

    def add_request(self, prompt_ids: Any, **options: Any) -> int:
        """As `Engine.add_request`; without an engine, requests are numbered from 0."""
        row = request = len(self._texts)
        if self._lookup is not None:
            request = self._lookup.add_request(prompt_ids, **options)
        text = self._texts[request] = np.asarray(prompt_ids).tolist()
        self._stats[request] = DraftStats()
        if self._engine_stage is not None:
            self._engine_stage.add(request, prompt_ids, **options)
        for stage in self._stages:
            stage.add(request, text, 0 if self._seeds is None else self._seeds[row])
        return request

    def propose_batch(
        self,
        requests: Sequence[int],
        *,
        limits: NDArray[np.int32] | None = None,
        cost: NDArray[np.float64] | None = None,
        padded: bool = False,
    ) -> StepDrafts:
        """As `Drafter.propose_batch`. Needs limits and a cost, whose whole widths it reads."""
        assert cost is not None and limits is not None
        step = cost[len(requests) - 1 :: len(requests)]
        most = dict(zip(requests, limits.tolist(), strict=True))
        engine, stage = self._lookup, self._stage
        if engine is None:
            self._draft(most, step, len(requests))
            return StepDrafts.of_rows([self._drafts.get(each, RowDraft()) for each in requests])
        options: dict[str, Any] = {"limits": limits, "cost": cost, "padded": padded}
        asked: dict[int, int] = {}
        reading = 0.0
        if stage is not None:
            drafting, reading, expected = stage.expected(requests, step, limits)
            wanted = engine.wants(
                _KIND, requests, time=drafting + reading, expected=expected, **options
            )
            for request, yes in zip(requests, wanted.tolist(), strict=True):
                if yes:
                    asked[request] = min(most[request], self._longest)
                else:
                    stage.pass_by(request)
        merges = not self._samples and engine.config.tree_budget is None
        behind = partial(self._promised_behind, requests, options) if merges else None
        seconds = self._draft(asked, step, len(requests), found_to_pay=True, behind=behind)
        batch = self._propose(requests, self._drafts, seconds + reading, options)
        logits = {
            row: torch.stack(self._drafts[request].logits)
            for row, request in enumerate(requests)
            if self._samples and request in self._drafts
        }
        return replace(StepDrafts.of(batch), draft_logits=logits)

    @property
    def _longest(self) -> int:
        """The most tokens of a chain that the engine drafts."""
        assert self._lookup is not None
        config = self._lookup.config
        return min(config.lookahead, config.tree_budget or config.lookahead)

    def _propose(
        self,
        requests: Sequence[int],
        found: dict[int, RowDraft],
        seconds: float,
        options: dict[str, Any],
    ) -> DraftBatch:
        """The engine's drafts beside the model's, which took `seconds`."""
        assert self._lookup is not None
        drafts = [found.get(request, RowDraft()) for request in requests]
        offers = Offers.of_rows(
            _KIND,
            [draft.token_ids for draft in drafts],
            confidences=[draft.confidences for draft in drafts],
            time=seconds,
            drawn=self._samples,
        )
        return self._lookup.propose_batch(requests, offers=offers, **options)

    def _promised_behind(
        self, requests: Sequence[int], options: dict[str, Any], found: dict[int, RowDraft]
    ) -> dict[int, float]:
        """How many tokens the engine promises behind the model's drafts so far. For chains.

        A draft is left out where the engine prefers another token to one of the model's.
        """
        batch = self._propose(requests, found, 0.0, options)
        probabilities = batch.probabilities.tolist()
        promised = {}
        for request, tokens, (start, end) in zip(
            requests, batch.tolist(), pairwise(batch.offsets.tolist()), strict=True
        ):
            own = found[request].token_ids if request in found else []
            if own and tokens[: len(own)] == own[: len(tokens)]:
                promised[request] = sum(probabilities[start + len(own) : end])
        return promised

    def _draft(
        self,
        limits: dict[int, int],
        step: NDArray[np.float64],
        running: int,
        *,
        found_to_pay: bool = False,
        behind: Callable[[dict[int, RowDraft]], dict[int, float]] | None = None,
    ) -> float:
        """Lets the model draft for these rows, which sets `_drafts`. Returns the seconds it took.

        `found_to_pay`: whether the engine has found that it pays.
        """
        self._drafts = {}
        if self._stage is None or not limits:
            return 0.0
        try:
            drafts, seconds = self._stage.draft(
                {request: [] for request in limits},
                limits,
                step=step,
                running=running,
                found_to_pay=found_to_pay,
                behind=behind,
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
            return 0.0
        self._drafts = {request: draft for request, draft in drafts.items() if draft.token_ids}
        return seconds

    def observe_batch(
        self,
        requests: Sequence[int],
        emitted_ids: NDArray[np.int32],
        offsets: NDArray[np.int32],
    ) -> None:
        """As `Drafter.observe_batch`."""
        if self._lookup is not None:
            self._lookup.observe_batch(requests, emitted_ids, offsets)
        if self._engine_stage is not None:
            self._engine_stage.observe(requests, emitted_ids, offsets)
        for slot, request in enumerate(requests):
            emitted = emitted_ids[offsets[slot] : offsets[slot + 1]].tolist()
            draft = self._drafts.pop(request, RowDraft())
            if self._stage is not None and draft.token_ids:
                self._stage.learn(request, draft, emitted)
            if self._lookup is None:
                self._stats[request] += DraftStats(
                    steps=1,
                    emitted=len(emitted),
                    drafts=int(bool(draft.token_ids)),
                    drafted=len(draft.token_ids),
                    accepted=draft.accepted(emitted),
                )
            self._texts[request] += emitted

    def finish(self, request: int) -> DraftStats:
        """As `Drafter.finish`."""
        stats = self._stats[request] if self._lookup is None else self._lookup.finish(request)
        self._end(request, finished=True)
        return stats

    def cancel(self, request: int) -> None:
        """As `Drafter.cancel`."""
        if self._lookup is not None:
            self._lookup.cancel(request)
        self._end(request, finished=False)

    def _end(self, request: int, *, finished: bool) -> None:
        if self._engine_stage is not None:
            self._engine_stage.end(request, finished=finished)
        for stage in self._stages:
            stage.end(request)

    def warn_of_size(self) -> None:
        """Warns of models that are bigger than what they draft for, with the cost measured."""
        for stage in self._stages:
            c = stage.stats.c
            if stage.ratio > 1 and c is not None:
                text = f"the assistant has {stage.ratio:.1f} times the parameters of its target: "
                text += f"a draft token takes {c:.2f} of a target forward"
                warnings.warn(text, stacklevel=2)


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
