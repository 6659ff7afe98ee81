"""Models and watches that several tests of the decoding loop share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fastdraft.hf.loop import Decoding
from fastdraft.step_latency import StepLatency
from hf_models import tiny_model


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def model(llama: Any) -> Any:
    return llama


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of steps by their width alone: a wider forward that is faster would be run instead."""
    observe = StepLatency.observe
    monkeypatch.setattr(
        StepLatency,
        "observe",
        lambda self, rows, width, _: observe(self, rows, width, 1e-3 + 1e-5 * width),
    )


@pytest.fixture
def compilations(known_times: None) -> Iterator[Any]:
    """Counts the graphs that are compiled, in a process that has none yet."""
    del known_times
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[list[str]]]:
    """Runs each step of the loop in a context, and lists what these have noted."""

    def watch(noting: Callable[[], AbstractContextManager[list[str]]]) -> list[list[str]]:
        steps: list[list[str]] = []
        step = Decoding._step

        def watched(decoding: Decoding) -> None:
            with noting() as noted:
                step(decoding)
            steps.append(list(noted))

        monkeypatch.setattr(Decoding, "_step", watched)
        return steps

    return watch
