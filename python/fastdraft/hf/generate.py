"""`generate` and `speculate`: transformers prepares, the decoding loop decodes.

transformers' `generate` prepares inputs, logits processors, stopping criteria and cache as it
always does and then calls what `speculate` returns in place of its own loop.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fastdraft import DraftConfig, DraftStats, Engine
from fastdraft.drafters import AssistantModel, Drafter, Staged
from fastdraft.drafters.assistant import require_model
from fastdraft.errors import InvalidValueError
from fastdraft.hf.drafts import ModelDrafts
from fastdraft.hf.kv_cache import RowCache
from fastdraft.hf.loop import Decoding, Row, Target, give_up
from fastdraft.hf.masks import Masks
from fastdraft.hf.positions import PositionCriteria, PositionProcessors
from fastdraft.hf.probe import require_draftable
from fastdraft.stats import AssistantStats
from fastdraft.step_cost import StepCost

__all__ = ["SpeculativeOutput", "generate", "speculate"]

# A streamer that nobody has named, where None says that there is none.
_UNKNOWN: Any = object()

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__

# Engines learn what is worth drafting, so each model keeps its own from generation to generation.
_engines: weakref.WeakKeyDictionary[Any, dict[DraftConfig, Engine]] = weakref.WeakKeyDictionary()


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` of transformers returns in a dict, and the statistics of the drafts.

    `scores` and `logits` hold, where asked for, one tensor of shape (rows, vocabulary) for each new
    token; zeros stand where a row had ended. `past_key_values` is given for a single row.

    Attributes:
        stats: The sum over all rows.
        row_stats: One for each row of `sequences`.
        assistants: One for each draft model, the smallest first; `None` without.
    """

    stats: DraftStats | None = None
    row_stats: list[DraftStats] | None = None
    assistants: list[AssistantStats] | None = None


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    drafter: DraftConfig | Drafter | AssistantModel | Staged | None = None,
    prediction: Any = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> SpeculativeOutput:
    """Generates what `model.generate` does, in fewer forwards.

    Greedy output is token for token that of `model.generate`, up to logits that tie within the
    rounding of the model's arithmetic: a forward over several tokens does not round as a forward
    over one. Samples have exactly the model's distribution, but are drawn from other random numbers
    than those of `model.generate`.

    For callers that are not yours it may stand in the method's place:
    `model.generate = functools.partial(hf.generate, model)`.

    Args:
        model: A decoder-only model of transformers.
        inputs: As for `model.generate`, like all keywords that are not named here:
            `attention_mask`, `generation_config` and its fields, `logits_processor`,
            `stopping_criteria`, `stop_strings` and `token_healing` with `tokenizer`, `streamer`,
            and so on. Processors and criteria must be functions of what they are called with, since
            they are called for every position of a draft; criteria get no scores.
        drafter: What guesses; `None` for the engine as it comes. The engine of a configuration
            stays with the model and learns from one generation to the next; pass an `Engine` to
            keep its learning apart; an `AssistantModel` or `Staged` drafts with models. Greedy
            output never depends on it, and samples only where models draft. A draft that is a tree
            is verified whole in one forward; where the model cannot take it (attention other than
            'sdpa' and 'eager', layers with other than full or sliding attention, ALiBi, no
            `position_ids`), the chain in it that promises most is verified in its place.
        prediction: Token ids expected in the output: one sequence for all rows, or a list with one
            sequence or `None` for each row.
        seed: For sampling; row b of the output draws from `seed + b`, or a list has one seed a row.
            A sample depends on its seed, its position and its logits, not on drafts or on the rest
            of the batch; where models draft, on what they draft too.
        generator: What seeds are drawn from when none are given; `None` for torch's own, so that
            `torch.manual_seed` reproduces a run.

    Returns:
        A `SpeculativeOutput`; `sequences` is int64 of shape (rows, longest), padded on the right.

    Raises:
        InvalidValueError: The model, a mode (beam search, contrastive search, assisted generation)
            or an argument cannot be decoded speculatively. Raised before the prompt is run; a model
            whose modules do not tell is run over two tokens to see, once.
    """
    require_model(model)
    tokenizer = kwargs.pop("tokenizer", None)
    _take_stop_strings(model, kwargs, tokenizer)
    healer = None
    if tokenizer is not None and _option(model, kwargs, "token_healing"):
        healer = _healer(model, tokenizer)
    speculation = _Speculation(
        drafter=drafter,
        prediction=prediction,
        seed=seed,
        generator=generator,
        tokenizer=tokenizer,
        streamer=kwargs.get("streamer"),
        arguments=kwargs,
        stands_for=None if healer is None else (healer, model),
        always_dict=True,
    )
    # In the instance's method's place may stand a caller of this function, and so does what the
    # model's folder has in custom_generate/.
    if healer is not None or "generate" in vars(model):
        plain = type(model).generate.__get__(model if healer is None else healer)
    else:
        plain = model.generate
    output: SpeculativeOutput = plain(inputs, custom_generate=speculation, **kwargs)
    return output


def speculate(
    *,
    drafter: DraftConfig | Drafter | AssistantModel | Staged | None = None,
    prediction: Any = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    tokenizer: Any = None,
    streamer: Any = _UNKNOWN,
) -> Callable[..., SpeculativeOutput | torch.Tensor]:
    """The decoding loop for `model.generate(..., custom_generate=speculate())`.

    `model.generate` then returns what it always does: the sequences, or with
    `return_dict_in_generate` a `SpeculativeOutput`. The arguments are those of `generate`;
    `tokenizer` is the model's, for an `AssistantModel` that is given its own.
    transformers keeps the tokenizer from a `custom_generate`, so stop strings and token healing
    need `generate`; for stop strings a `StopStringCriteria` among the stopping criteria does too.

    transformers also keeps its `streamer` from a `custom_generate`. It is found where transformers'
    own `generate` calls, through however many wrappers; a model that has another `generate`, which
    then puts the prompt to it, needs it here, `None` for none.
    """
    return _Speculation(
        drafter=drafter,
        prediction=prediction,
        seed=seed,
        generator=generator,
        tokenizer=tokenizer,
        streamer=streamer,
        arguments={},
        stands_for=None,
        always_dict=False,
    )


class _Speculation:
    """What `model.generate` calls in place of its own loop."""

    def __init__(
        self,
        *,
        drafter: DraftConfig | Drafter | AssistantModel | Staged | None,
        prediction: Any,
        seed: int | Sequence[int] | None,
        generator: torch.Generator | None,
        tokenizer: Any,
        streamer: Any,
        arguments: dict[str, Any],
        stands_for: tuple[Any, Any] | None,
        always_dict: bool,
    ) -> None:
        known = (DraftConfig, AssistantModel, Staged, Drafter)
        if drafter is not None and not isinstance(drafter, known):
            raise InvalidValueError(
                "drafter must be a DraftConfig, an AssistantModel, a Staged or have the calls of "
                f"Drafter, got {drafter!r}"
            )
        self._drafter = drafter
        self._prediction = prediction
        self._seed = seed
        self._generator = generator
        self._tokenizer = tokenizer
        self._streamer = streamer
        self._arguments = arguments
        self._stands_for = stands_for
        self._always_dict = always_dict

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> SpeculativeOutput | torch.Tensor:
        arguments = self._arguments_of_generate(model)
        streamer = arguments["streamer"]
        if self._stands_for is not None and model is self._stands_for[0]:
            model = self._stands_for[1]
        count = input_ids.shape[0]
        require_model(model)
        _require_mode(generation_config, arguments)
        _require_positions(model, generation_config)
        _require_text(model_kwargs)
        if streamer is not None and count > 1:
            raise InvalidValueError(f"a streamer takes a batch of 1 row, got {count} rows")
        prepared = model_kwargs.pop("past_key_values", None)
        if prepared is None:
            raise InvalidValueError("fastdraft needs a key-value cache, got use_cache=False")
        given = getattr(prepared, "_is_user_defined", False)
        if given and count > 1:
            # Rows of unequal length do not fit into it.
            raise InvalidValueError(
                f"past_key_values is taken for a batch of 1 row, got {count} rows"
            )
        cache = RowCache(prepared, new_tokens=generation_config.max_length - input_ids.shape[1])
        processors = PositionProcessors(logits_processor)
        criteria = PositionCriteria(stopping_criteria, count)
        pad_token_id = _pad_token_id(generation_config, criteria, count)
        attention_mask = model_kwargs.get("attention_mask")
        visible = None if attention_mask is None else attention_mask.bool()
        masks = Masks(model, visible=visible, rows=count)
        if count > 1 and model_kwargs.get("position_ids") is None:
            # It places tokens by the cache's length, which is that of the longest row.
            raise InvalidValueError(
                f"a batch needs a model that takes position_ids, got {type(model).__name__}"
            )
        predictions = _predictions(
            self._prediction, count, generation_config.num_return_sequences, model
        )
        do_sample = bool(generation_config.do_sample)
        seeds = self._seeds(count) if do_sample else [0] * count
        drafter = self._drafter
        models = None
        if isinstance(drafter, (AssistantModel, Staged)):
            if model_kwargs.get("inputs_embeds") is not None:
                raise InvalidValueError(
                    "an AssistantModel needs the prompt as input_ids, got inputs_embeds"
                )
            drafter = models = ModelDrafts(
                drafter,
                target=model,
                tokenizer=self._tokenizer,
                rows=count,
                seeds=seeds if do_sample else None,
            )

        kwargs = {
            key: value
            for key, value in model_kwargs.items()
            if key not in ("attention_mask", "position_ids", "inputs_embeds")
        }
        require_draftable(
            model,
            prepared=prepared,
            position_ids=model_kwargs.get("position_ids"),
            kwargs=kwargs,
            max_length=generation_config.max_length + prepared.get_seq_length(),
        )
        if streamer is not None and not arguments["has_put"]:
            streamer.put(input_ids.cpu())
        logits = model._prefill(
            input_ids, generation_config, {**model_kwargs, "past_key_values": cache}
        ).logits
        # A copy, since some models give the logits of the whole prompt, which are large.
        first_logits = logits[:, -1].to(input_ids.device, copy=True)
        del logits
        if cache.get_seq_length() == 0:
            raise InvalidValueError(
                "model must keep its keys and values in the cache that it is given, got "
                f"{type(model).__name__}, which does not"
            )
        target = Target(
            model,
            cache=cache,
            cached=cache.get_seq_length(),
            masks=masks,
            next_positions=_next_positions(model_kwargs),
            last_position=_last_position(model),
            kwargs=kwargs,
            device=model.device,
            home=input_ids.device,
        )
        if drafter is None or isinstance(drafter, DraftConfig):
            drafter = _engine(model, drafter or DraftConfig())
        text = input_ids.numpy(force=True)
        rows = _start(drafter, text, visible, target.prompt_columns, predictions, seeds)
        decoding = Decoding(
            target,
            text=text,
            rows=rows,
            processors=processors,
            criteria=criteria,
            do_sample=do_sample,
            drafter=drafter,
            cost=StepCost.of(model, model.device.type),
            streamer=streamer,
            keep_scores=_keeps(generation_config, "output_scores"),
            keep_logits=_keeps(generation_config, "output_logits"),
        )
        if models is not None:
            models.scoring = decoding.score_drafts
        with model._optimize_model_for_decode():
            decoding.run(first_logits)
        if streamer is not None:
            streamer.end()

        if models is not None:
            models.warn_of_size()
        hands_cache_over = count == 1 and (given or generation_config.return_dict_in_generate)
        if hands_cache_over:
            cache.write_back(prepared, target.cached(rows[0]))
        sequences = _sequences(decoding, pad_token_id).to(input_ids.device)
        if not (self._always_dict or generation_config.return_dict_in_generate):
            return sequences
        row_stats = [row.stats for row in rows if row.stats is not None]
        fields: dict[str, Any] = {
            "sequences": sequences,
            "scores": _by_step([row.scores for row in rows]),
            "logits": _by_step([row.logits for row in rows]),
            "past_key_values": prepared if hands_cache_over else None,
            "stats": sum(row_stats[1:], row_stats[0]),
            "row_stats": row_stats,
            "assistants": None if models is None else models.assistants,
        }
        return SpeculativeOutput(**fields)

    def _arguments_of_generate(self, model: Any) -> dict[str, Any]:
        """The arguments of `generate` that transformers keeps from a `custom_generate`.

        Without them a reader of the streamer would wait for ever, so they are read where
        transformers' `generate` has them, however many wrappers have called each other since.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame and not (frame.f_code is _GENERATE and frame.f_locals["self"] is model):
            frame = frame.f_back
        if frame is None and self._streamer is _UNKNOWN:
            raise InvalidValueError(
                "streamer must be given to speculate() where custom_generate is not called by "
                "transformers' own generate, None for no streamer, got none"
            )
        found = {} if frame is None else frame.f_locals
        arguments = {**self._arguments, "streamer": self._streamer}
        for name in ("streamer", "assistant_model", "synced_gpus"):
            if arguments.get(name) in (None, _UNKNOWN):
                arguments[name] = found.get(name)
        # generate puts the prompt to the streamer that it is given.
        arguments["has_put"] = frame is None or found["streamer"] is not None
        return arguments

    def _seeds(self, rows: int) -> list[int]:
        if self._seed is None:
            generator = self._generator
            device = "cpu" if generator is None else generator.device
            drawn = torch.randint(2**63 - 1, (rows,), generator=generator, device=device)
            return list(drawn.tolist())
        if isinstance(self._seed, int):
            return [(_checked_seed(self._seed) + row) % 2**63 for row in range(rows)]
        if len(self._seed) != rows:
            raise InvalidValueError(
                f"seed must hold one seed for each of {rows} rows, got {len(self._seed)}"
            )
        return [_checked_seed(int(seed)) for seed in self._seed]


def _checked_seed(seed: int) -> int:
    if not 0 <= seed < 2**63:
        raise InvalidValueError(f"seed must be from 0 to 2**63 - 1, got {seed}")
    return seed


def _require_mode(config: GenerationConfig, arguments: dict[str, Any]) -> None:
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InvalidValueError(
            f"fastdraft decodes by greedy search or sampling, got {mode.value}"
            + ("; choose what drafts with drafter=" if mode.value == "assisted_generation" else "")
        )
    for option in ("output_attentions", "output_hidden_states"):
        if getattr(config, option):
            raise InvalidValueError(f"{option} is not given by speculative decoding, got True")
    if arguments.get("synced_gpus"):
        raise InvalidValueError(
            "synced_gpus must be off: ranks would take unequal numbers of steps"
        )


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


def _require_text(model_kwargs: dict[str, Any]) -> None:
    known = ("attention_mask", "position_ids", "inputs_embeds")
    for name, value in model_kwargs.items():
        if isinstance(value, torch.Tensor) and name not in known:
            raise InvalidValueError(
                f"inputs must be text or its embeddings, got {name} of shape {tuple(value.shape)}"
            )


def _pad_token_id(config: GenerationConfig, criteria: PositionCriteria, rows: int) -> int:
    """What fills rows that end early."""
    if rows > 1 and criteria.read_text and not criteria.eos_ids:
        raise InvalidValueError(
            "stopping criteria of a batch need eos_token_id and pad_token_id, "
            f"which fill the rows that end early, got eos_token_id={config.eos_token_id}"
        )
    pad = config._pad_token_tensor
    return 0 if pad is None else int(pad)


def _keeps(config: GenerationConfig, option: str) -> bool:
    return bool(config.return_dict_in_generate and getattr(config, option))


def _next_positions(model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    position_ids = model_kwargs.get("position_ids")
    return None if position_ids is None else position_ids[..., -1:] + 1


def _last_position(model: Any) -> int | None:
    # Beyond it a learned embedding has no row; a rotary one has, but plain decoding would warn
    # there too.
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return None if positions is None else positions - 1


def _option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """An option of the generation as `generate` finds it."""
    value = kwargs.get(name)
    for config in (kwargs.get("generation_config"), model.generation_config):
        value = value or getattr(config, name, None)
    return value


def _healer(model: Any, tokenizer: Any) -> Any:
    """A copy of the model, its parts shared, that heals tokens without being given the tokenizer.

    transformers keeps the tokenizer from its own `heal_tokens` too, where it has a custom_generate.
    """
    healer = copy.copy(model)
    vars(healer).pop("generate", None)

    healer.heal_tokens = lambda ids, _: type(model).heal_tokens(healer, ids, tokenizer)
    return healer


def _take_stop_strings(model: Any, kwargs: dict[str, Any], tokenizer: Any) -> None:
    """Makes stop strings a stopping criterion: a custom_generate does not get the tokenizer."""
    stop_strings = _option(model, kwargs, "stop_strings")
    kwargs.pop("stop_strings", None)
    if stop_strings is None:
        return
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


def _predictions(
    prediction: Any, rows: int, copies: int, model: Any
) -> list[NDArray[np.int64] | None]:
    """The prediction of each row, checked."""
    if prediction is None:
        return [None] * rows
    if isinstance(prediction, torch.Tensor):
        prediction = prediction.numpy(force=True)
    requests = rows // copies
    of_requests: list[Any]
    if isinstance(prediction, np.ndarray):
        of_requests = [prediction] * requests if prediction.ndim == 1 else list(prediction)
    elif not prediction or isinstance(prediction[0], (int, np.integer)):
        of_requests = [prediction] * requests
    else:
        of_requests = list(prediction)
    if len(of_requests) != requests:
        raise InvalidValueError(
            f"prediction must be one sequence for all or one for each of {requests} rows, "
            f"got {len(of_requests)}"
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    checked = [None if ids is None else _prediction_ids(ids, vocabulary) for ids in of_requests]
    return [ids for ids in checked for _ in range(copies)]


def _prediction_ids(ids: Any, vocabulary: int) -> NDArray[np.int64]:
    if isinstance(ids, torch.Tensor):
        ids = ids.numpy(force=True)
    array = np.asarray(ids if len(ids) else np.zeros(0, np.int64))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValueError(
            "a prediction must hold token ids in one dimension, "
            f"got {array.dtype} of shape {array.shape}"
        )
    outside = array[(array < 0) | (array >= vocabulary)]
    if len(outside):
        # A draft is fed to the model, which has no embedding for it.
        raise InvalidValueError(
            f"token ids of a prediction must be from 0 to {vocabulary - 1}, got {int(outside[0])}"
        )
    return array.astype(np.int64)


def _engine(model: Any, config: DraftConfig) -> Engine:
    return _engines.setdefault(model, {}).setdefault(config, Engine(config))


def _start(
    drafter: Drafter,
    text: NDArray[np.int64],
    visible: torch.Tensor | None,
    columns: int,
    predictions: list[NDArray[np.int64] | None],
    seeds: list[int],
) -> list[Row]:
    """Adds a request for each row of the prompts, without their padding.

    The model has seen `columns` columns; they are more than those of `text` when the prompt was
    given as embeddings.
    """
    shown = np.ones((len(text), columns), dtype=bool)
    if visible is not None:
        shown = visible.numpy(force=True)
    hidden = columns - text.shape[1]
    rows: list[Row] = []
    try:
        for index, (line, prediction, seed) in enumerate(
            zip(text, predictions, seeds, strict=True)
        ):
            prompt = line[shown[index, hidden:]]
            request = drafter.add_request(prompt, prediction=prediction)
            prompt_tokens = int(shown[index].sum())
            rows.append(Row(index, prompt_tokens=prompt_tokens, seed=seed, request=request))
    except BaseException:
        give_up(drafter, rows)
        raise
    return rows


def _sequences(decoding: Decoding, pad_token_id: int) -> torch.Tensor:
    longest = max(map(decoding.length, decoding.rows))
    sequences = np.full((len(decoding.rows), longest), pad_token_id, dtype=np.int64)
    for row in decoding.rows:
        length = decoding.length(row)
        sequences[row.index, :length] = decoding.text[row.index, :length]
    return torch.from_numpy(sequences)


def _by_step(of_rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...] | None:
    """One (rows, vocabulary) tensor for each new token, zeros where a row had ended."""
    if not of_rows[0]:
        return None
    nothing = torch.zeros_like(of_rows[0][0])
    longest = max(map(len, of_rows))
    return tuple(
        torch.stack([kept[step] if step < len(kept) else nothing for kept in of_rows])
        for step in range(longest)
    )
