"""Microbenchmarks of the engine's calls, for comparing two commits of fastdraft.

    pytest bench/microbench.py --benchmark-autosave
    pytest-benchmark compare

Each round takes another position of the text, so that no branch predictor learns the answer.
`bench/index.py` measures the same calls beside the peers, in turns.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdraft import DraftConfig, Engine

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import corpus
from vllm_host import VOCABULARY, Job, V1Host

CONTEXTS = (1_000, 10_000, 100_000, 1_000_000)
ROUNDS = 2_000
BATCH = 64

Benchmark = Any


@pytest.fixture(scope="session")
def text() -> np.ndarray:
    return corpus.tokens(1_000_000 + 8 * ROUNDS + BATCH * 15_000)


def stepper(engine: Engine, request: int, following: np.ndarray) -> Callable[[], Any]:
    """Moves the request one token on and hands its id to the call that is timed."""
    tokens = iter(following.tolist())

    def step() -> tuple[tuple[int], dict[str, Any]]:
        engine.observe(request, [next(tokens)])
        return (request,), {}

    return step


@pytest.mark.parametrize("context", CONTEXTS)
def test_propose(benchmark: Benchmark, text: np.ndarray, context: int) -> None:
    engine = Engine()
    request = engine.add_request(text[:context])
    step = stepper(engine, request, text[context : context + ROUNDS])
    benchmark.pedantic(engine.propose, setup=step, rounds=ROUNDS)


@pytest.mark.parametrize("context", CONTEXTS)
def test_observe_8_tokens(benchmark: Benchmark, text: np.ndarray, context: int) -> None:
    engine = Engine()
    request = engine.add_request(text[:context])
    positions = itertools.count(context, 8)

    def emitted() -> tuple[tuple[int, np.ndarray], dict[str, Any]]:
        position = next(positions)
        return (request, text[position : position + 8]), {}

    benchmark.pedantic(engine.observe, setup=emitted, rounds=ROUNDS)


@pytest.mark.parametrize("context", CONTEXTS[:3])
def test_propose_batch(benchmark: Benchmark, text: np.ndarray, context: int) -> None:
    engine = Engine()
    starts = range(0, BATCH * 15_000, 15_000)
    requests = [engine.add_request(text[start : start + context]) for start in starts]
    offsets = np.arange(BATCH + 1, dtype=np.int32)
    token_cost = DraftConfig().token_cost / BATCH
    positions = itertools.count(context)

    def step() -> tuple[tuple[list[int]], dict[str, float]]:
        position = next(positions)
        engine.observe_batch(requests, text[[start + position for start in starts]], offsets)
        return (requests,), {"token_cost": token_cost}

    benchmark.pedantic(engine.propose_batch, setup=step, rounds=ROUNDS // 10)


@pytest.mark.parametrize("context", CONTEXTS)
def test_add_request(benchmark: Benchmark, text: np.ndarray, context: int) -> None:
    starts = itertools.count(0, 101)

    def prompt() -> tuple[tuple[np.ndarray], dict[str, Any]]:
        start = next(starts)
        return (text[start : start + context],), {}

    # A fresh engine each time, or the rounds would be those of an engine that fills up.
    benchmark.pedantic(lambda prompt: Engine().add_request(prompt), setup=prompt, rounds=5)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("token_cost", [None, 0.02], ids=["measured cost", "given cost"])
def test_vllm_step(
    benchmark: Benchmark, text: np.ndarray, rows: int, token_cost: float | None
) -> None:
    """A call of vLLM's V1 proposer. The scripted target emits the corpus, whatever is drafted."""
    steps = ROUNDS // 10
    host = V1Host(rows=rows, lookahead=16, length=4096 + 17 * steps, token_cost=token_cost)
    for row in range(rows):
        job = text[row * 15_000 :][: 1024 + 17 * steps] % VOCABULARY
        host.add(str(row), Job(job[:1024].tolist(), job[1024:].tolist()))
    propose = host.proposer.propose
    host.step()
    arguments: list[tuple[Any, ...]] = []

    def keep(*given: Any, **_: Any) -> list[list[int]]:
        arguments.append(given)
        return [[]] * rows

    host.proposer.propose = keep  # type: ignore[method-assign]

    def emitted() -> tuple[tuple[Any, ...], dict[str, Any]]:
        host.step()
        return arguments.pop(), {}

    def step(*given: Any) -> None:
        host.drafts = dict(zip(host.running, propose(*given), strict=True))

    benchmark.pedantic(step, setup=emitted, rounds=steps)
