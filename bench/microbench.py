"""Microbenchmarks of the engine's calls, for comparing two commits of fastdraft.

    pytest bench/microbench.py --benchmark-autosave
    pytest-benchmark compare

Each round takes another position of the text, so that no branch predictor learns the answer.
`bench/index.py` measures the same calls one by one, beside the peers.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdraft import DraftConfig, Engine
from fastdraft.integrations.vllm import FastdraftProposer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import corpus
from vllm_host import VOCABULARY, Job, config

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
    places = itertools.count(context, 8)

    def emitted() -> tuple[tuple[int, np.ndarray], dict[str, Any]]:
        place = next(places)
        return (request, text[place : place + 8]), {}

    benchmark.pedantic(engine.observe, setup=emitted, rounds=ROUNDS)


@pytest.mark.parametrize("context", CONTEXTS[:3])
def test_propose_batch(benchmark: Benchmark, text: np.ndarray, context: int) -> None:
    engine = Engine()
    starts = range(0, BATCH * 15_000, 15_000)
    requests = [engine.add_request(text[start : start + context]) for start in starts]
    offsets = np.arange(BATCH + 1, dtype=np.int32)
    token_cost = DraftConfig().token_cost / BATCH
    places = itertools.count(context)

    def step() -> tuple[tuple[list[int]], dict[str, float]]:
        place = next(places)
        engine.observe_batch(requests, text[[start + place for start in starts]], offsets)
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


@pytest.mark.parametrize("token_cost", [None, 0.02], ids=["measures the cost", "told the cost"])
def test_vllm_step(benchmark: Benchmark, text: np.ndarray, token_cost: float | None) -> None:
    """A call of vLLM's proposer with a single request, of which the target says the text."""
    proposer = FastdraftProposer(config(lookahead=16, length=1 << 20, token_cost=token_cost))
    tokens = (text[None, : 3_000 + 17 * ROUNDS] % VOCABULARY).astype(np.int32)
    length = np.array([3_000], dtype=np.int32)
    request = SimpleNamespace(
        prompt_token_ids=tokens[0, : length[0]].tolist(), sampling_params=Job([], []).params
    )
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["0"]),
        requests={"0": request},
        execute_model=lambda _: None,
    )
    proposer.attach(runner)
    draft: list[int] = []

    def emitted() -> tuple[tuple[list[list[int]], np.ndarray, np.ndarray], dict[str, Any]]:
        following = tokens[0, length[0] :][: len(draft) + 1].tolist()
        accepted = sum(itertools.accumulate(map(operator.eq, draft, following), operator.and_))
        length[0] += accepted + 1
        runner.execute_model(SimpleNamespace(num_scheduled_tokens={"0": len(draft) + 1}))
        return ([following[: accepted + 1]], length, tokens), {}

    def step(*arguments: Any) -> None:
        [draft[:]] = proposer.propose(*arguments)

    benchmark.pedantic(step, setup=emitted, rounds=ROUNDS)
