"""Draws the plots of the documentation from the committed results: python bench/plots.py

Equal results make equal files: a plot that changes in a commit shows other figures.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from fastdraft.replay.plot import OURS, Speeds, look_of, saved, speeds_figure, style

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
IMAGES = ROOT / "docs" / "images"

TITLES = {
    "transformers": "transformers prompt lookup",
    "vllm": "vLLM n-gram",
    "arctic": "Arctic suffix decoding",
    "arctic-local": "Arctic, no memory",
    "arctic-best": "Arctic, its best settings",
}
# As results call them.
SERVED = {"fastdraft-v1": "fastdraft", "suffix": "arctic", "ngram": "vllm"}
COMPARED_COST = 0.02

Data = Mapping[str, Mapping[Any, float]]
"""What a plot shows: for each drafter, values by what they depend on."""


def read_speeds(path: Path) -> list[Speeds]:
    """Those of all runs that `fastdraft replay --json` wrote to a file."""
    found = []
    for run in json.loads(path.read_text("utf-8"))["runs"]:
        cost = run["token_cost"]
        speeds = {
            family: each["emitted"] / (each["steps"] + cost * each["drafted"])
            for family, each in run["families"].items()
        }
        found.append(Speeds.of(run["drafter"], run["tree_budget"], cost, speeds))
    return found


def result(name: str) -> Any:
    """The content of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def all_speeds() -> list[Speeds]:
    """The replays of every drafter, with chains and with trees."""
    chains, trees = read_speeds(RESULTS / "replay.json"), read_speeds(RESULTS / "replay_trees.json")
    return sorted(chains + trees, key=lambda run: not run.name.startswith("fastdraft"))


def machine(name: str) -> str:
    """The processor that a result was measured on."""
    return str(result(name)["machine"]).rsplit(", Linux", 1)[0]


def speed_by_token_cost() -> dict[str, dict[float, float]]:
    """By drafter and token cost, the geometric mean of the families' modelled speeds."""
    found: dict[str, dict[float, float]] = {}
    for run in all_speeds():
        found.setdefault(run.name, {})[run.token_cost] = geometric_mean(run.families.values())
    for row in result("best_arctic")["best"]:
        if row["Arctic"] == "chains":
            found.setdefault("arctic-best", {})[row["token cost"]] = row["geometric mean"]
    return found


def arctic_runs() -> list[Speeds]:
    """Ours and Arctic's, each with chains and with its memory, at one cost."""
    return [
        run
        for run in all_speeds()
        if run.token_cost == COMPARED_COST and run.name in ("fastdraft", "arctic")
    ]


def families_against_arctic() -> dict[str, dict[str, float]]:
    """By drafter and family the modelled speed at `COMPARED_COST`."""
    return {run.name: run.families for run in arctic_runs()}


def propose_latency() -> dict[str, dict[int, float]]:
    """By drafter and tokens of context, the median time of a proposal in microseconds."""
    found: dict[str, dict[int, float]] = {}
    for row in result("core")["rows"]:
        if match := re.fullmatch(r"alone\[propose-(\d+)\]", row["case"]):
            found.setdefault(row["drafter"], {})[int(match[1])] = row["p50_us"]
    return found


def throughput(which: int = 0) -> dict[str, dict[int, float]]:
    """By drafter and requests at once, the tokens by the server's processor time, times plain
    decoding's: the median of the runs, or the lowest (1) or highest (2) of them."""
    key = "tokens_per_processor_second_of_plain"
    rows = [row for row in result("serving_live")["rows"] if row["workload"] == "recorded"]
    return {
        name: {row["rows"]: row[method][key][which] for row in rows}
        for method, name in SERVED.items()
    }


def reliability() -> dict[str, dict[float, float]]:
    """By the drafts' form and predicted probability, the fraction that was accepted."""
    return {
        name: {bucket["predicted"]: bucket["accepted"] for bucket in buckets}
        for name, buckets in result("calibration")["diagrams"].items()
    }


def lines(data: Data) -> tuple[Figure, Axes]:
    """A figure with a line for each drafter; ours in front and wider."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    looks = look_of(list(data))
    for name, points in data.items():
        ours = name.startswith("fastdraft")
        axes.plot(
            list(points),
            list(points.values()),
            label=TITLES.get(name, name),
            linewidth=2.4 if ours else 1.5,
            zorder=3 if ours else 2,
            markersize=6,
            **looks[name],
        )
    axes.grid()
    return figure, axes


def mark_plain(axes: Axes, x: float, align: str) -> None:
    """A line at plain decoding's speed, with its name at `x`."""
    axes.axhline(1, color="#24292f", linewidth=1.5, zorder=2)
    axes.annotate("plain decoding", (x, 1), (0, 5), textcoords="offset points", ha=align)


def draw_speed_by_token_cost() -> Figure:
    data = speed_by_token_cost()
    figure, axes = lines(data)
    mark_plain(axes, 0, "left")
    axes.set(
        xlabel="cost of a draft token, as a fraction of a forward pass",
        ylabel="modelled speed, times plain",
        ylim=(0.5, None),
    )
    axes.set_xticks(sorted({cost for points in data.values() for cost in points}))
    runs = result("replay")["runs"][0]["families"]
    requests = sum(family["requests"] for family in runs.values())
    axes.set_title(f"{requests:,} recorded requests of {len(runs)} workloads, geometric mean")
    axes.legend()
    return figure


def draw_families_against_arctic() -> Figure:
    return speeds_figure([r._replace(name=TITLES.get(r.name, r.name)) for r in arctic_runs()])


def draw_propose_latency() -> Figure:
    figure, axes = lines(propose_latency())
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens of context",
        ylabel="one proposal, microseconds (median)",
    )
    axes.set_title(f"Time of one proposal, {machine('core')}")
    axes.legend()
    return figure


def draw_throughput() -> Figure:
    data = throughput()
    figure, axes = lines(data)
    rows = sorted({row for points in data.values() for row in points})
    lowest, highest = throughput(1), throughput(2)
    for name, look in look_of(list(data)).items():
        ends = list(lowest[name].values()), list(highest[name].values())
        axes.vlines(list(data[name]), *ends, color=look["color"], linewidth=1)
    mark_plain(axes, rows[-1], "right")
    axes.set(xscale="log", xlabel="concurrency", ylabel="tokens by processor time, times plain")
    axes.xaxis.set_major_locator(FixedLocator(rows))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_title(f"vLLM with the demo model, {machine('serving_live')}")
    axes.legend()
    return figure


def draw_reliability() -> Figure:
    figure = Figure(figsize=(4.6, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#8c959f", linewidth=1.2, label="perfect")
    for (name, points), color, marker in zip(
        reliability().items(), (OURS, "#3b6fb6"), "os", strict=True
    ):
        axes.plot(
            list(points), list(points.values()), marker, color=color, markersize=6, label=name,
            markerfacecolor="none" if marker == "s" else color,
        )  # fmt: skip
    axes.set(xlabel="predicted probability of acceptance", ylabel="accepted", aspect="equal")
    axes.set_title("Reliability of the probabilities")
    axes.grid()
    axes.legend()
    return figure


PLOTS: dict[str, tuple[Callable[[], Data], Callable[[], Figure]]] = {
    "speed-by-token-cost": (speed_by_token_cost, draw_speed_by_token_cost),
    "families-against-arctic": (families_against_arctic, draw_families_against_arctic),
    "propose-latency": (propose_latency, draw_propose_latency),
    "throughput": (throughput, draw_throughput),
    "reliability": (reliability, draw_reliability),
}
"""By the file's name: what is drawn, and what draws it."""


def as_text(data: Data) -> str:
    """What a plot shows, as the JSON that its file keeps."""
    return json.dumps({k: {str(x): round(y, 4) for x, y in v.items()} for k, v in data.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder of the images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with style():
        for name, (data, draw) in PLOTS.items():
            saved(draw(), options.out / f"{name}.svg", as_text(data()))
            print(options.out / f"{name}.svg")


if __name__ == "__main__":
    main()
