"""What the demo prints and writes of its comparisons."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastdraft.cli.measure import MODES, Run

if TYPE_CHECKING:
    from fastdraft.cli.compare import Comparison
    from fastdraft.cli.target import Target

__all__ = ["as_json", "show", "summarise"]

# Where there are colours they tell where a token came from, elsewhere brackets do.
STYLES = {"target": "", "context": "black on green", "prediction": "black on cyan"}
BRACKETS = {"target": ("", ""), "context": ("⟦", "⟧"), "prediction": ("«", "»")}


def show(console: Console, loaded: Target, comparison: Comparison) -> None:
    """Prints the text of one request, coloured by where its tokens came from, and its table."""
    request = comparison.request
    run = comparison.best("fastdraft")
    text = Text().append(request.answer_start, "dim")
    for origin, part in _parts(loaded, run):
        opening, closing = BRACKETS[origin] if console.color_system is None else ("", "")
        text.append(f"{opening}{part}{closing}", STYLES[origin])
    console.print(text)
    console.print()
    counts = Counter(run.origins)
    legend = Text("Tokens from: ")
    for origin in STYLES:
        opening, closing = BRACKETS[origin] if console.color_system is None else ("", "")
        legend.append(f"{opening}{origin}{closing}", STYLES[origin])
        legend.append(f" {counts[origin]}   ")
    if run.stats is not None:
        legend.append(f"(drafted {run.stats.drafted}, accepted {run.stats.accepted})")
    console.print(legend)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in ("tokens", "forwards", "tokens/step", "tokens/s", "to plain"):
        table.add_column(column, justify="right")
    table.add_column("output")
    for mode in MODES:
        best = comparison.best(mode.name)
        table.add_row(
            mode.title,
            str(len(best.tokens)),
            str(best.forwards),
            f"{best.tokens_per_step:.2f}",
            f"{best.tokens_per_second:.1f}",
            f"{comparison.speedup(mode.name):.2f}x",
            comparison.verdict(mode.name),
        )
    console.print(table)
    for mode in MODES:
        difference = comparison.differences.get(mode.name)
        if difference is not None:
            console.print(
                f"The output of {mode.title} parts from plain at token {difference.position}: "
                f"its tokens lie up to {difference.gap:.2g} below the most probable, "
                f"rounding moves such leads by {difference.noise:.2g}."
            )


def summarise(console: Console, comparisons: list[Comparison]) -> None:
    """Prints the speeds of all requests side by side."""
    console.print()
    console.rule(Text("Tokens a second, and times plain", "bold"), align="left")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for mode in MODES:
        table.add_column(mode.title, justify="right")
    table.add_column("fastdraft's output")
    for comparison in comparisons:
        cells = [
            f"{comparison.best(mode.name).tokens_per_second:.1f} "
            f"({comparison.speedup(mode.name):.2f}x)"
            for mode in MODES
        ]
        verdict = comparison.verdict("fastdraft")
        table.add_row(comparison.request.name, *cells, verdict)
    console.print(table)


def _parts(loaded: Target, run: Run) -> list[tuple[str, str]]:
    """The text of a run cut where the origin changes: (origin, text)."""
    parts: list[tuple[str, str]] = []
    shown = ""
    for end, origin in enumerate(run.origins, 1):
        if end < len(run.origins) and run.origins[end] == origin:
            continue
        # Decoding a prefix keeps characters of several tokens whole, and the spaces between words.
        text = loaded.decode(run.tokens[:end]).rstrip("\ufffd")
        parts.append((origin, text[len(shown) :]))
        shown = text
    return parts


def as_json(loaded: Target, comparison: Comparison) -> dict[str, Any]:
    """What was measured of one request, for a JSON file; times in seconds."""
    modes: dict[str, Any] = {}
    for name, runs in comparison.runs.items():
        best = comparison.best(name)
        modes[name] = {
            "tokens": len(best.tokens),
            "forwards": best.forwards,
            "tokens_per_step": best.tokens_per_step,
            "seconds": [run.seconds for run in runs],
            "tokens_per_second": best.tokens_per_second,
            "speedup": comparison.speedup(name),
        }
        if name != "plain":
            modes[name]["output"] = comparison.verdict(name)
    best = comparison.best("fastdraft")
    stats = best.stats
    return {
        "name": comparison.request.name,
        "prompt_tokens": comparison.prompt_tokens,
        "modes": modes,
        "origins": dict(Counter(best.origins)),
        "drafted": stats.drafted if stats else 0,
        "accepted": stats.accepted if stats else 0,
        "text": loaded.decode(best.tokens),
    }
