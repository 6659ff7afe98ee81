"""One request in every mode, its outputs judged, with its text to watch meanwhile."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fastdraft.demo.measure import (
    Difference,
    Generation,
    Mode,
    Streamer,
    explain_difference,
    generate,
)
from fastdraft.demo.requests import Request
from fastdraft.demo.target import Target
from fastdraft.replay.measurement import Ratio, paired_ratio
from fastdraft.replay.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Comparison", "compare", "warm_up"]


@dataclass(frozen=True)
class Comparison:
    """One request, run in every mode.

    Attributes:
        request: What was asked.
        prompt_tokens: The length of its prompt.
        runs: All runs of each mode; the modes took turns.
        differences: How the output of each other mode differs from the plain one; None where it
            does not.
    """

    request: Request
    prompt_tokens: int
    runs: dict[Mode, list[Generation]]
    differences: dict[Mode, Difference | None]

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
        """Whether fastdraft's output is the plain one, up to tokens that tie within rounding."""
        difference = self.differences[Mode.FASTDRAFT]
        return difference is None or difference.is_tie

    def verdict(self, mode: Mode) -> str:
        """Whether a mode's output is the plain one, in a few words; nothing for the plain mode."""
        if mode not in self.differences:
            return ""
        difference = self.differences[mode]
        if difference is None:
            return "equal"
        return "equal up to ties" if difference.is_tie else "DIFFERENT"


def warm_up(target: Target, request: Request, *, max_new_tokens: int) -> None:
    """Runs each mode briefly, so that no measured run pays for what happens once."""
    inputs = target.encode(request.prompt, request.answer_start, max_new_tokens=max_new_tokens)
    # fastdraft first: it says of which models it cannot decode.
    for mode in reversed(Mode):
        generate(mode, target.model, inputs, max_new_tokens=16)


def compare(
    target: Target, request: Request, console: Console, *, max_new_tokens: int, repeats: int
) -> Comparison:
    """Runs one request in every mode and judges the outputs.

    Modes take turns, so that a busy moment does not hit one mode alone. A terminal shows the text
    of each mode's first run as it comes.
    """
    model = target.model
    inputs = target.encode(request.prompt, request.answer_start, max_new_tokens=max_new_tokens)
    text = request.prediction
    prediction = None if text is None else target.encode_prediction(text)
    runs: dict[Mode, list[Generation]] = {mode: [] for mode in Mode}
    for repeat in range(repeats):
        for mode in Mode:
            title = f"{mode.value}, run {repeat + 1} of {repeats}"
            # Showing its text slows a run, and the median of several hardly feels one.
            with _watching(target, console, title, streaming=repeat == 0) as streamer:
                runs[mode].append(
                    generate(
                        mode,
                        model,
                        inputs,
                        max_new_tokens=max_new_tokens,
                        prediction=prediction,
                        streamer=streamer,
                    )
                )
    plain = runs[Mode.PLAIN][0].tokens
    differences: dict[Mode, Difference | None] = {}
    for mode in (Mode.PROMPT_LOOKUP, Mode.FASTDRAFT):
        found = [
            explain_difference(model, inputs, plain, tokens, max_new_tokens)
            for tokens in {tuple(run.tokens) for run in runs[mode]}
        ]
        # The difference that rounding explains least stands for the mode.
        differences[mode] = max(
            (each for each in found if each is not None),
            key=lambda each: each.gap - 2 * each.noise,
            default=None,
        )
    return Comparison(request, inputs["input_ids"].shape[1], runs, differences)


@contextmanager
def _watching(
    target: Target, console: Console, title: str, *, streaming: bool
) -> Iterator[Streamer | None]:
    """Says on a terminal what runs, and with `streaming` shows its text as it comes.

    Yields the streamer to generate with, if any. Draws four times a second, so that it costs the
    run next to nothing; off a terminal it does nothing.
    """
    if not console.is_terminal:
        yield None
        return
    tokens: list[int] = []

    def render() -> Group:
        return Group(Text(title, "bold"), Text(target.decode(list(tokens))))

    with Live(
        get_renderable=render,
        console=console,
        auto_refresh=streaming,
        refresh_per_second=4,
        transient=True,
    ):
        yield Streamer(tokens.extend) if streaming else None
