"""What drafts gain on a mixture of experts, whose first draft tokens are dear.

Each further token of a forward reads further experts: here 8 of 128 in each layer, of random
weights, so no two tokens share many. The dense model has as many parameters as a token of the
mixture reads. Outputs are sampled, near to uniform, so nothing but the prediction can be drafted; a
seed's tokens are the same with any draft. In the prediction one token in so many is wrong.

*Measured* is `hf.generate` as it is. *Constant* tells the engine that each draft token costs 0.02
of a step, as in a loop that measures nothing. Each figure is the median over the rounds, in which
the ways take turns; ratios are those of a round, speeds as multiples of `model.generate`, by CPU
time, which other processes hardly change.

    python bench/mixtures.py --json bench/results/mixtures.json
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

import harness
from fastdraft import DraftBatch, Engine, hf
from fastdraft.step_latency import StepLatency
from harness import Row

VOCABULARY, PROMPT = 4_096, 64
EXPERTS, CHOSEN = 128, 8
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1_024,
}


class Constant(Engine):
    """An engine that is told no measured time."""

    def propose_batch(self, requests: Any, **options: Any) -> DraftBatch:
        return super().propose_batch(requests, limits=options["limits"], token_cost=0.02)


def models(width: int) -> dict[str, Any]:
    """The mixture, whose experts are `width` wide, and the dense model."""
    torch.manual_seed(0)
    mixture = Qwen3MoeConfig(
        **_SIZES,
        intermediate_size=width,
        moe_intermediate_size=width,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        decoder_sparse_step=1,
    )
    dense = Qwen3Config(**_SIZES, intermediate_size=width * CHOSEN)
    return {
        "mixture": Qwen3MoeForCausalLM(mixture).eval(),
        "dense": Qwen3ForCausalLM(dense).eval(),
    }


def wrong(output: list[int], every: int) -> list[int]:
    """The output with a wrong token in each `every`; 0 for all right, 1 for none."""
    return [
        (token + 1) % VOCABULARY if every and at % every == every - 1 else token
        for at, token in enumerate(output)
    ]


def compare(model: Any, every: int, *, new_tokens: int, rounds: int) -> Row:
    """Speeds with a prediction of which one token in `every` is wrong."""
    prompt = torch.randint(VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {
        "inputs": prompt,
        "attention_mask": torch.ones_like(prompt),
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": new_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def plain(number: int) -> Row:
        torch.manual_seed(number)
        began = time.process_time()
        model.generate(**options)
        return {"seconds": time.process_time() - began}

    outputs = {
        number: hf.generate(model, **options, seed=number).sequences[0, PROMPT:].tolist()
        for number in range(rounds + 1)
    }

    def drafted(engine: Engine, number: int) -> Row:
        prediction = wrong(outputs[number], every)
        began = time.process_time()
        output = hf.generate(model, **options, drafter=engine, prediction=prediction, seed=number)
        seconds = time.process_time() - began
        assert output.sequences[0, PROMPT:].tolist() == outputs[number]
        stats = output.stats
        return {
            "seconds": seconds,
            "drafted": stats.drafted / stats.steps,
            "tokens_a_step": stats.emitted / stats.steps,
        }

    measured, constant = Engine(), Constant()
    figures = harness.interleave(
        {
            "plain": plain,
            "measured": lambda number: drafted(measured, number),
            "constant": lambda number: drafted(constant, number),
        },
        rounds,
    )
    found: Row = {"one wrong in": every or "none"}
    for name in ("measured", "constant"):
        found[name] = {
            "speed": harness.ratio(figures["plain"], figures[name], "seconds"),
            **{
                key: float(np.median([row[key] for row in figures[name]]))
                for key in ("drafted", "tokens_a_step")
            },
        }
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--width", type=int, default=192, help="of an expert")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    about = harness.about(
        models=f"Qwen3 of 2 layers, {CHOSEN} of {EXPERTS} experts {options.width} wide, and dense",
        threads=torch.get_num_threads(),
    )
    results, rows = [], []
    for name, model in models(options.width).items():
        for every in (0, 10, 4, 2, 1):
            found = compare(model, every, new_tokens=options.new_tokens, rounds=options.rounds)
            results.append({"model": name, **found})
        curve = StepLatency.of(model, "cpu").best_widths(1, 9)[0]
        costs = (curve / curve[0] - 1).tolist()
        rows += [
            {"model": name, "one wrong in": each["one wrong in"], "way": way, **each[way]}
            for each in results
            if each["model"] == name
            for way in ("measured", "constant")
        ]
        results.append({"model": name, "step_by_further_tokens": costs})
        print(f"{name}: a step of 2, 3, ... tokens takes further", np.round(costs[1:], 2))
    harness.show("Speeds", None, rows)
    harness.finish(options, {**about, "batches": results})


if __name__ == "__main__":
    main()
