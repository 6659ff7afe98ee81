"""The n-gram autocomplete's experiment: time per token relative to decoding without drafts.

J. Kim, K. Kim and A. Oh, Autocomplete Algorithm for Language Models, 2024, tables 1 and 2: web
question answering, summaries, grammar correction and plain prompts, with free answers (experiment
1) and with an instruction that limits their length (experiment 2). 100 is plain decoding; less is
faster. Beside the n-gram drafter stands the default drafter, on the same requests.

Recorded requests of the same kinds are replayed, so the counts are exact: (steps + token cost *
drafted) / emitted. A length limit is modelled by cutting every output. Times of a real model are
measured by bench/reproduce/ngram_drafts.py.

    python bench/ngram.py --data FOLDER --json bench/results/ngram.json

Where this differs from the paper: it measured five models of 7 to 47 billion parameters on a GPU,
100 prompts a task, by sampling; it states neither the order of its n-gram model nor its threshold,
here 4 and 0.3; and after a draft that was accepted whole its algorithm emits no further token in
that forward. The recorded outputs are other models', those of grammar correction people's, and
mtbench's second turns can copy from the first.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import harness
from fastdraft import DraftConfig, Engine
from fastdraft.replay import EnginePeer, Record, replay_family
from harness import Row

TOKEN_COSTS = (0.02, 0.05, 0.2)
LIMIT = 32  # tokens: a sentence
EXPERIMENTS = ("free", "limited")
TASKS = ("web", "summary", "grammar", "plain")

PAPER: dict[str, dict[str, dict[str, float]]] = {
    "free": {
        "Llama-2-7b": {"web": 94.53, "summary": 94.04, "grammar": 98.12, "plain": 107.49},
        "Llama-2-13b": {"web": 98.79, "summary": 96.32, "grammar": 95.83, "plain": 104.90},
        "Meta-Llama-3-8B": {"web": 111.08, "summary": 107.09, "grammar": 114.87, "plain": 116.00},
        "Mixtral-8x7B": {"web": 109.74, "summary": 99.79, "grammar": 110.90, "plain": 120.45},
        "Mistral-7B": {"web": 101.84, "summary": 98.41, "grammar": 105.74, "plain": 104.19},
    },
    "limited": {
        "Llama-2-7b": {"web": 93.31, "grammar": 87.86},
        "Llama-2-13b": {"web": 98.36, "grammar": 94.94},
        "Meta-Llama-3-8B": {"web": 102.49, "grammar": 118.42},
        "Mixtral-8x7B": {"web": 106.13, "grammar": 104.99},
    },
}

FAMILIES = {
    "rag_qa_web": "web",
    "summarization": "summary",
    "gec": "grammar",
    "mtbench": "plain",
    "qa_closedbook": "plain",
}


def replayed(records: list[Record], config: DraftConfig, token_cost: float) -> Row:
    """Relative time per token of a family, and what it is made of."""
    stats = replay_family(EnginePeer(Engine(config)), records).stats
    return {
        "relative": 100 * (stats.steps + token_cost * stats.drafted) / stats.emitted,
        "steps": stats.steps,
        "emitted": stats.emitted,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
    }


def modelled(folder: Path) -> list[Row]:
    """A row for each experiment and family, with each drafter at each token cost."""
    families = harness.recorded_families(folder, names=list(FAMILIES))
    rows: list[Row] = []
    for experiment in EXPERIMENTS:
        for family, task in FAMILIES.items():
            records = families[family]
            if experiment == "limited":
                records = [replace(each, output_ids=each.output_ids[:LIMIT]) for each in records]
            row: Row = {"experiment": experiment, "task": task, "family": family}
            for cost in TOKEN_COSTS:
                row[f"ngram {cost}"] = replayed(records, DraftConfig.ngram(), cost)
                row[f"default {cost}"] = replayed(records, DraftConfig(token_cost=cost), cost)
            rows.append(row)
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER", help="recorded requests to replay"
    )
    options = parser.parse_args()

    about = harness.about()
    rows = modelled(options.data)
    for experiment, models in PAPER.items():
        harness.show(
            f"{experiment} answers, the paper: time per token, plain decoding = 100",
            {"": "model", **{task: task for task in TASKS}},
            [{"model": model, **cells} for model, cells in models.items()],
        )
        columns = [f"{mode} {cost}" for mode in ("ngram", "default") for cost in TOKEN_COSTS]
        harness.show(
            "modelled, by drafter and token cost",
            {"task": "task", "family": "family"}
            | {column: (column, "relative") for column in columns},
            [row for row in rows if row["experiment"] == experiment],
        )
    harness.finish(options, {**about, "rows": rows})


if __name__ == "__main__":
    main()
