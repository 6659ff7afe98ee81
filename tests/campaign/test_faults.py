"""A host whose engine fails at each of its calls."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

from fastdraft import Engine
from random_cases import cases
from vllm_host import Job, V1Host

_CALLS = (
    "add_request", "propose_batch", "observe_batch", "observe", "num_tokens", "stats", "finish",
    "cancel",
)  # fmt: skip


@cases(2)
def test_a_host_outlives_every_fault(seed: int) -> None:
    """One script, run again with a fault at each call."""
    calls = next(at for at in itertools.count(1) if _run(random.Random(seed), at) < at)
    assert calls > len(_CALLS)


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


def _run(rng: random.Random, at: int) -> int:
    """Whatever fails, every request says all it has to say. Returns how many calls there were."""
    host = V1Host(token_cost=0.02, memory_bytes=rng.choice([0, 1 << 20]), lookahead=8)
    proposer = host.proposer
    failing = _Failing(proposer.engine, at)
    for number in range(5):
        cycle = list(range(number * 10, number * 10 + 8))
        said = (cycle * 9)[: rng.randint(1, 40)]
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
