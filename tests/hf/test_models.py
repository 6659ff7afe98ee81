"""Models that cannot verify drafts are refused before they run."""

from __future__ import annotations

import functools
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from fastdraft import hf
from fastdraft.errors import InvalidValueError
from fastdraft.hf.interface import CACHE
from hf_models import (
    SIZES,
    TOKENS,
    VOCABULARY,
    Forester,
    assert_decodes,
    drawn,
    repetitive_batch,
    tiny_model,
)
from watches import counted_forwards

pytestmark = pytest.mark.slow

OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
ENCODERS = {
    "bert": transformers.BertLMHeadModel,
    "roberta": transformers.RobertaForCausalLM,
    "bert-generation": transformers.BertGenerationDecoder,
    "roformer": transformers.RoFormerForCausalLM,
    "rembert": transformers.RemBertForCausalLM,
}


def _encoder(family: str, *, is_decoder: bool) -> Any:
    kind = ENCODERS[family]
    sizes = SIZES | TOKENS | {"tie_word_embeddings": False, "is_decoder": is_decoder}
    if family == "rembert":
        sizes |= {"input_embedding_size": 16, "output_embedding_size": 32}
    return drawn(kind, kind.config_class(**sizes)).double()


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_that_attend_both_ways_are_refused(family: str) -> None:
    """A token depends on those behind it."""
    model, inputs = _encoder(family, is_decoder=False), repetitive_batch(1)
    message = "several tokens in one forward must have the logits of plain decoding"
    with counted_forwards(model) as widths, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **inputs, **OPTIONS)
    assert max(widths) < inputs["input_ids"].shape[1]  # the prompt is not run


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_that_are_decoders_decode(family: str) -> None:
    assert_decodes(_encoder(family, is_decoder=True), repetitive_batch(1), exact=True, **OPTIONS)


def _moshi() -> Any:
    config = transformers.MoshiConfig(**SIZES, **TOKENS, ffn_dim=64, sliding_window=40)
    return drawn(transformers.MoshiForCausalLM, config).double()


def test_windows_that_the_cache_alone_keeps_are_refused_beyond_them() -> None:
    model = _moshi()
    inputs = repetitive_batch(1)
    message = r"Moshi.*keep max_length within 40, got 54"
    with counted_forwards(model) as widths, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **inputs, **OPTIONS)
    assert max(widths) < inputs["input_ids"].shape[1]
    within = {**OPTIONS, "max_new_tokens": 10}
    assert_decodes(model, inputs, "found", exact=True, **within)


_PROPHET: dict[str, Any] = {
    "hidden_size": 16,
    "num_decoder_layers": 1,
    "num_decoder_attention_heads": 2,
    "decoder_ffn_dim": 16,
    "is_encoder_decoder": False,
    "is_decoder": True,
    "pad_token_id": 0,
}
_CPM_ANT = {"hidden_size": 16, "num_attention_heads": 2, "dim_head": 8, "dim_ff": 16}
# By class: sizes and the reason.
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "OpenAIGPTLMHeadModel": (
        {"n_embd": 16, "n_layer": 1, "n_head": 2},
        r"the cache that it is given.* got OpenAIGPTLMHeadModel",
    ),
    "XLMWithLMHeadModel": (
        {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "mask_token_id": 5},
        # The second by transformers 5.19.
        "XLMWithLMHeadModel cannot verify drafts: .* must be what|cache.* got XLMWithLMHeadModel",
    ),
    "ProphetNetForCausalLM": (
        _PROPHET,
        "ProphetNetForCausalLM cannot verify drafts: several tokens in one forward must be what",
    ),
    "CpmAntForCausalLM": (
        {**_CPM_ANT, "num_hidden_layers": 1, "prompt_length": 4},
        "CpmAntForCausalLM cannot verify drafts: several tokens in one forward must be what",
    ),
    "T5ForConditionalGeneration": (
        {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
        "decoder-only, got the encoder-decoder T5ForConditionalGeneration",
    ),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", _REFUSED)
def test_models_that_cannot_verify_drafts_are_refused(name: str, inside: bool) -> None:
    sizes, message = _REFUSED[name]
    kind = getattr(transformers, name)
    model = drawn(kind, kind.config_class(vocab_size=VOCABULARY, **sizes)).double()
    decode = functools.partial(hf.generate, model)
    if inside:
        decode = functools.partial(model.generate, custom_generate=hf.speculate())
    inputs = repetitive_batch(1)
    with counted_forwards(model) as widths, pytest.raises(InvalidValueError, match=message):
        decode(**inputs, **OPTIONS)
    # The prompt is not run. The probe's is shorter; transformers runs an encoder before it decodes.
    prompt = inputs["input_ids"].shape[1]
    assert sum(width >= prompt for width in widths) <= (inside and name.startswith("T5"))


class _Flat(transformers.LlamaForCausalLM):
    """Drops the masks that it is given, as models with inputs of their own may."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "attention_mask": None}


def test_a_model_that_cannot_verify_trees_gets_chains() -> None:
    """The probe asks it; without masks a tree's branches see each other."""
    llama = tiny_model("llama")
    model = drawn(_Flat, llama.config).double()
    inputs = repetitive_batch(1)
    said = model.generate(**inputs, **OPTIONS)[:, inputs["input_ids"].shape[1] :]
    drafter = Forester(said.tolist())
    output = hf.generate(model, **inputs, **OPTIONS, drafter=drafter)
    assert torch.equal(output.sequences[:, -said.shape[1] :], said)
    assert sum(drafter.accepted) > 0


@pytest.mark.parametrize("heads", [2, 4])
def test_models_that_count_positions_by_columns_get_chains(heads: int) -> None:
    """ALiBi: a tree's token would be further away by little, which changes logits by little."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": heads, "n_layers": 2}
    model = drawn(transformers.MptForCausalLM, transformers.MptConfig(**sizes, use_cache=True))
    model, inputs = model.double(), repetitive_batch(1)
    options = {**OPTIONS, "output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    drafter = Forester(plain.sequences[:, inputs["input_ids"].shape[1] :].tolist())
    ours = hf.generate(model, **inputs, **options, drafter=drafter)
    assert ours.stats.accepted > 0
    torch.testing.assert_close(torch.cat(ours.logits), torch.cat(plain.logits), rtol=0, atol=1e-5)


class _Toned(transformers.LlamaForCausalLM):
    """Needs an input of its own in every forward, where others have what they need in the cache."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        tone: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        if tone is not None:
            output.logits = output.logits * (1 + tone)
        return output


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_that_a_model_needs_behind_the_prompt_are_refused(rows: int) -> None:
    model, inputs = drawn(_Toned, tiny_model("llama").config).double(), repetitive_batch(rows)
    message = r"behind a prompt with tone in one forward must have the logits of plain decoding"
    for _ in range(2):
        with pytest.raises(InvalidValueError, match=message):
            hf.generate(model, **inputs, **OPTIONS, tone=torch.tensor(0.5))
    # Text alone is another question.
    assert_decodes(model, inputs, exact=True, **OPTIONS)


def test_text_without_pictures_decodes_with_cross_attention_left_out() -> None:
    config = MllamaTextConfig(
        **SIZES | TOKENS | {"num_hidden_layers": 3},
        cross_attention_layers=[1],
        tie_word_embeddings=False,
    )
    model = drawn(transformers.MllamaForCausalLM, config).double()
    assert_decodes(model, repetitive_batch(3), exact=True, **OPTIONS)
    inputs = repetitive_batch(1)
    options = {**OPTIONS, "return_dict_in_generate": True}
    first = assert_decodes(model, inputs, ours=options, exact=True, **OPTIONS).output
    text = torch.cat([first.sequences, inputs["input_ids"][:, :5]], -1)
    expected = model.generate(text, **OPTIONS)
    second = hf.generate(model, text, **options, **{CACHE: first[CACHE]})
    assert torch.equal(second.sequences, expected)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("kind", ["lora", "prompt", "p", "prefix"])
def test_tuning_with_peft(kind: str) -> None:
    virtual = {"num_virtual_tokens": 4}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "lora": (peft.LoraConfig, {"target_modules": ["q_proj"], "init_lora_weights": False}),
        "prompt": (peft.PromptTuningConfig, virtual),
        "p": (peft.PromptEncoderConfig, {**virtual, "encoder_hidden_size": 16}),
        "prefix": (peft.PrefixTuningConfig, virtual),
    }
    tuning, sizes = kinds[kind]
    config = tuning(task_type="CAUSAL_LM", **sizes)
    torch.manual_seed(0)
    llama = tiny_model("llama").double()
    model = peft.get_peft_model(llama, config).double().eval()
    inputs = repetitive_batch(1)
    if kind == "lora":
        assert_decodes(model, inputs, exact=True, **OPTIONS)
        return
    if kind == "prefix" and CACHE == "cache":
        # It gives the model a cache by an old name, at which plain decoding does not look.
        assert_decodes(model, inputs, exact=True, **OPTIONS)
        return
    message = (
        "cannot verify drafts: .* in one forward must|must keep its keys and values in the cache"
    )
    with counted_forwards(llama) as widths, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **inputs, **OPTIONS)
    assert max(widths, default=0) < inputs["input_ids"].shape[1]
