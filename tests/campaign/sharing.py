"""Threads that share engines, datastores and requests, and cancel what others are at."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from campaign.calls import DRAFTERS, Calls
from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.errors import UnknownRequestError

__all__ = ["case"]

_SECONDS = 1.0


def case(seed: int) -> Counter[str]:
    """One engine, several threads, a second of random calls."""
    chance = random.Random(seed)
    memory = Datastore(max_bytes=chance.choice([1 << 18, 1 << 22]))
    engine = Engine(DraftConfig(**chance.choice(DRAFTERS)), datastores=[memory])
    shared: list[int] = []
    seeds = [chance.getrandbits(32) for _ in range(chance.choice([2, 4, 8]))]
    until = time.monotonic() + _SECONDS

    def work(seed: int) -> Counter[str]:
        found: Counter[str] = Counter()
        caller = Calls(engine, memory, random.Random(seed), shared)
        while time.monotonic() < until:
            found["calls of threads"] += 1
            try:
                caller.draw()()
            except UnknownRequestError:
                found["requests that vanished"] += 1
        caller.end()
        return found + Counter({"rows that vanished": caller.vanished})

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(seeds)) as threads:
            found = sum(threads.map(work, seeds), Counter[str]())
    finally:
        sys.setswitchinterval(before)
    for request in shared:
        engine.cancel(request)
    assert engine.num_requests == 0, engine.num_requests
    assert engine.num_bytes == 0, engine.num_bytes
    assert memory.bytes <= memory.max_bytes
    return found
