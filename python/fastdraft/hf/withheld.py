"""Arguments that transformers' `generate` withholds from a `custom_generate`.

It keeps the tokenizer, which stop strings and token healing need, and the streamer to itself.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

from transformers import GenerationMixin, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from fastdraft.errors import InvalidValueError

__all__ = ["UNKNOWN", "option", "token_healer", "with_stop_criteria", "withheld_arguments"]

UNKNOWN: Final[Any] = object()
"""Stands for a streamer that nobody has named, where None says that there is none."""

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def withheld_arguments(model: Any, streamer: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The streamer, assistant_model and synced_gpus of the `generate` that has called.

    Read where transformers' `generate` has them, through any wrappers: without them, a reader of
    the streamer would wait for ever. "prompt_is_put" says whether `generate` has put the prompt to
    the streamer.

    Args:
        model: The model of the generation.
        streamer: The streamer if the caller named one, else `UNKNOWN`.
        given: The keywords of `fastdraft.hf.generate`; empty inside `speculate`.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame and not (frame.f_code is _GENERATE and frame.f_locals["self"] is model):
        frame = frame.f_back
    if frame is None and streamer is UNKNOWN:
        raise InvalidValueError(
            "streamer must be given to speculate() where custom_generate is not called by "
            "transformers' own generate, None for no streamer, got none"
        )
    found = {} if frame is None else frame.f_locals
    arguments = {**given, "streamer": streamer}
    withheld = {
        name: found.get(name) if arguments.get(name) in (None, UNKNOWN) else arguments[name]
        for name in ("streamer", "assistant_model", "synced_gpus")
    }
    # `generate` has already passed the prompt to a streamer that it was given itself.
    withheld["prompt_is_put"] = frame is None or found["streamer"] is not None
    return withheld


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
