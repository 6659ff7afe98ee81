"""The index's speed: append and propose beside the peers, over contexts of real text.

A request is begun with a prompt of the context's length and then decodes the text as it goes on,
one token a step: append the token, propose the next draft. Each call is timed on its own, at
positions that all differ, with its Python call included and the clock's own cost taken off. Every
drafter sees the same tokens in the same run. Of `--repeats` passes the least p50 and p99 count:
other processes only ever add time.

    python bench/index.py --json results.json

With --rounds, figures are ratios: the engine and Arctic's suffix decoding take turns, so that a
busy machine slows both alike. Two builds of fastdraft are compared by bench/instructions.py.

    python bench/index.py --rounds 20
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# One thread a library: set before any of them is loaded.
os.environ.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1")

import numpy as np

import baselines
import corpus
import harness
from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.replay import PEERS, EnginePeer, Peer, Unavailable
from harness import Row, percentiles

CONTEXTS = (1_000, 10_000, 100_000, 1_000_000)
STEPS = 2_000  # timed positions for each context
NUM_TOKENS = 10  # the longest draft of the peers
STORE_TOKENS = 10_000_000
DOCUMENT = 2_000
BATCH = 64
BATCH_STEPS = 200

Make = Callable[[int], Peer]
"""Makes a drafter for requests of at most so many tokens."""


def makers() -> list[Make]:
    """The engine with its default configuration, then the peers."""
    peers: list[Make] = [partial(peer, NUM_TOKENS) for peer in PEERS.values()]
    return [lambda _: EnginePeer(Engine()), *peers]


def beside_store(text: np.ndarray) -> Make:
    """The engine with a store of its own of `STORE_TOKENS`."""
    return lambda _: EnginePeer(Engine(datastores=[filled_datastore(text)]))


def filled_datastore(text: np.ndarray) -> Datastore:
    """A live store of `STORE_TOKENS`: documents of the text, an eighth of each replaced."""
    random = np.random.default_rng(0)
    store = Datastore()
    while len(store) < STORE_TOKENS:
        start = int(random.integers(0, len(text) - DOCUMENT))
        document = text[start : start + DOCUMENT].copy()
        replaced = random.random(DOCUMENT) < 1 / 8
        document[replaced] = text[random.integers(0, len(text), int(replaced.sum()))]
        store.add(document)
    return store


def starts(context: int) -> list[int]:
    """Where in the text the requests of a context begin: short ones are drawn from all over it."""
    count = max(4, min(20, 400_000 // context))
    return [index * 50_000 % 1_000_000 for index in range(count)]


def decode(make: Make, text: np.ndarray, context: int) -> Row:
    """One pass of `STEPS` steps, spread over the requests of this context."""
    places = starts(context)
    steps = STEPS // len(places)
    return decode_at(make(context + steps), text, context, places, steps)


def decode_at(peer: Peer, text: np.ndarray, context: int, places: list[int], steps: int) -> Row:
    """Requests that begin at these places of the text, one after another, `steps` steps each."""
    appends: list[int] = []
    proposals: list[int] = []
    prompt_ns = drafted = 0
    clock = time.perf_counter_ns
    for start in places:
        prompt = text[start : start + context]
        begin = clock()
        request = peer.start(prompt)
        prompt_ns += clock() - begin
        propose, observe = request.propose, request.observe
        for token in text[start + context : start + context + steps].tolist():
            emitted = [token]
            begin = clock()
            observe(emitted)
            appends.append(clock() - begin)
            argument = request.argument
            begin = clock()
            proposal = propose(argument)
            proposals.append(clock() - begin)
            drafted += len(request.tokens(proposal))
        request.finish()
    return {
        "prompt_ms": prompt_ns / len(places) / 1e6,
        "append": percentiles(appends),
        "propose": percentiles(proposals),
        "draft_tokens": drafted / len(proposals),
    }


def observe_eight(text: np.ndarray, context: int) -> Row:
    """Our own append as a step with accepted drafts makes it: eight tokens in one array."""
    times: list[int] = []
    places = starts(context)
    steps = STEPS // len(places)
    clock = time.perf_counter_ns
    for start in places:
        engine = Engine()
        request = engine.add_request(text[start : start + context])
        observe = engine.observe
        for step in range(steps):
            place = start + context + 8 * step
            emitted = text[place : place + 8]
            begin = clock()
            observe(request, emitted)
            times.append(clock() - begin)
    return {name: value / 8 for name, value in percentiles(times).items()}


def batch(text: np.ndarray, context: int, stores: Sequence[Datastore] = ()) -> Row:
    """propose_batch and observe_batch over 64 requests, us a request.

    A draft token's share of a forward over 64 rows is a 64th of what it is over one, so that the
    drafts are about as long as one request's.
    """
    engine = Engine(datastores=stores)
    places = [index * 15_000 % (len(text) - context - BATCH_STEPS) for index in range(BATCH)]
    requests = [engine.add_request(text[place : place + context]) for place in places]
    offsets = np.arange(BATCH + 1, dtype=np.int32)
    token_cost = DraftConfig().token_cost / BATCH
    following = np.stack([text[place + context :][:BATCH_STEPS] for place in places], axis=1)
    appends: list[int] = []
    proposals: list[int] = []
    drafted = 0
    clock = time.perf_counter_ns
    for emitted in np.ascontiguousarray(following):
        begin = clock()
        engine.observe_batch(requests, emitted, offsets)
        appends.append(clock() - begin)
        begin = clock()
        drafts = engine.propose_batch(requests, token_cost=token_cost)
        proposals.append(clock() - begin)
        drafted += len(drafts.token_ids)
    append, propose = percentiles(appends), percentiles(proposals)
    return {
        "append": {name: value / BATCH for name, value in append.items()},
        "propose": {name: value / BATCH for name, value in propose.items()},
        "draft_tokens": drafted / BATCH / BATCH_STEPS,
    }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def bytes_a_token(index: int, text: np.ndarray, context: int) -> float:
    """What a process grows by for a million tokens in requests of this context.

    `index` is that of the drafter among `makers`; to be called in a process of its own. A peer that
    keeps no index grows by its copy of the tokens.
    """
    if index > 0:
        baselines.ensure()
    peer = makers()[index](context)
    warm = peer.start(text[:context])
    warm.propose(warm.argument)
    gc.collect()
    before = resident_bytes()
    count = max(1, 1_000_000 // context)
    requests = [peer.start(text[index * 50 :][:context]) for index in range(count)]
    for request in requests:
        request.propose(request.argument)
    return (resident_bytes() - before) / context / count


def least(passes: list[Row]) -> Row:
    """Each number's least value over the passes."""
    return {
        name: least([row[name] for row in passes])
        if isinstance(value, dict)
        else min(row[name] for row in passes)
        for name, value in passes[0].items()
    }


def ratios(options: argparse.Namespace, text: np.ndarray) -> list[Row]:
    """The engine's figures beside Arctic's, which take turns in rounds of 200 steps."""
    steps = 200

    def figures(make: Make, context: int, number: int) -> Row:
        place = number * 50_000 % (len(text) - context - steps)
        row = decode_at(make(context + steps), text, context, [place], steps)
        append, propose = row["append"], row["propose"]
        found = {"prompt, ms": row["prompt_ms"]}
        for call, times in (("append", append), ("propose", propose)):
            found |= {f"{call} {name[:3]}, us": value for name, value in times.items()}
        return {**found, "append + propose p50, us": append["p50_us"] + propose["p50_us"]}

    comparisons: list[Row] = []
    for context in options.contexts:
        ways = {
            "fastdraft": partial(figures, makers()[0], context),
            "Arctic": partial(figures, partial(PEERS["arctic-local"], NUM_TOKENS), context),
        }
        rows = harness.interleave(ways, options.rounds)
        table = harness.compare(f"{context:,} tokens", rows)
        comparisons.append({"context": context, "rows": table})
    return comparisons


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE", help="the text, as bench/corpus.py writes it"
    )
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--rounds", type=int, help="print ratios to Arctic over n rounds in turn")
    options = parser.parse_args()

    longest = max(options.contexts)
    size = max(longest, 1_000_000) + 200_000
    if options.tokens is None:
        text = corpus.tokens(size)
    else:
        text = np.fromfile(options.tokens, dtype=np.int32)
        if len(text) < size:
            parser.error(f"{options.tokens} must hold {size} tokens, got {len(text)}")
    if not options.alone:
        for reason in baselines.ensure():
            print(reason, file=sys.stderr)
    report = harness.about(vocabulary=len(np.unique(text)))
    if options.rounds is not None:
        report["ratios"] = ratios(options, text)
        harness.finish(options, report)
        return
    rows: list[Row] = []
    report["rows"] = rows

    def add(name: str, context: int, row: Row, bytes_token: float | None = None) -> None:
        size = {} if bytes_token is None else {"bytes_a_token": bytes_token}
        rows.append({"name": name, "context": context, **size, **row})
        print(rows[-1], flush=True)

    def repeated(measure: Callable[..., Row], *operands: Any) -> Row:
        return least([measure(*operands) for _ in range(options.repeats)])

    titles = [EnginePeer.title, *(peer.title for peer in PEERS.values())]
    for index, make in enumerate(makers()[:1] if options.alone else makers()):
        title = titles[index]
        try:
            make(1)
        except Unavailable as reason:
            print(f"{'':9} {reason}")
            rows.append({"name": title, "unavailable": str(reason)})
            continue
        gc.collect()
        gc.freeze()
        for context in options.contexts:
            memory = harness.in_a_process(bytes_a_token, index, text, context)
            add(title, context, repeated(decode, make, text, context), memory)
            if index == 0 and context == 100_000:
                # Every pass has a store of its own: finished requests enter it.
                stored = repeated(decode, beside_store(text), text, context)
                add(f"{title}, {STORE_TOKENS // 10**6} M tokens stored", context, stored)
            if index == 0 and context <= 100_000:
                row = repeated(batch, text, context)
                row["observe_eight"] = repeated(observe_eight, text, context)
                add(f"{title}, batch of {BATCH}, a request", context, row)
    columns: dict[str, str | tuple[str, str]] = {"": "name", "context": "context"}
    columns |= {
        f"{call}, us\n{key}": (call, f"{key}_us")
        for call in ("append", "propose")
        for key in ("p50", "p99")
    }
    harness.show("Single calls", columns, rows)
    harness.finish(options, report)


if __name__ == "__main__":
    main()
