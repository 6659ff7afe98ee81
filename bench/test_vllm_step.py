"""A call of vLLM's V1 proposers. The scripted target emits the corpus, whatever is drafted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turns import Turn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from vllm_host import VOCABULARY, Job, V1Host

STEPS = 100
ROUNDS = 2
LOOKAHEAD = 16
LENGTH = 1024 + (LOOKAHEAD + 1) * STEPS * (ROUNDS + 2)

# Numba says so of vLLM's n-gram proposer.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Encountered the use of a type")

Propose = Callable[..., list[list[int]]]


def ngram(host: V1Host) -> Propose:
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    proposer = NgramProposer(with_options(host, prompt_lookup_min=2, prompt_lookup_max=5))
    return lambda *given: proposer.propose(LOOKAHEAD, *given)


def suffix(host: V1Host) -> Propose:
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    depth = {"max_tree_depth": 24, "max_cached_requests": 10_000}  # vLLM's defaults
    least = {"max_spec_factor": 1.0, "min_token_prob": 0.1}
    options = {f"suffix_decoding_{name}": each for name, each in (depth | least).items()}
    proposer = SuffixDecodingProposer(with_options(host, **options))
    batch = SimpleNamespace(
        req_ids=host.running,
        req_id_to_index={name: row for row, name in enumerate(host.running)},
        num_prompt_tokens=np.full(len(host.running), 1024),
        num_tokens_no_spec=host.lengths,
        token_ids_cpu=host.tokens,
    )
    return lambda sampled, *_: proposer.propose(LOOKAHEAD, batch, sampled)


def with_options(host: V1Host, **options: Any) -> Any:
    vars(host.vllm_config.speculative_config).update(options)
    return host.vllm_config


def turn(text: np.ndarray, rows: int, token_cost: float | None, peer: Any) -> Turn:
    """That of fastdraft, or of a peer."""
    host = V1Host(rows=rows, lookahead=LOOKAHEAD, length=4096 + LENGTH, token_cost=token_cost)
    for row in range(rows):
        job = text[row * 8_000 :][:LENGTH] % VOCABULARY
        host.add(str(row), Job(job[:1024].tolist(), job[1024:].tolist()))
    propose = host.proposer.propose if peer is None else peer(host)
    arguments: list[tuple[Any, ...]] = []

    def keep(*given: Any, **_: Any) -> list[list[int]]:
        arguments.append(given)
        return [[]] * rows

    def emitted() -> tuple[Any, ...]:
        host.step()
        return arguments.pop()

    def step(*given: Any) -> None:
        host.drafts = dict(zip(host.running, propose(*given), strict=True))

    host.proposer.propose = keep  # type: ignore[method-assign]
    step(*emitted())  # the prompts
    return Turn(lambda _: step, emitted, STEPS)


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("token_cost", [None, 0.02], ids=["measured cost", "given cost"])
def test_vllm_step(
    in_turns: Callable[..., None], text: np.ndarray, rows: int, token_cost: float | None
) -> None:
    turns = {"fastdraft": turn(text, rows, token_cost, None)}
    for name, peer in (("ngram", ngram), ("suffix", suffix)):
        try:
            turns[name] = turn(text, rows, token_cost, peer)
        except ImportError:  # it cannot be fetched or built here
            continue
    in_turns(turns, ROUNDS)
