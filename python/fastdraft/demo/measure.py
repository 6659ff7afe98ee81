"""Decoding one request in several modes, measured alike, and judging whether outputs are equal."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from fastdraft import DraftBatch, Engine, hf
from fastdraft.replay.trace import Step, Trace, accepted_path, accepted_prefix, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "Generation",
    "Mode",
    "counting_forwards",
    "generate",
    "greedy_options",
    "is_near_tie",
]

PROMPT_LOOKUP_TOKENS = 10
"""Draft tokens of transformers' prompt lookup, as its documentation sets them."""


class Mode(Enum):
    """One way to decode; the value is its title."""

    PLAIN = "plain"
    PROMPT_LOOKUP = "prompt lookup"
    FASTDRAFT = "fastdraft"


@dataclass(frozen=True)
class Generation:
    """One generation.

    Attributes:
        tokens: The new tokens.
        forwards: How often the target model ran, the prompt's forward included.
        seconds: Wall time from the prompt's tokens to the last new token.
        trace: With fastdraft, what happened at each step.
    """

    tokens: list[int]
    forwards: int
    seconds: float
    trace: Trace | None = None

    @property
    def tokens_per_step(self) -> float:
        """New tokens per target forward."""
        return len(self.tokens) / self.forwards

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, the time of the prompt included."""
        return len(self.tokens) / self.seconds


class RecordingEngine(Engine):
    """An engine that notes what happens at each step. For one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first_ids: list[int] = []
        self.steps: list[Step] = []
        self._draft: DraftBatch | None = None

    def propose_batch(self, requests: Any, **options: Any) -> DraftBatch:
        """As `Engine.propose_batch`; the draft is kept until the tokens emitted on it are known."""
        self._draft = super().propose_batch(requests, **options)
        return self._draft

    def observe_batch(self, requests: Any, emitted_ids: Any, offsets: Any, **options: Any) -> None:
        """As `Engine.observe_batch`; the step is noted."""
        emitted = emitted_ids.tolist()
        draft = self._draft
        if draft is None:
            self.first_ids += emitted
        else:
            tokens, parents = draft.token_ids.tolist(), draft.parents.tolist()
            sources = [*map(origin_of, draft.sources.tolist())]
            accepted = accepted_path(tokens, parents, emitted)
            chances = draft.probabilities.tolist()
            self.steps.append(Step(tokens, parents, sources, chances, accepted, emitted))
        super().observe_batch(requests, emitted_ids, offsets, **options)


def generate(
    mode: Mode,
    model: Any,
    inputs: Any,
    *,
    max_new_tokens: int,
    prediction: Sequence[int] | None = None,
    watch: Callable[[int], object] | None = None,
) -> Generation:
    """Decodes one request greedily and measures it from outside, every mode alike.

    Args:
        mode: How.
        model: A causal language model of transformers.
        inputs: `input_ids` (1, tokens) and `attention_mask` of the prompt.
        max_new_tokens: When to stop at the latest.
        prediction: Tokens expected in the output; only fastdraft can use them.
        watch: Called before each forward with its number, from 1.
    """
    options = {**inputs, **greedy_options(model), "max_new_tokens": max_new_tokens}
    prompt_tokens = inputs["input_ids"].shape[1]
    drafter = RecordingEngine()
    with counting_forwards(model, watch) as forwards:
        started = time.perf_counter()
        if mode is Mode.FASTDRAFT:
            sequences = hf.generate(
                model, drafter=drafter, prediction=prediction, **options
            ).sequences
        elif mode is Mode.PROMPT_LOOKUP:
            sequences = model.generate(prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS, **options)
        else:
            sequences = model.generate(**options)
        # Reading the tokens waits for the device.
        tokens = sequences[0, prompt_tokens:].tolist()
        seconds = time.perf_counter() - started
    trace = None
    if mode is Mode.FASTDRAFT:
        prompt = inputs["input_ids"][0].tolist()
        trace = Trace(mode.value, "", prompt, drafter.first_ids, None, drafter.steps)
    return Generation(tokens, len(forwards), seconds, trace)


def greedy_options(model: Any) -> dict[str, Any]:
    """Options of `generate` to pick the most probable token, whatever the model's own say."""
    options = {
        "do_sample": False,
        "num_beams": 1,
        # With a penalty the most probable token would be another one than the logits say.
        "repetition_penalty": 1.0,
    }
    if model.generation_config.pad_token_id is None:
        eos = model.generation_config.eos_token_id
        options["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    return options


@contextmanager
def counting_forwards(
    model: Any, watch: Callable[[int], object] | None = None
) -> Iterator[list[None]]:
    """Yields a list that grows by one item with each forward of `model`, which `watch` is told."""
    forwards: list[None] = []

    def count(*_: Any) -> None:
        forwards.append(None)
        if watch is not None:
            watch(len(forwards))

    hook = model.register_forward_pre_hook(count)
    try:
        yield forwards
    finally:
        hook.remove()


@torch.inference_mode()
def is_near_tie(model: Any, inputs: Any, expected: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether rounding explains that `tokens` parts from `expected`: where it does, both tokens are
    the most probable one, within the rounding of the model's type. What follows is not judged."""
    at = accepted_prefix(expected, tokens)
    if at in (len(expected), len(tokens)):
        return False  # one ends where the other goes on
    prompt = inputs["input_ids"]
    text = torch.cat(
        [prompt, torch.tensor([expected[:at]], dtype=prompt.dtype, device=prompt.device)], 1
    )
    logits = model(text, use_cache=False).logits[0, -1]
    rounding = 16 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    return float(logits.max() - logits[[expected[at], tokens[at]]].min()) <= rounding
