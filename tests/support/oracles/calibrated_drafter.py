"""The default drafter: the tokens most likely to be accepted, as a chain or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2

from fastdraft import Draft, DraftBatch, NgramTable, Source
from oracles.acceptance_model import AcceptanceModel, Sample, logistic
from oracles.candidates import Candidate, find_candidates
from oracles.copy_cursor import OwnCopy, Prediction
from oracles.matches import Store, find_matches
from oracles.token_weights import TokenWeights, names


@dataclass
class Node:
    """A drafted token, or the end of the text."""

    parent: int
    depth: int
    candidate: Candidate
    following: list[Candidate] = field(default_factory=list)


class CalibratedDrafter:
    """Says of every token that may be drafted next how likely it is to be accepted.

    `follow` drafts what an engine did, which decides between tokens that are as likely as each
    other.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        acceptance: AcceptanceModel,
        *,
        lookahead: int,
        tree: bool = False,
        prediction: Sequence[int] = (),
        stores: Sequence[Store] = (),
        named: TokenWeights | None = None,
        ngrams: NgramTable | None = None,
    ) -> None:
        self.text = list(prompt)
        self.prompt_size = len(self.text)
        self.acceptance = acceptance
        self.lookahead, self.tree, self.stores = lookahead, tree, stores
        self.named, self.ngrams = named, ngrams
        # The engine computes in single precision; where that rounds a step of token weights
        # otherwise, seven of them are off by 1 / 8192.
        self.tie = 1e-3 if named else 1e-4
        self.sample = Sample()
        self.copy = OwnCopy()
        self.prediction = Prediction(prediction) if prediction else None
        self.nodes: list[Node] = []
        self.version = 0  # when the nodes' candidates were weighed
        self.drawn = False  # True if the draft is a chain that was drawn elsewhere

    def begin(self, limit: int) -> None:
        """Begins a draft of at most `limit` tokens."""
        self.limit = limit if self.tree else min(limit, self.lookahead)
        self.version = self.acceptance.now
        matches = find_matches(
            self.text, self.prompt_size, self.stores, lookahead=self.lookahead, tree=self.tree
        )
        root = Candidate(-1, matches, True, True, {}, Source.CONTEXT)
        self.nodes = [Node(-1, 0, root)]
        self.expand(self.nodes[0])

    def expand(self, node: Node) -> None:
        """Weighs every token that may follow `node`."""
        above = node.candidate
        expected = self.prediction if above.predicted else None
        node.following = find_candidates(
            above.matches,
            (self.copy if above.copied else None, self.text),
            (expected, expected.tokens if expected else []),
            node.depth,
            self.tree,
            self.known([*self.text, *self.tokens_to(node)]),
        )
        second, last = [-1, -1, *self.text, *self.tokens_to(node)][-2:]
        for candidate in node.following:
            candidate.weight = self.acceptance.weigh(candidate.evidence)
            length, rival = divmod(candidate.evidence["length_and_rival"], 10)
            if self.named and (node.depth < 8 or length < 9):
                candidate.names = names(candidate.token, last, second, length, rival)
                candidate.weight += self.named.weigh(candidate.names)
            candidate.path = above.path * logistic(candidate.weight)
        self.correct(node)

    def known(self, text: list[int]) -> list[list[tuple[int, int]]] | None:
        """The entries of the table behind the text's last token, its last two, ..."""
        if self.ngrams is None:
            return None
        found: list[list[tuple[int, int]]] = []
        for order in range(1, 1 + min(3, len(text))):
            guesses = self.ngrams.guess(text[-order:], most=24)
            behind = [
                (g.token, round(-2 * log2(g.probability))) for g in guesses if g.order == order
            ]
            if not behind:
                break
            found.append(behind)
        return found

    def correct(self, node: Node) -> None:
        """Says how likely the tokens that may follow are to be accepted, with all before them."""
        for candidate in node.following:
            corrected = self.acceptance.path_probability(node.depth, candidate.path, self.tree)
            candidate.probability = min(node.candidate.probability, corrected)

    def follow(
        self,
        draft: Draft | DraftBatch,
        limit: int,
        *,
        least: float = 0.0,
        row: slice = slice(None),
        drawn: Sequence[int] | None = None,
    ) -> None:
        """Asserts that `draft` is what to draft: `limit` tokens at most, none below `least`.

        Of a batch, that its tokens of `row` are. If there are `drawn` tokens, that it is the chain
        of these.
        """
        self.begin(limit)
        self.drawn = drawn is not None
        columns = (draft.token_ids, draft.parents, draft.probabilities, draft.sources)
        rows = zip(*(column[row].tolist() for column in columns), strict=True)
        for token, parent, probability, source in rows:
            chosen = self.waiting()[parent, token]
            if drawn is None:
                best = self.most_probable()
                assert self.order(chosen) >= self.order(best) - self.tie, (chosen, best)
                assert chosen.probability >= least - self.tie, (chosen, least)
            assert abs(chosen.probability - probability) < self.tie, (chosen, probability)
            assert chosen.source == source, (chosen, source)
            self.append(parent, token)
        if drawn is not None:
            chain = list(drawn)[: min(limit, self.lookahead)]
            assert draft.token_ids[row].tolist() == chain
            assert draft.parents[row].tolist() == list(range(-1, len(chain) - 1))
            return
        if self.waiting():
            assert least > 0, self.waiting()
            assert self.most_probable().probability < least + self.tie, least

    def order(self, candidate: Candidate) -> float:
        """By what the next token is chosen: corrections may change the order of a chain's."""
        return candidate.probability if self.tree else candidate.path

    def most_probable(self) -> Candidate:
        """The token that is drafted next, of those that wait; of equals the first."""
        return max(self.waiting().values(), key=self.order)

    def waiting(self) -> dict[tuple[int, int], Candidate]:
        """The candidates for the next token, by their parent's index in the draft and token."""
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

    def append(self, parent: int, token: int) -> None:
        """Drafts a token that waits."""
        candidate = self.waiting()[parent, token]
        node = Node(parent, self.nodes[parent + 1].depth + 1, candidate)
        self.nodes.append(node)
        if len(self.nodes) <= self.limit and node.depth < self.lookahead:
            self.expand(node)

    def observe(self, emitted: Sequence[int]) -> None:
        """Learns from what was weighed, and appends what the target emitted."""
        if self.nodes:
            self.learn(emitted)
        self.nodes = []
        for token in emitted:
            self.text.append(token)
            self.copy.follow(self.text)
            if self.prediction:
                self.prediction.follow(self.text)

    def learn(self, emitted: Sequence[int]) -> None:
        self.learn_paths(emitted)
        begun, index = self.acceptance.now, 0
        for token in emitted:
            self.judge(index, token, begun)
            children = (
                child
                for child, node in enumerate(self.nodes[1:], 1)
                if node.parent + 1 == index and node.candidate.token == token
            )
            index = next(children, -1)
            if index < 0:
                return

    def judge(self, index: int, emitted: int, begun: int) -> None:
        """Learns which of the candidates behind a node was emitted, in a step begun at `begun`."""
        self.acceptance.learn(
            [(each.token, each.evidence, each.weight, each.names) for each in self.own(index)],
            self.version,
            begun,
            emitted,
            self.sample,
            self.named,
        )

    def own(self, index: int) -> list[Candidate]:
        """The candidates behind a node that were found in texts."""
        return self.nodes[index].following

    def learn_paths(self, emitted: Sequence[int]) -> None:
        """Learns which paths were accepted; of a chain, that of the token that ended it too.

        A chain that was drawn ends with what was drawn, however likely other tokens are.
        """
        nodes = self.nodes[1:]
        if not self.tree and not self.drawn and self.waiting():
            nodes.append(Node(len(nodes) - 1, len(nodes) + 1, self.most_probable()))
        for node in nodes:
            path = self.tokens_to(node)
            if path[: len(emitted)] != list(emitted[: len(path)]):
                accepted = False
            elif len(path) <= len(emitted):
                accepted = True
            else:
                continue
            self.acceptance.learn_path(node.depth - 1, node.candidate.path, self.tree, accepted)

    def tokens_to(self, node: Node) -> list[int]:
        """The tokens from the text's end to a node."""
        if node.depth == 0:
            return []
        return [*self.tokens_to(self.nodes[node.parent + 1]), node.candidate.token]

    @property
    def draft(self) -> list[Node]:
        """The draft that was made last, until it is observed."""
        return self.nodes[1:]

    def path_to(self, index: int) -> list[int]:
        """The tokens from the text's end to a drafted one; none for -1."""
        return self.tokens_to(self.nodes[index + 1]) if index >= 0 else []

    def accepted(self, emitted: Sequence[int]) -> list[Node]:
        """The drafted tokens that the emitted ones begin with."""
        return [node for node in self.draft if self.tokens_to(node) == list(emitted[: node.depth])]
