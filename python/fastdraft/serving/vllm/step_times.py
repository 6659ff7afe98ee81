"""What vLLM's steps cost, measured: decoding rows, drafts and prompts share a forward.

vLLM captures CUDA graphs of some sizes, and pads a forward to the next one. It runs as one graph
only where each row has 1 + num_speculative_tokens tokens; other steps are launched piece by piece.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft.step_latency import StepLatency

__all__ = ["StepTimes", "captured_sizes"]

# A step's prompt tokens are averaged over recent steps; the latest one has this weight.
_PROMPT_RATE = 1 / 8

_NONE: NDArray[np.float64] = np.zeros(0)


def captured_sizes(vllm_config: Any) -> tuple[list[int], bool]:
    """The sizes of the graphs that steps of any form are padded to; and whether steps whose rows
    all have the longest draft run in graphs of their own."""
    compilation = getattr(vllm_config, "compilation_config", None)
    mode = getattr(compilation, "cudagraph_mode", None)
    sizes = getattr(compilation, "cudagraph_capture_sizes", None) or []
    if mode is None or not sizes or mode.mixed_mode().name == "NONE":
        return [], False
    own = mode.separate_routine() and mode.decode_mode().name == "FULL"
    return [int(size) for size in sizes], own


class StepTimes:
    """Measures steps, and says what the tokens of the next one cost.

    Args:
        device_type: Where the model computes, as in `torch.device.type`.
        sizes, even_graphs: See `captured_sizes`.
    """

    def __init__(
        self, device_type: str, sizes: Sequence[int] = (), *, even_graphs: bool = False
    ) -> None:
        self._cost = StepLatency(device_type, sizes)
        self._is_stairs = bool(sizes)
        # Larger steps run in no graph.
        self._largest_even = max(sizes, default=0) if even_graphs else 0
        self._even = 0.0  # seconds of the next step with the longest draft in every row
        self._seconds = _NONE
        # The tokens by row of each forward since the last step. A step with more than one forward
        # is not measured.
        self._forwards: deque[Mapping[Hashable, int]] = deque(maxlen=2)
        self._prompt_tokens = 0.0  # of a step, lately

    def add_forward(self, tokens: Mapping[Hashable, int]) -> None:
        """A forward begins, over so many tokens by row."""
        self._forwards.append(tokens)

    def observe(
        self, decoded: Mapping[Hashable, int], rows: int, seconds: float, longest: int = 0
    ) -> None:
        """Learns from the step that took `seconds`.

        Args:
            decoded: The tokens that were to be in it, by row, of those that went on where the last
                step had left them. With none of them, the host may have waited for work.
            rows: All rows of the step.
            longest: The tokens of a row with the longest draft.
        """
        forwards = len(self._forwards)
        forward = self._forwards.popleft() if forwards else decoded
        self._forwards.clear()
        # Without the runner, the size of a forward is known only if it reads no prompt.
        if not decoded or forwards > 1 or (not forwards and len(decoded) < rows):
            return
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
            one_graph=even and tokens <= self._largest_even,
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
        self._seconds = _NONE
        if self._cost.wants_plain_step(rows):
            return None
        # The tokens of prompts and of rows without drafts are in the forward too.
        prompts = round(self._prompt_tokens)
        widest = lookahead + 1 + -(-prompts // rows)
        times = self._cost.seconds_by_tokens(rows, widest, hopeful=self._is_stairs)
        seconds = times[prompts + rows - drafted :]
        if not even or prompts or drafted < rows or rows * (1 + lookahead) > self._largest_even:
            return seconds
        self._seconds = seconds
        self._even = self._cost.seconds_in_one_graph(rows, lookahead + 1)
        return np.minimum(seconds, self._even)

    def is_better_even(self, tokens: int) -> bool:
        """Whether the step is faster if each row gets the longest draft than with `tokens` in all.

        To be asked after `curve`.
        """
        return 0 < tokens <= len(self._seconds) and self._even < self._seconds[tokens - 1]
