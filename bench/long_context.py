"""What a forward over a draft takes behind a long text, beside one over a single token.

A real model, whose cache is filled with random keys and values, so that no prompt has to be read.
Two ways take turns: attention as transformers has it under `sdpa`, which copies the keys and values
of the whole text for every query head that shares them where several tokens need a mask, and as
`hf.generate` has it. Times are CPU times; medians.

    python bench/long_context.py --json bench/results/long_context.json
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import harness
from fastdraft.demo import ensure_model
from fastdraft.hf.attention import attending, shares_keys
from harness import Row


def filled(model: Any, tokens: int) -> DynamicCache:
    """A cache with the random keys and values of so many tokens."""
    config = model.config
    cache = DynamicCache(config=config)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, tokens, size)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, *shape, dtype=model.dtype)
        cache.update(keys, values, layer)
    return cache


def measure(model: Any, tokens: int, widths: list[int], *, rounds: int) -> list[Row]:
    """Milliseconds of a forward behind `tokens` tokens, by its width."""
    cache = filled(model, tokens)
    times: dict[tuple[bool, int], list[float]] = {}
    for number in range(rounds + 1):
        for stands_in in (False, True):
            for width in widths:
                input_ids = torch.randint(3, 1_000, (1, width))
                began = time.process_time()
                with torch.no_grad(), attending(model, stands_in=stands_in):
                    model(
                        input_ids=input_ids,
                        position_ids=torch.arange(tokens, tokens + width)[None],
                        past_key_values=cache,
                    )
                elapsed = (time.process_time() - began) * 1e3
                cache.crop(-width)
                if number:
                    times.setdefault((stands_in, width), []).append(elapsed)
    found = {key: float(np.median(each)) for key, each in times.items()}
    return [
        {
            "context": tokens,
            "width": width,
            "sdpa_ms": found[False, width],
            "fastdraft_ms": found[True, width],
            "sdpa_to_one": found[False, width] / found[False, 1],
            "fastdraft_to_one": found[True, width] / found[True, 1],
        }
        for width in widths
    ]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", help="a folder or a name on the Hub; the demo's by default")
    parser.add_argument("--context", type=int, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    name = options.model or str(ensure_model())
    model: Any = AutoModelForCausalLM.from_pretrained(name)
    model.eval()
    if not shares_keys(model):
        parser.error("the model must be on 'sdpa' and have query heads that share keys")
    about = harness.about(
        model=f"{type(model).__name__}, {model.num_parameters() / 1e6:.0f} M parameters",
        threads=torch.get_num_threads(),
    )
    rows = [
        row
        for context in options.context or [256, 2_048, 8_192]
        for row in measure(model, context, [1, 2, 3, 5, 9, 17], rounds=options.rounds)
    ]
    harness.show("Milliseconds of a forward", None, rows)
    harness.finish(options, {**about, "forwards": rows})


if __name__ == "__main__":
    main()
