"""Requirements of models, modes and inputs; generations that fail one are refused."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode

from fastdraft.drafters.assistant import require_model
from fastdraft.errors import InvalidValueError
from fastdraft.hf.interface import CACHE, is_callers_own, syncs_ranks, unsupported_call

__all__ = [
    "besides_text",
    "own_cache",
    "require_mode",
    "require_supported",
]

# Inputs that mark parts of the prompt as no text, unless all zeros.
_TYPES: Final = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


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
    if syncs_ranks(model, synced_gpus):
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
    if not config.use_cache:
        raise InvalidValueError("fastdraft needs a key-value cache, got use_cache=False")
    cache = model_kwargs.get(CACHE)
    if cache is None:
        raise unsupported_call(
            f"model must take a key-value cache, got {type(model).__name__}, for which generate "
            f"makes no {CACHE}"
        )
    if rows == 1:
        return
    if streams:
        raise InvalidValueError(f"a streamer takes a batch of 1 row, got {rows} rows")
    if is_callers_own(cache):
        # Rows of unequal length do not fit into it.
        raise InvalidValueError(f"{CACHE} is taken for a batch of 1 row, got {rows} rows")
    if model_kwargs.get("position_ids") is None and not all(cache.is_linear or [False]):
        # It positions tokens by the cache's length, which is that of the longest row.
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


def besides_text(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a prompt besides text or its embeddings: images, for example."""
    text = ("attention_mask", "position_ids", "inputs_embeds")
    given = {
        name: value
        for name, value in model_kwargs.items()
        if torch.is_tensor(value) and name not in text and not (name in _TYPES and not value.any())
    }
    # Inputs that `generate` has encoded already.
    if encoded := model_kwargs.get("mm_encoder_outputs"):
        given["mm_encoder_outputs"] = encoded
    return given


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
    """Refuses texts in which the position of a token depends on how far the forward reaches."""
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
    last rank, rounding decides, and what is chosen is no small difference."""
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "index_topk", None) or generation.max_length
    is_indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    if is_indexed and generation.max_length > most:
        raise InvalidValueError(
            f"max_length must be at most {most}, the index_topk of {config.model_type}, beyond "
            f"which an indexer's choice depends on rounding, got {generation.max_length}"
        )
