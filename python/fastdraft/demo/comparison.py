"""One request in every mode, and whether the outputs are equal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from rich.status import Status

from fastdraft.demo.measure import Generation, Mode, generate, is_near_tie
from fastdraft.demo.requests import Request
from fastdraft.demo.target import Target
from fastdraft.replay.measurement import Ratio, paired_ratio
from fastdraft.replay.trace import Trace

__all__ = ["Comparison", "compare", "warm_up"]

SECONDS, ROUNDS = 40, 3
"""Of a processor, and runs of each mode: when a request has been measured well enough."""

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
        """What happened at each step of fastdraft's median run."""
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
        """Whether fastdraft's output is the plain one, up to a near-tie."""
        return self.verdicts[Mode.FASTDRAFT] != DIFFERENT


def warm_up(target: Target, request: Request, *, max_new_tokens: int) -> None:
    """Runs each mode briefly, so that no measured run pays for what happens once."""
    inputs = target.encode(request.prompt, request.answer_start, max_new_tokens=max_new_tokens)
    # fastdraft first: it says of which models it cannot decode.
    for mode in reversed(Mode):
        generate(mode, target.model, inputs, max_new_tokens=16)


def _show(status: Status, label: str, forwards: int) -> None:
    status.update(f"{label}: {forwards} forwards")


def compare(
    target: Target,
    request: Request,
    console: Console,
    *,
    max_new_tokens: int,
    repeats: int | None = None,
    clock: Callable[[], float] = time.process_time,
) -> Comparison:
    """Runs one request in every mode, says how each run went, and judges the outputs.

    Modes take turns, so that a busy moment does not hit one mode alone. Without `repeats` there are
    up to 3 rounds, and no further one where `clock` would pass 40 seconds.
    """
    model = target.model
    inputs = target.encode(request.prompt, request.answer_start, max_new_tokens=max_new_tokens)
    text = request.prediction
    prediction = None if text is None else target.encode_prediction(text)
    runs: dict[Mode, list[Generation]] = {mode: [] for mode in Mode}
    began = clock()
    for number in range(1, 1 + (repeats or ROUNDS)):
        before = number - 1
        if repeats is None and before and (clock() - began) / before * number > SECONDS:
            break
        for mode in Mode:
            label = f"{mode.value}, run {number}"
            with console.status(label) as status:
                run = generate(
                    mode,
                    model,
                    inputs,
                    max_new_tokens=max_new_tokens,
                    prediction=prediction,
                    watch=partial(_show, status, label),
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
