"""What a step of `fastdraft.hf` costs beyond the model's forward, beside plain `generate`.

A model of random weights, deep and narrow, so that it is bound by overhead as small models on GPUs
are. Its forwards are timed in both: a step lasts from the start of one forward to the start of the
next, and what is not forward is the loop's overhead. Times are CPU times, which other processes
hardly change. The three ways take turns: plain, fastdraft without drafts, and with drafts of a
fixed length of which a random part is right. *Forward alone* runs the model over as many tokens as
a step with drafts has, with nothing around it: no loop can be faster. Prompts of a batch differ in
length, padded on the left. Each figure is the median over the steps of a run, and then over the
rounds; ratios are those of a round.

    python bench/step_overhead.py --json bench/results/step_overhead.json
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import harness
from fastdraft import DraftStats, hf
from fastdraft.hf.drafts import StepDrafts
from fastdraft.hf.interface import CACHE
from harness import Row

VOCABULARY, PROMPT = 1_000, 48


class Replayer:
    """Drafts `lookahead` tokens of known outputs, from a random one on wrong ones.

    Args:
        outputs: (rows, tokens), what each row is going to say.
        lookahead: The tokens of a draft.
        seed: Of the places of the wrong tokens.
    """

    weighs_cost = False

    def __init__(self, outputs: Sequence[list[int]], *, lookahead: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        # Made beforehand, by the tokens emitted so far: what is measured is the loop.
        self._drafts: list[list[list[int]]] = []
        for output in outputs:
            drafts = [output[begin : begin + lookahead] for begin in range(len(output) + 1)]
            rights = [int(random.integers(len(draft) + 1)) for draft in drafts]
            self._drafts.append(
                [
                    [*draft[:right], *((token + 1) % VOCABULARY for token in draft[right:])]
                    for draft, right in zip(drafts, rights, strict=True)
                ]
            )
        self._emitted: list[int] = []

    def add_request(self, prompt_ids: Any, *, prediction: Any = None) -> int:
        self._emitted.append(0)
        return len(self._emitted) - 1

    def propose_batch(
        self, requests: Sequence[int], *, limits: NDArray[np.int32] | None = None, **_: Any
    ) -> StepDrafts:
        assert limits is not None
        tokens: list[int] = []
        parents: list[int] = []
        offsets = [0]
        for request, limit in zip(requests, limits.tolist(), strict=True):
            draft = self._drafts[request][self._emitted[request]][:limit]
            tokens += draft
            parents += range(-1, len(draft) - 1)
            offsets.append(len(tokens))
        return StepDrafts(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.full(len(tokens), 0.5, np.float32),
            np.array(offsets, np.int32),
        )

    def observe_batch(
        self, requests: Sequence[int], emitted_ids: NDArray[np.int32], offsets: NDArray[np.int32]
    ) -> None:
        for request, count in zip(requests, np.diff(offsets).tolist(), strict=True):
            self._emitted[request] += count

    def finish(self, request: int) -> DraftStats:
        return DraftStats()

    def cancel(self, request: int) -> None: ...


def measure(model: Any, run: Callable[[], object]) -> Row:
    """Milliseconds of a step and of its parts in CPU time, while all rows run, without the
    prompt's."""
    with harness.timed_forwards(model, time.process_time) as forwards:
        run()
    began, ended, rows = np.array(forwards).T
    whole = np.flatnonzero(rows[:-1] == rows[0])[1:-1]
    step = 1e3 * (began[1:] - began[:-1])[whole]
    overhead = 1e3 * (began[1:] - ended[:-1])[whole]
    return {
        "step_ms": float(np.median(step)),
        "forward_ms": float(np.median(step - overhead)),
        "overhead_ms": float(np.median(overhead)),
    }


def prompts(rows: int) -> dict[str, Any]:
    """Left-padded prompts of random tokens; the last one is a third shorter than the first."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, VOCABULARY, (rows, PROMPT), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row in range(rows):
        attention_mask[row, : row * PROMPT // (3 * rows)] = 0
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


def forward_alone(model: Any, rows: int, *, width: int, cached: int, steps: int) -> Row:
    """Milliseconds of a forward over `width` tokens a row, without any loop."""
    inputs, cache = prompts(rows), DynamicCache(config=model.config)
    shown = inputs["attention_mask"]
    hidden = (1 - shown).sum(1, keepdim=True)
    shown = torch.nn.functional.pad(shown, (0, cached - PROMPT + width), value=1)
    found = []
    with torch.no_grad():
        input_ids = inputs["input_ids"].repeat(1, -(-cached // PROMPT))[:, :cached]
        model(input_ids=input_ids, attention_mask=shown[:, :cached], **{CACHE: cache})
        for _ in range(steps):
            began = time.process_time()
            model(
                input_ids=input_ids[:, :width],
                attention_mask=shown,
                position_ids=torch.arange(cached, cached + width) - hidden,
                **{CACHE: cache},
            )
            found.append((time.process_time() - began) * 1e3)
            cache.crop(-width)
    return {"step_ms": float(np.median(found))}


def compare(model: Any, rows: int, *, lookahead: int, new_tokens: int, rounds: int) -> Row:
    """The ways in turn: medians, and the ratios to plain."""
    inputs = prompts(rows)
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": new_tokens,
        "eos_token_id": None,
    }
    expected = model.generate(**inputs, **options)
    outputs = expected[:, PROMPT:].tolist()

    def drafted(tokens: int) -> None:
        drafter = Replayer(outputs, lookahead=tokens)
        found = hf.generate(model, **inputs, **options, drafter=drafter).sequences
        assert torch.equal(found, expected)

    def alone() -> Row:
        cached = PROMPT + new_tokens // 2
        return forward_alone(model, rows, width=1 + lookahead, cached=cached, steps=new_tokens // 4)

    def plain() -> object:
        return model.generate(**inputs, **options)

    figures = harness.interleave(
        {
            "plain": lambda _: measure(model, plain),
            "without drafts": lambda _: measure(model, lambda: drafted(0)),
            "with drafts": lambda _: measure(model, lambda: drafted(lookahead)),
            "forward alone": lambda _: alone(),
        },
        rounds,
    )
    found: Row = {"rows": rows}
    for name, of_way in figures.items():
        found[name] = {key: float(np.median([row[key] for row in of_way])) for key in of_way[0]}
        found[name]["to_plain"] = harness.ratio(of_way, figures["plain"], "step_ms")
    found["with drafts"]["to_forward_alone"] = harness.ratio(
        figures["with drafts"], figures["forward alone"], "step_ms"
    )
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rows", type=int, action="append", default=[])
    parser.add_argument("--hidden", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1_024,
        initializer_range=0.3,
    )
    # float64: a near-tie would end the comparison of outputs, not of times.
    model: Any = LlamaForCausalLM(config).double()
    model.eval()
    about = harness.about(
        model=f"Llama of {options.layers} layers, hidden size {options.hidden}, random float64",
        threads=torch.get_num_threads(),
    )
    batches = [
        compare(
            model,
            rows,
            lookahead=options.lookahead,
            new_tokens=options.new_tokens,
            rounds=options.rounds,
        )
        for rows in options.rows or [1, 8]
    ]
    shown = [
        {"rows": batch["rows"], "way": way, **batch[way]}
        for batch in batches
        for way in ("plain", "without drafts", "with drafts", "forward alone")
    ]
    harness.show("Milliseconds", None, shown, digits=3)
    harness.finish(options, {**about, "lookahead": options.lookahead, "batches": batches})


if __name__ == "__main__":
    main()
