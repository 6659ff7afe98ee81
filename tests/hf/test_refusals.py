"""Calls that used to fail late or unclearly are refused before the prompt runs, or work."""

from __future__ import annotations

import copy
import functools
from typing import Any

import accelerate
import numpy as np
import peft
import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers.generation import utils

from fastdraft import hf
from fastdraft.errors import InvalidValueError
from fastdraft.hf.interface import CACHE
from hf_models import (
    Generous,
    assert_decodes,
    drawn,
    plain_tokens,
    repetitive_batch,
    tiny_model,
)
from watches import counted_forwards

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}


@pytest.mark.parametrize("read", ["__getitem__", "softmax", "shape"])
def test_criteria_that_read_scores_are_refused(model: Any, read: str) -> None:
    def stop(_text: Any, scores: Any, **_: Any) -> Any:
        return torch.softmax(scores, -1) if read == "softmax" else getattr(scores, read)(0)

    with pytest.raises(InvalidValueError, match="stopping criteria must not read scores"):
        hf.generate(model, **repetitive_batch(1), **OPTIONS, stopping_criteria=[stop])


# transformers 5.19 warns that the model's device is none.
@pytest.mark.filterwarnings("ignore:You are calling .generate")
def test_offloaded_embeddings() -> None:
    model, plain = (tiny_model("llama").double() for _ in range(2))
    accelerate.cpu_offload(model)
    assert model.device.type == "meta"
    assert_decodes(model, repetitive_batch(2), plain=plain, exact=True, **OPTIONS)


def test_seeds_of_numpy(model: Any) -> None:
    inputs, options = repetitive_batch(2), {**OPTIONS, "do_sample": True}
    expected = hf.generate(model, **inputs, **options, seed=3).sequences
    for seed in (np.int64(3), np.array([3, 4]), [np.int32(3), 4]):
        output = hf.generate(model, **inputs, **options, seed=seed)
        assert torch.equal(output.sequences, expected)
    with pytest.raises(InvalidValueError, match=r"seed must be from 0 .* got -1"):
        hf.generate(model, **inputs, **options, seed=np.int64(-1))


@pytest.mark.parametrize("inside", [False, True])
def test_models_that_are_spread_over_ranks(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    model, inputs = tiny_model("llama"), repetitive_batch(1)
    plain_tokens(model, inputs, **OPTIONS)
    monkeypatch.setattr(utils, "is_fsdp_managed_module", lambda _: True)
    monkeypatch.setattr(utils, "_get_torch_distributed_world_size", lambda: 2)
    decode = functools.partial(hf.generate, model)
    if inside:
        decode = functools.partial(model.generate, custom_generate=hf.speculate())
    with pytest.raises(InvalidValueError, match=r"gather the parameters .* synced_gpus=False"):
        decode(**inputs, **OPTIONS)
    assert_decodes(model, inputs, ours={"synced_gpus": False}, exact=True, **OPTIONS)


def test_gradient_checkpointing_while_training() -> None:
    model, inputs = tiny_model("llama").double(), repetitive_batch(1)
    expected = model.generate(**inputs, **OPTIONS)
    model.gradient_checkpointing_enable()
    model.train()
    if CACHE == "cache":
        assert torch.equal(hf.generate(model, **inputs, **OPTIONS).sequences, expected)
    else:
        with pytest.raises(InvalidValueError, match=r"gradient checkpointing .* model\.eval\(\)"):
            hf.generate(model, **inputs, **OPTIONS)
    model.eval()
    assert torch.equal(hf.generate(model, **inputs, **OPTIONS).sequences, expected)


def test_a_generation_config_passes_no_custom_generate_on() -> None:
    """Plain decoding would go on in silence."""
    model, inputs = tiny_model("llama"), repetitive_batch(1)
    speculate = hf.speculate(drafter=Generous())
    config = GenerationConfig(**OPTIONS, custom_generate=speculate)
    with pytest.raises(InvalidValueError, match="custom_generate must be an argument of"):
        model.generate(**inputs, generation_config=config)

    expected = model.generate(**inputs, **OPTIONS)
    model.generate = functools.partial(model.generate, custom_generate=speculate)
    copied = copy.deepcopy(model)
    assert copied.generate.keywords["custom_generate"] is speculate
    assert torch.equal(copied.generate(**inputs, **OPTIONS), expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_adapters_by_row(rows: int) -> None:
    """PEFT expects all rows in every forward; those that have ended leave ours."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(tiny_model("llama"), config)
    model.add_adapter("other", config)
    model, inputs = model.double().eval(), repetitive_batch(rows)
    names = ["other", "default"][:rows]
    if rows == 1:
        assert_decodes(model, inputs, exact=True, **OPTIONS, adapter_names=names)
        return
    inside = functools.partial(model.generate, custom_generate=hf.speculate())
    for decode in (functools.partial(hf.generate, model), inside):
        with (
            counted_forwards(model) as forwards,
            pytest.raises(InvalidValueError, match="adapter_names must be unset for several rows"),
        ):
            decode(**inputs, **OPTIONS, adapter_names=names)
        assert not forwards


def test_models_with_an_indexer() -> None:
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("transformers has no such model yet")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 8, "head_dim": 4}
    index = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 64}
    config = transformers.DeepseekV32Config(
        vocab_size=97, num_hidden_layers=1, pad_token_id=0, **sizes, **ranks, **heads, **index
    )
    config._experts_implementation = "eager"
    model = drawn(transformers.AutoModelForCausalLM.from_config, config).double()
    # While all tokens are chosen, nothing depends on the choice.
    for rows, drafts in ((1, "predicted"), (1, "trees"), (3, "predicted"), (3, "trees")):
        assert_decodes(model, repetitive_batch(rows), drafts, exact=True, **OPTIONS)
    options = {**OPTIONS, "return_dict_in_generate": True, "max_new_tokens": 16}
    first = hf.generate(model, **repetitive_batch(1), **options)
    more = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    options["max_new_tokens"] = 8
    expected = model.generate(**more, **options).sequences
    second = hf.generate(model, **more, **options, **{CACHE: first[CACHE]})
    assert torch.equal(second.sequences, expected)
    long = {**OPTIONS, "max_new_tokens": 40}
    with pytest.raises(InvalidValueError, match=r"max_length must be at most 64, .* got 70"):
        hf.generate(model, **repetitive_batch(1), **long)


def test_a_padding_token_outside_the_vocabulary_is_not_asked_about() -> None:
    model = tiny_model("llama")
    # The configuration is what answers are kept by.
    model.config.pad_token_id = model.generation_config.pad_token_id = 1_000_003
    assert_decodes(model, repetitive_batch(2), **OPTIONS, pad_token_id=0)
