"""Lookups beside a draft head, drafted ahead: tokens a step of each alone and of both together.

    python bench/beside_head.py --data FOLDER --json bench/results/beside_head.json

The parts are those of vLLM's V2 adapter: continuations of the engine that arrive a step late, the
alignment on the device (its reference), and what is learned of the head. The target says what was
recorded. The head is synthetic: at each position it knows the next tokens to some depth, drawn once
with `--acceptance` for each further token, and whatever the lookups know. So all families have the
same head. Every step verifies the same number of tokens, and the time of the head is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft import Continuations, Datastore, DraftConfig, Engine
from fastdraft.alignment import Aligner, Head, Texts, Trees
from fastdraft.replay import Record
from fastdraft.replay.trace import accepted_prefix
from fastdraft.serving.vllm.beside import BINS, HeadRecord
from harness import Row, about, add_requests, finish, parser, recorded_families, show

NODES = 128
STEPS_BACK = 4
SIDES = ("lookups", "head", "both")
Ints = NDArray[np.int64]


class Batch:
    """The requests of a family, `places` at a time; each is followed by the next one."""

    def __init__(
        self,
        records: Sequence[Record],
        places: int,
        side: str,
        lookahead: int,
        heads: Sequence[Ints],
    ) -> None:
        self._waiting = list(zip(records, heads, strict=True))[::-1]
        self._side, self._lookahead = side, lookahead
        longest = max(len(each.prompt_ids) + len(each.output_ids) for each in records)
        vocabulary = 1 + max(
            int(max(each.prompt_ids.max(), each.output_ids.max())) for each in records
        )
        width = lookahead + 1
        config = DraftConfig(lookahead=3 * width, tree_budget=NODES)
        self._engine = Engine(config, datastores=[Datastore()])
        self._learned = HeadRecord(lookahead, places)
        self._aligner = Aligner(
            "cpu", max_rows=places, lookahead=lookahead, vocabulary=vocabulary,
            tail=STEPS_BACK * width, beside_head=True,
        )  # fmt: skip
        self._tokens = np.zeros((places, longest), np.int32)
        # Lengths, numbers of requests and longest drafts; numbers of the trees' requests.
        self._lengths, self._numbers, self._limits, self._of = np.zeros((4, places), np.int32)
        self._limits[:] = lookahead
        self._late = Continuations.allocate(places, NODES)
        self._rows: dict[int, tuple[int, Record, Ints]] = {}
        self._next = 0
        self.steps = self.emitted = 0

    def _fill(self) -> None:
        """New requests take the free places; their first token comes with the prompt."""
        for place in set(range(len(self._tokens))) - self._rows.keys():
            if not self._waiting:
                return
            record, head = self._waiting.pop()
            size = len(record.prompt_ids)
            text = np.concatenate([record.prompt_ids, record.output_ids])
            self._tokens[place, : len(text)] = text
            request = self._engine.add_request(record.prompt_ids)
            self._next += 1
            self._lengths[place], self._numbers[place] = size, self._next
            self._rows[place] = request, record, head
            self._late.count[place] = 0

    def run(self) -> None:
        counts: dict[int, int] = {}
        verified = np.zeros(len(self._tokens), np.int64)
        while True:
            self._fill()
            if not self._rows:
                return
            places = np.array(sorted(self._rows))
            emitted = np.array([counts.pop(place, 1) for place in places.tolist()])
            self._lengths[places] += emitted
            drafts, ends = self._draft(places, emitted)
            before = verified[places]
            split = self._learned.width + 3
            self._learned.observe(
                places, self._numbers[places].astype(np.int64), emitted,
                self._lengths[places].astype(np.int64), before, ends[:, 3:split], ends[:, split:],
            )  # fmt: skip
            self._tell(places, emitted)
            verified[places] = self._lookahead
            for place, draft in zip(places.tolist(), drafts, strict=True):
                request, record, _ = self._rows[place]
                said = int(self._lengths[place]) - len(record.prompt_ids)
                rest = record.output_ids[said:]
                if not len(rest):
                    self._engine.finish(request)
                    del self._rows[place]
                    verified[place] = 0
                    continue
                counts[place] = min(
                    accepted_prefix(draft, rest[: self._lookahead].tolist()) + 1, len(rest)
                )
                self.steps += 1
                self.emitted += counts[place]

    def _draft(self, places: Ints, emitted: Ints) -> tuple[list[list[int]], NDArray[np.int32]]:
        """The verified drafts of the rows, and what `align` says of their ends."""
        lookahead, late = self._lookahead, self._late
        theirs = np.full((len(places), lookahead), -1)
        for row, place in zip(theirs, places.tolist(), strict=True):
            _, record, known = self._rows[place]
            said = int(self._lengths[place]) - len(record.prompt_ids)
            if self._side != "lookups":
                rest = record.output_ids[said : said + int(known[said])]
                row[: len(rest)] = rest
        table = self._learned.table()
        if self._side != "both":
            # One of them is always right where they differ.
            table[:] = 0
            table[lookahead + (self._side == "head") * BINS :][:BINS] = 1
        tensor = torch.from_numpy
        aligned = self._aligner.align(
            Texts(*map(tensor, (self._tokens, self._lengths, self._numbers, self._limits))),
            Trees(
                tensor(late.base),
                tensor(late.count),
                tensor(late.token_ids),
                tensor(late.parents),
                tensor(late.probabilities),
                tensor(self._of),
            ),
            tensor(places),
            tensor(emitted),
            Head(
                tensor(theirs),
                tensor(table[:lookahead]),
                tensor(table[lookahead:]).view(2, BINS),
            ),
        )
        return aligned.token_ids.tolist(), aligned.ends.numpy()

    def _tell(self, places: Ints, emitted: Ints) -> None:
        """The engine hears of the step; its trees are used in the next one."""
        tokens = [
            self._tokens[place, length - count : length]
            for place, length, count in zip(places, self._lengths[places], emitted, strict=True)
        ]
        self._engine.continue_batch(
            [self._rows[place][0] for place in places.tolist()], np.concatenate(tokens),
            np.cumsum([0, *emitted]), self._late, places=places,
        )  # fmt: skip
        self._of[places] = self._numbers[places]


def known_depths(records: Sequence[Record], acceptance: Sequence[float], seed: int) -> list[Ints]:
    """How many of the next tokens the head knows, at each position of each output."""
    generator = np.random.default_rng(seed)
    known = []
    for record in records:
        draws = generator.random((len(record.output_ids) + 1, len(acceptance)))
        known.append(np.cumprod(draws < np.array(acceptance), axis=1).sum(axis=1))
    return known


def main() -> None:
    made = parser(__doc__)
    add_requests(made, most=64)
    made.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 64])
    made.add_argument("--output-tokens", type=int, default=96, help="of an answer, the first")
    made.add_argument(
        "--acceptance",
        type=float,
        nargs="+",
        default=[0.75, 0.72, 0.69, 0.66, 0.63, 0.60, 0.57, 0.54],
        help="of the head's token at each depth, behind right ones; as many as a step verifies",
    )
    options = made.parse_args()
    torch.set_num_threads(1)
    results = about(acceptance=options.acceptance)
    families = recorded_families(options.data, names=options.family)
    rows: list[Row] = []
    for at_once in options.at_once:
        for family, records in families.items():
            most = min(options.most, max(2 * at_once, 6))
            taken = [
                Record(each.id, each.prompt_ids, each.output_ids[: options.output_tokens])
                for each in records
                if len(each.output_ids) and len(each.prompt_ids) <= 8192
            ][:most]
            heads = known_depths(taken, options.acceptance, 1)
            row: Row = {"at once": at_once, "family": family}
            for side in SIDES:
                batch = Batch(taken, at_once, side, len(options.acceptance), heads)
                batch.run()
                row[side] = batch.emitted / batch.steps
            row["to better"] = row["both"] / max(row["lookups"], row["head"])
            rows.append(row)
        of_these = [row for row in rows if row["at once"] == at_once]
        show(f"{at_once} at once: tokens a step", None, of_these)
        means = {side: geometric_mean(row[side] for row in of_these) for side in SIDES}
        total = {
            "at once": at_once,
            **means,
            "to better": means["both"] / max(means["lookups"], means["head"]),
            "worst family": min(row["to better"] for row in of_these),
        }
        results.setdefault("means", []).append(total)
    show("Geometric means", None, results["means"])
    finish(options, {**results, "rows": rows})


if __name__ == "__main__":
    main()
