"""Counts of drafting for one request, and for many."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields

__all__ = ["AssistantStats", "DraftStats"]


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Counts over the steps of one request; `a + b` counts over both.

    The definitions of the literature differ, so three ratios are given: `mean_accepted_tokens`
    is Spec-Bench's, `acceptance_length` is vLLM's.
    """

    steps: int = 0
    """Target forwards whose emitted tokens were observed, with or without a draft."""
    emitted: int = 0
    """Tokens the request grew by: accepted ones, and the recovered or bonus token of each step."""
    drafts: int = 0
    """Steps with a draft of at least one token."""
    drafted: int = 0
    """Draft tokens proposed."""
    accepted: int = 0
    """Draft tokens that the target emitted."""
    accepted_prediction_tokens: int = 0
    """Those of them that were drafted from the prediction."""
    rejected_prediction_tokens: int = 0
    """Tokens drafted from the prediction that the target did not emit."""
    accepted_by_source: tuple[int, ...] = (0,) * 8
    """The accepted ones by where they were found: `accepted_by_source[Source.READ_ONLY]`. Those of
    all kinds of offers are the last number. The sum is `accepted`, but some are unknown where
    the host verified what it had drafted before (`Engine.continue_batch`), and none where no engine
    drafts."""

    @property
    def mean_accepted_tokens(self) -> float:
        """Emitted tokens per target step, every step counted; 1.0 before the first."""
        return self.emitted / self.steps if self.steps else 1.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted tokens per draft, steps without a draft not counted."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0.0 before the first draft."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def __add__(self, other: DraftStats) -> DraftStats:
        *names, _ = (field.name for field in fields(self))
        counts = {name: getattr(self, name) + getattr(other, name) for name in names}
        by_source = map(operator.add, self.accepted_by_source, other.accepted_by_source)
        return DraftStats(**counts, accepted_by_source=tuple(by_source))


@dataclass(frozen=True, slots=True)
class AssistantStats:
    """The worth of one draft model's drafts in a generation, over all rows.

    Counts are by the position in the draft, from its first token on. Tokens behind a refused one
    are drafted but never judged.
    """

    drafts: int = 0
    """Drafts of at least one token that were verified."""
    drafted: int = 0
    """Tokens of these drafts."""
    judged: tuple[int, ...] = ()
    """Those of them whose predecessors in the draft were all accepted."""
    accepted: tuple[int, ...] = ()
    """Those of the judged that were accepted."""
    seconds: float | None = None
    """Seconds of one more draft token, for all rows together; None before any was timed."""
    target_seconds: float | None = None
    """Seconds of a forward over one token a row of the model that it drafts for."""

    @property
    def alpha(self) -> float:
        """The probability that a judged token is accepted; 0.0 before the first."""
        judged = sum(self.judged)
        return sum(self.accepted) / judged if judged else 0.0

    @property
    def gamma(self) -> float:
        """Tokens a draft; 0.0 before the first."""
        return self.drafted / self.drafts if self.drafts else 0.0

    @property
    def c(self) -> float | None:
        """The cost coefficient: the time of a draft token over that of a plain target forward."""
        if self.seconds is None or self.target_seconds is None:
            return None
        return self.seconds / self.target_seconds
