"""Drafts over a model with recurrent layers, beside plain `generate` and one of attention alone.

Two models of random weights and the sizes of Qwen3.5 0.8B, four layers each: one with its three
recurrent layers and one of attention, one of attention alone. Each decodes plainly, with *drafts*
of a fixed length of which a random part is right, and *priced*: with the default engine, which
weighs the measured time of forwards, and a prediction of which every ninth token is wrong. The ways
take turns, and times are CPU times, which other processes hardly change. *Fed* are the tokens of
all forwards, pending ones and padding included, less the prompt's. transformers runs the recurrence
of several tokens in PyTorch here, padded to 64; its kernels need a GPU.

With --data, the time that drafts save is modelled too, over recorded requests: a forward over n
tokens takes 1 + token_cost (n - 1), the default engine drafts, and what is kept is the speed of a
recurrent model over that of one whose cache can be cropped. Of eight rows, each forward is padded
to the widest one.

    python bench/recurrent.py --data DIR --json bench/results/recurrent.json
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import harness
from fastdraft import Datastore, DraftConfig, Engine, hf
from fastdraft.hf.loop import _MOST_PENDING, _PART_BEHIND
from harness import Row
from test_hf_step import PROMPT, Replayer, prompts

LOOKAHEAD = 6


def made(kinds: Sequence[str]) -> Any:
    """A random model with these kinds of layers. Its vocabulary is that of `prompts`."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=1_000,
        hidden_size=1_024,
        intermediate_size=3_584,
        num_hidden_layers=len(kinds),
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=list(kinds),
        initializer_range=0.1,
    )
    return Qwen3_5ForCausalLM(config).eval()


def decoded(
    model: Any, rows: int, outputs: list[list[int]] | None, *, new_tokens: int, engine: Any = None
) -> Row:
    """One generation: plain without outputs, else with drafts of them, or with this engine."""
    inputs, fed = prompts(rows), [0]
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": new_tokens,
        "eos_token_id": None,
    }
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _, given, __: fed.append(given[0].numel())
    )
    began = time.process_time()
    if outputs is None:
        said = model.generate(**inputs, **options)
    else:
        drafts: dict[str, Any] = {"drafter": Replayer(outputs, lookahead=LOOKAHEAD)}
        if engine is not None:
            wrong = [[token + (at % 9 == 8) for at, token in enumerate(row)] for row in outputs]
            drafts = {"drafter": engine, "prediction": wrong}
        said = hf.generate(model, **inputs, **options, **drafts).sequences
    seconds = time.process_time() - began
    handle.remove()
    equal = None if outputs is None else said[:, PROMPT:].tolist() == outputs
    return {
        "seconds": seconds,
        "forwards": len(fed) - 1,
        "fed": sum(fed) - inputs["input_ids"].numel(),
        "equal": equal,
        "outputs": said[:, PROMPT:].tolist(),
    }


def compare(model: Any, rows: int, *, new_tokens: int, rounds: int) -> Row:
    """Both ways in turn."""
    outputs = decoded(model, rows, None, new_tokens=new_tokens)["outputs"]
    decoded(model, rows, outputs, new_tokens=new_tokens)  # asks the model
    engine = Engine(DraftConfig())
    figures = harness.interleave(
        {
            "plain": lambda _: decoded(model, rows, None, new_tokens=new_tokens),
            "drafts": lambda _: decoded(model, rows, outputs, new_tokens=new_tokens),
            "priced": lambda _: decoded(model, rows, outputs, new_tokens=new_tokens, engine=engine),
        },
        rounds,
    )
    found: Row = {"rows": rows}
    for way, of_way in figures.items():
        found[way] = {
            "seconds": float(np.median([row["seconds"] for row in of_way])),
            "forwards": of_way[0]["forwards"],
            "fed": of_way[0]["fed"],
        }
        found[way]["speedup"] = harness.ratio(figures["plain"], of_way, "seconds")
        found[way]["equal"] = all(row["equal"] is not False for row in of_way)
    return found


def one_row(
    texts: Sequence[tuple[list[int], list[int]]], cost: float, *, recurs: bool
) -> tuple[int, float]:
    """Requests one after the other: their tokens, and their time in plain steps."""
    engine = Engine(DraftConfig(token_cost=cost), datastores=[Datastore(max_bytes=1 << 28)])
    emitted, spent = 0, 0.0
    for prompt, output in texts:
        request = engine.add_request(prompt)
        engine.observe(request, output[:1])
        at, pending = 1, 0
        while at < len(output):
            draft = [] if pending > _MOST_PENDING else engine.propose(request).tolist()
            draft = draft[: len(output) - at]
            accepted = _accepted(draft, output[at:])
            own = output[at : at + accepted + 1]
            engine.observe(request, own)
            spent += 1 + cost * (len(draft) + pending)
            pending = 0 if accepted == len(draft) or not recurs else pending + 1 + accepted
            emitted, at = emitted + len(own), at + len(own)
        engine.finish(request)
    return emitted, spent


def eight_rows(
    texts: Sequence[tuple[list[int], list[int]]], cost: float, *, recurs: bool
) -> tuple[int, float]:
    """The same of eight rows at a time; a request that ends makes room for the next."""
    engine = Engine(DraftConfig(token_cost=cost), datastores=[Datastore(max_bytes=1 << 28)])
    todo, rows, emitted, spent, paid = list(texts), list[list[Any]](), 0, 0.0, 0.0
    while todo or rows:
        while todo and len(rows) < 8:
            prompt, output = todo.pop(0)
            request = engine.add_request(prompt)
            engine.observe(request, output[:1])
            rows.append([request, output, 1, 0])
        counts = sorted(row[3] for row in rows)
        paid += cost * len(rows) * counts[-1]
        width = counts[int(_PART_BEHIND * (len(rows) - 1))]
        forward = 1 + cost * (len(rows) * width - 1)
        if width > 1 and paid >= forward:
            spent, paid = spent + forward, 0.0
            for row in rows:
                row[3] -= width * (row[3] >= width)
        most = max(row[3] for row in rows)
        curve = 1 + cost * (np.arange(1, 66 * len(rows) + 1) + len(rows) * most - 1)
        drafts = engine.propose_batch([row[0] for row in rows], cost=curve, padded=True).tolist()
        width = max(row[3] + 1 + len(draft) for row, draft in zip(rows, drafts, strict=True))
        spent += 1 + cost * (len(rows) * width - 1)
        staying = []
        for row, draft in zip(rows, drafts, strict=True):
            request, output, at, pending = row
            accepted = _accepted(draft, output[at:])
            own = output[at : at + accepted + 1]
            engine.observe(request, own)
            emitted += len(own)
            whole = accepted == len(draft) and pending + 1 + accepted == width
            row[2:] = at + len(own), 0 if whole or not recurs else pending + 1 + accepted
            if row[2] < len(output):
                staying.append(row)
            else:
                engine.finish(request)
        rows = staying
    return emitted, spent


def _accepted(draft: Sequence[int], output: Sequence[int]) -> int:
    pairs = zip(draft, output, strict=False)
    count = min(len(draft), len(output))
    return next((at for at, (own, token) in enumerate(pairs) if own != token), count)


def modelled(folder: Path, requests: int) -> Row:
    """What is kept of the speed with drafts, by the number of rows: geometric means over families
    and the worst of them."""
    families = harness.recorded_families(folder, references=False)
    found: Row = {}
    for rows, cost, way in ((1, 0.02, one_row), (8, 0.005, eight_rows)):
        speeds: dict[str, list[float]] = {"attention alone": [], "recurrent": []}
        for records in families.values():
            texts = [
                (each.prompt_ids[-6_000:].tolist(), each.output_ids[:800].tolist())
                for each in records
                if len(each.output_ids) > 2
            ][:requests]
            for name, speed in speeds.items():
                emitted, spent = way(texts, cost, recurs=name == "recurrent")
                speed.append(emitted / spent)
        shares = np.divide(speeds["recurrent"], speeds["attention alone"])
        found[f"{rows} rows"] = {
            "token_cost": cost,
            "families": len(shares),
            **{name: math.exp(np.log(each).mean()) for name, each in speeds.items()},
            "kept": float(math.exp(np.log(shares).mean())),
            "worst": float(shares.min()),
        }
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, help="a folder of recorded requests")
    parser.add_argument("--requests", type=int, default=16, help="of each family")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    about = harness.about(
        model="Qwen3.5 of 0.8B's sizes, 4 layers, 1,000 tokens, random float32",
        threads=torch.get_num_threads(),
    )
    results: Row = {**about, "lookahead": LOOKAHEAD, "models": {}}
    for name, kinds in (
        ("recurrent", ["linear_attention"] * 3 + ["full_attention"]),
        ("attention alone", ["full_attention"] * 4),
    ):
        model = made(kinds)
        results["models"][name] = [
            compare(model, rows, new_tokens=options.new_tokens, rounds=options.rounds)
            for rows in (1, 8)
        ]
        for batch in results["models"][name]:
            shown = [{"way": way, **batch[way]} for way in ("plain", "drafts", "priced")]
            harness.show(f"{name}, {batch['rows']} rows", None, shown, digits=3)
    # Three layers of 16 heads of 128 x 128 float32, and what was committed.
    results["state_bytes_a_row"] = 2 * 3 * 16 * 128 * 128 * 4
    if options.data is not None:
        results["modelled"] = modelled(options.data, options.requests)
        print(results["modelled"])
    harness.finish(options, results)


if __name__ == "__main__":
    main()
