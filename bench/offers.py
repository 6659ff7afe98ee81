"""The engine's drafts, another drafter's, and both together, over recorded requests.

The other drafter stands for a trained one, such as EAGLE. It is simulated: it is right
independently of whether the engine is. Each request has a difficulty, each token its own, and the
drafter's confidence tells of it with noise. It drafts `--length` tokens at once, in
`--drafter-ms` each. A step of the target takes `--base-ms`, and `--token-ms` for each token in it:
published figures of an H100 with an 8 B model. Compared are, as multiples of the speed without
drafts:

- engine: the engine alone.
- drafter: the other one alone, always.
- engine first: the engine's draft where it has one, and else the other drafter's, as serving
  stacks combine them.
- offers: `wants`, and then the other drafter's tokens as offers.

    python bench/offers.py --data FOLDER --json bench/results/offers.json

At most 16 requests are replayed at once; with more each stands for several like it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import geometric_mean
from typing import Any

import numpy as np

from fastdraft import Datastore, DraftConfig, Engine, Offers
from fastdraft.replay import Record
from fastdraft.replay.trace import accepted_prefix
from harness import Row, about, add_requests, add_server, finish, parser, recorded_families, show

MODES = ("engine", "drafter", "engine first", "offers")
MOST_ROWS = 16
WRONG = 1  # what the drafter says where it is wrong, unless that is the token


@dataclass(eq=False)
class Running:
    """A request that decodes: its text, how much of it is there, and what the drafter knows."""

    text: Any
    length: int
    right: Any  # for each token, whether the drafter would say it
    confidence: Any
    id: int = -1

    @property
    def room(self) -> int:
        return len(self.text) - self.length - 1

    def offer(self, length: int) -> tuple[list[int], list[float]]:
        """The drafter's next tokens. Behind a wrong one all are wrong."""
        part = slice(self.length, min(self.length + length, len(self.text) - 1))
        tokens = self.text[part].copy()
        wrong = np.logical_or.accumulate(~self.right[part])
        tokens[wrong] = np.where(tokens[wrong] == WRONG, WRONG + 1, WRONG)
        return tokens.tolist(), self.confidence[part].tolist()


def running(record: Record, options: Any, random: np.random.Generator) -> Running:
    prompt = record.prompt_ids
    text = np.concatenate([prompt, record.output_ids[: options.most_tokens]])
    request = random.normal(0, options.request_spread)
    odds = np.log(options.alpha / (1 - options.alpha)) + request
    odds = odds + random.normal(0, options.token_spread, len(text))
    right = random.random(len(text)) < 1 / (1 + np.exp(-odds))
    told = 1 / (1 + np.exp(-(odds + random.normal(0, options.noise, len(text)))))
    return Running(text, len(prompt) + 1, right, told.astype(np.float32))


@dataclass
class Outcome:
    """What a mode came to."""

    emitted: float = 0.0
    plain_ms: float = 0.0
    ms: float = 0.0
    asked: list[bool] = field(default_factory=list)


def replay(records: Sequence[Record], mode: str, at_once: int, options: Any) -> Outcome:
    """Serves all requests, at most `at_once` together."""
    random = np.random.default_rng(11)
    weight = max(1.0, at_once / MOST_ROWS)
    waiting = deque(running(record, options, random) for record in records)
    rows: list[Running] = []
    engine = Engine(DraftConfig(lookahead=16), datastores=[Datastore()])
    outcome = Outcome()
    length = options.length
    while waiting or rows:
        while waiting and len(rows) < min(at_once, MOST_ROWS):
            each = waiting.popleft()
            if each.room < 1:
                continue
            each.id = engine.add_request(each.text[: each.length])
            rows.append(each)
        if not rows:
            break
        count = len(rows)
        sizes = np.arange(1, count * 17 + 1)
        cost = options.base_ms + options.token_ms * weight * sizes
        drafting = length * (options.drafter_ms + options.drafter_row_ms * weight * count)
        ids = [each.id for each in rows]
        limits = [each.room for each in rows]
        asked = np.zeros(count, bool)
        drafts: list[list[int]] = [[] for _ in rows]
        if mode == "offers":
            asked = engine.wants("eagle", ids, time=drafting, limits=limits, cost=cost)
            offers = None
            if asked.any():
                offered = [
                    each.offer(length) if wanted else ([], [])
                    for each, wanted in zip(rows, asked, strict=True)
                ]
                offers = Offers.of_rows(
                    "eagle",
                    [tokens for tokens, _ in offered],
                    confidences=[sure for _, sure in offered] if options.confidences else None,
                    time=drafting,
                )
            drafts = engine.propose_batch(ids, limits=limits, cost=cost, offers=offers).tolist()
        elif mode != "drafter":
            drafts = engine.propose_batch(ids, limits=limits, cost=cost).tolist()
        if mode in ("drafter", "engine first"):
            asked = np.array([not draft for draft in drafts])
            drafts = [
                each.offer(length)[0] if wanted else draft
                for each, draft, wanted in zip(rows, drafts, asked, strict=True)
            ]
        emitted = []
        for each, draft in zip(rows, drafts, strict=True):
            output = each.text[each.length : each.length + len(draft) + 1].tolist()
            emitted.append(output[: accepted_prefix(draft, output) + 1])
        offsets = np.cumsum([0, *map(len, emitted)])
        engine.observe_batch(ids, list(chain(*emitted)), offsets)
        tokens = sum(map(len, emitted))
        outcome.emitted += tokens
        outcome.plain_ms += (options.base_ms + options.token_ms * weight * count) * tokens / count
        outcome.ms += options.base_ms + options.token_ms * weight * (count + sum(map(len, drafts)))
        outcome.ms += drafting if asked.any() else 0.0
        outcome.asked.append(bool(asked.any()))
        for each, new in zip(rows, emitted, strict=True):
            each.length += len(new)
        for each in [each for each in rows if each.room < 1]:
            engine.finish(each.id)
            rows.remove(each)
    return outcome


def main() -> None:
    options_of = parser(__doc__)
    add = options_of.add_argument
    add_requests(options_of, most=16)
    add_server(options_of)
    add("--most-tokens", type=int, default=150, help="of an answer")
    add("--at-once", type=int, nargs="+", default=[1, 16, 64])
    add("--length", type=int, default=4, help="tokens that the other drafter drafts")
    add("--drafter-ms", type=float, default=0.35, help="a token of its takes")
    add("--drafter-row-ms", type=float, default=0.002, help="and more for each row")
    add("--alpha", type=float, default=0.72, help="how often it is right, the median")
    add("--request-spread", type=float, default=0.5, help="of the log-odds over requests")
    add("--token-spread", type=float, default=1.5, help="and over tokens")
    add("--noise", type=float, default=1.0, help="of the confidence, in log-odds")
    add("--no-confidences", dest="confidences", action="store_false")
    options = options_of.parse_args()
    found = about()
    families = recorded_families(options.data, names=options.family)
    results: list[Row] = []
    for at_once in options.at_once:
        rows: list[Row] = []
        for name, records in families.items():
            row: Row = {"family": name}
            for mode in MODES:
                outcome = replay(records[: options.most], mode, at_once, options)
                row[mode] = outcome.plain_ms / outcome.ms
                if mode == "offers":
                    row["asked"] = float(np.mean(outcome.asked))
            row["to the better"] = row["offers"] / max(row["engine"], row["drafter"])
            rows.append(row)
        mean: Row = {"family": "geometric mean"}
        for mode in MODES:
            mean[mode] = geometric_mean(row[mode] for row in rows)
        mean["asked"] = float(np.mean([row["asked"] for row in rows]))
        mean["to the better"] = mean["offers"] / max(mean["engine"], mean["drafter"])
        mean["worst"] = min(row["to the better"] for row in rows)
        show(f"{at_once} at once", {key: key for key in (*rows[0], "worst")}, [*rows, mean])
        results.append({"at_once": at_once, "rows": rows, "mean": mean})
    settings = {
        key: value
        for key, value in vars(options).items()
        if isinstance(value, (int, float)) and key != "most"
    }
    finish(options, {**found, "settings": settings, "results": results})


if __name__ == "__main__":
    main()
