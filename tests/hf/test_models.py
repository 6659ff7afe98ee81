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
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ENCODERS = {
    "bert": transformers.BertLMHeadModel,
    "roberta": transformers.RobertaForCausalLM,
    "bert-generation": transformers.BertGenerationDecoder,
    "roformer": transformers.RoFormerForCausalLM,
    "rembert": transformers.RemBertForCausalLM,
}


def _encoder(family: str, *, is_decoder: bool) -> Any:
    kind = ENCODERS[family]
    sizes = {**_ENCODER, "is_decoder": is_decoder}
    if family == "rembert":
        sizes |= {"input_embedding_size": 16, "output_embedding_size": 32}
    return drawn(kind, kind.config_class(**sizes)).double()


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_that_attend_both_ways_are_refused(family: str) -> None:
    model = _encoder(family, is_decoder=False)
    message = r"model must be causal, got .*is_decoder"
    with counted_forwards(model) as widths, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **repetitive_batch(1), **OPTIONS)
    assert not widths


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_that_are_decoders_decode(family: str) -> None:
    assert_decodes(_encoder(family, is_decoder=True), repetitive_batch(1), exact=True, **OPTIONS)


def _moshi() -> Any:
    config = transformers.MoshiConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return drawn(transformers.MoshiForCausalLM, config).double()


def test_windows_that_the_cache_alone_keeps_are_refused_beyond_them() -> None:
    model = _moshi()
    inputs = repetitive_batch(1)
    message = r"Moshi.*keep max_length within 40, got 54"
    with counted_forwards(model) as widths, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **inputs, **OPTIONS)
    assert not widths
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
        "model must be causal, got XLMWithLMHeadModel",
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


def test_text_without_pictures_decodes_with_cross_attention_left_out() -> None:
    config = MllamaTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        cross_attention_layers=[1],
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
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
    message = r"prepares others \(prompt or prefix tuning\?\)"
    ran: list[Any] = []
    llama.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **inputs, **OPTIONS)
    assert not ran
