"""Answers to benchmarks that people know: mean accepted tokens and speed, by task.

Spec-Bench (Xia et al., 2024, https://github.com/hemingkx/Spec-Bench) reports "#MAT", the tokens a
target step emits on average over all steps of a task, and the ratio of the mean tokens a second.

    export PYTHONPATH=$(python bench/baselines.py)    # the peers
    python bench/spec_bench.py [--json FILE] recorded --data FOLDER
    python bench/spec_bench.py [--json FILE] tasks --data FOLDER
    python bench/spec_bench.py [--json FILE] live --questions question.jsonl [--answers FOLDER]

`recorded` replays answers of Spec-Bench's model, records whose `task` begins with `mt_bench/` or
`spec_bench/`; `tasks` those to HumanEval, GSM8K and others. #MAT is exact for this tokenizer; speed
is modelled, emitted / (steps + token_cost * drafted). Intervals are 95 %, by bootstrap over
answers. "With memory": an answer drafts from the task's earlier ones. `live` decodes Spec-Bench's
question file with a real model, and writes the answers in Spec-Bench's format.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import harness
from fastdraft import DraftConfig, DraftStats, Engine
from fastdraft.replay import PEERS, Record, Setting, Unavailable, settings_of, trace_request
from fastdraft.replay.display import progress
from fastdraft.replay.records import RecordError, family_files, parse_lines, read_family
from fastdraft.replay.tokenizer import TextTokenizer
from harness import Row

# The categories of MT-bench's questions, which Spec-Bench counts as one task.
MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
)
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
TOKEN_COSTS = (0.003, 0.02)
LOOKAHEAD = 16
RESAMPLES = 1000

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


def interval(answers: Sequence[DraftStats], resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % interval of the mean accepted tokens, by bootstrap over the answers."""
    counts = np.array([(each.emitted, each.steps) for each in answers], np.float64)
    drawn = np.random.default_rng(0).integers(len(counts), size=(resamples, len(counts)))
    emitted, steps = counts[drawn].sum(axis=1).T
    low, high = np.percentile(emitted / np.maximum(steps, 1), [2.5, 97.5])
    return float(low), float(high)


def recorded_tasks(options: argparse.Namespace) -> dict[str, list[Record]]:
    """The recorded answers by task, in their order. Raises RecordError where there are none."""
    from fastdraft.demo import ensure_model

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
    """What drafts, by name."""
    for peer, kind in PEERS.items():
        yield kind.title, settings_of(peer, token_costs=[token_cost], lookahead=LOOKAHEAD)[0]
    for budget in (None, 32, 80):
        for memory in (False, True):
            name = "chains" if budget is None else f"trees of {budget}"
            setting = settings_of(
                token_costs=[token_cost], lookahead=LOOKAHEAD, tree_budget=budget, memory=memory
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


class Counting:
    """An engine that notes how many tokens each step emits, for one request at a time."""

    weighs_cost = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.add_request = engine.add_request
        self.propose_batch = engine.propose_batch
        self.finish = engine.finish
        self.cancel = engine.cancel
        self.lengths: list[int] = []

    def observe_batch(self, requests: Any, emitted_ids: Any, offsets: Any) -> None:
        self.lengths += np.diff(offsets).tolist()
        self._engine.observe_batch(requests, emitted_ids, offsets)


def read_questions(path: Path) -> list[Row]:
    """Spec-Bench's questions: objects with question_id, category and turns.

    Raises:
        RecordError: A line is no question, or its category is not one of Spec-Bench's.
    """
    questions = []
    for line in parse_lines(path):
        question = line.value
        turns = question.get("turns")
        if "question_id" not in question or not isinstance(turns, list) or not turns:
            raise RecordError(f"{line.place}: a question needs question_id, category and turns")
        if task_of(str(question.get("category"))) is None:
            raise RecordError(
                f"{line.place}: category must be one of {', '.join((*TASKS[1:], *MT_BENCH))}, "
                f"got {question.get('category')!r}"
            )
        questions.append(question)
    return questions


def answer(target: Any, drafter: Counting | None, question: Row, max_new_tokens: int) -> Row:
    """One question's answers, in Spec-Bench's format; the second turn sees the first."""
    from fastdraft import hf
    from fastdraft.demo.measure import greedy_options

    choice: Row = {"index": 0, "turns": []}
    for name in ("decoding_steps", "new_tokens", "wall_time", "accept_lengths"):
        choice[name] = []
    said: list[str] = []
    for turn in question["turns"]:
        inputs = target.encode(turn, before=said, max_new_tokens=max_new_tokens)
        options = {
            **greedy_options(target.model),
            **inputs,
            "max_new_tokens": max_new_tokens,
        }
        started = time.perf_counter()
        if drafter is None:
            sequences = target.model.generate(**options)
        else:
            drafter.lengths = []
            sequences = hf.generate(target.model, **options, drafter=drafter).sequences
        took = time.perf_counter() - started
        new = sequences[0, inputs["input_ids"].shape[1] :].tolist()
        text = target.decode(new)
        lengths = [1] * len(new) if drafter is None else drafter.lengths
        choice["turns"].append(text)
        choice["decoding_steps"].append(len(lengths))
        choice["new_tokens"].append(len(new))
        choice["wall_time"].append(took)
        choice["accept_lengths"] += lengths
        said += [turn, text]
    return choice


def live(options: argparse.Namespace) -> Row:
    from fastdraft.demo import load_target

    questions = read_questions(options.questions)[: options.limit]
    target = load_target(options.model, device=None, dtype="float32", threads=None, raw=False)
    about = harness.about(model=target.name, questions=len(questions))
    drafters: dict[str, Counting | None] = {
        "plain": None,
        "fastdraft": Counting(Engine(DraftConfig(lookahead=LOOKAHEAD))),
        "fastdraft-tree": Counting(Engine(DraftConfig(lookahead=LOOKAHEAD, tree_budget=32))),
    }
    answers: dict[str, list[Row]] = {name: [] for name in drafters}
    with progress(len(questions)) as advance:
        for question in questions:
            for name, drafter in drafters.items():
                found = answer(target, drafter, question, options.max_new_tokens)
                answers[name].append(
                    {
                        "question_id": question["question_id"],
                        "category": question["category"],
                        "model_id": f"{target.name}-{name}",
                        "choices": [found],
                        "tstamp": time.time(),
                    }
                )
            advance("questions", 1)
    if options.answers is not None:
        options.answers.mkdir(parents=True, exist_ok=True)
        for name, lines in answers.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (options.answers / f"{name}.jsonl").write_text(text)
    rows = [{"drafter": name, **evaluate(each, answers["plain"])} for name, each in answers.items()]
    for kind, title in (("mat", "mean accepted tokens"), ("speed", "tokens a second, times plain")):
        columns = {task: (task, kind) for task in rows[0] if task != "drafter"}
        harness.show(title, {"drafter": "drafter", **columns}, rows)
    return {**about, "rows": rows}


def evaluate(answers: Sequence[Row], plain: Sequence[Row]) -> Row:
    """By task and overall: #MAT, and the mean tokens a second relative to plain's."""

    def rate(line: Row) -> float:
        choice = line["choices"][0]
        return float(sum(choice["new_tokens"]) / sum(choice["wall_time"]))

    found: Row = {}
    for task in (*TASKS, "overall"):
        chosen = [
            (ours, theirs)
            for ours, theirs in zip(answers, plain, strict=True)
            if task in ("overall", task_of(ours["category"]))
        ]
        if chosen:
            lengths = [n for ours, _ in chosen for n in ours["choices"][0]["accept_lengths"]]
            speed = sum(rate(ours) for ours, _ in chosen) / sum(rate(each) for _, each in chosen)
            found[task] = {"mat": float(np.mean(lengths)), "speed": speed}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parts = parser.add_subparsers(required=True)
    for name, known in (("recorded", False), ("tasks", True)):
        part = parts.add_parser(name, help="replay recorded answers")
        part.add_argument("--data", type=Path, required=True, metavar="FOLDER")
        part.add_argument("--token-cost", type=float, nargs="+", default=TOKEN_COSTS)
        part.add_argument("--model", default="vicuna-7b", help="whose answers to Spec-Bench")
        part.set_defaults(run=recorded, known=known)
    of_live = parts.add_parser("live", help="decode the questions with a model")
    of_live.add_argument("--questions", type=Path, required=True, metavar="FILE")
    of_live.add_argument("--model", help="a folder or a name on the hub; the demo model by default")
    of_live.add_argument("--answers", type=Path, metavar="FOLDER", help="write the answers there")
    of_live.add_argument("--max-new-tokens", type=int, default=1024)
    of_live.add_argument("--limit", type=int, help="how many questions, the first ones")
    of_live.set_defaults(run=live)
    options = parser.parse_args(arguments)
    harness.finish(options, options.run(options))


if __name__ == "__main__":
    main()
