"""A draft model at work: its cache beside the text, its lower stage, its drafts.

A stage drafts by generating: forward after forward, it emits tokens of its own distribution. Its
lower stage, a smaller model or the engine, drafts for it in turn. The stage verifies these drafts
as the target verifies its own.

A stage seeds its random numbers from the request's seed, its own level, the length of the text and
the number of tokens behind it that it drafts for. They are independent of the numbers that verify
its tokens, and change in every step of the model above. Verification by blocks needs that: how many
tokens it accepts depends on those that it rejects.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from fastdraft import step_latency
from fastdraft.drafters import AssistantModel
from fastdraft.drafters.schedule import DraftTime
from fastdraft.errors import InvalidValueError
from fastdraft.hf.attention import attending
from fastdraft.hf.draft_models.engine import EngineStage
from fastdraft.hf.drafts import RowDraft, StepDrafts, shared_length
from fastdraft.hf.interface import is_recurrent
from fastdraft.hf.kv_cache import RowCache, compacted_slots
from fastdraft.hf.masks import Masks
from fastdraft.hf.processors import Warping
from fastdraft.hf.rows import UNLIMITED
from fastdraft.hf.step import CachedModel
from fastdraft.hf.verifier import Verifier
from fastdraft.hf.vocabulary import DraftVocabulary
from fastdraft.stats import AssistantStats
from fastdraft.step_latency import StepLatency

__all__ = ["Scoring", "Stage"]

# A first forward over more tokens than these reads a prompt, or text that others drafted.
_CATCHING_UP: Final = 3
_LONGEST: Final = 64
# A forward over more tokens a row takes time in proportion to them.
_WIDEST: Final = 256

_MASK: Final = (1 << 64) - 1

Scoring = Callable[
    [torch.Tensor, Sequence[int], Sequence[Sequence[int]], Sequence[int]], torch.Tensor
]
"""As `Decoding.shaped`: turns logits into the scores that the generation chooses tokens by."""


@dataclass
class _Request:
    """A request, and the tokens that it has in the cache.

    Attributes:
        row: Its row in the batch.
        text: Its text, which grows as the target emits.
        seed: The seed of its samples.
        token_ids: The tokens in the cache.
        confirmed: How many of them are known to be those of the text.
        steps: The steps of the request so far, as far as the schedule was asked.
        drafts: Those in which the model drafted.
    """

    row: int
    text: list[int]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    confirmed: int = 0
    steps: int = 0
    drafts: int = 0

    @property
    def part_drafted(self) -> float:
        """In which part of the steps to come the model may draft, by the rule of succession."""
        return (self.drafts + 1) / (self.steps + 2)


@dataclass(eq=False)
class Stage:
    """One draft model in one generation.

    Attributes:
        assistant: The draft model, and what it learned in earlier generations.
        rows: How many requests there will be.
        samples: Whether it draws its tokens.
        scoring: Shapes its logits as the target's are shaped; to be set before the first draft.
        vocabulary: How its token ids stand to the target's.
        level: 0 for the stage that drafts for the target, 1 for its lower stage, ...
        ratio: Its parameters over those of the model that it drafts for: the estimate of its cost
            before any forward is timed.
        lower: The stage that drafts for it; `None` for none.
    """

    assistant: AssistantModel
    rows: InitVar[int]
    samples: bool
    vocabulary: DraftVocabulary
    level: int
    ratio: float
    lower: Stage | EngineStage | None
    scoring: Scoring = field(init=False)

    def __post_init__(self, rows: int) -> None:
        model = self.assistant.model
        self._schedule = self.assistant.schedule
        self._generation = object()
        self._slots: list[int] = []  # the request of each row of the cache
        self._ended: set[int] = set()
        self._requests: dict[int, _Request] = {}
        self._cost = StepLatency.of(model, model.device.type)
        self._target_seconds: float | None = None
        self._drafts = self._drafted = 0
        self._judged: list[int] = []  # by the index in the draft
        self._accepted: list[int] = []

        if is_recurrent(model):
            raise InvalidValueError(
                f"assistant must keep its state in a key-value cache, got {type(model).__name__}, "
                "whose recurrent state cannot take back a rejected token"
            )
        config = model.config.get_text_config(decoder=True)
        self._positions: int | None = getattr(config, "max_position_embeddings", None)
        # PEFT's models pass on what theirs takes, and do not say so.
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        parameters = inspect.signature(inner.forward).parameters
        takes_positions = "position_ids" in parameters
        if not takes_positions and rows > 1:
            raise InvalidValueError(
                f"a batch needs an assistant that takes position_ids, got {type(model).__name__}"
            )
        kwargs: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in parameters:
            kwargs["logits_to_keep"] = 1
        origin = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        self._model = CachedModel(
            model,
            cache=RowCache(DynamicCache(config=config)),
            masks=Masks(model, visible=None, rows=rows),
            first_positions=origin if takes_positions else None,
            kwargs=kwargs,
            home=model.device,
            # Beyond it may be rows that do not take part, and tokens that stages above drafted.
            last_offset=UNLIMITED if self._positions is None else self._positions - 1,
        )
        # The scores that it is given are warped.
        self._verifier = Verifier(Warping())

    def add(self, request: int, text: list[int], seed: int) -> None:
        """Adds a request, before the first draft."""
        self._slots.append(request)
        self._requests[request] = _Request(len(self._requests), text, seed)

    def end(self, request: int) -> None:
        """Ends a request; its slot in the cache becomes free."""
        self._ended.add(request)
        self._schedule.forget(self._key(request))

    def close(self) -> None:
        """Frees the cache; nothing can be drafted from then on."""
        del self._model

    def expected(
        self, requests: Sequence[int], step: NDArray[np.float64], limits: NDArray[np.int32]
    ) -> tuple[float, float, NDArray[np.float64]]:
        """Expectations of drafting for all of `requests`: its seconds, those of reading text new to
        the model, and the accepted tokens of each, float64 (requests,).
        `step` is that of `draft`.

        What the model has to read first serves later drafts too, so its time is shared out among
        them. A request has at most `limits` tokens left, and the model drafts in about the part of
        its steps in which it has drafted so far.
        """
        time = self._time(step, running=len(requests))
        number, accepted = self._schedule.expected([self._key(each) for each in requests], time)
        asked = [self._requests[each] for each in requests]
        missing = [len(each.text) - each.confirmed for each in asked]
        longest = int(np.argmax(missing))
        width = max(missing[longest], 1)
        known = min(width, _WIDEST)
        seconds, _ = self._cost.best_widths(len(self._slots), known)
        # A wider forward may have been measured to be the faster one.
        reading = time.draft * max(width / known * seconds[-1] / seconds[0] - 1, 0.0)
        steps = limits[longest] / (1 + accepted[longest])
        drafts = 1 + asked[longest].part_drafted * steps
        return number * time.draft, reading / drafts, accepted

    def pass_by(self, request: int) -> None:
        """Passes a step of the request without a draft."""
        self._requests[request].steps += 1
        self._schedule.pass_by(self._key(request))

    def _key(self, request: int) -> tuple[object, int]:
        """The request's key in the schedule, which serves other generations too."""
        return self._generation, request

    def _time(self, step: NDArray[np.float64], *, running: int) -> DraftTime:
        """How long drafting takes. The arguments are those of `DraftTime`."""
        self._target_seconds = float(step[0])
        seconds = self._schedule.seconds(len(self._slots))
        if seconds is None:
            seconds = min(self.ratio, 1.0) * self._target_seconds
        return DraftTime(step=step, draft=seconds, running=running)

    @property
    def stats(self) -> AssistantStats:
        """Statistics of its drafts so far."""
        return AssistantStats(
            drafts=self._drafts,
            drafted=self._drafted,
            judged=tuple(self._judged),
            accepted=tuple(self._accepted),
            seconds=self._schedule.seconds(len(self._slots)),
            target_seconds=self._target_seconds,
        )

    def _takes(self, request: int) -> bool:
        """Says whether the model has an embedding for every token of the text."""
        of_request = self._requests[request]
        new = of_request.text[of_request.confirmed :]
        return bool(of_request.text) and all(token < self.vocabulary.known for token in new)

    def _room(self, request: int) -> int:
        """How many positions the model has behind the text of `request`."""
        # The last one drafted is not given to it.
        length = len(self._requests[request].text)
        return _LONGEST if self._positions is None else max(self._positions - length + 1, 0)

    def draft(
        self,
        pending: dict[int, list[int]],
        limits: dict[int, int],
        *,
        step: NDArray[np.float64],
        running: int,
        found_to_pay: bool = False,
        behind: Callable[[dict[int, RowDraft]], dict[int, float]] | None = None,
    ) -> tuple[dict[int, RowDraft], float]:
        """Drafts behind the text and the pending tokens, and the seconds that it should take.

        Args:
            pending: For each request to draft for, the tokens behind its text that the stages above
                have drafted already.
            limits: The most tokens to draft for each.
            step: Seconds of a forward of the model above by the tokens a row in it.
            running: As in `DraftTime`.
            found_to_pay: As in `Schedule.numbers`.
            behind: Tells what the engine promises behind drafts; those that it leaves out end.
        """
        drafts = {request: RowDraft() for request in pending}
        time_of = self._time(step, running=running)
        able = [request for request in pending if limits[request] > 0 and self._takes(request)]
        if not able:
            return drafts, 0.0
        keys = [self._key(request) for request in able]
        numbers = self._schedule.numbers(keys, time_of, found_to_pay=found_to_pay)
        wanted = {
            request: min(number, limits[request], self._room(request))
            for request, number in zip(able, numbers, strict=True)
        }
        self._drop_ended()
        # In the order of the cache, which is that of the logits.
        active = [request for request in self._slots if wanted.get(request, 0) > 0]
        for request in active:
            drafts[request].belief = self._schedule.estimator.begin(self._key(request))
        started = first_done = step_latency.clock()
        caught_up = depth = first_depth = 0
        while active:
            caught_up = max(caught_up, self._round(active, pending, drafts, wanted))
            longest = max(len(draft.token_ids) for draft in drafts.values())
            if depth == 0:
                first_done, first_depth = step_latency.clock(), longest
            depth = longest
            rooms = {each: wanted[each] - len(drafts[each].token_ids) for each in active}
            active = [request for request in active if rooms[request] > 0]
            promised = 0.0
            if behind is not None and active:
                found = behind(drafts)
                active = [request for request in active if request in found]
                promised = sum(found[request] for request in active)
            beliefs = [(self._key(request), drafts[request].belief) for request in active]
            most = max(rooms.values())
            if not active or not self._schedule.goes_on(
                beliefs, depth, time_of, most=most, behind=promised
            ):
                break
        # A first forward that reads much more than the last token says nothing about the others.
        reads = caught_up > _CATCHING_UP
        counted, since = (depth - first_depth, first_done) if reads else (depth, started)
        if counted > 0:
            seconds = (step_latency.clock() - since) / counted
            self._schedule.observe_time(len(self._slots), seconds)
        return drafts, depth * time_of.draft

    def learn(self, request: int, draft: RowDraft, emitted: Sequence[int]) -> None:
        """Learns from the tokens that were emitted where it had drafted `draft`."""
        accepted, drafted = draft.accepted(emitted), len(draft.token_ids)
        judged = min(accepted + 1, drafted, len(emitted))
        self._schedule.observe(self._key(request), draft.confidences[:judged], accepted, drafted)
        self._requests[request].steps += 1
        self._requests[request].drafts += 1
        self._drafts += 1
        self._drafted += drafted
        for counts, number in ((self._judged, judged), (self._accepted, accepted)):
            counts.extend([0] * (number - len(counts)))
            for index in range(number):
                counts[index] += 1

    def _round(
        self,
        active: list[int],
        pending: dict[int, list[int]],
        drafts: dict[int, RowDraft],
        wanted: dict[int, int],
    ) -> int:
        """One forward: the lower stage drafts, the model verifies that and emits one more token.

        Appends to `drafts`, and sets `wanted` to the draft's length where the model cannot go
        on. Returns the most tokens that a row had to catch up with.
        """
        tails = {request: pending[request] + drafts[request].token_ids for request in active}
        lower = self._lower_drafts(active, tails, drafts, wanted)
        started = step_latency.clock()
        logits, width, caught_up = self._forward(tails, lower)
        below = StepDrafts.of_rows([lower[request] for request in active])
        scores, emitted = self._verify(pending, tails, below, logits)
        confidences = (scores.amax(-1) - torch.logsumexp(scores, -1)).exp().tolist()
        estimator = self._schedule.estimator
        for request, first, tokens in zip(active, below.first_lines, emitted, strict=True):
            draft = drafts[request]
            # True if it has drafted a token that it cannot be given.
            stops = not tokens
            for line, token in enumerate(tokens[: wanted[request] - len(draft.token_ids)], first):
                # A confidence of NaN leaves nothing to draw from.
                if stops or math.isnan(confidences[line]):
                    stops = True
                    break
                draft.token_ids.append(token)
                draft.confidences.append(confidences[line])
                draft.belief = estimator.extended(draft.belief, confidences[line])
                draft.probabilities.append(float(draft.belief.sum()))
                if self.samples:
                    draft.logits.append(scores[line])
                stops = token >= self.vocabulary.known
            if stops:
                wanted[request] = len(draft.token_ids)
            if self.lower is not None and lower[request].token_ids:
                self.lower.learn(request, lower[request], tokens)
        # Tokens to catch up with are read as a prompt's are.
        read = caught_up - 1 if caught_up > _CATCHING_UP else 0
        rows, seconds = len(self._slots), step_latency.clock() - started
        self._cost.observe(rows, width, seconds, prompt_tokens=rows * read)
        return caught_up

    def _lower_drafts(
        self,
        active: list[int],
        tails: dict[int, list[int]],
        drafts: dict[int, RowDraft],
        wanted: dict[int, int],
    ) -> dict[int, RowDraft]:
        """The lower stage's drafts for the next forward."""
        if self.lower is None or self._cost.wants_plain_step(len(self._slots)):
            return dict.fromkeys(active, RowDraft())
        # The forward emits one token more than is drafted for it.
        limits = {each: wanted[each] - len(drafts[each].token_ids) - 1 for each in active}
        step, _ = self._cost.best_widths(len(self._slots))
        lower, _ = self.lower.draft(tails, limits, step=step, running=len(active))
        for draft in lower.values():
            # The model cannot take other ids, which the engine may draft.
            draft.cut(self.vocabulary.known)
        return lower

    def _forward(
        self, tails: dict[int, list[int]], lower: dict[int, RowDraft]
    ) -> tuple[torch.Tensor, int, int]:
        """The logits after text and tail, and after each token of the lower stage's draft.

        Returns them as (positions, target's vocabulary), the width of the forward, and the most
        tokens that a row had to catch up with.
        """
        feeds: list[list[int]] = []
        lengths: list[int] = []
        wanted: list[int] = []
        caught_up = 0
        for request in self._slots:
            cached = self._requests[request]
            if request not in tails:
                # The row only keeps its slot: the next forward overwrites this token.
                lengths.append(len(cached.token_ids))
                feeds.append([0])
                wanted.append(0)
                continue
            missing = self._missing(request, tails[request])
            caught_up = max(caught_up, len(missing))
            lengths.append(len(cached.token_ids))
            feeds.append(missing + lower[request].token_ids)
            wanted.append(1 + len(lower[request].token_ids))
            cached.token_ids += feeds[-1]
            cached.confirmed = len(cached.text)
        with attending(self._model.model):
            logits = self._model.forward(
                feeds,
                rows=[self._requests[each].row for each in self._slots],
                cached=lengths,
                wanted=wanted,
                # The last confirmed token may have to be read again.
                floors=[max(self._requests[each].confirmed - 1, 0) for each in self._slots],
            )
        return self.vocabulary.target_logits(logits), max(map(len, feeds)), caught_up

    def _missing(self, request: int, tail: list[int]) -> list[int]:
        """The tokens of text and tail that the cache lacks, at least the last one.

        Drops what the cache holds from the first token on that differs.
        """
        cached = self._requests[request]
        text = cached.text
        start = min(cached.confirmed, len(text) + len(tail) - 1)
        tokens = text[start:] + tail
        equal = shared_length(tokens[:-1], cached.token_ids[start:])
        cached.confirmed = min(start + equal, len(text))
        del cached.token_ids[start + equal :]
        return tokens[equal:]

    def _verify(
        self,
        pending: dict[int, list[int]],
        tails: dict[int, list[int]],
        below: StepDrafts,
        logits: torch.Tensor,
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """The scores (positions, vocabulary), float32, and the tokens that each request emits."""
        asked = [self._requests[request] for request in tails]
        texts = [tail + draft for tail, draft in zip(tails.values(), below.tolist(), strict=True)]
        rows = [each.row for each in asked]
        counts = [1 + count for count in below.counts]
        scores = self.scoring(logits, rows, texts, counts).to(torch.float32)
        draws = None
        if self.samples:
            draws = []
            for each, (request, tail) in zip(asked, tails.items(), strict=True):
                length = len(each.text)
                seed = _mixed(each.seed, self.level, length, len(pending[request]))
                draws.append((seed, length + len(tail)))
        choice = self._verifier(scores, below, draws=draws)
        return scores, choice.tokens

    def _drop_ended(self) -> None:
        if self._ended.isdisjoint(self._slots):
            return
        staying = compacted_slots([request in self._ended for request in self._slots])
        self._slots = [self._slots[slot] for slot in staying]
        self._model.cache.keep(staying)


def _mixed(seed: int, level: int, length: int, pending: int) -> int:
    """A seed of 63 bits for a level of staged drafting, a length of the text and one behind it.

    The finaliser of SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number
    generators, 2014), once for each number.
    """
    mixed = seed & _MASK
    for number in (level + 1, length, pending):
        mixed = (mixed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1
