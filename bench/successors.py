"""Trees with and without what the target's logits say may follow, over a model's own text.

The demo's model decodes recorded requests greedily, with a step that is taken to cost
1 + token cost x draft tokens, whatever it takes here. Compared are the tokens of a step, and the
modelled speed: tokens / (steps + token cost x draft tokens). Both modes decode the same text.

    python bench/successors.py --data FOLDER --most 4 --json bench/results/successors.json
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any
from unittest import mock

import numpy as np
import torch

from fastdraft import DraftConfig, DraftStats, Engine, hf
from fastdraft.demo import ensure_model
from fastdraft.step_latency import StepLatency
from harness import Row, about, add_requests, finish, parser, recorded_families, show

MODES = {"without": -1.0, "with": 0.005}  # the dearest draft token for which they are used
LONGEST_PROMPT = 600


class Modelled(StepLatency):
    """Forwards of a known cost."""

    def __init__(self, token_cost: float) -> None:
        super().__init__("cpu")
        self._token_cost = token_cost

    def best_widths(self, rows: Any, widest: Any = 129) -> tuple[Any, Any]:
        return 1 + self._token_cost * np.arange(widest), np.arange(1, widest + 1)

    def wants_plain_step(self, rows: Any) -> bool:
        return False


def decode(model: Any, prompt: list[int], engine: Engine, most: int) -> DraftStats:
    ids = torch.tensor([prompt])
    output = hf.generate(
        model,
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        repetition_penalty=1.0,
        max_new_tokens=most,
        pad_token_id=0,
        drafter=engine,
    )
    assert output.stats is not None
    return output.stats


def main() -> None:
    from transformers import AutoModelForCausalLM

    options_of = parser(__doc__)
    add_requests(options_of, most=4)
    options_of.add_argument("--tokens", type=int, default=96, help="of an answer")
    options_of.add_argument("--tree-budget", type=int, default=32)
    options_of.add_argument("--token-cost", type=float, default=0.003)
    options = options_of.parse_args()
    model = AutoModelForCausalLM.from_pretrained(ensure_model())
    found: list[Row] = []
    machine = about()
    for family, records in recorded_families(options.data, names=options.family).items():
        row: Row = {"family": family}
        for mode, cheap in MODES.items():
            engine = Engine(DraftConfig(tree_budget=options.tree_budget))
            steps = emitted = drafted = 0
            cost = Modelled(options.token_cost)
            with (
                mock.patch("fastdraft.hf.loop._CHEAP", cheap),
                mock.patch.object(StepLatency, "of", return_value=cost),
            ):
                for record in records[: options.most]:
                    prompt = record.prompt_ids[-LONGEST_PROMPT:].tolist()
                    stats = decode(model, prompt, engine, options.tokens)
                    steps += stats.steps
                    emitted += stats.emitted
                    drafted += stats.drafted
            row[mode] = {
                "tokens_per_step": emitted / steps,
                "drafted_per_step": drafted / steps,
                "speed": emitted / (steps + options.token_cost * drafted),
                "steps": steps,
            }
        row["ratio"] = row["with"]["speed"] / row["without"]["speed"]
        print(row, flush=True)
        found.append(row)
    mean: Row = {"family": "geometric mean", "ratio": geometric_mean(r["ratio"] for r in found)}
    for mode in MODES:
        mean[mode] = {
            key: geometric_mean(row[mode][key] for row in found)
            for key in ("tokens_per_step", "speed")
        }
    columns: dict[str, Sequence[str]] = {"family": "family"}
    for title, key in (("tokens a step", "tokens_per_step"), ("speed", "speed")):
        columns.update({f"{title}, {mode}": (mode, key) for mode in MODES})
    show("with the likeliest tokens", {**columns, "ratio": "ratio"}, [*found, mean])
    finish(options, {**machine, "rows": found, "mean": mean})


if __name__ == "__main__":
    main()
