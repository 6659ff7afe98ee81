"""Models whose layers have an indexer: its keys are kept, moved and handed over as others are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fastdraft import hf
from fastdraft.errors import InvalidValueError
from fastdraft.hf.interface import CACHE
from hf_models import EOS, PAD, VOCABULARY, Forester, assert_goes_on, drawn, repetitive_batch

if not hasattr(transformers, "DeepseekV32Config"):
    pytest.skip("transformers has no such model yet", allow_module_level=True)

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
PROMPT = 30


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.DeepseekV32Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        head_dim=4,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=200,
        max_position_embeddings=256,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    return drawn(transformers.AutoModelForCausalLM.from_config, config)


@pytest.mark.parametrize("rows", [1, 3])
def test_trees_give_the_tokens_of_generate(model: Any, rows: int) -> None:
    inputs = repetitive_batch(rows)
    expected = model.generate(**inputs, **OPTIONS)
    forester = Forester([row[PROMPT:].tolist() for row in expected])
    output = hf.generate(model, **inputs, **OPTIONS, drafter=forester)
    assert torch.equal(output.sequences, expected)
    assert forester.moved > 0


def test_a_cache_is_handed_over_with_its_index(model: Any) -> None:
    inputs = repetitive_batch(1)
    options = {**OPTIONS, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    forester = Forester([plain.sequences[0, PROMPT:].tolist()])
    first = hf.generate(model, **inputs, **options, drafter=forester)
    assert forester.moved > 0
    for ours, theirs in zip(first[CACHE].layers, plain[CACHE].layers, strict=True):
        torch.testing.assert_close(ours.indexer_keys, theirs.indexer_keys)
    assert_goes_on(model, first, inputs)


def test_what_an_indexer_would_choose_from_is_refused(model: Any) -> None:
    forwards: list[int] = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    for options, message in (
        ({"max_length": 201}, "max_length must be at most 200 with indexed attention"),
        ({"max_length": 60, "cache_implementation": "static"}, "a static cache needs layers of"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            hf.generate(model, **repetitive_batch(1), **options)
    handle.remove()
    assert not forwards
