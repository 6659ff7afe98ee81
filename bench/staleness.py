"""What drafts lose that are made from guesses a step or two old: a replay of recorded requests.

A host that never waits for its drafter drafts from *continuations*: a tree of likely tokens that
the engine computed from the text of an earlier step. When they are used, the tokens emitted since
are looked up in the tree, and the draft goes on below them. Where they are not in the tree, the
draft is taken from the longest repeated n-gram in the text itself; and where none repeats, the last
token is taken for a replacement of the one that the tree expected there.

Each variant is replayed with the real engine over the same requests, and compared with fresh drafts
by modelled speed: tokens / (steps + token cost * drafted).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

import numpy as np
from numpy.typing import NDArray

from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.replay import Record
from fastdraft.replay.trace import accepted_path
from harness import Row, about, add_requests, finish, parser, recorded_families, show

LONGEST_SCANNED = 16  # tokens of a match that the scan compares
PREMIUM = 1.2  # of the worth-it rule, as in the engine
PRIOR = (
    *(0.05, 0.23, 0.47, 0.57, 0.64, 0.69, 0.70, 0.72, 0.73),
    *(0.77, 0.79, 0.80, 0.83, 0.84, 0.84, 0.85, 0.90),
)
"""The chance of the next token after a match of 0 (an edit), 1, 2, ... tokens, before any is
learned: what the recorded requests of all families show together."""

Text = NDArray[np.int32]


@dataclass(frozen=True)
class Scan:
    """How the row's own text is scanned for its last tokens.

    Attributes:
        shortest: The shortest match that is drafted from; 0 does not scan.
        window: How far back, in tokens.
        votes: Of the latest so many of the longest matches the token that most of them go on with
            is drafted; 1 takes the latest.
        learned: Whether the chances are learned by match length, or stay as PRIOR has them.
    """

    shortest: int = 1
    window: int = 4096
    votes: int = 1
    learned: bool = True


@dataclass(frozen=True)
class Variant:
    """What drafts, and from what.

    Attributes:
        age: How many steps before the draft its continuations were computed; 0 are fresh drafts.
        nodes: Of the tree; for fresh drafts 0 stands for a chain.
        depth: Of the tree. By default three whole drafts and the tokens that follow each: what two
            steps may emit, and the draft after them.
        chains: Keeps so many chains of the tree, of `chain_length` tokens; 0 keeps the tree.
        reentry: The shortest match with a path of the tree that is drafted from; 0 for none.
        edit: Whether, where nothing matches, the last token is taken for a replacement of the one
            that was likeliest there, and the draft goes on behind that.
        cut: Whether drafts end where the next token does not pay.
    """

    age: int
    nodes: int = 128
    depth: int = 51
    chains: int = 0
    chain_length: int = 0
    reentry: int = 0
    scan: Scan = field(default_factory=Scan)
    edit: bool = True
    cut: bool = True
    lookahead: int = 16


class Tree:
    """Continuations of a text of `base` tokens."""

    def __init__(
        self,
        base: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        chances: Sequence[float],
    ) -> None:
        self.base = base
        self.tokens, self.parents, self.chances = tokens, parents, chances
        self.child = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
        self.first: dict[int, int] = {}
        for node, parent in enumerate(parents):
            self.first.setdefault(parent, node)

    def walk(self, tokens: Iterable[int]) -> int | None:
        """The node that the tokens lead to from the root, -1; None where they leave the tree."""
        node = -1
        for token in tokens:
            found = self.child.get((node, token))
            if found is None:
                return None
            node = found
        return node

    def reenter(self, text: Text, length: int, shortest: int) -> tuple[int | None, int]:
        """The node with children whose path ends with most of the text's last tokens."""
        best, longest = None, shortest - 1
        last = int(text[length - 1])
        for node, token in enumerate(self.tokens):
            if token != last or node not in self.first:
                continue
            matched, place = 0, node
            while place >= 0 and matched < length:
                if self.tokens[place] != text[length - 1 - matched]:
                    break
                matched += 1
                place = self.parents[place]
            if matched > longest:
                best, longest = node, matched
        return best, min(longest, LONGEST_SCANNED)

    def below(self, node: int, most: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens below a node, and the chances of their paths from there."""
        start = 1.0 if node < 0 else self.chances[node]
        tokens: list[int] = []
        chances: list[float] = []
        while len(tokens) < most and node in self.first:
            node = self.first[node]
            tokens.append(self.tokens[node])
            chances.append(self.chances[node] / start if start > 0 else 0.0)
        return tokens, chances

    def as_chains(self, count: int, length: int) -> Tree:
        """The nodes of the `count` chains of `length` tokens that hold the likeliest nodes."""
        kept: set[int] = set()
        depth: list[int] = []
        for parent in self.parents:
            depth.append(1 if parent < 0 else depth[parent] + 1)
        for node in range(len(self.tokens)):
            if count == 0:
                break
            if node in kept or depth[node] > length:
                continue
            count -= 1
            place = node
            while place >= 0:
                kept.add(place)
                place = self.parents[place]
            while node in self.first and depth[self.first[node]] <= length:
                node = self.first[node]
                kept.add(node)
        places = {-1: -1}
        for node in sorted(kept):
            places[node] = len(places) - 1
        nodes = sorted(kept)
        return Tree(
            self.base,
            [self.tokens[node] for node in nodes],
            [places[self.parents[node]] for node in nodes],
            [self.chances[node] for node in nodes],
        )


def scan_text(text: Text, length: int, scan: Scan) -> tuple[int, int]:
    """The longest match of the text's last tokens earlier in it, the latest of equal ones.

    Returns its length and the position after it; 0 where there is none of `scan.shortest`.
    """
    first = max(0, length - 1 - scan.window)
    ends = longest = np.flatnonzero(text[first : length - 1] == text[length - 1]) + first
    matched = 0
    while len(ends):
        matched += 1
        longest = ends
        if matched == LONGEST_SCANNED or matched >= length:
            break
        ends = ends[ends >= matched]
        ends = ends[text[ends - matched] == text[length - 1 - matched]]
    if matched < max(1, scan.shortest):
        return 0, 0
    places = longest[: -1 - scan.votes : -1] + 1
    following = text[places].tolist()
    best = max(following, key=following.count)  # of equal ones the first, which is the latest
    return matched, int(places[following.index(best)])


class Chances:
    """How likely the next token after a match is, by the match's kind and length: counted."""

    def __init__(self, learned: bool) -> None:
        self._learned = learned
        self._counts: dict[tuple[str, int], list[float]] = {}

    def _of(self, kind: str, length: int) -> list[float]:
        length = min(length, LONGEST_SCANNED)
        return self._counts.setdefault((kind, length), [8.0 * PRIOR[length], 8.0])

    def along(self, kind: str, length: int, tokens: int) -> list[float]:
        """The chances of the paths to the next tokens; each that comes makes the match longer."""
        paths, path = [], 1.0
        for i in range(tokens):
            right, tried = self._of(kind, length + i)
            path *= right / tried
            paths.append(path)
        return paths

    def learn(self, kind: str, length: int, accepted: int, drafted: int) -> None:
        """Of `drafted` tokens after a match the first `accepted` came."""
        if self._learned:
            for i in range(min(accepted + 1, drafted)):
                counts = self._of(kind, length + i)
                counts[0] += i < accepted
                counts[1] += 1


@dataclass
class Counts:
    """What adds up.

    Attributes:
        steps, emitted, drafted: Of the target, and draft tokens.
        origins: By where drafts came from: steps, tokens accepted, tokens drafted, and the tokens
            accepted that the chances told.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    origins: dict[str, list[float]] = field(default_factory=dict)

    def speed(self, token_cost: float) -> float:
        return self.emitted / (self.steps + token_cost * self.drafted)


def replay(records: Sequence[Record], variant: Variant, token_cost: float) -> Counts:
    """Replays a family with drafts of one age."""
    lookahead = variant.lookahead
    fresh = variant.age == 0
    config = DraftConfig(
        lookahead=lookahead if fresh else variant.depth,
        tree_budget=variant.nodes or None,
        token_cost=token_cost,
    )
    engine = Engine(config, datastores=[Datastore()])
    chances = Chances(variant.scan.learned)
    counts = Counts()
    rates = [1.5 * 8.0, 8.0]
    for record in records:
        text = np.concatenate([record.prompt_ids, record.output_ids])
        output: list[int] = record.output_ids.tolist()
        prompt = len(record.prompt_ids)
        request = engine.add_request(text[: prompt + 1])
        done = 1
        rate = [8.0 * rates[0] / rates[1], 8.0]
        began = counts.emitted, counts.steps, counts.drafted
        trees: deque[Tree] = deque(maxlen=variant.age + 1)
        while done < len(output):
            length = prompt + done
            draft = engine.propose(request, token_cost=token_cost if fresh else 0.0)
            tokens: list[int] = draft.tolist()
            parents: Sequence[int] = draft.parents.tolist()
            origin, matched = "fresh", 0
            told = float(draft.probabilities.sum())
            if not fresh:
                tree = Tree(length, tokens, parents, draft.probabilities.tolist())
                if variant.chains:
                    tree = tree.as_chains(variant.chains, variant.chain_length)
                trees.append(tree)
                tokens, paths, origin, matched = align(variant, trees[0], text, length, chances)
                if variant.cut:
                    least = PREMIUM * token_cost * rate[0] / rate[1]
                    tokens = [
                        token for token, path in zip(tokens, paths, strict=True) if path >= least
                    ]
                told = sum(paths[: len(tokens)])
                parents = range(-1, len(tokens) - 1)
            accepted = len(accepted_path(tokens, parents, output, done))
            emitted = output[done : done + accepted + 1]
            if origin not in ("tree", "none", "fresh"):
                chances.learn(origin, matched, accepted, len(tokens))
            seen = counts.origins.setdefault(origin if tokens else "none", [0, 0, 0, 0.0])
            seen[0] += 1
            seen[1] += accepted
            seen[2] += len(tokens)
            seen[3] += told if tokens else 0.0
            engine.observe(request, emitted)
            done += len(emitted)
            counts.steps += 1
            counts.emitted += len(emitted)
            counts.drafted += len(tokens)
            rate[0] = 0.98 * rate[0] + len(emitted)
            rate[1] = 0.98 * rate[1] + 1 + token_cost * len(tokens)
        engine.finish(request)
        time = counts.steps - began[1] + token_cost * (counts.drafted - began[2])
        if time:
            rates = [0.98 * rates[0] + (counts.emitted - began[0]) / time, 0.98 * rates[1] + 1]
    return counts


def align(
    variant: Variant, tree: Tree, text: Text, length: int, chances: Chances
) -> tuple[list[int], list[float], str, int]:
    """The draft: its tokens, the chances of their paths, where it is from, the match's length."""
    node = tree.walk(text[tree.base : length].tolist())
    if node is not None and node in tree.first:
        return *tree.below(node, variant.lookahead), "tree", 0
    if variant.reentry:
        node, matched = tree.reenter(text, length, variant.reentry)
        if node is not None:
            tokens, paths = tree.below(node, variant.lookahead)
            return tokens, _scaled(paths, chances, "reentry", matched), "reentry", matched
    if variant.scan.shortest:
        matched, place = scan_text(text, length, variant.scan)
        if matched:
            period = length - place
            tokens = [int(text[place + i % period]) for i in range(variant.lookahead)]
            return tokens, chances.along("scan", matched, len(tokens)), "scan", matched
    if variant.edit:
        node = tree.walk(text[tree.base : length - 1].tolist())
        if node is not None and node in tree.first:
            tokens, paths = tree.below(tree.first[node], variant.lookahead)
            if tokens:
                return tokens, _scaled(paths, chances, "edit", 0), "edit", 0
    return [], [], "none", 0


def _scaled(paths: list[float], chances: Chances, kind: str, matched: int) -> list[float]:
    """The paths' chances, where the first token is as likely as after other such matches."""
    first = chances.along(kind, matched, 1)[0]
    return [first * path / paths[0] if paths[0] > 0 else 0.0 for path in paths]


CHOSEN = Variant(1)
SWEEP = {
    "chosen": CHOSEN,
    **{f"{nodes} nodes": replace(CHOSEN, nodes=nodes) for nodes in (16, 32, 64, 256)},
    **{f"depth {depth}": replace(CHOSEN, depth=depth) for depth in (17, 34)},
    **{
        f"{chains} chains of {length}": replace(
            CHOSEN, nodes=256, depth=48, chains=chains, chain_length=length
        )
        for chains, length in ((1, 16), (1, 48), (2, 32), (4, 32), (8, 16), (8, 48))
    },
    **{f"re-entry from {n}": replace(CHOSEN, reentry=n) for n in (1, 2, 4)},
    "no edit": replace(CHOSEN, edit=False),
    "tree alone": replace(CHOSEN, edit=False, scan=Scan(0)),
    "no scan": replace(CHOSEN, scan=Scan(0)),
    **{f"scan from {n}": replace(CHOSEN, scan=Scan(n)) for n in (2, 3, 4)},
    "4 votes": replace(CHOSEN, scan=Scan(votes=4)),
    **{f"window {w}": replace(CHOSEN, scan=Scan(1, w)) for w in (256, 1024, 16384)},
    "fixed scan chances": replace(CHOSEN, scan=Scan(learned=False)),
    "drafts not cut": replace(CHOSEN, cut=False),
    "no edit, drafts not cut": replace(CHOSEN, cut=False, edit=False),
}
MAIN = {
    "fresh tree of 32": Variant(0, 32),
    "one step old": CHOSEN,
    "two steps old": replace(CHOSEN, age=2),
    "one step old, 256 nodes": replace(CHOSEN, nodes=256),
    "one step old, 256 nodes, 4 votes": replace(CHOSEN, nodes=256, scan=Scan(votes=4)),
    "one step old, no edit": replace(CHOSEN, edit=False),
    "two steps old, no edit": replace(CHOSEN, age=2, edit=False),
}


def sample(records: Sequence[Record], tokens: int) -> list[Record]:
    """The first requests with so many output tokens together."""
    taken: list[Record] = []
    while records and sum(len(each.output_ids) for each in taken) < tokens:
        taken.append(records[len(taken)])
        if len(taken) == len(records):
            break
    return taken


def measure(
    families: Mapping[str, Sequence[Record]],
    variants: Mapping[str, Variant],
    token_costs: Sequence[float],
) -> list[Row]:
    rows: list[Row] = []
    for token_cost in token_costs:
        fresh = {
            name: replay(records, Variant(0, 0), token_cost) for name, records in families.items()
        }
        for title, variant in {"fresh": Variant(0, 0), **variants}.items():
            print(f"... {token_cost:g}: {title}", file=sys.stderr, flush=True)
            rows.append({"variant": title, "token_cost": token_cost})
            counts = (
                fresh
                if title == "fresh"
                else {name: replay(each, variant, token_cost) for name, each in families.items()}
            )
            kept = {
                name: each.speed(token_cost) / fresh[name].speed(token_cost)
                for name, each in counts.items()
            }
            origins: dict[str, list[float]] = {}
            for each in counts.values():
                for origin, seen in each.origins.items():
                    total = origins.setdefault(origin, [0, 0, 0, 0.0])
                    origins[origin] = [a + b for a, b in zip(total, seen, strict=True)]
            worst = min(kept, key=lambda name: kept[name])
            rows[-1] |= {
                "kept": geometric_mean(kept.values()),
                "worst": kept[worst],
                "worst_family": worst,
                "speed": geometric_mean(each.speed(token_cost) for each in counts.values()),
                "tokens_per_step": geometric_mean(each.speed(0) for each in counts.values()),
                "steps_accepted_drafted_told": {
                    origin: [round(value) for value in total] for origin, total in origins.items()
                },
                "families": {name: round(value, 4) for name, value in kept.items()},
            }
    return rows


def main() -> None:
    made = parser(__doc__)
    add_requests(made)
    made.add_argument("--tokens", type=int, default=3000, help="of output, for each family")
    made.add_argument("--sweep", action="store_true", help="every variant, at two token costs")
    options = made.parse_args()
    results = about(tokens=options.tokens)
    families = {
        name: sample(records, options.tokens)
        for name, records in recorded_families(options.data, names=options.family).items()
    }
    main_costs, sweep_costs = (0.0, 0.003, 0.02, 0.05), (0.0, 0.02)
    rows = measure(
        families,
        SWEEP if options.sweep else MAIN,
        sweep_costs if options.sweep else main_costs,
    )
    show(
        "Modelled speed against fresh chains: geometric mean and worst of the families",
        {
            "token cost": "token_cost",
            "variant": "variant",
            "kept": "kept",
            "worst": "worst",
            "family": "worst_family",
            "speed": "speed",
            "tokens\na step": "tokens_per_step",
        },
        rows,
        digits=3,
    )
    finish(options, {**results, "rows": rows})


if __name__ == "__main__":
    main()
