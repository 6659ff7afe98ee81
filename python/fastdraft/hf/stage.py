"""A draft model at work: its cache beside the text, what drafts for it, what it drafts.

A stage drafts by generating: forward after forward, it emits tokens of its own distribution. What
stands below it, a smaller stage or the engine, drafts for it in turn, and it verifies that as the
target verifies what it drafts itself.

Its random numbers are those of a seed of its own, mixed from the request's, its level and the
length of the text: independent of those that verify its tokens, and fresh in every step. So no
decision that looks at a draft which was thrown away can favour a later one.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from fastdraft import Engine
from fastdraft.drafters.acceptance import Path
from fastdraft.drafters.assistant import AssistantModel
from fastdraft.drafters.schedule import DraftTime
from fastdraft.errors import InvalidValueError
from fastdraft.hf.kv_cache import RowCache, places_after
from fastdraft.hf.masks import Masks
from fastdraft.hf.row_model import RowModel
from fastdraft.hf.trees import are_chains, best_chains
from fastdraft.stats import AssistantStats
from fastdraft.step_cost import StepCost
from fastdraft.verification import verify_greedy, verify_rejection, verify_sampled

__all__ = ["Below", "Drafted", "EngineStage", "Scoring", "Stage", "Vocabulary"]

# A first forward over more tokens than these reads a prompt, or text that others drafted.
_CATCHING_UP: Final = 3
_LONGEST: Final = 64

_MASK: Final = (1 << 64) - 1

Scoring = Callable[[torch.Tensor, Sequence[int], Sequence[int], dict[int, list[int]]], torch.Tensor]
"""Turns logits (positions, vocabulary) into the scores that the generation chooses tokens by.

Takes them with the request of each position, how many tokens stand before it behind the request's
text, and what these are.
"""


@dataclass
class Drafted:
    """What was drafted for one request: a chain.

    Attributes:
        token_ids: The tokens.
        confidences: How sure the model was where each was chosen: its largest probability.
        laws: When sampling, the scores whose softmax each was drawn from, (vocabulary,).
        chances: That the target accepts each, and all before it.
        path: What the model's schedule knows of the draft.
    """

    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    laws: list[torch.Tensor] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    path: Path | None = None

    def judged(self, emitted: Sequence[int]) -> tuple[int, int]:
        """How many tokens begin `emitted`, and how many the one who verifies came to judge."""
        accepted = 0
        for drafted, token in zip(self.token_ids, emitted, strict=False):
            if drafted != token:
                return accepted, accepted + 1
            accepted += 1
        return accepted, accepted


@dataclass(frozen=True)
class Vocabulary:
    """How a draft model's token ids stand to the target's.

    Attributes:
        size: Of the target's logits.
        shared: Ids from here on mean nothing to one of the two, and are never drafted.
        known: Ids from here on the draft model cannot be given.
    """

    size: int
    shared: int
    known: int

    def of_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the draft model (positions, its vocabulary) as such of the target's ids."""
        width = logits.shape[1]
        if width == self.size == self.shared:
            return logits
        fitted = logits.new_full((len(logits), self.size), -torch.inf)
        shared = min(self.shared, width)
        fitted[:, :shared] = logits[:, :shared]
        return fitted


class Below(Protocol):
    """What drafts for a stage."""

    def draft(
        self,
        tails: dict[int, list[int]],
        most: dict[int, int],
        *,
        step: np.ndarray[Any, np.dtype[np.float64]],
        running: int,
    ) -> dict[int, Drafted]:
        """Drafts behind the text and what is drafted already.

        Args:
            tails: For each request that is drafted for, the tokens behind its text.
            most: The most tokens to draft for each.
            step: Seconds of the stage's own forward by the tokens a row in it.
            running: The rows that this forward has in any case.
        """
        ...

    def observe(self, request: int, drafted: Drafted, emitted: Sequence[int]) -> None:
        """Tells what the stage emitted where `drafted` was drafted."""
        ...


class EngineStage:
    """The engine's draft of a step, handed on as long as what is emitted follows it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._of_request: dict[int, int] = {}
        self._chains: dict[int, list[int]] = {}

    def add_request(self, request: int, prompt_ids: Any, prediction: Any) -> None:
        self._of_request[request] = self._engine.add_request(prompt_ids, prediction=prediction)

    def draft(
        self,
        tails: dict[int, list[int]],
        most: dict[int, int],
        *,
        step: np.ndarray[Any, np.dtype[np.float64]],
        running: int,
    ) -> dict[int, Drafted]:
        asked = [request for request in tails if request not in self._chains]
        if asked:
            cost = np.repeat(step, running)
            batch: Any = self._engine.propose_batch(
                [self._of_request[request] for request in asked], cost=cost, padded=True
            )
            ids, offsets = batch.token_ids, batch.offsets
            if not are_chains(batch.parents, offsets):
                ids, offsets = best_chains(batch)
            for slot, request in enumerate(asked):
                self._chains[request] = ids[offsets[slot] : offsets[slot + 1]].tolist()
        drafts = {}
        for request, tail in tails.items():
            chain = self._chains[request]
            follows = chain[: len(tail)] == tail
            end = len(tail) + most[request]
            drafts[request] = Drafted(chain[len(tail) : end] if follows else [])
        return drafts

    def observe(self, request: int, drafted: Drafted, emitted: Sequence[int]) -> None:
        """The engine learns from the target's tokens alone."""

    def grow(self, request: int, emitted: Sequence[int]) -> None:
        """Tells what the target emitted."""
        self._chains.pop(request, None)
        self._engine.observe(self._of_request[request], list(emitted))

    def finish(self, request: int) -> None:
        self._engine.finish(self._of_request.pop(request))

    def cancel(self, request: int) -> None:
        self._engine.cancel(self._of_request.pop(request))


class Stage:
    """One draft model in one generation. Requests are numbered from 0 as they were added.

    Args:
        assistant: The draft model, and what it learned in earlier generations.
        texts: The text of each request, added until the first draft; grows as the target emits.
        rows: How many requests there will be.
        seeds: The seed of each request; `None` for greedy generation.
        scoring: Shapes its logits as the target's are shaped.
        vocabulary: How its token ids stand to the target's.
        level: 0 for the one that drafts for the target, 1 for the one below, ...
        ratio: Its parameters over those of the model that it drafts for: what its forwards are
            taken to cost before any is timed.
        below: What drafts for it; `None` for nothing.
    """

    def __init__(
        self,
        assistant: AssistantModel,
        *,
        texts: list[list[int]],
        rows: int,
        seeds: list[int] | None,
        scoring: Scoring,
        vocabulary: Vocabulary,
        level: int,
        ratio: float,
        below: Below | None,
    ) -> None:
        model = assistant.model
        self.schedule = assistant.schedule
        self.below = below
        self.vocabulary = vocabulary
        self._texts = texts
        self._seeds = seeds
        self._scoring = scoring
        self._level = level
        self._generation = object()
        self._threshold = assistant.confidence_threshold
        self._slots = list(range(rows))  # the request of each row of the cache
        self._ended: set[int] = set()
        # The tokens in the cache, and how many of them are known to be those of the text.
        self._held: list[list[int]] = [[] for _ in range(rows)]
        self._sure = [0] * rows
        self._cost = StepCost.of(model, model.device.type)
        self._ratio = min(ratio, 1.0)
        self._target_seconds: float | None = None
        self._drafts = self._drafted = 0
        self._judged: list[int] = []  # by the place in the draft
        self._accepted: list[int] = []

        config = model.config.get_text_config(decoder=True)
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        if not self._takes_positions and rows > 1:
            raise InvalidValueError(
                f"a batch needs an assistant that takes position_ids, got {type(model).__name__}"
            )
        last = getattr(config, "max_position_embeddings", None)
        self._places: int | None = last
        kwargs: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in parameters:
            kwargs["logits_to_keep"] = 1
        self._rows = RowModel(
            model,
            cache=RowCache(DynamicCache(config=config)),
            masks=Masks(model, visible=None, rows=rows),
            kwargs=kwargs,
            device=model.device,
            home=model.device,
        )

    def end(self, request: int) -> None:
        """A request has ended; its place in the cache becomes free."""
        self._ended.add(request)
        self.schedule.forget(self._key(request))

    def close(self) -> None:
        """Frees the cache; nothing can be drafted from then on."""
        self._rows.cache.layers.clear()

    def rate(self, request: int, timing: DraftTime) -> float:
        """As `Schedule.rate`, of one request; 0 where the model cannot be given its text."""
        if not self._takes(request) or not self._room(request):
            return 0.0
        return self.schedule.rate([self._key(request)], timing, running=1)

    def _key(self, request: int) -> tuple[object, int]:
        """The request's name in the schedule, which serves other generations too."""
        return self._generation, request

    def time(self, step: np.ndarray[Any, np.dtype[np.float64]], *, width: int = 1) -> DraftTime:
        """What drafting takes. `step` and `width` are those of `DraftTime`."""
        self._target_seconds = float(step[0])
        seconds = self.schedule.seconds(len(self._slots))
        if seconds is None:
            seconds = self._ratio * self._target_seconds
        return DraftTime(step=step, draft=seconds, width=width)

    @property
    def stats(self) -> AssistantStats:
        """What its drafts were worth so far."""
        return AssistantStats(
            drafts=self._drafts,
            drafted=self._drafted,
            judged=tuple(self._judged),
            accepted=tuple(self._accepted),
            seconds=self.schedule.seconds(len(self._slots)),
            target_seconds=self._target_seconds,
        )

    def _takes(self, request: int) -> bool:
        """Whether the model can be given the text of `request`."""
        text = self._texts[request]
        known = self.vocabulary.known
        return bool(text) and all(token < known for token in text[self._sure[request] :])

    def _room(self, request: int) -> int:
        """How many tokens the model has places for, behind the text of `request`."""
        # The last one drafted is not given to it.
        length = len(self._texts[request])
        return _LONGEST if self._places is None else max(self._places - length + 1, 0)

    def draft(
        self,
        tails: dict[int, list[int]],
        most: dict[int, int],
        *,
        step: np.ndarray[Any, np.dtype[np.float64]],
        running: int,
        width: int = 1,
    ) -> dict[int, Drafted]:
        """As `Below.draft`; `width` is that of `DraftTime`."""
        drafts = {request: Drafted() for request in tails}
        timing = self.time(step, width=width)
        able = [request for request in tails if most[request] > 0 and self._takes(request)]
        if not able:
            return drafts
        keys = [self._key(request) for request in able]
        numbers = self.schedule.numbers(keys, timing, running=running)
        wanted = {
            request: min(number, most[request], self._room(request))
            for request, number in zip(able, numbers, strict=True)
        }
        active = [request for request in able if wanted[request] > 0]
        if not active:
            return drafts

        self._drop_ended()
        started = first_done = time.perf_counter()
        caught_up = depth = first_depth = 0
        while active:
            caught_up = max(caught_up, self._round(active, tails, drafts, wanted))
            longest = max(len(draft.token_ids) for draft in drafts.values())
            if depth == 0:
                first_done, first_depth = time.perf_counter(), longest
            depth = longest
            active = [
                request for request in active if wanted[request] > len(drafts[request].token_ids)
            ]
            if not active:
                break
            paths = [
                (self._key(each), path)
                for each in active
                if (path := drafts[each].path) is not None
            ]
            room = max(wanted[request] - len(drafts[request].token_ids) for request in active)
            if not self.schedule.goes_on(paths, depth, timing, most=room, running=running):
                break
        # A first forward that reads much more than the last token tells nothing of the others.
        reads = caught_up > _CATCHING_UP
        counted, since = (depth - first_depth, first_done) if reads else (depth, started)
        if counted > 0:
            seconds = (time.perf_counter() - since) / counted
            self.schedule.observe_time(len(self._slots), seconds)
        return drafts

    def observe(self, request: int, drafted: Drafted, emitted: Sequence[int]) -> None:
        accepted, judged = drafted.judged(emitted)
        count = len(drafted.token_ids)
        judged_confidences = drafted.confidences[:judged]
        self.schedule.observe(self._key(request), judged_confidences, accepted, count)
        self._drafts += 1
        self._drafted += count
        for counts, number in ((self._judged, judged), (self._accepted, accepted)):
            counts.extend([0] * (number - len(counts)))
            for place in range(number):
                counts[place] += 1

    def _round(
        self,
        active: list[int],
        tails: dict[int, list[int]],
        drafts: dict[int, Drafted],
        wanted: dict[int, int],
    ) -> int:
        """One forward: what is below drafts, the model verifies and goes on.

        Appends to `drafts`, and sets `wanted` to what there is where the model is too unsure to go
        on. Gives the most tokens that a row had to catch up with.
        """
        behind = {request: tails[request] + drafts[request].token_ids for request in active}
        below = self._draft_below(active, behind, drafts, wanted)
        started = time.perf_counter()
        logits, offsets, width, caught_up = self._forward(active, behind, below)
        scores, emitted = self._verify(active, behind, below, logits, offsets)
        probable = (scores.amax(-1) - torch.logsumexp(scores, -1)).exp().tolist()
        acceptance = self.schedule.acceptance
        for slot, request in enumerate(active):
            draft, first = drafts[request], int(offsets[slot]) + slot
            room, key = wanted[request] - len(draft.token_ids), self._key(request)
            for place, token in enumerate(emitted[slot][:room]):
                sure = probable[first + place]
                # Scores that are no numbers leave nothing to draw from.
                if not sure >= self._threshold:
                    wanted[request] = len(draft.token_ids)
                    break
                draft.token_ids.append(token)
                draft.confidences.append(sure)
                path = acceptance.begin(key) if draft.path is None else draft.path
                draft.path = acceptance.extended(path, sure)
                draft.chances.append(float(draft.path.sum()))
                if self._seeds is not None:
                    draft.laws.append(scores[first + place])
                if token >= self.vocabulary.known:
                    wanted[request] = len(draft.token_ids)
                    break
            if not emitted[slot]:
                wanted[request] = len(draft.token_ids)
            if self.below is not None and below[request].token_ids:
                self.below.observe(request, below[request], emitted[slot])
        if self.below is not None and caught_up <= _CATCHING_UP:
            self._cost.observe(len(self._slots), width, time.perf_counter() - started)
        return caught_up

    def _draft_below(
        self,
        active: list[int],
        behind: dict[int, list[int]],
        drafts: dict[int, Drafted],
        wanted: dict[int, int],
    ) -> dict[int, Drafted]:
        """What is drafted for the next forward."""
        if self.below is None or self._cost.wants_plain_step(len(self._slots)):
            return dict.fromkeys(active, Drafted())
        # The forward emits one token more than is drafted for it.
        most = {request: wanted[request] - len(drafts[request].token_ids) - 1 for request in active}
        step, _ = self._cost.best_widths(len(self._slots))
        below = self.below.draft(behind, most, step=step, running=len(active))
        for draft in below.values():
            self._cut(draft)
        return below

    def _forward(
        self, active: list[int], behind: dict[int, list[int]], below: dict[int, Drafted]
    ) -> tuple[torch.Tensor, list[int], int, int]:
        """The logits after the text with what is behind it, and after each token drafted below.

        Gives them as (positions, target's vocabulary), where each request's drafts from below
        begin, the width of the forward, and the most tokens that came before.
        """
        feeds: list[list[int]] = []
        lengths: list[int] = []
        caught_up = 0
        for request in self._slots:
            held = self._held[request]
            if request not in behind:
                # It only keeps its place: what is written there is written over.
                lengths.append(len(held))
                feeds.append([0])
                continue
            missing = self._missing(request, behind[request])
            caught_up = max(caught_up, len(missing))
            lengths.append(len(held))
            feed = missing + below[request].token_ids
            feeds.append(feed)
            held.extend(feed)
            self._sure[request] = len(self._texts[request])
        sizes = np.array([len(feed) for feed in feeds])
        width = int(sizes.max())
        input_ids = np.zeros((len(feeds), width), dtype=np.int64)
        for line, feed in zip(input_ids, feeds, strict=True):
            line[: len(feed)] = feed
        positions = None
        if self._takes_positions:
            # Padding stays at a token's position: one further on may not exist in the model.
            steps = np.minimum(np.arange(width), sizes[:, None] - 1)
            places = steps + np.array(lengths)[:, None]
            if self._places is not None:
                # Nor may that of a row which does not take part.
                places = np.minimum(places, self._places - 1)
            positions = torch.from_numpy(places).to(self._rows.device)

        slot_of = {request: slot for slot, request in enumerate(self._slots)}
        slots: list[int] = []
        columns: list[int] = []
        offsets = [0]
        for request in active:
            count = len(below[request].token_ids)
            slot = slot_of[request]
            last = len(feeds[slot])
            slots += [slot] * (count + 1)
            columns += range(last - count - 1, last)
            offsets.append(offsets[-1] + count)
        chosen = sorted(set(columns))
        place = {column: at for at, column in enumerate(chosen)}
        logits = self._rows.forward(
            torch.from_numpy(input_ids),
            rows=self._slots,
            cached=lengths,
            positions=positions,
            columns=torch.tensor(chosen, device="cpu"),
            # The last token that is known to be the text's may have to be read again.
            floors=[max(self._sure[request] - 1, 0) for request in self._slots],
        )
        logits = logits[slots, [place[column] for column in columns]]
        return self.vocabulary.of_target(logits), offsets, width, caught_up

    def _cut(self, draft: Drafted) -> None:
        """Drops what the model cannot be given: the engine may draft ids that are not its own."""
        known = self.vocabulary.known
        places = (at for at, token in enumerate(draft.token_ids) if token >= known)
        if (place := next(places, None)) is not None:
            for column in (draft.token_ids, draft.confidences, draft.laws, draft.chances):
                del column[place:]

    def _missing(self, request: int, tail: list[int]) -> list[int]:
        """The tokens of text and tail that the cache lacks, at least the last.

        Forgets what the cache holds from the first token on that differs.
        """
        text, held, sure = self._texts[request], self._held[request], self._sure[request]
        shared = min(len(text), len(held))
        while sure < shared and text[sure] == held[sure]:
            sure += 1
        self._sure[request] = sure
        if sure == len(text):
            for token, cached in zip(tail, held[len(text) :], strict=False):
                if token != cached:
                    break
                sure += 1
        sure = min(sure, len(text) + len(tail) - 1)
        self._sure[request] = min(self._sure[request], sure)
        del held[sure:]
        if sure < len(text):
            return text[sure:] + tail
        return tail[sure - len(text) :]

    def _verify(
        self,
        active: list[int],
        behind: dict[int, list[int]],
        below: dict[int, Drafted],
        logits: torch.Tensor,
        offsets: list[int],
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """The scores (positions, vocabulary), float32, and the tokens that each request emits."""
        requests: list[int] = []
        depths: list[int] = []
        tails = {}
        drafted: list[int] = []
        laws: list[torch.Tensor] = []
        for request in active:
            tail, draft = behind[request], below[request]
            count = len(draft.token_ids)
            tails[request] = tail + draft.token_ids
            requests += [request] * (count + 1)
            depths += range(len(tail), len(tail) + count + 1)
            drafted += draft.token_ids
            laws += draft.laws
        scores = self._scoring(logits, requests, depths, tails).to(torch.float32)
        if self._seeds is None and not drafted:
            # The usual case of a small model: the checks and scans of a verification would show.
            return scores, scores.argmax(-1, keepdim=True).tolist()
        ids = torch.tensor(drafted, dtype=torch.int64, device="cpu")
        starts = torch.tensor(offsets, dtype=torch.int64, device="cpu")
        if self._seeds is None:
            return scores, verify_greedy(scores, ids, starts).tolist()
        options: dict[str, Any] = {
            "seeds": torch.tensor(
                [
                    _mixed(self._seeds[request], self._level, len(self._texts[request]))
                    for request in active
                ],
                device="cpu",
            ),
            "positions": torch.tensor(
                [len(self._texts[request]) + len(behind[request]) for request in active],
                device="cpu",
            ),
        }
        if laws:
            verified = verify_rejection(
                scores, ids, starts, draft_logits=torch.stack(laws), **options
            )
        else:
            verified = verify_sampled(scores, ids, starts, **options)
        return scores, verified.tolist()

    def _drop_ended(self) -> None:
        if self._ended.isdisjoint(self._slots):
            return
        staying = places_after([request in self._ended for request in self._slots])
        self._slots = [self._slots[slot] for slot in staying]
        self._rows.cache.keep(staying)


def _mixed(seed: int, level: int, length: int) -> int:
    """A seed of 63 bits for a level of staged drafting and a length of the text.

    The finaliser of SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number
    generators, 2014), once for each number.
    """
    mixed = seed & _MASK
    for number in (level + 1, length):
        mixed = (mixed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1
