"""Under another default device, as torch.set_default_device sets it, everything comes out the same.

"meta" stands for a GPU: a tensor that is made there by mistake has no values to go on with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from assistants import bent
from fastdraft import hf
from fastdraft.drafters import AssistantModel, Staged
from hf_models import Forester, Generous, edited, repetitive_batch, tiny_model
from watches import Recorder


def _elsewhere(call: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return call()


def _assert_same(call: Callable[[], list[torch.Tensor | None]]) -> None:
    expected, found = call(), _elsewhere(call)
    assert any(tensor is not None for tensor in expected)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("do_sample", "rows"), [(False, 1), (False, 3), (True, 3)])
@pytest.mark.parametrize("drafts", ["chains", "trees", "model", "staged"])
def test_generate(drafts: str, do_sample: bool, rows: int) -> None:
    # A window, and layers without one.
    model = tiny_model("gemma3")
    inputs = repetitive_batch(rows)
    truths = model.generate(**inputs, max_new_tokens=24, eos_token_id=None)[:, 30:]

    def call() -> list[torch.Tensor | None]:
        drafter: Any
        if drafts == "chains":
            drafter = Generous()
        elif drafts == "trees":
            drafter = Forester(truths.tolist())
        else:
            drafter = AssistantModel(bent(model), schedule="constant", num_tokens=3, lookup=None)
        if drafts == "staged":
            drafter = Staged([bent(model, seed=2), drafter])
        said = Recorder()
        output = hf.generate(
            model,
            **inputs,
            max_time=1000.0,
            repetition_penalty=1.2,
            max_new_tokens=24,
            eos_token_id=None,
            do_sample=do_sample,
            seed=5,
            drafter=drafter,
            prediction=[edited(truth) for truth in truths] if drafts == "chains" else None,
            streamer=said if rows == 1 else None,
            logprobs=True,
        )
        if rows == 1:
            prompt, *tokens, _ = said.calls
            assert [*prompt[0], *(token for [token] in tokens)] == output.sequences[0].tolist()
        return [output.sequences]

    if drafts == "staged":
        # What is drafted, and so what is drawn, depends on the clock.
        assert _elsewhere(call)[0].shape == (rows, 54)
    else:
        _assert_same(call)


def test_seeds_that_are_drawn() -> None:
    model = tiny_model("llama")
    inputs = repetitive_batch(1)

    def call() -> list[torch.Tensor | None]:
        torch.manual_seed(3)
        output = hf.generate(model, **inputs, do_sample=True, max_new_tokens=8, drafter=Generous())
        return [output.sequences]

    _assert_same(call)
