"""Greedy decoding gives the tokens of `model.generate`: families, caches, attention and drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastdraft import hf
from fastdraft.errors import InvalidValueError
from hf_models import FAMILIES, assert_decodes, repetitive_batch, tiny_model

# The model's attention and the cache, by name.
_WAYS: dict[str, tuple[str | None, str | None]] = {
    "growing": (None, None),
    "eager": ("eager", None),
    "static": (None, "static"),
}


def _cases() -> Iterator[Any]:
    for family in FAMILIES:
        for drafts in ("found", "predicted", "trees"):
            # A row alone has no mask, and several are padded.
            for rows in (1, 3):
                yield pytest.param(family, "growing", drafts, rows)
        for drafts in ("predicted", "trees"):
            # The masks of a static cache are ours, for a row as for several.
            yield pytest.param(family, "static", drafts, 1, marks=pytest.mark.any_transformers)
            yield pytest.param(family, "static", drafts, 3)
    for family in ("gemma3", "gpt2", "mistral"):
        yield from (pytest.param(family, "eager", drafts, 3) for drafts in ("predicted", "trees"))


@pytest.mark.parametrize(("family", "way", "drafts", "rows"), list(_cases()))
def test_tokens_are_those_of_generate(family: str, way: str, drafts: str, rows: int) -> None:
    implementation, cache = _WAYS[way]
    model, inputs = tiny_model(family, attention=implementation), repetitive_batch(rows)
    options: dict[str, Any] = {"max_new_tokens": 48}
    if drafts != "found":
        options["eos_token_id"] = None
    if drafts == "trees":
        # Longer than prompt, window and widest draft, so that rings go round.
        options["max_new_tokens"] = 90
    output, _, drafter = assert_decodes(
        model, inputs, drafts, ours={"cache_implementation": cache}, **options
    )
    assert len(output.row_stats) == rows
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
