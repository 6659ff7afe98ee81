"""Where the prior of calibrated acceptance comes from, and how well the drafter's chances hold.

`--write` learns the prior: each family of recorded requests is replayed at several token costs by
an engine that remembers the family's earlier requests, starting from the prior as it is, and what
the engines have learned at the end is averaged, every family counted once. The weights of a
prediction come from the families with references, replayed with the reference as the prediction,
once with the prompt and once without, since most references stand in their prompts. Write, install
anew, and repeat until the results stay: two rounds did, from weights set by hand.

Without `--write` it prints the reliability diagram: the chances that were told beside what the
target emitted, over all families, for chains and trees, and saves it.

    python bench/calibration.py --data FOLDER --json FILE --plot FILE
    python bench/calibration.py --data FOLDER --write csrc/src/acceptance_prior.inc
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from fastdraft import Calibration, Datastore, DraftConfig, Engine
from fastdraft.cli import demo_model
from fastdraft.cli.records import Record, family_files, read_family
from fastdraft.cli.replay_run import accepted_path
from index import machine

TOKEN_COSTS = (0.0, 0.02, 0.05, 0.2)
TREE_BUDGET = 32


class Job(NamedTuple):
    """One replay of a family."""

    family: str
    config: DraftConfig
    prediction: bool = False
    prompt: bool = True


def replay(job: Job, records: list[Record]) -> Calibration:
    """What an engine has learned at the end of a family."""
    engine = Engine(job.config, datastores=[Datastore()])
    for record in records:
        output = record.output_ids
        if len(output) < 2:
            continue
        prompt = np.append(record.prompt_ids if job.prompt else output[:0], output[:1])
        reference = record.reference_ids if job.prediction else None
        request = engine.add_request(prompt, prediction=reference)
        said = output.tolist()
        done = 1
        while done < len(said):
            draft = engine.propose(request)
            path = accepted_path(draft.tolist(), draft.parents.tolist(), said, done)
            end = done + len(path) + 1
            engine.observe(request, output[done:end])
            done = end
        engine.finish(request)
    return engine.calibration()


def mean(calibrations: Iterable[Calibration]) -> dict[str, np.ndarray]:
    """The mean of the weights, by feature."""
    weights = [calibration.weights for calibration in calibrations]
    return {name: np.mean([each[name] for each in weights], axis=0) for name in weights[0]}


def prior(results: dict[Job, Calibration]) -> str:
    """The weights as C++ has them."""
    families: dict[bool, dict[str, list[Calibration]]] = {
        True: defaultdict(list),
        False: defaultdict(list),
    }
    for job, calibration in results.items():
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


def reliability(results: dict[Job, Calibration]) -> list[dict[str, float]]:
    """The buckets of all families together."""
    told: dict[int, float] = defaultdict(float)
    accepted: dict[int, float] = defaultdict(float)
    count: dict[int, int] = defaultdict(int)
    for calibration in results.values():
        for bucket in calibration.reliability:
            index = min(19, int(bucket.chance * 20))
            told[index] += bucket.chance * bucket.count
            accepted[index] += bucket.accepted * bucket.count
            count[index] += bucket.count
    return [
        {"chance": told[i] / count[i], "accepted": accepted[i] / count[i], "count": count[i]}
        for i in sorted(count)
    ]


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder of *.jsonl files")
    parser.add_argument("--write", type=Path, help="learn the prior and write it here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG; needs matplotlib")
    options = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(demo_model.ensure() / "tokenizer.json"))

    def encode(texts: list[str]) -> list[Sequence[int]]:
        return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]

    families = {
        name: read_family(path, encode, references=True)
        for name, path in family_files([options.data]).items()
    }
    referenced = [
        name
        for name, records in families.items()
        if any(record.reference_ids is not None for record in records)
    ]
    costs = [DraftConfig(token_cost=cost) for cost in TOKEN_COSTS]
    jobs = [Job(family, config) for family in families for config in costs]
    if options.write:
        jobs += [
            Job(family, config, prediction=True, prompt=prompt)
            for family in referenced
            for config in costs
            for prompt in (True, False)
        ]
    else:
        jobs += [
            Job(family, DraftConfig(token_cost=cost, tree_budget=TREE_BUDGET))
            for family in families
            for cost in TOKEN_COSTS
        ]
    with ProcessPoolExecutor() as pool:
        learned = pool.map(replay, jobs, [families[job.family] for job in jobs])
        results = dict(zip(jobs, learned, strict=True))

    if options.write:
        options.write.write_text(prior(results))
        return
    about = machine()
    for key, value in about.items():
        print(f"{key:8} {value}")
    diagrams = {
        name: reliability(
            {
                job: each
                for job, each in results.items()
                if (job.config.tree_budget is None) == chain
            }
        )
        for name, chain in (("chains", True), (f"trees of up to {TREE_BUDGET}", False))
    }
    for name, buckets in diagrams.items():
        print(f"\n{name}:  chance  accepted      tokens")
        indent = " " * (len(name) + 1)
        for bucket in buckets:
            chance, accepted, count = bucket["chance"], bucket["accepted"], bucket["count"]
            print(f"{indent} {chance:7.3f} {accepted:9.3f} {count:11,}")
    if options.json:
        options.json.write_text(
            json.dumps({"machine": about, "diagrams": diagrams}, indent=1) + "\n"
        )
    if options.plot:
        plot(diagrams, options.plot)


if __name__ == "__main__":
    main()
