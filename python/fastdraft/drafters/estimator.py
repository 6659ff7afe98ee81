"""The acceptance probability of draft tokens, learned from verified drafts.

The drafter's confidence in a token is calibrated to a probability of acceptance. Some passages of
text are easier than the confidence says and some are harder, so each request has an offset to the
log-odds of its tokens, which changes now and then. The estimator keeps a distribution over a grid
of offsets, as in a hidden Markov model. So a draft that was accepted so far promises more to come,
and a change shows after a draft or two. The core's model of offers, with its record of a request's
last twenty tokens, takes longer: with it, schedules are 2 to 23 % slower on text that changes every
25 steps. With acceptance by depth alone (`DepthAcceptance`) they are up to 29 % slower there, and
1 % slower where nothing changes.

Only tokens that the target judged teach anything: the accepted ones and the first rejected one.
What is drafted next must not depend on tokens behind it, whose random numbers may be drawn again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdraft._core import CONFIDENCE_CLASSES

__all__ = ["AcceptanceEstimator", "Belief"]

# Classes of confidence, as the core weighs offers by, and how many tokens each of them remembers.
_EDGES: Final = [edge for edge, _ in CONFIDENCE_CLASSES[:-1]]
_CLASS_MEMORY: Final = 300.0
_CLASS_PRIOR: Final = 3.0

_OFFSETS: Final = np.linspace(-3.0, 3.0, 9)
_OFFSET_SPREAD: Final = 0.75  # at first; how far offsets really spread is learned
_OFFSET_CHANGES: Final = 1 / 30  # a step
_OFFSET_MEMORY: Final = 200.0
_USUAL_MEMORY: Final = 12.0

_ALL_MEMORY: Final = 60.0
_USUAL_ODDS: Final = 0.7 / 0.3

Belief = NDArray[np.float64]
"""For each offset, the probability that it is the request's and that the draft so far is accepted.

Its sum is the probability that the draft is accepted.
"""


@dataclass
class _Request:
    """The state of a request: its offset, and the recent mean log-odds of its tokens."""

    belief: Belief
    usual: float


class AcceptanceEstimator:
    """Estimates the acceptance probability of one drafter's tokens."""

    def __init__(self) -> None:
        self._class_tested = [_CLASS_PRIOR] * len(CONFIDENCE_CLASSES)
        self._class_accepted = [_CLASS_PRIOR * probability for _, probability in CONFIDENCE_CLASSES]
        self._usual = math.log(_USUAL_ODDS)
        spread = np.exp(-0.5 * (_OFFSETS / _OFFSET_SPREAD) ** 2)
        self._belief: Belief = spread / spread.sum()
        self._requests: dict[Hashable, _Request] = {}

    def begin(self, request: Hashable) -> Belief:
        """The belief about a draft without tokens."""
        return self._state(request).belief

    def extended(self, belief: Belief, confidence: float) -> Belief:
        """The belief about a draft after one more token, drafted with this confidence."""
        return belief * _probabilities(self._log_odds(confidence))

    def gains(self, request: Hashable, belief: Belief, most: int) -> NDArray[np.float64]:
        """Expected accepted tokens among the next 1 .. `most`, if they are like the recent ones.

        Float64 (most,).
        """
        usual = _probabilities(self._state(request).usual)
        gains: NDArray[np.float64] = belief @ np.cumsum(
            usual[:, None] ** np.arange(1, most + 1), axis=1
        )
        return gains

    def observe(self, request: Hashable, confidences: Sequence[float], accepted: int) -> None:
        """Learns from a draft.

        Args:
            request: The request of the draft.
            confidences: The drafter's confidence in each token that the target judged: the accepted
                ones and the first rejected one.
            accepted: How many tokens were accepted.
        """
        # The outcomes of requests in flight together are correlated: their memory grows with the
        # square root of their number, so that no batch outweighs all earlier ones.
        longer = math.sqrt(max(len(self._requests), 1))
        state = self._state(request)
        belief = state.belief.copy()
        for index, confidence in enumerate(confidences):
            log_odds = self._log_odds(confidence)
            probabilities = _probabilities(log_odds)
            belief *= probabilities if index < accepted else 1 - probabilities
            state.usual += (log_odds - state.usual) / _USUAL_MEMORY
            self._usual += (log_odds - self._usual) / _ALL_MEMORY
        belief /= belief.sum()
        self._belief = self._belief + (belief - self._belief) / (_OFFSET_MEMORY * longer)
        state.belief = belief + _OFFSET_CHANGES * (self._belief - belief)

        keep = 1 - 1 / (_CLASS_MEMORY * longer)
        for index, confidence in enumerate(confidences):
            at = bisect.bisect_right(_EDGES, confidence)
            self._class_tested[at] = keep * self._class_tested[at] + 1
            self._class_accepted[at] = keep * self._class_accepted[at] + (index < accepted)

    def pass_by(self, request: Hashable) -> None:
        """Passes a step of the request that teaches nothing: its belief fades a little."""
        state = self._state(request)
        state.belief = state.belief + _OFFSET_CHANGES * (self._belief - state.belief)
        state.usual += _OFFSET_CHANGES * (self._usual - state.usual)

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


def _probabilities(log_odds: float) -> Belief:
    """The probability of acceptance for each offset."""
    probabilities: Belief = 1 / (1 + np.exp(-(log_odds + _OFFSETS)))
    return probabilities
