"""Draft models for the tiny models of the tests: cut from them, and bent."""

from __future__ import annotations

import copy
from typing import Any

import torch

from fastdraft.drafters import AssistantModel

__all__ = ["bent", "constant", "shortened"]


def constant(model: Any, num_tokens: int = 4, **options: Any) -> AssistantModel:
    """A model that drafts `num_tokens`, without an engine beside it."""
    return AssistantModel(
        model, schedule="constant", num_tokens=num_tokens, **{"lookup": None, **options}
    )


def bent(model: Any, *, by: float = 0.1, seed: int = 1) -> Any:
    """A copy whose weights are off by that part of their spread: a model that often agrees."""
    torch.manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.dim() > 1:
                parameter.add_(by * parameter.std() * torch.randn_like(parameter))
    return copied


def shortened(model: Any, *, layers: int = 1) -> Any:
    """A copy of the first layers alone."""
    copied = copy.deepcopy(model)
    copied.model.layers = copied.model.layers[:layers]
    copied.config.num_hidden_layers = layers
    if getattr(copied.config, "layer_types", None):
        copied.config.layer_types = copied.config.layer_types[:layers]
    return copied
