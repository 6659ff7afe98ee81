"""Greedy decoding gives the tokens of `model.generate`, with all that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fastdraft import DraftConfig
from hf_models import (
    FAMILIES,
    VOCABULARY,
    Forester,
    Generous,
    Silent,
    assert_decodes,
    charge_in_steps,
    drawn,
    plain_tokens,
    repetitive_batch,
    tiny_model,
)
from watches import counted_forwards

NEW = 48


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_without_padding_keep_the_models_own_masks(family: str) -> None:
    model = tiny_model(family)
    ids = repetitive_batch(1)["input_ids"]
    inputs = {"input_ids": ids.repeat(3, 1), "attention_mask": torch.ones(3, ids.shape[1])}
    inputs["input_ids"][1, 4] = 50
    inputs["attention_mask"] = inputs["attention_mask"].long()
    assert_decodes(model, inputs, "found", max_new_tokens=NEW)


@pytest.mark.parametrize(
    "drafter",
    [None, DraftConfig(lookahead=3), DraftConfig.prompt_lookup(), DraftConfig.ngram(3, 0.1)],
)
def test_drafters_by_configuration(llama: Any, drafter: DraftConfig | None) -> None:
    assert_decodes(llama, repetitive_batch(3), drafter, max_new_tokens=NEW)


def test_without_drafts_every_step_emits_one_token(llama: Any) -> None:
    output = assert_decodes(llama, repetitive_batch(3), Silent(), max_new_tokens=NEW).output
    assert output.stats.steps == output.stats.emitted
    assert output.stats.drafts == 0


def test_drafts_save_forwards(llama: Any) -> None:
    inputs = repetitive_batch(1)
    plain_tokens(llama, inputs, max_new_tokens=NEW)
    with counted_forwards(llama) as forwards:
        output = assert_decodes(llama, inputs, max_new_tokens=NEW, every=NEW).output
    assert len(forwards) == output.stats.steps < NEW / 3


# 'predicted' drafts are chains of 4.
@pytest.mark.parametrize(("drafts", "width"), [("predicted", 6), ("trees", 16)])
@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
@pytest.mark.parametrize("rows", [1, 3])
def test_forwards_are_padded_to_the_cheaper_width(
    family: str, rows: int, drafts: str, width: int
) -> None:
    model, inputs = tiny_model(family), repetitive_batch(rows)
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}
    plain_tokens(model, inputs, **options)
    charge_in_steps(model, width)
    ours = {"drafter": Generous(DraftConfig(lookahead=4))} if drafts == "predicted" else None
    with counted_forwards(model) as widths:
        assert_decodes(model, inputs, drafts, ours=ours, **options)
    assert {30, width} <= set(widths) <= {30, 1, width}
    assert widths.count(width) > 5


_PLACED_BY_THE_CACHE = {
    "bart": transformers.BartForCausalLM,
    "marian": transformers.MarianForCausalLM,
    "pegasus": transformers.PegasusForCausalLM,
    "trocr": transformers.TrOCRForCausalLM,
    "roformer": transformers.RoFormerForCausalLM,
}


def _placed_by_the_cache(family: str, *, positions: int) -> Any:
    kind = _PLACED_BY_THE_CACHE[family]
    sizes = (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        if family == "roformer"
        else {"d_model": 32, "decoder_ffn_dim": 64, "decoder_layers": 2}
    )
    heads = "num_attention_heads" if family == "roformer" else "decoder_attention_heads"
    config = kind.config_class(
        **sizes,
        **{heads: 4},
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
        is_decoder=True,
        is_encoder_decoder=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        tie_word_embeddings=False,
    )
    return drawn(kind, config).double()


@pytest.mark.parametrize("hidden", [0, 4])
@pytest.mark.parametrize("family", _PLACED_BY_THE_CACHE)
def test_nothing_is_placed_behind_the_last_position(family: str, hidden: int) -> None:
    model = _placed_by_the_cache(family, positions=48)
    ids = repetitive_batch(1)["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    # Hidden columns take up positions too.
    inputs["attention_mask"][:, :hidden] = 0
    options = {"max_new_tokens": 18, "eos_token_id": None}
    plain_tokens(model, inputs, **options)
    charge_in_steps(model, 6)
    assert_decodes(model, inputs, every=5, exact=True, **options)


def test_max_length_counts_the_prompt(llama: Any) -> None:
    options = {"max_length": 37, "eos_token_id": None}
    found = assert_decodes(llama, repetitive_batch(3), "found", **options)
    assert found.output.sequences.shape[1] == 37


@pytest.mark.parametrize("drafts", ["chains", "trees"])
def test_learned_positions_end_where_the_model_ends(drafts: str) -> None:
    model, inputs = tiny_model("gpt2"), repetitive_batch(1, longest=240)
    said = plain_tokens(model, inputs, max_length=256, eos_token_id=None)[0, 240:].tolist()
    # No limit but the model's own until the end is there.
    options = {"max_length": 1000, "eos_token_id": said[14]}
    for seed in range(4):
        ours: dict[str, Any] = {"drafter": Forester([said], nodes=40, seed=seed)}
        if drafts == "chains":
            ours = {"drafter": Generous(), "prediction": said * 2}
        assert_decodes(model, inputs, "found", ours=ours, **options)


def test_embeddings_as_prompt(llama: Any) -> None:
    inputs = repetitive_batch(3)
    embedded = {
        "inputs_embeds": llama.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    assert_decodes(llama, embedded, "found", exact=True, max_new_tokens=NEW)


def test_chunked_prefill(llama: Any) -> None:
    options = {"max_new_tokens": NEW, "prefill_chunk_size": 8}
    assert_decodes(llama, repetitive_batch(3), "found", **options)


def test_half_precision_differs_only_at_ties() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    inputs = repetitive_batch(8)
    found = assert_decodes(model, inputs, max_new_tokens=NEW, eos_token_id=None)
    unequal = (found.output.sequences != found.expected).any(1)
    assert unequal.sum() < 8
