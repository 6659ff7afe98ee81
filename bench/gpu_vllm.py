"""What only a GPU shows of vLLM: recurrent models say the same with drafts, and who is fastest.

    python bench/gpu_vllm.py --model MODEL --recurrent MODEL --data FOLDER --json vllm.json

Runs in vLLM's environment, with fastdraft installed there. First the proof: greedy answers of a
model with recurrent layers are those without drafts, with `unproven_recurrent`. Then the table of
`serving.py`, whose options these are: Model Runner V2 with asynchronous scheduling beside vLLM's
`ngram_gpu` and suffix decoding, which runs on V1. What is done is written before more is begun.

With --rehearsal all runs in a tiny size on a CPU. fastdraft refuses recurrent layers there, so the
proof takes the model of the table: that shows whether the script works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import harness
import serving
from harness import Row

METHODS = ["plain", "ngram_gpu", "suffix", "fastdraft-v2"]
FIGURES = ("output_throughput", "tokens_per_step", "median_itl_ms", "p99_itl_ms")
# Rounding may choose either of two tokens whose log-probabilities are nearer: logits in bfloat16
# between 16 and 32 lie 0.125 apart.
NEAR_TIE = 0.25
PROOF: Row = {"method": "fastdraft", "unproven_recurrent": True}
LONGEST = 8  # of each draft in the proof: no clock shortens them
V2 = "1"
REHEARSED: Row = {
    "rows": [2], "runs": 1, "new_tokens": 12, "prompt_tokens": 512, "least_requests": 2,
    "warm_up": 2, "workloads": ["recorded"], "methods": ["plain", "fastdraft-v2"],
    "serve": "--dtype float32 --enforce-eager --kv-cache-memory-bytes 67108864",
}  # fmt: skip


class Answer(NamedTuple):
    """One of a server's.

    Attributes:
        token_ids: Its tokens.
        likely: The log-probabilities of the likeliest tokens at each; empty where nobody asked.
    """

    token_ids: list[int]
    likely: list[dict[int, float]]


def ask(
    server: serving.Server, prompts: Sequence[str], options: argparse.Namespace
) -> list[Answer]:
    """Greedy answers to prompts, all at once."""
    body: Row = {
        "model": options.recurrent, "prompt": list(prompts), "max_tokens": options.new_tokens,
        "temperature": 0, "logprobs": 2, "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        choices = sorted(json.load(answer)["choices"], key=lambda each: int(each["index"]))
    return [
        Answer(
            each["token_ids"],
            [
                {int(token.partition(":")[2]): value for token, value in at.items()}
                for at in each["logprobs"]["top_logprobs"]
            ],
        )
        for each in choices
    ]


def difference(expected: Answer, found: Answer) -> float:
    """By how much the expected token was likelier than the found one, where answers first differ;
    0 for equal ones, infinite where the found one was not among the likeliest."""
    pairs = zip(expected.token_ids, found.token_ids, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return 0.0 if len(expected.token_ids) == len(found.token_ids) else math.inf
    likely = expected.likely[at]
    return likely[expected.token_ids[at]] - likely.get(found.token_ids[at], -math.inf)


def compared(expected: Sequence[Answer], found: Sequence[Answer]) -> Row:
    """How many answers are equal, differ at a near tie, or are wrong."""
    gaps = [difference(*pair) for pair in zip(expected, found, strict=True)]
    near = sum(0 < gap < NEAR_TIE for gap in gaps)
    wrong = sum(gap >= NEAR_TIE for gap in gaps)
    return {"answers": len(gaps), "equal": len(gaps) - near - wrong, "near": near, "wrong": wrong}


def prove(prompts: Sequence[str], options: argparse.Namespace) -> Row:
    """Greedy answers with drafts beside those without: at once, one by one, and remembered.

    The control compares plain decoding at once with plain decoding one by one: what differs there
    the drafts have not changed.
    """
    given = argparse.Namespace(**{**vars(options), "model": options.recurrent})
    said: dict[str, list[Answer]] = {}
    accepted, drafter = 0.0, None
    with tempfile.TemporaryDirectory() as folder:
        lengths = [[1, max(given.rows), LONGEST]]
        drafting = {**PROOF, "num_speculative_tokens_per_batch_size": lengths}
        for name, speculative in (("plain", None), ("drafted", drafting)):
            with serving.serving((speculative, V2), Path(folder), given) as server:
                said[f"{name}, at once"] = ask(server, prompts, given)
                said[f"{name}, one by one"] = [
                    ask(server, [prompt], given)[0] for prompt in prompts[: options.one_by_one]
                ]
                said[f"{name}, remembered"] = ask(server, prompts, given)
                accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
                drafter = server.drafter()
    rows = [
        {"of": way, **compared(said[f"plain, {way}"], said[f"drafted, {way}"])}
        for way in ("at once", "one by one", "remembered")
    ]
    alone = said["plain, one by one"]
    rows.append({"of": "control", **compared(said["plain, at once"][: len(alone)], alone)})
    return {
        "model": options.recurrent,
        "drafter": drafter,
        "accepted": accepted,
        # Where no draft was accepted, nothing was shown.
        "correct": accepted > 0 and not any(row["wrong"] for row in rows[:-1]),
        "answers": rows,
    }


def narrow(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Row]:
    """The medians of `serving.measure`, one row for each method."""
    return [
        {
            "workload": row["workload"],
            "rows": row["rows"],
            "method": name,
            **{key: row[name][key][0] for key in FIGURES if key in row[name]},
            "of_plain": row[name]["output_throughput_of_plain"][0],
            "equal": row[name]["equal"],
            "answers": row[name]["answers"],
        }
        for row in rows
        for name in names
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = serving.parser(__doc__)
    add = parser.add_argument
    add("--recurrent", help="the proof's model, by vLLM's name for it; without it no proof")
    add("--one-by-one", type=int, default=16, help="answers of the proof that are asked for alone")
    add("--proof", type=int, default=64, help="answers of the proof")
    add("--rehearsal", action="store_true", help="a tiny size on the CPU")
    parser.set_defaults(methods=METHODS, runs=1)
    options = parser.parse_args(arguments)
    if options.rehearsal:
        vars(options).update(REHEARSED, recurrent=options.model, proof=4, one_by_one=2)
    elif not torch.cuda.is_available():
        sys.exit("this needs a CUDA device, or --rehearsal")
    elif options.data is None:
        parser.error("--data must name recorded requests, but for a rehearsal")
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # fastdraft says what drafts
    report = harness.about(correct=True)
    families = serving.families_of(options)
    if options.recurrent is not None:
        # The model's own tokenizer may cut a prompt into more tokens.
        short = {**vars(options), "prompt_tokens": options.prompt_tokens // 2}
        prompts = serving.prompts_of(families, argparse.Namespace(**short))["recorded"]
        report["proof"] = prove([*prompts][: options.proof], options)
        report["correct"] = report["proof"]["correct"]
        harness.finish(options, report)
    if "suffix" in options.methods:
        try:
            serving.ensure_suffix()
        except SystemExit as reason:
            report["left_out"] = str(reason)
            options.methods.remove("suffix")

    def keep(rows: list[Row]) -> None:
        report["table"] = narrow(rows, options.methods)
        harness.finish(options, report)

    report["drafters"] = serving.measure(families, options, keep)["drafters"]
    harness.finish(options, report)
    return int(not report["correct"])


if __name__ == "__main__":
    sys.exit(main())
