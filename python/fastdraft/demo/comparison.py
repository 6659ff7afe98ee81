"""One request decoded in every mode, measured alike; whether the outputs are equal; the tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from rich.console import Console

from fastdraft import DraftBatch, Engine, hf
from fastdraft.demo import Request, Target
from fastdraft.replay.display import heading, show_origins, table
from fastdraft.replay.measurement import Ratio, paired_ratio
from fastdraft.replay.trace import Step, Trace, accepted_path, accepted_prefix, origin_of

__all__ = [
    "Comparison",
    "Generation",
    "Mode",
    "as_json",
    "compare",
    "counting_forwards",
    "generate",
    "greedy_options",
    "is_near_tie",
    "show",
    "summarise",
    "warm_up",
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
            probabilities = draft.probabilities.tolist()
            self.steps.append(Step(tokens, parents, sources, probabilities, accepted, emitted))
        super().observe_batch(requests, emitted_ids, offsets, **options)


def generate(
    mode: Mode,
    model: Any,
    inputs: Any,
    *,
    max_new_tokens: int,
    prediction: Sequence[int] | None = None,
) -> Generation:
    """Decodes one request greedily and measures it from outside, every mode alike.

    Args:
        mode: How.
        model: A causal language model of transformers.
        inputs: `input_ids` (1, tokens) and `attention_mask` of the prompt.
        max_new_tokens: When to stop at the latest.
        prediction: Tokens expected in the output; only fastdraft can use them.
    """
    options = {**inputs, **greedy_options(model), "max_new_tokens": max_new_tokens}
    prompt_tokens = inputs["input_ids"].shape[1]
    drafter = RecordingEngine()
    with counting_forwards(model) as forwards:
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
def counting_forwards(model: Any) -> Iterator[list[None]]:
    """Yields a list that grows by an item with each forward of `model`."""
    forwards: list[None] = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(None))
    try:
        yield forwards
    finally:
        hook.remove()


@torch.inference_mode()
def is_near_tie(model: Any, inputs: Any, expected: Sequence[int], tokens: Sequence[int]) -> bool:
    """True if rounding explains the first difference between `tokens` and `expected`: both tokens
    are the most probable one, within the rounding of the model's type. Later ones are not judged.
    """
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


EQUAL, TIE, DIFFERENT = "equal", "equal up to ties", "DIFFERENT"
"""Verdicts, from the best to the worst."""


@dataclass(frozen=True)
class Comparison:
    """One request, run in every mode.

    Attributes:
        request: What was asked.
        prompt_tokens: The length of its prompt.
        runs: All runs of each mode; the modes took turns.
        verdicts: Of each other mode, whether its output is the plain one, in a few words.
    """

    request: Request
    prompt_tokens: int
    runs: dict[Mode, list[Generation]]
    verdicts: dict[Mode, str]

    def median(self, mode: Mode) -> Generation:
        """The run of a mode whose time is the median one, of two such runs the slower one."""
        runs = sorted(self.runs[mode], key=lambda run: run.seconds)
        return runs[len(runs) // 2]

    def trace(self, target: Target) -> Trace:
        """The steps of fastdraft's median run."""
        found = self.median(Mode.FASTDRAFT).trace
        assert found is not None
        return replace(
            found, name=self.request.name, title=self.request.title, decode=target.decode
        )

    def speedup(self, mode: Mode) -> Ratio:
        """How many times faster than plain decoding a mode is, run by run."""
        seconds = {each: [run.seconds for run in self.runs[each]] for each in (Mode.PLAIN, mode)}
        return paired_ratio(seconds[Mode.PLAIN], seconds[mode])

    @property
    def is_exact(self) -> bool:
        """True if fastdraft's output is the plain one, up to a near-tie."""
        return self.verdicts[Mode.FASTDRAFT] != DIFFERENT


def warm_up(target: Target, request: Request, *, max_new_tokens: int) -> None:
    """Runs each mode briefly, so that no measured run pays for what happens once."""
    inputs = target.encode(request.prompt, request.answer_start, max_new_tokens=max_new_tokens)
    # fastdraft first: it says of which models it cannot decode.
    for mode in reversed(Mode):
        generate(mode, target.model, inputs, max_new_tokens=16)


def compare(
    target: Target, request: Request, console: Console, *, max_new_tokens: int, repeats: int = 1
) -> Comparison:
    """Runs one request in every mode, says how each run went, and judges the outputs.

    Modes take turns, so that other work on the machine does not slow one mode alone.
    """
    model = target.model
    inputs = target.encode(request.prompt, request.answer_start, max_new_tokens=max_new_tokens)
    text = request.prediction
    prediction = None if text is None else target.encode_prediction(text)
    runs: dict[Mode, list[Generation]] = {mode: [] for mode in Mode}
    for number in range(1, 1 + repeats):
        for mode in Mode:
            label = f"{mode.value}, run {number}"
            with console.status(label):
                run = generate(
                    mode, model, inputs, max_new_tokens=max_new_tokens, prediction=prediction
                )
            runs[mode].append(run)
            console.print(
                f"{label}: {len(run.tokens)} tokens by {run.forwards} forwards "
                f"in {run.seconds:.1f} s",
                style="dim",
            )
    plain = runs[Mode.PLAIN][0].tokens

    def verdict(tokens: list[int]) -> str:
        if tokens == plain:
            return EQUAL
        return TIE if is_near_tie(model, inputs, plain, tokens) else DIFFERENT

    verdicts = {
        mode: max((verdict(run.tokens) for run in runs[mode]), key=(EQUAL, TIE, DIFFERENT).index)
        for mode in (Mode.PROMPT_LOOKUP, Mode.FASTDRAFT)
    }
    return Comparison(request, inputs["input_ids"].shape[1], runs, verdicts)


# The range of fewer runs holds the median less often than 95 times in 100.
RUNS_FOR_INTERVAL = 6


def show(console: Console, target: Target, comparison: Comparison) -> None:
    """Prints the text of one request, coloured by the origin of its tokens, and its table."""
    trace = comparison.trace(target)
    stats = trace.stats
    counts = {"context": 0, "prediction": 0, **Counter(trace.origins)}
    note = f"(drafted {stats.drafted}, accepted {stats.accepted})"
    show_origins(console, trace.parts(), counts, before=comparison.request.answer_start, note=note)
    rows = table("", "tokens", "forwards", "tokens/step", "tokens/s", "to plain", "output")
    for mode in Mode:
        run = comparison.median(mode)
        rows.add_row(
            mode.value,
            str(len(run.tokens)),
            str(run.forwards),
            f"{run.tokens_per_step:.2f}",
            f"{run.tokens_per_second:.1f}",
            _speedup(comparison, mode),
            comparison.verdicts.get(mode, ""),
        )
    console.print(rows)


def summarise(console: Console, comparisons: list[Comparison]) -> None:
    """Prints the speeds of all requests side by side."""
    heading(console, "Tokens a second, and times plain")
    rows = table("", *(mode.value for mode in Mode), "fastdraft's output")
    for comparison in comparisons:
        cells = [
            f"{comparison.median(mode).tokens_per_second:.1f} ({_speedup(comparison, mode)})"
            for mode in Mode
        ]
        rows.add_row(comparison.request.name, *cells, comparison.verdicts[Mode.FASTDRAFT])
    console.print(rows)


def _speedup(comparison: Comparison, mode: Mode) -> str:
    """With its 95 % interval, where the runs are enough for one."""
    found = comparison.speedup(mode)
    if mode is Mode.PLAIN or len(comparison.runs[mode]) < RUNS_FOR_INTERVAL:
        return f"{found.median:.2f}x"
    return f"{found.median:.2f}x, {found.low:.2f} to {found.high:.2f}"


def as_json(target: Target, comparison: Comparison) -> dict[str, Any]:
    """The measurements of one request, for a JSON file; times in seconds."""
    modes: dict[str, Any] = {}
    for mode, runs in comparison.runs.items():
        run = comparison.median(mode)
        modes[mode.name.lower()] = {
            "tokens": len(run.tokens),
            "forwards": run.forwards,
            "tokens_per_step": run.tokens_per_step,
            "seconds": [run.seconds for run in runs],
            "tokens_per_second": run.tokens_per_second,
            "speedup": comparison.speedup(mode)._asdict(),
        }
        if mode is not Mode.PLAIN:
            modes[mode.name.lower()]["output"] = comparison.verdicts[mode]
    trace = comparison.trace(target)
    stats = trace.stats
    return {
        "name": comparison.request.name,
        "prompt_tokens": comparison.prompt_tokens,
        "modes": modes,
        "origins": dict(Counter(trace.origins)),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "text": target.decode(trace.output_ids),
    }
