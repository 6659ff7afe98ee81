"""What a replay found, as data."""

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
    "families_table",
    "resampled_speeds",
    "speed_of",
]


@dataclass(frozen=True)
class FamilyResult:
    """What a drafter did for the requests of one family.

    Attributes:
        requests: How many there were.
        stats: Their counts after the prefills, nodes of trees included. Without those of
            predictions, which not every drafter tells.
        propose_ns: p50 and p99 of one call, with its Python call, in nanoseconds.
        observe_ns: p50 and p99 of one call, divided by its tokens.
        observe_ns_per_token: All calls together, divided by their tokens.
        num_bytes: The most that the drafter held, or None where it does not tell.
        sessions: Steps, emitted and drafted tokens of each session, or of each request without
            one; int64, (sessions, 3).
    """

    requests: int
    stats: DraftStats
    propose_ns: tuple[float, float]
    observe_ns: tuple[float, float]
    observe_ns_per_token: float
    num_bytes: int | None
    sessions: NDArray[np.int64] = field(compare=False)

    def speed(self, token_cost: float) -> float:
        """Tokens in the time of a step without drafts: emitted / (steps + cost * drafted)."""
        return speed_of(self.sessions, token_cost)


@dataclass(frozen=True)
class ReplayResult:
    """What a drafter did for all families.

    Attributes:
        drafter: Its name.
        token_cost: What a draft token costs, as a fraction of a step; it drafts by that where it
            can.
        lookahead: Its longest draft, or how deep its trees are.
        tree_budget: The most nodes of a tree; None for chains.
        at_once: How many requests ran at a time.
        families: The results by the families' names.
    """

    drafter: str
    token_cost: float
    lookahead: int
    tree_budget: int | None
    at_once: int
    families: dict[str, FamilyResult]

    @property
    def sessions(self) -> NDArray[np.int64]:
        """Those of all families, as `FamilyResult.sessions`."""
        return np.concatenate([family.sessions for family in self.families.values()])

    @property
    def speeds(self) -> dict[str, float]:
        """The modelled speed of each family."""
        return {name: each.speed(self.token_cost) for name, each in self.families.items()}

    @property
    def tokens_per_step(self) -> dict[str, float]:
        """The emitted tokens per target step of each family."""
        return {name: each.stats.mean_accepted_tokens for name, each in self.families.items()}

    @property
    def geometric_mean(self) -> float:
        """Of the families' modelled speeds."""
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
            np.log(resampled_speeds(family.sessions, self.token_cost, draws))
            for family in self.families.values()
        )
        low, high = np.exp(np.percentile(logarithms / len(self.families), [2.5, 97.5]))
        return float(low), float(high)

    @property
    def title(self) -> str:
        """What drafted, and how."""
        shape = f"{self.drafter}, lookahead {self.lookahead}"
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
        return families_table([self]).html()


class Table(NamedTuple):
    """A table of texts, which a terminal and a page show alike."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """What stands below."""

    def html(self) -> str:
        """As HTML; all texts are escaped."""

        def cells(tag: str, values: Sequence[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{escape(value)}</{tag}>' for value in values)}</tr>"

        return (
            f"<table><caption>{escape(self.title)}</caption><thead>{cells('th', self.heads)}"
            f"</thead><tbody>{''.join(cells('td', row) for row in self.rows)}</tbody></table>"
            f"<p>{escape(self.note)}</p>"
        )


def families_table(results: Sequence[ReplayResult]) -> Table:
    """What was counted in each family, and the speed at each cost of a run."""
    first = results[0]
    costs = [f"{each.token_cost:g}" for each in results]
    rows = []
    for name, family in first.families.items():
        stats = family.stats
        rows.append(
            (
                name,
                f"{family.requests:,}",
                f"{stats.steps:,}",
                f"{stats.mean_accepted_tokens:.2f}",
                f"{stats.drafted / max(1, stats.steps):.2f}",
                f"{stats.acceptance_rate:.0%}",
                *(f"{each.speeds[name]:.3f}" for each in results),
                *(f"{time / 1e3:.2f}" for time in family.propose_ns),
                *(f"{time:.0f}" for time in family.observe_ns),
                "" if family.num_bytes is None else f"{family.num_bytes / 1e6:.1f}",
            )
        )
    heads = (
        *("family", "re-\nquests", "\nsteps", "tokens\na step", "drafted\na step", "accep-\nted"),
        *(f"speed\nat {cost}" for cost in costs),
        *("propose\nus p50", "\np99", "observe\nns p50", "\np99", "\nMB"),
    )
    return Table(f"{first.title}, token cost {', '.join(costs)}", heads, rows)


def as_json(results: Sequence[ReplayResult]) -> list[dict[str, Any]]:
    """The results for a JSON file; times in nanoseconds."""
    return [
        {
            "drafter": result.drafter,
            "token_cost": result.token_cost,
            "lookahead": result.lookahead,
            "tree_budget": result.tree_budget,
            "at_once": result.at_once,
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


def speed_of(counts: NDArray[np.int64], token_cost: float) -> float:
    """The modelled speed of sessions, as `FamilyResult.sessions`, together; 1 without steps."""
    steps, emitted, drafted = counts.sum(axis=0)
    return float(emitted / (steps + token_cost * drafted)) if steps else 1.0


def resampled_speeds(
    counts: NDArray[np.int64], token_cost: float, draws: np.random.Generator
) -> NDArray[np.float64]:
    """Modelled speeds of 500 samples of the sessions, as many as there are, with replacement.

    Args:
        counts: As `FamilyResult.sessions`.
        token_cost: What a draft token costs, as a fraction of a step.
        draws: Chooses the sessions.
    """
    rows = len(counts)
    drawn = draws.multinomial(rows, np.full(rows, 1 / rows), size=500)
    steps, emitted, drafted = (drawn @ counts).T
    time = steps + token_cost * drafted
    speeds = np.ones(len(drawn))
    np.divide(emitted, time, out=speeds, where=time > 0)
    return speeds
