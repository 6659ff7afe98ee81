"""A clock for tests of drafts, on which forwards alone take time, the same on any machine."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["StepClock"]

STEP = 0.01
# Shares of a step: each further token, and a forward of a draft model.
TOKEN, DRAFT = 0.005, 0.1
COMPILATION = 1.0


class StepClock(threading.local):
    """Reads as the seconds that the forwards of this thread have taken so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def timing_forwards(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`CachedModel.forward`, which takes time by its tokens."""

        @functools.wraps(forward)
        def timed(model: Any, tokens: Any, **options: Any) -> Any:
            logits = forward(model, tokens, **options)
            width = max(options.get("width", 0), *map(len, tokens))
            self.seconds += STEP * (1 + TOKEN * (len(tokens) * width - 1))
            return logits

        return timed

    def timing_drafts(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`Stage._forward`, which takes a part of the time of a forward of the target."""

        @functools.wraps(forward)
        def timed(*arguments: Any) -> Any:
            before = self.seconds
            result = forward(*arguments)
            self.seconds = before + DRAFT * (self.seconds - before)
            return result

        return timed

    def timing_compilations(self, called: Callable[..., Any]) -> Callable[..., Any]:
        """`StaticModel._called`, which takes the time of a compilation for each new shape."""

        @functools.wraps(called)
        def timed(model: Any, inputs: Any) -> Any:
            call, shape = model.call, (*inputs["input_ids"].shape, *model.cache.sizes)

            def compiling(**inputs: Any) -> Any:
                self.seconds += COMPILATION
                return call(**inputs)

            if model.compiled is not None and shape not in model.compiled.runs:
                model.call = compiling
            try:
                return called(model, inputs)
            finally:
                model.call = call

        return timed
