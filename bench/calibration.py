"""Where the prior of calibrated acceptance comes from, and how well the drafter's chances hold.

`--write` learns the prior: each family of recorded requests is replayed at several token costs by
an engine that remembers the family's earlier requests, starting from the prior as it is, and what
the engines have learned at the end is averaged, every family counted once. The weights of a
prediction come from the families with references, replayed with the reference as the prediction,
once with the prompt and once without, since most references stand in their prompts. Write, install
anew, and repeat until the results stay: two rounds did, from weights set by hand.

Without `--write` it prints the reliability diagram: the chances that were told beside what the
target emitted, over all families, for chains and trees, and saves it.

With `--at-once` it tells whether learning depends on how many requests are in flight. Each family
is replayed with so many requests at a time, without memory, so that nothing but learning differs.
For each number it prints the modelled speed beside that of the first number, and how far told and
accepted differ in any twentieth of the chances with 1,000 tokens or more, by family.

    python bench/calibration.py --data FOLDER --json FILE --plot FILE
    python bench/calibration.py --data FOLDER --json FILE --at-once 1 16 64 256
    python bench/calibration.py --data FOLDER --write csrc/src/draft/acceptance_model_prior.inc
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

import harness
from fastdraft import Calibration, Datastore, DraftConfig, Engine
from fastdraft.replay import EnginePeer, FamilyResult, Record, replay_family
from harness import Row

TOKEN_COSTS = (0.0, 0.02, 0.05, 0.2)
TREE_BUDGET = 32
MANY = 1_000
"""Tokens from which on the accepted part of a bucket tells something."""


class Job(NamedTuple):
    """One replay of a family."""

    family: str
    config: DraftConfig
    prediction: bool = False
    prompt: bool = True
    memory: bool = True
    at_once: int = 1


class Outcome(NamedTuple):
    """What an engine has learned at the end of a family, and what its drafts were worth."""

    calibration: Calibration
    result: FamilyResult


def run(job: Job, records: list[Record]) -> Outcome:
    engine = Engine(job.config, datastores=[Datastore()] if job.memory else [])
    if not job.prompt:
        records = [replace(record, prompt_ids=record.prompt_ids[:0]) for record in records]
    result = replay_family(
        EnginePeer(engine), records, at_once=job.at_once, prediction=job.prediction
    )
    return Outcome(engine.calibration(), result)


def mean(calibrations: Iterable[Calibration]) -> dict[str, np.ndarray]:
    """The mean of the weights, by feature."""
    weights = [calibration.weights for calibration in calibrations]
    return {name: np.mean([each[name] for each in weights], axis=0) for name in weights[0]}


def prior(outcomes: dict[Job, Outcome]) -> str:
    """The weights as C++ has them."""
    families: dict[bool, dict[str, list[Calibration]]] = {
        True: defaultdict(list),
        False: defaultdict(list),
    }
    for job, outcome in outcomes.items():
        families[job.prediction][job.family].append(outcome.calibration)

    def over_families(prediction: bool) -> dict[str, np.ndarray]:
        by_family = [mean(each) for each in families[prediction].values()]
        return {name: np.mean([each[name] for each in by_family], axis=0) for name in by_family[0]}

    weights = over_families(False)
    # Without a prediction only the first value, nothing is said, was ever learned.
    weights["prediction"][1:] = over_families(True)["prediction"][1:]
    lines = []
    for name, values in weights.items():
        lines.append(f"// {name}")
        lines += [
            " ".join(f"{value:.2f}f," for value in values[first : first + 10])
            for first in range(0, len(values), 10)
        ]
    return "\n".join(lines) + "\n"


def reliability(calibrations: Iterable[Calibration]) -> list[dict[str, float]]:
    """The buckets of all families together."""
    told: dict[int, float] = defaultdict(float)
    accepted: dict[int, float] = defaultdict(float)
    count: dict[int, int] = defaultdict(int)
    for calibration in calibrations:
        for bucket in calibration.reliability:
            index = min(19, int(bucket.chance * 20))
            told[index] += bucket.chance * bucket.count
            accepted[index] += bucket.accepted * bucket.count
            count[index] += bucket.count
    return [
        {"chance": told[i] / count[i], "accepted": accepted[i] / count[i], "count": count[i]}
        for i in sorted(count)
    ]


def largest_gap(calibration: Calibration) -> tuple[float, dict[str, float]]:
    """Where told and accepted differ most, of the buckets with many tokens."""
    many = [bucket for bucket in reliability([calibration]) if bucket["count"] >= MANY]
    gaps = [(abs(bucket["chance"] - bucket["accepted"]), bucket) for bucket in many]
    return max(gaps, key=lambda gap: gap[0], default=(0.0, {}))


def show_at_once(outcomes: dict[Job, Outcome]) -> list[Row]:
    """Prints what changes with the requests at a time, and returns it for the JSON."""
    rows: list[Row] = []
    for config in dict.fromkeys(job.config for job in outcomes):
        first: dict[str, float] = {}
        for at_once in dict.fromkeys(job.at_once for job in outcomes):
            found = {
                job.family: outcome
                for job, outcome in outcomes.items()
                if (job.config, job.at_once) == (config, at_once)
            }
            cost = config.token_cost
            speeds = {family: outcome.result.speed(cost) for family, outcome in found.items()}
            first = first or speeds
            ratios = {family: speeds[family] / first[family] for family in speeds}
            slowest = min(ratios, key=lambda family: ratios[family])
            gaps = {family: largest_gap(each.calibration) for family, each in found.items()}
            worst = max(gaps, key=lambda family: gaps[family][0])
            rows.append(
                {
                    "drafts": "chains" if config.tree_budget is None else "trees",
                    "token_cost": cost,
                    "at_once": at_once,
                    "speed": geometric_mean(speeds.values()),
                    "least_speed": min(speeds.values()),
                    "of_first": geometric_mean(ratios.values()),
                    "least_of_first": {slowest: ratios[slowest]},
                    "largest_gap": {worst: gaps[worst][0]},
                    "over_0.05": {
                        family: bucket for family, (gap, bucket) in gaps.items() if gap > 0.05
                    },
                }
            )
    harness.show(
        "by requests at once",
        {key.replace("_", " "): key for key in rows[0]},
        [row | {"over_0.05": len(row["over_0.05"])} for row in rows],
        digits=3,
    )
    return rows


def plot(diagrams: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5))
    axes.plot([0, 1], [0, 1], color="lightgrey")
    for name, buckets in diagrams.items():
        chances = [bucket["chance"] for bucket in buckets]
        axes.plot(chances, [bucket["accepted"] for bucket in buckets], "o-", label=name)
    axes.set(xlabel="chance told", ylabel="accepted", title="Reliability of calibrated acceptance")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder of *.jsonl files")
    parser.add_argument("--write", type=Path, help="learn the prior and write it here")
    parser.add_argument("--at-once", type=int, nargs="+", help="requests at a time")
    parser.add_argument("--plot", type=Path, help="a PNG; needs matplotlib")
    options = parser.parse_args()

    about = harness.about()
    families = harness.recorded_families(options.data, references=True)
    chains = [DraftConfig(token_cost=cost) for cost in TOKEN_COSTS]
    trees = [DraftConfig(token_cost=cost, tree_budget=TREE_BUDGET) for cost in TOKEN_COSTS]
    jobs = [Job(family, config) for family in families for config in chains]
    if options.write:
        jobs += [
            Job(family, config, prediction=True, prompt=prompt)
            for family, records in families.items()
            if any(record.reference_ids is not None for record in records)
            for config in chains
            for prompt in (True, False)
        ]
    elif options.at_once:
        jobs = [
            Job(family, config, memory=False, at_once=at_once)
            for config in chains + trees
            for at_once in options.at_once
            for family in families
        ]
    else:
        jobs += [Job(family, config) for family in families for config in trees]
    with ProcessPoolExecutor() as pool:
        found = pool.map(run, jobs, [families[job.family] for job in jobs])
        outcomes = dict(zip(jobs, found, strict=True))

    if options.write:
        options.write.write_text(prior(outcomes))
        return
    results: Row = {}
    if options.at_once:
        results["at_once"] = show_at_once(outcomes)
    else:
        results["diagrams"] = diagrams = {
            name: reliability(
                outcome.calibration
                for job, outcome in outcomes.items()
                if (job.config.tree_budget is None) == chain
            )
            for name, chain in (("chains", True), (f"trees of up to {TREE_BUDGET}", False))
        }
        for name, buckets in diagrams.items():
            harness.show(name, None, buckets, digits=3)
        if options.plot:
            plot(diagrams, options.plot)
    harness.finish(options, {**about, **results})


if __name__ == "__main__":
    main()
