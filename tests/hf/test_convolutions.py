"""Models with short convolutions: a rejected token's input is taken back, of each row its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import Cache

from assistants import bent
from fastdraft import hf
from fastdraft.drafters import AssistantModel, Staged
from fastdraft.errors import InvalidValueError
from fastdraft.hf.interface import CACHE
from fastdraft.hf.kv_cache import RowCache
from hf_models import (
    EOS,
    PAD,
    VOCABULARY,
    assert_decodes,
    assert_goes_on,
    drawn,
    edited,
    plain_tokens,
    repetitive_batch,
)
from watches import counted_forwards

pytestmark = pytest.mark.slow

if not hasattr(Cache, "is_recording_past"):
    pytest.skip("needs transformers 5.21", allow_module_level=True)

OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
DICT = {"return_dict_in_generate": True, "do_sample": False}
PROMPT = 30


def _model(family: str, **changes: Any) -> Any:
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    special: dict[str, Any] = {"layer_types": kinds, "conv_L_cache": 3}
    if family == "lfm2_moe":
        special |= {
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
        }
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=EOS,
        pad_token_id=PAD,
        **special | changes,
    )
    config._experts_implementation = "eager"  # the others take no double precision
    # In double precision no processor's rounding of wide and narrow forwards decides a test.
    return drawn(transformers.AutoModelForCausalLM.from_config, config).double()


@pytest.fixture(scope="module")
def model() -> Any:
    return _model("lfm2")


_WINDOWS: dict[str, Any] = {
    "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    "conv_L_cache": 7,
    "sliding_window": 11,
    "head_dim": 8,
}
_SHORT = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2).long()}


@pytest.mark.parametrize(
    ("family", "changes", "inputs", "drafts"),
    [
        ("lfm2", {}, repetitive_batch(1), "predicted"),
        ("lfm2", {}, repetitive_batch(3), "trees"),  # which are verified as chains
        ("lfm2_moe", {}, repetitive_batch(3), "predicted"),
        ("lfm2", {"conv_L_cache": 1}, repetitive_batch(3), "predicted"),
        ("lfm2", {"conv_L_cache": 7}, repetitive_batch(3), "predicted"),
        ("lfm2", {"conv_L_cache": 7}, _SHORT, "predicted"),
        ("lfm3", _WINDOWS, repetitive_batch(1), "predicted"),
        ("lfm3", _WINDOWS, repetitive_batch(3), "predicted"),
    ],
)
def test_tokens_are_those_of_generate(
    family: str, changes: dict[str, Any], inputs: dict[str, torch.Tensor], drafts: str
) -> None:
    if family == "lfm3" and not hasattr(transformers, "Lfm3Config"):
        pytest.skip("needs a newer transformers")
    model = _model(family, **changes)
    stats = assert_decodes(model, inputs, drafts, every=7, exact=True, **OPTIONS).output.stats
    assert 0 < stats.accepted < stats.drafted


def test_rows_that_end_leave(model: Any) -> None:
    inputs = repetitive_batch(3)
    longest = plain_tokens(model, inputs, **OPTIONS)
    # The end token appears in the rows at different places.
    options = {**OPTIONS, "eos_token_id": int(longest[0, PROMPT + 9]), "pad_token_id": PAD}
    ours = {
        "prediction": [edited(line, every=7, row=at) for at, line in enumerate(longest[:, 30:])]
    }
    assert_decodes(model, inputs, ours=ours, exact=True, **options)


def test_a_cache_is_handed_over_with_its_state(model: Any) -> None:
    inputs = repetitive_batch(1)
    plain = model.generate(**inputs, **OPTIONS, **DICT)
    first = assert_decodes(model, inputs, every=7, ours=DICT, exact=True, **OPTIONS).output
    for ours, theirs in zip(first[CACHE].layers[::2], plain[CACHE].layers[::2], strict=True):
        torch.testing.assert_close(ours.conv_states[0], theirs.conv_states[0])
    assert_goes_on(model, first, inputs)


def test_a_cache_that_recorded_its_past_goes_on(model: Any) -> None:
    inputs = repetitive_batch(1)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    # Such a cache holds the inputs of all 20 tokens; the convolution needs the last three.
    model(inputs["input_ids"][:, :20], **{CACHE: cache})
    assert_decodes(model, inputs, every=7, ours={CACHE: cache}, exact=True, **OPTIONS)
    plain = model.generate(**inputs, **OPTIONS, **DICT)
    for ours, theirs in zip(cache.layers[::2], plain[CACHE].layers[::2], strict=True):
        torch.testing.assert_close(ours.conv_states[0], theirs.conv_states[0])


def test_a_cache_without_the_inputs_is_refused(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    inputs = repetitive_batch(1)
    model(inputs["input_ids"][:, :20], **{CACHE: cache})
    cache.layers[2].reset()
    with pytest.raises(InvalidValueError, match="inputs of its 20 tokens, got layer 2 without"):
        hf.generate(model, **inputs, **OPTIONS, **{CACHE: cache})


def test_convolutions_alone_are_refused() -> None:
    cache = DynamicCache(config=_model("lfm2").config)
    cache.layers = cache.layers[::2]
    with pytest.raises(InvalidValueError, match="got layer 0 with LinearAttentionLayer"):
        RowCache(cache, layer_types=["conv", "conv"])


# The larger one agrees with the target always, or hardly ever; the smaller one with the larger one.
@pytest.mark.parametrize(("small", "large", "rows"), [(0.3, 0.0, 3), (0.0, 0.3, 3), (0.3, 0.3, 1)])
def test_draft_models_with_convolutions(rows: int, small: float, large: float) -> None:
    model = _model("lfm2")
    drafter: Any = Staged(
        [
            AssistantModel(bent(model, by=small, seed=2), schedule="constant", num_tokens=3),
            AssistantModel(bent(model, by=large), schedule="constant", num_tokens=5),
        ]
    )
    stats = assert_decodes(
        model, repetitive_batch(rows), drafter, exact=True, **OPTIONS
    ).output.stats
    assert stats.accepted < stats.drafted if large else stats.accepted > 0


def test_a_static_cache_is_refused(model: Any) -> None:
    message = "a static cache needs layers of"
    with counted_forwards(model) as forwards, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **repetitive_batch(1), **OPTIONS, cache_implementation="static")
    assert not forwards
