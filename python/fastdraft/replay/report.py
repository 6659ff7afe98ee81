"""The tables of a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from fastdraft.replay.answer import GPU_HEADS, SERVERS, gpu_rows, worth_of
from fastdraft.replay.display import heading, plain, show_origins, table
from fastdraft.replay.results import ReplayResult
from fastdraft.replay.trace import Trace

__all__ = ["show", "show_request"]


def show(console: Console, results: Sequence[ReplayResult]) -> None:
    """Prints a table of each replay, the speeds of all drafters side by side, and a summary."""
    # Results that differ in the token cost alone have the same families.
    for _, group in groupby(results, key=lambda result: id(result.families)):
        _show_replay(console, list(group))
    if len({result.drafter for result in results}) > 1:
        for cost in dict.fromkeys(result.token_cost for result in results):
            _show_drafters(console, [each for each in results if each.token_cost == cost])
    heading(console, "Modelled speed, all families")
    summary = table("drafter", "token cost", "geometric mean", "worst", "worst family")
    for result in results:
        speeds = result.speeds
        summary.add_row(
            result.drafter,
            f"{result.token_cost:g}",
            f"{result.geometric_mean:.3f}",
            f"{result.worst:.3f}",
            min(speeds, key=lambda name: speeds[name]),
        )
    console.print(summary)
    _show_worth(console, results)


def _show_worth(console: Console, results: Sequence[ReplayResult]) -> None:
    worth = worth_of(results)
    if not worth:
        return
    heading(console, "What it is worth on this traffic")
    for each in worth:
        low, high = each.interval
        console.print(
            f"Where a draft token costs {each.token_cost:.1%} of a step, {each.saved:.0%} of the "
            f"steps go: {each.speed:.2f} times plain speed ({low:.2f} to {high:.2f} in 95 of 100 "
            "samples of the requests)."
        )
        for name, speed in each.peers.items():
            console.print(f"  {name}: {speed:.2f}, fastdraft {each.speed / speed:.2f}x of it")
        for name, speed in each.helpless.items():
            console.print(Text(f"  it does not help in {plain(name)}: {speed:.2f}"))
    console.print("\nComputed from bandwidth and FLOPs, the cost of a draft token and the speed:")
    rows = table(*GPU_HEADS)
    for cells in gpu_rows(results):
        rows.add_row(*cells)
    console.print(rows)
    console.print("Without a speed: replay with a --token-cost at least as high. To try it:")
    for line in SERVERS.values():
        console.print(Text(f"  {line}"))


def _show_replay(console: Console, results: list[ReplayResult]) -> None:
    first = results[0]
    shape = f"lookahead {first.lookahead}"
    if first.tree_budget is not None:
        shape += f", trees of up to {first.tree_budget}"
    if first.at_once > 1:
        shape += f", {first.at_once} at once"
    costs = [f"{each.token_cost:g}" for each in results]
    heading(console, f"{first.drafter}, {shape}, token cost {', '.join(costs)}")
    rows = table(
        *("family", "re-\nquests", "\nsteps", "tokens\na step", "drafted\na step", "accep-\nted"),
        *(f"speed\nat {cost}" for cost in costs),
        *("propose\nus p50", "\np99", "observe\nns p50", "\np99", "\nMB"),
    )
    for name, family in first.families.items():
        stats = family.stats
        rows.add_row(
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
    console.print(rows)


def _show_drafters(console: Console, results: list[ReplayResult]) -> None:
    heading(console, f"Modelled speed at token cost {results[0].token_cost:g}")
    rows = table("family", *(result.drafter for result in results))
    for name in results[0].families:
        speeds = [round(result.speeds[name], 3) for result in results]
        styles = ["bold" if speed == max(speeds) else "" for speed in speeds]
        cells = [Text(f"{speed:.3f}", style) for speed, style in zip(speeds, styles, strict=True)]
        rows.add_row(name, *cells)
    console.print(rows)


def show_request(console: Console, trace: Trace) -> None:
    """Prints the output of a request by where it came from, and how many steps it took."""
    heading(console, f"{trace.name}: {trace.title}")
    show_origins(console, trace.parts(), Counter(trace.origins))
    console.print(trace.summary)
