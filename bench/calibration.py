"""Where the prior of calibrated acceptance comes from, and how well the drafter's chances hold.

`--write` learns the prior: each family of recorded requests is replayed at several token costs by
an engine that remembers the family's earlier requests, starting from the prior as it is, and what
the engines have learned at the end is averaged, every family counted once. The weights of a
prediction come from the families with references, replayed with the reference as the prediction,
once with the prompt and once without, since most references stand in their prompts. Write, install
anew, and repeat until the results stay: two rounds did, from weights set by hand.

Without `--write` it prints the reliability diagram: the chances that were told beside what the
target emitted, over all families, for chains and trees, and saves it.

    python bench/calibration.py --data FOLDER --json FILE
    python bench/calibration.py --data FOLDER --write csrc/src/draft/acceptance_model_prior.inc
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import harness
from fastdraft import Calibration, Datastore, DraftConfig, Engine
from fastdraft.replay import EnginePeer, Record, replay_family

TOKEN_COSTS = (0.0, 0.02, 0.05, 0.2)
TREE_BUDGET = 32


class Job(NamedTuple):
    """One replay of a family."""

    family: str
    config: DraftConfig
    prediction: bool = False
    prompt: bool = True


def run(job: Job, records: list[Record]) -> Calibration:
    """What an engine has learned at the end of a family."""
    engine = Engine(job.config, datastores=[Datastore()])
    if not job.prompt:
        records = [replace(record, prompt_ids=record.prompt_ids[:0]) for record in records]
    replay_family(EnginePeer(engine), records, prediction=job.prediction)
    return engine.calibration()


def mean(calibrations: Iterable[Calibration]) -> dict[str, np.ndarray]:
    """The mean of the weights, by feature."""
    weights = [calibration.weights for calibration in calibrations]
    return {name: np.mean([each[name] for each in weights], axis=0) for name in weights[0]}


def prior(outcomes: dict[Job, Calibration]) -> str:
    """The weights as C++ has them."""
    families: dict[bool, dict[str, list[Calibration]]] = {
        True: defaultdict(list),
        False: defaultdict(list),
    }
    for job, calibration in outcomes.items():
        families[job.prediction][job.family].append(calibration)

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


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder of *.jsonl files")
    parser.add_argument("--write", type=Path, help="learn the prior and write it here")
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
    else:
        jobs += [Job(family, config) for family in families for config in trees]
    with ProcessPoolExecutor() as pool:
        found = pool.map(run, jobs, [families[job.family] for job in jobs])
        outcomes = dict(zip(jobs, found, strict=True))

    if options.write:
        options.write.write_text(prior(outcomes))
        return
    diagrams = {
        name: reliability(
            calibration
            for job, calibration in outcomes.items()
            if (job.config.tree_budget is None) == chain
        )
        for name, chain in (("chains", True), (f"trees of up to {TREE_BUDGET}", False))
    }
    for name, buckets in diagrams.items():
        harness.show(name, None, buckets, digits=3)
    harness.finish(options, {**about, "diagrams": diagrams})


if __name__ == "__main__":
    main()
