"""vLLM with each way to draft: plain, its n-gram drafters, Arctic's suffix decoding, fastdraft.

    python bench/serving.py replay --data FOLDER --json bench/results/serving_replay.json
    python bench/serving.py live --data FOLDER --json bench/results/serving_live.json

Runs in vLLM's environment, with fastdraft installed there. `--model` is the target's folder; its
tokenizer cuts the recorded requests. `replay` takes the recorded outputs for what the target says
(serving_replay.py): exact target steps on every family, and the time that proposers take. `live`
starts a server for each method, and drives it with `vllm bench serve` (serving_live.py).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import harness
from fastdraft.replay import family_files, read_families
from fastdraft.replay.tokenizer import TextTokenizer


def main() -> None:
    shared = harness.parser(__doc__)
    shared.add_argument(
        "--model",
        default=os.environ.get("FASTDRAFT_DEMO_MODEL"),
        required="FASTDRAFT_DEMO_MODEL" not in os.environ,
        help="folder of the target; by default what FASTDRAFT_DEMO_MODEL names",
    )
    shared.add_argument("--data", type=Path, required=True, help="recorded requests, *.jsonl")
    shared.add_argument("--family", action="append", help="only these files, by name")
    shared.add_argument("--limit", type=int, help="the first requests of each family only")
    parser = argparse.ArgumentParser(description=shared.description)
    modes = parser.add_subparsers(dest="mode", required=True)
    replay, live = (
        modes.add_parser(mode, parents=[shared], add_help=False) for mode in ("replay", "live")
    )
    replay.add_argument("--num-tokens", type=int, default=16, help="the longest draft")
    # "told" is fastdraft that is told the step cost; it is measured where it is not.
    drafters = ["ngram", "suffix", "fastdraft", "told"]
    replay.add_argument("--drafters", nargs="+", choices=drafters, default=drafters)
    replay.add_argument("--rows", type=int, nargs="+", default=[16, 64], help="requests at once")
    replay.add_argument(
        "--token-cost",
        type=float,
        nargs="+",
        default=[0.0, 0.002],
        help="what a token adds to the modelled forward, as a fraction of one over no tokens",
    )
    live.add_argument("--methods", nargs="+", help="by default all that run here")
    live.add_argument(
        "--head", type=json.loads, help="vLLM's configuration of a draft head, alone and beside us"
    )
    workloads = ["recorded", "agents", "spec_bench"]
    live.add_argument("--workloads", nargs="+", choices=workloads, default=workloads[:2])
    live.add_argument("--spec-bench", type=Path, help="Spec-Bench's question.jsonl")
    live.add_argument(
        "--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="requests at once"
    )
    live.add_argument("--runs", type=int, default=3, help="of each method, in turn")
    live.add_argument("--new-tokens", type=int, default=256, help="of each answer, at most")
    live.add_argument("--prompt-tokens", type=int, default=4096, help="longer ones are left out")
    live.add_argument("--least-requests", type=int, default=8, help="in a measurement")
    live.add_argument("--serve", default="", help="further options of `vllm serve`, in one string")
    options = parser.parse_args()

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = harness.about()
    encode = TextTokenizer(Path(options.model)).encode
    files = family_files([options.data])
    chosen = [files[name] for name in options.family or files]
    families = {
        name: [record for record in records[: options.limit] if len(record.output_ids)]
        for name, records in read_families(chosen, encode).items()
    }
    if options.mode == "replay":
        import serving_replay

        results |= serving_replay.measure(families, options)
        serving_replay.report(results)
    else:
        import serving_live

        results |= serving_live.measure(families, options)
    harness.finish(options, results)


if __name__ == "__main__":
    main()
