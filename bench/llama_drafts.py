"""Tokens per second of llama-cpp-python: plain, with its own prompt lookup, with fastdraft.

python bench/llama_drafts.py MODEL.gguf [--threads N] [--max-tokens N] [--rounds N]

Greedy. All three decode the same prompts, in turn, so that a busy machine slows them alike; one
Llama each, kept from prompt to prompt. The first token, which takes the prompt's forward, is not
timed. CPU seconds are those of the process: with one thread they tell what a machine that has
nothing else to do would take.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import harness
from fastdraft.integrations.llama_cpp import FastdraftDraftModel

FILE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""
PROMPTS = {
    "copy": f"Repeat this file, with type hints:\n\n{FILE}\nThe file again:\n\nclass Stack:\n",
    "list": "Days and their numbers.\nMonday: day number 1\nTuesday: day number 2\nWednesday:",
    "story": "It was a dark night, and the old fisherman had not slept. He",
}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = harness.about()

    made = {}
    for name in ("plain", "prompt lookup", "fastdraft"):
        made[name] = Llama(
            options.model,
            n_ctx=1024,
            n_batch=1024,
            n_threads=options.threads,
            n_threads_batch=options.threads,
            verbose=False,
            draft_model=LlamaPromptLookupDecoding() if name == "prompt lookup" else None,
        )
    draft_model = FastdraftDraftModel(made["fastdraft"])

    rates: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for kind, text in PROMPTS.items():
            for name, llama in made.items():
                rates[kind, name].append(_rates(llama, text, options.max_tokens))
            print(kind, draft_model.latest_stats, flush=True)
    rows = []
    for (kind, name), measured in rates.items():
        wall, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
        rows.append({"prompt": kind, "drafts": name, "tokens/s": wall, "tokens/CPU s": cpu})
    harness.show("Medians of all rounds", None, rows)
    harness.finish(options, {**results, "rows": rows})


def _rates(llama: Llama, text: str, tokens: int) -> tuple[float, float]:
    """Tokens per second and per CPU second, from the first token on."""
    generation = llama.generate(llama.tokenize(text.encode()), temp=0.0)
    next(generation)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(tokens):
        next(generation)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    generation.close()
    return tokens / wall, tokens / cpu


if __name__ == "__main__":
    main()
