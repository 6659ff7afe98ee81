"""Benchmarks that people know, replayed from recorded answers of large models.

HumanEval, MBPP, GSM8K, function calls and others: records whose `task` begins as one of `TASKS`
does, as `fastdraft replay` reads them. Accepted tokens are exact for this tokenizer, speed is
modelled, and intervals are 95 %, by bootstrap over answers; see bench/spec_bench.py.

    export PYTHONPATH=$(python bench/baselines.py)    # the peers
    python bench/tasks.py --data FOLDER [--json FILE]
"""

from __future__ import annotations

from pathlib import Path

import harness
from fastdraft.replay import Record, Unavailable
from fastdraft.replay.records import RecordError
from harness import Row
from spec_bench import TOKEN_COSTS, records_by_task, replay_task, summary, ways

# How the records' field `task` begins.
TASKS = {
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


def recorded_tasks(folder: Path) -> dict[str, list[Record]]:
    """The records of each task, in their order. Raises RecordError where there are none."""
    records = records_by_task(folder, lambda record: _name(str(record.get("task", ""))))
    found = {name: records[name] for name in TASKS if name in records}
    if not found:
        raise RecordError(f"{folder} must hold answers to one of {', '.join(TASKS)}, got none")
    return found


def _name(task: str) -> str | None:
    # The longest beginning, since one may be that of another.
    matches = [
        (len(beginning), name)
        for name, beginnings in TASKS.items()
        for beginning in beginnings
        if task.startswith(beginning)
    ]
    return max(matches)[1] if matches else None


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    tasks = recorded_tasks(options.data)
    about = harness.about(answers={name: len(records) for name, records in tasks.items()})
    rows: list[Row] = []
    for cost in TOKEN_COSTS:
        for drafter, setting in ways(cost):
            try:
                answers = {task: replay_task(setting, each) for task, each in tasks.items()}
            except Unavailable:
                continue
            found = summary(answers, cost)
            rows += [
                {"task": task, "drafter": drafter, "token_cost": cost, **found[task]}
                for task in tasks
            ]
    for cost in TOKEN_COSTS:
        drafters = dict.fromkeys(row["drafter"] for row in rows)
        speeds = {(row["task"], row["drafter"], row["token_cost"]): row["speed"] for row in rows}
        harness.show(
            f"modelled speed at token cost {cost:g}",
            {"task": "task", **{name.replace(", ", "\n"): name for name in drafters}},
            [
                {"task": task, **{name: speeds[task, name, cost] for name in drafters}}
                for task in tasks
            ],
        )
    harness.finish(options, {**about, "rows": rows})


if __name__ == "__main__":
    main()
