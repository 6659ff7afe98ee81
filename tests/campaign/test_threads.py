"""Threads that share engines, datastores and requests, and cancel what others are at."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from campaign.calls import DRAFTERS, Calls
from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.errors import UnknownRequestError
from random_cases import cases

_SECONDS = 1.0


@cases(2)
def test_threads_share_an_engine(seed: int) -> None:
    """One engine, several threads, a second of random calls."""
    chance = random.Random(seed)
    memory = Datastore(max_bytes=chance.choice([1 << 18, 1 << 22]))
    engine = Engine(DraftConfig(**chance.choice(DRAFTERS)), datastores=[memory])
    shared: list[int] = []
    seeds = [chance.getrandbits(32) for _ in range(chance.choice([2, 4, 8]))]
    until = time.monotonic() + _SECONDS

    def work(seed: int) -> int:
        caller = Calls(engine, memory, random.Random(seed), shared)
        calls = 0
        while time.monotonic() < until:
            # Another thread may have ended the request.
            with contextlib.suppress(UnknownRequestError):
                caller.draw()()
            calls += 1
        caller.end()
        return calls

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(seeds)) as threads:
            assert all(threads.map(work, seeds))
    finally:
        sys.setswitchinterval(before)
    for request in shared:
        engine.cancel(request)
    assert engine.num_requests == 0, engine.num_requests
    assert engine.num_bytes == 0, engine.num_bytes
    assert memory.bytes <= memory.max_bytes
