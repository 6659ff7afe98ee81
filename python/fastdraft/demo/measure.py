"""Decoding one request in several modes, measured alike, and judging whether outputs are equal."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from fastdraft import DraftBatch, DraftStats, Engine, hf
from fastdraft.hf.interface import CACHE
from fastdraft.replay.trace import Step, Trace, accepted_path, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "Difference",
    "Generation",
    "Mode",
    "Streamer",
    "counting_forwards",
    "explain_difference",
    "generate",
    "greedy_options",
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
        stats: With fastdraft, what the drafts were worth.
    """

    tokens: list[int]
    forwards: int
    seconds: float
    trace: Trace | None = None
    stats: DraftStats | None = None

    @property
    def tokens_per_step(self) -> float:
        """New tokens per target forward."""
        return len(self.tokens) / self.forwards

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, the time of the prompt included."""
        return len(self.tokens) / self.seconds


class Streamer(BaseStreamer):
    """Passes new tokens to `on_tokens` as they come, in every mode alike."""

    def __init__(self, on_tokens: Callable[[list[int]], object]) -> None:
        self._on_tokens = on_tokens
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Takes what `generate` streams: first the prompt, then the new tokens."""
        if not self._prompt:
            self._on_tokens(value.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        """Nothing waits for the end."""


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
    streamer: Streamer | None = None,
) -> Generation:
    """Decodes one request greedily and measures it from outside, every mode alike.

    Args:
        mode: How.
        model: A causal language model of transformers.
        inputs: `input_ids` (1, tokens) and `attention_mask` of the prompt.
        max_new_tokens: When to stop at the latest.
        prediction: Tokens expected in the output; only fastdraft can use them.
        streamer: Receives the new tokens as they come.
    """
    options = {
        **inputs,
        **greedy_options(model),
        "max_new_tokens": max_new_tokens,
        "streamer": streamer,
    }
    prompt_tokens = inputs["input_ids"].shape[1]
    drafter = RecordingEngine()
    stats = None
    with counting_forwards(model) as forwards:
        started = time.perf_counter()
        if mode is Mode.FASTDRAFT:
            output = hf.generate(model, drafter=drafter, prediction=prediction, **options)
            sequences, stats = output.sequences, output.stats
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
    return Generation(tokens, len(forwards), seconds, trace, stats)


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
def counting_forwards(model: Any) -> Iterator[list[None]]:
    """Yields a list that grows by one item with each forward of `model`."""
    forwards: list[None] = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(None))
    try:
        yield forwards
    finally:
        hook.remove()


@dataclass(frozen=True)
class Difference:
    """How an output parts from plain decoding's, and whether rounding accounts for it.

    Attributes:
        position: The first new token that differs.
        gap: How far the logit of a token of the output lies below the highest one, at most;
            infinite when the output ends where decoding would have gone on.
        noise: How far the lead of the most probable token over the next one moves between a forward
            over one token and one over many, at most.
    """

    position: int
    gap: float
    noise: float

    @property
    def is_tie(self) -> bool:
        """Whether each token of the output is the most probable one, up to rounding."""
        # The output comes from forwards of other widths than the two compared, so it may lie on the
        # far side of one as the other does.
        return self.gap <= 2 * self.noise


@torch.inference_mode()
def explain_difference(
    model: Any, inputs: Any, expected: Sequence[int], tokens: Sequence[int], max_new_tokens: int
) -> Difference | None:
    """Judges the output `tokens` that should equal `expected`; `None` when it does.

    Computes the logits behind every token of the output twice: as plain decoding does, one token
    at a time, and in one forward over all of them. What the two differ by is the rounding noise of
    this model on this machine, the measure of a near-tie. Costs a plain generation of the length.
    """
    if list(tokens) == list(expected):
        return None
    shorter = min(len(expected), len(tokens))
    position = next((i for i in range(shorter) if expected[i] != tokens[i]), shorter)
    eos = model.generation_config.eos_token_id
    ends = len(tokens) == max_new_tokens or tokens[-1] in (eos if isinstance(eos, list) else [eos])
    gap, noise = (0.0 if ends else math.inf), 0.0
    prompt = inputs["input_ids"]
    new = torch.tensor([list(tokens)], device=prompt.device)
    at_once = model(torch.cat([prompt, new], dim=1), use_cache=False).logits[0]
    output = model(prompt, use_cache=True)
    for i, token in enumerate(tokens):
        logits = output.logits[0, -1].float()
        gap = max(gap, float(logits.max() - logits[token]))
        first, second = logits.topk(2).indices
        moved = logits - at_once[prompt.shape[1] - 1 + i]
        noise = max(noise, float((moved[first] - moved[second]).abs()))
        step = new[:, i : i + 1]
        output = model(step, **{CACHE: output[CACHE]}, use_cache=True)
    return Difference(position=position, gap=gap, noise=noise)
