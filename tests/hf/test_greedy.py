"""Greedy decoding gives the tokens of `model.generate`, with all that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fastdraft import DraftConfig
from hf_models import (
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


@pytest.mark.parametrize(("drafts", "most"), [("predicted", NEW / 3), ("trees", NEW * 2 / 3)])
def test_a_draft_is_verified_in_one_forward(llama: Any, drafts: str, most: float) -> None:
    inputs, options = repetitive_batch(1), {"max_new_tokens": NEW, "eos_token_id": None}
    plain_tokens(llama, inputs, **options)
    with counted_forwards(llama) as forwards:
        output = assert_decodes(llama, inputs, drafts, every=NEW, **options).output
    assert len(forwards) == output.stats.steps < most


@pytest.mark.parametrize(
    ("family", "rows", "drafts", "width"),
    [
        # 'predicted' drafts are chains of 4.
        ("llama", 1, "predicted", 6),
        ("gemma3", 3, "predicted", 6),
        ("gemma3", 1, "trees", 16),
        ("opt", 3, "trees", 16),
    ],
)
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


_DECODER = {"d_model": 32, "decoder_ffn_dim": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
_ROFORMER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((family, _DECODER) for family in ("Bart", "Marian", "Pegasus", "TrOCR")),
        ("RoFormer", {**_ROFORMER, "num_attention_heads": 4}),
    ],
)
def test_no_token_is_put_behind_the_last_position(family: str, sizes: dict[str, int]) -> None:
    """These models take a token's position from the cache's length."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(
        **sizes,
        vocab_size=VOCABULARY,
        max_position_embeddings=48,
        is_decoder=True,
        is_encoder_decoder=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = drawn(kind, config).double()
    ids = repetitive_batch(1)["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    # Hidden columns take up positions too.
    inputs["attention_mask"][:, : 0 if family == "Bart" else 4] = 0
    options = {"max_new_tokens": 18, "eos_token_id": None}
    plain_tokens(model, inputs, **options)
    charge_in_steps(model, 6)
    assert_decodes(model, inputs, every=5, exact=True, **options)


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


@pytest.mark.parametrize("options", [{"max_length": 37}, {"prefill_chunk_size": 8}], ids="-".join)
def test_lengths_and_chunks_of_the_prompt(llama: Any, options: dict[str, Any]) -> None:
    options = {"max_length": 30 + NEW, "eos_token_id": None, **options}
    found = assert_decodes(llama, repetitive_batch(3), "found", **options)
    assert found.output.sequences.shape[1] == options["max_length"]


def test_embeddings_as_prompt(llama: Any) -> None:
    inputs = repetitive_batch(3)
    embedded = {
        "inputs_embeds": llama.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    assert_decodes(llama, embedded, "found", exact=True, max_new_tokens=NEW)


def test_half_precision_differs_only_at_ties() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    inputs = repetitive_batch(8)
    found = assert_decodes(model, inputs, max_new_tokens=NEW, eos_token_id=None)
    unequal = (found.output.sequences != found.expected).any(1)
    assert unequal.sum() < 8
