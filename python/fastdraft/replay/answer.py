"""The answer to "what would it be worth for me?", from the results of a replay: as tables, which a
terminal and a page for a colleague show alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

import numpy as np

from fastdraft.replay.costs import GPUS, MODELS, token_cost
from fastdraft.replay.results import (
    ReplayResult,
    Table,
    families_table,
    resampled_speeds,
    speed_of,
)
from fastdraft.replay.trace import Trace

__all__ = ["SERVERS", "gpu_table", "html_report", "tables", "worth_table"]

OURS = "default"
LEAST_GAIN = 1.05
"""A family below it counts as one where drafts do not help."""
AT_ONCE = (1, 16)
"""Requests that run together, in the table of GPUs."""
SERVERS = (
    """vllm serve MODEL --speculative-config '{"method": "fastdraft"}'""",
    "python -m sglang.launch_server --model-path MODEL --speculative-algorithm FASTDRAFT",
)
"""The line to paste."""


def tables(results: Sequence[ReplayResult]) -> Iterator[Table]:
    """A table of each replay, the speeds of all drafters side by side, a summary, and the answer
    where the default drafter was replayed."""
    # Results that differ in the token cost alone have the same families.
    for _, group in groupby(results, key=lambda result: id(result.families)):
        yield families_table(list(group))
    costs = list(dict.fromkeys(result.token_cost for result in results))
    if len({result.drafter for result in results}) > 1:
        for cost in costs:
            here = [each for each in results if each.token_cost == cost]
            yield Table(
                f"Modelled speed at token cost {cost:g}",
                ("family", *(each.drafter for each in here)),
                [(name, *(f"{each.speeds[name]:.3f}" for each in here)) for name in here[0].speeds],
            )
    yield Table(
        "Modelled speed, all families",
        ("drafter", "token cost", "geometric mean", "worst", "worst family"),
        [
            (
                each.drafter,
                f"{each.token_cost:g}",
                f"{each.geometric_mean:.3f}",
                f"{each.worst:.3f}",
                min(each.speeds, key=each.speeds.__getitem__),
            )
            for each in results
        ],
    )
    if any(each.drafter == OURS for each in results):
        yield worth_table(results)
        yield gpu_table(results)


def worth_table(results: Sequence[ReplayResult]) -> Table:
    """What the default drafter is worth at each cost of a draft token, over all requests together,
    beside each other drafter."""
    ours = [each for each in results if each.drafter == OURS]
    peers = list(dict.fromkeys(each.drafter for each in results if each.drafter != OURS))
    speeds = {
        (each.drafter, each.token_cost): speed_of(each.sessions, each.token_cost)
        for each in results
    }
    rows = []
    for each in ours:
        cost, counts = each.token_cost, each.sessions
        steps, emitted, _ = counts.sum(axis=0)
        samples = resampled_speeds(counts, cost, np.random.default_rng(0))
        low, high = np.percentile(samples, [2.5, 97.5])
        rows.append(
            (
                f"{cost:.1%}",
                f"{1 - steps / max(1, emitted):.0%}",
                f"{speeds[OURS, cost]:.2f}",
                f"{low:.2f} to {high:.2f}",
                *(f"{speeds[peer, cost]:.2f}" for peer in peers),
                ", ".join(name for name, speed in each.speeds.items() if speed < LEAST_GAIN),
            )
        )
    return Table(
        f"What it is worth on these {sum(each.requests for each in ours[0].families.values()):,} "
        "requests",
        ("a draft token\ncosts", "steps\nsaved", "\nspeed", "95 %\ninterval", *peers, "no help in"),
        rows,
        "Counted exactly from recorded answers. Speed is tokens / (steps + cost x draft tokens), "
        "plain decoding is 1; 95 of 100 samples of the requests lie within the interval.",
    )


def gpu_table(results: Sequence[ReplayResult]) -> Table:
    """For each GPU, model and `AT_ONCE` the computed cost of a draft token, and the speed there.

    Of the runs of the default drafter the one with the next higher cost counts, with its drafts at
    the lower cost. Beyond all of them it would draft less than it did, so there is no speed.
    """
    runs = sorted(
        (each for each in results if each.drafter == OURS), key=lambda each: each.token_cost
    )

    def cell(cost: float) -> str:
        run = next((each for each in runs if each.token_cost >= cost), None)
        return f"{cost:.1%}" + ("" if run is None else f", {speed_of(run.sessions, cost):.2f}x")

    cases = [(title, model, n) for title, model in MODELS.items() for n in AT_ONCE]
    return Table(
        "The cost of a draft token, and the speed there",
        ("GPU", *(f"{title}\n{n} at once" for title, _, n in cases)),
        [(gpu, *(cell(token_cost(model, gpu, n)) for _, model, n in cases)) for gpu in GPUS],
        "Computed from bandwidth and FLOPs, not measured. Without a speed: replay with a "
        "--token-cost at least as high.",
    )


def html_report(results: Sequence[ReplayResult], traces: Sequence[Trace]) -> str:
    """A page for a colleague: the tables, and three requests in colour. It loads nothing.

    Of `traces` it shows those with the most, the middle and the least steps saved.
    """
    by_gain = sorted(traces, key=lambda each: -each.stats.mean_accepted_tokens)
    shown = {0: "the most", len(by_gain) // 2: "the middle", len(by_gain) - 1: "the least"}
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>What drafts are worth</title>"
        "<meta name='viewport' content='width=device-width'><style>body{font:16px/1.5 system-ui;"
        "max-width:72rem;margin:2rem auto;padding:0 1rem;background:#fff;color:#111}"
        "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:right;"
        "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
        "caption{font-weight:bold;text-align:left}"
        "pre{background:#f6f6f6;padding:.8rem;overflow-x:auto}</style>"
        "<h1>What drafts are worth</h1>",
        # The answer first.
        *(table.html() for table in reversed(list(tables(results)))),
        "<h2>To try it</h2>",
        *(f"<pre>{escape(line)}</pre>" for line in SERVERS),
    ]
    if by_gain:
        parts.append("<h2>Three answers</h2><p>Coloured tokens were drafted and accepted.</p>")
        parts += [
            f"<h3>Where it saves {what}</h3>{by_gain[at]._repr_html_()}"
            for at, what in shown.items()
        ]
    return "\n".join(parts)
