"""Arctic's suffix decoding at the best of its settings for each token cost, beside the engine.

Arctic's draft lengths follow from fixed settings: how many tokens a draft may have for each that
matches (`max_spec_factor`) and the least probability of a token. This replays all families with
several of them, as chains and with its tree speculation, and takes for each token cost the one
with the best geometric mean. Drafts and matches have at most 64 tokens. The engine's own runs come
from files that `fastdraft replay --json` wrote.

    python bench/best_arctic.py --data FOLDER --json FILE \\
        --beside bench/results/replay.json bench/results/replay_trees_64.json
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import baselines
import harness
from fastdraft.replay import FamilyResult, Record, replay_family
from fastdraft.replay.peers import ArcticSuffix
from harness import Row
from plots import read_speeds

TOKEN_COSTS = (0.0, 0.02, 0.05, 0.2)
LONGEST = 64
DEPTH = 64
FACTORS, PROBABILITIES = (4.0, 2.0, 1.0), (0.1, 0.3)
NODES = 64  # of a tree
OURS = "fastdraft"  # the engine's name in files of results

Speeds = dict[str, float]
"""By family."""


class Setting(NamedTuple):
    """Of Arctic."""

    nodes: int | None  # of a tree; None: chains
    factor: float
    probability: float


CHAINS = [Setting(None, factor, least) for least in PROBABILITIES for factor in FACTORS]
TREES = [Setting(NODES, *each) for each in ((4.0, 0.1), (2.0, 0.1), (1.0, 0.3))]


def replay_all(setting: Setting, families: dict[str, list[Record]]) -> dict[str, FamilyResult]:
    class Arctic(ArcticSuffix):
        FACTOR = setting.factor
        DEPTH = DEPTH
        MIN_PROBABILITY = setting.probability
        TREE = setting.nodes is not None

    found = {}
    for name, records in families.items():
        most = max(len(each.prompt_ids) + len(each.output_ids) for each in records)
        found[name] = replay_family(Arctic(setting.nodes or LONGEST, most), records)
    return found


def own_speeds(files: Sequence[Path]) -> dict[tuple[str, float], Speeds]:
    """The engine's runs by name and token cost."""
    return {
        (run.name, run.token_cost): run.families
        for file in files
        for run in read_speeds(file)
        if run.name.startswith(OURS)
    }


def compare(
    found: dict[Setting, dict[str, FamilyResult]], own: dict[tuple[str, float], Speeds]
) -> list[Row]:
    """For each form and token cost Arctic's best setting, and in how many families it is ahead of
    the engine."""
    rows: list[Row] = []
    for title, settings in (("chains", CHAINS), ("trees", TREES)):
        for cost in TOKEN_COSTS:
            speeds = {
                setting: {name: each.speed(cost) for name, each in found[setting].items()}
                for setting in settings
            }
            best = max(settings, key=lambda each: geometric_mean(speeds[each].values()))
            theirs = speeds[best]
            row = {
                "Arctic": title,
                "token cost": cost,
                "geometric mean": geometric_mean(theirs.values()),
                "worst": min(theirs.values()),
                **best._asdict(),
            }
            # Against trees of as many tokens.
            title_of_ours = OURS if best.nodes is None else f"{OURS}, trees of {best.nodes}"
            if (ours := own.get((title_of_ours, cost))) is not None:
                parts = [theirs[name] / ours[name] for name in theirs]
                row |= {
                    "fastdraft": geometric_mean(ours.values()),
                    "ahead": sum(part > 1 for part in parts),
                    "most": max(parts),
                }
            rows.append(row)
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder of recorded requests")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], help="the engine's results")
    options = parser.parse_args()
    for reason in baselines.ensure():
        print(reason)
    about = harness.about()
    families = harness.recorded_families(options.data)
    settings = [*CHAINS, *TREES]
    found = {}
    with ProcessPoolExecutor() as pool:
        done = pool.map(partial(replay_all, families=families), settings)
        for setting, results in zip(settings, done, strict=True):
            found[setting] = results
            print(setting, flush=True)
    rows = compare(found, own_speeds(options.beside))
    harness.show("Modelled speed", None, rows, digits=3)
    runs: list[Row] = []
    for setting, results in found.items():
        stats = {name: each.stats for name, each in results.items()}
        counts = {name: [s.emitted, s.steps, s.drafted] for name, s in stats.items()}
        runs.append({**setting._asdict(), "families": counts})
    harness.finish(options, {**about, "best": rows, "runs": runs})


if __name__ == "__main__":
    main()
