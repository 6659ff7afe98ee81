"""Whatever is raised, and wherever: no request stays at the drafter, and the model is as it was."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from fastdraft import hf
from fastdraft.engine import Session
from fastdraft.hf import attention
from hf_models import Generous, repetitive_batch, tiny_model

pytestmark = pytest.mark.slow

FILES = str(Path(hf.__file__).parent), inspect.getfile(Session)
POINTS = 60


class _Interrupting:
    """Counts the lines that a call runs in hf and in sessions, and interrupts it at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.lines = 0
        self._at = at

    def __call__(self, call: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            call()
        finally:
            sys.settrace(before)

    def _entered(self, frame: Any, _event: str, _argument: Any) -> Any:
        inside = frame.f_code.co_filename.startswith(FILES)
        return self._traced if inside else None

    def _traced(self, frame: Any, event: str, _argument: Any) -> Any:
        if event == "line" and not _cleans_up(frame):
            self.lines += 1
            if self.lines == self._at:
                raise KeyboardInterrupt
        return self._traced


def _cleans_up(frame: Any) -> bool:
    """Says whether a frame is in the part of a scope that runs at its end, or in a locked block.

    A signal never comes between such a block and its `__exit__`, as an interrupt by line could.
    """
    ends = frame.f_lineno >= _ENDS.get(frame.f_code.co_name, sys.maxsize)
    return ends or attention._lock.locked()


def _end_of(scope: Any) -> int:
    lines, first = inspect.getsourcelines(scope)
    return first + next(at for at, line in enumerate(lines) if line.strip() == "finally:")


_ENDS = {"close": 0, "__exit__": 0, "attending": _end_of(attention.attending)}


def test_nothing_is_left_wherever_an_interrupt_comes() -> None:
    model = tiny_model("llama")
    inputs = repetitive_batch(3)
    engine = Generous()

    def generate() -> torch.Tensor:
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
        return hf.generate(model, **inputs, **options, drafter=engine).sequences

    expected = generate()
    whole = _Interrupting()
    whole(generate)
    points = range(1, whole.lines, max(whole.lines // POINTS, 1))
    for at in points:
        with pytest.raises(KeyboardInterrupt):
            _Interrupting(at)(generate)
        assert engine.num_requests == 0, at
        assert model.config._attn_implementation == "sdpa", at
        assert not attention._using, at
    assert len(points) >= POINTS
    assert torch.equal(generate(), expected)


class _Failing(BaseStreamer):
    """Fails at its last call."""

    def __init__(self, puts: int) -> None:
        self.left = puts

    def put(self, _value: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("closed")

    def end(self) -> None:
        raise OSError("closed")


@pytest.mark.parametrize("puts", [0, 1, 3, 100])
def test_nothing_is_left_when_a_streamer_fails(puts: int) -> None:
    model, engine = tiny_model("llama"), Generous()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with pytest.raises(OSError, match="closed"):
        hf.generate(
            model, **repetitive_batch(1), **options, drafter=engine, streamer=_Failing(puts)
        )
    assert engine.num_requests == 0


def test_nothing_is_left_when_a_prompt_is_not_taken() -> None:
    model = tiny_model("llama")
    inputs = repetitive_batch(3)

    class Full(Generous):
        def add_request(self, *arguments: Any, **options: Any) -> int:
            if self.num_requests == 2:
                raise MemoryError
            return super().add_request(*arguments, **options)

    engine = Full()
    with pytest.raises(MemoryError):
        hf.generate(model, **inputs, max_new_tokens=6, drafter=engine)
    assert engine.num_requests == 0
