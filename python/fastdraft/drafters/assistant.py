"""Draft models as a user passes them to `hf.generate`, and what stays between generations.

Their caches and drafts live for one generation, in `fastdraft.hf.draft_models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fastdraft import Calibration, DraftConfig, Engine
from fastdraft.drafters.schedule import SCHEDULES, Schedule
from fastdraft.errors import InvalidValueError

__all__ = ["AssistantModel", "Staged", "require_model"]

_LONGEST = 64


class _Learned(NamedTuple):
    """Stands for an engine in a pickle: what a new one needs to go on like it, without its
    datastores."""

    config: DraftConfig
    calibration: Calibration | None


class _Shared:
    """Shared by copies, as an engine is. In a pickle a new engine replaces its engine,
    and begins with what that has learned."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        for name, each in state.items():
            if isinstance(each, Engine):
                learned = each.calibration() if each.config.takes_offers else None
                state[name] = _Learned(each.config, learned)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, each in state.items():
            if isinstance(each, _Learned):
                each = Engine(each.config, calibration=each.calibration)
            setattr(self, name, each)


class AssistantModel(_Shared):
    """A small model that drafts for a larger one with the same tokenizer.

    Greedy generations are drafted greedily, and the output is the target's own tokens. When
    sampling, tokens are drawn from the small model's distribution q, shaped by the logits
    processors of the generation as the target's p is, and verified by speculative sampling: the
    output has exactly the target's distribution, but which tokens a seed gives depends on the
    drafts (Leviathan et al., 2023; Chen et al., 2023; by blocks as in Sun et al., 2025).

    It keeps what it measures: how often its tokens are accepted and how long they take. It may
    serve any number of generations, one after another or in several threads, and is its own copy.
    Pickled, it comes with what it has measured and with a new engine.

    Args:
        model: A decoder-only model of transformers with a key-value cache, on the target's device
            and of its dtype.
        schedule: How many tokens to draft in a step. "adaptive": as many as pay, by the measured
            probability of acceptance and the measured times of both models; none where none pay.
            "heuristic": two more where all were accepted, else one less. "constant": `num_tokens`.
        num_tokens: Of "constant" the number, by default 5; of "heuristic" the first, by default 5;
            of "adaptive" the most, by default 16.
        tokenizer: The model's tokenizer. Compared with the target's where `hf.generate` is given
            that one as `tokenizer`; needed where the vocabularies differ in size.
        lookup: An engine beside the model, or the configuration of a new one: it decides when the
            model drafts, and drafts from both. It has to be of the default drafter. None for the
            model alone, which cannot use a prediction.

    Attributes:
        schedule: Decides how many tokens the model drafts, and keeps what that has learned.
        lookup: The engine, or None.
        model, tokenizer: As passed.

    Raises:
        InvalidValueError: An argument is out of its range, or the model does not generate.
    """

    def __init__(
        self,
        model: Any,
        *,
        schedule: Literal["adaptive", "heuristic", "constant"] = "adaptive",
        num_tokens: int | None = None,
        tokenizer: Any = None,
        lookup: DraftConfig | Engine | None = DraftConfig(),  # noqa: B008
    ) -> None:
        require_model(model, name="assistant")
        if schedule not in SCHEDULES:
            raise InvalidValueError(
                f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}"
            )
        kind, usual = SCHEDULES[schedule]
        number = usual if num_tokens is None else num_tokens
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= _LONGEST:
            raise InvalidValueError(
                f"num_tokens must be an integer from 1 to {_LONGEST}, got {num_tokens!r}"
            )
        if lookup is not None and not isinstance(lookup, (DraftConfig, Engine)):
            raise InvalidValueError(
                f"lookup must be a DraftConfig, an Engine or None, got {lookup!r}"
            )
        self.model = model
        self.schedule: Schedule = kind(number)
        self.tokenizer = tokenizer
        self.lookup = Engine(lookup) if isinstance(lookup, DraftConfig) else lookup
        if self.lookup is not None:
            config = self.lookup.config
            if not config.takes_offers:
                raise InvalidValueError(
                    f"lookup must be of the default drafter, which takes offers, got {config!r}"
                )


class Staged(_Shared):
    """Draft models that draft for each other: the last one for the target, each for the next.

    Every model verifies the drafts of the one before it, greedily or by speculative sampling. So it
    drafts just what it would by itself, in fewer forwards of its own. Where a stage does not pay,
    its adaptive schedule leaves it out.

    Args:
        stages: From the smallest to the largest, `AssistantModel`s, or models that are made into
            ones. The first may be a `DraftConfig` or an `Engine`, which then drafts for the first
            model. The `lookup` of the last one drafts beside them all; the others' are not used.

    Attributes:
        engine: The engine that drafts for the first model, or None.
        models: The models, the smallest first.

    Raises:
        InvalidValueError: There is no model among the stages, or one of them is no model.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        models: list[Any] = list(stages)
        self.engine: Engine | None = None
        if models and isinstance(models[0], (DraftConfig, Engine)):
            first: DraftConfig | Engine = models.pop(0)
            self.engine = Engine(first) if isinstance(first, DraftConfig) else first
        if not models:
            raise InvalidValueError(f"stages must hold at least one model, got {stages!r}")
        self.models = [
            each if isinstance(each, AssistantModel) else AssistantModel(each) for each in models
        ]


def require_model(model: Any, *, name: str = "model") -> None:
    """Raises InvalidValueError when the model's state could not take back rejected tokens."""
    kind = type(model).__name__
    if not hasattr(model, "config") or not hasattr(model, "prepare_inputs_for_generation"):
        raise InvalidValueError(f"{name} must be a generating model of transformers, got {kind}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise InvalidValueError(f"{name} must be decoder-only, got the encoder-decoder {kind}")
