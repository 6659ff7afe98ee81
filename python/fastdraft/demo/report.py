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

# Of fewer, all outcomes together hold the median less often than 95 times in 100.
RUNS_FOR_INTERVAL = 6


def show(console: Console, target: Target, comparison: Comparison) -> None:
    """Prints the text of one request, coloured by where its tokens came from, and its table."""
    trace = comparison.trace(target)
    stats = trace.stats
    counts = {"context": 0, "prediction": 0, **Counter(trace.origins)}
    note = f"(drafted {stats.drafted}, accepted {stats.accepted})"
    show_origins(console, trace.parts(), counts, before=comparison.request.answer_start, note=note)
    rows = table("", "tokens", "forwards", "tokens/step", "tokens/s", "to plain", "output")
    for mode in Mode:
        run = comparison.median(mode)
        rows.add_row(
            mode.value,
            str(len(run.tokens)),
            str(run.forwards),
            f"{run.tokens_per_step:.2f}",
            f"{run.tokens_per_second:.1f}",
            _speedup(comparison, mode),
            comparison.verdicts.get(mode, ""),
        )
    console.print(rows)


def summarise(console: Console, comparisons: list[Comparison]) -> None:
    """Prints the speeds of all requests side by side."""
    heading(console, "Tokens a second, and times plain")
    rows = table("", *(mode.value for mode in Mode), "fastdraft's output")
    for comparison in comparisons:
        cells = [
            f"{comparison.median(mode).tokens_per_second:.1f} ({_speedup(comparison, mode)})"
            for mode in Mode
        ]
        rows.add_row(comparison.request.name, *cells, comparison.verdicts[Mode.FASTDRAFT])
    console.print(rows)


def _speedup(comparison: Comparison, mode: Mode) -> str:
    """With its 95 % interval, where the runs are enough for one."""
    found = comparison.speedup(mode)
    if mode is Mode.PLAIN or len(comparison.runs[mode]) < RUNS_FOR_INTERVAL:
        return f"{found.median:.2f}x"
    return f"{found.median:.2f}x, {found.low:.2f} to {found.high:.2f}"


def as_json(target: Target, comparison: Comparison) -> dict[str, Any]:
    """What was measured of one request, for a JSON file; times in seconds."""
    modes: dict[str, Any] = {}
    for mode, runs in comparison.runs.items():
        run = comparison.median(mode)
        modes[mode.name.lower()] = {
            "tokens": len(run.tokens),
            "forwards": run.forwards,
            "tokens_per_step": run.tokens_per_step,
            "seconds": [run.seconds for run in runs],
            "tokens_per_second": run.tokens_per_second,
            "speedup": comparison.speedup(mode)._asdict(),
        }
        if mode is not Mode.PLAIN:
            modes[mode.name.lower()]["output"] = comparison.verdicts[mode]
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
