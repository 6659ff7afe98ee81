"""What a fleet's replicas gain from sharing their memories, by how often they refresh: a replay.

Recorded requests of all families arrive one after another, at an assumed rate, and are routed to
replicas at random, or by a hash of the first tokens of their prompts. Each replica has a live store
of its own. What a request said is published, built and followed, each once a refresh: until then no
other replica drafts from it. The engine is the real one. It is one for all replicas, so that they
differ by their text alone, and not by what they have learned of acceptance.

- none: no memory of earlier requests.
- shared: one memory that all requests enter at once, as with one replica.
- apart: a memory for each replica, and nothing published.

Modelled speed is tokens / (steps + token cost * drafted), the geometric mean of the families. Kept
is the part of the shared memory's gain over none. A request takes no time here: it arrives, is
answered and has ended.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.replay import Record
from harness import Row, about, finish, parser, recorded_families, show

LOOKAHEAD = 16
PREFIX = 64
"""The tokens by whose hash requests are routed: those that have them in common go together."""
REPLICAS = (1, 4, 16, 64, 256)
REFRESHES = (1.0, 10.0, 60.0, 600.0, 3600.0)


@dataclass(frozen=True)
class Arrival:
    """A request that comes to the fleet."""

    seconds: float
    family: str
    record: Record


@dataclass(frozen=True)
class Fleet:
    """Who remembers what.

    Attributes:
        replicas: How many there are; 0 remember nothing.
        routing: "random" or "prefix".
        refresh: The seconds between two times that a replica publishes, that stores are built, and
            that replicas look for them; infinite shares nothing.
    """

    replicas: int = 1
    routing: str = "random"
    refresh: float = math.inf


def sample(records: Sequence[Record], tokens: int) -> list[Record]:
    """Requests at even distances with about so many output tokens together."""
    total = sum(len(record.output_ids) for record in records)
    count = min(len(records), max(1, round(len(records) * tokens / max(total, 1))))
    return [records[i * len(records) // count] for i in range(count)]


def arrivals(families: Mapping[str, Sequence[Record]], rate: float) -> list[Arrival]:
    """All requests, each family spread over the whole time, at even distances."""
    spread = sorted(
        ((place + 0.5) / len(records), name, place)
        for name, records in families.items()
        for place in range(len(records))
    )
    return [
        Arrival(number / rate, name, families[name][place])
        for number, (_, name, place) in enumerate(spread)
    ]


def visible_at(seconds: float, refresh: float, phases: Sequence[float]) -> float:
    """When text is read that was said at a time, after ticks of such phases, one after another."""
    for phase in phases:
        seconds = (math.floor(seconds / refresh - phase) + 1 + phase) * refresh
    return seconds


def replay(requests: Sequence[Arrival], fleet: Fleet, token_cost: float) -> Row:
    """The modelled speed of a fleet, and of its families."""
    chance = random.Random(0)
    engine = Engine(DraftConfig(lookahead=LOOKAHEAD, token_cost=token_cost))
    own = [Datastore(max_bytes=1 << 28) for _ in range(fleet.replicas)]
    published = Datastore(max_bytes=1 << 28)
    publishing = [chance.random() for _ in own]
    building, following = chance.random(), chance.random()
    waiting: list[tuple[float, int, list[int], int]] = []
    counts: dict[str, list[float]] = {}
    for number, arrival in enumerate(requests):
        while waiting and waiting[0][0] <= arrival.seconds:
            _, _, said, size = heapq.heappop(waiting)
            published.add(said, prompt_size=size)
        prompt, output = arrival.record.prompt_ids, arrival.record.output_ids.tolist()
        stores: list[Datastore] = []
        place = 0
        if own:
            key = zlib.crc32(prompt[:PREFIX].tobytes())
            place = (key if fleet.routing == "prefix" else chance.getrandbits(32)) % len(own)
            stores = [own[place]]
        text = np.concatenate([prompt, arrival.record.output_ids])
        request = engine.add_request(
            text[: len(prompt) + 1],
            datastores=stores,
            read_only=[published] if len(published) else [],
        )
        count = counts.setdefault(arrival.family, [0.0, 0.0, 0.0])
        done = 1
        while done < len(output):
            draft = engine.propose(request).tolist()
            accepted = 0
            for token, said_token in zip(draft, output[done:], strict=False):
                if token != said_token:
                    break
                accepted += 1
            emitted = output[done : done + accepted + 1]
            engine.observe(request, emitted)
            done += len(emitted)
            count[0] += len(emitted)
            count[1] += 1
            count[2] += len(draft)
        engine.finish(request)
        if own and math.isfinite(fleet.refresh):
            phases = (publishing[place], building, following)
            at = visible_at(arrival.seconds, fleet.refresh, phases)
            heapq.heappush(waiting, (at, number, text.tolist(), len(prompt)))
    families = {
        name: tokens / (steps + token_cost * drafted)
        for name, (tokens, steps, drafted) in counts.items()
        if steps
    }
    return {"speed": geometric_mean(families.values()), "families": families}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--data", type=Path, required=True, help="folder of recorded requests")
    made.add_argument("--tokens", type=int, default=2500, help="of output, for each family")
    made.add_argument("--rate", type=float, default=0.1, help="requests a second, of the fleet")
    made.add_argument("--token-cost", type=float, default=0.02)
    options = made.parse_args()
    everything = recorded_families(options.data)
    families = {name: sample(records, options.tokens) for name, records in everything.items()}
    requests = arrivals(families, options.rate)
    results = about(
        tokens_a_family=options.tokens,
        requests=len(requests),
        of_requests=sum(map(len, everything.values())),
        requests_a_second=options.rate,
        hours=requests[-1].seconds / 3600,
        token_cost=options.token_cost,
    )

    def measure(fleet: Fleet, title: str) -> Row:
        print(f"... {title}", file=sys.stderr, flush=True)
        return replay(requests, fleet, options.token_cost)

    none = measure(Fleet(0), "none")
    shared = measure(Fleet(1), "shared")
    rows: list[Row] = []
    for count in REPLICAS:
        for routing in ("random", "prefix") if count > 1 else ("random",):
            row: Row = {"replicas": count, "routing": routing, "speed": {}, "kept": {}}
            for refresh in (math.inf, *REFRESHES):
                title = "apart" if math.isinf(refresh) else f"{refresh:g} s"
                found = measure(Fleet(count, routing, refresh), f"{count} {routing} {title}")
                row["speed"][title] = found["speed"]
                row["kept"][title] = (found["speed"] - none["speed"]) / (
                    shared["speed"] - none["speed"]
                )
            rows.append(row)
    show("Modelled speed", None, [{"none": none["speed"], "shared": shared["speed"]}], digits=3)
    for figure in ("speed", "kept"):
        columns: dict[str, object] = {"replicas": "replicas", "routing": "routing"}
        columns |= {title: (figure, title) for title in rows[0]["speed"]}
        show(f"{figure}, by refresh", columns, rows, digits=3)  # type: ignore[arg-type]
    finish(options, {**results, "none": none, "shared": shared, "rows": rows})


if __name__ == "__main__":
    main()
