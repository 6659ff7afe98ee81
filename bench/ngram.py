"""The n-gram autocomplete's experiment: time per token relative to decoding without drafts.

J. Kim, K. Kim and A. Oh, Autocomplete Algorithm for Language Models, 2024, tables 1 and 2: web
question answering, summaries, grammar correction and plain prompts, with free answers (experiment
1) and with an instruction that limits their length (experiment 2). 100 is plain decoding; less is
faster. Beside the n-gram drafter stands the default drafter, on the same requests.

- Modelled (`--data`): recorded requests of the same kinds are replayed, so the counts are exact:
  (steps + token cost * drafted) / emitted. A length limit is modelled by cutting every output.
- Measured (`--measure`): the demo model answers a few requests of each kind with `hf.generate`,
  greedily. Every answer is timed in each mode in turn, `--repeats` times over; the least time of
  each counts, since other processes only ever add some.

    python bench/ngram.py --data FOLDER --measure --json bench/results/ngram.json

Where this differs from the paper: it measured five models of 7 to 47 billion parameters on a GPU,
100 prompts a task, by sampling; it tells neither the order of its n-gram model nor its threshold,
here 4 and 0.3; and after a draft that was accepted whole its algorithm emits no further token in
that forward, where `hf.generate` does. The recorded outputs are other models', those of grammar
correction people's, and mtbench's second turns can copy from the first. The measured model has 135
million parameters and runs on a CPU, where a forward over several tokens costs much more than one
over a single token: the hardest place for a drafter that does not ask what its drafts cost.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastdraft import DraftConfig, DraftStats, Engine
from fastdraft.demo import ensure_model
from index import machine
from predicted_outputs import decode, read_families

TOKEN_COSTS = (0.02, 0.05, 0.2)
LIMIT = 32  # tokens: a sentence
ONE_SENTENCE = " Answer in one sentence."
MODES = ("ngram", "default")
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

_ISLAND = """\
The ferry to Brenna Island leaves from the north quay every forty minutes between six in the \
morning and ten at night. The crossing takes twenty-five minutes when the sea is calm and is \
cancelled when the wind is stronger than eight on the Beaufort scale. The island has about four \
hundred inhabitants, a school with two classrooms, and a weather station that has recorded the \
temperature of the sea every day since 1921. Cars are not allowed on the island, except for the \
doctor's and the fire brigade's. Visitors may rent a bicycle at the landing stage for twelve \
crowns a day."""

_BRIDGE = """\
The council of Aldermoor decided on Monday evening to close the old stone bridge over the river \
Wen to lorries from the first of March. Engineers had found cracks in two of its five arches \
after the floods of last autumn. The repair will take eleven months and cost about three million \
crowns, of which the province pays one half. Until then lorries must take the road by Harrow \
Mill, which is nine kilometres longer. Shopkeepers in the old town fear that deliveries will \
come late, and the mayor, Ines Carlow, promised them a car park for small vans at the station."""

_LETTER = """\
Dear Mrs. Okafor, thank you for you're letter of the third of May. We is sorry to hear that the \
washing machine have stopped again after only two week. A technician will visits you on Thursday \
morning between eight and eleven oclock and bring a new pump with him. If this time do not suit \
you, please calls us on the number at the bottom of this letter. Of course you has not to pay \
anything for the repair."""

_TRIP = """\
Yesterday our class have visited the museum of glass in the old harbour. First we was shown how \
the glass is melted in a oven that is more hotter than a volcano. Than a woman blew a vase in \
less then five minutes, and two of us was allowed to try it to. The most nicest thing were the \
ship that is made from blue glass and weighs more than a hundred kilo. In the evening we was all \
very tired but nobody want to go home."""


@dataclass(frozen=True)
class Prompt:
    """One request of a task of the paper."""

    task: str
    text: str


PROMPTS = [
    Prompt("web", f"Search result:\n{_ISLAND}\n\nHow can one get to Brenna Island and around it?"),
    Prompt("web", f"Search result:\n{_BRIDGE}\n\nWhy may no lorry use the bridge in Aldermoor?"),
    Prompt("summary", f"{_ISLAND}\n\nSummarize this article."),
    Prompt("summary", f"{_BRIDGE}\n\nSummarize this article."),
    Prompt("grammar", f"Correct the grammar of this text.\n\n{_LETTER}"),
    Prompt("grammar", f"Correct the grammar of this text.\n\n{_TRIP}"),
    Prompt("plain", "Explain why the sky is blue and sunsets are red."),
    Prompt("plain", "Act as a travel guide. I like mountains, trains and good bread."),
]

Row = dict[str, Any]


def configuration(mode: str, token_cost: float = 0.02) -> DraftConfig:
    return DraftConfig.ngram() if mode == "ngram" else DraftConfig(token_cost=token_cost)


def modelled(folder: Path) -> list[Row]:
    """Relative time per token of the recorded requests, by family, limit and token cost."""
    families = read_families(folder)
    missing = FAMILIES.keys() - families.keys()
    if missing:
        raise SystemExit(f"--data must hold {', '.join(sorted(missing))} as *.jsonl, got {folder}")
    rows: list[Row] = []
    for experiment in ("free", "limited"):
        for name, task in FAMILIES.items():
            row: Row = {"experiment": experiment, "family": name, "task": task}
            for mode in MODES:
                for cost in TOKEN_COSTS:
                    engine, total = Engine(configuration(mode, cost)), DraftStats()
                    for record in families[name]:
                        output = record.output_ids.tolist()
                        if experiment == "limited":
                            output = output[:LIMIT]
                        # The first token comes with prefill.
                        prompt = [*record.prompt_ids.tolist(), *output[:1]]
                        total += decode(engine, prompt, [], output[1:])
                    relative = (total.steps + cost * total.drafted) / total.emitted
                    row[f"{mode} {cost}"] = {"relative": 100 * relative, **asdict(total)}
            rows.append(row)
    return rows


def measured(repeats: int, new_tokens: int) -> list[Row]:
    """Relative time per token of the demo model's answers, by task and limit."""
    import torch
    import transformers

    from fastdraft import hf

    path = ensure_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    drafters = {mode: Engine(configuration(mode)) for mode in MODES}

    def answer(inputs: Any, mode: str) -> tuple[float, list[int], DraftStats | None]:
        options = {
            **inputs,
            "max_new_tokens": new_tokens,
            "do_sample": False,
            "repetition_penalty": 1.0,
            "pad_token_id": tokenizer.eos_token_id,
        }
        began = time.perf_counter()
        if mode == "without":
            sequences, stats = model.generate(**options), None
        else:
            output = hf.generate(model, drafter=drafters[mode], **options)
            sequences, stats = output.sequences, output.stats
        seconds = time.perf_counter() - began
        return seconds, sequences[0, inputs["input_ids"].shape[1] :].tolist(), stats

    rows: list[Row] = []
    with torch.inference_mode():
        for experiment in ("free", "limited"):
            for prompt in PROMPTS:
                text = prompt.text + (ONE_SENTENCE if experiment == "limited" else "")
                inputs = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    add_generation_prompt=True,
                    return_tensors="pt",
                    return_dict=True,
                )
                if not rows:  # what runs first also sets up memory and kernels
                    for mode in ("without", *MODES):
                        answer(inputs, mode)
                least: dict[str, float] = {}
                emitted: dict[str, list[int]] = {}
                stats: dict[str, DraftStats | None] = {}
                for _ in range(repeats):
                    for mode in ("without", *MODES):
                        seconds, emitted[mode], stats[mode] = answer(inputs, mode)
                        least[mode] = min(seconds, least.get(mode, seconds))
                per_token = {mode: least[mode] / len(emitted[mode]) for mode in least}
                row: Row = {"experiment": experiment, "task": prompt.task, "text": text}
                row["without"] = {"seconds": least["without"], "tokens": len(emitted["without"])}
                for mode in MODES:
                    row[mode] = {
                        "relative": 100 * per_token[mode] / per_token["without"],
                        "seconds": least[mode],
                        "tokens": len(emitted[mode]),
                        "equal": emitted[mode] == emitted["without"],
                        "stats": asdict(stats[mode] or DraftStats()),
                    }
                rows.append(row)
                print(
                    f"{experiment:10}{prompt.task:10}{row['without']['tokens']:6} tokens"
                    + "".join(f"{row[mode]['relative']:12.1f}" for mode in MODES),
                    flush=True,
                )
    return rows


def tasks_of(rows: list[Row], experiment: str) -> dict[str, dict[str, float]]:
    """The time of all of a task's answers in each mode, relative to that without drafts."""
    tasks: dict[str, dict[str, float]] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if (row["task"], row["experiment"]) == (task, experiment)]
        without = sum(row["without"]["seconds"] / row["without"]["tokens"] for row in own)
        tasks[task] = {
            mode: 100 * sum(row[mode]["seconds"] / row[mode]["tokens"] for row in own) / without
            for mode in MODES
        }
    return tasks


def report(results: Row) -> None:
    print("\nTime per token, plain decoding = 100")
    for experiment, models in PAPER.items():
        print(
            f"\n{'paper, ' + experiment:34}{'web':>10}{'summary':>10}{'grammar':>10}{'plain':>10}"
        )
        for name, cells in models.items():
            values = [f"{cells[task]:10.1f}" if task in cells else f"{'':10}" for task in TASKS]
            print(f"{name:34}" + "".join(values))
        if results["measured"]:
            tasks = tasks_of(results["measured"], experiment)
            for mode in MODES:
                print(
                    f"{'measured, ' + mode:34}"
                    + "".join(f"{tasks[task][mode]:10.1f}" for task in TASKS)
                )
    if results["modelled"]:
        columns = [f"{mode} {cost}" for mode in MODES for cost in TOKEN_COSTS]
        print(f"\n{'modelled, drafter and token cost':34}" + "".join(f"{c:>14}" for c in columns))
        for row in results["modelled"]:
            label = f"{row['experiment']}, {row['task']}: {row['family']}"
            print(f"{label:34}" + "".join(f"{row[c]['relative']:14.1f}" for c in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="recorded requests to replay")
    parser.add_argument("--measure", action="store_true", help="time the demo model too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    if options.data is None and not options.measure:
        parser.error("give --data, --measure or both")

    results: Row = {"machine": machine(), "paper": PAPER}
    for key, value in results["machine"].items():
        print(f"{key:8} {value}")
    results["modelled"] = [] if options.data is None else modelled(options.data)
    results["measured"] = measured(options.repeats, options.new_tokens) if options.measure else []
    report(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
