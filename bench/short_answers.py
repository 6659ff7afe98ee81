"""Lookups beside a draft model on single short answers, against the better one of the two alone.

An answer of 64 tokens takes a dozen steps, so a few of the engine's choices decide its speed. This
tells what is chance from what is learning: how the ratio to the better one spreads over many
recorded requests, each on a new engine or after others of its family. The draft model is simulated
as in bench/offers.py: 6 tokens in 0.27 of a forward each, right for 0.92 of the tokens in the
median; it tells how many to expect. A forward over n tokens takes 1 + 0.06 (n - 1).

    python bench/short_answers.py --data FOLDER
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from statistics import geometric_mean

import numpy as np

from fastdraft import DraftConfig, Engine, Offers
from fastdraft.replay import Record
from fastdraft.replay.trace import accepted_prefix
from harness import Row, about, add_requests, finish, parser, recorded_families, show
from offers import running

MODES = ("engine", "drafter", "offers")
SHORTEST = 16
TOKENS = 6
TIME = 0.27 * TOKENS
ALPHA = 0.92
EXPECTED = sum(ALPHA**depth for depth in range(1, TOKENS + 1))
DRAFTER = Namespace(alpha=ALPHA, request_spread=0.3, token_spread=1.0, noise=0.7, most_tokens=64)
COST = 1 + 0.06 * np.arange(40)
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def speed(engine: Engine, record: Record, mode: str, seed: int) -> float:
    """Tokens in the time of a forward, for one answer."""
    row = running(record, DRAFTER, np.random.default_rng(seed))
    row.id = engine.add_request(row.text[: row.length])
    tokens, time = 0, 0.0
    while row.room >= 1:
        offers = None
        asked = mode == "drafter"
        if mode == "offers":
            (asked,) = engine.wants(
                "draft model",
                [row.id],
                time=TIME,
                limits=[row.room],
                cost=COST,
                expected=[EXPECTED],
            )
        offered, sure = row.offer(TOKENS) if asked else ([], [])
        if mode == "drafter":
            draft = offered
        else:
            if asked:
                offers = Offers.of_rows("draft model", [offered], confidences=[sure], time=TIME)
            (draft,) = engine.propose_batch(
                [row.id], limits=[row.room], cost=COST, offers=offers
            ).tolist()
        output = row.text[row.length : row.length + 1 + len(draft)].tolist()
        emitted = output[: accepted_prefix(draft, output) + 1]
        engine.observe(row.id, emitted)
        time += COST[len(draft)] + (TIME if asked else 0.0)
        tokens += len(emitted)
        row.length += len(emitted)
    engine.finish(row.id)
    return tokens / time


def ratios(families: Mapping[str, Sequence[Record]], *, kept: bool) -> list[float]:
    """Both together to the better one alone, for each request."""
    found = []
    for number, records in enumerate(families.values()):
        engines = {mode: Engine(DraftConfig()) for mode in MODES}
        for place, record in enumerate(records):
            if not kept:
                engines = {mode: Engine(DraftConfig()) for mode in MODES}
            seed = 1000 * number + place
            speeds = {mode: speed(engines[mode], record, mode, seed) for mode in MODES}
            found.append(speeds["offers"] / max(speeds["engine"], speeds["drafter"]))
    return found


def main() -> None:
    options_of = parser(__doc__)
    add_requests(options_of, most=8)
    options = options_of.parse_args()
    found = about()
    families = {
        name: [each for each in records if len(each.output_ids) > SHORTEST][: options.most]
        for name, records in recorded_families(options.data, names=options.family).items()
    }
    rows: list[Row] = []
    for kept in (False, True):
        of_all = ratios(families, kept=kept)
        row: Row = {"engine": "kept" if kept else "new", "requests": len(of_all)}
        row["mean"] = geometric_mean(of_all)
        row |= {f"{part:.0%}": float(np.quantile(of_all, part)) for part in QUANTILES}
        rows.append(row)
    show("speed to the better one alone", None, rows)
    finish(options, {**found, "rows": rows})


if __name__ == "__main__":
    main()
