"""Lengths of drafts in vLLM, simulated: the engine's own choice, and what Model Runner V2 allows.

The real engine drafts for recorded requests, whose outputs are what the target says. A step over n
tokens takes as long as a curve says: of a dense model, 1 + .02 (n - 1), or of reads of a mixture of
128 experts that chooses 8, where tokens choose for themselves (independent) or alike (correlated:
n tokens load what n^.75 would). A new request takes the slot of one that ends; families are mixed.

*engine*: `propose_batch` with the curve. *one length*: all rows get the same, chosen by
`DraftLengths` beforehand, from measured times with 3 % of noise. *adaptive*: vLLM's rule; the
number of draft tokens is chosen by the probabilities of the step before, and which ones by those at
hand. *as vLLM prices it*: by a forward over equal tokens, which go to the same experts; *certain*:
new requests are taken for certain, as vLLM does; *at hand*: their number is chosen by the drafts at
hand too, for which vLLM would have to wait.

Each is also simulated beside a head, which costs nothing, whose tokens are right with a probability
of HEAD where those before them are. Each row takes the draft of which more is expected; the engine
gets the head's as offers.

    python bench/row_lengths.py --data DIR --json bench/results/row_lengths.json
    python bench/row_lengths.py --data DIR --head 1 --requests 6 \\
      --json bench/results/row_lengths_beside.json
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import harness
from fastdraft import Datastore, DraftConfig, Engine, Offers
from fastdraft.serving.vllm.v2.lengths import DraftLengths
from fastdraft.step_latency import StepLatency
from harness import Row

Text = tuple[str, list[int], list[int]]
Floats = NDArray[np.float64]
WIDEST = 4096
WAYS = (
    "one length",
    "adaptive",
    "adaptive, as vLLM prices it",
    "adaptive, certain",
    "adaptive, at hand",
    "engine",
)
HEAD = 0.75
BESIDE = ("head alone", "adaptive", "adaptive, at hand", "engine")


def curves() -> dict[str, Floats]:
    """What a step over 1, 2, ... tokens takes, by model: of one over one token."""
    tokens = np.arange(1, WIDEST + 1, dtype=np.float64)
    found = {
        "dense": 1 + 0.02 * (tokens - 1),
        "independent experts": 1.49 + 29 * (1 - (15 / 16) ** tokens),
        "correlated experts": 1.49 + 29 * (1 - (15 / 16) ** tokens**0.75),
    }
    return {name: curve / curve[0] for name, curve in found.items()}


class Simulation:
    """A server of `rows` slots, with a head or without."""

    def __init__(self, way: str, curve: Floats, rows: int, lookahead: int, head: bool) -> None:
        self.way, self.curve, self.lookahead = way, curve, lookahead
        self.has_head = head and way != "plain"
        self.of_head = HEAD ** np.arange(1, lookahead + 1)
        longest = 64 if way == "engine" else lookahead
        self.longest = longest
        self.engine = Engine(
            DraftConfig(lookahead=longest, token_cost=0.0),
            datastores=[Datastore(max_bytes=1 << 28)],
        )
        self.latency, self.random = StepLatency("cuda"), random.Random(0)
        halves = (lookahead >> n for n in range(lookahead.bit_length()))
        self.lengths = DraftLengths(halves, self.latency)
        self.before = np.zeros((rows, lookahead))

    def enter(self, slot: int) -> None:
        self.before[slot] = 1.0 if self.way.endswith("certain") else 0.0

    def draft(
        self, ids: list[int], slots: list[int], limits: list[int], heads: list[list[int]]
    ) -> list[list[int]]:
        """The drafts that a step verifies; and how many tokens it has."""
        rows, longest = len(ids), self.longest
        none: list[list[int]] = [[] for _ in ids]
        self.tokens = rows
        if self.way == "plain":
            return none
        if self.way == "engine":
            cost = self.curve[rows - 1 : rows * (longest + 1)]
            offers = Offers.of_rows("head", heads) if self.has_head else None
            drafts = self.engine.propose_batch(
                ids, limits=limits, cost=cost, offers=offers
            ).tolist()
            self.tokens += sum(map(len, drafts))
            return drafts
        if self.way == "one length":
            self.length = self.lengths.choose(rows)
            self.tokens += rows * self.length
            limits = [min(limit, self.length) for limit in limits]
            return self.engine.propose_batch(ids, limits=limits).tolist() if self.length else none
        batch = self.engine.propose_batch(ids, limits=limits)
        drafts, paths = batch.tolist(), np.zeros((rows, longest))
        for row, (begin, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
            paths[row, : end - begin] = batch.probabilities[begin:end]
            if self.has_head:
                ours = self.of_head[: len(heads[row])]
                if self.way == "head alone" or ours.sum() > paths[row].sum():
                    drafts[row], paths[row] = heads[row], 0.0
                    paths[row, : len(ours)] = ours
        seconds = self.curve[rows - 1 : rows * (1 + longest)]
        if self.way.endswith("prices it"):
            seconds = self.curve[0] * (1 + 1e-3 * np.arange(rows * longest + 1))
        if self.way.endswith("at hand"):
            self.before[slots] = paths
        best = np.sort(self.before[slots].ravel())[::-1].cumsum()
        number = int(np.argmax((rows + np.concatenate([[0.0], best])) / seconds))
        admitted = np.zeros(paths.size, dtype=bool)
        admitted[np.argsort(-paths.ravel(), kind="stable")[:number]] = True
        ends = admitted.reshape(paths.shape).sum(1).tolist()
        self.before[slots] = paths
        self.tokens += number
        return [draft[:end] for draft, end in zip(drafts, ends, strict=True)]

    def observe(self, rows: int, drafts: list[list[int]], accepted: list[int]) -> None:
        if self.way == "one length":
            seconds = 0.01 * self.curve[self.tokens - 1] * math.exp(self.random.gauss(0, 0.03))
            self.lengths.observe(rows, self.length, accepted if self.length else [], seconds)


def head_of(output: list[int], begin: int, most: int) -> list[int]:
    """What a head drafts there: it is wrong at the same tokens whatever it has drafted before."""
    said = output[begin : begin + most]
    wrong = (i for i in range(len(said)) if random.Random(begin + i + output[0]).random() >= HEAD)
    right = next(wrong, len(said))
    return said[:right] + [token + 1 for token in said[right:]]


def run(texts: Sequence[Text], simulation: Simulation, rows: int) -> dict[str, tuple[int, float]]:
    """The tokens of each family, and the time that its requests ran."""
    engine, todo, free = simulation.engine, list(texts)[::-1], list(range(rows))
    running: list[list[Any]] = []
    found: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    now = 0.0
    while todo or running:
        new = 0
        while todo and free:
            family, prompt, output = todo.pop()
            request = engine.add_request(prompt)
            engine.observe(request, output[:1])
            running.append([request, free.pop(), 1, output, family, now])
            simulation.enter(running[-1][1])
            new += 1
        simulation.lengths.forget(new / len(running))
        ids, slots = [row[0] for row in running], [row[1] for row in running]
        room = [min(simulation.longest, len(row[3]) - row[2] - 1) for row in running]
        heads = [head_of(row[3], row[2], most) for row, most in zip(running, room, strict=True)]
        drafts = simulation.draft(ids, slots, room, heads)
        now += float(simulation.curve[simulation.tokens - 1])
        emitted, accepted = [], []
        for row, draft in zip(running, drafts, strict=True):
            right = row[3][row[2] : row[2] + len(draft)]
            same = [a == b for a, b in zip(draft, right, strict=True)]
            accepted.append(same.index(False) if False in same else len(draft))
            emitted.append(row[3][row[2] : row[2] + accepted[-1] + 1])
            row[2] += len(emitted[-1])
        offsets = np.cumsum([0, *map(len, emitted)])
        engine.observe_batch(
            ids, np.concatenate(emitted), offsets, drafted=[len(draft) for draft in drafts]
        )
        simulation.observe(len(running), drafts, accepted)
        for request, slot, at, output, family, began in running:
            if at >= len(output):
                engine.finish(request)
                free.append(slot)
                tokens, seconds = found[family]
                found[family] = tokens + at - 1, seconds + now - began
        running = [row for row in running if row[2] < len(row[3])]
    found["all"] = sum(tokens for tokens, _ in found.values()), now
    return found


def compare(
    families: dict[str, list[Text]], rows: int, lookahead: int, curve: Floats, *, head: bool
) -> Row:
    """Speeds against plain decoding, and of each family: one after the other, or mixed."""
    lists = list(families.values())
    if rows > 1:
        mixed = [text for texts in lists for text in texts]
        random.Random(1).shuffle(mixed)
        lists = [mixed]

    def speeds(way: str) -> list[dict[str, float]]:
        made = (Simulation(way, curve, rows, lookahead, head) for _ in lists)
        runs = (run(texts, each, rows) for texts, each in zip(lists, made, strict=True))
        return [{name: tokens / time for name, (tokens, time) in each.items()} for each in runs]

    plain, found = speeds("plain"), {}
    for way in BESIDE if head else WAYS:
        ratios = [
            {name: speed / base[name] for name, speed in each.items()}
            for each, base in zip(speeds(way), plain, strict=True)
        ]
        whole = math.exp(np.log([each.pop("all") for each in ratios]).mean())
        worst = min(speed for each in ratios for speed in each.values())
        found[way] = {"speed": whole, "worst": worst}
    for each in found.values():
        each["of_engine"] = each["speed"] / found["engine"]["speed"]
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder of recorded requests")
    parser.add_argument("--requests", type=int, default=12, help="of each family")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[16])
    parser.add_argument("--head", type=int, nargs="+", default=[0], help="1: beside one")
    options = parser.parse_args()
    families = {
        name: [
            (name, each.prompt_ids[-4000:].tolist(), each.output_ids[:400].tolist())
            for each in records[: options.requests]
            if len(each.output_ids) > 2
        ]
        for name, records in harness.recorded_families(options.data).items()
    }
    results: list[Row] = []
    cases = itertools.product(curves().items(), options.rows, options.lookahead, options.head)
    for (model, curve), rows, lookahead, head in cases:
        found = compare(families, rows, lookahead, curve, head=head)
        case = {"model": model, "rows": rows, "lookahead": lookahead, "head": head}
        results.append({**case, **found})
        shown = [{"way": way, **figures} for way, figures in found.items()]
        beside = ", beside a head" if head else ""
        title = f"{model}, {rows} rows, drafts of {lookahead}{beside}"
        harness.show(title, None, shown, digits=3)
    harness.finish(options, {**harness.about(families=len(families)), "runs": results})


if __name__ == "__main__":
    main()
