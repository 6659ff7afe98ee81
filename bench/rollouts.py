"""A batch of rollouts with long tails: when the last one is done, with and without weights.

All recorded requests of a family start at once, as the rollouts of a step of reinforcement
learning, and nobody goes on before the longest is done. A step of the target takes `--base-ms`, and
`--token-ms` for each token in it. Compared are, as parts of the time without drafts: drafts with
all rows alike, and with each row weighed by what is left of it to the power `--power`, scaled to
the mean. What is left is known to the modelled host; a real one estimates it.

    python bench/rollouts.py --data FOLDER --json bench/results/rollouts.json
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import geometric_mean
from typing import Any

import numpy as np

from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.replay import Record
from fastdraft.replay.trace import accepted_prefix
from harness import Row, about, add_requests, add_server, finish, parser, recorded_families, show


def makespan(records: Sequence[Record], drafts: bool, power: float, options: Any) -> float:
    """The milliseconds until the last request is done."""
    stands_for = options.at_once / len(records)
    engine = Engine(DraftConfig(lookahead=16), datastores=[Datastore()])
    texts = [
        np.concatenate([record.prompt_ids, record.output_ids[: options.most_tokens]])
        for record in records
    ]
    places = [len(record.prompt_ids) for record in records]
    ids = [engine.add_request(record.prompt_ids) for record in records]
    rows = list(range(len(records)))
    took = 0.0
    while rows:
        left = np.array([len(texts[row]) - places[row] for row in rows])
        sizes = np.arange(1, len(rows) * 17 + 1)
        cost = options.base_ms + options.token_ms * stands_for * sizes
        drafted: list[list[int]] = [[] for _ in rows]
        if drafts:
            weights = (left / left.mean()) ** power
            drafted = engine.propose_batch(
                [ids[row] for row in rows], limits=left - 1, cost=cost, weights=weights
            ).tolist()
        emitted = []
        for row, draft in zip(rows, drafted, strict=True):
            output = texts[row][places[row] : places[row] + len(draft) + 1].tolist()
            emitted.append(output[: accepted_prefix(draft, output) + 1])
            places[row] += len(emitted[-1])
        took += float(cost[len(rows) + sum(map(len, drafted)) - 1])
        offsets = np.cumsum([0, *map(len, emitted)])
        engine.observe_batch([ids[row] for row in rows], list(chain(*emitted)), offsets)
        for row in [row for row in rows if places[row] >= len(texts[row])]:
            engine.finish(ids[row])
            rows.remove(row)
    return took


def main() -> None:
    options_of = parser(__doc__)
    add = options_of.add_argument
    add_requests(options_of, most=16)
    add_server(options_of)
    add("--most-tokens", type=int, default=400, help="of an answer")
    add("--at-once", type=int, default=256, help="requests that those of a family stand for")
    add("--power", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0])
    options = options_of.parse_args()
    found = about()
    rows: list[Row] = []
    for name, records in recorded_families(options.data, names=options.family).items():
        known = [each for each in records[: options.most] if len(each.output_ids) > 1]
        plain = makespan(known, False, 0.0, options)
        lengths = [min(len(each.output_ids), options.most_tokens) for each in known]
        row: Row = {"family": name, "longest to mean": max(lengths) / float(np.mean(lengths))}
        for power in options.power:
            row[f"power {power:g}"] = makespan(known, True, power, options) / plain
        rows.append(row)
    mean: Row = {"family": "geometric mean"}
    for key in list(rows[0])[1:]:
        mean[key] = geometric_mean(row[key] for row in rows)
    show("the time until the last is done, times that without drafts", None, [*rows, mean])
    finish(options, {**found, "rows": rows, "mean": mean})


if __name__ == "__main__":
    main()
