"""What logits processors cost `fastdraft.hf` on a CPU: patched by it, or called at each position.

A model of two layers and random weights, so that processors are a large part of a step. The ways
take turns: plain `generate`, fastdraft with all processors called at each position, and fastdraft
as it is. Drafts have a fixed length, and a random part of each is right. Times are CPU times of the
whole generation; ratios are those of a round.

    python bench/host_processors.py --json bench/results/host_processors.json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import harness
from fastdraft import hf
from fastdraft.hf.fused_processors import FusedProcessors
from harness import Row
from step_overhead import PROMPT, Replayer, prompts

OPTIONS: dict[str, Any] = {
    "do_sample": False,
    "eos_token_id": None,
    "repetition_penalty": 1.1,
    "suppress_tokens": [96],
    "bad_words_ids": [[95, 96]],
}


def compare(vocabulary: int, rows: int, *, lookahead: int, new_tokens: int, rounds: int) -> Row:
    """How fast each way is, relative to processors that are called."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1_024,
        initializer_range=0.3,
    )
    # float64: a near-tie would end the comparison of outputs, not of times.
    model: Any = LlamaForCausalLM(config).double()
    model.eval()
    options = {**prompts(rows), **OPTIONS, "max_new_tokens": new_tokens}
    expected = model.generate(**options)
    outputs = expected[:, PROMPT:].tolist()

    def drafted() -> None:
        drafter = Replayer(outputs, lookahead=lookahead)
        assert torch.equal(hf.generate(model, **options, drafter=drafter).sequences, expected)

    def called() -> None:
        with mock.patch.object(FusedProcessors, "take", return_value=False):
            drafted()

    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: model.generate(**options),
        "called": called,
        "patched": drafted,
    }
    seconds: dict[str, list[Row]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            started = time.process_time()
            run()
            if number:
                seconds[name].append({"seconds": time.process_time() - started})
    found: Row = {"vocabulary": vocabulary, "rows": rows, "lookahead": lookahead}
    for name in ("plain", "patched"):
        # Seconds of the called ones by those of the others: a speed.
        found[name] = harness.ratio(seconds["called"], seconds[name], "seconds")
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    about = harness.about(
        model="Llama of 2 layers, hidden size 64, random float64", threads=torch.get_num_threads()
    )
    rows = [
        compare(
            vocabulary,
            batch,
            lookahead=lookahead,
            new_tokens=options.new_tokens,
            rounds=options.rounds,
        )
        for vocabulary in (1_000, 49_152)
        for batch in (1, 8)
        for lookahead in (0, 4)
    ]
    harness.show("Speed relative to processors that are called", None, rows, digits=2)
    harness.finish(options, {**about, "settings": rows})


if __name__ == "__main__":
    main()
