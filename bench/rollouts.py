"""Rollouts of reinforcement learning: several samples of each prompt, every epoch, with long tails.

All rows of a step start together, and nobody goes on before the longest is done. A step of the
target takes `--base-ms`, and `--token-ms` for each token in it. Measured is what the second epoch
takes, after the first one was remembered: emitted tokens a step of a row, and how much of the time
without drafts is saved, in percent.

    python bench/rollouts.py --data FILE --json bench/results/rollouts.json

FILE has a JSON object in each line: `group`, `epoch` (1 or 2), `prompt` and `output`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import baselines
from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.demo import ensure_model
from fastdraft.replay.peers import ArcticSuffix, PeerRequest, Unavailable
from fastdraft.replay.tokenizer import TextTokenizer
from fastdraft.replay.trace import accepted_prefix
from harness import Row, about, add_server, finish, parser, show

LOOKAHEAD = DraftConfig().lookahead
# A sample of so many tokens is one that found no end.
ENDLESS = 2000


class Sample(NamedTuple):
    group: int
    epoch: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]


class Fastdraft:
    """The engine, over one live store or none."""

    def __init__(self, store: Datastore | None = None) -> None:
        stores = [] if store is None else [store]
        self._engine = Engine(DraftConfig(), datastores=stores)
        self._ids: dict[int, int] = {}

    def add(self, row: int, prompt: NDArray[np.int32]) -> None:
        self._ids[row] = self._engine.add_request(prompt)

    def propose(
        self, rows: Sequence[int], left: Sequence[int], cost: NDArray[np.float64]
    ) -> list[list[int]]:
        ids = [self._ids[row] for row in rows]
        limits = np.array(left, np.int32) - 1
        return self._engine.propose_batch(ids, limits=limits, cost=cost).tolist()

    def observe(self, rows: Sequence[int], emitted: Sequence[list[int]]) -> None:
        offsets = np.cumsum([0, *map(len, emitted)])
        self._engine.observe_batch([self._ids[row] for row in rows], [*chain(*emitted)], offsets)

    def finish(self, row: int) -> None:
        self._engine.finish(self._ids.pop(row))


class Arctic:
    """Arctic's suffix decoding with its defaults, as vLLM drives it."""

    def __init__(self) -> None:
        self._peer = ArcticSuffix(ArcticSuffix.DEPTH, 8192)
        self._requests: dict[int, PeerRequest] = {}

    def add(self, row: int, prompt: NDArray[np.int32]) -> None:
        self._requests[row] = self._peer.start(prompt)

    def propose(
        self, rows: Sequence[int], left: Sequence[int], cost: NDArray[np.float64]
    ) -> list[list[int]]:
        requests = [self._requests[row] for row in rows]
        return [
            each.tokens(each.propose(each.argument))[: most - 1]
            for each, most in zip(requests, left, strict=True)
        ]

    def observe(self, rows: Sequence[int], emitted: Sequence[list[int]]) -> None:
        for row, tokens in zip(rows, emitted, strict=True):
            self._requests[row].observe(tokens)

    def finish(self, row: int) -> None:
        self._requests.pop(row).finish()


class Took(NamedTuple):
    """The time of a step, its tokens, and the forwards of all rows."""

    plain: float
    drafted: float
    tokens: int
    forwards: int

    def __add__(self, other: object) -> Took:
        assert isinstance(other, Took)
        a, b = self, other
        return Took(
            a.plain + b.plain,
            a.drafted + b.drafted,
            a.tokens + b.tokens,
            a.forwards + b.forwards,
        )


NOTHING = Took(0.0, 0.0, 0, 0)


def step(
    side: Fastdraft | Arctic, samples: Sequence[Sample], count: int, options: argparse.Namespace
) -> Took:
    """A step of samples that stand for `count` rows."""
    stands_for = count / len(samples)
    sizes = np.arange(1, len(samples) * (LOOKAHEAD + 1) + 1)
    cost = options.base_ms + options.token_ms * stands_for * sizes
    places = [0] * len(samples)
    for row, sample in enumerate(samples):
        side.add(row, sample.prompt)
    rows = list(range(len(samples)))
    took, forwards = 0.0, 0
    while rows:
        left = [len(samples[row].output) - places[row] for row in rows]
        drafts = side.propose(rows, left, cost)
        took += float(cost[len(rows) + sum(map(len, drafts)) - 1])
        forwards += len(rows)
        emitted = []
        for row, draft in zip(rows, drafts, strict=True):
            output = samples[row].output[places[row] : places[row] + len(draft) + 1].tolist()
            emitted.append(output[: accepted_prefix(draft, output) + 1])
            places[row] += len(emitted[-1])
        side.observe(rows, emitted)
        ended = [row for row in rows if places[row] >= len(samples[row].output)]
        for row in ended:
            side.finish(row)
        rows = [row for row in rows if row not in ended]
    lengths = np.array([len(sample.output) for sample in samples])
    running = (lengths[:, None] > np.arange(lengths.max())).sum(0)
    return Took(float(cost[running - 1].sum()), took, int(lengths.sum()), forwards)


def batches(samples: Iterable[Sample], epoch: int, count: int) -> Iterator[list[Sample]]:
    """Whole groups of an epoch, so many samples at once."""
    groups = defaultdict(list)
    for sample in samples:
        if sample.epoch == epoch:
            groups[sample.group].append(sample)
    batch: list[Sample] = []
    for group in groups.values():
        if batch and len(batch) + len(group) > count:
            yield batch
            batch = []
        batch += group
    if batch:
        yield batch


def add_all(store: Datastore, samples: Iterable[Sample]) -> None:
    for sample in samples:
        text = np.concatenate([sample.prompt, sample.output])
        store.add(text, prompt_size=len(sample.prompt))


Run = Callable[[Sequence[Sample], int, argparse.Namespace], Took]


def after(make: Callable[[], Fastdraft | Arctic], *, warm: bool = True) -> Run:
    """The second epoch of one side, after the first one if `warm`."""

    def run(samples: Sequence[Sample], count: int, options: argparse.Namespace) -> Took:
        side, took = make(), NOTHING
        for epoch in (1, 2) if warm else (2,):
            for batch in batches(samples, epoch, count):
                of_step = step(side, batch, count, options)
                took = took + of_step if epoch == 2 else took
        return took

    return run


def replicas(number: int, *, share: bool) -> Run:
    """Replicas that prompts come to at random, each with rows of its own; after each epoch they
    give each other what was sampled, if they `share`."""

    def run(samples: Sequence[Sample], count: int, options: argparse.Namespace) -> Took:
        draw, took = random.Random(1), NOTHING
        stores = [Datastore(max_bytes=options.memory_bytes) for _ in range(number)]
        sides = [Fastdraft(store) for store in stores]
        for epoch in (1, 2):
            place = {group: draw.randrange(number) for group in {each.group for each in samples}}
            for at, side in enumerate(sides):
                own = [each for each in samples if place[each.group] == at]
                for batch in batches(own, epoch, count):
                    of_step = step(side, batch, count, options)
                    took = took + of_step if epoch == 2 else took
            for at, store in enumerate(stores if share else ()):
                add_all(store, (e for e in samples if e.epoch == epoch and place[e.group] != at))
        return took

    return run


def half(newest: int | None) -> Run:
    """A memory of half of the first epoch: as the store fills it, or of each prompt its `newest`
    samples."""

    def run(samples: Sequence[Sample], count: int, options: argparse.Namespace) -> Took:
        first = [each for each in samples if each.epoch == 1]
        whole, store = (Datastore(max_bytes=options.memory_bytes) for _ in range(2))
        add_all(whole, first)
        if newest is None:
            # What runs takes none of it.
            store = Datastore(max_bytes=whole.bytes // 2)
            add_all(store, first)
            store.limit(options.memory_bytes)
        else:
            kept = defaultdict(list)
            for each in first:
                kept[each.prompt.tobytes()].append(each)
            add_all(store, (each for own in kept.values() for each in own[-newest:]))
        side, took = Fastdraft(store), NOTHING
        for batch in batches(samples, 2, count):
            took += step(side, batch, count, options)
        return took

    return run


def read(path: Path) -> list[Sample]:
    with path.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    encode = TextTokenizer(ensure_model).encode
    prompts, outputs = (encode([each[name] for each in found]) for name in ("prompt", "output"))
    return [
        Sample(each["group"], each["epoch"], np.array(prompt, np.int32), np.array(output, np.int32))
        for each, prompt, output in zip(found, prompts, outputs, strict=True)
    ]


def without_repeats(samples: Sequence[Sample]) -> list[Sample]:
    """The same lengths, of tokens drawn as often as they come, in no order: nothing is gained."""
    drawn = np.random.default_rng(1)
    pool = np.concatenate([each.output for each in samples])
    return [
        each._replace(output=drawn.choice(pool, len(each.output)).astype(np.int32))
        for each in samples
    ]


def main() -> None:
    options_of = parser(__doc__)
    add_server(options_of)
    options_of.add_argument("--data", type=Path, required=True, metavar="FILE")
    options_of.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    options_of.add_argument("--memory-bytes", type=int, default=1 << 30)
    options = options_of.parse_args()
    found = about()
    for failure in baselines.ensure():
        print(failure)

    def store() -> Datastore:
        return Datastore(max_bytes=options.memory_bytes)

    sides: dict[str, Run] = {
        "own text": after(Fastdraft),
        "+ siblings": after(lambda: Fastdraft(store()), warm=False),
        "+ epoch before": after(lambda: Fastdraft(store())),
        "Arctic, same memory": after(Arctic),
        **{
            f"{count} replicas{', shared' * share}": replicas(count, share=share)
            for count in (2, 8)
            for share in (False, True)
        },
        "half of the memory": half(None),
        "half, 2 of each prompt": half(2),
    }
    samples = read(options.data)
    endless = {each.group for each in samples if len(each.output) > ENDLESS}
    data = {
        "all": samples,
        "ending": [each for each in samples if each.group not in endless],
        "no repeats": without_repeats([each for each in samples if each.group not in endless]),
    }
    rows: list[Row] = []
    for name, run in sides.items():
        row: Row = {"drafts from": name}
        for what, of_data in data.items():
            for count in options.rows:
                try:
                    took = run(of_data, count, options)
                except Unavailable as reason:
                    print(reason)
                    continue
                if what == "ending":
                    row[f"tokens {count}"] = took.tokens / took.forwards
                row[f"{what} {count}"] = 100 * (1 - took.drafted / took.plain)
        rows.append(row)
        print(row, flush=True)
    show("tokens a step, and time saved in the second epoch, percent", None, rows)
    finish(options, {**found, "rows": rows})


if __name__ == "__main__":
    main()
