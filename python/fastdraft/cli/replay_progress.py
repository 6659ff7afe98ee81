"""A progress bar for work that is counted in tokens or requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress"]


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Yields what moves a bar on: advance(what is done now, how much of the total was).

    The bar is drawn on standard error, four times a second, where that is a terminal.
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
            bar.update(task, description=description, advance=amount)

        yield advance
