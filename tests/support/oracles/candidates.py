"""The tokens that may follow a node of a draft, each with its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdraft import Source
from oracles.acceptance_model import (
    count_value,
    following_value,
    length_value,
    relation,
    total_value,
)
from oracles.copy_cursor import CopyCursor
from oracles.matches import LONGEST, STRONG, Match

WEAK = 1  # a chain leaves out a match so short beside one of STRONG


@dataclass
class Candidate:
    """A token that may follow a node of the draft."""

    token: int
    matches: list[Match]  # those that agree so far
    copied: bool  # True if the copy agrees so far
    predicted: bool  # True if the prediction does
    evidence: dict[str, int]
    source: Source
    names: Sequence[int] = ()  # its indices in TokenWeights
    weight: float = 0.0  # sum of the evidence's and the names' weights
    path: float = 1.0  # the product of the probabilities of the tokens up to it
    probability: float = 1.0  # that all of them are accepted


def expected_token(cursor: CopyCursor | None, text: Sequence[int], depth: int) -> int:
    """The token that `cursor` expects after `depth` others; -1: none."""
    if cursor is None or cursor.position < 0 or cursor.position + depth >= len(text):
        return -1
    return text[cursor.position + depth]


def find_candidates(
    matches: Sequence[Match],
    copy: tuple[CopyCursor | None, Sequence[int]],
    prediction: tuple[CopyCursor | None, Sequence[int]],
    depth: int,
    tree: bool,
    known: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> list[Candidate]:
    """Every token that a match, the copy or the prediction expects `depth` tokens on, and the
    most probable by a table of n-grams.

    `known`: what the table has behind the last token, the last two, ..., as tokens and half bits;
    None without a table.
    """
    matches = [match for match in matches if depth < len(match.following)]
    agreeing: dict[int, list[Match]] = {}
    for match in matches:
        agreeing.setdefault(match.following[depth], []).append(match)
    of_copy, of_prediction = (expected_token(*cursor, depth) for cursor in (copy, prediction))
    for token in (of_copy, of_prediction):
        if token >= 0:
            agreeing.setdefault(token, [])

    def reach(match: Match) -> int:
        return min(match.length + depth, LONGEST)

    def longest(token: int, stored: bool) -> int:
        return max((reach(m) for m in agreeing[token] if m.stored == stored), default=0)

    reaches = [
        cursor.length + depth
        for cursor, said in ((copy[0], of_copy), (prediction[0], of_prediction))
        if cursor and said >= 0
    ]
    asked = known is not None and (
        tree or max([*map(reach, matches), *reaches], default=0) < STRONG
    )
    matched = set(agreeing)
    if known is not None and asked:
        by_table = dict.fromkeys(token for behind in reversed(known) for token, _ in behind)
        for token in [*by_table][: 6 if tree else 2]:
            agreeing.setdefault(token, [])
    lengths = {token: (longest(token, False), longest(token, True)) for token in agreeing}
    own = [match for match in matches if not match.stored]
    stored = [match for match in matches if match.stored]
    # The latest of the longest ones of the text; those of stores come in this order.
    of_text = max(own, key=lambda match: (reach(match), match.end)).following[depth] if own else -1
    of_store = max(stored, key=reach).following[depth] if stored else -1
    best = max((max(both) for both in lengths.values()), default=0)
    candidates = []
    for token, (in_text, in_store) in lengths.items():
        dominated = best >= STRONG and max(in_text, in_store) <= WEAK
        if dominated and not tree and token not in (of_copy, of_prediction):
            continue
        rivals = [max(lengths[other]) for other in lengths if other != token]
        context, store = length_value(in_text), length_value(in_store)
        rival = length_value(max(rivals, default=0))
        both = [[m for m in agreeing[token] if m.stored == kind] for kind in (False, True)]
        written = [any(match.output for match in kind) for kind in both]
        share = 5 * len(agreeing[token]) // len(matches) if matches else 0
        evidence = {
            "context_length": context,
            "store_length": store,
            "rival_length": rival,
            "context_count": count_value(len(both[0])),
            "store_count": count_value(len(both[1])),
            "latest": relation(of_text, token) + 3 * relation(of_store, token),
            "copy": following_value(copy[0], of_copy, token, depth),
            "prediction": following_value(prediction[0], of_prediction, token, depth),
            "both_lengths": 10 * context + store,
            "share": share + 6 * total_value(len(matches)),
            "length_and_rival": 10 * max(context, store) + rival,
            "output": 10 * (2 * written[0] + written[1]) + max(context, store),
        }
        if known is not None and asked:
            evidence |= ngram_evidence(known, token, max(context, store), depth)
        nearest = max(both[in_store > in_text], key=reach, default=None)
        source = Source.CONTEXT if nearest is None else nearest.source
        if token not in matched:
            source = Source.NGRAMS
        if token == of_prediction:
            source = Source.PREDICTION
        candidates.append(
            Candidate(
                token, agreeing[token], token == of_copy, token == of_prediction, evidence, source
            )
        )
    return candidates


def ngram_evidence(
    known: Sequence[Sequence[tuple[int, int]]], token: int, length: int, depth: int
) -> dict[str, int]:
    """The classes that a table gives a token: by the longest context that it follows there."""
    for order, behind in reversed([*enumerate(known, 1)]):
        if token in dict(behind):
            half_bits = dict(behind)[token]
            value, kind = 1 + 12 * (order - 1) + half_bits, half_bits
            break
    else:
        value, kind = 37 + len(known), 12 + len(known)
    return {"ngram": value, "ngram_and_length": 1 + (10 * kind + length) * 3 + min(2, depth)}
