"""Threads that share engines, datastores and requests, and cancel what others are at."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter

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
    found: Counter[str] = Counter()
    failures: list[BaseException] = []
    until = time.monotonic() + _SECONDS

    def work(seed: int) -> None:
        of_thread: Counter[str] = Counter()
        try:
            caller = Calls(engine, memory, random.Random(seed), shared)
            while time.monotonic() < until and not failures:
                of_thread["calls of threads"] += 1
                try:
                    caller.draw()()
                except UnknownRequestError:
                    of_thread["requests that vanished"] += 1
            caller.end()
            of_thread["rows that vanished"] = caller.vanished
        except BaseException as failure:
            failures.append(failure)
        found.update(of_thread)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=work, args=(chance.getrandbits(32),), daemon=True)
            for _ in range(chance.choice([2, 4, 8]))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS + 30)
            assert not thread.is_alive(), "a thread waits for ever"
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]
    for request in shared:
        engine.cancel(request)
    assert engine.num_requests == 0, engine.num_requests
    assert engine.num_bytes == 0, engine.num_bytes
    assert memory.bytes <= memory.max_bytes
    return found
