"""Generation with and without drafts, eager and compiled, on the demo's requests.

Four ways take turns: eager and compiled, `model.generate` and `hf.generate`. Compiled is
`cache_implementation="static"` with torch.compile (inductor) on every device. Every way runs each
request once before anything counts, so no compilation is in the times. The fastest of the repeats
counts, by wall time and by CPU time; the speed-up is plain's over fastdraft's, eager and compiled.

    python bench/generation.py --json bench/results/compiled.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

import torch
from transformers import CompileConfig

import harness
from fastdraft import hf
from fastdraft.demo import Request, Target, demo_requests, load_target
from fastdraft.demo.measure import explain_difference, greedy_options
from harness import Row

COLUMNS = 640  # tokens that a static cache holds; one length for all requests, so one compilation


def compile_config() -> CompileConfig:
    """What compiles on every device, as plain `generate` does on GPUs alone."""
    config = CompileConfig(fullgraph=True)
    config._compile_all_devices = True  # type: ignore[assignment]
    return config


def ways(compiled: CompileConfig) -> dict[str, tuple[bool, dict[str, Any]]]:
    """Whether each way drafts, and its options of `generate`."""
    static = {
        "cache_implementation": "static",
        "max_cache_len": COLUMNS,
        "compile_config": compiled,
    }
    return {
        "eager plain": (False, {}),
        "eager fastdraft": (True, {}),
        "compiled plain": (False, static),
        "compiled fastdraft": (True, static),
    }


def timed(call: Callable[[], list[int]]) -> tuple[list[int], float, float]:
    """The tokens, and the wall and CPU seconds until they are there."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = call()
    return tokens, time.perf_counter() - wall, time.process_time() - cpu


def measure(target: Target, request: Request, options: argparse.Namespace) -> Row:
    """One request, every way, with the speed-ups."""
    model, new = target.model, options.max_new_tokens
    inputs = target.encode(request.prompt, request.answer_start, max_new_tokens=new)
    prediction = None
    if request.prediction is not None:
        prediction = target.encode_prediction(request.prediction)
    common = {**inputs, **greedy_options(model), "max_new_tokens": new}
    columns = inputs["input_ids"].shape[1]

    def decode(drafts: bool, more: dict[str, Any]) -> list[int]:
        if drafts:
            output = hf.generate(model, prediction=prediction, **common, **more).sequences
        else:
            output = model.generate(**common, **more)
        tokens: list[int] = output[0, columns:].tolist()
        return tokens

    found: dict[str, list[tuple[list[int], float, float]]] = {}
    compiled = compile_config()
    for repeat in range(options.repeats + 1):
        for name, (drafts, more) in ways(compiled).items():
            run = timed(lambda drafts=drafts, more=more: decode(drafts, more))  # type: ignore[misc]
            if repeat:
                found.setdefault(name, []).append(run)
    plain = found["eager plain"][0][0]
    row: Row = {"request": request.name, "prompt_tokens": columns, "tokens": len(plain)}
    for name, runs in found.items():
        row[name] = {"wall_s": min(run[1] for run in runs), "cpu_s": min(run[2] for run in runs)}
        difference = explain_difference(model, inputs, plain, runs[0][0], new)
        row[name]["equal"] = difference is None
        row[name]["tie"] = difference is None or difference.is_tie
    for kind in ("eager", "compiled"):
        for clock in ("wall_s", "cpu_s"):
            row[f"{kind}_speedup_{clock[:-2]}"] = (
                row[f"{kind} plain"][clock] / row[f"{kind} fastdraft"][clock]
            )
    return row


def show(rows: Sequence[Row]) -> Row:
    """Prints the table; gives the means of the speed-ups."""
    names = [name for name in rows[0] if "_speedup_" in name]
    means: Row = {}
    print(f"{'request':12} " + " ".join(f"{name:>22}" for name in names))
    for row in rows:
        print(f"{row['request']:12} " + " ".join(f"{row[name]:22.2f}" for name in names))
    for name in names:
        means[name] = geometric_mean([row[name] for row in rows])
    print(f"{'mean':12} " + " ".join(f"{means[name]:22.2f}" for name in names))
    return means


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    target = load_target(None, device=None, dtype=options.dtype, threads=None, raw=False)
    about = harness.about(
        model=f"{target.name}, {target.model.dtype}, on {target.model.device}",
        threads=torch.get_num_threads(),
    )
    rows = []
    for request in demo_requests():
        rows.append(measure(target, request, options))
        print(rows[-1], flush=True)
    harness.finish(options, {**about, "mean": show(rows), "requests": rows})


if __name__ == "__main__":
    main()
