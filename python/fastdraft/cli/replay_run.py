"""Replaying recorded requests through a drafter: exact counts of draft quality, without a model.

A draft is accepted along its longest path that the recorded output follows, as greedy verification
would. The first output token comes with prefill and is not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft.cli.peers import Peer
from fastdraft.cli.records import Record

__all__ = ["TARGET", "FamilyResult", "Run", "accepted_path", "replay_family", "trace_request"]

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


@dataclass
class _Counts:
    """What adds up over the requests of a family; times in nanoseconds, one a call."""

    requests: int = 0
    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    propose_ns: list[int] = field(default_factory=list)
    observe_ns: list[int] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    most_bytes: int | None = None

    def result(self) -> FamilyResult:
        clock = _clock_ns()
        observe_ns = np.array(self.observe_ns) - clock
        observed = np.array(self.observed)
        return FamilyResult(
            requests=self.requests,
            steps=self.steps,
            emitted=self.emitted,
            drafted=self.drafted,
            accepted=self.accepted,
            propose_ns=_p50_p99(np.array(self.propose_ns) - clock),
            observe_ns=_p50_p99(observe_ns / observed),
            observe_ns_per_token=float(observe_ns.sum() / max(1, observed.sum())),
            num_bytes=self.most_bytes,
        )


@dataclass(frozen=True)
class FamilyResult:
    """What a drafter did for the requests of one family.

    Attributes:
        requests: How many there were.
        steps: Target forwards after the prefills.
        emitted: Output tokens after the first of each request.
        drafted: Draft tokens, the nodes of trees included.
        accepted: Those of them that the output followed.
        propose_ns: p50 and p99 of one call, with its Python call, in nanoseconds.
        observe_ns: p50 and p99 of one call, divided by its tokens.
        observe_ns_per_token: All calls together, divided by their tokens.
        num_bytes: The most that the drafter held, or None where it does not tell.
    """

    requests: int
    steps: int
    emitted: int
    drafted: int
    accepted: int
    propose_ns: tuple[float, float]
    observe_ns: tuple[float, float]
    observe_ns_per_token: float
    num_bytes: int | None

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per target step, 1.0 without steps."""
        return self.emitted / self.steps if self.steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, 0.0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def speed(self, token_cost: float) -> float:
        """Tokens in the time of a step without drafts: emitted / (steps + cost * drafted)."""
        cost = self.steps + token_cost * self.drafted
        return self.emitted / cost if cost else 1.0


@dataclass(frozen=True)
class Run:
    """All families through one drafter.

    Attributes:
        drafter: Its name.
        token_cost: What a draft token costs, as a fraction of a step; it drafts by that where it
            can.
        lookahead: Its longest draft, or how deep its trees are.
        tree_budget: The most nodes of a tree; None for chains.
        at_once: How many requests ran at a time.
        families: The results by the families' names.
    """

    drafter: str
    token_cost: float
    lookahead: int
    tree_budget: int | None
    at_once: int
    families: dict[str, FamilyResult]

    @property
    def speeds(self) -> dict[str, float]:
        """The modelled speed of each family."""
        return {name: each.speed(self.token_cost) for name, each in self.families.items()}

    @property
    def geometric_mean(self) -> float:
        """Of the families' modelled speeds."""
        speeds = self.speeds.values()
        return math.exp(sum(map(math.log, speeds)) / len(speeds))

    @property
    def worst(self) -> float:
        """The least of the families' modelled speeds."""
        return min(self.speeds.values())


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
        prediction: Whether to hand over each record's reference.
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


class _Decoding:
    """A running request: `propose` and `observe` in turn until it has ended, then `finish`.

    Attributes:
        session: The record's.
        done: How many tokens of its output have been emitted.
        origins: Where they came from, None where nobody asked.
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
        self.done = len(prefill)
        self.origins = [TARGET] * len(prefill) if traced else None

    @property
    def has_ended(self) -> bool:
        return self.done == len(self._output)

    def propose(self) -> None:
        request, counts = self._request, self._counts
        argument = request.argument
        started = time.perf_counter_ns()
        proposal = request.propose(argument)
        counts.propose_ns.append(time.perf_counter_ns() - started)
        tokens = request.tokens(proposal)
        parents = request.parents(proposal) if tokens else ()
        self._proposal = proposal
        self._path = accepted_path(tokens, parents, self._output, self.done)
        counts.drafted += len(tokens)

    def observe(self) -> None:
        counts, path = self._counts, self._path
        emitted = self._output[self.done : self.done + len(path) + 1]
        started = time.perf_counter_ns()
        self._request.observe(emitted)
        counts.observe_ns.append(time.perf_counter_ns() - started)
        counts.observed.append(len(emitted))
        if self.origins is not None:
            sources = self._request.sources(self._proposal)
            self.origins += [sources[node] for node in path]
            self.origins += [TARGET] * (len(emitted) - len(path))
        counts.steps += 1
        counts.emitted += len(emitted)
        counts.accepted += len(path)
        self.done += len(emitted)

    def finish(self) -> None:
        counts = self._counts
        counts.requests += 1
        held = self._peer.num_bytes()
        if held is not None:
            counts.most_bytes = max(counts.most_bytes or 0, held)
        self._request.finish()


def _p50_p99(times: NDArray[np.float64]) -> tuple[float, float]:
    if not len(times):
        return 0.0, 0.0
    p50, p99 = np.percentile(times, [50, 99])
    return float(p50), float(p99)


def _clock_ns() -> float:
    """The median of two readings of the clock with nothing between them."""
    clock = time.perf_counter_ns
    return float(np.median([-(clock() - clock()) for _ in range(1_000)]))
