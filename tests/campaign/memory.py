"""Memory that ends at every allocation of the core, and at every size of its budget."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fastdraft import Datastore, DraftConfig, Engine

__all__ = ["case"]

_LIBRARY = Path("build/campaign/failing_memory.so")
_DRAFTERS: list[dict[str, Any]] = [
    {},
    {"tree_budget": 16},
    {"max_ngram": 3},
    {"ngram_order": 3, "min_probability": 0.1},
    {"recovery": 4},
]


def case(seed: int) -> Counter[str]:
    """One script of calls, run with every fault in turn."""
    if seed % 2:
        return _budgets(random.Random(seed))
    # In a process that has the library preloaded.
    _build_library()
    done = subprocess.run(
        [sys.executable, "-m", "campaign.memory", str(seed)],
        env=os.environ | {"LD_PRELOAD": str(_LIBRARY.resolve())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return Counter({"allocations that failed": int(done.stdout)})


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


def _budgets(chance: random.Random) -> Counter[str]:
    """With every budget: what is refused leaves all the rest as it was."""
    drafting = chance.choice(_DRAFTERS)
    script = chance.getrandbits(32)
    most = _Script(DraftConfig(**drafting), script).run()
    step = max(1, most // chance.choice([50, 100]))
    refused = 0
    for budget in range(1 + chance.randrange(step), most + step, step):
        run = _Script(DraftConfig(**drafting, max_bytes=budget), script)
        run.run()
        refused += run.refused
    return Counter({"memory limits met": refused})


def _allocations(chance: random.Random) -> int:
    """With every allocation failing, alone or with all after it."""
    library = ctypes.CDLL(str(_LIBRARY.resolve()))
    library.fail_at.argtypes = [ctypes.c_long, ctypes.c_bool]
    drafting = DraftConfig(**chance.choice(_DRAFTERS))
    script = chance.getrandbits(32)
    goes_on = chance.random() < 0.3
    failed = 0
    for allocation in itertools.count(1):
        run = _Script(drafting, script, calls=25)

        def faulty(call: Callable[[], Any], at: int = allocation) -> Any:
            # In each call anew, so that several fail in one script.
            library.fail_at(at, goes_on)
            try:
                return call()
            finally:
                library.fail_at(0, False)

        run.run(faulty)
        if not run.refused:
            return failed
        failed += run.refused
    raise AssertionError


class _Script:
    """Requests that come, grow and go, the same ones each time, whatever fails."""

    def __init__(self, drafting: DraftConfig, seed: int, *, calls: int = 60) -> None:
        self._chance = random.Random(seed)
        self._calls = calls
        self._memory = Datastore(max_bytes=1 << 18)
        self._engine = Engine(drafting, datastores=[self._memory])
        self._known: list[int] = []
        self.refused = 0

    def run(self, faulty: Callable[[Callable[[], Any]], Any] | None = None) -> int:
        """All calls, each by way of `faulty`. Returns the most bytes that the engine held."""
        most = 0
        for _ in range(self._calls):
            # Drawn before anything can fail, so that each run draws the same.
            action, which, size, alphabet = (self._chance.getrandbits(16) for _ in range(4))
            text = [self._chance.randrange(2 + alphabet % 9) for _ in range(size % 90)]
            call = self._call(action, which, text)
            try:
                call() if faulty is None else faulty(call)
            except MemoryError:
                self.refused += 1
            self._check()
            most = max(most, self._engine.num_bytes)
        for request in self._known:
            stats = self._engine.finish(request)
            assert 0 <= stats.accepted <= min(stats.drafted, stats.emitted)
        assert self._engine.num_bytes == 0, self._engine.num_bytes
        return most

    def _call(self, action: int, which: int, text: list[int]) -> Callable[[], Any]:
        engine, known = self._engine, self._known
        if action % 4 == 0 or not known:
            return lambda: known.append(engine.add_request(text, prediction=text[5:30] or None))
        request = known[which % len(known)]
        if action % 8 == 3:
            return lambda: self._end(request, finish=bool(which % 2))
        if action % 8 == 7:
            return lambda: self._memory.add(text)
        if action % 4 == 1:
            return lambda: self._batch(text)
        return lambda: self._step(request, text)

    def _end(self, request: int, *, finish: bool) -> None:
        before = self._engine.num_requests
        try:
            (self._engine.finish if finish else self._engine.cancel)(request)
        finally:
            if self._engine.num_requests < before:
                self._known.remove(request)

    def _batch(self, text: list[int]) -> None:
        engine, known = self._engine, self._known
        drafts = engine.propose_batch(known, token_cost=0).tolist()
        emitted = [(draft + text)[:8] for draft in drafts]
        before = sum(map(engine.num_tokens, known))
        offsets = np.cumsum([0, *map(len, emitted)])
        engine.observe_batch(known, [*itertools.chain(*emitted)], offsets)
        assert sum(map(engine.num_tokens, known)) == before + offsets[-1]

    def _step(self, request: int, text: list[int]) -> None:
        engine = self._engine
        before = engine.num_tokens(request)
        engine.propose(request, token_cost=0)
        try:
            engine.observe(request, text)
        except MemoryError:
            assert before <= engine.num_tokens(request) <= before + len(text)
            raise
        assert engine.num_tokens(request) == before + len(text)

    def _check(self) -> None:
        engine = self._engine
        assert engine.num_requests == len(self._known)
        for request in self._known:
            engine.num_tokens(request)
        if engine.config.max_bytes is not None:
            assert engine.num_bytes <= engine.config.max_bytes
        assert self._memory.bytes <= self._memory.max_bytes


if __name__ == "__main__":
    print(_allocations(random.Random(int(sys.argv[1]))))
