"""Terminal output of commands: progress, tables, and text coloured by the origin of its tokens."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fastdraft.replay.trace import DRAFT, TARGET

__all__ = ["heading", "plain", "progress", "show_origins", "table", "waiting"]

# A style where there are colours, which differs by more than the colour; brackets elsewhere.
LOOKS = {
    TARGET: ("", "", ""),
    "context": ("black on green", "⟦", "⟧"),
    "prediction": ("underline black on yellow", "«", "»"),
    "datastore": ("italic black on cyan", "[", "]"),
    DRAFT: ("black on magenta", "{", "}"),
}


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Shows a progress bar on standard error where that is a terminal.

    Yields a function that moves the bar: advance(what runs now, how much of `total` was done).
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=4,
    ) as bar:
        task = bar.add_task("", total=total)

        def advance(description: str, amount: int) -> None:
            if console.is_terminal:  # an update takes as long as reading a line
                bar.update(task, description=description, advance=amount)

        yield advance


def waiting(description: str) -> AbstractContextManager[object]:
    """Shows on standard error that something takes its time: on a terminal until it is done."""
    # The code that runs meanwhile may redirect standard error.
    console = Console(file=sys.stderr)
    if console.is_terminal:
        return console.status(description)
    console.print(description, highlight=False, soft_wrap=True)
    return nullcontext()


def plain(text: str) -> str:
    """Text that a terminal shows as it is: what would move its cursor, change its colours or turn
    the direction of text is written as an escape."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


# All controls but line feeds and tabs, marks of direction, and halves of surrogate pairs.
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def heading(console: Console, title: str) -> None:
    """Prints an empty line, then a rule with a title."""
    console.print()
    console.rule(Text(plain(title), "bold"), align="left")


def table(first: str, *columns: str) -> Table:
    """An empty table without borders; all columns but the first are aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column(first, no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def show_origins(
    console: Console,
    parts: Sequence[tuple[str, str]],
    counts: Mapping[str, int],
    *,
    before: str = "",
    note: str = "",
    most_lines: int | None = None,
) -> None:
    """Prints text with the look of each part's origin, and a legend.

    Args:
        console: Where to.
        parts: Pairs of origin and text.
        counts: Tokens by origin, for the legend.
        before: Text that was given, not generated.
        note: The legend's end.
        most_lines: Leaves out what is longer, and says so.
    """
    has_colours = console.color_system is not None

    def append(text: Text, part: str, origin: str) -> None:
        style, opening, closing = LOOKS[origin]
        text.append(part if has_colours else f"{opening}{part}{closing}", style)

    text = Text().append(plain(before), "dim")
    for origin, part in parts:
        append(text, plain(part), origin)
    if most_lines is not None:
        lines = text.wrap(console, console.width)
        text = Text("\n").join(lines[:most_lines])
        if len(lines) > most_lines:
            text.append(f"\n... {len(lines) - most_lines:,} more lines", "dim")
    console.print(text)
    console.print()
    legend = Text("Tokens from: ")
    for origin in (TARGET, *(each for each in counts if each != TARGET)):
        append(legend, origin, origin)
        legend.append(f" {counts.get(origin, 0)}   ")
    console.print(legend.append(note))
