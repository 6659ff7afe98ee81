"""`generate` and `speculate`: transformers prepares, the decoding loop decodes.

transformers' `generate` prepares inputs, logits processors, stopping criteria and cache as it
always does and then calls what `speculate` returns in place of its own loop.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteriaList,
)

from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.drafters import AssistantModel, Drafter, Staged
from fastdraft.drafters.assistant import require_model
from fastdraft.errors import InvalidValueError
from fastdraft.hf.attention import attending, shares_keys, takes_sights
from fastdraft.hf.draft_models import ModelDrafter
from fastdraft.hf.grammar import Grammar
from fastdraft.hf.interface import CACHE
from fastdraft.hf.kv_cache import RowCache
from fastdraft.hf.loop import Decoding
from fastdraft.hf.masks import Masks
from fastdraft.hf.output import SpeculativeOutput, by_step, pad_token_id, padded_sequences
from fastdraft.hf.positions import PositionCriteria, PositionProcessors, Warping
from fastdraft.hf.prefill import forward_kwargs, prefill
from fastdraft.hf.probe import require_draftable
from fastdraft.hf.requirements import require_supported
from fastdraft.hf.rows import row_seeds, row_texts
from fastdraft.hf.static import (
    StaticModel,
    StaticRowCache,
    compiled_call,
    compiling,
    require_fixed_shapes,
)
from fastdraft.hf.step import CachedModel
from fastdraft.hf.withheld import (
    UNKNOWN,
    option,
    token_healer,
    with_stop_criteria,
    withheld_arguments,
)
from fastdraft.step_latency import StepLatency
from fastdraft.versions import naming_newer

__all__ = ["generate", "speculate"]

# Engines learn what is worth drafting, so each model keeps its own from generation to generation.
_engines: weakref.WeakKeyDictionary[Any, dict[DraftConfig, Engine]] = weakref.WeakKeyDictionary()


@naming_newer()
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    drafter: DraftConfig | Drafter | AssistantModel | Staged | None = None,
    prediction: Any = None,
    templates: Any = None,
    read_only: Sequence[Datastore] | None = None,
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
            `cache_implementation="static"` with `compile_config`, and so on. A static cache is not
            returned. Processors and criteria must be functions of what they are called with, since
            they are called for every position of a draft; criteria get no scores.
        drafter: What drafts; `None` for an engine with the default configuration. The engine of a
            configuration stays with the model and learns from one generation to the next; pass an
            `Engine` to keep its learning apart; an `AssistantModel` or `Staged` drafts with models.
            Greedy output never depends on it, and samples only where models draft. A draft that is
            a tree is verified whole in one forward; where the model cannot take it (attention other
            than 'sdpa', 'eager' and 'fastdraft', layers with other than full or sliding attention,
            ALiBi, no `position_ids`), the chain in it that promises most is verified instead.
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

    Returns:
        A `SpeculativeOutput`; `sequences` is int64 of shape (rows, longest), padded on the right.

    Raises:
        InvalidValueError: The model, a mode (beam search, contrastive search, assisted generation)
            or an argument cannot be decoded speculatively. Raised before the prompt is run; a model
            whose modules do not tell is run over two tokens to see, once.
    """
    require_model(model)
    tokenizer = kwargs.pop("tokenizer", None)
    kwargs = with_stop_criteria(model, kwargs, tokenizer)
    healer = None
    if tokenizer is not None and option(model, kwargs, "token_healing"):
        healer = token_healer(model, tokenizer)
    speculation = _Speculation(
        drafter=drafter,
        prediction=prediction,
        templates=templates,
        read_only=read_only,
        seed=seed,
        generator=generator,
        tokenizer=tokenizer,
        streamer=kwargs.get("streamer"),
        arguments=kwargs,
        stands_for=None if healer is None else (healer, model),
        always_dict=True,
    )
    # The instance's own generate may be a caller of this function, or come from custom_generate/ in
    # the model's folder.
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
    templates: Any = None,
    read_only: Sequence[Datastore] | None = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    tokenizer: Any = None,
    streamer: Any = UNKNOWN,
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
        templates=templates,
        read_only=read_only,
        seed=seed,
        generator=generator,
        tokenizer=tokenizer,
        streamer=streamer,
    )


@dataclass(frozen=True)
class _Speculation:
    """What `model.generate` calls in place of its own loop.

    Attributes:
        drafter, prediction, templates, read_only, seed, generator, tokenizer, streamer: The
            arguments of `speculate`.
        arguments: The keywords of `generate`.
        stands_for: A copy of the model that `generate` runs on, and the model itself.
        always_dict: Whether to return a `SpeculativeOutput` unasked.
    """

    drafter: DraftConfig | Drafter | AssistantModel | Staged | None
    prediction: Any
    templates: Any
    read_only: Sequence[Datastore] | None
    seed: int | Sequence[int] | None
    generator: torch.Generator | None
    tokenizer: Any
    streamer: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    stands_for: tuple[Any, Any] | None = None
    always_dict: bool = False

    def __post_init__(self) -> None:
        known = (DraftConfig, AssistantModel, Staged, Drafter)
        if self.drafter is not None and not isinstance(self.drafter, known):
            raise InvalidValueError(
                "drafter must be a DraftConfig, an AssistantModel, a Staged or have the calls of "
                f"Drafter, got {self.drafter!r}"
            )
        if self.read_only is not None and not (
            isinstance(self.read_only, Sequence)
            and all(isinstance(store, Datastore) for store in self.read_only)
        ):
            raise InvalidValueError(
                f"read_only must be a list of Datastores, got {self.read_only!r}"
            )

    @naming_newer()
    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> SpeculativeOutput | torch.Tensor:
        withheld = withheld_arguments(model, self.streamer, self.arguments)
        streamer = withheld["streamer"]
        if self.stands_for is not None and model is self.stands_for[0]:
            model = self.stands_for[1]
        config, count = generation_config, input_ids.shape[0]
        require_supported(model, config, model_kwargs, withheld, rows=count)
        prepared = model_kwargs[CACHE]
        is_static = type(prepared) is StaticCache
        cache: Any
        if is_static:
            cache = StaticRowCache(prepared)
        else:
            cache = RowCache(
                prepared,
                new_tokens=config.max_length - input_ids.shape[1],
                layer_types=getattr(
                    model.config.get_text_config(decoder=True), "layer_types", None
                ),
            )
        wants_dict = bool(config.return_dict_in_generate)
        keep_scores = wants_dict and bool(config.output_scores)
        logits_processor = LogitsProcessorList(
            Grammar.of(each, self.tokenizer) or each for each in logits_processor
        )
        warping = Warping()
        if config.do_sample:
            logits_processor, warping = Warping.split(logits_processor)
        processors = PositionProcessors(logits_processor, rows=count, columns=input_ids.shape[1])
        criteria = PositionCriteria(stopping_criteria)
        padding = pad_token_id(config, criteria, count)
        masks = Masks(model, visible=model_kwargs.get("attention_mask"), rows=count)
        stepping: Callable[..., CachedModel] = CachedModel
        timed, compiled, padding_left = model, None, None
        if is_static:
            require_fixed_shapes(model, config, model_kwargs, masks)
            timed, compiled = compiled_call(model, config, model_kwargs)
            if compiled is not None:
                cache.take_buffers(compiled)
            padding_left = masks.padding() if takes_sights(model) else None
            stepping = functools.partial(
                StaticModel, call=timed, batch=count, compiled=compiled, padding=padding_left
            )
            # What the model is asked over where its modules do not tell.
            prepared = DynamicCache(config=model.config.get_text_config(decoder=True))
        copies = config.num_return_sequences
        predictions = row_texts("prediction", self.prediction, count, copies, model)
        templates = row_texts("templates", self.templates, count, copies, model)
        seeds = row_seeds(self.seed, self.generator, count) if config.do_sample else None
        drafter, models = self._drafter_of(model, model_kwargs, count, seeds)
        require_draftable(
            model,
            prepared=prepared,
            position_ids=model_kwargs.get("position_ids"),
            kwargs=forward_kwargs(model_kwargs),
            max_length=config.max_length + prepared.get_seq_length(),
        )

        if streamer is not None and not withheld["prompt_is_put"]:
            streamer.put(input_ids.cpu())
        target, first_logits, rows = prefill(
            model,
            input_ids,
            config,
            model_kwargs,
            cache=cache,
            masks=masks,
            stepping=stepping,
            drafter=drafter,
            predictions=predictions,
            templates=templates,
            read_only=self.read_only,
            seeds=seeds or [0] * count,
        )
        decoding = Decoding(
            target,
            text=input_ids.numpy(force=True),
            rows=rows,
            processors=processors,
            warping=warping,
            criteria=criteria,
            do_sample=seeds is not None,
            drafter=drafter,
            cost=StepLatency.of(timed, model.device.type, target.widths or ()),
            padding=padding,
            streamer=streamer,
            keep_scores=keep_scores,
            keep_logits=wants_dict and bool(config.output_logits),
        )
        if models is not None:
            models.scoring = decoding.shaped
        with (
            model._optimize_model_for_decode(),
            compiling(is_compiled=compiled is not None),
            attending(
                model,
                stands_in=padding_left is not None or shares_keys(model),
            ),
        ):
            decoding.run(first_logits)
        if compiled is not None:
            cache.keep_buffers(compiled)
        if streamer is not None:
            streamer.end()
        if models is not None:
            models.warn_of_size()

        given = getattr(prepared, "_is_user_defined", False)
        hands_cache_over = count == 1 and (given or wants_dict) and not is_static
        if hands_cache_over:
            cache.write_back(prepared, rows[0].cached)
        sequences = padded_sequences(decoding, padding).to(input_ids.device)
        if not (self.always_dict or wants_dict):
            return sequences
        row_stats = [row.stats for row in rows if row.stats is not None]
        fields: dict[str, Any] = {
            "sequences": sequences,
            "scores": by_step([row.scores for row in rows]),
            "logits": by_step([row.logits for row in rows]),
            CACHE: prepared if hands_cache_over else None,
            "stats": sum(row_stats[1:], row_stats[0]),
            "row_stats": row_stats,
            "assistants": None if models is None else models.assistants,
        }
        return SpeculativeOutput(**fields)

    def _drafter_of(
        self, model: Any, model_kwargs: dict[str, Any], rows: int, seeds: list[int] | None
    ) -> tuple[Drafter, ModelDrafter | None]:
        """The drafter of this generation, and itself if it runs models."""
        drafter = self.drafter
        if drafter is None or isinstance(drafter, DraftConfig):
            return _engine(model, drafter or DraftConfig()), None
        if not isinstance(drafter, (AssistantModel, Staged)):
            return drafter, None
        if model_kwargs.get("inputs_embeds") is not None:
            raise InvalidValueError(
                "an AssistantModel needs the prompt as input_ids, got inputs_embeds"
            )
        models = ModelDrafter(
            drafter, target=model, tokenizer=self.tokenizer, rows=rows, seeds=seeds
        )
        return models, models


def _engine(model: Any, config: DraftConfig) -> Engine:
    return _engines.setdefault(model, {}).setdefault(config, Engine(config))
