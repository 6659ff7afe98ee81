"""What a step of `fastdraft.hf` takes beyond the model's forward, beside plain `generate`.

A model of random weights, deep and narrow, so that it is bound by overhead as small models on GPUs
are. A step lasts from the start of one forward to the start of the next, and what is not forward is
the loop's. Times are CPU times, which other processes hardly change. The ways take turns: plain,
fastdraft without drafts, and with drafts of a fixed length of which a random part is right. Prompts
of a batch differ in length, padded on the left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

import harness
from fastdraft import DraftStats, hf
from fastdraft.hf.drafts import StepDrafts
from harness import Row

ROUNDS, NEW_TOKENS, LOOKAHEAD = 8, 96, 4
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


def measure(model: Any, run: Callable[[], object], _: int) -> Row:
    """The loop's CPU time in a step, in microseconds, and the whole step's, while all rows run,
    without the prompt's."""
    began: list[float] = []
    ended: list[float] = []
    rows: list[int] = []

    def after(_model: Any, _operands: Any, options: Row, _output: Any) -> None:
        ended.append(time.process_time())
        rows.append(len(options["input_ids"]))

    hooks = [
        model.register_forward_pre_hook(lambda *_: began.append(time.process_time())),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    run()
    for hook in hooks:
        hook.remove()
    whole = np.flatnonzero(np.array(rows[:-1]) == rows[0])[1:-1]
    return {
        "p50_us": 1e6 * float(np.median(np.subtract(began[1:], ended[:-1])[whole])),
        "step_us": 1e6 * float(np.median(np.diff(began)[whole])),
    }


def prompts(rows: int) -> dict[str, Any]:
    """Left-padded prompts of random tokens; the last one is a third shorter than the first."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, VOCABULARY, (rows, PROMPT), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row in range(rows):
        attention_mask[row, : row * PROMPT // (3 * rows)] = 0
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


@pytest.mark.parametrize("rows", [1, 8])
def test_hf_step(benchmark: Any, add_figures: Callable[..., None], rows: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1_024,
        initializer_range=0.3,
    )
    # float64: a near-tie would end the comparison of outputs, not of times.
    model: Any = LlamaForCausalLM(config).double()
    model.eval()
    inputs = prompts(rows)
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": None,
    }
    plain = partial(model.generate, **inputs, **options)
    expected = plain()
    outputs = expected[:, PROMPT:].tolist()

    def drafted(tokens: int) -> None:
        drafter = Replayer(outputs, lookahead=tokens)
        found = hf.generate(model, **inputs, **options, drafter=drafter).sequences
        assert torch.equal(found, expected)

    runs: dict[str, Callable[[], object]] = {
        "plain": plain,
        "without drafts": partial(drafted, 0),
        "with drafts": partial(drafted, LOOKAHEAD),
    }
    figures = harness.interleave(
        {way: partial(measure, model, run) for way, run in runs.items()}, ROUNDS
    )
    for way, of_way in figures.items():
        row: Row = {key: float(np.median([each[key] for each in of_way])) for key in of_way[0]}
        add_figures(way, **row, step_ratio=harness.ratio(of_way, figures["plain"], "step_us"))
    benchmark.pedantic(drafted, (LOOKAHEAD,), rounds=3)
