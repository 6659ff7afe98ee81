"""Arguments that transformers' `generate` withholds from a `custom_generate`.

It keeps the tokenizer to itself, which stop strings and token healing need.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from fastdraft.errors import InvalidValueError

__all__ = ["option", "token_healer", "with_stop_criteria"]


def option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """An option of the generation as `generate` finds it."""
    value = kwargs.get(name)
    for config in (kwargs.get("generation_config"), model.generation_config):
        value = value or getattr(config, name, None)
    return value


def token_healer(model: Any, tokenizer: Any) -> Any:
    """A copy of the model, its parts shared, that heals tokens without being given the tokenizer.

    transformers keeps the tokenizer from its own `heal_tokens` too, where it has a custom_generate.
    """
    healer = copy.copy(model)
    vars(healer).pop("generate", None)

    healer.heal_tokens = lambda ids, _: type(model).heal_tokens(healer, ids, tokenizer)
    return healer


def with_stop_criteria(model: Any, kwargs: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The keywords of `generate` with a stopping criterion in the place of stop strings."""
    stop_strings = option(model, kwargs, "stop_strings")
    kwargs = {name: value for name, value in kwargs.items() if name != "stop_strings"}
    if stop_strings is None:
        return kwargs
    if tokenizer is None:
        raise InvalidValueError(
            f"tokenizer must be given with stop_strings {stop_strings!r}, got None"
        )
    criterion = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
    kwargs["stopping_criteria"] = StoppingCriteriaList(
        [*(kwargs.get("stopping_criteria") or []), criterion]
    )
    if getattr(kwargs.get("generation_config"), "stop_strings", None) is not None:
        kwargs["generation_config"] = copy.deepcopy(kwargs["generation_config"])
        kwargs["generation_config"].stop_strings = None
    if model.generation_config.stop_strings is not None:
        kwargs["stop_strings"] = None
    return kwargs
