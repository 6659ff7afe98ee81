"""What a replay found: its tables, its JSON, its plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import fastdraft
from fastdraft.cli.machine import command_line, describe_machine
from fastdraft.cli.replay_run import FamilyResult, Run
from fastdraft.errors import FastdraftError

__all__ = ["ReportError", "as_json", "plot", "read_tokens_per_step", "show"]


class ReportError(FastdraftError, ValueError):
    """A file that holds no results of a replay."""


def show(console: Console, runs: Sequence[Run]) -> None:
    """Prints a table for each replay, all drafters side by side, and the summary of each run."""
    # Runs of a drafter that does not act on the cost are one replay, with a speed for each cost.
    for _, group in groupby(runs, key=lambda run: id(run.families)):
        _show_replay(console, list(group))
    if len({run.drafter for run in runs}) > 1:
        for cost in dict.fromkeys(run.token_cost for run in runs):
            _show_drafters(console, [run for run in runs if run.token_cost == cost])
    _title(console, "Modelled speed, all families")
    table = _table("drafter", "token cost", "geometric mean", "worst", "worst family")
    for run in runs:
        worst = min(run.speeds, key=lambda name: run.speeds[name])
        table.add_row(
            run.drafter,
            f"{run.token_cost:g}",
            f"{run.geometric_mean:.3f}",
            f"{run.worst:.3f}",
            worst,
        )
    console.print(table)


def _show_replay(console: Console, runs: list[Run]) -> None:
    run = runs[0]
    shape = f"lookahead {run.lookahead}"
    if run.tree_budget is not None:
        shape += f", trees of up to {run.tree_budget}"
    if run.at_once > 1:
        shape += f", {run.at_once} at once"
    costs = ", ".join(f"{each.token_cost:g}" for each in runs)
    _title(console, f"{run.drafter}, {shape}, token cost {costs}")
    table = _table(
        *("family", "re-\nquests", "\nsteps", "tokens\na step", "drafted\na step", "accep-\nted"),
        *(f"speed\nat {each.token_cost:g}" for each in runs),
        *("propose\nus p50", "\np99", "observe\nns p50", "\np99", "\nMB"),
    )
    for name, family in run.families.items():
        table.add_row(
            name,
            f"{family.requests:,}",
            f"{family.steps:,}",
            f"{family.tokens_per_step:.2f}",
            f"{family.drafted / max(1, family.steps):.2f}",
            f"{family.acceptance_rate:.0%}",
            *(f"{each.speeds[name]:.3f}" for each in runs),
            *(f"{time / 1e3:.2f}" for time in family.propose_ns),
            *(f"{time:.0f}" for time in family.observe_ns),
            "" if family.num_bytes is None else f"{family.num_bytes / 1e6:.1f}",
        )
    console.print(table)


def _show_drafters(console: Console, runs: list[Run]) -> None:
    _title(console, f"Modelled speed at token cost {runs[0].token_cost:g}")
    table = _table("family", *(run.drafter for run in runs))
    for name in runs[0].families:
        speeds = [round(run.speeds[name], 3) for run in runs]
        styles = ["bold" if speed == max(speeds) else "" for speed in speeds]
        cells = [Text(f"{speed:.3f}", style) for speed, style in zip(speeds, styles, strict=True)]
        table.add_row(name, *cells)
    console.print(table)


def _title(console: Console, title: str) -> None:
    console.print()
    console.rule(Text(title, "bold"), align="left")


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """The results for a JSON file; times in nanoseconds."""
    return {
        "fastdraft": fastdraft.__version__,
        "machine": describe_machine(),
        "command": command_line(),
        "runs": [
            {
                "drafter": run.drafter,
                "token_cost": run.token_cost,
                "lookahead": run.lookahead,
                "tree_budget": run.tree_budget,
                "at_once": run.at_once,
                "families": {name: _family_json(family) for name, family in run.families.items()},
                "geometric_mean": run.geometric_mean,
                "worst": run.worst,
            }
            for run in runs
        ],
    }


def _family_json(family: FamilyResult) -> dict[str, Any]:
    p50, p99 = family.propose_ns
    return {
        "requests": family.requests,
        "steps": family.steps,
        "emitted": family.emitted,
        "drafted": family.drafted,
        "accepted": family.accepted,
        "propose_ns_p50": p50,
        "propose_ns_p99": p99,
        "observe_ns_per_token": family.observe_ns_per_token,
    }


def read_tokens_per_step(path: Path, token_cost: float) -> tuple[str, dict[str, float]]:
    """The drafter and the tokens a step of each family from a JSON file that a replay wrote.

    Of several runs the first at `token_cost` counts, else the first of all.

    Raises:
        ReportError: The file cannot be read or holds something else.
    """
    try:
        runs = json.loads(path.read_text("utf-8"))["runs"]
        run = next((run for run in runs if run["token_cost"] == token_cost), runs[0])
        families = run["families"].items()
        return run["drafter"], {n: f["emitted"] / max(1, f["steps"]) for n, f in families}
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ReportError(
            f"{path} must hold the JSON of `fastdraft replay --json`, and does not: {error!r}"
        ) from error


def plot(path: Path, run: Run, baseline: tuple[str, dict[str, float]] | None) -> None:
    """Draws the tokens a step of each family to an image, beside those of a baseline.

    Without a baseline decoding without drafts is one: a token a step. The file's ending chooses the
    format. Raises ValueError for a format that matplotlib does not know, and OSError.
    """
    from matplotlib.figure import Figure

    ours = {name: family.tokens_per_step for name, family in run.families.items()}
    names = sorted(ours, key=lambda name: ours[name])
    title, theirs = baseline or ("no drafts", dict.fromkeys(names, 1.0))
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    places = range(len(names))
    axes.barh(places, [ours[name] for name in names], 0.7, color="#4477aa", label=run.drafter)
    shared = [place for place in places if names[place] in theirs]
    values = [theirs[names[place]] for place in shared]
    axes.scatter(values, shared, marker="D", color="#cc6677", zorder=3, label=title)
    axes.set_yticks(places, names)
    axes.set_xlabel(f"tokens a step, lookahead {run.lookahead}, token cost {run.token_cost:g}")
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
