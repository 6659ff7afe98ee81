"""What vLLM's steps cost, measured: decoding rows, drafts and prompts share a forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping

import numpy as np
from numpy.typing import NDArray

from fastdraft.step_latency import StepLatency

__all__ = ["StepTimes"]

# A step's prompt tokens are averaged over recent steps; the latest one has this weight.
_PROMPT_RATE = 1 / 8


class StepTimes:
    """Measures steps, and says what the tokens of the next one cost.

    Args:
        device_type: Where the model computes, as in `torch.device.type`.
    """

    def __init__(self, device_type: str) -> None:
        self._cost = StepLatency(device_type)
        # The tokens by row of each forward since the last step. A step with more than one forward
        # is not measured.
        self._forwards: deque[Mapping[Hashable, int]] = deque(maxlen=2)
        self._prompt_tokens = 0.0  # of a step, lately

    def add_forward(self, tokens: Mapping[Hashable, int]) -> None:
        """A forward begins, over so many tokens by row."""
        self._forwards.append(tokens)

    def observe(self, decoded: Mapping[Hashable, int], rows: int, seconds: float) -> None:
        """Learns from the step that took `seconds`.

        Args:
            decoded: The tokens that were to be in it, by row, of those that went on where the last
                step had left them. With none of them, the host may have waited for work.
            rows: All rows of the step.
        """
        forwards = list(self._forwards)
        self._forwards.clear()
        if not decoded:
            return
        if len(forwards) == 1:
            [forward] = forwards
            tokens = sum(forward.values())
            prompt_tokens = tokens - sum(forward.get(key, 0) for key in decoded)
        elif not forwards and len(decoded) == rows:
            # Without the runner, the size of a forward is known only if it reads no prompt.
            tokens, prompt_tokens = sum(decoded.values()), 0
        else:
            return
        self._prompt_tokens += _PROMPT_RATE * (prompt_tokens - self._prompt_tokens)
        self._cost.observe(rows, tokens / rows, seconds, prompt_tokens=prompt_tokens)

    def curve(self, rows: int, drafted: int, lookahead: int) -> NDArray[np.float64] | None:
        """The `cost` of the next step for `Engine.propose_batch`; None for a step without drafts.

        Args:
            rows: All rows of the step.
            drafted: Those that may get a draft.
            lookahead: The longest draft.
        """
        if self._cost.wants_plain_step(rows):
            return None
        # The tokens of prompts and of rows without drafts are in the forward too.
        prompts = round(self._prompt_tokens)
        widest = lookahead + 1 + -(-prompts // rows)
        return self._cost.seconds_by_tokens(rows, widest)[prompts + rows - drafted :]
