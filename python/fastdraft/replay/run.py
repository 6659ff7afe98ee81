"""Replaying recorded requests through a drafter: exact counts of draft quality, without a model.

A draft is accepted along its longest path that the recorded output follows, as greedy verification
would. The first output token comes with prefill and is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fastdraft.replay.peers import Peer
from fastdraft.replay.records import Record
from fastdraft.replay.results import FamilyResult, ReplayResult
from fastdraft.replay.settings import Setting
from fastdraft.stats import DraftStats

__all__ = [
    "TARGET",
    "accepted_path",
    "accepted_prefix",
    "clock_ns",
    "p50_p99",
    "replay",
    "replay_family",
    "trace_request",
]

TARGET = "target"
"""The origin of a token that no draft held."""


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], output: Sequence[int], done: int
) -> list[int]:
    """The nodes of a draft that the output follows from position `done` on, from the root down.

    A parent stands before its children, and siblings have different tokens. O(nodes).
    """
    path: list[int] = []
    last, place, end = -1, done, len(output)
    for node, parent in enumerate(parents):
        if parent == last and place < end and tokens[node] == output[place]:
            path.append(node)
            last = node
            place += 1
    return path


def accepted_prefix(tokens: Sequence[int], output: Sequence[int], done: int = 0) -> int:
    """How many tokens of a chain the output follows from position `done` on."""
    return len(accepted_path(tokens, range(-1, len(tokens) - 1), output, done))


def replay(
    settings: Sequence[Setting],
    families: Mapping[str, Sequence[Record]],
    *,
    at_once: int = 1,
    prediction: bool = False,
    on_request: Callable[[str, int], object] | None = None,
) -> list[ReplayResult]:
    """Replays all families with each setting; each family begins with a fresh drafter.

    A setting with several token costs is replayed once and gives a result for each cost.

    Args:
        settings: What drafts, and how.
        families: The records of each family, by its name.
        at_once, prediction: As for `replay_family`.
        on_request: Called before each family and after each request, with what runs now and the
            tokens of the request's output.
    """
    results = []
    for setting in settings:
        found: dict[str, FamilyResult] = {}
        for name, records in families.items():

            def report(tokens: int, title: str = f"{setting.title}: {name}") -> None:
                if on_request is not None:
                    on_request(title, tokens)

            report(0)
            found[name] = replay_family(
                setting.start(records),
                records,
                at_once=at_once,
                prediction=prediction,
                on_request=report,
            )
        results += [
            ReplayResult(
                setting.drafter, cost, setting.lookahead, setting.tree_budget, at_once, found
            )
            for cost in setting.token_costs
        ]
    return results


def replay_family(
    peer: Peer,
    records: Sequence[Record],
    *,
    at_once: int = 1,
    prediction: bool = False,
    on_request: Callable[[int], object] | None = None,
) -> FamilyResult:
    """Replays the requests of a family.

    Args:
        peer: The drafter, fresh; it keeps what earlier requests left.
        records: The family.
        at_once: How many requests run at a time, as in a server: in each step all of them propose,
            then all of them observe, and where some end, the next ones of the family begin. A
            session's next request begins when its last one has ended.
        prediction: Whether to pass each record's reference to the drafter.
        on_request: Called after each request with the tokens of its output.
    """
    counts = _Counts()
    waiting = list(records)
    running: list[_Decoding] = []
    has_room = True
    while waiting or running:
        if has_room:
            busy = {decoding.session for decoding in running} - {None}
            later = []
            for record in waiting:
                if len(running) < at_once and record.session not in busy:
                    running.append(_Decoding(peer, record, prediction, counts))
                else:
                    later.append(record)
                if record.session is not None:
                    busy.add(record.session)
            waiting = later
        going = [decoding for decoding in running if not decoding.has_ended]
        for decoding in going:
            decoding.propose()
        for decoding in going:
            decoding.observe()
        for decoding in running:
            if decoding.has_ended:
                decoding.finish()
                if on_request is not None:
                    on_request(decoding.done)
        has_room = any(decoding.has_ended for decoding in running)
        running = [decoding for decoding in going if not decoding.has_ended]
    return counts.result()


def trace_request(
    peer: Peer, record: Record, *, prediction: bool = False
) -> tuple[list[str], FamilyResult]:
    """Replays one request and tells where each of its output tokens came from.

    The origin is a source's name, or `TARGET` for a token that no draft held.
    """
    counts = _Counts()
    decoding = _Decoding(peer, record, prediction, counts, traced=True)
    while not decoding.has_ended:
        decoding.propose()
        decoding.observe()
    decoding.finish()
    return decoding.origins or [], counts.result()


class _Counts:
    """What adds up over the requests of a family; times in nanoseconds, one a call."""

    def __init__(self) -> None:
        self.requests = 0
        self.stats = DraftStats()
        self.propose_ns: list[int] = []
        self.observe_ns: list[int] = []
        self.observed: list[int] = []
        self.most_bytes: int | None = None

    def result(self) -> FamilyResult:
        clock = clock_ns()
        observe_ns = np.array(self.observe_ns) - clock
        observed = np.array(self.observed)
        return FamilyResult(
            requests=self.requests,
            stats=self.stats,
            propose_ns=p50_p99(np.array(self.propose_ns) - clock),
            observe_ns=p50_p99(observe_ns / observed),
            observe_ns_per_token=float(observe_ns.sum() / max(1, observed.sum())),
            num_bytes=self.most_bytes,
        )


class _Decoding:
    """A running request: `propose` and `observe` in turn until it has ended, then `finish`.

    Attributes:
        session: The record's.
        done: How many tokens of its output have been emitted.
        origins: Where they came from, None unless `traced`.
    """

    def __init__(
        self,
        peer: Peer,
        record: Record,
        prediction: bool,
        counts: _Counts,
        *,
        traced: bool = False,
    ) -> None:
        self._peer = peer
        self.session = record.session
        self._output: list[int] = record.output_ids.tolist()
        self._counts = counts
        prefill = self._output[:1]
        reference = record.reference_ids if prediction else None
        self._request = peer.start(record.prompt_ids, prefill, reference)
        self._proposal: Any = None
        self._path: list[int] = []
        self._steps = self._drafts = self._drafted = self._accepted = 0
        self.done = len(prefill)
        self.origins = [TARGET] * len(prefill) if traced else None

    @property
    def has_ended(self) -> bool:
        return self.done == len(self._output)

    def propose(self) -> None:
        request = self._request
        argument = request.argument
        started = time.perf_counter_ns()
        proposal = request.propose(argument)
        self._counts.propose_ns.append(time.perf_counter_ns() - started)
        tokens = request.tokens(proposal)
        parents: Sequence[int] = range(-1, len(tokens) - 1)
        if tokens and request.parents is not None:
            parents = request.parents(proposal)
        self._proposal = proposal
        self._path = accepted_path(tokens, parents, self._output, self.done)
        self._drafts += bool(tokens)
        self._drafted += len(tokens)

    def observe(self) -> None:
        counts, path = self._counts, self._path
        emitted = self._output[self.done : self.done + len(path) + 1]
        started = time.perf_counter_ns()
        self._request.observe(emitted)
        counts.observe_ns.append(time.perf_counter_ns() - started)
        counts.observed.append(len(emitted))
        if self.origins is not None:
            sources = self._request.sources
            found = None if sources is None else sources(self._proposal)
            self.origins += ["draft" if found is None else found[node] for node in path]
            self.origins += [TARGET] * (len(emitted) - len(path))
        self._steps += 1
        self._accepted += len(path)
        self.done += len(emitted)

    def finish(self) -> None:
        counts = self._counts
        counts.requests += 1
        counts.stats += DraftStats(
            steps=self._steps,
            emitted=max(0, self.done - 1),
            drafts=self._drafts,
            drafted=self._drafted,
            accepted=self._accepted,
        )
        held = self._peer.num_bytes()
        if held is not None:
            counts.most_bytes = max(counts.most_bytes or 0, held)
        self._request.finish()


def p50_p99(times: ArrayLike) -> tuple[float, float]:
    """The median and the 99th percentile; zeros without times."""
    times = np.asarray(times)
    if not len(times):
        return 0.0, 0.0
    p50, p99 = np.percentile(times, [50, 99])
    return float(p50), float(p99)


def clock_ns() -> float:
    """The median of two readings of the clock with nothing between them, in nanoseconds."""
    clock = time.perf_counter_ns
    return float(np.median([-(clock() - clock()) for _ in range(1_000)]))
