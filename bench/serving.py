"""vLLM with each of its CPU drafters: plain, n-gram proposer, Arctic's suffix decoding, fastdraft.

    python bench/serving.py replay --data FOLDER --json bench/results/serving_replay.json
    python bench/serving.py live --data FOLDER --json bench/results/serving_live.json

Runs in vLLM's environment, with fastdraft installed there. `--model` is the target's folder; its
tokenizer cuts the recorded requests. `replay` takes the recorded outputs for what the target says
(serving_replay.py): exact target steps on every family, and the time that proposers take. `live`
decodes with the model, in one vLLM engine for each drafter (serving_live.py).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdraft.replay.records import Record, family_files, read_family
from index import machine

# "told" is fastdraft that is told the step cost; it is measured where it is not.
DRAFTERS = {
    "replay": ("ngram", "suffix", "fastdraft", "told"),
    "live": ("plain", "ngram", "suffix", "fastdraft"),
}


def read_jobs(options: argparse.Namespace) -> dict[str, list[tuple[Record, str | None]]]:
    """The recorded requests by family, each with its session, if it has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def encode(texts: list[str]) -> list[Sequence[int]]:
        return list(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])

    jobs = {}
    for name, path in family_files([options.data]).items():
        if options.family and name not in options.family:
            continue
        records = read_family(path, encode, limit=options.limit)
        jobs[name] = [(record, record.session) for record in records if len(record.output_ids)]
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, drafters in DRAFTERS.items():
        command = modes.add_parser(mode)
        command.add_argument(
            "--model",
            default=os.environ.get("FASTDRAFT_DEMO_MODEL"),
            required="FASTDRAFT_DEMO_MODEL" not in os.environ,
            help="folder of the target; by default what FASTDRAFT_DEMO_MODEL names",
        )
        command.add_argument("--data", type=Path, required=True, help="recorded requests, *.jsonl")
        command.add_argument("--family", action="append", help="only these files, by name")
        command.add_argument("--limit", type=int, help="the first requests of each family only")
        command.add_argument("--drafters", nargs="+", choices=drafters, default=list(drafters))
        command.add_argument("--num-tokens", type=int, default=16, help="the longest draft")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    replay, live = modes.choices["replay"], modes.choices["live"]
    replay.add_argument("--rows", type=int, nargs="+", default=[16, 64], help="requests at once")
    replay.add_argument(
        "--token-cost",
        type=float,
        nargs="+",
        default=[0.0, 0.002],
        help="what a token adds to the modelled forward, as a fraction of one over no tokens",
    )
    replay.add_argument(
        "--processor-time", action="store_true", help="of the proposers, on a busy machine"
    )
    live.add_argument(
        "--rows", type=int, nargs="+", default=[1, 4, 16, 64], help="requests at once"
    )
    live.add_argument("--new-tokens", type=int, default=64, help="of each answer, at most")
    live.add_argument("--prompt-tokens", type=int, default=256, help="longer prompts are left out")
    live.add_argument("--least-requests", type=int, default=8, help="in a measurement")
    live.add_argument("--repeats", type=int, default=3, help="each with requests of its own")
    options = parser.parse_args()

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    about = machine()
    for key, value in about.items():
        print(f"{key:8} {value}")
    jobs = read_jobs(options)
    results: dict[str, Any] = {"machine": about}
    if options.mode == "replay":
        import serving_replay

        results |= serving_replay.measure(jobs, options)
        serving_replay.report(results)
    else:
        import serving_live

        results |= serving_live.measure(jobs, options)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
