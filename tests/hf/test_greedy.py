"""Greedy decoding gives the tokens of `model.generate`, for every family and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

from fastdraft import DraftConfig, hf
from hf_models import (
    EOS,
    FAMILIES,
    VOCABULARY,
    Generous,
    Silent,
    assert_same_tokens,
    charge_in_steps,
    drawn,
    edited,
    plain_tokens,
    repetitive_batch,
    tiny_model,
)

NEW = 48
# A row alone has no mask, and several are padded: transformers treats 8 as it does 3.
ROWS = [1, 3, pytest.param(8, marks=pytest.mark.any_transformers)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


def _both(model: Any, inputs: dict[str, torch.Tensor], drafter: Any, **options: Any) -> Any:
    prediction = options.pop("prediction", None)
    expected = plain_tokens(model, inputs, **options)
    output = hf.generate(
        model, **inputs, do_sample=False, drafter=drafter, prediction=prediction, **options
    )
    assert_same_tokens(model, expected, output.sequences, attention_mask=inputs["attention_mask"])
    assert output.stats.emitted == sum(row.emitted for row in output.row_stats)
    return output


@pytest.mark.parametrize("rows", ROWS)
def test_same_tokens_as_generate(model: Any, rows: int) -> None:
    inputs = repetitive_batch(rows)
    output = _both(model, inputs, Generous(), max_new_tokens=NEW)
    assert len(output.row_stats) == rows
    assert output.sequences.shape[1] > 30


@pytest.mark.parametrize("rows", ROWS)
def test_same_tokens_with_predictions(model: Any, rows: int) -> None:
    inputs = repetitive_batch(rows)
    columns = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": NEW, "eos_token_id": None}
    expected = plain_tokens(model, inputs, **options)
    predictions = [edited(row[columns:]) for row in expected]
    output = _both(model, inputs, Generous(), prediction=predictions, **options)
    assert output.stats.accepted_prediction_tokens > 0
    assert output.stats.rejected_prediction_tokens > 0
    assert output.stats.steps < output.stats.emitted


def test_prompts_without_padding_keep_the_models_own_masks(model: Any) -> None:
    ids = repetitive_batch(1)["input_ids"]
    inputs = {"input_ids": ids.repeat(3, 1), "attention_mask": torch.ones(3, ids.shape[1])}
    inputs["input_ids"][1, 4] = 50
    inputs["attention_mask"] = inputs["attention_mask"].long()
    _both(model, inputs, Generous(), max_new_tokens=NEW)


@pytest.mark.parametrize("drafter", [None, DraftConfig(lookahead=3), DraftConfig.prompt_lookup()])
def test_drafters_by_configuration(llama: Any, drafter: DraftConfig | None) -> None:
    _both(llama, repetitive_batch(3), drafter, max_new_tokens=NEW)


def test_without_drafts_every_step_emits_one_token(llama: Any) -> None:
    output = _both(llama, repetitive_batch(3), Silent(), max_new_tokens=NEW)
    assert output.stats.steps == output.stats.emitted
    assert output.stats.drafts == 0


def test_drafts_save_forwards(llama: Any) -> None:
    inputs = repetitive_batch(1)
    expected = plain_tokens(llama, inputs, max_new_tokens=NEW)
    forwards = []
    handle = llama.register_forward_hook(lambda *_: forwards.append(1))
    output = hf.generate(
        llama,
        **inputs,
        do_sample=False,
        max_new_tokens=NEW,
        prediction=expected[0, 30:],
        drafter=Generous(),
    )
    handle.remove()
    assert len(forwards) == output.stats.steps < NEW / 3


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
@pytest.mark.parametrize("rows", [1, 3])
def test_forwards_are_padded_to_the_cheaper_width(family: str, rows: int) -> None:
    model = tiny_model(family)
    inputs = repetitive_batch(rows)
    expected = plain_tokens(model, inputs, max_new_tokens=NEW, eos_token_id=None)
    charge_in_steps(model, 6)
    widths: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _, arguments, __: widths.append(arguments[0].shape[1])
    )
    output = hf.generate(
        model,
        **inputs,
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=None,
        drafter=Generous(DraftConfig(lookahead=4)),
        prediction=[edited(row[30:]) for row in expected],
    )
    handle.remove()
    assert torch.equal(output.sequences, expected)
    assert set(widths) <= {30, 1, 6}
    assert widths.count(6) > 5


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
    options = {"do_sample": False, "max_new_tokens": 18, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    charge_in_steps(model, 6)
    output = hf.generate(
        model, **inputs, **options, drafter=Generous(), prediction=edited(expected[0, 30:], every=5)
    )
    assert torch.equal(output.sequences, expected)
    assert output.stats.accepted > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gemma3", "gpt2", "mistral"])
def test_attention_implementations(family: str, attention: str) -> None:
    model = tiny_model(family, attention=attention)
    _both(model, repetitive_batch(3), Generous(), max_new_tokens=NEW)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3},
        {"min_new_tokens": 20},
        {"bad_words_ids": [[5], [7, 9], [11, 12, 13]]},
        {"forced_eos_token_id": EOS},
        {"suppress_tokens": [4, 5, 6], "repetition_penalty": 0.8},
        {"eos_token_id": [EOS, 17, 23, 60, 61, 62]},
        {"sequence_bias": [[[10], 4.0], [[11, 12], -3.0]]},
        {"exponential_decay_length_penalty": (5, 1.2)},
    ],
    ids=lambda options: "-".join(options),
)
def test_logits_processors(llama: Any, rows: int, options: dict[str, Any]) -> None:
    inputs = repetitive_batch(rows, seed=3)
    expected = plain_tokens(llama, inputs, max_new_tokens=NEW, **options)
    output = hf.generate(
        llama,
        **inputs,
        do_sample=False,
        max_new_tokens=NEW,
        drafter=Generous(),
        prediction=[edited(row[30:], every=5) for row in expected],
        **options,
    )
    assert torch.equal(expected, output.sequences)
    assert output.stats.accepted > 0


class _ByRow(LogitsProcessor):
    """Forbids each row another token, so it must be called with every row at its place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, text in enumerate(input_ids.tolist()):
            scores[row, (3 + row + text[-1]) % VOCABULARY] = -torch.inf
        return scores


def test_processors_may_look_at_the_index_of_a_row(llama: Any) -> None:
    inputs = repetitive_batch(3)
    options = {"logits_processor": LogitsProcessorList([_ByRow()]), "max_new_tokens": NEW}
    _both(llama, inputs, Generous(), **options)


def test_prefix_allowed_tokens(llama: Any) -> None:
    def allowed(row: int, text: torch.Tensor) -> list[int]:
        return [token for token in range(VOCABULARY) if (token + row + len(text)) % 3]

    output = _both(
        llama, repetitive_batch(3), Generous(), prefix_allowed_tokens_fn=allowed, max_new_tokens=NEW
    )
    assert output.stats.drafted > 0


def test_max_length_counts_the_prompt(llama: Any) -> None:
    output = _both(llama, repetitive_batch(3), Generous(), max_length=37, eos_token_id=None)
    assert output.sequences.shape[1] == 37


def test_learned_positions_end_where_the_model_ends() -> None:
    model = tiny_model("gpt2")
    inputs = repetitive_batch(1, longest=240)
    expected = model.generate(**inputs, do_sample=False, max_length=256, eos_token_id=None)
    output = hf.generate(
        model,
        **inputs,
        do_sample=False,
        max_length=1000,
        eos_token_id=int(expected[0, 250]),
        drafter=Generous(),
        prediction=expected[0, 240:].tolist() * 2,
    )
    again = model.generate(
        **inputs, do_sample=False, max_length=1000, eos_token_id=int(expected[0, 250])
    )
    assert torch.equal(output.sequences, again)


def test_embeddings_as_prompt(llama: Any) -> None:
    inputs = repetitive_batch(3)
    embedded = {
        "inputs_embeds": llama.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    expected = llama.generate(**embedded, do_sample=False, max_new_tokens=NEW)
    output = hf.generate(llama, **embedded, do_sample=False, max_new_tokens=NEW, drafter=Generous())
    assert torch.equal(expected, output.sequences)


def test_chunked_prefill(llama: Any) -> None:
    _both(llama, repetitive_batch(3), Generous(), max_new_tokens=NEW, prefill_chunk_size=8)


def test_half_precision_differs_only_at_ties() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    inputs = repetitive_batch(8)
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    predictions = [edited(row[30:]) for row in expected]
    output = hf.generate(model, **inputs, **options, drafter=Generous(), prediction=predictions)
    ties = assert_same_tokens(
        model, expected, output.sequences, attention_mask=inputs["attention_mask"]
    )
    assert ties < 8
    assert output.stats.accepted > 0
