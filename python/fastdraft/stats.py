"""What drafting did for a request, and for many."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["DraftStats"]


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
        return DraftStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))
