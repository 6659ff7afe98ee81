"""Drafts for the rollouts of TRL: `attach(trainer)` before `trainer.train()`."""

from __future__ import annotations

import functools
import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from transformers import GenerationConfig, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from fastdraft import Datastore, DraftConfig, Engine, hf, step_latency
from fastdraft.engine import Source, source_name
from fastdraft.errors import InvalidValueError

__all__ = ["MEMORY_FILE", "attach"]

MEMORY_FILE = "fastdraft.datastore"
"""The memory's file in a checkpoint's folder."""

# The most tokens that a rank sends in one message.
_MOST_TOKENS = 1 << 20
# The sources that a rollout can be drafted from here.
_SOURCES = (Source.CONTEXT, Source.RUNNING, Source.DATASTORE)


def attach(
    trainer: Any,
    *,
    config: DraftConfig | None = None,
    memory: Datastore | str | os.PathLike[str] | None = None,
    memory_bytes: int = 1 << 30,
    drafts: bool = True,
    bitwise: bool = False,
) -> Datastore:
    """Has the rollouts of a trainer drafted, from all that its ranks have sampled before.

    Samples have exactly the policy's distribution, whatever is drafted: the memory needs no
    clearing when weights change. A sample is drawn by a seed of its own, made of `args.seed`, the
    step, the prompt and the sample's number in the step. So drafts, ranks, a resumed run, and other
    cuts of a step into batches leave it the same, as far as the logits have the same bits; with
    tools it depends on the rank.

    The memory is saved with each checkpoint, as `fastdraft.datastore`, and loaded when the trainer
    resumes from one. With several ranks, each one gets what the others sampled at the end of a
    step.

    The trainer logs, as means over rollouts, `fastdraft/tokens_per_step`, the tokens of a forward
    and row, and of these `fastdraft/context_per_step`, `fastdraft/running_per_step` and
    `fastdraft/datastore_per_step`, the accepted draft tokens from the row's own text, from rows
    that still run, and from earlier rollouts. As means over generations, `fastdraft/forwards` and
    `fastdraft/seconds`. And `fastdraft/tokens_hash`, the sum of a 32-bit hash of each rollout of a
    step: equal in two runs whose rollouts are equal.

    >>> trainer = GRPOTrainer(...)              # doctest: +SKIP
    >>> attach(trainer)                         # doctest: +SKIP
    >>> trainer.train()                         # doctest: +SKIP

    Args:
        trainer: A `GRPOTrainer` or `RLOOTrainer` that generates with transformers.
        config: How to draft, by default `DraftConfig(objective="last")`, since a step waits for
            its last rollout.
        memory: A live store to draft from and to add to; or a frozen one or a file of one, whose
            text a new store takes. By default a new store is empty.
        memory_bytes: The most bytes of a new store, on each rank. A full one keeps about as many
            samples of each prompt.
        drafts: `False` drafts nothing and leaves all else as it is: the run to compare with.
        bitwise: As in `fastdraft.hf.generate`: whether logits have the same bits whatever is
            drafted, so that the samples are the same in bfloat16 too.

    Returns:
        The memory: `add` samples of an earlier run to it, or `save` it for a later one.

    Raises:
        InvalidValueError: The trainer generates in a way that is not drafted for, or an argument is
            out of its range. The trainer is as it was.
        DatastoreError: The file of `memory` cannot be read.
    """
    _require_drafted(trainer)
    if isinstance(memory, Datastore) and not memory.frozen:
        store = memory
    else:
        store = Datastore(max_bytes=memory_bytes)
        if memory is not None:
            _copy(memory, store)
    config = DraftConfig(objective="last") if config is None else config
    engine = (Engine if drafts else _Undrafted)(config, datastores=[store])
    rollouts = _Rollouts(trainer, engine, bitwise=bitwise)
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.generate = functools.partial(model.generate, custom_generate=rollouts)
    trainer.train = _loading(trainer, store)
    trainer.add_callback(_Steps(rollouts, store))
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
    # The older name turns the newer one on.
    for name in ("use_transformers_paged", "use_transformers_continuous_batching"):
        if getattr(trainer.args, name, False):
            raise InvalidValueError(f"{name} must be off, got True: its loop takes no drafts")
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
            "put no other function there"
        )


class _Undrafted(Engine):
    """An engine that does all but draft."""

    def propose_batch(  # type: ignore[override]
        self, requests: Sequence[int], **options: Any
    ) -> Any:
        options["limits"] = np.zeros(len(requests), np.int32)
        return super().propose_batch(requests, **options)


class _Rollouts:
    """Generates the rollouts of a trainer instead of its model's own loop, and logs them.

    Attributes:
        drafter: The engine.
        hashes: Of each rollout since the trainer's latest step.
    """

    def __init__(self, trainer: Any, drafter: Engine, *, bitwise: bool) -> None:
        self.drafter = drafter
        self.hashes: list[int] = []
        self._trainer = trainer
        speculation: Any = hf.speculate(drafter=drafter, bitwise=bitwise)
        self._speculation = replace(speculation, always_dict=True)
        # The step that `_slot` counts in.
        self._step: tuple[bool, int] | None = None
        self._slot = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rollouts:
        """Itself, which a copy of the model may go on using."""
        return self

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        started = step_latency.clock()
        shown = model_kwargs.get("attention_mask")
        lines = input_ids.numpy(force=True)
        kept = np.ones(lines.shape, bool) if shown is None else shown.numpy(force=True) > 0
        prompts = [line[own] for line, own in zip(lines, kept, strict=True)]
        speculation = replace(self._speculation, seed=self._seeds(prompts))
        output = speculation(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        )
        self._write(prompts, output, lines.shape[1], step_latency.clock() - started)
        return output if generation_config.return_dict_in_generate else output.sequences

    def _seeds(self, prompts: Sequence[NDArray[np.int64]]) -> list[int]:
        """The seed of each row.

        TRL deals the samples of a step to the ranks in order, as many to each, so a row's rank and
        index say which sample of the step it is. A prompt may come twice in a step, so samples are
        not counted by prompt.
        """
        trainer = self._trainer
        ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        step = (trainer.model.training, trainer.state.global_step)
        if step != self._step:
            self._step, self._slot = step, 0
        first = self._slot + rank * len(prompts)
        self._slot += ranks * len(prompts)
        # After calls of tools, ranks go on with some of their rows each.
        apart = rank if getattr(trainer, "tools", None) else 0
        run = (trainer.args.seed, *step, apart)
        return [_seed((*run, first + row), prompt) for row, prompt in enumerate(prompts)]

    def _write(
        self, prompts: Sequence[NDArray[np.int64]], output: Any, columns: int, seconds: float
    ) -> None:
        """Writes to the trainer's log what a generation gained."""
        log = self._trainer._log_metric
        log("fastdraft/seconds", seconds)
        log("fastdraft/forwards", max(stats.steps for stats in output.row_stats))
        for stats in output.row_stats:
            steps = max(stats.steps, 1)
            log("fastdraft/tokens_per_step", stats.emitted / steps)
            for source in _SOURCES:
                accepted = stats.accepted_by_source[source]
                log(f"fastdraft/{source_name(source)}_per_step", accepted / steps)
        if self._trainer.model.training:
            samples = output.sequences[:, columns:].numpy(force=True)
            for prompt, sample, stats in zip(prompts, samples, output.row_stats, strict=True):
                text = np.concatenate([prompt, sample[: stats.emitted]])
                self.hashes.append(zlib.crc32(text.tobytes()))


def _seed(numbers: tuple[int, ...], prompt: NDArray[np.int64]) -> int:
    """A seed of 63 bits that these numbers and this prompt have."""
    digest = hashlib.blake2b(repr(numbers).encode() + prompt.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Steps(TrainerCallback):
    """Work between steps, where all ranks meet, however many generations each has run.

    Gives each rank what the others have sampled, and saves the memory with checkpoints.
    """

    def __init__(self, rollouts: _Rollouts, store: Datastore) -> None:
        self._rollouts = rollouts
        self._store = store
        self._sent = store.end

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._sent = self._store.end

    def on_step_end(self, *_: Any, **__: Any) -> None:
        rollouts = self._rollouts
        texts, self._sent = _texts(self._store, self._sent)
        [*hashes], [*others] = zip(*gather_object([(rollouts.hashes, texts)]), strict=True)
        own = set(texts)
        for text in (each for rank in others for each in rank if each not in own):
            self._store._load(text, None)
        self._sent = self._store.end
        rollouts.hashes = []
        if found := [each for rank in hashes for each in rank]:
            metrics = rollouts._trainer._metrics["train"]
            metrics["fastdraft/tokens_hash"].append(sum(found))

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if args.should_save and folder.is_dir():
            self._store.save(folder / MEMORY_FILE)


def _loading(trainer: Any, store: Datastore) -> Any:
    """The trainer's `train`, which loads the memory of a checkpoint that it resumes from."""
    train = trainer.train

    @functools.wraps(train)
    def loading(resume_from_checkpoint: Any = None, **options: Any) -> Any:
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(trainer.args.output_dir)  # type: ignore[no-untyped-call]
        if folder and (path := Path(folder, MEMORY_FILE)).exists():
            _copy(path, store)
        return train(resume_from_checkpoint, **options)

    return loading


def _copy(memory: Datastore | str | os.PathLike[str], store: Datastore) -> None:
    """Adds the text of a frozen store, or of a file of one, to a live one."""
    source = memory if isinstance(memory, Datastore) else Datastore.open(memory)
    for text in _texts(source, source.begin)[0]:
        store._load(text, None)


def _texts(store: Datastore, begin: int) -> tuple[list[bytes], int]:
    """The texts of a store from a position on, in messages of bounded size, and its end."""
    texts = []
    while begin < store.end:
        text, begin = store._dump(begin, _MOST_TOKENS)
        texts.append(text)
    return texts, begin
