"""The decoding loop: draft, one forward of the target model over all rows, verification.

One loop for every drafter, for greedy decoding and for sampling. Rows accept different numbers of
tokens and end at different times; a row that has ended leaves the batch, and no row waits for
another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft import step_latency
from fastdraft.drafters import Drafter
from fastdraft.engine import Engine, Offers, Successors
from fastdraft.errors import FastdraftError
from fastdraft.hf.device import lines_of, on_device
from fastdraft.hf.drafts import FlatDrafts, RowDraft
from fastdraft.hf.kv_cache import places_after
from fastdraft.hf.positions import PositionCriteria, PositionProcessors, Positions, Warping
from fastdraft.hf.rows import UNLIMITED, Row
from fastdraft.hf.step import CachedModel
from fastdraft.hf.verifier import Choice, Verifier
from fastdraft.hf.vocabulary import require_known_ids
from fastdraft.step_latency import StepLatency

__all__ = ["Decoding"]

# Where a draft token costs more than this part of a step, drafts from logits lose on some text.
_CHEAP = 0.005
# Tokens that a step may draft, and the last one of the text.
_WIDEST = 65
# With more pending tokens a single row's step has no draft: then its recurrent layers commit. Of 4
# to 10, modelled on recorded requests, 5 was best.
_MOST_PENDING = 5
# Rows with fewer pending tokens than this part of the others do not decide how many are committed.
_PART_BEHIND = 0.6
_LIKELIEST = 8


@dataclass
class Decoding:
    """One generation, from the logits of the prompts' last tokens to the end of every row.

    Attributes:
        target: The target model, the prompts in its cache.
        text: (rows, columns) int64, the padded prompts; grows by the emitted tokens.
        rows: One for each row of `text`.
        processors: The logits processors, but for those of `warping`.
        warping: The last of them, where verification applies these itself.
        criteria: The stopping criteria.
        do_sample: Whether tokens are drawn, or the most probable is taken.
        drafter: The drafter.
        cost: The measured time of the model's steps.
        padding: Fills the texts of rows that have ended, as plain decoding has it.
        streamer: Receives every token as soon as it is accepted; for a single row. May be `None`.
        keep_scores, keep_logits: Whether to keep what every emitted token was chosen from, after
            and before the processors.
        keep_logprobs: Whether to keep its log-probabilities.
    """

    target: CachedModel
    text: NDArray[np.int64]
    rows: list[Row]
    processors: PositionProcessors
    warping: Warping
    criteria: PositionCriteria
    do_sample: bool
    drafter: Drafter
    cost: StepLatency
    padding: int
    streamer: Any
    keep_scores: bool
    keep_logits: bool
    keep_logprobs: bool

    def __post_init__(self) -> None:
        self._running = list(self.rows)
        # Seconds that pending tokens have cost a batch since its latest commit.
        self._paid = 0.0
        self._columns: int = self.text.shape[1]
        self._verifier = Verifier(self.warping, logprobs=self.keep_logprobs)
        self._along_path = self.processors.along_path or self.criteria.along_path
        # What the logits say may follow, for trees; how many tokens of each line it takes now.
        self._successors: Successors | None = None
        self._likeliest = 0
        if isinstance(self.drafter, Engine) and self.target.takes_trees:
            self._tree_budget = self.drafter.config.tree_budget
            if self._tree_budget is not None:
                self._successors = Successors()

    def length(self, row: Row) -> int:
        """Tokens of `row`, padding included."""
        return self._columns + row.emitted

    def run(self, first_logits: torch.Tensor) -> None:
        """Decodes to the end, given the logits after each prompt, of shape (rows, vocabulary)."""
        nothing = FlatDrafts.of_rows([RowDraft()] * len(self._running))
        self._conclude(self._choose(first_logits, nothing))
        while self._running:
            self._step()

    def _step(self) -> None:
        rows = self._running
        batch = self.target.rows_in_forward(len(rows))
        indices, cached = [row.index for row in rows], [row.cached for row in rows]
        starts = self.target.starts(cached)
        seconds, widths = self.cost.best_widths(batch, _WIDEST + max(map(sub, cached, starts)))
        if self.target.commits and len(rows) > 1:
            starts = self._committed(starts, cached, seconds)
        # Tokens in front of the last one that recurrent layers have to be given again.
        pending = self._texts(starts, cached)
        behind = max(map(len, pending))
        drafts = self._propose(seconds[behind:], behind)
        longest = drafts.longest
        tokens = [
            [*front, row.last_token, *draft]
            for front, row, draft in zip(pending, rows, drafts.by_row, strict=True)
        ]
        width = needed = max(map(len, tokens))
        # A wider forward can be the faster one; its further tokens are padding, which a recurrent
        # state would take for text.
        if needed < len(widths) and longest > 0 and not self.target.commits:
            width = int(widths[longest])
        if self.target.first_positions is None:
            # Padding takes places of its own.
            width = min(width, *(1 + row.room for row in rows))
        width = max(width, needed)

        is_warm = self.target.is_warm(width)
        started = step_latency.clock()
        logits = self.target.forward(
            tokens,
            rows=indices,
            cached=starts,
            width=width,
            wanted=[1 + len(draft) for draft in drafts.by_row] if behind else None,
            trees=None if drafts.are_chains else drafts.sees(width),
        )
        choice = self._choose(logits, drafts)
        if choice.paths is not None:
            self.target.compact(indices, cached, _kept(choice.paths, longest))
        if is_warm:
            self.cost.observe(batch, width, step_latency.clock() - started)
        self._conclude(choice)

    def _committed(
        self, starts: list[int], cached: list[int], seconds: NDArray[np.float64]
    ) -> list[int]:
        """Where rows begin, after a forward that commits most of them if that is due.

        Pending tokens have cost as much then as it takes, so it at most doubles what they cost.
        """
        counts = list(map(sub, cached, starts))
        self._paid += float(seconds[max(counts)] - seconds[0])
        width = sorted(counts)[int(_PART_BEHIND * (len(counts) - 1))]
        # A forward over a single token changes states in place, those of other rows too.
        if width < 2 or self._paid < seconds[width - 1]:
            return starts
        self._paid = 0.0
        self.target.forward(
            [
                [*front, row.last_token][:width]
                for front, row in zip(self._texts(starts, cached), self._running, strict=True)
            ],
            rows=[row.index for row in self._running],
            cached=starts,
            width=width,
            wanted=[1] * len(starts),
        )
        return self.target.starts(cached)

    def _texts(self, starts: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
        """The tokens of the running rows that stand in these columns of the cache."""
        texts = []
        for row, start, end in zip(self._running, starts, ends, strict=True):
            # Prompts given as embeddings are no columns of the text.
            before = row.columns - self._columns
            texts.append(self.text[row.index, start - before : end - before].tolist())
        return texts

    def settle(self) -> None:
        """Brings the cache of a single row to the end of its text, but for the last token."""
        (row,) = self._running = self.rows
        starts = self.target.starts([row.cached])
        pending = self._texts(starts, [row.cached])
        if pending[0]:
            self.target.forward(pending, rows=[row.index], cached=starts, wanted=[1])

    def _propose(self, seconds: NDArray[np.float64], pending: int) -> FlatDrafts:
        """The drafts of the next step, given the seconds of a forward by the tokens a row.

        The forward has so many pending tokens a row, besides.
        """
        rows = self._running
        most = UNLIMITED if self.target.widths is None else self.target.widths[-1] - 1
        weighs_cost = getattr(self.drafter, "weighs_cost", True)
        in_forward = self.target.rows_in_forward(len(rows))
        commits = len(rows) == 1 and pending > _MOST_PENDING
        if commits or (weighs_cost and self.cost.wants_plain_step(in_forward)):
            most = 0
        # The step emits one token more than it drafts.
        longest = UNLIMITED if self.criteria.max_length is None else self.criteria.max_length - 1
        limits = [min(most, longest - self.length(row), row.room) for row in rows]
        cost = seconds
        if len(rows) > 1:
            # By the tokens of all rows; only whole widths come up, the rest is in between.
            tokens = np.arange(1, len(rows) * len(seconds) + 1)
            cost = np.interp(tokens, tokens[len(rows) - 1 :: len(rows)], seconds)
        offers = self._of_logits(seconds)
        batch = self.drafter.propose_batch(
            [row.request for row in rows],
            limits=np.array(limits, np.int32),
            cost=cost,
            padded=True,
            **({} if offers is None else {"offers": offers}),
        )
        require_known_ids(batch.token_ids, self.target.vocabulary)
        drafts = FlatDrafts.of_batch(batch)
        # Where some were drawn, all are verified as chains.
        takes_trees = self.target.takes_trees and not drafts.draft_logits
        return drafts if drafts.are_chains or takes_trees else drafts.best_chains()

    def _of_logits(self, seconds: NDArray[np.float64]) -> Offers | None:
        """What the logits so far say may follow each row, where drafts are cheap trees."""
        if self._successors is None:
            return None
        assert self._tree_budget is not None
        width = min(self._tree_budget, len(seconds) - 1)
        is_cheap = seconds[width] - seconds[0] <= _CHEAP * width * seconds[0]
        self._likeliest = _LIKELIEST if is_cheap else 0
        return self._successors.offers(self._ends(3)) if is_cheap else None

    def _ends(self, count: int) -> NDArray[np.int64]:
        """The last tokens of each row, (rows, count), -1 for those before its first column."""
        lengths = np.array([self.length(row) for row in self._running])
        columns = lengths[:, None] + np.arange(-count, 0)
        indices = np.array([row.index for row in self._running])[:, None]
        return np.where(columns < 0, -1, self.text[indices, columns.clip(0)])

    def _learn(
        self, drafts: FlatDrafts, token_ids: NDArray[np.int32], probabilities: NDArray[np.float32]
    ) -> None:
        """Learns the likeliest tokens of each line of logits."""
        assert self._successors is not None
        firsts = drafts.first_lines
        contexts = np.empty((len(token_ids), 2), np.int64)
        contexts[firsts] = self._ends(2)
        drafted = np.ones(len(token_ids), bool)
        drafted[firsts] = False
        contexts[drafted, 1] = drafts.token_ids
        parents = np.repeat(firsts, drafts.counts) + 1 + drafts.parents
        contexts[drafted, 0] = contexts[parents, 1]
        known = np.where(token_ids < self.target.vocabulary, token_ids, -1)
        self._successors.learn(contexts, known, probabilities.clip(0, 1))

    def _choose(self, logits: torch.Tensor, drafts: FlatDrafts) -> Choice:
        """The tokens that the target emits in this step; reading them waits for the device.

        Args:
            logits: (draft tokens + rows, vocabulary), each row's positions together.
            drafts: The drafts.
        """
        choice = self._follow(logits, drafts) if self._along_path else self._accept(logits, drafts)
        if self.keep_logprobs and (self._along_path or self.processors):
            # Verification saw other logits than the model's own.
            lines = np.concatenate(choice.lines(drafts.first_lines))
            raw_logprobs = _raw_logprobs(choice.tokens, lines_of(logits, lines))
            choice = choice._replace(raw_logprobs=raw_logprobs)
        return choice

    def _keep(
        self, scores: torch.Tensor, logits: torch.Tensor, lines: Sequence[NDArray[np.int64]]
    ) -> None:
        """Keeps the scores and logits that tokens of each row were chosen from."""
        for row, own in zip(self._running, lines, strict=True):
            # Copies, which keep nothing else alive.
            if self.keep_scores:
                row.scores.append(self.warping(lines_of(scores, own).to(torch.float32, copy=True)))
            if self.keep_logits:
                row.logits.append(lines_of(logits, own).to(torch.float32, copy=True))

    def _accept(self, logits: torch.Tensor, drafts: FlatDrafts) -> Choice:
        """`_choose` of whole drafts at a time."""
        scores = logits
        if self.processors:
            # A copy, since processors may write to what they are given.
            scores = logits.to(torch.float32, copy=True)
            scores = self.processors.at_positions(scores, self._positions(drafts))
        elif logits.dtype == torch.float64:
            scores = logits.to(torch.float32)  # as plain decoding has them
        choice = self._verify(scores, drafts)
        if self._successors is not None and choice.likeliest is not None:
            assert choice.chances is not None
            self._learn(drafts, choice.likeliest, choice.chances)
        if self.keep_scores or self.keep_logits:
            self._keep(scores, logits, choice.lines(drafts.first_lines))
        return choice

    def _verify(self, scores: torch.Tensor, drafts: FlatDrafts, depth: int = 0) -> Choice:
        """Verifies drafts behind so many tokens that each row has emitted in this step."""
        rows = self._running
        seeds = positions = None
        if self.do_sample:
            seeds = np.array([row.seed for row in rows])
            positions = np.array([row.prompt_tokens + row.emitted + depth for row in rows])
        choice = self._verifier(
            scores, drafts, seeds=seeds, positions=positions, likeliest=self._likeliest
        )
        if not all(choice.tokens):
            row = rows[choice.tokens.index([])]
            raise FastdraftError(
                f"row {row.index} has no token left to emit at position "
                f"{row.prompt_tokens + row.emitted + depth}: "
                "the logits processors masked the whole vocabulary"
            )
        return choice

    def _follow(self, logits: torch.Tensor, drafts: FlatDrafts) -> Choice:
        """`_choose` by processors and criteria that plain decoding would call once for each token.

        All rows go on by a token at a time, and so have texts of one length. The first that leaves
        its draft or ends ends the step. One read for each token.
        """
        rows = self._running
        nodes: list[Any] = [-1] * len(rows)
        paths: list[list[int]] = [[] for _ in rows]
        tokens: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        ended = [False] * len(rows)
        for depth in itertools.count():
            own = lines_of(logits, drafts.first_lines + 1 + np.array(nodes))
            scores = self._processed(own, depth)
            drawn = drafts.drawn_at(depth)
            # What would follow a drawn token is not known yet: its line decides nothing.
            again = np.repeat(np.arange(len(rows)), drawn.counts + 1)
            choice = self._verify(lines_of(scores, again), drawn, depth)
            if self.keep_scores or self.keep_logits:
                self._keep(scores, own, list(np.arange(len(rows))[:, None]))
            for line, found in zip(logprobs, choice.logprobs or (), strict=False):
                line.append(found[0])
            for emitted, row, chosen in zip(tokens, rows, choice.tokens, strict=True):
                emitted.append(chosen[0])
                self._write([row.index], [self.length(row) + depth], [chosen[:1]])
            ended = self._ends_at(depth + 1, tokens)
            nodes = [
                drafts.child(row, node, emitted[-1])
                for row, (node, emitted) in enumerate(zip(nodes, tokens, strict=True))
            ]
            if any(ended) or None in nodes:
                break
            for path, node in zip(paths, nodes, strict=True):
                path.append(node)
        return Choice(tokens, None if drafts.are_chains else paths, logprobs, ended=ended)

    def _processed(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """The logits (rows, vocabulary) of the running rows after the processors, each row behind
        `depth` tokens of this step."""
        scores = logits.to(torch.float32, copy=True)
        if not self.processors:
            return scores
        text = self._whole_text(depth, scores.device)
        if len(self._running) == len(self.rows):
            processed: torch.Tensor = self.processors.all(text, scores)
            return processed
        (places,) = on_device(scores.device, np.array([row.index for row in self._running]))
        whole = scores.new_zeros((len(self.rows), scores.shape[1]))
        whole[places] = scores
        processed = self.processors.all(text, whole)
        return processed[places]

    def _whole_text(self, depth: int, device: torch.device) -> torch.Tensor:
        """The texts of all rows as plain decoding has them, those that have ended padded."""
        length = self.length(self._running[0]) + depth
        text = self.text[:, :length].copy()
        for row in self.rows:
            text[row.index, self.length(row) + depth * (row in self._running) :] = self.padding
        return on_device(device, text)[0]

    def _ends_at(self, depth: int, tokens: Sequence[Sequence[int]]) -> list[bool]:
        """Whether each running row ends with its token `depth` of this step."""
        ended = [
            self.criteria.stop_at(emitted[-1:], self.length(row) + depth - 1) is not None
            for row, emitted in zip(self._running, tokens, strict=True)
        ]
        if self.criteria.read_text:
            stops = self.criteria.stop_rows(self._whole_text(depth, self.target.home))
            ended = [was or stops[row.index] for row, was in zip(self._running, ended, strict=True)]
        return ended

    def shaped(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        tails: Sequence[Sequence[int]],
        counts: Sequence[int],
    ) -> torch.Tensor:
        """The scores of a draft model's logits, by the logits processors that are called at every
        position. The others see accepted tokens only.

        Args:
            logits: (positions, vocabulary), each row's positions together.
            rows: The index of each row.
            tails: The tokens behind the text of each row, drafts for example.
            counts: How many positions each row has: the last one behind its tail, the others before
                it.
        """
        if not self.processors:
            return self.warping(logits)
        positions = self._behind([self.rows[row] for row in rows], tails, counts)
        # A copy, since processors may write to what they are given.
        scores = logits.to(torch.float32, copy=True)
        return self.warping(self.processors.at_positions(scores, positions))

    def _positions(self, drafts: FlatDrafts) -> Positions:
        """The positions of a step, for processors that read the text."""
        if drafts.are_chains:
            return self._behind(self._running, drafts.by_row, (drafts.counts + 1).tolist())
        paths: list[list[int]] = []
        for tokens, parents in zip(drafts.by_row, drafts.parents_by_row, strict=True):
            first = len(paths) + 1
            paths.append([])
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*paths[first + parent], token])
        rows = np.repeat(np.arange(len(self._running)), drafts.counts + 1)
        return self._behind([self._running[row] for row in rows], paths, [1] * len(paths))

    def _behind(
        self, rows: Sequence[Row], tails: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> Positions:
        """The positions behind the texts of rows and the first tokens of tails, as `Positions`."""
        starts = list(map(self.length, rows))
        return Positions(self.text, [row.index for row in rows], starts, tails, counts)

    def _conclude(self, choice: Choice) -> None:
        """Appends what was emitted, tells the drafter and the streamer, and lets rows end."""
        rows = self._running
        indices = [row.index for row in rows]
        self._write(indices, list(map(self.length, rows)), choice.tokens)
        counts, ended = self._stopped(choice)
        token_ids: list[int] = []
        starts = [0]
        for row, tokens, count in zip(rows, choice.tokens, counts, strict=True):
            token_ids += tokens[:count]
            starts.append(len(token_ids))
            row.last_token = tokens[count - 1]
        self.drafter.observe_batch(
            [row.request for row in rows], np.array(token_ids, np.int32), np.array(starts, np.int32)
        )

        if choice.raw_logprobs is not None:
            assert choice.logprobs is not None
            for slot, (row, count) in enumerate(zip(rows, counts, strict=True)):
                row.logprobs.extend(choice.logprobs[slot][:count])
                row.raw_logprobs.extend(choice.raw_logprobs[slot][:count])
        for row, count in zip(rows, counts, strict=True):
            row.emitted += count
        if self.streamer is not None:
            for token in token_ids:
                self.streamer.put(torch.tensor([token], device="cpu"))

        if any(ended):
            for row, over in zip(rows, ended, strict=True):
                if over:
                    row.stats = self.drafter.finish(row.request)
            staying = places_after(ended)
            self._running = [rows[slot] for slot in staying]
            if staying:
                self.target.keep(staying)

    def _stopped(self, choice: Choice) -> tuple[list[int], list[bool]]:
        """How many emitted tokens each row keeps, and whether the row ends with them."""
        rows, criteria = self._running, self.criteria
        if choice.ended is not None:
            over = criteria.out_of_time()
            return list(map(len, choice.tokens)), [each or over for each in choice.ended]
        counts: list[int] = []
        ended: list[bool] = []
        for row, tokens in zip(rows, choice.tokens, strict=True):
            stop = criteria.stop_at(tokens, self.length(row))
            counts.append(len(tokens) if stop is None else stop)
            ended.append(stop is not None)
        if criteria.read_text:
            tails = [tokens[:count] for tokens, count in zip(choice.tokens, counts, strict=True)]
            stops = iter(criteria.stops(self._behind(rows, tails, counts), self.target.home))
            for slot, tail in enumerate(tails):
                of_row = list(itertools.islice(stops, len(tail)))
                if True in of_row:
                    counts[slot], ended[slot] = of_row.index(True) + 1, True
        if criteria.out_of_time():
            ended = [True] * len(rows)
        return counts, ended

    def _write(
        self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Writes the tokens of each row to its text, from a column on."""
        columns = max(map(sum, zip(starts, map(len, tokens), strict=True)))
        if columns > self.text.shape[1]:
            grown = np.zeros((len(self.rows), 2 * columns), dtype=np.int64)
            grown[:, : self.text.shape[1]] = self.text
            self.text = grown
        for row, start, line in zip(rows, starts, tokens, strict=True):
            self.text[row, start : start + len(line)] = line


def _kept(paths: Sequence[Sequence[int]], longest: int) -> NDArray[np.int64]:
    """Which of its new tokens a row has to keep in each place, as `RowCache.compact` takes it."""
    kept = np.tile(np.arange(longest + 1), (len(paths), 1))
    for line, path in zip(kept, paths, strict=True):
        line[1 : len(path) + 1] = np.array(path, dtype=np.int64) + 1
    return kept


def _raw_logprobs(tokens: Sequence[Sequence[int]], logits: torch.Tensor) -> list[list[float]]:
    """The log-probabilities of each row's tokens under the model's own logits, a line for each."""
    (chosen,) = on_device(logits.device, np.concatenate(tokens))
    logprobs = logits.to(torch.float32).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    found = iter(logprobs.tolist())
    return [list(itertools.islice(found, len(row))) for row in tokens]
