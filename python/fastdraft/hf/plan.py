"""One generation: everything is checked when its plan is made, then it runs in one scope."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteriaList,
)

from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.drafters import AssistantModel, Drafter, Staged
from fastdraft.engine import Session
from fastdraft.errors import InvalidValueError
from fastdraft.hf.attention import attending
from fastdraft.hf.bitwise import Bitwise
from fastdraft.hf.device import device_of
from fastdraft.hf.draft_models.drafter import ModelDrafter
from fastdraft.hf.interface import CACHE, decoding_scope, is_callers_own, prefill, unsupported_call
from fastdraft.hf.kv_cache import RowCache, RowLayer
from fastdraft.hf.loop import Decoding
from fastdraft.hf.masks import Masks
from fastdraft.hf.output import SpeculativeOutput, by_step, pad_token_id, padded_sequences
from fastdraft.hf.probe import Answer, Question, ask
from fastdraft.hf.processors import PositionCriteria, PositionProcessors, Warping
from fastdraft.hf.requirements import besides_text, own_cache, require_supported
from fastdraft.hf.rows import UNLIMITED, Rows, row_seeds, row_texts
from fastdraft.hf.static import (
    StaticModel,
    StaticRowCache,
    compiled_call,
    compiling,
    require_fixed_shapes,
)
from fastdraft.hf.step import CachedModel
from fastdraft.hf.vocabulary import vocabulary_size
from fastdraft.memory.common_ngrams import default_ngrams, tokenizer_file
from fastdraft.step_latency import StepLatency
from fastdraft.versions import explaining_version_errors

__all__ = ["Plan", "Speculation"]

# Engines learn what is worth drafting, so each model keeps its own from generation to generation.
_engines: weakref.WeakKeyDictionary[Any, dict[DraftConfig | None, Engine]]
_engines = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The callable that `model.generate` calls instead of its own loop.

    Attributes:
        drafter, prediction, templates, read_only, seed, generator, tokenizer, streamer, logprobs,
            bitwise: The arguments of `fastdraft.hf.speculate`.
        synced_gpus: As `generate` takes it; `None` for what it does unasked.
        always_dict: Whether to return a `SpeculativeOutput` unasked.
    """

    drafter: DraftConfig | Drafter | AssistantModel | Staged | None = None
    prediction: Any = None
    templates: Any = None
    read_only: Sequence[Datastore] | None = None
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | None = None
    tokenizer: Any = None
    streamer: Any = None
    logprobs: bool = False
    bitwise: bool = False
    synced_gpus: bool | None = None
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Speculation:
        """Itself; refused in a `GenerationConfig`, which `generate` copies and would not call."""
        # The copy of a configuration is empty until its values are copied.
        if any(isinstance(each, GenerationConfig) and not vars(each) for each in memo.values()):
            raise InvalidValueError(
                "custom_generate must be an argument of model.generate, got one in a "
                "GenerationConfig, which passes it to nobody; for a trainer of TRL call "
                "fastdraft.hf.trl.attach(trainer)"
            )
        return self

    @explaining_version_errors()
    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> SpeculativeOutput | torch.Tensor:
        is_wanted = self.always_dict or generation_config.return_dict_in_generate
        if self.logprobs and not is_wanted:
            raise InvalidValueError(
                "return_dict_in_generate must be True with logprobs=True, which only a dict holds, "
                f"got {generation_config.return_dict_in_generate}"
            )
        plan = Plan(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
            asked=self,
        )
        output = plan.run()
        return output if is_wanted else output.sequences


class Plan:
    """One generation, of what `generate` prepared and what its caller asked for besides.

    Raises:
        InvalidValueError: The generation cannot be decoded speculatively.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *,
        asked: Speculation,
    ) -> None:
        rows = input_ids.shape[0]
        if model_kwargs.get(CACHE) is None and config.use_cache:
            model_kwargs[CACHE] = own_cache(model, input_ids)
        require_supported(
            model,
            config,
            model_kwargs,
            rows=rows,
            streams=asked.streamer is not None,
            synced_gpus=asked.synced_gpus,
        )
        if rows > 1:
            _require_one_adapter(model)
        self._model, self._input_ids, self._config = model, input_ids, config
        self._model_kwargs, self._asked = model_kwargs, asked
        self._prepared = model_kwargs[CACHE]
        self._wants_dict = bool(config.return_dict_in_generate)

        self._warping = Warping()
        if config.do_sample:
            processors, self._warping = Warping.split(processors)
        self._processors = PositionProcessors(processors)
        self._criteria = PositionCriteria(criteria)
        self._padding = pad_token_id(config, self._criteria, rows)
        self._seeds = row_seeds(asked.seed, asked.generator, rows) if config.do_sample else None
        copies = config.num_return_sequences
        self._predictions = row_texts("prediction", asked.prediction, rows, copies, model)
        self._templates = row_texts("templates", asked.templates, rows, copies, model)

        self._masks = Masks(
            model,
            visible=model_kwargs.get("attention_mask"),
            rows=rows,
            is_fixed=type(self._prepared) is StaticCache,
        )
        self._choose_cache()
        self._choose_drafter()
        if asked.bitwise:
            self._require_bitwise()
        # The arguments of every forward besides tokens, positions, mask and cache.
        self._kwargs = {
            name: value
            for name, value in model_kwargs.items()
            if name != CACHE and name != "mm_encoder_outputs" and not torch.is_tensor(value)
        }
        self.answer = self._answered()

    def _answered(self) -> Answer:
        """Asks what the model can verify.

        Raises:
            InvalidValueError: Nothing, in words that name what differs.
        """
        model, masks = self._model, self._masks
        shape = min(len(self._input_ids), 2), masks.hides
        windows = [each.window for each in self._cache.layers if isinstance(each, RowLayer)]
        longest = self._config.max_length + self._cache.get_seq_length()
        narrowest = min((each for each in windows if each is not None), default=longest)
        # A model that positions tokens by their columns gets a tree wrong, even if little shows.
        trees = self._model_kwargs.get("position_ids") is not None
        trees = trees and masks.needed is None and not self._cache.has_recurrent_layers
        question = Question(*shape, trees, windowed=longest > narrowest)
        options: dict[str, Any] = {
            "cache": "static" if isinstance(self._cache, StaticRowCache) else None,
            "prefill": _prefilled,
            "device": device_of(model, self._input_ids.device),
        }
        answer = ask(model, question, **options)
        given = besides_text(self._model_kwargs)
        if given and not isinstance(answer, str):
            # Those of the prompt itself: what else goes together is not known.
            inputs = {"input_ids": self._input_ids, **given}
            for name in ("attention_mask", "inputs_embeds"):
                if self._model_kwargs.get(name) is not None:
                    inputs[name] = self._model_kwargs[name]
            if is_callers_own(self._prepared):
                inputs[CACHE] = self._prepared
            question = Question(*shape, answer.trees, given=tuple(sorted(given)))
            answer = ask(model, question, **options, inputs=inputs)
        if isinstance(answer, str):
            problem = f"{type(model).__name__} cannot verify drafts: {answer}"
            if question.windowed:
                problem += f"; keep max_length within {narrowest}, got {longest}"
            raise unsupported_call(problem)
        return answer

    def _choose_cache(self) -> None:
        """The cache of the rows, what runs the steps on it, and what their times are kept for."""
        model, config, prepared = self._model, self._config, self._prepared
        self._stepping: Callable[..., CachedModel] = CachedModel
        self._timed, self._compiled = model, None
        self._cache: Any
        if type(prepared) is StaticCache:
            self._cache = StaticRowCache(prepared)
            require_fixed_shapes(model, config, self._model_kwargs, self._masks)
            call, compiled = compiled_call(model, config, self._model_kwargs)
            if compiled is not None:
                self._cache.take_buffers(compiled)
            self._timed, self._compiled = call, compiled
            self._stepping = partial(
                StaticModel,
                call=call,
                batch=len(self._input_ids),
                compiled=compiled,
            )
        else:
            new_tokens = config.max_length - self._input_ids.shape[1]
            self._cache = RowCache.of(prepared, new_tokens=new_tokens)

    def _choose_drafter(self) -> None:
        """The drafter, and itself if it runs models."""
        asked, model = self._asked, self._model
        self._models: ModelDrafter | None = None
        self._drafter: Any = asked.drafter
        if asked.drafter is None or isinstance(asked.drafter, DraftConfig):
            self._drafter = _engine(model, asked.drafter, asked.tokenizer)
        elif isinstance(asked.drafter, (AssistantModel, Staged)):
            if self._model_kwargs.get("inputs_embeds") is not None:
                raise InvalidValueError(
                    "an AssistantModel needs the prompt as input_ids, got inputs_embeds"
                )
            self._drafter = self._models = ModelDrafter(
                asked.drafter,
                target=model,
                tokenizer=asked.tokenizer,
                rows=len(self._input_ids),
                seeds=self._seeds,
            )
            if asked.read_only and not self._models.has_engine:
                raise InvalidValueError(
                    "read_only must be left out where models draft without an engine, got "
                    f"{asked.read_only!r}"
                )

    def _require_bitwise(self) -> None:
        """Refuses what rounds by the shape of forwards even where products do not."""
        if isinstance(self._cache, StaticRowCache) or self._cache.has_recurrent_layers:
            raise InvalidValueError(
                "bitwise must be False with a static cache or recurrent layers, got "
                f"{type(self._prepared).__name__} of {type(self._model).__name__}"
            )
        if self._models is not None:
            raise InvalidValueError(
                "bitwise must be False where models draft, whose samples depend on the drafts, got "
                f"{self._asked.drafter!r}"
            )

    def run(self) -> SpeculativeOutput:
        """Decodes to the end. Whatever is raised, no request is left at the drafter."""
        streamer = self._asked.streamer
        if streamer is not None:
            streamer.put(self._input_ids.cpu())
        rounding = Bitwise() if self._asked.bitwise else nullcontext()
        with rounding, Session(self._drafter) as session:
            target, first_logits = self.prefilled()
            decoding = Decoding(
                target,
                rows=self._rows(session, target),
                processors=self._processors,
                warping=self._warping,
                criteria=self._criteria,
                do_sample=self._seeds is not None,
                drafter=self._drafter,
                session=session,
                cost=StepLatency.of(self._timed, target.device.type, target.widths or ()),
                streamer=streamer,
                padding=self._padding,
                keep_scores=self._keeps("scores"),
                keep_logits=self._keeps("logits"),
                keep_logprobs=self._asked.logprobs,
            )
            if self._models is not None:
                self._models.shape_by(decoding.shaped)
            with (
                decoding_scope(self._model),
                compiling(is_compiled=self._compiled is not None),
                attending(self._model),
            ):
                decoding.run(first_logits)
        if streamer is not None:
            streamer.end()
        return self._output(decoding)

    def prefilled(self) -> tuple[CachedModel, torch.Tensor]:
        """The model with the prompts in its cache, and the logits after each prompt.

        The logits are (rows, vocabulary), on the prompts' device.
        """
        model, input_ids, cache = self._model, self._input_ids, self._cache
        if isinstance(cache, RowCache):
            cache.take_over()
        kwargs = {**self._model_kwargs, CACHE: cache}
        logits = prefill(model, input_ids, self._config, kwargs)
        # A copy, since some models give the logits of the whole prompt, which are large.
        first_logits = logits[:, -1].to(input_ids.device, copy=True)
        columns = cache.get_seq_length()
        if columns == 0:
            raise unsupported_call(
                "model must keep its keys and values in the cache that it is given, got "
                f"{type(model).__name__}, which does not"
            )
        position_ids = self._model_kwargs.get("position_ids")
        first_positions = None
        if position_ids is not None:
            first_positions = position_ids[..., -1:] + 1 - columns
            if not self.answer.positions:
                first_positions = torch.zeros_like(first_positions[:1, :1])
        target = self._stepping(
            model,
            cache=cache,
            masks=self._masks,
            first_positions=first_positions,
            kwargs=self._kwargs,
            home=input_ids.device,
            takes_trees=self.answer.trees,
        )
        return target, first_logits

    def _rows(self, session: Session, target: CachedModel) -> Rows:
        """The rows, each with a request at the drafter."""
        text = self._input_ids.numpy(force=True)
        columns = self._cache.get_seq_length()
        config = self._model.config
        # Beyond the last position a learned embedding has no row; a rotary one has, but plain
        # decoding would warn there too.
        end = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        first = target.first_positions
        # The position of each row's first new token; the largest along several axes.
        furthest = np.full(len(text), columns)
        if first is not None:
            furthest[:] = columns + first.reshape(-1, first.shape[-2]).amax(0).numpy(force=True)
        shown = self._masks.visible
        if shown is None:
            shown = np.ones((len(text), columns), dtype=bool)
        # Nothing is to be drafted from what stands for an image.
        names = ("image_token_id", "image_token_index")
        placeholders = [each for name in names if (each := getattr(config, name, None)) is not None]
        requests = []
        for index, line in enumerate(text):
            # More columns than tokens were shown where the prompt was given as embeddings.
            prompt = line[shown[index, columns - len(line) :]]
            prompt = prompt[~np.isin(prompt, placeholders)]
            texts = {"templates": self._templates[index], "read_only": self._asked.read_only}
            # Drafters need not know what nobody asks of them.
            given = {name: value for name, value in texts.items() if value is not None}
            prediction = self._predictions[index]
            requests.append(session.add_request(prompt, prediction=prediction, **given))
        return Rows(
            text,
            columns=columns,
            positions=[UNLIMITED if end is None else end - at for at in furthest.tolist()],
            prompt_tokens=shown.sum(1).tolist(),
            seeds=self._seeds or [0] * len(text),
            requests=requests,
        )

    def _keeps(self, name: str) -> bool:
        return self._wants_dict and bool(getattr(self._config, f"output_{name}"))

    def _output(self, decoding: Decoding) -> SpeculativeOutput:
        rows = decoding.rows
        if self._compiled is not None:
            self._cache.keep_buffers(self._compiled)
        if self._models is not None:
            self._models.warn_of_size()
        given = is_callers_own(self._prepared)
        hands_cache_over = (
            len(rows) == 1
            and (given or self._wants_dict)
            and not isinstance(self._cache, StaticRowCache)
        )
        if hands_cache_over:
            decoding.settle()
            self._cache.write_back(self._prepared, rows.cached([0])[0])
        row_stats = [stats for stats in rows.stats if stats is not None]
        fields: dict[str, Any] = {
            "sequences": padded_sequences(decoding, self._padding).to(self._input_ids.device),
            CACHE: self._prepared if hands_cache_over else None,
            "logprobs": None,
            "raw_logprobs": None,
            "stats": sum(row_stats[1:], row_stats[0]),
            "row_stats": row_stats,
            "assistants": None if self._models is None else self._models.assistants,
        }
        for name in filter(self._keeps, ("scores", "logits")):
            fields[name] = by_step(getattr(rows, name), rows.emitted)
        if self._asked.logprobs:
            for name in ("logprobs", "raw_logprobs"):
                kept = getattr(rows, name)
                fields[name] = [torch.tensor(each, device="cpu") for each in kept]
        return SpeculativeOutput(**fields)


def _prefilled(
    answer: Answer,
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> tuple[CachedModel, torch.Tensor]:
    """As `Plan.prefilled` with this answer, for the arguments of a `custom_generate`."""
    asked = Speculation()
    given = logits_processor, stopping_criteria, generation_config, model_kwargs
    plan = Plan(model, input_ids, *given, asked=asked)
    plan.answer = answer
    return plan.prefilled()


def _require_one_adapter(model: Any) -> None:
    """Refuses PEFT's adapters by row: it expects all rows in every forward."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            names = getattr(hook, "keywords", {}).get("adapter_names")
            if names is not None:
                raise InvalidValueError(
                    "adapter_names must be unset for several rows, which leave the batch as they "
                    f"end; generate with each adapter in turn, got {names!r}"
                )


def _engine(model: Any, config: DraftConfig | None, tokenizer: Any) -> Engine:
    """That of a configuration; without one, of the default with common n-grams."""
    engines = _engines.setdefault(model, {})
    if config not in engines:
        known = tokenizer or tokenizer_file(getattr(model, "name_or_path", ""))
        common = None if config else default_ngrams(known, vocabulary_size(model))
        engines[config] = Engine(config or DraftConfig(ngrams=common))
    return engines[config]
