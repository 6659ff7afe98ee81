"""How many tokens a draft model drafts in a step: constant, heuristic or adaptive.

The adaptive schedule maximises emitted tokens per second. Let r be the highest rate that any draft
length promises for the request. Then k more draft tokens are worth their expected accepted tokens
minus r times their seconds, and the model drafts on while some k is worth more than nothing
(Dinkelbach, On nonlinear fractional programming, 1967). For a constant acceptance probability and a
target forward of constant time, this gives the gamma of `fastdraft.drafters.theory.best_gamma`.

`fastdraft.drafters.estimator` learns the acceptance probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastdraft._core import BackOff
from fastdraft.drafters.estimator import AcceptanceEstimator, Belief

__all__ = ["SCHEDULES", "DraftTime", "Schedule"]

_TIME_MEMORY: Final = 10
_LARGEST_SURPRISE: Final = 0.7

# After how many steps a model that does not pay is tried again, at first and at most; and the
# tokens that it then drafts.
_TRIALS: Final = 16, 512
_TRIAL_TOKENS: Final = 2


@dataclass(frozen=True)
class DraftTime:
    """How long drafting and verification take in this step.

    Attributes:
        step: float64 (widths,), seconds of a target step by the tokens a row in its forward.
        draft: Seconds of one more draft token, in all rows together.
        running: The rows in the target's forward, drafted for by this model or not.
    """

    step: NDArray[np.float64]
    draft: float
    running: int = 1

    def target(self, drafted: int) -> float:
        """Seconds of the target's step with this many draft tokens."""
        return float(self.step[min(drafted, len(self.step) - 1)])

    def more(self, drafted: int, further: int) -> NDArray[np.float64]:
        """Seconds that 1 .. `further` draft tokens behind `drafted` ones take. float64."""
        counts = np.arange(1, further + 1)
        widths = (drafted + 1 + counts).clip(max=len(self.step))
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
    """Drafts `num_tokens` tokens and measures them. One for each draft model.

    Tokens and rates are per row, so that a batch that shrinks changes nothing.

    Attributes:
        num_tokens: The most tokens of a draft.
        estimator: Estimates acceptance from the model's largest probability.
    """

    weighs_cost = False

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.estimator = AcceptanceEstimator()
        self._clocks: dict[int, _Clock] = {}

    def numbers(
        self, requests: Sequence[Hashable], time: DraftTime, *, found_to_pay: bool = False
    ) -> list[int]:
        """The most tokens to draft in this step for each of `requests`, 0 for none.

        `found_to_pay`: whether it is known already that drafting pays; the schedule decides
        otherwise.
        """
        return [self.num_tokens] * len(requests)

    def expected(
        self, requests: Sequence[Hashable], time: DraftTime
    ) -> tuple[int, NDArray[np.float64]]:
        """Returns what drafting for `requests` may bring: the tokens of the longest draft, and the
        accepted ones of each, float64 (requests,)."""
        return self._expected(requests, self.numbers(requests, time))

    def _expected(
        self, requests: Sequence[Hashable], numbers: Sequence[int]
    ) -> tuple[int, NDArray[np.float64]]:
        begin, gains = self.estimator.begin, self.estimator.gains
        pairs = zip(requests, numbers, strict=True)
        return max(numbers), np.array([gains(each, begin(each), most)[-1] for each, most in pairs])

    def pass_by(self, request: Hashable) -> None:
        """Passes a step of the request without a draft of the model."""
        self.estimator.pass_by(request)

    def goes_on(
        self,
        beliefs: Sequence[tuple[Hashable, Belief]],
        drafted: int,
        time: DraftTime,
        *,
        most: int,
        behind: float = 0.0,
    ) -> bool:
        """Returns whether to draft another token behind `drafted` ones.

        Args:
            beliefs: The requests that would get one, and the beliefs about their drafts.
            drafted: How long the longest draft is, at least 1.
            time: How long drafting takes.
            most: How many more may follow, at least 1.
            behind: The tokens that the engine promises behind these drafts, without more of them.
        """
        return True

    def observe(
        self, request: Hashable, confidences: Sequence[float], accepted: int, drafted: int
    ) -> None:
        """Learns from a draft of `drafted` tokens.

        Args:
            request: The request of the draft.
            confidences: The model's confidence in each token that the target judged: the accepted
                ones and the first rejected one.
            accepted: How many tokens were accepted.
        """
        self.estimator.observe(request, confidences, accepted)

    def seconds(self, rows: int) -> float | None:
        """Seconds of a draft token in a batch of this many rows; None where none was timed."""
        clock = self._clocks.get(_size(rows))
        return None if clock is None else clock.seconds

    def observe_time(self, rows: int, seconds: float) -> None:
        """Learns that a draft token took `seconds` in a batch of `rows` rows."""
        self._clocks.setdefault(_size(rows), _Clock(seconds)).observe(seconds)

    def forget(self, request: Hashable) -> None:
        """Drops what is known of a request that has ended."""
        self.estimator.forget(request)


class Heuristic(Schedule):
    """Assisted generation's: two tokens more where all were accepted, else one less, at least 1.

    J. Gante, Assisted Generation: a new direction toward low-latency text generation, 2023. Each
    request begins with `num_tokens`.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._of_request: dict[Hashable, int] = {}

    def numbers(
        self, requests: Sequence[Hashable], time: DraftTime, *, found_to_pay: bool = False
    ) -> list[int]:
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
    """Drafts at most `num_tokens`, while a further one pays by measured probabilities and times."""

    weighs_cost = True

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._rate = 0.0  # tokens a second that this step's drafts promise
        self._trials = BackOff(*_TRIALS)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trials": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _trials=BackOff(*_TRIALS))

    def numbers(
        self, requests: Sequence[Hashable], time: DraftTime, *, found_to_pay: bool = False
    ) -> list[int]:
        number = self.num_tokens
        plain = 1 / time.target(0)
        self._rate = max(float(self._rates(requests, time).max()), plain)
        pays = found_to_pay or self._rate > plain
        if not pays:
            for request in requests:
                self.pass_by(request)
            number = min(_TRIAL_TOKENS, number)
        return [number if self._trials.asks(pays) else 0] * len(requests)

    def expected(
        self, requests: Sequence[Hashable], time: DraftTime
    ) -> tuple[int, NDArray[np.float64]]:
        number = 1 + int(self._rates(requests, time).argmax())
        return self._expected(requests, [number] * len(requests))

    def goes_on(
        self,
        beliefs: Sequence[tuple[Hashable, Belief]],
        drafted: int,
        time: DraftTime,
        *,
        most: int,
        behind: float = 0.0,
    ) -> bool:
        gains = (self._gains(beliefs, most) - behind) / time.running
        return bool((gains > self._rate * time.more(drafted, most)).any())

    def _rates(self, requests: Sequence[Hashable], time: DraftTime) -> NDArray[np.float64]:
        """Tokens a second that a row grows by with 1 .. `num_tokens` draft tokens."""
        begun = [(request, self.estimator.begin(request)) for request in requests]
        grown = 1 + self._gains(begun, self.num_tokens) / time.running
        rates: NDArray[np.float64] = grown / (time.target(0) + time.more(0, self.num_tokens))
        return rates

    def _gains(self, beliefs: Sequence[tuple[Hashable, Belief]], most: int) -> NDArray[np.float64]:
        """The tokens that 1 .. `most` more draft tokens in each of these drafts add together."""
        gains = np.zeros(most)
        for request, belief in beliefs:
            gains += self.estimator.gains(request, belief, most)
        return gains


def _size(rows: int) -> int:
    """Batches within a power of two share a clock."""
    return (rows - 1).bit_length()


SCHEDULES: Final[dict[str, tuple[type[Schedule], int]]] = {
    "adaptive": (Adaptive, 16),
    "heuristic": (Heuristic, 5),
    "constant": (Schedule, 5),
}
"""The schedules by their names, each with its `num_tokens` unless another is given."""
