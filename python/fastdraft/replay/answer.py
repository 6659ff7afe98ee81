"""The answer to "what would it save on my traffic?": a sentence and tables, which a terminal and a
page show alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

import numpy as np

from fastdraft.replay.costs import GPUS, MODELS, cost_curve
from fastdraft.replay.page import choose
from fastdraft.replay.records import Record
from fastdraft.replay.results import Cost, ReplayResult, Table, resampled_speeds, speed_of
from fastdraft.replay.run import replay
from fastdraft.replay.settings import settings_of

__all__ = ["SERVERS", "families_table", "gpu_table", "head", "sentence"]

LEAST_GAIN = 1.05
"""A family below it counts as one where drafts do not help."""
AT_ONCE = (1, 16)
"""Requests that run together, in the table of GPUs."""
GRID = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5)
"""The costs that dense models are replayed with: each with the next higher one's drafts."""
MOST_TOKENS = 50_000
"""The output tokens that the table of GPUs replays, of all requests together."""
LONGEST: Final = 64
SERVERS = (
    """vllm serve MODEL --speculative-config '{"method": "fastdraft"}'""",
    "python -m sglang.launch_server --model-path MODEL --speculative-algorithm FASTDRAFT",
)
"""The line to paste."""


def sentence(result: ReplayResult) -> str:
    """The answer in one sentence, for all calls together."""
    counts = sum(family.sessions.sum(axis=0) for family in result.families.values())
    steps, emitted, _ = counts if np.ndim(counts) else (0, 0, 0)
    calls = sum(family.requests for family in result.families.values())
    priced = result.priced()
    interval = "of one session: no interval"
    if len(priced) > 1:
        speeds = resampled_speeds(priced, np.random.default_rng(0))
        interval = "95 % interval {:.2f} to {:.2f}".format(*np.percentile(speeds, [2.5, 97.5]))
    costs = f"the first draft token costs {result.token_cost:.1%} of a forward pass"
    if result.curve is None:
        costs = f"a draft token costs {result.token_cost:.1%} of a forward pass"
    together = "one at a time" if result.at_once == 1 else f"{result.at_once} at a time"
    return (
        f"On these {calls:,} calls, {together}, {result.drafter_name} would save "
        f"{1 - steps / max(1, emitted):.0%} of the model's forward passes: {speed_of(priced):.2f} "
        f"times as fast ({interval}) where {costs}."
    )


def families_table(results: Sequence[ReplayResult]) -> Table:
    """The counts of each family, and the speed of each result."""
    first = results[0]
    rows = []
    for name, family in first.families.items():
        stats = family.stats
        rows.append(
            (
                name,
                f"{family.requests:,}",
                f"{1 - stats.steps / max(1, stats.emitted):.0%}",
                f"{stats.mean_accepted_tokens:.2f}",
                f"{stats.acceptance_rate:.0%}",
                *(f"{each.speeds[name]:.2f}" for each in results),
            )
        )
    helpless = [name for name, speed in first.speeds.items() if speed < LEAST_GAIN]
    return Table(
        first.title,
        (
            *("\nfamily", "\ncalls", "passes\nsaved", "tokens\na pass", "drafts\naccepted"),
            *(f"{each.drafter_name}\nat {each.token_cost:.1%}" for each in results),
        ),
        rows,
        "The last columns are speeds: tokens in the time of a forward pass without drafts."
        + (f" Drafts do not help in {', '.join(helpless)}." if helpless else ""),
    )


def gpu_table(
    families: Mapping[str, Sequence[Record]],
    models: Sequence[str] = tuple(MODELS),
) -> Table:
    """For each GPU, model and `AT_ONCE` the speed at its computed cost, each replayed.

    Of more than `MOST_TOKENS` of output a sample is replayed, a request of each family in turn.
    """
    chosen = choose(families, MOST_TOKENS)
    some = {
        name: [each for each in records if each.id in chosen[name]]
        for name, records in families.items()
        if chosen[name]
    }
    known: dict[tuple[Cost, int], ReplayResult] = {}

    def speed(curve: Sequence[float], drafts: Cost, at_once: int) -> float:
        if (drafts, at_once) not in known:
            if isinstance(drafts, float):
                setting = settings_of(token_costs=[drafts])
            else:
                setting = settings_of(curve=drafts)
            [known[drafts, at_once]] = replay(setting, some, at_once=at_once)
        return speed_of(known[drafts, at_once].priced(curve))

    def cell(name: str, gpu: str, at_once: int) -> str:
        found = []
        for model in MODELS[name]:
            curve = cost_curve(model, gpu, at_once, LONGEST)
            drafts: Cost = next((each for each in GRID if each >= curve[1] - 1), GRID[-1])
            if model.experts:  # what is read is the same on all, and is nearly all of the cost
                drafts = cost_curve(model, "H100 SXM", at_once, LONGEST)
            found.append(f"{speed(curve, drafts, at_once):.2f}")
        return " to ".join(sorted(found))

    cases = [(name, n) for name in models for n in AT_ONCE]
    whole, used = (sum(map(len, each.values())) for each in (families, some))
    return Table(
        "How many times as fast, by GPU",
        ("\nGPU", *(f"{name}\n{n} at once" for name, n in cases)),
        [(gpu, *(cell(name, gpu, n) for name, n in cases)) for gpu in GPUS],
        "What a draft token costs there is computed from bandwidth and FLOPs, not measured. Of a "
        "mixture the experts that tokens choose are independent, to correlated."
        + (f" Replayed: {used:,} of the {whole:,} calls." if used < whole else ""),
    )


def head(read: Sequence[str], answer: str, tables: Sequence[Table]) -> str:
    """The head of a page: the answer, what it stands on, and the tables; as HTML."""
    first, *others = tables
    return "".join(
        (
            f"<p class='answer'>{escape(answer)}</p>",
            f"<ul class='muted'>{''.join(f'<li>{escape(each)}</li>' for each in read)}</ul>",
            first.html(),
            *(
                f"<details><summary>{escape(each.title)}</summary>{each.html()}</details>"
                for each in others
            ),
            "<details><summary>To try it</summary>",
            *(f"<pre>{escape(line)}</pre>" for line in SERVERS),
            "</details>",
        )
    )
