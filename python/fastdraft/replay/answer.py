"""The answer to "what would it be worth for me?", from the results of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from fastdraft.replay.costs import GPUS, MODELS, token_cost
from fastdraft.replay.results import ReplayResult, html_table, resampled_speeds, speed_of
from fastdraft.replay.trace import Trace

__all__ = ["GPU_HEADS", "SERVERS", "Worth", "gpu_rows", "html_report", "worth_of"]

LEAST_GAIN = 1.05
"""A family below it counts as one where drafts do not help."""
AT_ONCE = (1, 16)
"""Requests that run together, in the table of GPUs."""
GPU_HEADS = ("GPU", *(f"{title}\n{at_once} at once" for title in MODELS for at_once in AT_ONCE))
SERVERS = {
    "vLLM": """vllm serve MODEL --speculative-config '{"method": "fastdraft"}'""",
    "SGLang": "python -m sglang.launch_server --model-path MODEL --speculative-algorithm FASTDRAFT",
}
"""The line to paste."""


@dataclass(frozen=True)
class Worth:
    """What drafts are worth at one cost of a draft token, over all requests together.

    Attributes:
        token_cost: The cost, as a fraction of a step.
        saved: Which part of the steps goes.
        speed: Modelled speed, plain decoding being 1.
        interval: Between which speeds 95 of 100 samples of the requests lie. The requests of a
            session are drawn together.
        peers: The speed of each other drafter.
        helpless: The families in which drafts bring less than `LEAST_GAIN`, with their speeds.
    """

    token_cost: float
    saved: float
    speed: float
    interval: tuple[float, float]
    peers: dict[str, float]
    helpless: dict[str, float]


def worth_of(results: Sequence[ReplayResult], drafter: str = "default") -> list[Worth]:
    """What `drafter` is worth at each cost that was replayed; none where it was not."""
    found = []
    for result in results:
        if result.drafter != drafter or result.tree_budget != results[0].tree_budget:
            continue
        cost, counts = result.token_cost, result.sessions
        steps, emitted, _ = counts.sum(axis=0)
        same_cost = [each for each in results if each.token_cost == cost]
        found.append(
            Worth(
                cost,
                float(1 - steps / max(1, emitted)),
                speed_of(counts, cost),
                _interval(result),
                {
                    each.drafter: speed_of(each.sessions, cost)
                    for each in same_cost
                    if each.drafter != drafter
                },
                {name: speed for name, speed in result.speeds.items() if speed < LEAST_GAIN},
            )
        )
    return found


def gpu_rows(results: Sequence[ReplayResult]) -> list[list[str]]:
    """For each GPU its name, then a cell for each of `MODELS` and of `AT_ONCE`, as `GPU_HEADS` has
    them: the computed cost of a draft token, and the speed there.

    Of the runs of the default drafter the one with the next higher cost counts, with its drafts at
    the lower cost. Beyond all of them it would draft less than it did, so there is no speed.
    """
    runs = sorted(
        (each for each in results if each.drafter == "default"), key=lambda each: each.token_cost
    )

    def cell(cost: float) -> str:
        run = next((each for each in runs if each.token_cost >= cost), None)
        return f"{cost:.1%}" + ("" if run is None else f", {speed_of(run.sessions, cost):.2f}x")

    return [
        [
            gpu,
            *(
                cell(token_cost(model, gpu, at_once))
                for model in MODELS.values()
                for at_once in AT_ONCE
            ),
        ]
        for gpu in GPUS
    ]


def html_report(results: Sequence[ReplayResult], traces: Sequence[Trace]) -> str:
    """A page for a colleague: the answer, GPUs, families, and three requests in colour.

    It loads nothing. Of `traces` it shows those with the most, the middle and the least steps
    saved.
    """
    by_gain = sorted(traces, key=lambda each: -each.stats.mean_accepted_tokens)
    shown = {0: "the most", len(by_gain) // 2: "the middle", len(by_gain) - 1: "the least"}
    worth = worth_of(results)
    peers = list(dict.fromkeys(name for each in worth for name in each.peers))
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>What drafts are worth</title>"
        "<meta name='viewport' content='width=device-width'><style>body{font:16px/1.5 system-ui;"
        "max-width:60rem;margin:2rem auto;padding:0 1rem;background:#fff;color:#111}"
        "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:right;"
        "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
        "pre{background:#f6f6f6;padding:.8rem;overflow-x:auto}</style>",
        f"<h1>What drafts are worth on {sum(_requests(results)):,} requests</h1>"
        "<p>Counted exactly from recorded answers, without a GPU. A draft token costs so much of a "
        "step; modelled speed is tokens / (steps + cost &times; draft tokens), plain decoding is 1."
        "</p>",
        html_table(
            ("a draft token costs", "steps saved", "speed", "95 % interval", *peers),
            [
                (
                    f"{each.token_cost:.1%}",
                    f"{each.saved:.0%}",
                    f"{each.speed:.2f}",
                    "{:.2f} to {:.2f}".format(*each.interval),
                    *(f"{each.peers[name]:.2f}" if name in each.peers else "" for name in peers),
                )
                for each in worth
            ],
        ),
        *(
            f"<p>At {each.token_cost:.1%} it does not help in {escape(', '.join(each.helpless))}."
            for each in worth
            if each.helpless
        ),
        "<h2>On which GPU</h2><p>Computed from bandwidth and FLOPs, not measured: the cost of a "
        "draft token, and the speed there.</p>",
        html_table(
            GPU_HEADS,
            gpu_rows(results),
        ),
        "<h2>To try it</h2>",
        *(f"<p>{name}</p><pre>{escape(line)}</pre>" for name, line in SERVERS.items()),
        "<h2>By family</h2>",
        *(result._repr_html_() for result in results if result.drafter == "default"),
        "<h2>Three answers</h2><p>Coloured tokens were drafted and accepted.</p>"
        if by_gain
        else "",
        *(
            f"<h3>Where it saves {what}</h3>{by_gain[at]._repr_html_()}"
            for at, what in shown.items()
            if by_gain
        ),
    ]
    return "\n".join(parts)


def _requests(results: Sequence[ReplayResult]) -> list[int]:
    return [family.requests for family in results[0].families.values()]


def _interval(result: ReplayResult) -> tuple[float, float]:
    """By the bootstrap."""
    speeds = resampled_speeds(result.sessions, result.token_cost, np.random.default_rng(0))
    low, high = np.percentile(speeds, [2.5, 97.5])
    return float(low), float(high)
