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
    Forester,
    Generous,
    assert_goes_on,
    drawn,
    repetitive_batch,
)

if not hasattr(Cache, "is_recording_past"):
    pytest.skip("needs transformers 5.21", allow_module_level=True)

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
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


@pytest.fixture(scope="module", params=["lfm2", "lfm2_moe"])
def model(request: pytest.FixtureRequest) -> Any:
    return _model(request.param)


def _wrong_at_times(sequences: torch.Tensor) -> list[list[int]]:
    """What comes, but for one token in seven, elsewhere in each row."""
    predictions = sequences[:, PROMPT:].clone()
    for row in range(len(predictions)):
        predictions[row, 3 + row :: 7] = (predictions[row, 3 + row :: 7] + 1) % VOCABULARY
    return predictions.tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_those_of_generate(model: Any, rows: int) -> None:
    inputs = repetitive_batch(rows)
    expected = model.generate(**inputs, **OPTIONS)
    output = hf.generate(
        model,
        **inputs,
        **OPTIONS,
        drafter=Generous(),
        prediction=_wrong_at_times(expected),
    )
    assert torch.equal(output.sequences, expected)
    assert 0 < output.stats.accepted < output.stats.drafted


@pytest.mark.parametrize("kernel", [1, 2, 7])
def test_kernels_of_any_size(kernel: int) -> None:
    model = _model("lfm2", conv_L_cache=kernel)
    inputs = repetitive_batch(3)
    expected = model.generate(**inputs, **OPTIONS)
    predictions = _wrong_at_times(expected)
    output = hf.generate(model, **inputs, **OPTIONS, drafter=Generous(), prediction=predictions)
    assert torch.equal(output.sequences, expected)


@pytest.mark.skipif(not hasattr(transformers, "Lfm3Config"), reason="needs a newer transformers")
@pytest.mark.parametrize("rows", [1, 3])
def test_beside_sliding_windows(rows: int) -> None:
    kinds = ["conv", "sliding_attention", "conv", "full_attention"]
    model = _model("lfm3", layer_types=kinds, conv_L_cache=7, sliding_window=11, head_dim=8)
    inputs = repetitive_batch(rows)
    expected = model.generate(**inputs, **OPTIONS)
    predictions = _wrong_at_times(expected)
    output = hf.generate(model, **inputs, **OPTIONS, drafter=Generous(), prediction=predictions)
    assert torch.equal(output.sequences, expected)
    assert 0 < output.stats.accepted < output.stats.drafted


def test_prompts_shorter_than_the_kernel() -> None:
    model = _model("lfm2", conv_L_cache=7)
    inputs = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2).long()}
    expected = model.generate(**inputs, **OPTIONS)
    prediction = expected[0, 2:].tolist()
    prediction[2::5] = [3] * len(prediction[2::5])
    output = hf.generate(model, **inputs, **OPTIONS, drafter=Generous(), prediction=prediction)
    assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_end_leave(model: Any, rows: int) -> None:
    inputs = repetitive_batch(rows)
    longest = model.generate(**inputs, **OPTIONS)
    # The end token appears in the rows at different places.
    options = {**OPTIONS, "eos_token_id": int(longest[0, PROMPT + 9]), "pad_token_id": PAD}
    expected = model.generate(**inputs, **options)
    predictions = _wrong_at_times(longest)
    output = hf.generate(model, **inputs, **options, drafter=Generous(), prediction=predictions)
    assert torch.equal(output.sequences, expected)


def test_trees_are_verified_as_chains(model: Any) -> None:
    inputs = repetitive_batch(3)
    expected = model.generate(**inputs, **OPTIONS)
    forester = Forester([row[PROMPT:].tolist() for row in expected])
    output = hf.generate(model, **inputs, **OPTIONS, drafter=forester)
    assert torch.equal(output.sequences, expected)
    assert 0 < output.stats.accepted < output.stats.drafted


def test_a_cache_is_handed_over_with_its_state(model: Any) -> None:
    inputs = repetitive_batch(1)
    options = {**OPTIONS, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    predictions = _wrong_at_times(plain.sequences)
    first = hf.generate(model, **inputs, **options, drafter=Generous(), prediction=predictions)
    for ours, theirs in zip(first[CACHE].layers[::2], plain[CACHE].layers[::2], strict=True):
        torch.testing.assert_close(ours.conv_states[0], theirs.conv_states[0])
    assert_goes_on(model, first, inputs)


def test_a_cache_that_recorded_its_past_goes_on(model: Any) -> None:
    inputs = repetitive_batch(1)
    expected = model.generate(**inputs, **OPTIONS)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    # Such a cache holds the inputs of all 20 tokens; the convolution needs the last three.
    model(inputs["input_ids"][:, :20], **{CACHE: cache})
    options = {**OPTIONS, "return_dict_in_generate": True}
    output = hf.generate(
        model,
        **inputs,
        **options,
        **{CACHE: cache},
        drafter=Generous(),
        prediction=_wrong_at_times(expected),
    )
    assert torch.equal(output.sequences, expected)
    plain = model.generate(**inputs, **options)
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
@pytest.mark.parametrize(("small", "large"), [(0.3, 0.0), (0.0, 0.3)])
@pytest.mark.parametrize("rows", [1, 3])
def test_draft_models_with_convolutions(rows: int, small: float, large: float) -> None:
    model = _model("lfm2")
    inputs = repetitive_batch(rows)
    expected = model.generate(**inputs, **OPTIONS)
    drafter: Any = Staged(
        [
            AssistantModel(bent(model, by=small, seed=2), schedule="constant", num_tokens=3),
            AssistantModel(bent(model, by=large), schedule="constant", num_tokens=5),
        ]
    )
    output = hf.generate(model, **inputs, **OPTIONS, drafter=drafter, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    accepted, drafted = output.stats.accepted, output.stats.drafted
    assert accepted < drafted if large else accepted > 0


def test_a_static_cache_is_refused(model: Any) -> None:
    forwards: list[int] = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    with pytest.raises(InvalidValueError, match="a static cache needs layers of"):
        hf.generate(model, **repetitive_batch(1), **OPTIONS, cache_implementation="static")
    handle.remove()
    assert not forwards
