"""The prefill: a request and a forward for the prompts, from which the decoding loop goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from fastdraft import Datastore
from fastdraft.drafters import Drafter
from fastdraft.errors import InvalidValueError
from fastdraft.hf.interface import CACHE
from fastdraft.hf.kv_cache import on_host
from fastdraft.hf.masks import Masks
from fastdraft.hf.requirements import IMAGE_INPUTS
from fastdraft.hf.rows import UNLIMITED, Row, cancel_requests
from fastdraft.hf.step import CachedModel

__all__ = ["forward_kwargs", "prefill"]


def forward_kwargs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What every forward takes besides tokens, positions, mask and cache."""
    own = {"attention_mask", "position_ids", "inputs_embeds", CACHE, *IMAGE_INPUTS}
    return {key: value for key, value in model_kwargs.items() if key not in own}


def prefill(
    model: Any,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *,
    cache: Any,
    masks: Masks,
    stepping: Callable[..., CachedModel],
    drafter: Drafter,
    predictions: Sequence[NDArray[np.int64] | None],
    templates: Sequence[NDArray[np.int64] | None],
    read_only: Sequence[Datastore] | None,
    seeds: Sequence[int],
) -> tuple[CachedModel, torch.Tensor, list[Row]]:
    """Runs the model on the prompts and adds a request for each of them to the drafter.

    Args:
        cache: A `RowCache` or `StaticRowCache`, empty unless it continues an earlier one.
        stepping: Makes what runs the steps from there on, as `CachedModel` is made.

    Returns:
        The model with the prompts in `cache`; the logits after each prompt, (rows, vocabulary) on
        the prompts' device; and the rows.
    """
    kwargs = {**model_kwargs, CACHE: cache}
    logits = model._prefill(input_ids, config, kwargs).logits
    # A copy, since some models give the logits of the whole prompt, which are large.
    first_logits = logits[:, -1].to(input_ids.device, copy=True)
    del logits
    columns = cache.get_seq_length()
    if columns == 0:
        raise InvalidValueError(
            "model must keep its keys and values in the cache that it is given, got "
            f"{type(model).__name__}, which does not"
        )
    position_ids = model_kwargs.get("position_ids")
    # Where the model places the first new token, (..., rows or 1, 1).
    first = on_host([[columns]]) if position_ids is None else position_ids[..., -1:] + 1
    target = stepping(
        model,
        cache=cache,
        masks=masks,
        first_positions=None if position_ids is None else first - columns,
        kwargs=forward_kwargs(model_kwargs),
        home=input_ids.device,
    )
    # Beyond the last position a learned embedding has no row; a rotary one has, but plain decoding
    # would warn there too.
    text_config = model.config.get_text_config(decoder=True)
    end = getattr(text_config, "max_position_embeddings", None)
    # Of each row, or one for all; the furthest of those along several axes.
    furthest = first.reshape(-1, first.shape[-2]).amax(0).expand(len(input_ids)).tolist()
    text = input_ids.numpy(force=True)
    shown = np.ones((len(text), columns), dtype=bool)
    if masks.visible is not None:
        shown = masks.visible.numpy(force=True)
    placeholders = [
        getattr(model.config, name)
        for name in ("image_token_id", "image_token_index")
        if getattr(model.config, name, None) is not None
    ]
    rows: list[Row] = []
    try:
        for index, line in enumerate(text):
            # More columns than tokens were shown where the prompt was given as embeddings.
            prompt = line[shown[index, columns - len(line) :]]
            # Nothing is to be drafted from what stands for an image.
            prompt = prompt[~np.isin(prompt, placeholders)]
            request = drafter.add_request(
                prompt,
                prediction=predictions[index],
                **_given(templates=templates[index], read_only=read_only),
            )
            places = UNLIMITED if end is None else end - furthest[index]
            prompt_tokens = int(shown[index].sum())
            rows.append(Row(index, columns, places, prompt_tokens, seeds[index], request))
    except BaseException:
        cancel_requests(drafter, rows)
        raise
    return target, first_logits, rows


def _given(**options: Any) -> dict[str, Any]:
    """Those that are not None: drafters need not know what nobody asks of them."""
    return {name: value for name, value in options.items() if value is not None}
