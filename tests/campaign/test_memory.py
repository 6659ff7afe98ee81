"""Memory that ends at every allocation of the core, and at every size of its budget."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from campaign.calls import DRAFTERS, Calls
from fastdraft import Datastore, DraftConfig, Engine
from random_cases import cases

_LIBRARY = Path("build/campaign/failing_memory.so")


@cases(4)
def test_every_allocation_may_fail(seed: int) -> None:
    """One script of calls, in a process that has the library preloaded."""
    _build_library()
    done = subprocess.run(
        [sys.executable, "-m", "campaign.test_memory", str(seed)],
        env=os.environ | {"LD_PRELOAD": str(_LIBRARY.resolve())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    assert int(done.stdout) > 0


def _build_library() -> None:
    source = Path(__file__).with_name("failing_memory.cc")
    if _LIBRARY.exists() and _LIBRARY.stat().st_mtime > source.stat().st_mtime:
        return
    _LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    built = _LIBRARY.with_suffix(f".{os.getpid()}")
    subprocess.run(
        ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", built, "-ldl"], check=True
    )
    built.replace(_LIBRARY)


@cases(3)
def test_every_budget_may_end(seed: int) -> None:
    """One script of calls with every budget: what is refused leaves all the rest as it was."""
    rng = random.Random(seed)
    drafting = rng.choice(DRAFTERS)
    script = rng.getrandbits(32)
    _, most = _run(DraftConfig(**drafting), script)
    step = max(1, most // rng.choice([50, 100]))
    budgets = range(1 + rng.randrange(step), most + step, step)
    assert sum(_run(DraftConfig(**drafting, max_bytes=each), script)[0] for each in budgets) > 0


def _allocations(rng: random.Random) -> int:
    """With every allocation failing, alone or with all after it."""
    library = ctypes.CDLL(str(_LIBRARY.resolve()))
    library.fail_at.argtypes = [ctypes.c_long, ctypes.c_bool]
    drafting = DraftConfig(**rng.choice(DRAFTERS))
    script = rng.getrandbits(32)
    goes_on = rng.random() < 0.3
    failed = 0
    for allocation in itertools.count(1):

        @contextlib.contextmanager
        def faulty(at: int = allocation) -> Iterator[None]:
            # In each call anew, so that several fail in one script.
            library.fail_at(at, goes_on)
            try:
                yield
            finally:
                library.fail_at(0, False)

        refused, _ = _run(drafting, script, calls=25, during=faulty)
        if not refused:
            return failed
        failed += refused
    raise AssertionError


def _run(
    config: DraftConfig,
    script: int,
    *,
    calls: int = 60,
    during: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[int, int]:
    """How many calls found no memory, and the most bytes that the engine held.

    script: The seed of the calls, which are the same ones until one fails.
    during: What each of them is made in.
    """
    memory = Datastore(max_bytes=1 << 18)
    engine = Engine(config, datastores=[memory])
    caller = Calls(engine, memory, random.Random(script))
    refused = most = 0
    for _ in range(calls):
        call = caller.draw()
        try:
            with during():
                call()
        except MemoryError:
            refused += 1
        caller.check()
        most = max(most, engine.num_bytes)
    caller.end()
    assert engine.num_bytes == 0, engine.num_bytes
    return refused, most


if __name__ == "__main__":
    print(_allocations(random.Random(int(sys.argv[1]))))
