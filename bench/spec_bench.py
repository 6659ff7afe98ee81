"""Answers to benchmarks that people know: mean accepted tokens and speed, by task.

Spec-Bench (Xia et al., 2024, https://github.com/hemingkx/Spec-Bench) reports "#MAT", the tokens a
target step emits on average over all steps of a task, and the ratio of the mean tokens a second.

    export PYTHONPATH=$(python bench/baselines.py)    # the peers
    python bench/spec_bench.py [--json FILE] recorded --data FOLDER
    python bench/spec_bench.py [--json FILE] tasks --data FOLDER

`recorded` replays answers of Spec-Bench's model, records whose `task` begins with `mt_bench/` or
`spec_bench/`; `tasks` those to HumanEval, GSM8K and others. #MAT is exact for this tokenizer; speed
is modelled, emitted / (steps + token_cost * drafted). Intervals are 95 %, by bootstrap over
answers. "With memory": an answer drafts from the task's earlier ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

import harness
from fastdraft import DraftStats
from fastdraft.demo import ensure_model
from fastdraft.replay import PEERS, Record, Setting, Unavailable, settings_of, trace_request
from fastdraft.replay.lines import RecordError, family_files, parse_lines
from fastdraft.replay.records import read_family
from fastdraft.replay.tokenizer import TextTokenizer
from harness import Row

# The categories of MT-bench's questions, which Spec-Bench counts as one task.
MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
)
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
TOKEN_COSTS = (0.003, 0.02)

KNOWN = {
    "HumanEval": ("humaneval-python",),
    "HumanEval in Rust": ("humaneval-rust",),
    "MBPP": ("mbpp-python",),
    "GSM8K": ("gsm8k",),
    "MATH, several samples": ("math_cot",),
    "BIG-Bench Hard": ("bbh/",),
    "function calls": ("pydantic_ai_cassette/tool_call",),
    "tau-bench, airline": ("tau_bench_airline",),
    "InterCode SQL": ("intercode_sql",),
    "SWE agents": ("swe_agent/", "openhands_multi_swe_bench"),
    "HotpotQA": ("hotpotqa",),
    "Arena-Hard": ("arena_hard",),
    "WMT23": ("wmt23",),
}
"""Other benchmarks, by how a record's `task` begins."""


def task_of(category: str) -> str | None:
    """Spec-Bench's task of a question's category or of a record's `task`; None for another's."""
    name = category.removeprefix("spec_bench/")
    if category.startswith("mt_bench/") or name in MT_BENCH:
        return "mt_bench"
    return name if name in TASKS else None


def known_task(task: str) -> str | None:
    """The benchmark of `KNOWN` with the longest beginning of a record's `task`."""
    found = [
        (len(each), name)
        for name, beginnings in KNOWN.items()
        for each in beginnings
        if task.startswith(each)
    ]
    return max(found)[1] if found else None


def interval(answers: Sequence[DraftStats]) -> tuple[float, float]:
    """The 95 % interval of the mean accepted tokens, by bootstrap over the answers."""
    counts = np.array([(each.emitted, each.steps) for each in answers], np.float64)
    emitted, steps = harness.resampled(counts).T
    low, high = np.percentile(emitted / np.maximum(steps, 1), [2.5, 97.5])
    return float(low), float(high)


def recorded_tasks(options: argparse.Namespace) -> dict[str, list[Record]]:
    """The recorded answers by task, in their order. Raises RecordError where there are none."""

    def name_of(record: Row) -> str | None:
        task = str(record.get("task", ""))
        if options.known:
            return known_task(task)
        ours = str(record.get("model", "")).startswith(options.model)
        return task_of(task) if ours else None

    encode = TextTokenizer(ensure_model).encode
    found: dict[str, list[Record]] = {}
    for file in family_files([options.data]).values():
        names = [name_of(line.value) for line in parse_lines(file)]
        for name, record in (
            zip(names, read_family(file, encode), strict=True) if any(names) else ()
        ):
            if name is not None:
                found.setdefault(name, []).append(record)
    if not found:
        what = (
            f"one of {', '.join(KNOWN)}"
            if options.known
            else f"Spec-Bench's questions by {options.model}"
        )
        raise RecordError(f"{options.data} must hold answers to {what}, and holds none")
    return {name: found[name] for name in (KNOWN if options.known else TASKS) if name in found}


def ways(token_cost: float) -> Iterator[tuple[str, Setting]]:
    """All drafters by name; fastdraft's has the common n-grams, as in `fastdraft replay`."""
    ngrams = TextTokenizer(ensure_model).common_ngrams()
    for peer, kind in PEERS.items():
        yield kind.title, settings_of(peer, token_costs=[token_cost])[0]
    for budget in (None, 32, 80):
        for memory in (False, True):
            name = "chains" if budget is None else f"trees of {budget}"
            setting = settings_of(
                token_costs=[token_cost], tree_budget=budget, memory=memory, ngrams=ngrams
            )[0]
            yield f"fastdraft, {name}{', with memory' if memory else ''}", setting


def replay_task(setting: Setting, records: Sequence[Record]) -> list[DraftStats]:
    """What drafts did for each answer of a task, in order. Raises Unavailable."""
    peer = setting.start(records)
    return [trace_request(peer, record).stats for record in records]


def recorded(options: argparse.Namespace) -> Row:
    tasks = recorded_tasks(options)
    about = harness.about(answers={task: len(records) for task, records in tasks.items()})
    rows: list[Row] = []
    missing: set[str] = set()
    for cost in options.token_cost:
        for name, setting in ways(cost):
            try:
                answers = {task: replay_task(setting, each) for task, each in tasks.items()}
            except Unavailable as error:
                if name not in missing:
                    print(f"left out: {error}", flush=True)
                missing.add(name)
                continue
            rows.append({"drafter": name, "token_cost": cost, **summary(answers, cost)})
        for kind, title in (("mat", "mean accepted tokens"), ("speed", "modelled speed")):
            columns = {task: (task, kind) for task in (*tasks, "overall")}
            harness.show(
                f"{title} at token cost {cost:g}",
                {"drafter": "drafter", **columns},
                [row for row in rows if row["token_cost"] == cost],
            )
    return {**about, "rows": rows}


def summary(answers: Mapping[str, Sequence[DraftStats]], token_cost: float) -> Row:
    """#MAT, its interval and modelled speed, by task and overall."""
    found: Row = {}
    everything = {**answers, "overall": [each for task in answers.values() for each in task]}
    for task, each in everything.items():
        counts = sum(each, DraftStats())
        seconds = counts.steps + token_cost * counts.drafted
        found[task] = {
            "mat": counts.mean_accepted_tokens,
            "interval": list(interval(each)),
            "speed": counts.emitted / seconds if seconds else 1.0,
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parts = parser.add_subparsers(required=True)
    for name, known in (("recorded", False), ("tasks", True)):
        part = parts.add_parser(name, help="replay recorded answers")
        part.add_argument("--data", type=Path, required=True, metavar="FOLDER")
        part.add_argument("--token-cost", type=float, nargs="+", default=TOKEN_COSTS)
        part.add_argument("--model", default="vicuna-7b", help="whose answers to Spec-Bench")
        part.set_defaults(known=known)
    options = parser.parse_args(arguments)
    harness.finish(options, recorded(options))


if __name__ == "__main__":
    main()
