"""Predicted outputs as the service drafts them."""

from __future__ import annotations

from collections.abc import Sequence


class PredictedOutputs:
    """Predicted outputs as the service drafts them: windows, and a wait after every edit."""

    def __init__(self, prediction: Sequence[int], recovery: int) -> None:
        self.prediction = list(prediction)
        self.recovery = recovery
        self.next: int | None = 0  # the position in the prediction; None while recovering
        self.since: list[int] = []  # emitted since the output left the prediction

    def advance(self, token: int) -> None:
        """Takes the next output token."""
        if self.next is not None:
            if self.next < len(self.prediction) and self.prediction[self.next] == token:
                self.next += 1
                return
            self.next, self.since = None, []
        self.since.append(token)
        if len(self.since) >= self.recovery:
            for end in range(self.recovery, len(self.prediction) + 1):
                if self.prediction[end - self.recovery : end] == self.since[-self.recovery :]:
                    self.next = end
                    break

    def draft(self, limit: int) -> list[int]:
        """The tokens to verify next."""
        return [] if self.next is None else self.prediction[self.next : self.next + limit]
