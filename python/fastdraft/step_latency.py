"""The latency of steps, measured: how long a forward takes by the number of tokens in it.

The loop times its own steps. The clock is read where the loop has the emitted tokens in its hands
anyway, so nothing waits for the device on account of the measurement, and what is measured is what
the user waits for: forward, processors and verification together.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from fastdraft import _core

__all__ = ["StepLatency", "clock"]

clock: Callable[[], float] = time.perf_counter
"""The seconds that steps and drafts over transformers are timed by, read from here at each use."""


class StepLatency(_core.StepLatency):
    """The measured latency of one model's steps. Generations in several threads may share it.

    Args:
        device_type: Where the model computes, as in `torch.device.type`; chooses the typical curve.
        sizes: The numbers of tokens to which the host pads a forward, as it has captured or
            compiled graphs of them. Where they are of all rows together, a forward over more tokens
            than the largest is not padded. By default nothing is padded.
        a_row: Whether they are of each row instead; then no forward has more than the largest.

    Raises:
        InvalidValueError: A size is below 1.
    """

    _of_model: ClassVar[
        weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], StepLatency]]
    ] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, model: object, device_type: str, widths: Sequence[int] = ()) -> StepLatency:
        """The latency learned for `model` by earlier generations; kept as long as the model lives.

        widths: The tokens a row that its forwards may have; empty for any number.
        """
        known = cls._of_model.setdefault(model, {})
        key = device_type, tuple(widths)
        if key not in known:
            known[key] = cls(device_type, widths, a_row=True)
        return known[key]
