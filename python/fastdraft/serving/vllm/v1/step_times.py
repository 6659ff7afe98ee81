"""The measured cost of vLLM's steps: decoding rows, drafts and prompts share a forward.

vLLM captures CUDA graphs of some sizes, and pads a forward to the next one. It runs as one graph
only where each row has 1 + num_speculative_tokens tokens; other steps are launched piece by piece.

If any request asks for log-probabilities, vLLM takes them at as many lines of logits for each row
as the longest draft of the step has tokens, and one. So one long draft among many rows costs much.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fastdraft.step_latency import StepLatency

__all__ = ["StepTimes", "seconds_of_a_line"]

# A step's prompt tokens are averaged over recent steps; the latest one has this weight.
_PROMPT_RATE = 1 / 8

# Lines measured at once: 120 MB for a vocabulary of 152,000.
_LINES = 64

_NONE: NDArray[np.float64] = np.zeros(0)


def seconds_of_a_line(device_type: str, vocabulary: int) -> float:
    """The time of log-probabilities at a line of logits there: measured, in 0.1 s or less."""
    import torch

    def seconds(lines: int) -> float:
        logits = torch.zeros(lines, vocabulary, device=device_type)
        at = torch.arange(lines, device=device_type)
        found = []
        for _ in range(4):
            started = time.perf_counter()
            logprobs = logits[at].log_softmax(-1)
            (logprobs > logprobs[:, :1]).sum().item()  # waits for the device
            found.append(time.perf_counter() - started)
        return min(found)

    # Without what a call takes however many lines it has.
    return max(seconds(_LINES) - seconds(_LINES // 4), 0.0) / (_LINES - _LINES // 4)


class StepTimes:
    """Measures steps, and says what the tokens of the next one cost.

    Steps that run as one graph are priced by themselves. Without that, modelled batches of 8 to 20
    rows are up to 4 % slower where other steps take 1.12 times as long, and 11 % where 1.3.

    Args:
        device_type: As in `torch.device.type`.
        sizes, even_graphs: See `interface.captured_sizes`.
        line_seconds: What the log-probabilities at a line take, if requests ask for them.

    Attributes:
        largest_even: The most tokens of a step that runs as one graph; 0 where none does.
    """

    def __init__(
        self,
        device_type: str,
        sizes: Sequence[int] = (),
        *,
        even_graphs: bool = False,
        line_seconds: float = 0.0,
    ) -> None:
        self._cost = StepLatency(device_type, sizes)
        self._line_seconds = line_seconds
        self._is_stairs = bool(sizes)
        self.largest_even = max(sizes, default=0) if even_graphs else 0
        # The seconds of the next step, by tokens, and with the longest draft in every row.
        self._seconds = _NONE
        self._even = math.inf
        # The tokens by row of each forward since the last step. A step with more than one forward
        # is not measured.
        self._forwards: deque[Mapping[str, int]] = deque(maxlen=2)
        self._prompt_tokens = 0.0  # of a step, lately

    def add_forward(self, tokens: Mapping[str, int]) -> None:
        """A forward begins, over `tokens` of each row."""
        self._forwards.append(tokens)

    def observe(
        self,
        decoded: Mapping[str, int],
        rows: int,
        seconds: float,
        longest: int = 0,
        *,
        lines: int = 0,
    ) -> None:
        """Learns from the step that took `seconds`.

        Args:
            decoded: The tokens that were to be in it, by row, of those that went on where the last
                step had left them. With none of them, the host may have waited for work.
            rows: All rows of the step.
            longest: The tokens of a row with the longest draft.
            lines: At how many lines log-probabilities were taken.
        """
        # Without what is priced by itself, or without most of it if this step took less than that.
        seconds = max(seconds - self._line_seconds * lines, 0.1 * seconds)
        forwards = [*self._forwards]
        self._forwards.clear()
        if not decoded or len(forwards) != 1:
            return
        [forward] = forwards
        tokens = sum(forward.values())
        prompt_tokens = tokens - sum(map(forward.get, decoded, itertools.repeat(0)))
        self._prompt_tokens += _PROMPT_RATE * (prompt_tokens - self._prompt_tokens)
        even = (
            tokens == rows * longest == sum(decoded.values()) and max(decoded.values()) == longest
        )
        self._cost.observe(
            rows,
            tokens / rows,
            seconds,
            prompt_tokens=prompt_tokens,
            one_graph=even and tokens <= self.largest_even,
        )

    def curve(
        self, rows: int, drafted: int, lookahead: int, *, even: bool = False
    ) -> NDArray[np.float64] | None:
        """The `cost` of the next step for `Engine.propose_batch`; None for a step without drafts.

        Args:
            rows: All rows of the step.
            drafted: Those that may get a draft.
            lookahead: The longest draft.
            even: Whether every row may get the longest draft. Where a graph of such steps is
                cheaper, `is_better_even` says so of what was drafted.
        """
        self._seconds, self._even = _NONE, math.inf
        if self._cost.wants_plain_step(rows):
            return None
        # The tokens of prompts and of rows without drafts are in the forward too.
        prompts = round(self._prompt_tokens)
        widest = lookahead + 1 + -(-prompts // rows)
        times = self._cost.seconds_by_tokens(rows, widest, optimistic=self._is_stairs)
        self._seconds = seconds = times[prompts + rows - drafted :]
        if not even or prompts or drafted < rows or rows * (1 + lookahead) > self.largest_even:
            return seconds
        self._even = self._cost.seconds_in_one_graph(rows, lookahead + 1)
        return np.minimum(seconds, self._even)

    def best_longest(
        self, rows: int, offsets: NDArray[np.int32], probabilities: NDArray[np.float32]
    ) -> int:
        """How long the drafts of a step with log-probabilities may best be: longer ones are cut.

        To be asked after `curve`.

        Args:
            rows: All rows of the step.
            offsets: (drafted + 1,), where each draft begins and ends.
            probabilities: Of each draft token that it and all before it are accepted.
        """
        sizes = np.diff(offsets)
        drafted, longest = len(sizes), int(sizes.max(initial=0))
        depths = 1 + np.arange(len(probabilities)) - np.repeat(offsets[:-1], sizes)
        accepted = np.bincount(depths, probabilities, longest + 1).cumsum()
        tokens = drafted + np.bincount(depths, minlength=longest + 1).cumsum()
        lines = rows * np.arange(1, longest + 2)
        seconds = self._seconds[tokens - 1] + self._line_seconds * lines
        return int(np.argmax((drafted + accepted) / seconds))

    def is_better_even(self, tokens: int) -> bool:
        """True if the longest draft in each row makes a faster step than `tokens` in all do.

        To be asked after `curve`.
        """
        return 0 < tokens <= len(self._seconds) and self._even < self._seconds[tokens - 1]
