"""Running a request in every mode, with something to watch meanwhile, and judging the outputs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fastdraft.cli import measure
from fastdraft.cli.requests import Request
from fastdraft.cli.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Bench", "Comparison"]


@dataclass(frozen=True)
class Comparison:
    """One request, run in every mode.

    Attributes:
        request: What was asked.
        prompt_tokens: The length of its prompt.
        runs: All runs of each mode, by the mode's name.
        differences: How the output of a mode parts from the plain one, by the mode's name; `None`
            where it is the same.
    """

    request: Request
    prompt_tokens: int
    runs: dict[str, list[measure.Run]]
    differences: dict[str, measure.Difference | None]

    def best(self, mode: str) -> measure.Run:
        """The fastest run of a mode: what disturbs a measurement only ever slows it."""
        return max(self.runs[mode], key=lambda run: run.tokens_per_second)

    def speedup(self, mode: str) -> float:
        """How many times faster than plain decoding a mode is."""
        return self.best(mode).tokens_per_second / self.best("plain").tokens_per_second

    @property
    def is_exact(self) -> bool:
        """Whether fastdraft's output is the plain one, up to tokens that tie within rounding."""
        difference = self.differences["fastdraft"]
        return difference is None or difference.is_tie

    def verdict(self, mode: str) -> str:
        """What there is to say of a mode's output, in a few words; nothing for the plain one."""
        if mode not in self.differences:
            return ""
        difference = self.differences[mode]
        if difference is None:
            return "equal"
        return "equal up to ties" if difference.is_tie else "DIFFERENT"


class Bench:
    """Runs requests in every mode, by turns: a busy moment then does not hit one mode alone."""

    def __init__(
        self, loaded: Target, console: Console, *, max_new_tokens: int, repeats: int
    ) -> None:
        self._loaded = loaded
        self._console = console
        self._max_new_tokens = max_new_tokens
        self._repeats = repeats

    def warm_up(self, request: Request) -> None:
        """Runs each mode briefly, so that no measured run pays for what happens once."""
        inputs = self._encode(request)
        for mode in measure.MODES:
            measure.run(mode, self._loaded.model, inputs, max_new_tokens=16)

    def _encode(self, request: Request) -> Any:
        return self._loaded.encode(
            request.prompt, request.answer_start, max_new_tokens=self._max_new_tokens
        )

    def compare(self, request: Request) -> Comparison:
        """Runs one request in every mode and judges the outputs."""
        model = self._loaded.model
        inputs = self._encode(request)
        prediction = None
        if request.prediction is not None:
            prediction = self._loaded.encode_prediction(request.prediction)
        runs: dict[str, list[measure.Run]] = {mode.name: [] for mode in measure.MODES}
        for repeat in range(self._repeats):
            for mode in measure.MODES:
                title = f"{mode.title}, run {repeat + 1} of {self._repeats}"
                # The fastest run counts, so only the first may be slowed by showing its text.
                with _watching(
                    self._loaded, self._console, title, streaming=repeat == 0
                ) as streamer:
                    run = measure.run(
                        mode,
                        model,
                        inputs,
                        max_new_tokens=self._max_new_tokens,
                        prediction=prediction,
                        streamer=streamer,
                    )
                runs[mode.name].append(run)
        plain = runs["plain"][0].tokens
        differences: dict[str, measure.Difference | None] = {}
        for name in ("prompt_lookup", "fastdraft"):
            found = [
                measure.explain_difference(model, inputs, plain, tokens, self._max_new_tokens)
                for tokens in {tuple(run.tokens) for run in runs[name]}
            ]
            # The difference that rounding explains least stands for the mode.
            differences[name] = max(
                (each for each in found if each is not None),
                key=lambda each: each.gap - 2 * each.noise,
                default=None,
            )
        return Comparison(
            request=request,
            prompt_tokens=inputs["input_ids"].shape[1],
            runs=runs,
            differences=differences,
        )


@contextmanager
def _watching(
    loaded: Target, console: Console, title: str, *, streaming: bool
) -> Iterator[measure.Streamer | None]:
    """Says on a terminal what runs, and with `streaming` shows its text as it comes.

    Yields the streamer to generate with, if any. Draws four times a second, so that it costs the
    run next to nothing; off a terminal it does nothing.
    """
    if not console.is_terminal:
        yield None
        return
    tokens: list[int] = []

    def render() -> Group:
        return Group(Text(title, "bold"), Text(loaded.decode(list(tokens))))

    with Live(
        get_renderable=render,
        console=console,
        auto_refresh=streaming,
        refresh_per_second=4,
        transient=True,
    ):
        yield measure.Streamer(tokens.append) if streaming else None
