"""The source of the prior of calibrated acceptance, and the reliability of its probabilities.

`--write` learns the prior: each family of recorded requests is replayed at several token costs by
an engine that remembers the family's earlier requests, starting from the prior as it is, and what
the engines have learned at the end is averaged, every family counted once. The weights of a
prediction come from the families with references, replayed with the reference as the prediction,
once with the prompt and once without, since most references stand in their prompts. Write, install
anew, and repeat until the results stay: two rounds did, from weights set by hand.

Without `--write` it prints the reliability diagram: predicted and observed acceptance, over all
families, for chains and trees; the same of whole paths, by depth; and in which families they
differ.

`--held-out` says what the prior's families gain from being its families. It fits a prior on each
half of them, from weights of zero, and prints the modelled speed of the other half with it, beside
that with the prior that ships. Predictions play no part in it.

    python bench/calibration.py --data FOLDER --json FILE
    python bench/calibration.py --data FOLDER --held-out --json FILE
    python bench/calibration.py --data FOLDER --write csrc/src/policy/acceptance_model_prior.inc
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np

import harness
from fastdraft import Calibration, Datastore, DraftConfig, Engine
from fastdraft.replay import EnginePeer, Record, Trace, replay_family

TOKEN_COSTS = (0.0, 0.02, 0.05, 0.2)
TREE_BUDGET = 32
DEPTHS = (1, 5, 9, 17, 25, 41, 65)
"""Where bins of depth begin, and the end of the last."""
TWENTIETHS = 20
"""Bins of probability."""
ENOUGH = 1000  # tokens of a bin; fewer are noise
OFF = 0.05  # is too far
ROUNDS = 2  # of fitting
HELD_OUT_COSTS = (0.02, 0.2)


class Job(NamedTuple):
    """One replay of a family."""

    family: str
    config: DraftConfig
    prediction: bool = False
    prompt: bool = True
    prior: Calibration | None = None


class Learned(NamedTuple):
    """The outcome of a job."""

    calibration: Calibration
    speed: float
    bins: np.ndarray
    """By request, for each twentieth of probability, and for each with each bin of depth: the sum
    of the predicted probabilities, the number of tokens accepted, and of those predicted. Bins of
    depth count the drafted tokens of chains, accepted with all before them."""


def twentieth(probabilities: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.minimum((probabilities * TWENTIETHS).astype(int), TWENTIETHS - 1)
    return found


def run(job: Job, records: list[Record]) -> Learned:
    """Replays a family."""
    engine = Engine(job.config, datastores=[Datastore()], calibration=job.prior)
    if not job.prompt:
        records = [replace(record, prompt_ids=record.prompt_ids[:0]) for record in records]
    bins: list[np.ndarray] = []
    paths = np.zeros((TWENTIETHS, len(DEPTHS) - 1, 3))
    learned = np.zeros((TWENTIETHS, 3))

    def count(trace: Trace) -> None:
        for step in trace.steps:
            predicted = np.array(step.probabilities)
            depth = np.arange(1, len(predicted) + 1)
            accepted = depth <= len(step.accepted)
            index = twentieth(predicted), np.digitize(depth, DEPTHS) - 1
            np.add.at(paths, index, np.stack([predicted, accepted, np.ones_like(predicted)], 1))

    def end(_tokens: int) -> None:
        before = learned.copy()
        for bucket in engine.calibration().reliability:
            bin_of = twentieth(np.array(bucket.predicted))
            learned[bin_of] = np.array([bucket.predicted, bucket.accepted, 1]) * bucket.count
        bins.append(np.concatenate([learned - before, paths.reshape(-1, 3)]))
        paths[:] = 0

    result = replay_family(
        EnginePeer(engine),
        records,
        prediction=job.prediction,
        on_request=end,
        traced={record.id for record in records} if job.config.tree_budget is None else set(),
        on_trace=count,
    )
    speed = result.speed(job.config.token_cost)
    return Learned(engine.calibration(), speed, np.array(bins))


def mean(learned: Sequence[tuple[Job, Learned]]) -> dict[str, np.ndarray]:
    """The mean of the weights, by feature: every family counts once."""
    families: dict[str, list[Mapping[str, tuple[float, ...]]]] = defaultdict(list)
    for job, each in learned:
        families[job.family].append(each.calibration.weights)
    return {
        name: np.mean(
            [np.mean([each[name] for each in own], axis=0) for own in families.values()], axis=0
        )
        for name in learned[0][1].calibration.weights
    }


def prior(learned: Sequence[tuple[Job, Learned]]) -> str:
    """The weights as C++ has them."""
    weights, predicted = (
        mean([(job, each) for job, each in learned if job.prediction == prediction])
        for prediction in (False, True)
    )
    # Without a prediction only the first value, nothing is said, was ever learned.
    weights["prediction"][1:] = predicted["prediction"][1:]
    lines = []
    for name, values in weights.items():
        lines.append(f"// {name}")
        lines += [
            " ".join(f"{value:.2f}f," for value in values[first : first + 10])
            for first in range(0, len(values), 10)
        ]
    return "\n".join(lines) + "\n"


def diagram(bins: np.ndarray) -> list[dict[str, float]]:
    """Predicted and observed acceptance, by twentieth of probability."""
    return [
        {"predicted": predicted / count, "accepted": accepted / count, "count": int(count)}
        for predicted, accepted, count in bins[:TWENTIETHS]
        if count
    ]


def run_all(jobs: Sequence[Job], families: dict[str, list[Record]]) -> list[tuple[Job, Learned]]:
    with ProcessPoolExecutor() as pool:
        return list(
            zip(jobs, pool.map(run, jobs, [families[job.family] for job in jobs]), strict=True)
        )


def resampled(rows: np.ndarray, *, resamples: int = 1000) -> np.ndarray:
    """Sums of `rows`, each of one request, over as many requests drawn with replacement: one sum
    for each resample of a bootstrap."""
    size = len(rows)
    drawn = np.random.default_rng(0).integers(size, size=(resamples, size))
    times = np.array([np.bincount(draw, minlength=size) for draw in drawn])
    return np.tensordot(times, rows, axes=1)


def differences(learned: Sequence[tuple[Job, Learned]]) -> list[dict[str, Any]]:
    """The bins of at least `ENOUGH` tokens, of one family at one cost, by how far they are off:
    with 95 % intervals of the difference, by bootstrap over requests."""
    found: list[dict[str, Any]] = []
    depths = [f"depth {begin} to {end - 1}" for begin, end in pairwise(DEPTHS)]
    for job, each in learned:
        form = "chain" if job.config.tree_budget is None else "tree"
        predicted, accepted, count = each.bins.sum(axis=0).T
        enough = count >= ENOUGH
        sums = resampled(each.bins[:, enough])
        # A resample may hold no token of a bin.
        off = (sums[..., 0] - sums[..., 1]) / np.maximum(sums[..., 2], 1)
        intervals = iter(np.percentile(off, [2.5, 97.5], axis=0).T)
        for index in np.flatnonzero(enough):
            mean, observed = predicted[index] / count[index], accepted[index] / count[index]
            is_path = index >= TWENTIETHS
            name = f"path, {depths[index % len(depths)]}" if is_path else form
            low, high = next(intervals)
            row = {"family": job.family, "token cost": job.config.token_cost, "bin": name}
            row |= {"predicted": mean, "observed": observed, "count": int(count[index])}
            found.append({**row, "low": low, "high": high})
    return sorted(found, key=lambda row: -abs(row["predicted"] - row["observed"]))


def held_out(families: dict[str, list[Record]]) -> list[dict[str, Any]]:
    """Modelled speed by token cost with the prior that ships, and with one of the other half."""
    halves = [list(families)[half::2] for half in (0, 1)]
    zero = Calibration({name: (0.0,) * size for name, size in sizes().items()})
    configs = [DraftConfig(token_cost=cost) for cost in HELD_OUT_COSTS]

    def fit(names: Sequence[str]) -> Calibration:
        prior = zero
        for _ in range(ROUNDS):
            jobs = [Job(name, config, prior=prior) for name in names for config in configs]
            weights = mean(run_all(jobs, families))
            prior = Calibration({name: tuple(each.tolist()) for name, each in weights.items()})
        return prior

    priors = {
        name: prior
        for half, other in (halves, halves[::-1])
        for prior in [fit(other)]
        for name in half
    }
    rows = []
    for title, chosen in (("ships", {}), ("other half's", priors), ("none", None)):
        jobs = [
            Job(name, config, prior=zero if chosen is None else chosen.get(name))
            for name in families
            for config in configs
        ]
        learned = run_all(jobs, families)
        for config in configs:
            speeds = {job.family: each.speed for job, each in learned if job.config is config}
            rows.append(
                {
                    "prior": title,
                    "token cost": config.token_cost,
                    "geometric mean": geometric_mean(speeds.values()),
                    "worst": min(speeds.values()),
                    "families": speeds,
                }
            )
    return rows


def sizes() -> dict[str, int]:
    """The number of weights of each feature."""
    return {name: len(values) for name, values in Engine().calibration().weights.items()}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder of *.jsonl files")
    parser.add_argument("--write", type=Path, help="learn the prior and write it here")
    parser.add_argument("--held-out", action="store_true", help="priors of half of the families")
    options = parser.parse_args()

    about = harness.about()
    families = harness.recorded_families(options.data, references=True)
    if options.held_out:
        rows = held_out(families)
        columns = ("prior", "token cost", "geometric mean", "worst")
        harness.show("Modelled speed", {name: name for name in columns}, rows, digits=3)
        harness.finish(options, {**about, "held_out": rows})
        return
    chains = [DraftConfig(token_cost=cost) for cost in TOKEN_COSTS]
    trees = [DraftConfig(token_cost=cost, tree_budget=TREE_BUDGET) for cost in TOKEN_COSTS]
    jobs = [Job(name, config) for name in families for config in chains]
    if options.write:
        jobs += [
            Job(family, config, prediction=True, prompt=prompt)
            for family, records in families.items()
            if any(record.reference_ids is not None for record in records)
            for config in chains
            for prompt in (True, False)
        ]
    else:
        jobs += [Job(name, config) for name in families for config in trees]
    learned = run_all(jobs, families)

    if options.write:
        options.write.write_text(prior(learned))
        return
    diagrams = {
        name: diagram(
            np.sum(
                [
                    each.bins.sum(axis=0)
                    for job, each in learned
                    if (job.config.tree_budget is None) == chain
                ],
                axis=0,
            )
        )
        for name, chain in (("chains", True), (f"trees of up to {TREE_BUDGET}", False))
    }
    for name, buckets in diagrams.items():
        harness.show(name, None, buckets, digits=3)
    paths = []
    for cost in TOKEN_COSTS:
        of_cost = [each.bins for job, each in learned if job.config.token_cost == cost]
        total = np.sum([bins.sum(axis=0) for bins in of_cost], axis=0)[TWENTIETHS:]
        total = total.reshape(TWENTIETHS, -1, 3).sum(axis=0)
        for (begin, end), (predicted, accepted, count) in zip(pairwise(DEPTHS), total, strict=True):
            row = {"token cost": cost, "depth": f"{begin} to {end - 1}", "count": int(count)}
            paths.append({**row, "predicted": predicted / count, "observed": accepted / count})
    harness.show("Whole paths of chains", None, paths, digits=3)
    about |= {"diagrams": diagrams, "paths": paths}
    found = differences(learned)
    for name, of_paths in (("tokens", False), ("paths", True)):
        rows = [row for row in found if row["bin"].startswith("path") == of_paths]
        off = [row for row in rows if abs(row["predicted"] - row["observed"]) > OFF]
        surely = [row for row in off if row["low"] > OFF or row["high"] < -OFF]
        low = sum(bool(row["predicted"] < row["observed"]) for row in off)
        harness.show(
            f"{len(off)} of {len(rows)} bins of {name} are off by more than {OFF}, {low} of them "
            f"too low; {len(surely)} in all of their 95 % interval",
            None,
            rows[:20],
            digits=3,
        )
        counts = {"bins": len(rows), "off": len(off), "too_low": low, "surely_off": len(surely)}
        about[f"bins_of_{name}"] = {**counts, "farthest": rows[:20]}
    harness.finish(options, about)


if __name__ == "__main__":
    main()
