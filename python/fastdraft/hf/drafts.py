"""The drafter of a generation that runs draft models, alone or beside the engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft import DraftBatch, DraftStats, Engine, Source
from fastdraft.drafters.acceptance import Path
from fastdraft.drafters.assistant import AssistantModel, Staged
from fastdraft.drafters.schedule import DraftTime
from fastdraft.errors import InvalidValueError
from fastdraft.hf.stage import Drafted, EngineStage, Scoring, Stage, Vocabulary
from fastdraft.stats import AssistantStats

__all__ = ["ModelDraftBatch", "ModelDrafts"]


@dataclass(frozen=True)
class ModelDraftBatch:
    """A batch of drafts as `Drafter.propose_batch` gives it, and what they were drawn from.

    Attributes:
        laws: For each place in the batch whose draft was drawn, the scores whose softmax each of
            its tokens was drawn from, float32 (drafted, vocabulary). None of those that were chosen
            without chance.
    """

    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    offsets: NDArray[np.int32]
    laws: dict[int, torch.Tensor]


@dataclass
class _Chosen:
    """What was drafted for a request in this step: by the engine, or by the model."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    predicted: list[bool] = field(default_factory=list)
    drafted: Drafted | None = None

    def confidences(self) -> list[float]:
        """How probable the drafter takes each token to be accepted where its parent is."""
        before = [*self.probabilities, 1.0]  # the text's last token is parent -1
        return [
            # At the end of a long draft both may be too small to be told from 0.
            min(chance / (before[parent] or 1.0), 1.0)
            for chance, parent in zip(self.probabilities, self.parents, strict=True)
        ]

    def accepted(self, emitted: Sequence[int]) -> list[int]:
        """The places of the draft tokens that `emitted` begins with."""
        path: list[int] = []
        for place, token in enumerate(self.token_ids):
            parent = path[-1] if path else -1
            if len(path) == len(emitted):
                break
            if self.parents[place] == parent and emitted[len(path)] == token:
                path.append(place)
        return path


class ModelDrafts:
    """Drafts for the rows of one generation, with draft models and with the engine.

    A `Drafter`. In each step a row is drafted for by the engine where its draft promises more than
    the model's, which costs time of its own, and else by the model. A model that fails is left out
    of the rest of the generation.

    Args:
        assistant: The draft models.
        target: The target model.
        tokenizer: The target's tokenizer, or `None`.
        rows: How many requests there will be.
        seeds: That of each request; `None` for greedy generation.

    Attributes:
        scoring: Shapes the models' logits; to be set before the first draft.

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
        vocabularies = _vocabularies(models, target, tokenizer)
        self.scoring: Scoring | None = None
        self._texts: list[list[int]] = []
        self._target = target
        self._models = models
        self._lookup: Engine | None = models[-1].lookup
        self._lookup_acceptance = models[-1].lookup_acceptance
        self._found: dict[int, int] = {}  # the engine's request of each request
        self._below = None if staged.engine is None else EngineStage(staged.engine)
        self._proposed: dict[int, _Chosen] = {}  # by the engine
        self._chosen: dict[int, _Chosen] = {}
        self._stats: dict[int, DraftStats] = {}

        below: Stage | EngineStage | None = self._below
        larger = [*(each.model for each in models[1:]), target]
        self._stages: list[Stage] = []
        for level, each in enumerate(models):
            below = Stage(
                each,
                texts=self._texts,
                rows=rows,
                seeds=seeds,
                scoring=self._score,
                vocabulary=vocabularies[level],
                level=len(models) - 1 - level,
                ratio=_parameters(each.model) / _parameters(larger[level]),
                below=below,
            )
            self._stages.append(below)
        self._stage: Stage | None = self._stages[-1]

    @property
    def weighs_cost(self) -> bool:
        """Whether what is drafted depends on what a target's forward takes."""
        return self._models[-1].schedule.weighs_cost or self._lookup is not None

    @property
    def assistants(self) -> list[AssistantStats]:
        """What the drafts of each model were worth so far, the smallest model first."""
        return [stage.stats for stage in self._stages]

    def add_request(self, prompt_ids: Any, *, prediction: Any = None) -> int:
        """As `Drafter.add_request`; requests are numbered from 0."""
        request = len(self._texts)
        if self._lookup is not None:
            self._found[request] = self._lookup.add_request(prompt_ids, prediction=prediction)
        if self._below is not None:
            self._below.add_request(request, prompt_ids, prediction)
        self._texts.append(np.asarray(prompt_ids).tolist())
        self._stats[request] = DraftStats()
        return request

    def propose_batch(
        self,
        requests: Sequence[int],
        *,
        limits: NDArray[np.int32] | None = None,
        cost: NDArray[np.float64] | None = None,
        padded: bool = False,
    ) -> ModelDraftBatch:
        """As `Drafter.propose_batch`. The cost must be given, and whole widths of it count."""
        assert cost is not None and limits is not None
        step = cost[len(requests) - 1 :: len(requests)]
        self._proposed = self._looked_up(requests, limits=limits, cost=cost, padded=padded)
        self._chosen = dict(self._proposed)
        self._draft(dict(zip(requests, limits.tolist(), strict=True)), step)
        chosen = [self._chosen[request] for request in requests]
        offsets = np.zeros(len(requests) + 1, np.int32)
        np.cumsum([len(each.token_ids) for each in chosen], out=offsets[1:])
        laws = {
            slot: torch.stack(each.drafted.laws)
            for slot, each in enumerate(chosen)
            if each.drafted is not None and each.drafted.laws
        }
        return ModelDraftBatch(
            np.array([token for each in chosen for token in each.token_ids], np.int32),
            np.array([parent for each in chosen for parent in each.parents], np.int32),
            np.array([chance for each in chosen for chance in each.probabilities], np.float32),
            offsets,
            laws,
        )

    def _looked_up(
        self, requests: Sequence[int], *, limits: Any, cost: Any, padded: bool
    ) -> dict[int, _Chosen]:
        if self._lookup is None:
            return {request: _Chosen() for request in requests}
        batch: DraftBatch = self._lookup.propose_batch(
            [self._found[request] for request in requests],
            limits=limits,
            cost=cost,
            padded=padded,
        )
        found = {}
        for slot, request in enumerate(requests):
            part = slice(batch.offsets[slot], batch.offsets[slot + 1])
            found[request] = _Chosen(
                batch.token_ids[part].tolist(),
                batch.parents[part].tolist(),
                batch.probabilities[part].tolist(),
                (batch.sources[part] == Source.PREDICTION).tolist(),
            )
        return found

    def _draft(self, limits: dict[int, int], step: NDArray[np.float64]) -> None:
        """Lets the model draft where that promises more than what was looked up."""
        stage = self._stage
        if stage is None:
            return
        timing = stage.time(step)
        most: dict[int, int] = {}
        width = 1
        for request, limit in limits.items():
            found = self._chosen[request]
            if found.token_ids and (
                self._rate(request, found, timing) >= stage.rate(request, timing)
            ):
                width = max(width, 1 + len(found.token_ids))
            elif limit > 0:
                most[request] = limit
        try:
            drafts = stage.draft(
                {request: [] for request in most},
                most,
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
        for request, drafted in drafts.items():
            if drafted.token_ids:
                count = len(drafted.token_ids)
                self._chosen[request] = _Chosen(
                    list(drafted.token_ids),
                    list(range(-1, count - 1)),
                    list(drafted.chances),
                    [False] * count,
                    drafted,
                )

    def _rate(self, request: int, found: _Chosen, timing: DraftTime) -> float:
        """What the text grows by with a draft of the engine, as `Schedule.rate` has it.

        The engine's own chances hold for all it drafts. This request's may be worse, and another
        drafter stands by: so what was accepted of late counts here.
        """
        acceptance = self._lookup_acceptance
        begin = acceptance.begin((self, request))
        paths: list[Path] = []
        for parent, confidence in zip(found.parents, found.confidences(), strict=True):
            before = paths[parent] if parent >= 0 else begin
            paths.append(acceptance.extended(before, confidence))
        grown = 1 + float(sum(path.sum() for path in paths))
        return grown / timing.target(len(paths))

    def observe_batch(
        self,
        requests: Sequence[int],
        emitted_ids: NDArray[np.int32],
        offsets: NDArray[np.int32],
    ) -> None:
        """As `Drafter.observe_batch`."""
        if self._lookup is not None:
            found = [self._found[request] for request in requests]
            self._lookup.observe_batch(found, emitted_ids, offsets)
        for slot, request in enumerate(requests):
            emitted = emitted_ids[offsets[slot] : offsets[slot + 1]].tolist()
            self._observe(request, emitted)

    def _observe(self, request: int, emitted: list[int]) -> None:
        if self._below is not None:
            self._below.grow(request, emitted)
        if self._lookup is not None:
            self._observe_found(request, self._proposed.pop(request, _Chosen()), emitted)
        chosen = self._chosen.pop(request, _Chosen())
        if self._stage is not None and chosen.drafted is not None:
            self._stage.observe(request, chosen.drafted, emitted)
        path = chosen.accepted(emitted)
        predicted = sum(chosen.predicted[place] for place in path)
        self._stats[request] += DraftStats(
            steps=1,
            emitted=len(emitted),
            drafts=int(bool(chosen.token_ids)),
            drafted=len(chosen.token_ids),
            accepted=len(path),
            accepted_prediction_tokens=predicted,
            rejected_prediction_tokens=sum(chosen.predicted) - predicted,
        )
        self._texts[request] += emitted

    def _observe_found(self, request: int, found: _Chosen, emitted: list[int]) -> None:
        """Learns from a draft of the engine, whether or not it was verified."""
        key = (self, request)
        if not found.token_ids:
            self._lookup_acceptance.pass_by(key)
            return
        path = found.accepted(emitted)
        last = path[-1] if path else -1
        judged = list(path)
        if len(emitted) > len(path):
            judged += [place for place, parent in enumerate(found.parents) if parent == last]
        confidences = found.confidences()
        self._lookup_acceptance.observe(key, [confidences[place] for place in judged], len(path))

    def finish(self, request: int) -> DraftStats:
        """As `Drafter.finish`."""
        if self._lookup is not None:
            self._lookup.finish(self._found.pop(request))
        if self._below is not None:
            self._below.finish(request)
        self._end(request)
        return self._stats[request]

    def cancel(self, request: int) -> None:
        """As `Drafter.cancel`."""
        if self._lookup is not None:
            self._lookup.cancel(self._found.pop(request))
        if self._below is not None:
            self._below.cancel(request)
        self._end(request)

    def _end(self, request: int) -> None:
        self._lookup_acceptance.forget((self, request))
        for stage in self._stages:
            stage.end(request)

    def _score(
        self,
        logits: torch.Tensor,
        requests: Sequence[int],
        depths: Sequence[int],
        tails: dict[int, list[int]],
    ) -> torch.Tensor:
        assert self.scoring is not None
        return self.scoring(logits, requests, depths, tails)

    def warn_of_size(self) -> None:
        """Warns where a draft model is bigger than the target, with the cost that was measured."""
        for assistant, stage in zip(self._models, self._stages, strict=True):
            own, others = _parameters(assistant.model), _parameters(self._target)
            c = stage.stats.c
            if own > others and c is not None:
                warnings.warn(
                    f"the assistant has {own} parameters and the target {others}: a draft token "
                    f"takes {c:.2f} of a target forward",
                    UserWarning,
                    stacklevel=2,
                )


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _vocabularies(models: list[AssistantModel], target: Any, tokenizer: Any) -> list[Vocabulary]:
    """How the token ids of each draft model stand to the target's. Raises InvalidValueError."""
    size = _vocabulary_size(target)
    known = []
    used = None if tokenizer is None else len(tokenizer)
    for assistant in models:
        model = assistant.model
        for name, own, others in (
            ("device", model.device, target.device),
            ("dtype", model.dtype, target.dtype),
        ):
            if own != others:
                raise InvalidValueError(
                    f"assistant must have the target's {name}, {others}, got {own}: "
                    "move it with assistant.to(...)"
                )
        if tokenizer is not None and assistant.tokenizer is not None:
            _require_same_tokenizer(tokenizer, assistant.tokenizer)
        ids = _vocabulary_size(model)
        known.append(ids)
        if assistant.tokenizer is not None:
            used = len(assistant.tokenizer)
        if ids != size and (used is None or used > min(ids, size)):
            raise InvalidValueError(
                f"assistant must have the target's vocabulary of {size} tokens, got {ids}; where "
                "the further ids stand for nothing, give its tokenizer to AssistantModel"
                + ("" if used is None else f" (the one given has {used} tokens)")
            )
    shared = min(size, *known)
    if used is not None and shared < max(size, *known):
        shared = min(shared, used)
    return [Vocabulary(size=size, shared=shared, known=ids) for ids in known]


def _vocabulary_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _require_same_tokenizer(target: Any, assistant: Any) -> None:
    if target is assistant:
        return
    tokens = [
        {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        for tokenizer in (target, assistant)
    ]
    for token_id in sorted(tokens[0].keys() | tokens[1].keys()):
        ours, theirs = (each.get(token_id) for each in tokens)
        if ours != theirs:
            raise InvalidValueError(
                f"assistant must have the target's tokenizer, got one in which token {token_id} is "
                f"{theirs!r}, and {ours!r} in the target's"
            )
