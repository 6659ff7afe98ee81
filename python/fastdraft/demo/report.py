"""What the demo prints and writes of its comparisons."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fastdraft.demo.measure import Mode
from fastdraft.replay.display import heading, show_origins, table

if TYPE_CHECKING:
    from fastdraft.demo.comparison import Comparison
    from fastdraft.demo.target import Target

__all__ = ["as_json", "show", "summarise"]


def show(console: Console, target: Target, comparison: Comparison) -> None:
    """Prints the text of one request, coloured by where its tokens came from, and its table."""
    trace = comparison.trace(target)
    stats = trace.stats
    counts = {"context": 0, "prediction": 0, **Counter(trace.origins)}
    note = f"(drafted {stats.drafted}, accepted {stats.accepted})"
    show_origins(console, trace.parts(), counts, before=comparison.request.answer_start, note=note)
    rows = table("", "tokens", "forwards", "tokens/step", "tokens/s", "to plain", "output")
    for mode in Mode:
        best = comparison.best(mode)
        rows.add_row(
            mode.value,
            str(len(best.tokens)),
            str(best.forwards),
            f"{best.tokens_per_step:.2f}",
            f"{best.tokens_per_second:.1f}",
            f"{comparison.speedup(mode):.2f}x",
            comparison.verdict(mode),
        )
    console.print(rows)
    for mode, difference in comparison.differences.items():
        if difference is not None:
            console.print(
                f"The output of {mode.value} differs from plain at token {difference.position}: "
                f"its tokens lie up to {difference.gap:.2g} below the most probable, "
                f"rounding moves such leads by {difference.noise:.2g}."
            )


def summarise(console: Console, comparisons: list[Comparison]) -> None:
    """Prints the speeds of all requests side by side."""
    heading(console, "Tokens a second, and times plain")
    rows = table("", *(mode.value for mode in Mode), "fastdraft's output")
    for comparison in comparisons:
        cells = [
            f"{comparison.best(mode).tokens_per_second:.1f} ({comparison.speedup(mode):.2f}x)"
            for mode in Mode
        ]
        rows.add_row(comparison.request.name, *cells, comparison.verdict(Mode.FASTDRAFT))
    console.print(rows)


def as_json(target: Target, comparison: Comparison) -> dict[str, Any]:
    """What was measured of one request, for a JSON file; times in seconds."""
    modes: dict[str, Any] = {}
    for mode, runs in comparison.runs.items():
        best = comparison.best(mode)
        modes[mode.name.lower()] = {
            "tokens": len(best.tokens),
            "forwards": best.forwards,
            "tokens_per_step": best.tokens_per_step,
            "seconds": [run.seconds for run in runs],
            "tokens_per_second": best.tokens_per_second,
            "speedup": comparison.speedup(mode),
        }
        if mode is not Mode.PLAIN:
            modes[mode.name.lower()]["output"] = comparison.verdict(mode)
    trace = comparison.trace(target)
    stats = trace.stats
    return {
        "name": comparison.request.name,
        "prompt_tokens": comparison.prompt_tokens,
        "modes": modes,
        "origins": dict(Counter(trace.origins)),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "text": target.decode(trace.output_ids),
    }
