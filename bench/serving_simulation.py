"""Tokens a second of a GPU server by drafter: recorded requests, real drafters, modelled steps.

The server is modelled event by event. A step of the target takes `--base-ms`, and `--token-ms` for
each token in it: published figures of an H100 with an 8 B model. Its tokens are padded to the next
captured size, and a step without a graph of its own takes `--pieces` times as long, as in
bench/stairs.py. An asynchronous host hides its own work behind the steps. A synchronous one adds it
to each of them: `--async-gain` of a step without drafts. Drafters run for real, on recorded
requests, and their measured processor times count: beside the steps where they run in the
background, between the steps where the host waits.

- plain: asynchronous, no drafts, one graph.
- plain, synchronous: the same without asynchronous scheduling.
- ngram_gpu: asynchronous; n-grams of the row's own text, found on the device. Every row is padded
  to as many draft tokens, and the step runs in one graph.
- suffix: synchronous; Arctic's suffix decoding. On V1, so steps run in one graph only if each row
  has the longest draft.
- fastdraft v1: synchronous, on V1; an engine that is called between the steps, with the adapter's
  own times of steps.
- fastdraft v2, ragged: asynchronous; the background drafter, whose continuations are aligned on the
  device. Verified are the likeliest of all rows' tokens, as many as vLLM's adaptive verification
  takes: those with which tokens a millisecond are most, by the chances of the step before. One
  graph, whatever the rows' lengths.
- fastdraft v2, padded: the same without adaptive verification, as it is set up by default: all rows
  have as many draft tokens, a length that the adapter's own chooser takes for each step. One graph.
- fastdraft v2, launched: as ragged, but the device uses what had arrived when the step was
  launched, one step before.

At most `--rows` requests are replayed at once. With more at once each stands for several like it:
their tokens and the drafters' times count so many times. All drafters serve the same requests in
the same order. A family is measured until a row ends and no request waits for its place: a server
under load is full. What steps take is learned over all families; everything else begins anew with
each. Prefill is left out, for all alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

import baselines
from fastdraft import Continuations, Datastore, DraftConfig, Engine
from fastdraft.background import BackgroundDrafter
from fastdraft.integrations.vllm.lengths import DraftLengths, default_lengths
from fastdraft.integrations.vllm.step_times import StepTimes
from fastdraft.replay import Record
from fastdraft.replay.peers import PEERS
from fastdraft.replay.trace import accepted_prefix
from fastdraft.step_latency import StepLatency
from harness import Row, about, add_requests, add_server, finish, parser, recorded_families, show
from stairs import SIZES, Stairs
from staleness import Chances, Scan, Tree, Variant, align, scan_text

LOOKAHEAD = 16
NODES = 128
PADDED = 8  # the longest draft where all rows have as many tokens
ALIGN_MS = 0.01
COPY_MS = 0.05


@dataclass
class Running:
    """A request that decodes.

    Attributes:
        key: Told apart from all others by it.
        text: Prompt and whole output.
        length: How much of the text has been emitted.
        state: The drafter's.
    """

    key: int
    prompt: int
    text: Any
    length: int
    state: Any = None

    @property
    def has_ended(self) -> bool:
        return self.length >= len(self.text)

    def accept(self, draft: Sequence[int]) -> list[int]:
        """What a step with this draft emits."""
        output: list[int] = self.text[self.length : self.length + len(draft) + 1].tolist()
        return output[: accepted_prefix(draft, output) + 1]


class Server:
    """The modelled machine; times in milliseconds.

    Attributes:
        weight: How many requests each replayed one stands for.
    """

    def __init__(self, steps: Stairs, async_gain: float, weight: int) -> None:
        self._steps, self._async_gain, self.weight = steps, async_gain, weight

    def step(self, tokens: int, *, one_graph: bool = True) -> float:
        """Of a step with so many tokens of the replayed rows."""
        return self._steps.seconds(self.weight * tokens, even=one_graph)

    def host(self, rows: int) -> float:
        """What a synchronous host adds to a step of so many replayed rows."""
        return self._async_gain * self.step(rows)


class Drafter:
    """A drafter in its host; times in milliseconds.

    `draft` gives each row's draft when the last step has ended at `now`, and the time that the
    host then waits. `verified` says how many tokens the step with these drafts has, and whether it
    runs in one graph. `observe` takes what the step emitted that ended at `now`, and gives the time
    that the host takes for it.
    """

    synchronous = False

    def __init__(self, server: Server) -> None:
        self.server = server

    def start(self, row: int, request: Running, now: float) -> None:
        """A request begins in a row."""

    def draft(self, rows: Mapping[int, Running], now: float) -> tuple[list[list[int]], float]:
        return [[] for _ in rows], 0.0

    def verified(self, drafts: list[list[int]]) -> tuple[int, bool]:
        return len(drafts), True

    def observe(
        self, rows: Mapping[int, Running], emitted: list[list[int]], drafted: list[int], now: float
    ) -> float:
        return 0.0

    def end(self, row: int, request: Running, now: float) -> None:
        """A request has ended."""

    def time(self, call: Callable[[], Any], weight: int | None = None) -> tuple[Any, float]:
        """What a call returns, and its time, by default for all rows that the replayed ones stand
        for."""
        started = time.process_time()
        result = call()
        took = (time.process_time() - started) * 1e3
        return result, took * (self.server.weight if weight is None else weight)


class Synchronous(Drafter):
    """No drafts, and a host that waits."""

    synchronous = True


class NgramGpu(Drafter):
    """The earliest of the longest n-grams of 2 to 5 tokens, K tokens for every row."""

    length = 5

    def verified(self, drafts: list[list[int]]) -> tuple[int, bool]:
        return len(drafts) * (1 + self.length), True

    def draft(self, rows: Mapping[int, Running], now: float) -> tuple[list[list[int]], float]:
        drafts = []
        for each in rows.values():
            matched, _ = scan_text(each.text, each.length, Scan(2, 1 << 30))
            draft: list[int] = []
            if matched:
                known = each.text[: each.length]
                tail = known[-min(matched, 5) :]
                windows = np.lib.stride_tricks.sliding_window_view(known[:-1], len(tail))
                place = int(np.flatnonzero((windows == tail).all(1))[0]) + len(tail)
                draft = known[place : place + self.length].tolist()
            drafts.append(draft)
        return drafts, 0.0


class OnV1(Drafter):
    """A drafter for V1's model runner, between the steps."""

    synchronous = True

    def verified(self, drafts: list[list[int]]) -> tuple[int, bool]:
        even = all(len(draft) == LOOKAHEAD for draft in drafts)
        return len(drafts) + sum(map(len, drafts)), even


class Suffix(OnV1):
    """Arctic's suffix decoding with the memory of earlier requests."""

    def __init__(self, server: Server, longest: int) -> None:
        super().__init__(server)
        self.peer = PEERS["arctic"](LOOKAHEAD, longest)

    def start(self, row: int, request: Running, now: float) -> None:
        prompt = request.text[: request.prompt]
        first = request.text[request.prompt : request.length].tolist()
        request.state = self.peer.start(prompt, first)

    def draft(self, rows: Mapping[int, Running], now: float) -> tuple[list[list[int]], float]:
        def propose() -> list[list[int]]:
            states = [each.state for each in rows.values()]
            return [list(state.tokens(state.propose(state.argument))) for state in states]

        return self.time(propose)

    def observe(
        self, rows: Mapping[int, Running], emitted: list[list[int]], drafted: list[int], now: float
    ) -> float:
        def take() -> None:
            for each, tokens in zip(rows.values(), emitted, strict=True):
                each.state.observe(tokens)

        return self.time(take)[1]

    def end(self, row: int, request: Running, now: float) -> None:
        request.state.finish()


class FastdraftV1(OnV1):
    """The engine between the steps, and the adapter's times of steps."""

    def __init__(self, server: Server, times: StepTimes) -> None:
        super().__init__(server)
        self.engine = Engine(DraftConfig(lookahead=LOOKAHEAD), datastores=[Datastore()])
        self.times = times
        self.began = 0.0

    def start(self, row: int, request: Running, now: float) -> None:
        request.state = self.engine.add_request(request.text[: request.length])

    def draft(self, rows: Mapping[int, Running], now: float) -> tuple[list[list[int]], float]:
        weight = self.server.weight
        count = len(rows) * weight
        cost, waited = self.time(
            lambda: self.times.curve(count, count, LOOKAHEAD, even=True), weight=1
        )
        drafts: list[list[int]] = [[] for _ in rows]
        if cost is not None:
            requests = [each.state for each in rows.values()]
            of_replayed = cost[weight - 1 :: weight]
            drafts, took = self.time(
                lambda: self.engine.propose_batch(requests, cost=of_replayed).tolist()
            )
            waited += took
            if self.times.is_better_even(weight * (len(rows) + sum(map(len, drafts)))):
                drafts = [draft + [0] * (LOOKAHEAD - len(draft)) for draft in drafts]
        self.began = now + waited
        return drafts, waited

    def observe(
        self, rows: Mapping[int, Running], emitted: list[list[int]], drafted: list[int], now: float
    ) -> float:
        requests = [each.state for each in rows.values()]
        offsets = np.cumsum([0, *map(len, emitted)])
        tokens = np.array([token for each in emitted for token in each], np.int32)
        decoded: dict[Hashable, int] = dict(
            enumerate(np.repeat(drafted, self.server.weight).astype(int) + 1)
        )
        seconds = (now - self.began) / 1e3

        def learn() -> None:
            self.times.add_forward(decoded)
            self.times.observe(decoded, len(decoded), seconds, 1 + LOOKAHEAD)

        learned = self.time(learn, weight=1)[1]
        return learned + self.time(lambda: self.engine.observe_batch(requests, tokens, offsets))[1]

    def end(self, row: int, request: Running, now: float) -> None:
        self.engine.finish(request.state)


@dataclass(order=True)
class _News:
    """Something for the background thread, and when it is there."""

    at: float
    tell: Callable[[], object] = field(compare=False)


class FastdraftV2(Drafter):
    """The background drafter with a clock of its own, and the alignment of the study."""

    variant = Variant(1, scan=Scan(learned=False))

    def __init__(self, server: Server, rows: int, *, launched: bool = False) -> None:
        super().__init__(server)
        config = DraftConfig(lookahead=self.variant.depth, tree_budget=NODES)
        self.drafter = BackgroundDrafter(
            Engine(config, datastores=[Datastore()]), rows=rows, nodes=NODES, start=False
        )
        self.launched = launched
        self.chances = Chances(learned=False)
        self.news: deque[_News] = deque()
        self.free_at = 0.0
        self.empty = Tree(0, [], [], [])
        # What has been published, and when: (time, {row: (number, tree)}).
        self.published: deque[tuple[float, dict[int, tuple[int, Tree]]]] = deque([(0.0, {})])
        self.ends = deque([0.0, 0.0], maxlen=2)
        # Of the step before: the chances of each row's draft tokens with all before them.
        self.paths: dict[int, NDArray[np.float64]] = {}
        self.budget = 0
        self.ages: list[int] = []
        self.busy_ms = 0.0

    def start(self, row: int, request: Running, now: float) -> None:
        # A step may be told of a request only after it was added: its number is known at once.
        prompt = request.text[: request.length]
        request.state = [None, request.length]

        def add() -> None:
            request.state[0] = self.drafter.add(row, prompt)

        self.news.append(_News(now, add))

    def draft(self, rows: Mapping[int, Running], now: float) -> tuple[list[list[int]], float]:
        self._run_until(now)
        self.ends.append(now)
        arrived = self.ends[0] if self.launched else now
        while len(self.published) > 1 and self.published[1][0] <= arrived:
            self.published.popleft()
        trees = self.published[0][1]
        drafts: list[list[int]] = []
        paths: dict[int, NDArray[np.float64]] = {}
        for row, each in rows.items():
            number, tree = trees.get(row, (0, self.empty))
            if number != each.state[0]:
                tree = self.empty
            self.ages.append(each.length - tree.base if tree.tokens else -1)
            draft, chances, _, _ = align(self.variant, tree, each.text, each.length, self.chances)
            drafts.append(draft)
            paths[each.key] = np.zeros(LOOKAHEAD)
            paths[each.key][: len(draft)] = chances
        return self.cut(drafts, paths), ALIGN_MS

    def cut(
        self, drafts: list[list[int]], paths: dict[int, NDArray[np.float64]]
    ) -> list[list[int]]:
        """What of the drafts is verified, by vLLM's rule for adaptive verification."""
        count = len(drafts)
        # It has to be decided before these chances are known on the host.
        before = [self.paths.get(key, np.ones(LOOKAHEAD)) for key in paths]
        scores = np.sort(np.concatenate(before))[::-1]
        emitted = count + np.concatenate([[0.0], np.cumsum(scores)])
        took = [self.server.step(count + drafted) for drafted in range(len(emitted))]
        self.budget = int(np.argmax(emitted / took))
        self.paths = paths
        likeliest = np.argsort(-np.concatenate(list(paths.values())), kind="stable")
        kept = np.bincount(likeliest[: self.budget] // LOOKAHEAD, minlength=count)
        return [draft[:length] for draft, length in zip(drafts, kept.tolist(), strict=True)]

    def verified(self, drafts: list[list[int]]) -> tuple[int, bool]:
        return len(drafts) + self.budget, True

    def observe(
        self, rows: Mapping[int, Running], emitted: list[list[int]], drafted: list[int], now: float
    ) -> float:
        told = [
            (row, each, each.length - len(tokens), tokens)
            for (row, each), tokens in zip(rows.items(), emitted, strict=True)
        ]

        def tell() -> None:
            tokens = [token for *_, some in told for token in some]
            self.drafter.observe(
                [row for row, *_ in told],
                [each.state[0] for _, each, *_ in told],
                [position for _, _, position, _ in told],
                np.array(tokens, np.int32),
                np.cumsum([0, *(len(some) for *_, some in told)]),
                drafted,
            )

        self.news.append(_News(now + COPY_MS, tell))
        return 0.0

    def end(self, row: int, request: Running, now: float) -> None:
        self.news.append(_News(now + COPY_MS, lambda: self.drafter.finish(request.state[0])))

    def _run_until(self, now: float) -> None:
        """The thread takes what has arrived whenever it is free."""
        left = False
        while left or self.news:
            begins = self.free_at if left else max(self.free_at, self.news[0].at)
            if begins > now:
                return
            while self.news and self.news[0].at <= begins:
                self.news.popleft().tell()
            left, took = self.time(self.drafter.run_once)
            self.free_at = begins + took
            self.busy_ms += took
            snapshot = self.drafter.acquire()
            self.published.append((self.free_at, _trees(snapshot)))
            self.drafter.release(snapshot)


class FastdraftV2Padded(FastdraftV2):
    """The same, with as many draft tokens for every row, a number that follows the batch."""

    def __init__(
        self, server: Server, rows: int, lengths: Sequence[int], latency: StepLatency
    ) -> None:
        super().__init__(server, rows)
        self.lengths = DraftLengths(lengths, latency)
        self.length = 0

    def draft(self, rows: Mapping[int, Running], now: float) -> tuple[list[list[int]], float]:
        # The host launches a step before it knows that step's drafts.
        self.length = self.lengths.choose(len(rows) * self.server.weight)
        return super().draft(rows, now)

    def cut(
        self, drafts: list[list[int]], paths: dict[int, NDArray[np.float64]]
    ) -> list[list[int]]:
        return [draft[: self.length] for draft in drafts]

    def verified(self, drafts: list[list[int]]) -> tuple[int, bool]:
        return len(drafts) * (1 + self.length), True

    def observe(
        self, rows: Mapping[int, Running], emitted: list[list[int]], drafted: list[int], now: float
    ) -> float:
        weight = self.server.weight
        accepted = np.repeat([len(each) - 1 for each in emitted], weight)
        seconds = (now - self.ends[-1]) / 1e3
        self.lengths.observe(len(rows) * weight, self.length, accepted, seconds)
        return super().observe(rows, emitted, drafted, now)


def _trees(snapshot: Any) -> dict[int, tuple[int, Tree]]:
    """A snapshot's trees, by row."""
    out: Continuations = snapshot.continuations
    trees = {}
    for row in np.flatnonzero(out.count).tolist():
        count = out.count[row]
        columns = (out.token_ids, out.parents, out.probabilities)
        tokens, parents, chances = (column[row, :count].tolist() for column in columns)
        trees[row] = (
            int(snapshot.requests[row]),
            Tree(int(out.base[row]), tokens, parents, chances),
        )
    return trees


def serve(
    records: Sequence[Record], drafter: Drafter, server: Server, rows: int
) -> tuple[float, float]:
    """Serves the requests, `rows` at a time, until one of these has no request.

    Returns tokens a second, and tokens a row and step.
    """
    waiting = deque(
        (key, record) for key, record in enumerate(records) if len(record.output_ids) >= 2
    )
    rows = min(rows, len(waiting))
    running: dict[int, Running] = {}
    now, emitted_tokens, row_steps = 0.0, 0, 0
    drafts: list[list[int]] = []
    while len(running) + len(waiting) >= rows:
        for row in sorted(set(range(rows)) - running.keys()):
            key, record = waiting.popleft()
            text = np.concatenate([record.prompt_ids, record.output_ids])
            prompt = len(record.prompt_ids)
            running[row] = Running(key, prompt, text, prompt + 1)
            drafter.start(row, running[row], now)
        drafts, waited = drafter.draft(running, now)
        tokens, one_graph = drafter.verified(drafts)
        now += waited + server.step(tokens, one_graph=one_graph)
        if drafter.synchronous:
            now += server.host(len(running))
        emitted = []
        for each, draft in zip(running.values(), drafts, strict=True):
            emitted.append(each.accept(draft))
            each.length += len(emitted[-1])
        row_steps += len(running)
        emitted_tokens += sum(map(len, emitted))
        now += drafter.observe(running, emitted, [len(draft) for draft in drafts], now)
        for row, each in list(running.items()):
            if each.has_ended:
                drafter.end(row, each, now)
                del running[row]
    return emitted_tokens * server.weight / now * 1e3, emitted_tokens / max(1, row_steps)


@dataclass
class Learned:
    """What adapters have learned of a server's steps."""

    times: StepTimes
    latency: StepLatency

    @classmethod
    def nothing(cls) -> Learned:
        return cls(StepTimes("cuda", SIZES, even_graphs=True), StepLatency("cuda", SIZES))


def drafters(
    server: Server, rows: int, longest: int, learned: Learned
) -> Iterator[tuple[str, Drafter]]:
    lengths = default_lengths(PADDED)
    yield "plain", Drafter(server)
    yield "plain, synchronous", Synchronous(server)
    yield "ngram_gpu", NgramGpu(server)
    yield "suffix", Suffix(server, longest)
    yield "fastdraft v1", FastdraftV1(server, learned.times)
    yield "fastdraft v2, ragged", FastdraftV2(server, rows)
    yield "fastdraft v2, padded", FastdraftV2Padded(server, rows, lengths, learned.latency)
    yield "fastdraft v2, launched", FastdraftV2(server, rows, launched=True)


def measure(families: Mapping[str, Sequence[Record]], options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for at_once in options.at_once:
        replayed = min(at_once, options.rows)
        steps = Stairs(options.base_ms, options.token_ms, options.pieces, 0.0, 0)
        server = Server(steps, options.async_gain, at_once // replayed)
        learned = Learned.nothing()
        for family, records in families.items():
            longest = max(len(each.prompt_ids) + len(each.output_ids) for each in records)
            row: Row = {"at_once": at_once, "family": family}
            for name, drafter in drafters(server, replayed, longest, learned):
                if options.drafters and name not in ("plain", *options.drafters):
                    continue
                speed, per_step = serve(records, drafter, server, replayed)
                row[name] = {"tokens_per_second": round(speed, 1), "tokens": round(per_step, 3)}
                if isinstance(drafter, FastdraftV2):
                    known = [age for age in drafter.ages if age >= 0]
                    row[name] |= {
                        "mean_age_tokens": round(float(np.mean(known or [0])), 2),
                        "without_tree": round(1 - len(known) / len(drafter.ages), 3),
                        "faults": drafter.drafter.counts.faults,
                        "thread_us_per_row": round(
                            drafter.busy_ms * 1e3 / server.weight / len(drafter.ages), 1
                        ),
                    }
            rows.append(row)
            print(f"... {at_once}: {family}", file=sys.stderr, flush=True)
    return rows


def report(rows: Sequence[Row]) -> list[Row]:
    """Prints and returns geometric means over the families, by requests at once."""
    totals: list[Row] = []
    names = [name for name in rows[0] if isinstance(rows[0][name], dict)]
    for at_once in dict.fromkeys(row["at_once"] for row in rows):
        of = [row for row in rows if row["at_once"] == at_once]
        plain = geometric_mean(row["plain"]["tokens_per_second"] for row in of)
        for name in names:
            relative = {
                row["family"]: row[name]["tokens_per_second"] / row["plain"]["tokens_per_second"]
                for row in of
            }
            worst = min(relative, key=lambda family: relative[family])
            mean = geometric_mean(row[name]["tokens_per_second"] for row in of)
            totals.append(
                {
                    "at_once": at_once,
                    "drafter": name,
                    "tokens_per_second": mean,
                    "of_plain": mean / plain,
                    "worst": relative[worst],
                    "worst_family": worst,
                    "tokens_per_step": geometric_mean(row[name]["tokens"] for row in of),
                }
            )
    show(
        "Geometric means over the families",
        {
            "at once": "at_once",
            "drafter": "drafter",
            "tokens/s": "tokens_per_second",
            "of plain": "of_plain",
            "worst": "worst",
            "family": "worst_family",
            "tokens\na step": "tokens_per_step",
        },
        totals,
        digits=3,
    )
    return totals


def main() -> None:
    made = parser(__doc__)
    add_requests(made, most=64)
    add_server(made)
    made.add_argument("--most-tokens", type=int, default=150, help="of an answer")
    made.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    made.add_argument("--rows", type=int, default=16, help="the most that are replayed at once")
    made.add_argument("--pieces", type=float, default=1.12, help="times a step without a graph")
    made.add_argument(
        "--async-gain", type=float, default=0.2, help="what a step gains by asynchronous scheduling"
    )
    made.add_argument("--drafters", nargs="*", default=[], help="names; all of them by default")
    options = made.parse_args()
    for failure in baselines.ensure():
        raise SystemExit(f"suffix decoding is not available: {failure}")
    results = about(**{k: v for k, v in vars(options).items() if k not in ("json", "data")})
    families = {
        name: [
            replace(record, output_ids=record.output_ids[: options.most_tokens])
            for record in records[: options.most]
        ]
        for name, records in recorded_families(options.data, names=options.family).items()
    }
    rows = measure(families, options)
    finish(options, {**results, "totals": report(rows), "rows": rows})


if __name__ == "__main__":
    main()
