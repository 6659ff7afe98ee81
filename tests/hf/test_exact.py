"""Greedy decoding gives the tokens of `model.generate`: families, caches, attention and drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastdraft import hf
from fastdraft.errors import InvalidValueError
from hf_models import FAMILIES, assert_decodes, repetitive_batch, tiny_model

# In `make test`: rotated and learned positions, and windows of all, some and no layers.
QUICK = ("gemma3", "gpt2", "llama", "mistral", "opt", "qwen2")


def _cases() -> Iterator[Any]:
    """Family, attention, cache, drafts and rows: 0 for three without padding."""
    for family in FAMILIES:
        slow = () if family in QUICK else (pytest.mark.slow,)
        # A row alone has no mask, rows without padding have the model's own, and others ours.
        for drafts, rows in (("found", 0), ("predicted", 1), ("predicted", 3), ("trees", 3)):
            yield pytest.param(family, None, None, drafts, rows, marks=slow)
        # The masks of a static cache are ours for a row, too.
        yield pytest.param(
            family, None, "static", "predicted", 1, marks=(pytest.mark.any_transformers, *slow)
        )
    for family in ("gemma3", "gpt2", "mistral"):
        yield from ((family, "eager", None, drafts, 3) for drafts in ("predicted", "trees"))


@pytest.mark.parametrize(("family", "attention", "cache", "drafts", "rows"), list(_cases()))
def test_tokens_are_those_of_generate(
    family: str, attention: str | None, cache: str | None, drafts: str, rows: int
) -> None:
    model, inputs = tiny_model(family, attention=attention), repetitive_batch(rows or 1)
    if not rows:
        ids = inputs["input_ids"].repeat(3, 1)
        ids[1, 4] = 50
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options: dict[str, Any] = {"max_new_tokens": 48}
    if drafts != "found":
        options["eos_token_id"] = None
    if drafts == "trees":
        # Longer than prompt, window and widest draft, so that rings go round.
        options["max_new_tokens"] = 90
    output, _, drafter = assert_decodes(
        model, inputs, drafts, ours={"cache_implementation": cache}, **options
    )
    assert len(output.row_stats) == (rows or 3)
    assert output.stats.emitted == sum(row.emitted for row in output.row_stats)
    assert output.sequences.shape[1] > 30
    if drafts == "predicted":
        assert output.stats.accepted_prediction_tokens > 0
        assert output.stats.rejected_prediction_tokens > 0
        assert output.stats.steps < output.stats.emitted
    if drafts == "trees":
        drafter.assert_was_a_forest(rows)
        assert output.stats.accepted == sum(drafter.accepted)


def test_columns_hidden_amid_a_prompt_are_refused() -> None:
    inputs, model = repetitive_batch(2), tiny_model("gemma3")
    inputs["attention_mask"][1, 7] = 0
    with pytest.raises(InvalidValueError, match=r"got row 1, which hides column 7 .*on the left"):
        hf.generate(model, **inputs, max_new_tokens=4)
