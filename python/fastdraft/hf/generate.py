"""`generate` and `speculate`: transformers prepares, the decoding loop decodes.

transformers' `generate` prepares inputs, logits processors, stopping criteria and cache as it
always does and then calls what `speculate` returns instead of its own loop.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    StoppingCriteriaList,
    StopStringCriteria,
)

from fastdraft import Datastore, DraftConfig
from fastdraft.drafters import AssistantModel, Drafter, Staged
from fastdraft.drafters.assistant import require_model
from fastdraft.errors import InvalidValueError
from fastdraft.hf.output import SpeculativeOutput
from fastdraft.hf.plan import Speculation
from fastdraft.hf.requirements import require_mode
from fastdraft.versions import explaining_version_errors

__all__ = ["generate", "speculate"]


@explaining_version_errors()
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *arguments: Any,
    drafter: DraftConfig | Drafter | AssistantModel | Staged | None = None,
    prediction: Any = None,
    templates: Any = None,
    read_only: Sequence[Datastore] | None = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    logprobs: bool = False,
    bitwise: bool = False,
    **kwargs: Any,
) -> Any:
    """Generates what `model.generate` does, in fewer forwards.

    Greedy output is token for token that of `model.generate`, up to logits that tie within the
    rounding of the model's arithmetic: a forward over several tokens does not round as a forward
    over one. Samples have exactly the model's distribution, but are drawn from other random numbers
    than those of `model.generate`.

    It can replace the method, for callers that are not yours:
    `model.generate = functools.partial(hf.generate, model)`. Then it returns what the method does:
    a tensor, or with `return_dict_in_generate` a `SpeculativeOutput`.

    Args:
        model: A decoder-only model of transformers.
        inputs, arguments: As for `model.generate`, like all keywords that are not named here:
            `attention_mask`, `generation_config` and its fields, `logits_processor`,
            `stopping_criteria`, `stop_strings` and `token_healing` with `tokenizer`, `streamer`,
            `cache_implementation="static"` with `compile_config`, and so on. A static cache is not
            returned. Stopping criteria get no scores.
        drafter: What drafts; `None` for an engine with the default configuration and the common
            n-grams of the tokenizer, where that is given or in the model's folder. The engine of a
            configuration stays with the model and learns from one generation to the next; pass an
            `Engine` to keep its learning apart; an `AssistantModel` or `Staged` drafts with models.
            Greedy output never depends on it, and samples only where models draft.
        prediction: Token ids expected in the output: one sequence for all rows, or a list with one
            sequence or `None` for each row.
        templates: Token ids of text that parts of the output may look like, in the same forms: see
            `fastdraft.templates` for those of tool calls. Only the default drafter takes them.
        read_only: Datastores that all rows may be drafted from, besides the engine's, and that
            their text does not enter.
        seed: For sampling; row b of the output draws from `seed + b`, or a list has one seed a row.
            A sample depends on its seed, its position and its logits, not on the rest of the batch
            and not on drafts, unless models draft.
        generator: Draws the seeds when none are given; `None` for torch's own, so that
            `torch.manual_seed` reproduces a run.
        logprobs: Whether the output has the log-probabilities of the new tokens, two numbers a
            token. They come from the verification, without scores that are kept.
        bitwise: Whether the logits of a text have the same bits with any draft, batch and padding,
            so that output does too, in bfloat16 as well. For models of linear layers and 'sdpa'
            attention on a dynamic cache; forwards are slower.

    Returns:
        A `SpeculativeOutput`; `sequences` is int64 of shape (rows, longest), padded on the right.
        Just `sequences` if it replaces the method.

    Raises:
        InvalidValueError: The model, a mode (beam search, contrastive search, assisted generation)
            or an argument cannot be decoded speculatively. Raised before the prompt is run.
    """
    require_model(model)
    if arguments:
        signature = inspect.signature(GenerationMixin.generate)
        given = signature.bind(model, inputs, *arguments, **kwargs).arguments
        kwargs = {**given, **given.get("kwargs", {})}
        for name in ("self", "inputs", "kwargs"):
            kwargs.pop(name, None)
    assistant_model = kwargs.pop("assistant_model", None)
    if assistant_model is not None:
        require_mode(GenerationConfig(), assistant_model)  # type: ignore[no-untyped-call]
    tokenizer = kwargs.pop("tokenizer", None)
    kwargs = _with_stop_criteria(model, kwargs, tokenizer)
    own = vars(model).get("generate")
    stands_in = isinstance(own, functools.partial) and own.func is generate
    speculation = Speculation(
        drafter=drafter,
        prediction=prediction,
        templates=templates,
        read_only=read_only,
        seed=seed,
        generator=generator,
        tokenizer=tokenizer,
        streamer=kwargs.pop("streamer", None),
        logprobs=logprobs,
        bitwise=bitwise,
        synced_gpus=kwargs.pop("synced_gpus", None),
        always_dict=not stands_in,
    )
    # The instance's own generate may be a caller of this function, or come from custom_generate/ in
    # the model's folder.
    plain = model.generate if own is None else type(model).generate.__get__(model)
    decode: Any = speculation
    if _option(model, kwargs, "token_healing"):
        # Given a custom_generate, transformers gives its own `heal_tokens` no tokenizer: a
        # copy of the model, which shares its parts, has one that knows it.
        healer = copy.copy(model)
        vars(healer).pop("generate", None)
        healer.heal_tokens = lambda ids, _: type(model).heal_tokens(healer, ids, tokenizer)
        plain = type(model).generate.__get__(healer)
        decode = lambda _, *given, **named: speculation(model, *given, **named)  # noqa: E731
    return plain(inputs, custom_generate=decode, **kwargs)


def speculate(
    *,
    drafter: DraftConfig | Drafter | AssistantModel | Staged | None = None,
    prediction: Any = None,
    templates: Any = None,
    read_only: Sequence[Datastore] | None = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    logprobs: bool = False,
    bitwise: bool = False,
) -> Callable[..., SpeculativeOutput | torch.Tensor]:
    """The decoding loop for `model.generate(..., custom_generate=speculate())`.

    `model.generate` then returns what it always does: the sequences, or with
    `return_dict_in_generate` a `SpeculativeOutput`. The arguments are those of `generate`;
    `tokenizer` is the model's, for an `AssistantModel` that is given its own.
    transformers keeps the tokenizer from a `custom_generate`, so stop strings and token healing
    need `generate`; for stop strings a `StopStringCriteria` among the stopping criteria does too.

    transformers also keeps its `streamer` from a `custom_generate`: give it here instead, where it
    gets the prompt and every token. One that only `model.generate` is given gets no token. An
    `assistant_model` of `model.generate` is not used.
    """
    return Speculation(**locals())


def _option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """An option of the generation as `generate` finds it."""
    value = kwargs.get(name)
    for config in (kwargs.get("generation_config"), model.generation_config):
        value = value or getattr(config, name, None)
    return value


def _with_stop_criteria(model: Any, kwargs: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The keywords of `generate` with a stopping criterion instead of stop strings."""
    stop_strings = _option(model, kwargs, "stop_strings")
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
