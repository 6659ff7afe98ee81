"""Draft quality on recorded requests: greedy verification of each against its recorded output.

A draft is accepted up to its first mismatch with what was recorded, so no model is needed and the
counts are exact. The drafter sees a request's own text alone, prompt and output so far; its
calibration carries over from request to request of a family and starts anew with each. The first
output token comes with prefill and is not counted.

Each family is a file of JSON lines with "prompt" and "output"; where "prompt_mode" is "append",
everything said before in the same "session" comes first.

    python bench/replay.py --data FOLDER --token-cost 0 0.02 0.05 0.2 --json FILE

Modelled speed is emitted / (steps + token cost * drafted).
"""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from fastdraft import DraftConfig, DraftStats, Engine
from fastdraft.cli import demo_model
from index import machine

Request = tuple[np.ndarray, list[int]]


def read_family(path: Path, tokenizer: Any) -> list[Request]:
    """The requests of one file: prompt tokens, and output tokens."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    sessions: dict[str, list[int]] = {}
    requests: list[Request] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        prompt, output = encode(record["prompt"]), encode(record["output"])
        session = record.get("session")
        if record.get("prompt_mode") == "append":
            prompt = sessions.get(session, []) + prompt
        if session is not None:
            sessions[session] = prompt + output
        requests.append((np.array(prompt, np.int32), output))
    return requests


def replay(requests: list[Request], config: DraftConfig) -> DraftStats:
    """Decodes every request and adds up its counts."""
    engine = Engine(config)
    total = DraftStats()
    for prompt, output in requests:
        if len(output) < 2:
            continue
        request = engine.add_request(np.append(prompt, output[0]))
        done = 1
        while done < len(output):
            draft = engine.propose(request).tolist()
            accepted = 0
            while (
                accepted < min(len(draft), len(output) - done)
                and draft[accepted] == output[done + accepted]
            ):
                accepted += 1
            emitted = output[done : done + accepted + 1]
            engine.observe(request, emitted)
            done += len(emitted)
        total += engine.finish(request)
    return total


def speed(stats: DraftStats, token_cost: float) -> float:
    return stats.emitted / (stats.steps + token_cost * stats.drafted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder of *.jsonl files")
    parser.add_argument("--token-cost", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.2])
    parser.add_argument("--lookahead", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    paths = sorted(options.data.glob("*.jsonl"))
    if not paths:
        parser.error(f"--data must hold *.jsonl files, got {options.data}")
    tokenizer = AutoTokenizer.from_pretrained(demo_model.ensure())
    families = {path.stem: read_family(path, tokenizer) for path in paths}
    cases = list(product(options.token_cost, families))
    configs = [DraftConfig(lookahead=options.lookahead, token_cost=cost) for cost, _ in cases]
    with ProcessPoolExecutor() as pool:
        results = pool.map(replay, [families[name] for _, name in cases], configs)
        counts = dict(zip(cases, results, strict=True))

    about = machine()
    for key, value in about.items():
        print(f"{key:8} {value}")
    print(
        f"\n{'tokens a step, modelled speed':32}" + "".join(f"{c:>14}" for c in options.token_cost)
    )
    for name in families:
        cells = [
            (counts[cost, name].mean_accepted_tokens, speed(counts[cost, name], cost))
            for cost in options.token_cost
        ]
        print(f"{name:32}" + "".join(f"{tokens:8.2f} {fast:5.2f}" for tokens, fast in cells))
    for label, summary in (
        ("geometric mean", lambda speeds: math.exp(sum(map(math.log, speeds)) / len(speeds))),
        ("worst family", min),
    ):
        values = [summary([speed(counts[c, n], c) for n in families]) for c in options.token_cost]
        print(f"{label:32}" + "".join(f"{value:14.3f}" for value in values))
    if options.json:
        rows = [
            {"family": name, "token_cost": cost, **asdict(stats)}
            for (cost, name), stats in counts.items()
        ]
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
