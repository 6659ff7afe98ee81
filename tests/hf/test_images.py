"""Images in the prompt: tokens are those of plain decoding in every kind of step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fastdraft import hf
from fastdraft.drafters import AssistantModel
from fastdraft.errors import InvalidValueError
from hf_models import (
    SIZES,
    TOKENS,
    VOCABULARY,
    Generous,
    assert_decodes,
    drawn,
    repetitive_batch,
    tiny_model,
)

pytestmark = pytest.mark.slow

IMAGE, PROMPT, NEW, START = 96, 30, 32, 14
_MARKERS = [93, 94, 95, IMAGE]

_TEXT: dict[str, Any] = SIZES | TOKENS | {"max_position_embeddings": 512}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_TOWER: dict[str, Any] = {
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
_PIXTRAL_TOWER = _TOWER | {"num_hidden_layers": 1, "patch_size": 4}
_PLACEHOLDER = {"image_token_id": IMAGE, "image_token_index": IMAGE}


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "default", "mrope_section": list(sections)}}


def _config(family: str) -> Any:
    llama = {"text_config": {"model_type": "llama", **_TEXT}, **_PLACEHOLDER}
    clip = {"vision_config": {"model_type": "clip_vision_model", **_TOWER}}
    grown = {"intermediate_size": 32, "hidden_size": 16, "out_hidden_size": 32}
    markers = {"video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}
    match family:
        case "llava":
            return transformers.LlavaConfig(
                **llama, **clip, image_seq_length=4, vision_feature_layer=-1
            )
        case "llava_next":
            return transformers.LlavaNextConfig(
                **llama,
                **clip,
                image_seq_length=4,
                vision_feature_layer=-1,
                image_grid_pinpoints=[[16, 16]],
            )
        case "qwen2_vl":
            return transformers.Qwen2VLConfig(
                text_config=_TEXT | _rope(1, 1, 2),
                vision_config=_QWEN_TOWER
                | {"embed_dim": 16, "depth": 1, "hidden_size": 32, "mlp_ratio": 2},
                image_token_id=IMAGE,
                **markers,
            )
        case "qwen2_5_vl":
            return transformers.Qwen2_5_VLConfig(
                text_config=_TEXT | _rope(1, 1, 2),
                vision_config=_QWEN_TOWER
                | grown
                | {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0]},
                image_token_id=IMAGE,
                **markers,
            )
        case "qwen3_vl":
            return transformers.Qwen3VLConfig(
                text_config=_TEXT | _rope(2, 1, 1),
                vision_config=_QWEN_TOWER
                | grown
                | {"depth": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
                image_token_id=IMAGE,
                **markers,
            )
        case "gemma3":
            return transformers.Gemma3Config(
                text_config=_TEXT
                | {
                    "sliding_window": 11,
                    "query_pre_attn_scalar": 8,
                    "layer_types": ["sliding_attention", "full_attention"],
                },
                vision_config=_TOWER,
                mm_tokens_per_image=4,
                boi_token_index=94,
                eoi_token_index=95,
                **_PLACEHOLDER,
            )
        case "paligemma":
            return transformers.PaliGemmaConfig(
                text_config={"model_type": "gemma", **_TEXT},
                vision_config=_TOWER | {"projection_dim": 32},
                projection_dim=32,
                hidden_size=32,
                **_PLACEHOLDER,
            )
        case "idefics3" | "smolvlm":
            kind = {"idefics3": transformers.Idefics3Config, "smolvlm": transformers.SmolVLMConfig}
            return kind[family](**llama, vision_config=_TOWER, scale_factor=2, pad_token_id=0)
        case "mistral3":
            return transformers.Mistral3Config(
                text_config={"model_type": "mistral", "sliding_window": None, **_TEXT},
                vision_config={"model_type": "pixtral", "head_dim": 8, **_PIXTRAL_TOWER},
                spatial_merge_size=2,
                vision_feature_layer=-1,
                **_PLACEHOLDER,
            )
        case "internvl":
            return transformers.InternVLConfig(
                text_config={"model_type": "qwen2", **_TEXT},
                vision_config=_PIXTRAL_TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
                downsample_ratio=0.5,
                image_seq_length=4,
                image_token_id=IMAGE,
            )
    raise AssertionError(family)


# How many tokens of the text stand for an image.
FAMILIES = {
    "llava": 4,
    "llava_next": 10,
    "qwen2_vl": 4,
    "qwen2_5_vl": 4,
    "qwen3_vl": 4,
    "gemma3": 4,
    "paligemma": 4,
    "idefics3": 1,
    "smolvlm": 1,
    "mistral3": 4,
    "internvl": 4,
}


def _model(family: str) -> Any:
    config = _config(family)
    config.tie_word_embeddings = False
    # Near-ties are decided alike.
    return drawn(transformers.AutoModelForImageTextToText.from_config, config).double()


def _inputs(family: str, rows: int, *, seed: int = 5) -> dict[str, Any]:
    """Left-padded prompts, each with an image in its middle."""
    inputs: dict[str, Any] = repetitive_batch(rows)
    ids = inputs["input_ids"].clamp_(max=min(_MARKERS) - 1)
    end = START + FAMILIES[family]
    ids[:, START:end] = IMAGE
    draw = torch.Generator().manual_seed(seed)
    shape: tuple[int, ...] = (rows, 3, 16, 16)
    kinds = (ids == IMAGE).long()
    if family.startswith("qwen"):
        ids[:, START - 1], ids[:, end] = 94, 93
        shape = (16 * rows, 3 * 2 * 4 * 4)
        inputs |= {"mm_token_type_ids": kinds, "image_grid_thw": torch.tensor([[1, 4, 4]] * rows)}
    if family in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = kinds
    if family == "llava_next":
        shape = (rows, 2, *shape[1:])
    if family in ("idefics3", "smolvlm"):
        shape = (rows, 1, *shape[1:])
    if family in ("llava_next", "mistral3"):
        inputs["image_sizes"] = torch.tensor([[16, 16]] * rows)
    inputs["pixel_values"] = torch.randn(shape, generator=draw, dtype=torch.float64)
    return inputs


OPTIONS = {
    "do_sample": False,
    "max_new_tokens": NEW,
    "eos_token_id": None,
    "suppress_tokens": _MARKERS,
}


@pytest.mark.parametrize(
    ("family", "rows"), [*((family, 3) for family in FAMILIES), ("qwen2_vl", 1), ("gemma3", 1)]
)
def test_greedy_output_is_that_of_transformers(family: str, rows: int) -> None:
    model, inputs = _model(family), _inputs(family, rows)
    expected = model.generate(**inputs, **OPTIONS)
    # Other images bring other tokens, soon.
    other = model.generate(**_inputs(family, rows, seed=6), **{**OPTIONS, "max_new_tokens": 8})
    assert not torch.equal(expected[:, : PROMPT + 8], other)
    for drafts, ours in (
        ("predicted", {}),
        ("predicted", {"cache_implementation": "static"}),
        ("trees", {}),
    ):
        assert_decodes(model, inputs, drafts, ours=ours, exact=True, **OPTIONS)


class _Listening(Generous):
    """Keeps the prompts that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[list[int]] = []

    def add_request(self, prompt_ids: Any, **options: Any) -> int:
        self.prompts.append(list(prompt_ids))
        return super().add_request(prompt_ids, **options)


def test_nothing_is_drafted_from_placeholders() -> None:
    drafter = _Listening()
    inputs = _inputs("llava", 1)
    hf.generate(_model("llava"), **inputs, **OPTIONS, drafter=drafter)
    ids = inputs["input_ids"][0]
    assert drafter.prompts == [ids[ids != IMAGE].tolist()]


def test_a_draft_model_reads_the_text() -> None:
    model, inputs = _model("llava"), _inputs("llava", 3)
    assistant = AssistantModel(
        tiny_model("llama").double(), schedule="constant", num_tokens=3, lookup=None
    )
    assert_decodes(model, inputs, assistant, exact=True, **OPTIONS)


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_and_models_of_any_name(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The model is asked with the prompt's own inputs, whatever it and they are called."""
    model = _model("qwen2_5_vl")
    inputs = _inputs("qwen2_5_vl", rows) | {"second_per_grid_ts": torch.ones(rows)}
    monkeypatch.setattr(type(model.config), "model_type", "unknown")
    assert_decodes(model, inputs, exact=True, **OPTIONS)


@pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids"])
@pytest.mark.parametrize("rows", [1, 3])
def test_token_types_of_nothing_but_text_are_text(name: str, rows: int) -> None:
    family = "paligemma" if name == "token_type_ids" else "qwen2_vl"
    model, inputs = _model(family), repetitive_batch(rows)
    inputs["input_ids"].clamp_(max=min(_MARKERS) - 1)
    inputs[name] = torch.zeros_like(inputs["input_ids"])
    assert_decodes(model, inputs, exact=True, **OPTIONS)


@pytest.mark.parametrize("rows", [1, 3])
def test_models_that_leave_positions_to_the_cache(rows: int) -> None:
    """They count padding: so do the positions of drafts, in trees and in rows of any length."""
    if not hasattr(transformers, "Exaone4_5_Config"):
        pytest.skip("needs a newer transformers")
    config = transformers.Exaone4_5_Config(
        text_config={"model_type": "exaone4", "layer_types": ["full_attention"] * 2, **_TEXT},
        vision_config=_QWEN_TOWER
        | {"intermediate_size": 32, "hidden_size": 32, "out_hidden_size": 32, "depth": 1}
        | {"window_size": 16, "fullatt_block_indexes": [0], "num_key_value_heads": 1},
        image_token_id=IMAGE,
        video_token_id=95,
    )
    make = transformers.AutoModelForImageTextToText.from_config
    model, inputs = drawn(make, config).double(), repetitive_batch(rows)
    inputs["input_ids"].clamp_(max=min(_MARKERS) - 1)
    for drafts in ("predicted", "trees"):
        assert_decodes(model, inputs, drafts, exact=True, **OPTIONS)


def test_a_multimodal_model_that_errs_over_several_tokens_is_refused() -> None:
    if not hasattr(transformers, "Kosmos2_5Config"):
        pytest.skip("needs a newer transformers")
    sizes = {"vocab_size": VOCABULARY, "embed_dim": 32, "layers": 2, "ffn_dim": 48}
    config = transformers.Kosmos2_5Config(
        text_config=sizes | {"attention_heads": 4, "max_position_embeddings": 128},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "head_dim": 8, "patch_embed_hidden_size": 12},
    )
    model = drawn(transformers.Kosmos2_5ForConditionalGeneration, config).double()
    message = "cannot verify drafts: several tokens in one forward must have the logits of plain"
    with pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **repetitive_batch(1), **OPTIONS)
