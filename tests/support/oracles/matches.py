"""The positions where the last tokens of a request's text occur, in the text and in datastores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdraft import Datastore, Source
from oracles.running_texts import Others
from oracles.suffixes import common_suffix, copied, is_marked

Store = Datastore | Others

SUFFIXES, LONGEST = 3, 32
STRONG = 4  # beside a repeated suffix of this length a chain looks up no single tokens
CLEAR = 8  # and beside one of this length no datastores


@dataclass(frozen=True)
class Match:
    """A position where the text's last tokens occur."""

    following: list[int]  # the tokens that follow it, as far as they are known
    length: int
    end: int
    source: Source
    output: bool  # True if a model wrote the following tokens

    @property
    def stored(self) -> bool:
        """True if it is in a datastore."""
        return self.source != Source.CONTEXT


def find_matches(
    text: Sequence[int],
    prompt_size: int,
    stores: Sequence[Store],
    *,
    lookahead: int,
    tree: bool,
) -> list[Match]:
    """The matches that a draft is made from."""
    last = len(text) - 1
    lengths = [common_suffix(text, last, end) for end in range(last)]
    # A tree is drafted as if the text repeated none of its end.
    repeated = 0 if tree else max(lengths, default=0)
    ends: list[int] = []
    for length in sorted(set(lengths) - {0}, reverse=True)[:SUFFIXES]:
        found = [end for end in range(last) if lengths[end] >= length]
        marked = (end for end in reversed(found) if is_marked(text, end, length))
        ends += [next(marked, found[0]), found[0]]
    if repeated < STRONG:
        latest = [end for end in range(last - 1, -1, -1) if lengths[end]]
        ends += latest[: 16 if tree else 8]
    matches = [
        Match(
            copied(text, end + 1, lookahead + 1),
            min(lengths[end], LONGEST),
            end,
            source=Source.CONTEXT,
            output=end + 1 >= prompt_size,
        )
        for end in dict.fromkeys(ends)
    ]
    if repeated < CLEAR:
        matches += find_stored(text, stores, min(max(repeated, 1), 4), lookahead, tree)
    return matches


def find_stored(
    text: Sequence[int], stores: Sequence[Store], least: int, lookahead: int, tree: bool
) -> list[Match]:
    most, links = (32, 64) if tree else (8, 7)
    ranked: list[tuple[int, int, Match]] = []
    for store in stores:
        if isinstance(store, Datastore):
            source = Source.READ_ONLY if store.frozen else Source.DATASTORE
        else:
            source = Source.RUNNING
        found = store.find(text, most=most, links=links, least=least)
        lengths = [occurrence.length for occurrence in found]
        for index, (end, length, output) in enumerate(found):
            following = store.read(end, lookahead).tolist()
            match = Match(following, length, end, source, output=output)
            ranked.append((-length, index - lengths.index(length), match))
    # The longest; of equally long ones the latest of each store, then the second latest.
    ranked.sort(key=lambda item: item[:2])
    return [match for _, _, match in ranked[:most]]
