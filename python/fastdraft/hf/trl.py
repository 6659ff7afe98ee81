"""Drafts for the rollouts of TRL: `attach(trainer)` before `trainer.train()`."""

from __future__ import annotations

import functools
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from fastdraft import Datastore, DraftConfig, DraftStats, Engine, hf
from fastdraft.engine import Source, source_name
from fastdraft.errors import InvalidValueError

__all__ = ["attach"]

# The most tokens that a rank sends in one message.
_MOST_TOKENS = 1 << 20
# What a rollout can be drafted from here.
_SOURCES = (Source.CONTEXT, Source.RUNNING, Source.DATASTORE)


def attach(
    trainer: Any, *, config: DraftConfig | None = None, memory_bytes: int = 1 << 30
) -> Datastore:
    """Has the rollouts of a trainer drafted, from all that its ranks have sampled before.

    Samples have exactly the policy's distribution, whatever is drafted: the memory needs no
    clearing when weights change. With several ranks, each one gets what the others sampled at the
    beginning of the next step.

    The trainer logs `fastdraft/tokens_per_step`, the tokens of a forward and row, and of these
    `fastdraft/context_per_step`, `fastdraft/running_per_step` and `fastdraft/datastore_per_step`,
    the accepted draft tokens from the row's own text, from rows that still run, and from earlier
    rollouts: means over rollouts.

    >>> trainer = GRPOTrainer(...)              # doctest: +SKIP
    >>> attach(trainer)                         # doctest: +SKIP
    >>> trainer.train()                         # doctest: +SKIP

    Args:
        trainer: A `GRPOTrainer` or `RLOOTrainer` that generates with transformers.
        config: How to draft, by default `DraftConfig()`.
        memory_bytes: The most bytes of the memory, on each rank. A full one keeps about as many
            samples of each prompt.

    Returns:
        The memory: `add` samples of an earlier run to it, or `save` it for a later one.

    Raises:
        InvalidValueError: The trainer generates in a way that is not drafted for, or an argument is
            out of its range. The trainer is as it was.
    """
    _require_drafted(trainer)
    store = Datastore(max_bytes=memory_bytes)
    engine = _Rollouts(config, datastores=[store])
    engine.trainer = trainer
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.generate = functools.partial(model.generate, custom_generate=hf.speculate(drafter=engine))
    if trainer.accelerator.num_processes > 1:
        trainer.add_callback(_Exchange(store))
    return store


def _require_drafted(trainer: Any) -> None:
    if not (hasattr(trainer, "_log_metric") and hasattr(trainer, "use_vllm")):
        raise InvalidValueError(
            "trainer must be a GRPOTrainer or an RLOOTrainer of TRL 1.16 or newer, got "
            f"{type(trainer).__name__}"
        )
    if trainer.use_vllm:
        raise InvalidValueError(
            "use_vllm must be off, got True: vLLM drafts itself; start `trl vllm-serve` with a "
            "speculative_config, or generate with transformers"
        )
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise InvalidValueError(
            "use_transformers_continuous_batching must be off, got True: its loop takes no drafts"
        )
    if getattr(trainer, "rollout_func", None) is not None:
        raise InvalidValueError(
            "rollout_func must be None, got a function: call hf.generate(drafter=engine) in it, "
            "with an Engine that has a live Datastore"
        )
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
        raise InvalidValueError(
            "parameters must be whole on each rank, got FSDP or ZeRO-3, where all ranks run each "
            "forward together, and with drafts they need unequal numbers of them; use DDP or ZeRO-2"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if "generate" in vars(model):
        raise InvalidValueError(
            f"model.generate must be the class's own, got {model.generate!r}: attach once, and "
            "leave no other function in its place"
        )


class _Rollouts(Engine):
    """An engine that writes what each rollout gained to the trainer's log."""

    trainer: Any

    def finish(self, request: Any) -> DraftStats:
        stats = super().finish(request)
        steps = max(stats.steps, 1)
        log = self.trainer._log_metric
        log("fastdraft/tokens_per_step", stats.emitted / steps)
        for source in _SOURCES:
            accepted = stats.accepted_by_source[source]
            log(f"fastdraft/{source_name(source)}_per_step", accepted / steps)
        return stats


class _Exchange(TrainerCallback):
    """Gives each rank what the others have sampled, at the beginning of a step.

    There all ranks meet, however many generations each has run.
    """

    def __init__(self, store: Datastore) -> None:
        self._store = store
        self._sent = store.end

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        texts: list[bytes] = []
        while self._sent < self._store.end:
            text, self._sent = self._store._dump(self._sent, _MOST_TOKENS)
            texts.append(text)
        own = set(texts)
        for text in gather_object(texts):
            if text not in own:
                self._store._load(text, None)
        self._sent = self._store.end
