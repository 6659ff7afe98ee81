"""Plots of modelled speeds, drawn with matplotlib, and the look that all plots share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastdraft.errors import FastdraftError
from fastdraft.replay.results import ReplayResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "OURS",
    "PlotError",
    "Speeds",
    "check_image",
    "look_of",
    "plot_speeds",
    "saved",
    "speeds_figure",
    "style",
]

OURS = "#1a7f37"

# The colour and the marker of each drafter; one that is not here takes the next of `OTHERS`.
LOOKS: Mapping[str, dict[str, Any]] = {
    "fastdraft": {"color": OURS, "marker": "o"},
    "Arctic suffix decoding": {"color": "#d1742f", "marker": "D"},
    "arctic": {"color": "#d1742f", "marker": "D"},
    "arctic-local": {"color": "#e8b48c", "marker": "d"},
    "vllm": {"color": "#3b6fb6", "marker": "s"},
    "transformers": {"color": "#8f6bb3", "marker": "^"},
}
OTHERS = (
    {"color": "#0b4d22", "marker": "P"},
    {"color": "#c2527a", "marker": "v"},
    {"color": "#7a7a2c", "marker": "X"},
    {"color": "#2a9d9d", "marker": ">"},
    {"color": "#666666", "marker": "<"},
)


class Speeds(NamedTuple):
    """The modelled speeds of one drafter at one token cost."""

    name: str
    """The drafter's, with the size of its trees; the default drafter is "fastdraft"."""
    token_cost: float
    families: dict[str, float]

    @classmethod
    def of(
        cls,
        drafter: str,
        tree_budget: int | None,
        token_cost: float,
        families: dict[str, float],
    ) -> Speeds:
        name = "fastdraft" if drafter == "default" else drafter
        trees = "" if tree_budget is None else f", trees of {tree_budget}"
        return cls(name + trees, token_cost, families)


class PlotError(FastdraftError, ValueError):
    """An image of a format that cannot be drawn, or a path that cannot be written."""


def check_image(path: Path) -> None:
    """Raises PlotError where the ending of `path` names no format that matplotlib draws."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        endings = ", ".join(f".{name}" for name in sorted(known))
        raise PlotError(f"cannot draw {path}: its name must end in one of {endings}")


def look_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The colour and the marker of each name."""
    others = iter(OTHERS * (len(names) // len(OTHERS) + 1))
    return {name: dict(LOOKS.get(name) or next(others)) for name in dict.fromkeys(names)}


@contextmanager
def style() -> Iterator[None]:
    """The look of all plots; equal data makes equal files."""
    import matplotlib

    options: Any = {
        "axes.edgecolor": "#8c959f",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlesize": 11,
        "font.size": 10,
        "grid.color": "#e3e6ea",
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "fastdraft",
        "font.family": ["sans-serif"],
        "text.color": "#1f2328",
        "xtick.color": "#57606a",
        "ytick.color": "#57606a",
        "axes.labelcolor": "#57606a",
    }
    with matplotlib.rc_context(options):
        yield


def saved(figure: Figure, path: Path, description: str | None = None) -> None:
    """Writes a figure, without a date; an SVG file keeps the description. Raises PlotError."""
    metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    if description is not None:
        metadata["Description"] = description
    try:
        figure.savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise PlotError(f"cannot write {path}: {error.strerror}") from error


def plot_speeds(path: Path, results: Sequence[ReplayResult]) -> None:
    """Draws `speeds_figure` to an image, whose ending chooses the format. Raises PlotError."""
    check_image(path)
    runs = [Speeds.of(r.drafter, r.tree_budget, r.token_cost, r.speeds) for r in results]
    with style():
        saved(speeds_figure(runs), path)


def speeds_figure(runs: Sequence[Speeds]) -> Figure:
    """The modelled speed of every run by family, a panel for each token cost.

    Plain decoding is the line at 1. Families stand in the order of the first run's speeds.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    costs = list(dict.fromkeys(run.token_cost for run in runs))
    first = runs[0].families
    names = sorted(first, key=lambda name: first[name])
    looks = look_of([run.name for run in runs])
    indices = {name: index for index, name in enumerate(names)}
    figure = Figure(
        figsize=(2 + max(6.0, 3.2 * len(costs)), 1.9 + 0.27 * len(names)), layout="constrained"
    )
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for cost, axes in zip(costs, panels, strict=True):
        here = [run for run in runs if run.token_cost == cost]
        every = [speed for run in here for speed in run.families.values()]
        for name, index in indices.items():
            speeds = [run.families[name] for run in here if name in run.families]
            axes.plot([min(speeds), max(speeds)], [index] * 2, color="#d0d7de", lw=2, zorder=1)
        for depth, run in enumerate(here):
            shared = [name for name in names if name in run.families]
            axes.plot(
                [run.families[name] for name in shared],
                [indices[name] for name in shared],
                linestyle="none",
                markersize=6,
                label=run.name,
                zorder=4 - depth / len(here),
                **looks[run.name],
            )
        axes.axvline(1, color="#24292f", lw=1.5, zorder=2, label="plain")
        axes.set_title(f"token cost {cost:g}")
        axes.set_xlabel("modelled speed, times plain")
        # On this scale 2 times and 0.5 times plain are equally far from 1.
        axes.set_xscale("log")
        axes.set_xlim(min(0.95, 0.95 * min(every)), 1.08 * max(every))
        axes.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.grid(axis="x")
        axes.set_axisbelow(True)
    panels[0].set_yticks(list(indices.values()), list(indices))
    panels[0].set_ylim(-0.7, len(names) - 0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=min(6, len(labels)))
    return figure
