"""The printed report of `fastdraft replay`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fastdraft.replay.answer import SERVERS
from fastdraft.replay.display import heading, plain, show_origins, table
from fastdraft.replay.results import Table
from fastdraft.replay.trace import Trace

__all__ = ["show", "show_request"]


def show(console: Console, answer: str, tables: Sequence[Table]) -> None:
    """Prints the answer, all tables, and how to try it."""
    console.print(Text(f"\n{plain(answer)}", "bold"))
    for each in tables:
        heading(console, each.title)
        rows = table(*each.heads)
        for row in each.rows:
            rows.add_row(*(Text(plain(cell)) for cell in row))
        console.print(rows)
        if each.note:
            console.print(Text(plain(each.note)))
    console.print("\nTo try it:")
    for line in SERVERS:
        console.print(Text(f"  {line}"))


def show_request(console: Console, trace: Trace, *, most_lines: int | None = None) -> None:
    """Prints at most `most_lines` lines of a request's output, coloured by the origin of the
    tokens, and how many steps it took."""
    heading(console, f"{trace.name}: {trace.title}")
    show_origins(console, trace.parts(), Counter(trace.origins), most_lines=most_lines)
    console.print(trace.summary)
