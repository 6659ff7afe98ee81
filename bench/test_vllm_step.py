"""A call of vLLM's V1 proposer. The scripted target emits the corpus, whatever is drafted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turns import Turn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from vllm_host import VOCABULARY, Job, V1Host

STEPS = 100
ROUNDS = 2
LENGTH = 1024 + 17 * STEPS * (ROUNDS + 2)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("token_cost", [None, 0.02], ids=["measured cost", "given cost"])
def test_vllm_step(
    in_turns: Callable[..., None], text: np.ndarray, rows: int, token_cost: float | None
) -> None:
    host = V1Host(rows=rows, lookahead=16, length=4096 + LENGTH, token_cost=token_cost)
    for row in range(rows):
        job = text[row * 15_000 :][:LENGTH] % VOCABULARY
        host.add(str(row), Job(job[:1024].tolist(), job[1024:].tolist()))
    propose = host.proposer.propose
    host.step()
    arguments: list[tuple[Any, ...]] = []

    def keep(*given: Any, **_: Any) -> list[list[int]]:
        arguments.append(given)
        return [[]] * rows

    host.proposer.propose = keep  # type: ignore[method-assign]

    def emitted() -> tuple[Any, ...]:
        host.step()
        return arguments.pop()

    def step(*given: Any) -> None:
        host.drafts = dict(zip(host.running, propose(*given), strict=True))

    in_turns({"fastdraft": Turn(lambda _: step, emitted, STEPS)}, ROUNDS)
