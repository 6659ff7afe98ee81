"""The prefill: a forward and a request for the prompts, from which the decoding loop goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from fastdraft import Datastore
from fastdraft.drafters import Drafter
from fastdraft.hf.interface import CACHE, unfit
from fastdraft.hf.kv_cache import RowCache
from fastdraft.hf.masks import Masks
from fastdraft.hf.requirements import IMAGE_INPUTS
from fastdraft.hf.rows import UNLIMITED, Row
from fastdraft.hf.step import CachedModel

__all__ = ["add_requests", "forward_kwargs", "prefill"]


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
) -> tuple[CachedModel, torch.Tensor]:
    """Runs the model on the prompts.

    Args:
        cache: A `RowCache` or `StaticRowCache`, empty unless it continues an earlier one.
        stepping: Makes what runs the steps from there on, as `CachedModel` is made.

    Returns:
        The model with the prompts in `cache`, and the logits after each prompt, (rows, vocabulary)
        on the prompts' device.
    """
    kwargs = {**model_kwargs, CACHE: cache}
    if isinstance(cache, RowCache):
        cache.take_over()
    logits = model._prefill(input_ids, config, kwargs).logits
    # A copy, since some models give the logits of the whole prompt, which are large.
    first_logits = logits[:, -1].to(input_ids.device, copy=True)
    columns = cache.get_seq_length()
    if columns == 0:
        raise unfit(
            "model must keep its keys and values in the cache that it is given, got "
            f"{type(model).__name__}, which does not"
        )
    position_ids = model_kwargs.get("position_ids")
    target = stepping(
        model,
        cache=cache,
        masks=masks,
        first_positions=None if position_ids is None else position_ids[..., -1:] + 1 - columns,
        kwargs=forward_kwargs(model_kwargs),
        home=input_ids.device,
    )
    return target, first_logits


def add_requests(
    rows: list[Row],
    target: CachedModel,
    input_ids: torch.Tensor,
    *,
    drafter: Drafter,
    predictions: Sequence[NDArray[np.int64] | None],
    templates: Sequence[NDArray[np.int64] | None],
    read_only: Sequence[Datastore] | None,
    seeds: Sequence[int],
) -> None:
    """Adds a request for each prompt to the drafter, and its row to `rows`.

    Args:
        rows: Empty. Holds a row for each request that the drafter has, whenever this ends.
        target: The model with the prompts in its cache.
        input_ids: The prompts.
    """
    columns = target.cache.get_seq_length()
    config = target.model.config
    # Beyond the last position a learned embedding has no row; a rotary one has, but plain decoding
    # would warn there too.
    end = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    first = target.first_positions
    # Where the first new token of each row is placed; the furthest of places along several axes.
    furthest = np.full(len(input_ids), columns)
    if first is not None:
        furthest[:] = columns + first.reshape(-1, first.shape[-2]).amax(0).numpy(force=True)
    text = input_ids.numpy(force=True)
    shown = np.ones((len(text), columns), dtype=bool)
    if target.masks.visible is not None:
        shown = target.masks.visible
    placeholders = [
        getattr(config, name)
        for name in ("image_token_id", "image_token_index")
        if getattr(config, name, None) is not None
    ]
    for index, line in enumerate(text):
        # More columns than tokens were shown where the prompt was given as embeddings.
        prompt = line[shown[index, columns - len(line) :]]
        # Nothing is to be drafted from what stands for an image.
        prompt = prompt[~np.isin(prompt, placeholders)]
        texts = {"templates": templates[index], "read_only": read_only}
        # Drafters need not know what nobody asks of them.
        given = {name: value for name, value in texts.items() if value is not None}
        places = UNLIMITED if end is None else end - int(furthest[index])
        rows.append(Row(index, columns, places, int(shown[index].sum()), seeds[index]))
        add = partial(drafter.add_request, prompt, prediction=predictions[index], **given)
        # Without Python code in between, where an interrupt would lose the id of a request.
        list(map(setattr, rows[-1:], ["request"], map(partial.__call__, [add])))
