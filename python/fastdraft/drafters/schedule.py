"""How many tokens a draft model drafts in a step: constant, heuristic or adaptive.

The adaptive schedule weighs tokens against time. Text has to be written to its end, whatever is
drafted, so in each passage of it what counts is how many tokens a second it grows by there. With r
the most that drafts of some length promise by what is known of the request, k more draft tokens are
worth what they make of accepted tokens less r times what they take, and the model drafts on while
some k is worth more than nothing (Dinkelbach, On nonlinear fractional programming, 1967). For a
constant chance of acceptance and a target whose forward always takes the same, that is the gamma of
`fastdraft.theory.best_gamma`.

How probable it is that a token is accepted `fastdraft.drafters.acceptance` learns.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdraft.drafters.acceptance import Acceptance, Path

__all__ = ["SCHEDULES", "DraftTime", "Schedule"]

_TIME_MEMORY: Final = 10
_LARGEST_SURPRISE: Final = 0.7

# A model that does not pay is tried again after so many steps, and after twice as many each time.
_FIRST_TRIAL: Final = 16
_LAST_TRIAL: Final = 512
_TRIAL_TOKENS: Final = 2


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

    def target(self, drafted: int) -> float:
        """Seconds of the target's step with so many draft tokens."""
        return float(self.step[min(max(drafted + 1, self.width), len(self.step)) - 1])

    def more(self, drafted: int, further: int) -> NDArray[np.float64]:
        """Seconds that 1 .. `further` draft tokens behind `drafted` ones take. float64."""
        counts = np.arange(1, further + 1)
        widths = np.maximum(drafted + 1 + counts, self.width).clip(max=len(self.step))
        seconds: NDArray[np.float64] = (
            counts * self.draft + self.step[widths - 1] - self.target(drafted)
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


class Schedule:
    """Drafts `num_tokens` tokens, and measures what they are worth. One for each draft model.

    Tokens and rates are those of a row, so that a batch that shrinks changes nothing.

    Attributes:
        num_tokens: The most tokens of a draft.
        acceptance: How probable it is that they are accepted, by the model's largest probability.
    """

    weighs_cost = False

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        # A small model is surer than it is right.
        self.acceptance = Acceptance(lambda sure: 0.2 + 0.75 * sure)
        self._clocks: dict[int, _Clock] = {}

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

    def rate(self, requests: Sequence[Hashable], time: DraftTime, *, running: int) -> float:
        """Tokens that a row grows by a second where the model drafts for `requests`.

        `running` is that of `numbers`.
        """
        return float(self._rates(requests, time, running=running)[-1])

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
        self.acceptance.observe(request, confidences, accepted)

    def seconds(self, rows: int) -> float | None:
        """What a draft token takes in a batch of so many rows; None where none was timed."""
        clock = self._clocks.get(_size(rows))
        return None if clock is None else clock.seconds

    def observe_time(self, rows: int, seconds: float) -> None:
        """Learns that a draft token took `seconds` in a batch of `rows` rows."""
        self._clocks.setdefault(_size(rows), _Clock(seconds)).observe(seconds)

    def forget(self, request: Hashable) -> None:
        """Drops what is known of a request that has ended."""
        self.acceptance.forget(request)

    def _rates(
        self, requests: Sequence[Hashable], time: DraftTime, *, running: int
    ) -> NDArray[np.float64]:
        """Tokens that a row grows by a second with 1 .. `num_tokens` draft tokens."""
        begun = [(request, self.acceptance.begin(request)) for request in requests]
        grown = 1 + self._gains(begun, self.num_tokens) / running
        rates: NDArray[np.float64] = grown / (time.target(0) + time.more(0, self.num_tokens))
        return rates

    def _gains(self, paths: Sequence[tuple[Hashable, Path]], most: int) -> NDArray[np.float64]:
        """The tokens that 1 .. `most` more draft tokens of each of `paths` add together."""
        gains = np.zeros(most)
        for request, path in paths:
            gains += self.acceptance.gains(request, path, most)
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
        self._rate = 0.0  # what the draft in hand promises
        self._idle = 0
        self._next_trial = _FIRST_TRIAL

    def numbers(self, requests: Sequence[Hashable], time: DraftTime, *, running: int) -> list[int]:
        number = self.num_tokens
        plain = 1 / time.target(0)
        self._rate = self.rate(requests, time, running=running)
        if self._rate > plain:
            self._idle, self._next_trial = 0, _FIRST_TRIAL
            return [number] * len(requests)
        for request in requests:
            self.acceptance.pass_by(request)
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
        gains = self._gains(paths, most) / running
        return bool((gains > self._rate * time.more(drafted, most)).any())

    def rate(self, requests: Sequence[Hashable], time: DraftTime, *, running: int) -> float:
        best = float(self._rates(requests, time, running=running).max())
        return max(best, 1 / time.target(0))


def _size(rows: int) -> int:
    """Batches within a power of two share a clock."""
    return (rows - 1).bit_length()


SCHEDULES: Final[dict[str, tuple[type[Schedule], int]]] = {
    "adaptive": (Adaptive, 16),
    "heuristic": (Heuristic, 5),
    "constant": (Schedule, 5),
}
"""The schedules by their names, each with its `num_tokens` unless another is given."""
