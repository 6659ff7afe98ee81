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
from fastdraft.verification import (
    compaction_indices,
    tree_attention_mask,
    tree_depths,
    verify_greedy,
    verify_rejection,
    verify_sampled,
)
from hf_models import Forester, Generous, edited, repetitive_batch, tiny_model
from watches import Recorder

VOCABULARY = 80


def _elsewhere(call: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return call()


def _assert_same(call: Callable[[], list[torch.Tensor | None]]) -> None:
    expected, found = call(), _elsewhere(call)
    assert any(tensor is not None for tensor in expected)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


PARENTS = torch.tensor([-1, -1, 1, -1, 0])
OFFSETS = torch.tensor([0, 3, 5])


@pytest.mark.parametrize("parents", [None, PARENTS], ids=["chains", "trees"])
@pytest.mark.parametrize("verb", ["greedy", "sampled", "rejection"])
def test_verification(verb: str, parents: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, VOCABULARY)
    draft_ids = torch.tensor([3, 5, 7, 11, 13])
    logits[0, 5] = logits[1, 7] = logits[4, 11] = 9.0
    allowed = torch.full((7, 3), -1, dtype=torch.int32)
    seeds, positions = torch.tensor([1, 2]), torch.tensor([30, 40])
    distributions = torch.randn(5, VOCABULARY)

    def call() -> list[torch.Tensor | None]:
        options: dict[str, Any] = {"allowed": allowed, "logprobs": True, "raw_logprobs": True}
        drawn: dict[str, Any] = {"seeds": seeds, "positions": positions}
        drawn |= {"temperature": 0.7, "top_k": 20}
        operands = logits, draft_ids, OFFSETS
        if verb == "greedy":
            verified = verify_greedy(*operands, parents=parents, **options)
        elif verb == "sampled":
            verified = verify_sampled(*operands, parents=parents, top_p=0.9, **drawn, **options)
        else:
            drawn["draft_logits"] = distributions
            verified = verify_rejection(*operands, min_p=0.01, **drawn, **options)
        return [
            verified.token_ids,
            verified.lengths,
            verified.status,
            verified.path,
            verified.logprobs,
            verified.raw_logprobs,
            compaction_indices(verified.path),
        ]

    _assert_same(call)


def test_layout_of_trees() -> None:
    _assert_same(lambda: [tree_depths(PARENTS, OFFSETS), tree_attention_mask(PARENTS, OFFSETS)])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
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
