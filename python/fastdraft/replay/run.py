"""Replaying recorded requests through a drafter: exact counts of draft quality, without a model.

A draft is accepted along its longest path that the recorded output follows, as greedy verification
would. The first output token comes with prefill and is not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastdraft.replay.cluster import Cluster
from fastdraft.replay.peers import Peer
from fastdraft.replay.records import Record
from fastdraft.replay.results import FamilyResult, ReplayResult
from fastdraft.replay.settings import Setting
from fastdraft.replay.trace import DRAFT, Decode, Step, Trace, accepted_path
from fastdraft.stats import DraftStats

__all__ = [
    "clock_ns",
    "p50_p99",
    "replay",
    "replay_family",
    "trace_request",
]


def replay(
    settings: Sequence[Setting],
    families: Mapping[str, Sequence[Record]],
    *,
    at_once: int = 1,
    prediction: bool = False,
    on_request: Callable[[str, int], object] | None = None,
    traced: Mapping[str, AbstractSet[str]] | None = None,
    decode: Decode | None = None,
    on_trace: Callable[[Trace], object] | None = None,
    cluster: Cluster | None = None,
) -> list[ReplayResult]:
    """Replays all families with each setting; each family begins with a fresh drafter.

    A setting with several token costs is replayed once and gives a result for each cost.

    Args:
        settings: What drafts, and how.
        families: The records of each family, by its name.
        at_once, prediction: As for `replay_family`.
        on_request: Called before each family and after each request, with what runs now and the
            tokens of the request's output.
        traced: By family, the ids of the requests to follow step by step.
        decode: Turns token ids into text, for the traces.
        on_trace: Called with the trace of each request of `traced` when it ends.
        cluster: Where to replay, each family by a task of its own; else here. Counts are the same,
            times are those of its nodes. Datastores must be frozen ones.
    """
    traced = traced or {}

    def replayed(
        task: tuple[Setting, Sequence[Record], AbstractSet[str]],
        on_request: Callable[[int], object] | None = None,
    ) -> Iterator[tuple[FamilyResult, list[Trace]]]:
        setting, records, ids = task
        traces: list[Trace] = []
        result = replay_family(
            setting.start(records),
            records,
            at_once=at_once,
            prediction=prediction,
            on_request=on_request,
            traced=ids,
            on_trace=traces.append,
        )
        yield result, traces

    tasks = [
        (setting, records, traced.get(name, frozenset()))
        for setting in settings
        for name, records in families.items()
    ]
    coming = iter(tasks)
    done = None if cluster is None else cluster.run(replayed, coming)
    results = []
    for setting in settings:
        found: dict[str, FamilyResult] = {}
        for name, records in families.items():
            report = partial(on_request or (lambda *_: None), f"{setting.title}: {name}")
            report(0)
            if done is None:
                found[name], traces = next(replayed(next(coming), report))
            else:
                found[name], traces = next(done)
                report(sum(len(each.output_ids) for each in records))
            for trace in traces:
                if on_trace is not None:
                    on_trace(replace(trace, title=f"{name}, {setting.title}", decode=decode))
        results += [
            ReplayResult(
                setting.drafter,
                cost,
                setting.lookahead,
                setting.tree_budget,
                at_once,
                found,
                setting.curve,
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
    traced: AbstractSet[str] = frozenset(),
    on_trace: Callable[[Trace], object] | None = None,
) -> FamilyResult:
    """Replays the requests of a family.

    Args:
        peer: The drafter, fresh; it keeps what earlier requests left.
        records: The family.
        at_once: How many requests run at a time, as in a server: in each step all of them propose,
            then all of them observe, and where some end, the next ones of the family begin. A
            session's next request begins when its last one has ended, unless both have the same
            prompt: then they are samples, which run side by side.
        prediction: Whether to pass each record's reference to the drafter.
        on_request: Called after each request with the tokens of its output.
        traced: The ids of the requests to follow step by step.
        on_trace: Called with the trace of each of these when it ends.
    """
    counts = _Counts()
    waiting = list(records)
    running: list[_Decoding] = []
    has_room = True
    while waiting or running:
        if has_room:
            prompts = {d.record.session: d.record.prompt_ids for d in running}
            later: list[Record] = []
            held_up: set[str | None] = set()
            for record in waiting:
                session = record.session
                is_sample = session is None or (
                    session not in held_up
                    and np.array_equal(prompts.get(session, record.prompt_ids), record.prompt_ids)
                )
                if len(running) < at_once and is_sample:
                    is_traced = record.id in traced
                    running.append(_Decoding(peer, record, prediction, counts, is_traced))
                    prompts[session] = record.prompt_ids
                else:
                    later.append(record)
                    held_up.add(session)
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
                if on_trace is not None and decoding.record.id in traced:
                    on_trace(decoding.trace)
        has_room = any(decoding.has_ended for decoding in running)
        running = [decoding for decoding in going if not decoding.has_ended]
    return counts.result()


def trace_request(
    peer: Peer,
    record: Record,
    *,
    prediction: bool = False,
    title: str = "",
    decode: Decode | None = None,
) -> Trace:
    """Replays one request and tells what happened at each step.

    Args:
        peer: The drafter.
        record: The request.
        prediction: Whether to pass its reference to the drafter.
        title: The trace's, by default the peer's.
        decode: Turns token ids into text; None where only the ids are known.
    """
    traces: list[Trace] = []
    replay_family(peer, [record], prediction=prediction, traced={record.id}, on_trace=traces.append)
    return replace(traces[0], title=title or peer.title, decode=decode)


class _Counts:
    """The sums over the requests of a family; times in nanoseconds."""

    def __init__(self) -> None:
        self.requests = 0
        self.stats = DraftStats()
        self.propose_ns: list[int] = []
        self.observe_ns = 0  # of all calls
        self.sessions: dict[object, NDArray[np.int64]] = {}
        self.lengths: dict[object, Counter[int]] = {}

    def result(self) -> FamilyResult:
        clock = clock_ns()
        observe_ns = self.observe_ns - clock * self.stats.steps
        longest = max((max(each, default=0) for each in self.lengths.values()), default=0)
        return FamilyResult(
            requests=self.requests,
            stats=self.stats,
            propose_ns=p50_p99(np.array(self.propose_ns) - clock),
            observe_ns_per_token=observe_ns / max(1, self.stats.emitted),
            sessions=np.array(list(self.sessions.values()), np.int64).reshape(-1, 3),
            lengths=np.array(
                [[each[n] for n in range(longest + 1)] for each in self.lengths.values()], np.int64
            ).reshape(-1, longest + 1),
        )


class _Decoding:
    """A running request: `propose` and `observe` in turn until it has ended, then `finish`.

    Attributes:
        record: What is replayed.
        done: How many tokens of its output have been emitted.
        trace: Its steps; without sources and probabilities unless `is_traced`.
    """

    def __init__(
        self, peer: Peer, record: Record, prediction: bool, counts: _Counts, is_traced: bool
    ) -> None:
        self.record = record
        self._output: list[int] = record.output_ids.tolist()
        self._counts = counts
        self._is_traced = is_traced
        # The first output token comes with the prompt's forward.
        first = self._output[:1]
        reference = record.reference_ids if prediction else None
        self._request = peer.start(record.prompt_ids, first, reference)
        self._proposal: Any = None
        self._tokens: list[int] = []
        self._parents: Sequence[int] = ()
        self._path: list[int] = []
        self.done = len(first)
        self.trace = Trace(record.id, "", record.prompt_ids.tolist() if is_traced else [], first)

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
        self._proposal, self._tokens, self._parents = proposal, tokens, parents
        self._path = accepted_path(tokens, parents, self._output, self.done)

    def observe(self) -> None:
        counts, path = self._counts, self._path
        emitted = self._output[self.done : self.done + len(path) + 1]
        started = time.perf_counter_ns()
        self._request.observe(emitted)
        counts.observe_ns += time.perf_counter_ns() - started
        request, sources, probabilities = self._request, [DRAFT] * len(self._tokens), None
        if self._is_traced:
            if request.sources is not None:
                sources = request.sources(self._proposal)
            if request.probabilities is not None:
                probabilities = request.probabilities(self._proposal)
        self.trace.steps.append(
            Step(self._tokens, list(self._parents), sources, probabilities, path, emitted)
        )
        self.done += len(emitted)

    def finish(self) -> None:
        counts = self._counts
        counts.requests += 1
        session = self.record.session or counts.requests
        stats = self.trace.stats
        own = np.array([stats.steps, stats.emitted, stats.drafted], np.int64)
        counts.sessions[session] = counts.sessions.get(session, 0) + own
        lengths = counts.lengths.setdefault(session, Counter())
        lengths.update(len(step.token_ids) for step in self.trace.steps)
        counts.stats += stats
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
