"""What the index and the drafters promise, the slow and obvious way."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastdraft import Datastore, Draft, DraftBatch, Source

LATEST_WALK = 32
"""SuffixAutomaton::kLatestWalk."""


def common_suffix(text: Sequence[int], end: int, other: int) -> int:
    """How many tokens that end at position `end` and at the earlier `other` are alike."""
    length = 0
    while length <= other and text[end - length] == text[other - length]:
        length += 1
    return length


def repeated_suffix(text: Sequence[int]) -> tuple[int, int, int]:
    """The longest suffix of `text` that also ends earlier in it.

    Returns its length, and where its first and its latest earlier occurrence end, as the index
    knows them; (0, -1, -1) where no token repeats.
    """
    last = len(text) - 1
    lengths = [common_suffix(text, last, end) for end in range(last)]
    length = max(lengths, default=0)
    if length == 0:
        return 0, -1, -1
    ends = [end for end in range(last) if lengths[end] == length]
    marked = [end for end in ends if length > unmarked_length(text, end)]
    return length, ends[0], marked[-1] if marked else ends[0]


def unmarked_length(text: Sequence[int], end: int) -> int:
    """The length up to which the suffixes that end at `end` went unmarked when it was indexed.

    The suffixes fall into classes by where else they ended at the time. Only the LATEST_WALK
    classes of the longest ones were marked, the first of which is the whole text's.
    """
    seen = range(min(end + 2, len(text)))
    lengths = {common_suffix(text, max(end, e), min(end, e)) for e in seen if e != end}
    classes = sorted(lengths - {0, end + 1}, reverse=True)
    return classes[LATEST_WALK - 1] if len(classes) >= LATEST_WALK else 0


def alike(text: Sequence[int], other: Sequence[int]) -> int:
    """How many of the last tokens of two texts are alike."""
    pairs = zip(reversed(text), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))


def copied(text: Sequence[int], begin: int, count: int) -> list[int]:
    """`count` tokens from text[begin] on; past its end the copy copies itself."""
    grown = list(text)
    for i in range(count):
        grown.append(grown[begin + i])
    return grown[len(text) :]


def prompt_lookup(text: Sequence[int], max_ngram: int, num_tokens: int) -> list[int]:
    """What follows the leftmost earlier occurrence of the longest n-gram that ends `text`."""
    size = len(text)
    for ngram in range(min(max_ngram, size - 1), 0, -1):
        for begin in range(size - ngram):
            if text[begin : begin + ngram] == text[size - ngram :]:
                return list(text[begin + ngram : begin + ngram + num_tokens])
    return []


class CopyCursor:
    """Where the output goes on in a text that it copies from."""

    WINDOW, PATIENCE, SETTLED, LONGEST = 32, 32, 3, 8

    def __init__(self, start: int) -> None:
        self.position = start
        self.length = 0
        self.footing = "guessed"
        self.parted_at = start
        self.since = 0
        self.begun = False

    def advance(
        self, text: Sequence[int], limit: int, output: Sequence[int], jump: tuple[int, int]
    ) -> None:
        """Takes the last token of `output`; `jump` is a match elsewhere: a place and its length."""
        if 0 <= self.position < limit and text[self.position] == output[-1]:
            settled = self.length >= self.SETTLED
            self.position, self.length = self.position + 1, self.length + 1
            if settled or self.footing == "guessed":
                self.footing = "following"
            if not settled and jump[1] > self.length + self.SETTLED:
                (self.position, self.length), self.footing = jump, "jumped"
            return
        if self.length >= self.SETTLED:
            self.parted_at, self.since, self.begun = self.position, 0, True
        self.since += self.begun
        patient = self.parted_at >= 0 and self.since <= self.PATIENCE
        places = self.nearby(text, limit, output) if patient else [(-1, 0)]
        (self.position, self.length), self.footing = max(places, key=self.preference), "following"
        if self.length == 0:
            (self.position, self.length), self.footing = jump, "jumped"
        if self.length == 0:
            self.footing = "guessed"
            self.position = min(self.parted_at + self.since, limit) if patient else -1

    def nearby(
        self, text: Sequence[int], limit: int, output: Sequence[int]
    ) -> list[tuple[int, int]]:
        first = max(1, self.parted_at - self.WINDOW)
        final = min(limit, self.parted_at + self.WINDOW)
        lengths = {
            position: min(self.LONGEST, alike(text[:position], output))
            for position in range(first, final + 1)
        }
        return [(-1, 0), *lengths.items()]

    def preference(self, place: tuple[int, int]) -> tuple[int, int, bool]:
        """The longest, of these the nearest, of these the later."""
        position, length = place
        return length, -abs(position - self.parted_at), position > self.parted_at


class OwnCopy(CopyCursor):
    """Where the copy that a text makes of its own past goes on."""

    SHORTEST_JUMP = 4

    def __init__(self) -> None:
        super().__init__(-1)

    def follow(self, text: Sequence[int]) -> None:
        length, _, latest = repeated_suffix(text)
        jump = (latest + 1, length) if length >= self.SHORTEST_JUMP else (-1, 0)
        self.advance(text, len(text) - 1, text, jump)


class Prediction(CopyCursor):
    """Where the output goes on in the text that the caller expects it to be."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(0)
        self.tokens = list(tokens)
        self.output: list[int] = []

    def follow(self, text: Sequence[int]) -> None:
        self.output.append(text[-1])
        # The longest suffix of the output that stands in the prediction, leftmost.
        places = range(1, len(self.tokens) + 1)
        lengths = {place: alike(self.tokens[:place], self.output) for place in places}
        length = max(lengths.values(), default=0)
        place = next((place for place in places if lengths[place] == length), -1)
        self.advance(self.tokens, len(self.tokens), text, (place, length) if length else (-1, 0))


class Acceptance:
    """Logistic regression over one weight for each value of each feature, learned online."""

    RATE = 0.015

    def __init__(self, weights: Mapping[str, Sequence[float]]) -> None:
        self.weights = {name: list(values) for name, values in weights.items()}
        self.now = 0  # how many outcomes were learned
        self.lessons: dict[tuple[int, ...], tuple[int, int]] = {}  # the last of a kind, how many

    def chance(self, evidence: Mapping[str, int]) -> float:
        return 1 / (1 + math.exp(-sum(self.weights[name][v] for name, v in evidence.items())))

    def learn(self, evidence: Mapping[str, int], token: int, moment: int, accepted: bool) -> None:
        kind = tuple(evidence.values())
        alike, copies = self.count(kind, moment), self.count((*kind, token), moment)
        self.now += 1
        step = self.RATE / max(math.sqrt(alike), copies) * (accepted - self.chance(evidence))
        for name, value in evidence.items():
            self.weights[name][value] += step

    def count(self, kind: tuple[int, ...], moment: int) -> int:
        """How many outcomes of the kind there were since `moment`, with this one."""
        last, count = self.lessons.get(kind, (-1, 0))
        count = count + 1 if last >= moment else 1
        self.lessons[kind] = self.now, count
        return count


PREMIUM = 1.2  # a draft has to gain this many times what it costs


class EmissionRate:
    """Tokens a unit of step time, the last fifty steps or so; 1.5 in the beginning."""

    def __init__(self) -> None:
        self.tokens, self.time = 1.5 * 8, 8.0

    @property
    def value(self) -> float:
        return self.tokens / self.time

    def add(self, tokens: int, time: float) -> None:
        self.tokens = 0.98 * self.tokens + tokens
        self.time = 0.98 * self.time + time


@dataclass(frozen=True)
class Place:
    """Where the text's last tokens stand: in the text, or in a store."""

    says: list[int]  # what followed there, as far as it is known
    length: int
    end: int
    stored: bool
    output: bool  # whether a model wrote what followed


@dataclass
class Candidate:
    """A token that may follow a node of the draft."""

    token: int
    places: list[Place]  # those that agree so far
    copied: bool
    predicted: bool
    evidence: dict[str, int] = field(default_factory=dict)
    chance: float = 1.0
    path: float = 1.0
    source: Source = Source.CONTEXT


@dataclass
class Node:
    """A drafted token, or the end of the text."""

    parent: int
    depth: int
    candidate: Candidate
    following: list[Candidate] = field(default_factory=list)


class Width(NamedTuple):
    """How many occurrences are weighed."""

    tokens: int  # of the text's last token, besides those of its repeated suffixes
    stored: int  # in datastores
    links: int  # that a datastore looks at


class DefaultDrafter:
    """The default drafter.

    It says of every token that may be drafted next how likely it is to be accepted. `follow` drafts
    what an engine did, which decides between tokens that are as likely as each other.
    """

    SUFFIXES, LONGEST = 3, 32
    STRONG, WEAK = 4, 1  # a chain leaves out a match so short beside one so long
    CLEAR = 8  # beside a repeated suffix of this length a chain weighs nothing of stores
    CHAIN = Width(tokens=8, stored=8, links=7)
    TREE = Width(tokens=16, stored=32, links=64)
    TIE = 1e-4  # the engine computes in single precision

    def __init__(
        self,
        prompt: Sequence[int],
        acceptance: Acceptance,
        *,
        lookahead: int,
        tree: bool = False,
        prediction: Sequence[int] = (),
        stores: Sequence[Datastore] = (),
    ) -> None:
        self.text = list(prompt)
        self.prompt_size = len(self.text)
        self.acceptance = acceptance
        self.lookahead, self.tree, self.stores = lookahead, tree, stores
        self.width = self.TREE if tree else self.CHAIN
        self.copy = OwnCopy()
        self.prediction = Prediction(prediction) if prediction else None
        self.nodes: list[Node] = []
        self.moment = 0  # when the chances of the nodes were told

    def begin(self, limit: int) -> None:
        """Begins a draft of at most `limit` tokens."""
        self.limit = limit if self.tree else min(limit, self.lookahead)
        self.moment = self.acceptance.now
        root = Candidate(-1, self.places_of_text() + self.places_in_stores(), True, True)
        self.nodes = [Node(-1, 0, root)]
        self.weigh(self.nodes[0])

    def follow(
        self,
        draft: Draft | DraftBatch,
        limit: int,
        *,
        least: float = 0.0,
        row: slice = slice(None),
    ) -> None:
        """Asserts that `draft` is what to draft: `limit` tokens at most, none below `least`.

        Of a batch, that its tokens of `row` are.
        """
        self.begin(limit)
        columns = (draft.token_ids, draft.parents, draft.probabilities, draft.sources)
        rows = zip(*(column[row].tolist() for column in columns), strict=True)
        for token, parent, probability, source in rows:
            waiting = self.waiting()
            chosen = waiting[parent, token]
            best = max(candidate.path for candidate in waiting.values())
            assert chosen.path >= max(best, least) - self.TIE, (chosen, best, least)
            assert abs(chosen.path - probability) < self.TIE, (chosen, probability)
            assert chosen.source == source, (chosen, source)
            self.take(parent, token)
        waiting = self.waiting()
        assert not waiting or least > 0, waiting
        for candidate in waiting.values():
            assert candidate.path < least + self.TIE, (candidate, least)

    def waiting(self) -> dict[tuple[int, int], Candidate]:
        """What may be drafted next, by the index of the parent in the draft and the token."""
        if len(self.nodes) > self.limit:
            return {}
        drafted = {(node.parent, node.candidate.token) for node in self.nodes}
        last = len(self.nodes) - 1
        return {
            (index - 1, candidate.token): candidate
            for index, node in enumerate(self.nodes)
            if node.depth < self.lookahead and (self.tree or index == last)
            for candidate in node.following
            if (index - 1, candidate.token) not in drafted
        }

    def take(self, parent: int, token: int) -> None:
        """Drafts a token that waits."""
        candidate = self.waiting()[parent, token]
        node = Node(parent, self.nodes[parent + 1].depth + 1, candidate)
        self.nodes.append(node)
        if len(self.nodes) <= self.limit and node.depth < self.lookahead:
            self.weigh(node)

    def observe(self, emitted: Sequence[int]) -> None:
        """Learns from what was weighed, and takes what the target emitted."""
        if self.nodes:
            self.learn(emitted)
        self.nodes = []
        for token in emitted:
            self.text.append(token)
            self.copy.follow(self.text)
            if self.prediction:
                self.prediction.follow(self.text)

    def learn(self, emitted: Sequence[int]) -> None:
        index = 0
        for token in emitted:
            for candidate in self.nodes[index].following:
                accepted = candidate.token == token
                self.acceptance.learn(candidate.evidence, candidate.token, self.moment, accepted)
            children = (
                child
                for child, node in enumerate(self.nodes[1:], 1)
                if node.parent + 1 == index and node.candidate.token == token
            )
            index = next(children, -1)
            if index < 0:
                return

    @property
    def draft(self) -> list[Node]:
        """What was drafted last, until it is observed."""
        return self.nodes[1:]

    def path_to(self, index: int) -> list[int]:
        """The tokens from the text's end to a drafted one; none for -1."""
        if index < 0:
            return []
        return [*self.path_to(self.draft[index].parent), self.draft[index].candidate.token]

    def accepted(self, emitted: Sequence[int]) -> list[Node]:
        """The drafted tokens that the emitted ones begin with."""
        path: list[Node] = []
        parent = -1
        for token in emitted:
            children = {n.candidate.token: n for n in self.draft if n.parent == parent}
            if token not in children:
                break
            path.append(children[token])
            parent = self.draft.index(children[token])
        return path

    def repeated(self) -> int:
        """How much of its end the text repeats; a tree is drafted as if that were nothing."""
        last = len(self.text) - 1
        longest = max((common_suffix(self.text, last, end) for end in range(last)), default=0)
        return 0 if self.tree else longest

    def places_of_text(self) -> list[Place]:
        text = self.text
        last = len(text) - 1
        lengths = [common_suffix(text, last, end) for end in range(last)]
        ends: list[int] = []
        for length in sorted(set(lengths) - {0}, reverse=True)[: self.SUFFIXES]:
            found = [end for end in range(last) if lengths[end] >= length]
            marked = (end for end in reversed(found) if length > unmarked_length(text, end))
            ends += [next(marked, found[0]), found[0]]
        if self.repeated() < self.STRONG:
            latest = [end for end in range(last - 1, -1, -1) if lengths[end]]
            ends += latest[: self.width.tokens]
        return [
            Place(
                copied(text, end + 1, self.lookahead + 1),
                min(lengths[end], self.LONGEST),
                end,
                stored=False,
                output=end + 1 >= self.prompt_size,
            )
            for end in dict.fromkeys(ends)
        ]

    def places_in_stores(self) -> list[Place]:
        repeated = self.repeated()
        if repeated >= self.CLEAR:
            return []
        least = min(max(repeated, 1), 4)
        ranked: list[tuple[int, int, Place]] = []
        for store in self.stores:
            found = store.find(
                self.text, most=self.width.stored, links=self.width.links, least=least
            )
            lengths = [occurrence.length for occurrence in found]
            for index, (end, length, output) in enumerate(found):
                says = store.read(end, self.lookahead).tolist()
                place = Place(says, length, end, stored=True, output=output)
                ranked.append((-length, index - lengths.index(length), place))
        # The longest; of equally long ones the latest of each store, then the second latest.
        ranked.sort(key=lambda item: item[:2])
        return [place for _, _, place in ranked[: self.width.stored]]

    def weigh(self, node: Node) -> None:
        """Weighs every token that anything says may follow `node`."""
        depth = node.depth
        places = [place for place in node.candidate.places if depth < len(place.says)]
        says: dict[int, list[Place]] = {}
        for place in places:
            says.setdefault(place.says[depth], []).append(place)
        copy = self.said_by(self.copy, self.text, depth) if node.candidate.copied else -1
        expected = -1
        if self.prediction and node.candidate.predicted:
            expected = self.said_by(self.prediction, self.prediction.tokens, depth)
        for token in (copy, expected):
            if token >= 0:
                says.setdefault(token, [])

        def reach(place: Place) -> int:
            return min(place.length + depth, self.LONGEST)

        def longest(some: Sequence[Place], stored: bool) -> int:
            return max((reach(place) for place in some if place.stored == stored), default=0)

        lengths = {
            token: (longest(agreeing, False), longest(agreeing, True))
            for token, agreeing in says.items()
        }
        own = [place for place in places if not place.stored]
        stored = [place for place in places if place.stored]
        # Of the longest ones of the text the latest; those of stores come in this order.
        of_text = max(own, key=lambda place: (reach(place), place.end)).says[depth] if own else -1
        of_store = max(stored, key=reach).says[depth] if stored else -1
        best = max((max(both) for both in lengths.values()), default=0)
        for token, agreeing in says.items():
            in_text, in_store = lengths[token]
            outdone = best >= self.STRONG and max(in_text, in_store) <= self.WEAK
            if outdone and not self.tree and token not in (copy, expected):
                continue
            rivals = [max(lengths[other]) for other in says if other != token]
            context, store = length_value(in_text), length_value(in_store)
            rival = length_value(max(rivals, default=0))
            votes = [sum(place.stored == kind for place in agreeing) for kind in (False, True)]
            written = [
                any(p.output for p in agreeing if p.stored == kind) for kind in (False, True)
            ]
            share = 5 * len(agreeing) // len(places) if places else 0
            evidence = {
                "context_length": context,
                "store_length": store,
                "rival_length": rival,
                "context_count": count_value(votes[0]),
                "store_count": count_value(votes[1]),
                "latest": relation(of_text, token) + 3 * relation(of_store, token),
                "copy": following_value(self.copy, copy, token, depth),
                "prediction": following_value(self.prediction, expected, token, depth),
                "both_lengths": 10 * context + store,
                "share": share + 6 * total_value(len(places)),
                "length_and_rival": 10 * max(context, store) + rival,
                "output": 10 * (2 * written[0] + written[1]) + max(context, store),
            }
            chance = self.acceptance.chance(evidence)
            source = (
                Source.PREDICTION
                if token == expected
                else Source.DATASTORE
                if in_store > in_text
                else Source.CONTEXT
            )
            path = node.candidate.path * chance
            node.following.append(
                Candidate(
                    token,
                    agreeing,
                    token == copy,
                    token == expected,
                    evidence,
                    chance,
                    path,
                    source,
                )
            )

    @staticmethod
    def said_by(cursor: CopyCursor, text: Sequence[int], depth: int) -> int:
        """The token that `cursor` expects after `depth` others; -1: none."""
        place = cursor.position + depth
        return text[place] if cursor.position >= 0 and place < len(text) else -1


def relation(said: int, token: int) -> int:
    return 0 if said < 0 else 1 if said == token else 2


def following_value(cursor: CopyCursor | None, said: int, token: int, depth: int) -> int:
    if cursor is None or said < 0:
        return 0
    length = length_value(cursor.length + depth)
    if said != token:
        return 8 + min(3, length // 3)
    if depth == 0 and cursor.footing == "guessed":
        return 1
    return 2 + min(4, length // 2)


def length_value(length: int) -> int:
    return bisect_right([1, 2, 3, 4, 5, 7, 10, 16, 32], length)


def count_value(count: int) -> int:
    return bisect_right([1, 2, 3, 5], count)


def total_value(total: int) -> int:
    return bisect_right([1, 2, 3, 6, 10], total)


class NgramModel:
    """What follows each n-gram of a prompt, for contexts shorter than `order`."""

    def __init__(self, prompt: Sequence[int], order: int) -> None:
        self.order = order
        self.following: dict[tuple[int, ...], list[int]] = {}
        for end, token in enumerate(prompt):
            for begin in range(max(0, end - order + 1), end + 1):
                self.following.setdefault(tuple(prompt[begin:end]), []).append(token)

    def suggest(
        self, text: Sequence[int], min_probability: float, limit: int
    ) -> list[tuple[int, float]]:
        """The tokens to draft after `text`, each with the probability that all are right so far."""
        grown = tuple(text)
        path = 1.0
        suggested: list[tuple[int, float]] = []
        while len(suggested) < limit and () in self.following:
            begin = max(0, len(grown) - self.order + 1)
            while grown[begin:] not in self.following:
                begin += 1
            seen = self.following[grown[begin:]]
            # Of the most frequent ones, that which was seen last.
            _, place = max((seen.count(token), place) for place, token in enumerate(seen))
            path *= seen.count(seen[place]) / len(seen)
            if path < min_probability:
                break
            grown += (seen[place],)
            suggested.append((seen[place], path))
        return suggested


class PredictedOutputs:
    """Predicted outputs as the service drafts them: windows, and a wait after every edit."""

    def __init__(self, prediction: Sequence[int], recovery: int) -> None:
        self.prediction = list(prediction)
        self.recovery = recovery
        self.next: int | None = 0  # the place in the prediction; None while recovering
        self.since: list[int] = []  # what was emitted since the output left the prediction

    def advance(self, token: int) -> None:
        """Takes the next output token."""
        if self.next is not None:
            if self.next < len(self.prediction) and self.prediction[self.next] == token:
                self.next += 1
                return
            self.next, self.since = None, []
        self.since.append(token)
        if len(self.since) >= self.recovery:
            for end in range(self.recovery, len(self.prediction) + 1):
                if self.prediction[end - self.recovery : end] == self.since[-self.recovery :]:
                    self.next = end
                    break

    def draft(self, limit: int) -> list[int]:
        """The tokens to verify next."""
        return [] if self.next is None else self.prediction[self.next : self.next + limit]
