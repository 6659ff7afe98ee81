"""Tables 1 and 2 of the n-gram autocomplete: time per token where plain decoding takes 100.

J. Kim, K. Kim and A. Oh, Autocomplete Algorithm for Language Models, 2024. Table 1 has free
answers, table 2 answers that an instruction keeps short.

    python bench/reproduce/ngram_drafts.py --table 1
    python bench/reproduce/ngram_drafts.py --table 2 --target Llama-2-7b-chat-hf --data FOLDER

The paper's text speaks of a gain of about 15 % for Llama-2-7b in web browsing; its tables have 5.5
and 6.7 %. Beside its drafter stands the default one.
"""

from __future__ import annotations

from experiment import PLAIN, Experiment, Mode, options_of
from prompts import ONE_SENTENCE, PROMPTS

from fastdraft import DraftConfig
from harness import Row, show

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
    "web": ("rag_qa_web",),
    "summary": ("summarization",),
    "grammar": ("gec",),
    "plain": ("mtbench", "qa_closedbook"),
}

DIFFERENCES = """\
Set-up: the paper measured chat models from Llama-2-7b to Mixtral-8x7B by sampling, 100 prompts a
task (WebGPT's questions with search results, CNN articles, a grammar set, ChatGPT prompts), and
tells neither the machine, nor the order of its n-gram model, nor its threshold, here 4 and 0.3.
Here: the model and the machine printed below, greedy unless --temperature is given, the benchmark's
own prompts or, with --data, recorded ones of the same kinds (the grammar's are mostly Ukrainian); a
draft that is accepted whole brings a further token, in the paper it does not."""


def main() -> None:
    parser = options_of(__doc__, new_tokens=48)
    parser.add_argument("--table", type=int, required=True, choices=(1, 2))
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    options = parser.parse_args()
    paper = PAPER["free" if options.table == 1 else "limited"]
    tasks = [task for task in PROMPTS if any(task in cells for cells in paper.values())]

    experiment = Experiment(options)
    modes = [
        Mode(PLAIN),
        Mode("n-gram drafts", DraftConfig.ngram()),
        Mode("default drafts", DraftConfig()),
    ]
    prompts = experiment.prompts(
        {task: PROMPTS[task] for task in tasks},
        {task: FAMILIES[task] for task in tasks},
        ending=ONE_SENTENCE if options.table == 2 else "",
    )
    kinds = {task: (prompts[task], options.temperature) for task in tasks}
    measured = experiment.compare(modes, kinds)
    rows: list[Row] = [{"model": f"paper: {name}", **cells} for name, cells in paper.items()]
    for name in (mode.name for mode in modes[1:]):
        own = {row["kind"]: 100 / row[name]["speed"] for row in measured}
        rows.append({"model": f"here: {name}", **own})
    for name in (mode.name for mode in modes[1:]):
        steps = {row["kind"]: row[name]["tokens a step"] for row in measured}
        rows.append({"model": f"here: {name}, tokens a step", **steps})
    show(
        f"Table {options.table}: time per token, plain decoding = 100; {experiment.name}",
        {"": "model", **{task: task for task in tasks}},
        rows,
    )
    experiment.finish({"rows": rows, "measured": measured}, DIFFERENCES)


if __name__ == "__main__":
    main()
