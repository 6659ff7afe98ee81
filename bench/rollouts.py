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
import heapq
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import baselines
from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.demo import ensure_model
from fastdraft.replay.peers import ArcticSuffix, EnginePeer, Peer, PeerRequest, Unavailable
from fastdraft.replay.tokenizer import TextTokenizer
from fastdraft.replay.trace import accepted_prefix
from fastdraft.serving.routing import choose_server
from harness import Row, about, finish, parser, show

LOOKAHEAD = DraftConfig().lookahead
# A sample of so many tokens is one that found no end.
ENDLESS = 2000
REPLICAS = 8
# Orders in which prompts come to replicas.
DRAWS = 8
# That of `choose_server`.
SPREAD = 1.25


class Sample(NamedTuple):
    group: int
    epoch: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]


class Took(NamedTuple):
    """The time of a step without and with drafts, its tokens, and the forwards of all rows."""

    plain: float
    drafted: float
    tokens: int
    forwards: int


def added(steps: Iterable[Took]) -> Took:
    return Took(*map(sum, zip(*steps, strict=True)))


def fastdraft(
    store: Datastore | None = None, objective: Literal["tokens", "last"] = "tokens"
) -> Peer:
    """The engine, over one live store or none."""
    config = DraftConfig(objective=objective)
    return EnginePeer(Engine(config, datastores=[] if store is None else [store]))


def arctic() -> Peer:
    """Arctic's suffix decoding with its defaults, as vLLM drives it."""
    return ArcticSuffix(ArcticSuffix.DEPTH, 8192)


def propose(
    peer: Peer, requests: Sequence[PeerRequest], left: Sequence[int], cost: NDArray[np.float64]
) -> list[list[int]]:
    """A draft for each row that has so many tokens left; the engine weighs what they cost."""
    if isinstance(peer, EnginePeer):
        ids, limits = [each.argument for each in requests], np.array(left, np.int32) - 1
        return peer.engine.propose_batch(ids, limits=limits, cost=cost).tolist()
    return [
        each.tokens(each.propose(each.argument))[: most - 1]
        for each, most in zip(requests, left, strict=True)
    ]


def plain(samples: Sequence[Sample], stands_for: float, options: argparse.Namespace) -> float:
    """The milliseconds of a step without drafts."""
    lengths = np.array([len(sample.output) for sample in samples])
    running = (lengths[:, None] > np.arange(lengths.max())).sum(0)
    return float((options.base_ms + options.token_ms * stands_for * running).sum())


def forwards(
    peer: Peer, samples: Sequence[Sample], stands_for: float, options: argparse.Namespace
) -> Iterator[tuple[float, int]]:
    """Decodes samples that each stand for so many rows: the milliseconds and rows of each
    forward."""
    sizes = np.arange(1, len(samples) * (LOOKAHEAD + 1) + 1)
    cost = options.base_ms + options.token_ms * stands_for * sizes
    # What is left to say, and who drafts it.
    rows = [(sample.output.tolist(), peer.start(sample.prompt)) for sample in samples]
    while rows:
        left = [len(output) for output, _ in rows]
        drafts = propose(peer, [request for _, request in rows], left, cost)
        took = float(cost[len(rows) + sum(map(len, drafts)) - 1]), len(rows)
        going = []
        for (output, request), draft in zip(rows, drafts, strict=True):
            count = accepted_prefix(draft, output) + 1
            request.observe(output[:count])
            if count < len(output):
                going.append((output[count:], request))
            else:
                request.finish()
        yield took
        rows = going


def tokens_of(samples: Sequence[Sample]) -> int:
    return sum(len(sample.output) for sample in samples)


def step(peer: Peer, samples: Sequence[Sample], count: int, options: argparse.Namespace) -> Took:
    """A step of samples that stand for `count` rows."""
    stands_for = count / len(samples)
    ms, rows = map(sum, zip(*forwards(peer, samples, stands_for, options), strict=True))
    return Took(plain(samples, stands_for, options), ms, tokens_of(samples), int(rows))


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


def after(make: Callable[[], Peer], *, warm: bool = True) -> Run:
    """The second epoch of one side, after the first one if `warm`."""

    def run(samples: Sequence[Sample], count: int, options: argparse.Namespace) -> Took:
        peer = make()
        for batch in batches(samples, 1, count) if warm else ():
            step(peer, batch, count, options)
        return added(step(peer, batch, count, options) for batch in batches(samples, 2, count))

    return run


def replicas(*, spread: float = 1.0, shared: str = "nothing") -> Run:
    """`REPLICAS` with `count` rows each, whose step ends with the last of them: means of several
    orders in which prompts may come.

    spread: 1 sends each request to a replica with the fewest; more those of a prompt to one.
    shared: "nothing"; "epochs", what they said until the last one; or "all", one memory.
    """

    def run(samples: Sequence[Sample], count: int, options: argparse.Namespace) -> Took:
        return added(draw(samples, count, options, seed) for seed in range(DRAWS))

    def draw(samples: Sequence[Sample], count: int, options: argparse.Namespace, seed: int) -> Took:
        random_of_draw = random.Random(seed)
        names = [f"{seed}:{at}" for at in range(REPLICAS)]
        stores = [Datastore(max_bytes=options.memory_bytes) for _ in names]
        peers = [fastdraft(stores[0 if shared == "all" else at]) for at in range(REPLICAS)]
        took = Took(0.0, 0.0, 0, 0)
        for epoch in (1, 2):
            of_epoch = [each for each in samples if each.epoch == epoch]
            stands_for = REPLICAS * count / len(of_epoch)
            balanced = places = placed(of_epoch, names, 1.0, random_of_draw)
            if spread > 1:
                places = placed(of_epoch, names, spread, random_of_draw)
            running = [
                forwards(peer, place, stands_for, options)
                for peer, place in zip(peers, places, strict=True)
            ]
            clocks = [(0.0, at) for at in range(REPLICAS)]
            drafted, rows = 0.0, 0
            while clocks:
                now, at = heapq.heappop(clocks)
                drafted = max(drafted, now)
                for ms, of_forward in islice(running[at], 1):
                    heapq.heappush(clocks, (now + ms, at))
                    rows += of_forward
            if shared == "epochs":
                for store in stores:  # which leaves out what it has
                    add_all(store, of_epoch)
            undrafted = max(plain(place, stands_for, options) for place in balanced)
            took = Took(undrafted, drafted, tokens_of(of_epoch), rows)
        return took

    return run


def placed(
    samples: Sequence[Sample], names: Sequence[str], spread: float, draw: random.Random
) -> list[list[Sample]]:
    """The samples of each replica. Prompts come in any order, those of eight workers in turns."""
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    order = [*groups.values()]
    draw.shuffle(order)
    loads = dict.fromkeys(names, 0)
    found: dict[str, list[Sample]] = {name: [] for name in names}
    workers = [[*chain(*order[at::8])] for at in range(8)]
    for sample in filter(None, chain(*zip_longest(*workers))):
        if spread == 1:
            least = min(loads.values())
            name = draw.choice([name for name, load in loads.items() if load == least])
        else:
            name = choose_server(sample.prompt, loads, spread=spread)
        loads[name] += 1
        found[name].append(sample)
    return [*found.values()]


def half(samples: Sequence[Sample], count: int, options: argparse.Namespace) -> Took:
    """The second epoch with a memory of half of the first one, as the store fills it."""
    first = [each for each in samples if each.epoch == 1]
    whole = Datastore(max_bytes=options.memory_bytes)
    add_all(whole, first)
    # What runs takes none of it.
    store = Datastore(max_bytes=whole.bytes // 2)
    add_all(store, first)
    store.limit(options.memory_bytes)
    peer = fastdraft(store)
    return added(step(peer, batch, count, options) for batch in batches(samples, 2, count))


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
    # By default published figures of an H100 with an 8 B model.
    options_of.add_argument("--base-ms", type=float, default=7.1, help="of a step")
    options_of.add_argument("--token-ms", type=float, default=0.021, help="of each token in it")
    options_of.add_argument("--data", type=Path, required=True, metavar="FILE")
    options_of.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    options_of.add_argument("--memory-bytes", type=int, default=1 << 30)
    options_of.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these rows alone"
    )
    options = options_of.parse_args()
    found = about()
    for failure in baselines.ensure():
        print(failure)

    def store() -> Datastore:
        return Datastore(max_bytes=options.memory_bytes)

    sides: dict[str, Run] = {
        "own text": after(fastdraft),
        "+ siblings": after(lambda: fastdraft(store()), warm=False),
        "+ epoch before": after(lambda: fastdraft(store())),
        "own text, for the last row": after(lambda: fastdraft(objective="last")),
        "+ epoch before, for the last row": after(lambda: fastdraft(store(), "last")),
        "Arctic, same memory": after(arctic),
        "8 replicas": replicas(),
        "8 replicas, by prompt": replicas(spread=SPREAD),
        "8 replicas, shared": replicas(shared="epochs"),
        "8 replicas, one memory": replicas(shared="all"),
        "half of the memory": half,
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
        if options.only and name not in options.only:
            continue
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
