"""The demo model, a real one, decodes the tokens of `model.generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdraft.demo import ensure_model
from hf_models import assert_decodes

pytestmark = pytest.mark.slow

NEW = 12
TEXTS = [
    "one two three four one two three",
    "def area(width, height):\n    return width * height\n\ndef area(width, height):\n",
]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    path = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), tokenizer


def test_same_tokens_as_generate(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    options = {"max_new_tokens": NEW, "pad_token_id": tokenizer.eos_token_id}
    output = assert_decodes(model, dict(inputs), "found", **options).output
    assert output.stats.accepted > 0
    assert output.stats.steps < output.stats.emitted
