"""vLLM's proposer with an engine that fails at every one of its calls."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from fastdraft import Engine
from fastdraft.serving.vllm import FastdraftProposer
from vllm_host import Host, Job, config

__all__ = ["case"]

_CALLS = (
    "add_request", "propose_batch", "observe_batch", "observe", "num_tokens", "stats", "finish",
    "cancel",
)  # fmt: skip


def case(seed: int) -> Counter[str]:
    """One script, run again with a fault at each call."""
    logging.disable(logging.WARNING)
    found: Counter[str] = Counter()
    for at in itertools.count(1):
        if _run(random.Random(seed), at) < at:
            break
        found["host faults"] += 1
    return found


class _Fault(Exception):
    pass


class _Failing:
    """Lets an engine fail at its call number `at`."""

    def __init__(self, engine: Engine, at: int) -> None:
        self.calls, self._at = 0, at
        for name in _CALLS:
            setattr(engine, name, functools.partial(self._call, getattr(engine, name)))

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self._at:
            raise _Fault
        return method(*arguments, **options)


def _run(chance: random.Random, at: int) -> int:
    """Whatever fails, every request says all it has to say. Returns how many calls there were."""
    proposer = FastdraftProposer(
        config(token_cost=0.02, memory_bytes=chance.choice([0, 1 << 20]), lookahead=8)
    )
    failing = _Failing(proposer.engine, at)
    host = Host(proposer)
    for number in range(5):
        cycle = list(range(number * 10, number * 10 + 8))
        said = (cycle * 9)[: chance.randint(1, 40)]
        host.add(str(number), Job(cycle * 2, said, max_tokens=len(said)))
    jobs = dict(host.jobs)
    faults = proposer.faults
    host.run()
    assert all(job.said == len(job.output) for job in jobs.values())
    failed = failing.calls >= at
    assert proposer.faults > faults or not failed
    assert proposer.num_requests == 0
    # A request whose end failed cannot be ended again.
    assert proposer.engine.num_requests <= failed
    return failing.calls
