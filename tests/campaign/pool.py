"""Cases on all cores, in processes that may crash or hang without harm to the others."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["Failure", "Results", "run", "run_all"]

# Seconds that a case may compute before it counts as hung, or wait without computing. How many pass
# says nothing: on a busy machine a sound case may take any number of them.
_LONGEST = 900.0


@dataclass(frozen=True)
class Failure:
    """A case in which something was wrong."""

    part: str
    seed: int
    what: str


@dataclass
class Results:
    """What the cases counted, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def run(part: str, seed: int) -> Counter[str]:
    """One case, in this process. Raises what is wrong."""
    # Read where torch and transformers are imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    warnings.filterwarnings("ignore")
    counts: Counter[str] = importlib.import_module(f"campaign.{part}").case(seed)
    return counts


def run_all(
    shares: dict[str, float], seeds: Iterator[int], *, seconds: float, processes: int
) -> Results:
    """Cases of all parts, each part in its share of the time, until it is over."""
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + seconds
    spent = dict.fromkeys(shares, 0.0)
    results = Results()
    workers: list[_Worker] = []
    while True:
        while len(workers) < processes and time.monotonic() < until:
            worker = _Worker(context)
            worker.begin(_next(shares, spent, workers), next(seeds))
            workers.append(worker)
        if not workers:
            return results
        wait([worker.pipe for worker in workers], timeout=1.0)
        for worker in [worker for worker in workers if worker.has_ended()]:
            spent[worker.part] += worker.seconds()
            counts, failure = worker.answer()
            results.counts += counts
            results.counts[f"cases of {worker.part}"] += 1
            if failure is not None:
                results.failures.append(Failure(worker.part, worker.seed, failure))
                again = f"make campaign PART={worker.part} SEED={worker.seed}"
                print(f"FAILED {failure}\nagain: {again}\n", flush=True)
            workers.remove(worker)
            if worker.is_alive() and time.monotonic() < until:
                worker.begin(_next(shares, spent, workers), next(seeds))
                workers.append(worker)
            else:
                worker.end()


def _next(shares: dict[str, float], spent: dict[str, float], workers: list[_Worker]) -> str:
    """The part that has had the least of its share, with what it is at."""
    had = dict(spent)
    for worker in workers:
        had[worker.part] += worker.seconds() + 1.0
    return min(shares, key=lambda part: had[part] / shares[part])


class _Worker:
    """A process, and the case that it is at."""

    def __init__(self, context: Any) -> None:
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other,))
        self._process.start()
        other.close()
        self.part = ""
        self.seed = 0
        self._began = self._computed_at = 0.0
        # Seconds of computing: when the case began, and when it was last looked at.
        self._computed_before = self._computed = 0.0

    def begin(self, part: str, seed: int) -> None:
        self.part, self.seed, self._began = part, seed, time.monotonic()
        self._computed_at = self._began
        self._computed_before = self._computed = _computed(self._process.pid)
        self.pipe.send((part, seed))

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def has_ended(self) -> bool:
        return self.pipe.poll() or not self.is_alive() or self.hung() is not None

    def hung(self) -> str | None:
        """How the case hangs; None if it does not. To be asked now and then."""
        computed, now = _computed(self._process.pid), time.monotonic()
        if computed > self._computed:
            self._computed, self._computed_at = computed, now
        if computed - self._computed_before > _LONGEST:
            return f"computed for {_LONGEST:.0f} s"
        if now - self._computed_at > _LONGEST:
            return f"waited for {_LONGEST:.0f} s"
        return None

    def answer(self) -> tuple[Counter[str], str | None]:
        """What the case counted, and what was wrong with it."""
        if self.pipe.poll():
            try:
                answer: tuple[Counter[str], str | None] = self.pipe.recv()
                return answer
            except (EOFError, OSError):
                pass
        hung = self.hung()
        self.end()
        what = hung or f"exit code {self._process.exitcode}"
        return Counter(), f"the process of the case: {what}"

    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _computed(pid: int) -> float:
    """The processor's seconds of a process, and of those that it started and that have ended; 0
    where it has ended itself."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # Behind the name, which may have blanks in it: utime, stime, cutime and cstime.
    ticks = stat.rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _work(pipe: Connection) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    while True:
        part, seed = pipe.recv()
        try:
            pipe.send((run(part, seed), None))
        except BaseException:
            pipe.send((Counter(), traceback.format_exc()))
