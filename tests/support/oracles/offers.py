"""The weights that offers add to the default drafter: the obvious version."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdraft import Source
from oracles.calibrated_drafter import CalibratedDrafter, Node
from oracles.candidates import Candidate

# As single-precision numbers, like confidences.
EDGES = tuple(
    float(np.float32(edge)) for edge in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
)
SURENESS = 8


def log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


def sureness(weight: float) -> int:
    return int(min(max(weight + 4.005, 0), SURENESS - 1))


class OfferModel:
    """Logistic regression over what an offer says of a token, on top of its weight without it."""

    def __init__(self) -> None:
        self.weights: dict[tuple[Any, ...], float] = {}
        self.counts: dict[tuple[Any, ...], int] = {}
        edges = (0.0, *EDGES, 1.0)
        for bin_ in range(13):
            probability = 0.6
            if bin_ > 0:
                probability = 0.2 + 0.75 * (edges[bin_ - 1] + edges[bin_]) / 2
            self.weights["confidence", True, bin_] = log_odds(probability)
            self.weights["confidence", False, bin_] = math.log(1 - probability)
        for level in range(SURENESS):
            self.weights["situation", "offer", level] = -math.log(1 + math.exp(level - 3.5))

    def weigh(self, evidence: Sequence[tuple[Any, ...]]) -> float:
        return sum(self.weights.get(each, 0.0) for each in evidence)

    def learn(self, evidence: Sequence[tuple[Any, ...]], before: float, accepted: bool) -> None:
        error = accepted - 1 / (1 + math.exp(-(before + self.weigh(evidence))))
        for each in evidence:
            self.counts[each] = self.counts.get(each, 0) + 1
            rate = max(0.01, 0.12 / math.sqrt(self.counts[each]))
            self.weights[each] = self.weights.get(each, 0.0) + rate * error


@dataclass
class Offer:
    """One kind's offer for one step: a tree of tokens."""

    token_ids: list[int]
    parents: list[int]
    confidences: list[float] | None
    model: OfferModel
    source: int
    record: list[float]  # the request's positions that were judged, and right

    def children(self, index: int) -> dict[int, int]:
        """The tokens offered after a node, with their indices; of equal ones the first counts."""
        found: dict[int, int] = {}
        for at, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if parent == index:
                found.setdefault(token, at)
        return found


@dataclass
class Weighed(Candidate):
    """A candidate, and what offers said of it."""

    indices: dict[int, int] = field(default_factory=dict)  # its index in each offer
    judgements: list[tuple[Offer, bool, list[tuple[Any, ...]], float]] = field(default_factory=list)


class OfferedDrafter(CalibratedDrafter):
    """The default drafter with offers: each corrects the weights of all before it."""

    offers: Sequence[Offer] = ()

    def begin(self, limit: int) -> None:
        self.found: dict[int, list[Candidate]] = {}  # the engine's own, by node
        super().begin(limit)

    def expand(self, node: Node) -> None:
        super().expand(node)
        self.found[len(self.nodes) - 1] = node.following
        if not self.offers:
            return
        above = node.candidate
        indices = above.indices if isinstance(above, Weighed) else None
        if node.parent < 0 and node.depth == 0:
            indices = dict.fromkeys(range(len(self.offers)), -1)
        following = [Weighed(**vars(each)) for each in node.following]
        for k, offer in enumerate(self.offers):
            children = offer.children(indices[k]) if indices and k in indices else {}
            if children:
                self.weigh(k, offer, children, following, node.depth)
        for each in following:
            each.path = above.path / (1 + math.exp(-each.weight))
        node.following = list(following)
        self.correct(node)

    def weigh(
        self,
        k: int,
        offer: Offer,
        children: dict[int, int],
        following: list[Weighed],
        depth: int,
    ) -> None:
        before = {each.token: each.weight for each in following}
        for token in children:
            if token not in before:
                new = Weighed(token, [], False, False, {}, Source.OFFER)
                new.source = offer.source  # type: ignore[assignment]
                following.append(new)

        def confidence_class(indices: Sequence[int]) -> int:
            if offer.confidences is None:
                return 0
            surest = max(offer.confidences[index] for index in indices)
            return 1 + bisect_right(EDGES, surest)

        siblings = [
            at
            for at, parent in enumerate(offer.parents)
            if parent == offer.parents[next(iter(children.values()))]
        ]
        judged, right = offer.record
        rightness = 0 if not judged else 1 + min(int((right + 1) / (judged + 2) * 5), 4)
        for each in following:
            offered = each.token in children
            rivals = [weight for token, weight in before.items() if token != each.token]
            if offered and each.token in before:
                situation: tuple[Any, ...] = ("situation", "both", sureness(each.weight))
            elif offered:
                level = sureness(max(rivals)) if rivals else SURENESS
                situation = ("situation", "offer", level)
            else:
                situation = ("situation", "other", sureness(each.weight))
            sure = confidence_class([children[each.token]] if offered else siblings)
            evidence = [
                situation,
                ("confidence", offered, sure),
                (*situation, sure),
                ("record", offered, rightness),
                ("depth", offered, min(depth, 7)),
            ]
            each.judgements.append((offer, offered, evidence, each.weight))
            if offered:
                each.indices[k] = children[each.token]
            each.weight += offer.model.weigh(evidence)

    def own(self, index: int) -> list[Candidate]:
        return self.found.get(index, [])

    def judge(self, index: int, emitted: int, begun: int) -> None:
        super().judge(index, emitted, begun)
        judged: dict[int, tuple[Offer, bool]] = {}
        for each in self.nodes[index].following:
            for offer, offered, evidence, before in getattr(each, "judgements", []):
                accepted = each.token == emitted
                offer.model.learn(evidence, before, accepted)
                hit = judged.get(id(offer), (offer, False))[1]
                judged[id(offer)] = offer, hit or (accepted and offered)
        for offer, hit in judged.values():
            offer.record[:] = [0.95 * offer.record[0] + 1, 0.95 * offer.record[1] + hit]
