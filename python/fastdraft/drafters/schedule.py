"""How many tokens a draft model drafts in a step: constant, heuristic or adaptive.

The adaptive schedule weighs tokens against time. With r the tokens that a row has grown by a second
of late, k more draft tokens are worth what they make of accepted tokens less r times what they
take, and it drafts on while some k is worth more than nothing. Where r is the rate that this very
rule reaches, the rule makes the rate greatest (Dinkelbach, On nonlinear fractional programming,
1967); for a constant chance of acceptance and a target whose forward always takes the same, that is
the gamma of `fastdraft.theory.best_gamma`.

A token's chance of acceptance is calibrated by how sure the draft model is of it. Text comes in
passages that are easier or harder than that tells, so each request has an offset to the log-odds of
its chances, which changes now and then: what is known of it is a distribution over a grid of
offsets, as in a hidden Markov model. A draft that was accepted so far thus promises more to come.

Only tokens that the target came to judge teach a schedule anything. Those behind a refused one do
not, so what is drafted next never depends on noise that may be drawn again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["SCHEDULES", "DraftTime", "Path", "Schedule"]

# How sure a model is, in classes that are finer where it is surer, and the memory of each.
_EDGES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_CLASS_MEMORY: Final = 300.0
_CLASS_PRIOR: Final = 3.0

_OFFSETS: Final = np.linspace(-3.0, 3.0, 9)
_OFFSET_SPREAD: Final = 0.75  # at first; how far offsets really spread is learned
_OFFSET_CHANGES: Final = 1 / 30  # a step
_OFFSET_MEMORY: Final = 200.0
_USUAL_MEMORY: Final = 12.0

_ALPHA_MEMORY: Final = 60.0
_ALPHA_PRIOR: Final = (0.7, 4.0)

_TIME_MEMORY: Final = 10
_LARGEST_SURPRISE: Final = 0.7

_RATE_MEMORY: Final = 100.0
_RATE_PRIOR: Final = 3.0

# A model that does not pay is tried again after so many steps, and after twice as many each time.
_FIRST_TRIAL: Final = 16
_LAST_TRIAL: Final = 512
_TRIAL_TOKENS: Final = 2

Path = NDArray[np.float64]
"""For each offset, the chance that it is the request's and that a draft so far is accepted."""


@dataclass(frozen=True)
class DraftTime:
    """What drafting in this step takes.

    Attributes:
        step: float64 (widths,), seconds of a target step by the tokens a row in its forward.
        draft: Seconds of one more draft token, in all rows together.
        width: Tokens a row that the forward has in any case.
    """

    step: NDArray[np.float64]
    draft: float
    width: int = 1

    def more(self, drafted: int, further: int) -> NDArray[np.float64]:
        """Seconds that 1 .. `further` draft tokens behind `drafted` ones take. float64."""
        counts = np.arange(1, further + 1)
        widths = np.maximum(drafted + 1 + counts, self.width).clip(max=len(self.step))
        now = min(max(drafted + 1, self.width), len(self.step))
        seconds: NDArray[np.float64] = (
            counts * self.draft + self.step[widths - 1] - self.step[now - 1]
        )
        return seconds


@dataclass
class _Clock:
    """The geometric mean of times, the latest counting most; an outlier counts for little."""

    seconds: float
    count: int = 0

    def observe(self, seconds: float) -> None:
        self.count += 1
        surprise = math.log(seconds / self.seconds)
        bounded = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self.seconds *= math.exp(bounded / min(self.count, _TIME_MEMORY))


@dataclass
class _Request:
    """What is known of a request: its offset, and the usual log-odds of its tokens of late."""

    belief: Path
    usual: float


class Schedule:
    """Drafts `num_tokens` tokens, and measures what they are worth. One for each draft model.

    Tokens and rates are those of a row, so that a batch that shrinks changes nothing.

    Attributes:
        num_tokens: The most tokens of a draft.
    """

    weighs_cost = False

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._accepted = _ALPHA_PRIOR[0] * _ALPHA_PRIOR[1]
        self._tested = _ALPHA_PRIOR[1]
        # Of late: tokens a row, and the time that they took in steps without drafts.
        self._emitted = 0.0
        self._steps = 0.0
        self._clocks: dict[int, _Clock] = {}
        middles = np.convolve([0.0, *_EDGES, 1.0], [0.5, 0.5], "valid")
        self._class_tested = [_CLASS_PRIOR] * len(middles)
        self._class_accepted = [_CLASS_PRIOR * (0.2 + 0.75 * float(each)) for each in middles]
        self._usual = math.log(_ALPHA_PRIOR[0] / (1 - _ALPHA_PRIOR[0]))
        spread = np.exp(-0.5 * (_OFFSETS / _OFFSET_SPREAD) ** 2)
        self._belief: Path = spread / spread.sum()
        self._requests: dict[Hashable, _Request] = {}

    @property
    def alpha(self) -> float:
        """The chance that a token is accepted where those before it were, of late."""
        return self._accepted / self._tested

    def numbers(self, requests: Sequence[Hashable], time: DraftTime, *, running: int) -> list[int]:
        """The most tokens to draft in this step for each of `requests`, 0 for none.

        `running` is the number of rows in the target's forward, these or others.
        """
        return [self.num_tokens] * len(requests)

    def goes_on(
        self,
        paths: Sequence[tuple[Hashable, Path]],
        drafted: int,
        time: DraftTime,
        *,
        most: int,
        running: int,
    ) -> bool:
        """Whether to draft another token behind `drafted` ones.

        Args:
            paths: The requests that would get one, and the paths of their drafts.
            drafted: How long the longest of them is, at least 1.
            time: What drafting takes.
            most: How many more may follow, at least 1.
            running: As for `numbers`.
        """
        return True

    def begin(self, request: Hashable) -> Path:
        """The path of a draft without tokens."""
        return self._state(request).belief

    def extended(self, path: Path, confidence: float) -> Path:
        """The path of a draft that goes on with a token of which the model is this sure."""
        return path * _chances(self._log_odds(confidence))

    def worth(self, request: Hashable, time: DraftTime) -> float:
        """What a draft is worth before it is made, in tokens: gained, less those lost by time."""
        gains = self._gains([(request, self.begin(request))], self.num_tokens)
        return float(gains[-1] - self.rate(time) * time.more(0, self.num_tokens)[-1])

    def rate(self, time: DraftTime) -> float:
        """Tokens that a row grows by a second where nothing else drafts: of late, and at least
        without drafts."""
        speed = (self._emitted + _RATE_PRIOR) / (self._steps + _RATE_PRIOR)
        return max(speed, 1.0) / float(time.step[0])

    def observe(
        self, request: Hashable, confidences: Sequence[float], accepted: int, drafted: int
    ) -> None:
        """Learns from a draft of `drafted` tokens.

        Args:
            request: Whose draft.
            confidences: How sure the model was of each token that the target came to judge: the
                accepted ones and the first refused one.
            accepted: How many tokens were accepted.
        """
        keep = (1 - 1 / _ALPHA_MEMORY) ** len(confidences)
        self._accepted = keep * self._accepted + accepted
        self._tested = keep * self._tested + len(confidences)

        state = self._state(request)
        belief = state.belief.copy()
        for place, confidence in enumerate(confidences):
            log_odds = self._log_odds(confidence)
            chances = _chances(log_odds)
            belief *= chances if place < accepted else 1 - chances
            state.usual += (log_odds - state.usual) / _USUAL_MEMORY
            self._usual += (log_odds - self._usual) / _ALPHA_MEMORY
        belief /= belief.sum()
        self._belief = self._belief + (belief - self._belief) / _OFFSET_MEMORY
        state.belief = belief + _OFFSET_CHANGES * (self._belief - belief)

        keep = 1 - 1 / _CLASS_MEMORY
        for place, confidence in enumerate(confidences):
            at = bisect.bisect_right(_EDGES, confidence)
            self._class_tested[at] = keep * self._class_tested[at] + 1
            self._class_accepted[at] = keep * self._class_accepted[at] + (place < accepted)

    def observe_step(self, emitted: float, steps: float) -> None:
        """Learns what a step came to: tokens a row that nothing else drafted for, and its time in
        steps without drafts."""
        keep = 1 - 1 / _RATE_MEMORY
        self._emitted = keep * self._emitted + emitted
        self._steps = keep * self._steps + steps

    def seconds(self, rows: int) -> float | None:
        """What a draft token takes in a batch of so many rows; None where none was timed."""
        clock = self._clocks.get(_size(rows))
        return None if clock is None else clock.seconds

    def observe_time(self, rows: int, seconds: float) -> None:
        """Learns that a draft token took `seconds` in a batch of `rows` rows."""
        self._clocks.setdefault(_size(rows), _Clock(seconds)).observe(seconds)

    def forget(self, request: Hashable) -> None:
        """Drops what is known of a request that has ended."""
        self._requests.pop(request, None)

    def _state(self, request: Hashable) -> _Request:
        state = self._requests.get(request)
        if state is None:
            state = self._requests[request] = _Request(self._belief, self._usual)
        return state

    def _log_odds(self, confidence: float) -> float:
        at = bisect.bisect_right(_EDGES, confidence)
        accepted, tested = self._class_accepted[at], self._class_tested[at]
        # Half a count more of each, so that neither is 0.
        return math.log((accepted + 0.5) / (tested - accepted + 0.5))

    def _gains(self, paths: Sequence[tuple[Hashable, Path]], most: int) -> NDArray[np.float64]:
        """The tokens that 1 .. `most` more draft tokens of each of `paths` add together."""
        gains = np.zeros(most)
        for request, path in paths:
            usual = _chances(self._state(request).usual)
            gains += path @ np.cumsum(usual[:, None] ** np.arange(1, most + 1), axis=1)
        return gains


class Heuristic(Schedule):
    """Assisted generation's: two tokens more where all were accepted, else one less, at least 1.

    J. Gante, Assisted Generation: a new direction toward low-latency text generation, 2023. Each
    request begins with `num_tokens`.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._of_request: dict[Hashable, int] = {}

    def numbers(self, requests: Sequence[Hashable], time: DraftTime, *, running: int) -> list[int]:
        return [self._of_request.get(request, self.num_tokens) for request in requests]

    def observe(
        self, request: Hashable, confidences: Sequence[float], accepted: int, drafted: int
    ) -> None:
        super().observe(request, confidences, accepted, drafted)
        number = self._of_request.get(request, self.num_tokens)
        self._of_request[request] = number + 2 if accepted == drafted else max(number - 1, 1)

    def forget(self, request: Hashable) -> None:
        super().forget(request)
        self._of_request.pop(request, None)


class Adaptive(Schedule):
    """Drafts while a further token pays, by measured chances and times; at most `num_tokens`."""

    weighs_cost = True

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._idle = 0
        self._next_trial = _FIRST_TRIAL

    def numbers(self, requests: Sequence[Hashable], time: DraftTime, *, running: int) -> list[int]:
        number = self.num_tokens
        paths = [(request, self.begin(request)) for request in requests]
        if self._most_worth(paths, 0, time, most=number, running=running) > 0:
            self._idle, self._next_trial = 0, _FIRST_TRIAL
            return [number] * len(requests)
        for request in requests:
            # Nothing is learned in this step, and the text goes on.
            state = self._state(request)
            state.belief = state.belief + _OFFSET_CHANGES * (self._belief - state.belief)
            state.usual += _OFFSET_CHANGES * (self._usual - state.usual)
        self._idle += 1
        if self._idle < self._next_trial:
            return [0] * len(requests)
        self._idle, self._next_trial = 0, min(2 * self._next_trial, _LAST_TRIAL)
        return [min(_TRIAL_TOKENS, number)] * len(requests)

    def goes_on(
        self,
        paths: Sequence[tuple[Hashable, Path]],
        drafted: int,
        time: DraftTime,
        *,
        most: int,
        running: int,
    ) -> bool:
        return self._most_worth(paths, drafted, time, most=most, running=running) > 0

    def worth(self, request: Hashable, time: DraftTime) -> float:
        path = [(request, self.begin(request))]
        return self._most_worth(path, 0, time, most=self.num_tokens, running=1)

    def _most_worth(
        self,
        paths: Sequence[tuple[Hashable, Path]],
        drafted: int,
        time: DraftTime,
        *,
        most: int,
        running: int,
    ) -> float:
        gains = self._gains(paths, most) / running
        return float((gains - self.rate(time) * time.more(drafted, most)).max())


def _size(rows: int) -> int:
    """Batches within a power of two share a clock."""
    return (rows - 1).bit_length()


def _chances(log_odds: float) -> NDArray[np.float64]:
    """The chance of acceptance for each offset."""
    chances: NDArray[np.float64] = 1 / (1 + np.exp(-(log_odds + _OFFSETS)))
    return chances


SCHEDULES: Final[dict[str, tuple[type[Schedule], int]]] = {
    "adaptive": (Adaptive, 16),
    "heuristic": (Heuristic, 5),
    "constant": (Schedule, 5),
}
"""The schedules by their names, each with its `num_tokens` unless another is given."""
