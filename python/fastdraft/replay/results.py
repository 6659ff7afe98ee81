"""The results of a replay, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastdraft.stats import DraftStats

__all__ = [
    "FamilyResult",
    "ReplayResult",
    "Table",
    "as_json",
    "resampled_speeds",
    "speed_of",
]


Cost = float | Sequence[float]
"""The cost of a draft token as a fraction of a step, or the time of a step by its tokens."""


@dataclass(frozen=True)
class FamilyResult:
    """The counts of a drafter over the requests of one family.

    Attributes:
        requests: How many there were.
        stats: Their counts after the prefills, nodes of trees included. Without those of
            predictions, which not every drafter tells.
        propose_ns: p50 and p99 of one call, with its Python call, in nanoseconds.
        observe_ns_per_token: All calls together, divided by their tokens.
        sessions: Steps, emitted and drafted tokens of each session, or of each request without
            one; int64, (sessions, 3).
        lengths: How many of its steps had 0, 1, 2, ... draft tokens; int64, (sessions, any).
    """

    requests: int
    stats: DraftStats
    propose_ns: tuple[float, float]
    observe_ns_per_token: float
    sessions: NDArray[np.int64] = field(compare=False)
    lengths: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((0, 0), np.int64), compare=False
    )

    def priced(self, cost: Cost) -> NDArray[np.float64]:
        """Emitted tokens of each session, and its time in steps without drafts: (sessions, 2)."""
        steps, emitted, drafted = self.sessions.T
        if isinstance(cost, float | int):
            return np.stack((emitted, steps + cost * drafted), axis=1)
        return np.stack((emitted, self.lengths @ np.array(cost)[: self.lengths.shape[1]]), axis=1)

    def speed(self, cost: Cost) -> float:
        """Tokens in the time of a step without drafts: emitted / (steps + cost * drafted)."""
        return speed_of(self.priced(cost))


@dataclass(frozen=True)
class ReplayResult:
    """The counts of a drafter over all families.

    Attributes:
        drafter: Its name.
        token_cost: What a draft token costs, as a fraction of a step; it drafts by that where it
            can.
        lookahead: Its longest draft, or how deep its trees are.
        tree_budget: The most nodes of a tree; None for chains.
        at_once: How many requests ran at a time.
        families: The results by the families' names.
        curve: Instead of the token cost, the time of a step of 1, 2, ... tokens, as multiples of
            that of one token.
    """

    drafter: str
    token_cost: float
    lookahead: int
    tree_budget: int | None
    at_once: int
    families: dict[str, FamilyResult]
    curve: Sequence[float] | None = None

    @property
    def cost(self) -> Cost:
        """The cost in the modelled speeds: `curve`, or else `token_cost`."""
        return self.token_cost if self.curve is None else self.curve

    def priced(self, cost: Cost | None = None) -> NDArray[np.float64]:
        """Those of all families, as `FamilyResult.priced`; by default at the result's own cost."""
        found = self.cost if cost is None else cost
        return np.concatenate([family.priced(found) for family in self.families.values()])

    @property
    def speeds(self) -> dict[str, float]:
        """The modelled speed of each family."""
        return {name: each.speed(self.cost) for name, each in self.families.items()}

    @property
    def tokens_per_step(self) -> dict[str, float]:
        """The emitted tokens per target step of each family."""
        return {name: each.stats.mean_accepted_tokens for name, each in self.families.items()}

    @property
    def geometric_mean(self) -> float:
        """The geometric mean of the families' modelled speeds."""
        return geometric_mean(self.speeds.values())

    @property
    def worst(self) -> float:
        """The least of the families' modelled speeds."""
        return min(self.speeds.values())

    @property
    def interval(self) -> tuple[float, float]:
        """The geometric mean's 95 % interval, by the bootstrap over each family's sessions."""
        draws = np.random.default_rng(0)
        logarithms = sum(
            np.log(resampled_speeds(family.priced(self.cost), draws))
            for family in self.families.values()
        )
        low, high = np.exp(np.percentile(logarithms / len(self.families), [2.5, 97.5]))
        return float(low), float(high)

    @property
    def drafter_name(self) -> str:
        """The drafter's name; the default one is fastdraft."""
        return "fastdraft" if self.drafter == "default" else self.drafter

    @property
    def title(self) -> str:
        """The settings of the drafter."""
        shape = f"{self.drafter_name}, lookahead {self.lookahead}"
        if self.tree_budget is not None:
            shape += f", trees of up to {self.tree_budget}"
        return shape if self.at_once == 1 else f"{shape}, {self.at_once} at once"

    def __repr__(self) -> str:
        return (
            f"<ReplayResult of {self.title}, {len(self.families)} families, "
            f"token cost {self.token_cost:g}: modelled speed {self.geometric_mean:.3f}, "
            f"worst {self.worst:.3f}>"
        )

    def _repr_html_(self) -> str:
        from fastdraft.replay.answer import families_table

        return families_table([self]).html()


class Table(NamedTuple):
    """A table of texts, which a terminal and a page show alike."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """A text below the table."""

    def html(self) -> str:
        """As HTML; all texts are escaped."""

        def cells(tag: str, values: Sequence[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{escape(value)}</{tag}>' for value in values)}</tr>"

        return (
            f"<div class='wide'><table><caption>{escape(self.title)}</caption>"
            f"<thead>{cells('th', self.heads)}</thead>"
            f"<tbody>{''.join(cells('td', row) for row in self.rows)}</tbody></table></div>"
            f"<p>{escape(self.note)}</p>"
        )


def as_json(results: Sequence[ReplayResult]) -> list[dict[str, Any]]:
    """The results for a JSON file; times in nanoseconds."""
    return [
        {
            "drafter": result.drafter,
            "token_cost": result.token_cost,
            "lookahead": result.lookahead,
            "tree_budget": result.tree_budget,
            "at_once": result.at_once,
            "curve": None if result.curve is None else list(result.curve),
            "geometric_mean": result.geometric_mean,
            "interval": result.interval,
            "worst": result.worst,
            "families": {
                name: {
                    "requests": family.requests,
                    "steps": family.stats.steps,
                    "emitted": family.stats.emitted,
                    "drafted": family.stats.drafted,
                    "accepted": family.stats.accepted,
                    "propose_ns_p50": family.propose_ns[0],
                    "propose_ns_p99": family.propose_ns[1],
                    "observe_ns_per_token": family.observe_ns_per_token,
                }
                for name, family in result.families.items()
            },
        }
        for result in results
    ]


def speed_of(priced: NDArray[np.float64]) -> float:
    """The modelled speed of sessions, as `FamilyResult.priced`, together; 1 without steps."""
    emitted, time = priced.sum(axis=0)
    return float(emitted / time) if time else 1.0


def resampled_speeds(
    priced: NDArray[np.float64], draws: np.random.Generator
) -> NDArray[np.float64]:
    """Modelled speeds of 500 samples of the sessions, as many as there are, with replacement.

    Args:
        priced: As `FamilyResult.priced`.
        draws: Chooses the sessions.
    """
    rows = len(priced)
    drawn = draws.multinomial(rows, np.full(rows, 1 / rows), size=500)
    emitted, time = (drawn @ priced).T
    speeds = np.ones(len(drawn))
    np.divide(emitted, time, out=speeds, where=time > 0)
    return speeds
