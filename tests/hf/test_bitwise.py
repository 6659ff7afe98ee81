"""Logits with the same bits in any forward: other widths, batches, padding and drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from fastdraft import hf
from fastdraft.drafters import AssistantModel
from fastdraft.errors import InvalidValueError
from fastdraft.hf.bitwise import KEYS, TILE, Bitwise
from hf_models import Forester, Generous, Silent, edited, repetitive_batch, tiny_model

NEW = 30
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUICK = ("gemma3", "llama")
SLOW = ("gpt2", "mistral", "opt", "qwen3")
# Tiles and blocks of keys are left behind, and the last ones begun.
LONG = KEYS + TILE + 5
ONE_BY_ONE = [KEYS - 6, *[1] * (LONG - KEYS + 6)]
# Sizes for which libraries choose other kernels for other shapes.
WIDE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48, "vocab_size": 4000}


def where_machines_allow(test: Callable[..., None]) -> Callable[..., None]:
    """Skips a test on a machine whose libraries round by a token's index in a tile."""

    @functools.wraps(test)
    def tried(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except InvalidValueError as error:
            if "on this machine" not in str(error):
                raise
            pytest.skip(str(error))

    return tried


def _text(rows: int, tokens: int, vocabulary: int = 90) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, vocabulary, (rows, tokens), generator=generator)


def _logits(model: Any, ids: torch.Tensor, widths: list[int], pad: int = 0) -> torch.Tensor:
    """The logits of a text in forwards of these widths, in a batch with columns of padding."""
    cache, parts, at = DynamicCache(config=model.config), [], 0
    ids = torch.cat([ids.new_zeros(len(ids), pad), ids], 1)
    mask = torch.ones_like(ids)
    mask[:, :pad] = 0
    for width in [pad + widths[0], *widths[1:]]:
        end = at + width
        positions = (torch.arange(at, end) - pad).clamp_min(0).expand(len(ids), -1)
        output = model(
            ids[:, at:end],
            attention_mask=mask[:, :end],
            position_ids=positions,
            past_key_values=cache,
        )
        parts.append(output.logits)
        at = end
    return torch.cat(parts, 1)[:, pad:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@where_machines_allow
def test_logits_do_not_depend_on_the_forward(dtype: torch.dtype) -> None:
    model = tiny_model("llama", **WIDE).to(dtype)
    ids = _text(3, LONG, WIDE["vocab_size"])
    with torch.no_grad(), Bitwise():
        expected = _logits(model, ids, [LONG])
        for widths in ([7, 1, LONG - 8], [LONG - TILE - 3, TILE + 3], ONE_BY_ONE):
            assert torch.equal(_logits(model, ids, widths), expected)
        for row in range(3):
            alone = _logits(model, ids[row : row + 1], [LONG - 9, 9], pad=5 + row)
            assert torch.equal(alone[0], expected[row])
    with torch.no_grad():
        plain = _logits(model, ids, [LONG])
    error = float((plain - expected).abs().max() / plain.abs().max())
    assert error < 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
@where_machines_allow
def test_drafts_and_batches_change_no_bit(family: str) -> None:
    model, inputs = tiny_model(family).to(torch.bfloat16), repetitive_batch(3)
    options: dict[str, Any] = {
        "bitwise": True,
        "do_sample": True,
        "top_k": 4,
        "max_new_tokens": NEW,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    plain = hf.generate(model, **inputs, **options, seed=[5, 6, 7], drafter=Silent())
    said = plain.sequences[:, 30:]
    arms: dict[str, dict[str, Any]] = {
        "found": {"drafter": Generous()},
        "predicted": {"prediction": [edited(own, row=row) for row, own in enumerate(said)]},
        "trees": {"drafter": Forester(said.tolist(), nodes=9, seed=1)},
    }
    for arm in arms.values():
        drafted = hf.generate(model, **inputs, **options, seed=[5, 6, 7], **arm)
        assert drafted.stats.steps < plain.stats.steps
        assert torch.equal(drafted.sequences, plain.sequences)
        assert all(map(torch.equal, drafted.logits, plain.logits))
    for row, seed in enumerate([5, 6, 7]):
        shown = inputs["attention_mask"][row] > 0
        prompt = {name: each[row : row + 1, shown] for name, each in inputs.items()}
        alone = hf.generate(model, **prompt, **options, seed=[seed], drafter=Generous())
        assert alone.sequences[0, -NEW:].tolist() == said[row].tolist()
        for one, together in zip(alone.logits, plain.logits, strict=True):
            assert torch.equal(one[0], together[row])


def test_what_rounds_by_shape_is_refused() -> None:
    inputs = repetitive_batch(1)
    options: dict[str, Any] = {"bitwise": True, "max_new_tokens": 4}
    with pytest.raises(InvalidValueError, match="'sdpa' attention, got torch's matmul"):
        hf.generate(tiny_model("llama", attention="eager"), **inputs, **options)
    model = tiny_model("llama")
    with pytest.raises(InvalidValueError, match="bitwise must be False with a static cache"):
        hf.generate(model, **inputs, **options, cache_implementation="static")
    with pytest.raises(InvalidValueError, match="bitwise must be False where models draft"):
        hf.generate(model, **inputs, **options, drafter=AssistantModel(tiny_model("llama")))
