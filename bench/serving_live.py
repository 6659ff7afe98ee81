"""Real decoding in vLLM, one engine for each drafter, each in a process of its own.

Engines take turns on the same requests, in a closed loop: so many requests run at once, and the
next one comes when one is answered. No request comes twice, since drafters that remember would know
its answer. Greedy, float32, eager, without the prefix cache, so every measurement has its prefills
in it.

A target step is a step in which a request emitted after its first token. First tokens are timed
from a request's arrival, later ones from one step of the request to the next, whose tokens come
together. Speeds relative to plain decoding are those of the same requests, by the clock and by the
processor time of the engine's process, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

import serving_replay
from fastdraft.replay import Record
from fastdraft.replay.run import p50_p99
from harness import Row, show
from serving_replay import SPECULATIVE

WARM_UP = 4  # requests
Prompt = list[int]


class Engine:
    """vLLM's engine in this process, with the time of its proposer."""

    def __init__(self, drafter: str, model: str, rows: int, num_tokens: int, room: int) -> None:
        self.proposals: list[tuple[int, int]] = []
        speculative = None
        if drafter in SPECULATIVE:
            speculative = {**SPECULATIVE[drafter], "num_speculative_tokens": num_tokens}
        self._engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                dtype="float32",
                enforce_eager=True,
                enable_prefix_caching=False,
                max_model_len=room,
                max_num_seqs=rows,
                seed=0,
                speculative_config=speculative,
            )
        )
        self._served = 0
        if speculative is not None:
            self._watch(drafter)

    def _watch(self, drafter: str) -> None:
        """Notes of each call of the proposer the rows that sampled, and nanoseconds."""
        kind: Any = serving_replay.proposer_class(drafter)
        propose = kind.propose
        # Where the list of what was sampled stands among the arguments.
        place = {"ngram": 1, "suffix": 2, "fastdraft": 0}[drafter]

        def timed(proposer: Any, *arguments: Any, **options: Any) -> Any:
            started = time.perf_counter_ns()
            drafts = propose(proposer, *arguments, **options)
            took = time.perf_counter_ns() - started
            self.proposals.append((sum(map(bool, arguments[place])), took))
            return drafts

        kind.propose = timed

    def run(self, prompts: Sequence[Prompt], rows: int, new_tokens: int) -> Row:
        """Answers the prompts, `rows` at a time, and tells what it took."""
        parameters = SamplingParams(temperature=0.0, max_tokens=new_tokens, detokenize=False)
        waiting = list(reversed(prompts))
        arrived: dict[str, float] = {}
        last: dict[str, float] = {}
        answers: dict[str, list[int]] = {}
        first: list[float] = []
        gaps: list[float] = []
        forwards = 0
        self.proposals.clear()
        processor = time.process_time()
        started = time.perf_counter()
        while waiting or arrived:
            while waiting and len(arrived) < rows:
                name = f"request-{self._served}"
                self._served += 1
                arrived[name] = time.perf_counter()
                answers[name] = []
                prompt = {"prompt_token_ids": waiting.pop()}
                self._engine.add_request(name, prompt, parameters)
            outputs = self._engine.step()
            now = time.perf_counter()
            forwards += 1
            for output in outputs:
                name, tokens = output.request_id, output.outputs[0].token_ids
                if len(tokens) > len(answers[name]):
                    if name in last:
                        gaps.append(now - last[name])
                    else:
                        first.append(now - arrived[name])
                    last[name] = now
                    answers[name] = list(tokens)
                if output.finished:
                    del arrived[name]
        seconds = time.perf_counter() - started
        processor = time.process_time() - processor
        emitted = sum(map(len, answers.values()))
        return {
            "seconds": seconds,
            "processor_seconds": processor,
            "emitted": emitted,
            "tokens_per_second": emitted / seconds,
            "target_steps": len(gaps),
            "forwards": forwards,
            "first_token": first,
            "gaps": gaps,
            "proposals": [*self.proposals],
            "answers": [*answers.values()],
        }


def _serve(connection: Connection, arguments: tuple[Any, ...]) -> None:
    """A process's life: an engine, then runs until there is nothing more to do."""
    engine = Engine(*arguments)
    connection.send(None)
    while (order := connection.recv()) is not None:
        connection.send(engine.run(*order))


def measure(families: Mapping[str, Sequence[Record]], options: argparse.Namespace) -> Row:
    """Every drafter at every number of requests at once."""
    # The engine's core belongs in the process whose proposer is timed.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if "suffix" in options.drafters:
        serving_replay.ensure_suffix()
    every = _prompts(families, options)
    needed = WARM_UP + options.repeats * sum(max(n, options.least_requests) for n in options.rows)
    if len(every) < needed:
        raise SystemExit(
            f"{needed} requests are needed, and {len(every)} have at most {options.prompt_tokens} "
            "tokens; allow longer ones, or ask for fewer"
        )
    warm_up, prompts = every[:WARM_UP], iter(every[WARM_UP:])
    spawn = multiprocessing.get_context("spawn")
    engines: dict[str, Connection] = {}
    processes = []
    for drafter in options.drafters:
        ours, theirs = spawn.Pipe()
        room = options.prompt_tokens + options.new_tokens + options.num_tokens + 1
        arguments = (drafter, options.model, max(options.rows), options.num_tokens, room)
        process = spawn.Process(target=_serve, args=(theirs, arguments), daemon=True)
        process.start()
        theirs.close()
        # One at a time: an engine takes its KV cache by the memory that it finds.
        ours.recv()
        processes.append(process)
        engines[drafter] = ours

    def run(drafter: str, *order: Any) -> Row:
        engines[drafter].send(order)
        answer: Row = engines[drafter].recv()
        speed, steps = answer["tokens_per_second"], answer["target_steps"]
        print(f"... {drafter}: {speed:.1f} tokens/s, {steps} steps", file=sys.stderr, flush=True)
        return answer

    # The first forwards are not counted, but later ones learn from them.
    for drafter in options.drafters:
        run(drafter, warm_up, len(warm_up), 8)
    rows: list[Row] = []
    for count in options.rows:
        runs: dict[str, list[Row]] = {drafter: [] for drafter in options.drafters}
        for repeat in range(options.repeats):
            chosen = [next(prompts) for _ in range(max(count, options.least_requests))]
            first = repeat % len(runs)
            for drafter in options.drafters[first:] + options.drafters[:first]:
                runs[drafter].append(run(drafter, chosen, count, options.new_tokens))
        rows.append({"rows": count, **_summary(runs)})
        each = [{"drafter": name, **rows[-1][name]} for name in options.drafters]
        shown = ("drafter", "tokens_per_second", "tokens_per_step", "equal", "answers")
        timed = ("proposer_us", "proposer_share")
        show(f"{count} at once", {key: key for key in (*shown, *timed)}, each)
    for engine in engines.values():
        engine.send(None)
    for process in processes:
        process.join()
    return {"num_tokens": options.num_tokens, "rows": rows}


def _prompts(families: Mapping[str, Sequence[Record]], options: argparse.Namespace) -> list[Prompt]:
    """The prompts of all families in turn, as the model's chat template puts them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    columns = []
    for family, records in families.items():
        column = []
        for record in records:
            # The template adds some tokens, which the limit counts.
            if len(record.prompt_ids) > options.prompt_tokens:
                continue
            text: Any = tokenizer.decode(record.prompt_ids)
            chat = [{"role": "user", "content": text}]
            prompt: Any = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
            if len(prompt) <= options.prompt_tokens:
                column.append(list(prompt))
        print(f"{family:24} {len(column):4} prompts are short enough")
        columns.append(column)
    longest = max(map(len, columns))
    return [column[place] for place in range(longest) for column in columns if place < len(column)]


def _summary(runs: Mapping[str, Sequence[Row]]) -> Row:
    summary: Row = {}
    plain = runs.get("plain")
    for drafter, results in runs.items():
        steps = sum(r["target_steps"] for r in results)
        row: Row = {
            "tokens_per_second": statistics.median(r["tokens_per_second"] for r in results),
            "target_steps": steps,
            "tokens_per_step": sum(len(a) - 1 for r in results for a in r["answers"]) / steps,
            "forwards": sum(r["forwards"] for r in results),
            "first_token_ms": p50_p99([1000 * x for r in results for x in r["first_token"]]),
            "inter_token_ms": p50_p99([1000 * x for r in results for x in r["gaps"]]),
        }
        if plain is not None:
            pairs = list(zip(results, plain, strict=True))
            for key in ("seconds", "processor_seconds"):
                ratios = [
                    result["emitted"] / result[key] / (base["emitted"] / base[key])
                    for result, base in pairs
                ]
                row[f"relative_{key}"] = [statistics.median(ratios), min(ratios), max(ratios)]
            row["answers"] = sum(len(result["answers"]) for result in results)
            row["equal"] = sum(
                answer == expected
                for result, base in pairs
                for answer, expected in zip(result["answers"], base["answers"], strict=True)
            )
        if sampled_and_ns := [call for result in results for call in result["proposals"]]:
            sampled, took = np.array(sampled_and_ns).T
            row["proposer_us"] = float(took.sum() / sampled.sum() / 1000)
            row["proposer_share"] = float(took.sum() / 1e9 / sum(r["seconds"] for r in results))
        summary[drafter] = row
    return summary
