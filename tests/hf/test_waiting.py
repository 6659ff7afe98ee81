"""How often a step of the decoding loop waits for the device: once, to read the tokens, and with
processors once for each block of positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from fastdraft import DraftConfig, Engine, hf
from fastdraft.kernels import greedy, rejection, sampled
from hf_models import drafting, plain_tokens, repetitive_batch
from waiting import as_on_a_device, counted_waits

pytestmark = pytest.mark.slow

NEW, PROMPT = 40, 30
PROCESSED: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "bad_words_ids": [[95, 96]],
    "suppress_tokens": [96],
    "min_new_tokens": NEW,
    "eos_token_id": 2,
}


class _Deaf(BaseStreamer):
    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (3, {}),
        (1, {"streamer": _Deaf()}),
        (3, {"do_sample": True, "seed": 3, "temperature": 0.8, "top_p": 0.9}),
        (3, PROCESSED),
        (1, {**PROCESSED, "do_sample": True, "seed": 3}),
        (3, {"cache_implementation": "static"}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(value) or "greedy",
)
@pytest.mark.parametrize("drafts", ["predicted", "trees", "logits"])
def test_a_step_waits_once(
    llama: Any,
    rows: int,
    options: dict[str, Any],
    drafts: str,
    each_step: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = repetitive_batch(rows)
    said = plain_tokens(llama, inputs, max_new_tokens=NEW, eos_token_id=None)[:, PROMPT:]
    for operation in (greedy, sampled, rejection):
        monkeypatch.setattr(operation, "verify", as_on_a_device(operation.plain))
    if drafts == "logits":
        monkeypatch.setattr("fastdraft.hf.loop._CHEAP", math.inf)
        more: dict[str, Any] = {"drafter": Engine(DraftConfig(tree_budget=8))}
    else:
        more = drafting(drafts, said)
    common = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    steps = each_step(counted_waits)
    output = hf.generate(llama, **inputs, **{**common, **options, **more})
    assert output.stats.accepted > 0
    # Processors are called in blocks of 1, 2, 4, ... positions, and each block is read.
    most = 6 if "repetition_penalty" in options else 1
    assert [waits for waits in steps if len(waits) > most] == []
    assert all(steps)
