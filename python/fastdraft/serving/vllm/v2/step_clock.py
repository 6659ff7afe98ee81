"""The cost of V2's steps, measured from the end of one to the end of the next."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fastdraft.serving.vllm.interface import VllmConfig, captured_sizes
from fastdraft.step_latency import StepLatency

__all__ = ["StepClock"]


class StepClock:
    """Times the steps of one `VllmConfig`'s scheduler or model runner.

    Attributes:
        latency: Their cost, as learned so far.
    """

    def __init__(self, config: VllmConfig) -> None:
        self.latency = StepLatency(config.device_config.device_type, captured_sizes(config)[0])
        self._ended_at = 0.0
        self._requests: frozenset[str] = frozenset()

    def end(self, requests: Iterable[str], rows: int, tokens: int, rest: int) -> float:
        """A step has ended, and what it emitted is known.

        Args:
            requests: The ids of those that the host has just heard of.
            rows, tokens: The rows and tokens of the step.
            rest: Its tokens that are no draft's and no row's last one: those of prompts.

        Returns:
            The part of the requests that the step before had not, 0 to 1.
        """
        now = time.perf_counter()
        before, self._requests = self._requests, frozenset(requests)
        known = len(before & self._requests)
        # If all requests are new, the host may have waited for them.
        if known:
            seconds = now - self._ended_at
            self.latency.observe(rows, tokens / rows, seconds, prompt_tokens=max(rest, 0))
        self._ended_at = now
        return 1.0 - known / len(self._requests) if self._requests else 0.0
