"""Tiny random models of every family of causal language models that transformers has."""

from __future__ import annotations

import inspect
import random
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_models import BOS, EOS, PAD, VOCABULARY, drawn

__all__ = ["FAMILIES", "MULTIMODAL", "multimodal_model", "random_model"]

# Their outermost configurations hold those of image or audio towers. The text models among them
# stand in the list themselves, as "gemma3_text" does.
_TOWERS = {
    "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git",
    "got_ocr2", "llama4", "moss_transcribe_diarize", "musicgen", "musicgen_melody",
    "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
}  # fmt: skip
FAMILIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - _TOWERS)
# Those that take images too.
MULTIMODAL = sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(FAMILIES))

_LARGEST = 4_000_000  # parameters; a configuration that is no smaller was not understood

# Sizes of families that cannot be as small as the others.
_ITS_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 4},
    "bamba": {"hidden_size": 32, "mamba_n_heads": 4, "mamba_d_head": 16},
    "codegen": {"n_head": 4},
    "cohere_compass_text": {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "dory": {"num_hidden_layers": 6, "n_input_layers": 2, "n_output_layers": 2},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {
        "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 11},
    "granitemoehybrid": {"hidden_size": 32, "mamba_n_heads": 4, "mamba_d_head": 16},
    "jamba": {"num_hidden_layers": 6},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm3": {"num_hidden_layers": 4},
    "mamba2": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    "olmo_hybrid": {"num_hidden_layers": 4},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen4_exp_text": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64,
                 "pronunciation_embed_dim": 32, "shape_embed_dim": 32},
    "zamba2": {"num_hidden_layers": 2, "layer_types": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def random_model(family: str, rng: random.Random) -> Any:
    """A model in float64 whose sizes, layers and attention are drawn."""
    config = _config(family, rng)
    make: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        parameters = make(config).num_parameters()
    if parameters > _LARGEST:
        raise ValueError(f"{parameters} parameters")
    model = drawn(make, config, seed=rng.getrandbits(32), spread=rng.choice([0.7, 1.0, 1.5]))
    if family == "xmod":
        model.set_default_language("en_XX")
    return model.double()


def _config(family: str, rng: random.Random) -> Any:
    kind = CONFIG_MAPPING[family]
    names = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    heads = rng.choice([2, 4])
    head_size = rng.choice([8, 16])
    layers = rng.choice([1, 2, 2, 3])
    window = rng.choice([5, 11, 24])
    width = heads * head_size
    latent = "qk_rope_head_dim" in names  # DeepSeek's attention, whose heads have several sizes
    values: dict[tuple[str, ...], Any] = {
        ("vocab_size", "vocab_size_per_layer_input"): VOCABULARY,
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim",
         "word_embed_proj_dim"): width,
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"): 256,
        ("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dff",
         "feed_forward_size"): 48,
        ("moe_intermediate_size", "shared_expert_intermediate_size"): 16,
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
         "num_decoder_layers", "encoder_layers", "num_encoder_layers"): layers,
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
         "encoder_attention_heads", "num_decoder_attention_heads",
         "num_encoder_attention_heads"): heads,
        ("num_key_value_heads", "num_kv_heads"): heads if latent else rng.choice([1, heads]),
        ("head_dim", "kv_channels", "d_kv", "swa_head_dim", "global_head_dim"):
            4 if latent else head_size,
        ("rotary_dim",): 4,
        ("sliding_window", "attention_window"): window,
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"): 4,
        ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"): 2,
        ("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace",
         "max_window_layers"): 1,
        ("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_head_dim", "index_head_dim",
         "hidden_size_per_layer_input"): 8,
        ("qk_rope_head_dim", "qk_nope_head_dim"): 4,
        ("index_n_heads",): 2,
        ("index_topk",): 256,
        ("is_decoder",): True,
        ("use_cache",): True,
        ("use_sliding_window",): rng.random() < 0.5,
        # Below it, one token decays states otherwise than several.
        ("time_step_min",): 1e-9,
        ("chunk_size", "mamba_chunk_size"): 8,
        ("pad_token_id",): PAD,
        ("bos_token_id",): BOS,
        ("eos_token_id",): EOS,
    }  # fmt: skip
    chosen = {name: value for group, value in values.items() for name in group if name in names}
    # The names that a configuration has for its own are those of its attribute map.
    for name, own in kind.attribute_map.items():
        if name in chosen and own in chosen:
            del chosen[name]
    config = kind(**chosen | _ITS_OWN.get(family, {}))
    # Grouped matrix products know no float64.
    config._experts_implementation = "eager"
    if rng.random() < 0.5:
        config._attn_implementation = "eager"
    return config


# Sizes of multimodal models, of their text model and their towers alike.
_SIZES: dict[tuple[str, ...], int] = {
    ("vocab_size", "vocab_size_per_layer_input"): VOCABULARY,
    ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "out_hidden_size"): 32,
    ("intermediate_size", "ffn_dim", "mlp_hidden_size"): 48,
    ("moe_intermediate_size", "shared_expert_intermediate_size"): 16,
    ("num_hidden_layers", "n_layers", "depth", "num_layers", "n_layer"): 2,
    ("num_attention_heads", "num_heads", "n_heads"): 4,
    ("num_key_value_heads", "num_experts_per_tok", "moe_topk", "moe_k"): 2,
    ("head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim", "hidden_size_per_layer_input"): 8,
    ("max_position_embeddings",): 256,
    ("sliding_window",): 11,
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"): 4,
    (
        "n_shared_experts",
        "n_group",
        "topk_group",
        "first_k_dense_replace",
        "mm_tokens_per_image",
    ): 1,
    ("qk_rope_head_dim", "qk_nope_head_dim"): 4,
    ("pad_token_id",): PAD,
    ("bos_token_id",): BOS,
    ("eos_token_id",): EOS,
    ("image_size",): 28,
    ("patch_size",): 14,
    ("attention_chunk_size",): 16,
}
# Ids that stand for images and such, from the last one of the vocabulary on down.
_MARKERS = (
    "image_token_id", "image_token_index", "video_token_id", "audio_token_id", "boi_token_index",
    "eoi_token_index", "vision_start_token_id", "vision_end_token_id", "boi_token_id",
    "eoi_token_id", "boa_token_id", "eoa_token_id", "image_end_token_id", "image_start_token_id",
)  # fmt: skip


def multimodal_model(family: str, rng: random.Random) -> Any:
    """A model in float64 of a family that takes images."""
    kind = CONFIG_MAPPING[family]
    try:
        usual = kind()
    except Exception:
        usual = None
    parts = {}
    for name, part in getattr(kind, "sub_configs", {}).items():
        own = getattr(usual, name, None)
        part = part if own is None else type(own)
        if part.__name__ != "AutoConfig":
            parts[name] = part(**_sizes(part, is_text="text" in name or "llm" in name))
    names = _names(kind)
    markers = {name: VOCABULARY - 1 - at for at, name in enumerate(_MARKERS) if name in names}
    config = kind(**parts, **markers)
    for each in (config, config.get_text_config(decoder=True)):
        each._experts_implementation = "eager"
    make: Any = transformers.AutoModelForImageTextToText.from_config
    with torch.device("meta"):
        parameters = make(config).num_parameters()
    if parameters > 2 * _LARGEST:
        raise ValueError(f"{parameters} parameters")
    return drawn(make, config, seed=rng.getrandbits(32)).double()


def _names(kind: Any) -> set[str]:
    """The names of a configuration's values."""
    names = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    return names | set(getattr(kind, "__dataclass_fields__", ()))


def _sizes(kind: Any, *, is_text: bool) -> dict[str, int]:
    names = _names(kind)
    values = {name: size for group, size in _SIZES.items() for name in group if name in names}
    for name, own in kind.attribute_map.items():
        if name in values and own in values:
            del values[name]
    return {
        name: size
        for name, size in values.items()
        if is_text or name not in ("vocab_size", "sliding_window")
    }
