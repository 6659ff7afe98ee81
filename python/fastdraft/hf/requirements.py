"""What a model, a mode and inputs must be to be decoded speculatively; all else is refused."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationMode

from fastdraft.drafters.assistant import require_model
from fastdraft.errors import InvalidValueError
from fastdraft.hf.interface import CACHE, unfit

__all__ = [
    "IMAGE_INPUTS",
    "own_cache",
    "require_mode",
    "require_supported",
    "require_verifying",
    "says_it_is_causal",
]

# What a prompt with images takes besides its tokens. The forwards behind it take nothing of it.
IMAGE_INPUTS: Final = frozenset(
    {
        "image_grid_thw",
        "image_sizes",
        "mm_encoder_outputs",
        "mm_token_type_ids",
        "pixel_attention_mask",
        "pixel_values",
        "moe_mm_token_type_ids",
        "token_type_ids",
    }
)
_TYPES: Final = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# What makes the masks of windows in transformers.
_WINDOW_MASKS: Final = ("create_chunked_causal_mask", "create_sliding_window_causal_mask")
# Models that keep what they know of images in the key-value cache, where placeholders in the text
# stand for it.
_WITH_IMAGES: Final = (
    "gemma3",
    "idefics3",
    "internvl",
    "llava",
    "llava_next",
    "mistral3",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
)


def require_supported(
    model: Any,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *,
    rows: int,
    streams: bool,
    synced_gpus: bool | None,
) -> None:
    """Raises InvalidValueError for what the decoding loop cannot honour.

    The arguments are those that `generate` prepared; `streams`: whether there is a streamer.
    """
    require_model(model)
    require_mode(config)
    # Unasked, it is on for a model that FSDP or DeepSpeed ZeRO-3 spreads over several ranks.
    if model._extract_generation_mode_kwargs(None, {}, synced_gpus, None, None)["synced_gpus"]:
        raise InvalidValueError(
            "synced_gpus must be off, got True: under FSDP and ZeRO-3 all ranks run each forward "
            "together, and with drafts they need unequal numbers of them; gather the parameters "
            "and give hf.generate synced_gpus=False"
        )
    if CACHE != "cache" and model.training and model.is_gradient_checkpointing:
        raise InvalidValueError(
            "gradient checkpointing must be off while a model in training mode generates, since "
            "it drops the key-value cache before transformers 5.24: call model.eval()"
        )
    _require_positions(model, config)
    _require_unindexed(model, config)
    _require_causal(model)
    _require_known_inputs(model, model_kwargs)
    if not config.use_cache:
        raise InvalidValueError("fastdraft needs a key-value cache, got use_cache=False")
    cache = model_kwargs.get(CACHE)
    if cache is None:
        raise unfit(
            f"model must take a key-value cache, got {type(model).__name__}, for which generate "
            f"makes no {CACHE}"
        )
    if rows == 1:
        return
    if streams:
        raise InvalidValueError(f"a streamer takes a batch of 1 row, got {rows} rows")
    if getattr(cache, "_is_user_defined", False):
        # Rows of unequal length do not fit into it.
        raise InvalidValueError(f"{CACHE} is taken for a batch of 1 row, got {rows} rows")
    if model_kwargs.get("position_ids") is None and not all(cache.is_linear or [False]):
        # It places tokens by the cache's length, which is that of the longest row.
        raise InvalidValueError(
            f"a batch needs a model that takes position_ids, got {type(model).__name__}"
        )


def own_cache(model: Any, input_ids: torch.Tensor) -> Cache | None:
    """A cache of the kind that the model makes itself, where `generate` makes none."""
    if CACHE not in inspect.signature(model.forward).parameters:
        return None
    with torch.no_grad():
        output = model(input_ids[:1, -1:], use_cache=True, return_dict=True)
    made = getattr(output, CACHE, None)
    return type(made)() if isinstance(made, DynamicCache) else None


def _require_known_inputs(model: Any, model_kwargs: dict[str, Any]) -> None:
    given = [
        name
        for name, value in model_kwargs.items()
        # Token types that are all zeros say that the prompt is text.
        if isinstance(value, torch.Tensor) and not (name in _TYPES and not value.any())
    ]
    # What `generate` has encoded already, by its kind.
    given += model_kwargs.get("mm_encoder_outputs") or {}
    known = {"attention_mask", "position_ids", "inputs_embeds"}
    kind = model.config.model_type
    if kind in _WITH_IMAGES:
        known |= {"image", *IMAGE_INPUTS}
    for name in given:
        if name not in known:
            raise InvalidValueError(
                "inputs must be text or its embeddings, or text with images for "
                f"{', '.join(_WITH_IMAGES)}; got {name} for {kind}"
            )


def require_mode(config: GenerationConfig, assistant_model: Any = None) -> None:
    """Refuses modes other than greedy search and sampling: a draft model of `generate`, too."""
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InvalidValueError(
            f"fastdraft decodes by greedy search or sampling, got {mode.value}"
            + ("; choose what drafts with drafter=" if mode.value == "assisted_generation" else "")
        )
    for option in ("output_attentions", "output_hidden_states"):
        if getattr(config, option):
            raise InvalidValueError(f"{option} is not given by speculative decoding, got True")


def _require_positions(model: Any, config: GenerationConfig) -> None:
    """Refuses texts in which the place of a token depends on how far the forward reaches."""
    text_config = model.config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            original = kind.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", text_config.max_position_embeddings
            )
            if config.max_length > original:
                raise InvalidValueError(
                    f"max_length must be at most {original} with {kind['rope_type']} rotary "
                    "embeddings, which change with the length of the text beyond it, "
                    f"got {config.max_length}"
                )


def _require_unindexed(model: Any, generation: GenerationConfig) -> None:
    """Refuses texts from which an indexer chooses what is attended to: of tokens that tie for the
    last place, rounding decides, and what is chosen is no small difference."""
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "index_topk", None) or generation.max_length
    is_indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    if is_indexed and generation.max_length > most:
        raise InvalidValueError(
            f"max_length must be at most {most}, the index_topk of {config.model_type}, beyond "
            f"which an indexer's choice depends on rounding, got {generation.max_length}"
        )


def _require_causal(model: Any) -> None:
    """Refuses a model in which a token may see those behind it."""
    encodes = any(getattr(each, "is_decoder", None) is False for each in model.modules())
    if encodes and not says_it_is_causal(model):
        raise InvalidValueError(
            f"model must be causal, got {type(model).__name__}, in which a token depends on those "
            "behind it (an encoder without is_decoder=True?)"
        )


def says_it_is_causal(model: Any) -> bool:
    """Whether attention layers of the model say that they hide later tokens."""
    return any(getattr(each, "is_causal", False) for each in model.modules())


def _require_masked_windows(model: Any, cache: Cache, longest: int) -> None:
    """Refuses texts beyond a window that the model leaves to the cache, which forgets what is
    behind it: a forward over several tokens needs a mask."""
    windows = [
        each.sliding_window for each in cache.layers if type(each) is DynamicSlidingWindowLayer
    ]
    widest = max(windows, default=longest)
    if longest > widest:
        sources = [sys.modules.get(type(each).__module__) for each in model.modules()]
        if not any(hasattr(source, name) for source in sources for name in _WINDOW_MASKS):
            raise InvalidValueError(
                f"model must mask what a sliding window hides, got {type(model).__name__}, which "
                f"leaves that to the cache; keep max_length within {widest}, got {longest}"
            )


def require_verifying(
    model: Any,
    *,
    prepared: Cache,
    max_length: int,
    position_ids: torch.Tensor | None,
    kwargs: dict[str, Any],
    device: torch.device,
) -> bool:
    """Raises InvalidValueError for a model that cannot verify drafts: one that runs on other tokens
    or another cache than it is given, or leaves windows to the cache.

    Answers whether the model places tokens by the positions that it is given. One that drops them
    places tokens by the columns of the cache, padding included.

    Args:
        model, prepared, position_ids: The model, its cache and the prompts' positions, if it takes
            any, as `generate` prepared them.
        max_length: How long a text may become.
        kwargs: What every forward takes besides.
        device: Where the model takes its inputs.
    """
    if CACHE not in inspect.signature(model.forward).parameters:
        raise unfit(
            "model must keep its keys and values in the cache that it is given, got "
            f"{type(model).__name__}, which does not"
        )
    cache = type(prepared)() if isinstance(prepared, DynamicCache) else DynamicCache()
    ids = torch.ones((1, 2), dtype=torch.int64, device=device)
    options = dict(kwargs)
    if position_ids is not None:
        options["position_ids"] = position_ids.new_zeros((*position_ids.shape[:-2], 1, 2))
    if "logits_to_keep" in options:
        options["logits_to_keep"] = 2
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        ids, **{CACHE: cache}, attention_mask=None, **options
    )
    given = inputs.get("input_ids")
    if (
        # PEFT's prefix tuning passes a cache of its own as past_key_values, the name before
        # transformers 5.24.
        [id(each) for each in inputs.values() if isinstance(each, Cache)] != [id(cache)]
        or inputs.get("inputs_embeds") is not None
        or given is None
        or not torch.equal(given, ids)
    ):
        raise unfit(
            "model must be run on the text and the cache that it is given, got "
            f"{type(model).__name__}, which prepares others (prompt or prefix tuning?)"
        )
    _require_masked_windows(model, prepared, max_length)
    return position_ids is None or inputs.get("position_ids") is not None
