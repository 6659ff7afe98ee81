"""The decoding loop: draft, one forward of the target model over all rows, verification.

One loop for every drafter, for greedy decoding and for sampling. Rows accept different numbers of
tokens and end at different times; a row that has ended leaves the batch, and no row waits for
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, islice
from operator import sub
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft import step_latency
from fastdraft.drafters import Drafter
from fastdraft.engine import Engine, Offers, Session, Successors
from fastdraft.errors import FastdraftError
from fastdraft.hf.device import lines_of, on_device
from fastdraft.hf.drafts import StepDrafts
from fastdraft.hf.kv_cache import compacted_slots
from fastdraft.hf.processors import PositionCriteria, PositionProcessors, Positions, Warping
from fastdraft.hf.rows import UNLIMITED, Rows
from fastdraft.hf.step import CachedModel
from fastdraft.hf.verifier import Choice, Verifier
from fastdraft.hf.vocabulary import require_known_ids
from fastdraft.step_latency import StepLatency

__all__ = ["Decoding"]

# If a draft token costs more than this part of a step, drafts from logits lose on some text.
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
        rows: The rows, which grow by the emitted tokens.
        processors: The logits processors, but for those of `warping`.
        warping: The last of them, where verification applies these itself.
        criteria: The stopping criteria.
        do_sample: Whether tokens are drawn, or the most probable is taken.
        drafter: The drafter.
        session: Ends the rows' requests at the drafter.
        cost: The measured time of the model's steps.
        padding: Fills the texts of rows that have ended, as plain decoding has it.
        streamer: Receives every token as soon as it is accepted; for a single row. May be `None`.
        keep_scores, keep_logits: Whether to keep what every emitted token was chosen from, after
            and before the processors.
        keep_logprobs: Whether to keep its log-probabilities.
    """

    target: CachedModel
    rows: Rows
    processors: PositionProcessors
    warping: Warping
    criteria: PositionCriteria
    do_sample: bool
    drafter: Drafter
    session: Session
    cost: StepLatency
    padding: int
    streamer: Any
    keep_scores: bool
    keep_logits: bool
    keep_logprobs: bool

    def __post_init__(self) -> None:
        # The rows that have not ended, in the order of the cache.
        self._running = list(range(len(self.rows)))
        self._requests = list(self.rows.requests)
        # Seconds that pending tokens have cost a batch since its latest commit.
        self._paid = 0.0
        self._verifier = Verifier(self.warping, logprobs=self.keep_logprobs)
        self._one_by_one = self.processors.along_path or self.criteria.along_path
        self._weighs_cost = getattr(self.drafter, "weighs_cost", True)
        self._reads_text = self._one_by_one or bool(self.processors)
        # Likely successors by the logits, for trees; how many tokens of each line it takes now.
        self._successors: Successors | None = None
        self._likeliest = 0
        if isinstance(self.drafter, Engine) and self.target.takes_trees:
            self._tree_budget = self.drafter.config.tree_budget
            if self._tree_budget is not None:
                self._successors = Successors()

    def run(self, first_logits: torch.Tensor) -> None:
        """Decodes to the end, given the logits after each prompt, of shape (rows, vocabulary)."""
        self._conclude(self._choose(first_logits, StepDrafts.nothing(len(self._running))))
        while self._running:
            self._step()

    def _step(self) -> None:
        rows, running = self.rows, self._running
        batch = self.target.rows_in_forward(len(running))
        cached = rows.cached(running)
        starts = self.target.cache.starts(cached)
        # Tokens in front of the last one that recurrent layers have to be given again.
        behind = 0 if starts is cached else max(map(sub, cached, starts))
        seconds, widths = self.cost.best_widths(batch, _WIDEST + behind)
        if behind and len(running) > 1:
            starts = self._committed(starts, cached, seconds)
            behind = max(map(sub, cached, starts))
        drafts = self._propose(batch, seconds[behind:], behind)
        longest = drafts.longest
        fronts: Sequence[Sequence[int]] = [()] * len(running)
        if behind:
            fronts = self._texts(starts, cached)
        texts = zip(fronts, running, drafts.tolist(), strict=True)
        tokens = [[*front, rows.last[row], *draft] for front, row, draft in texts]
        width = max(map(len, tokens))
        # A wider forward can be the faster one; its further tokens are padding, which a recurrent
        # state would take for text.
        if 0 < longest < len(widths) - 1 and not self.target.cache.commits:
            wider = int(widths[longest])
            if self.target.first_positions is None:
                # Padding takes positions of its own.
                wider = min(wider, 1 + min(rows.room(running)))
            width = max(width, wider)

        is_warm = self.target.is_warm(width)
        started = step_latency.clock()
        logits = self.target.forward(
            tokens,
            width=width,
            rows=running,
            cached=starts,
            wanted=[1 + count for count in drafts.counts] if behind else None,
            trees=None if drafts.are_chains else drafts.sees(width),
        )
        choice = self._choose(logits, drafts)
        if choice.paths is not None:
            self.target.compact(running, cached, _kept(choice.paths, longest))
        if is_warm:
            self.cost.observe(batch, width, step_latency.clock() - started)
        self._conclude(choice)

    def _committed(
        self, starts: list[int], cached: list[int], seconds: NDArray[np.float64]
    ) -> list[int]:
        """The first token of each row, after a forward that commits most rows if that is due.

        Pending tokens have cost as much then as it takes, so it at most doubles what they cost.
        """
        counts = list(map(sub, cached, starts))
        self._paid += float(seconds[max(counts)] - seconds[0])
        width = sorted(counts)[int(_PART_BEHIND * (len(counts) - 1))]
        # A forward over a single token overwrites states, those of other rows too.
        if width < 2 or self._paid < seconds[width - 1]:
            return starts
        self._paid = 0.0
        texts = zip(self._running, self._texts(starts, cached), strict=True)
        self.target.forward(
            [[*front, self.rows.last[row]][:width] for row, front in texts],
            rows=self._running,
            cached=starts,
            wanted=[1] * len(starts),
        )
        return self.target.cache.starts(cached)  # type: ignore[no-any-return]

    def _texts(self, starts: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
        """The tokens of the running rows that stand in these columns of the cache."""
        # Prompts given as embeddings are no columns of the text.
        before = self.rows.columns - self.rows.prompt_columns
        return [
            self.rows.text[row, start - before : end - before].tolist()
            for row, start, end in zip(self._running, starts, ends, strict=True)
        ]

    def settle(self) -> None:
        """Brings the cache of a single row to the end of its text, but for the last token."""
        self._running = [0]
        cached = self.rows.cached(self._running)
        starts = self.target.cache.starts(cached)
        if starts != cached:
            self.target.forward(self._texts(starts, cached), rows=[0], cached=starts, wanted=[1])

    def _propose(self, batch: int, seconds: NDArray[np.float64], pending: int) -> StepDrafts:
        """The drafts of the next step, given the seconds of a forward by the tokens a row.

        The forward has `batch` rows, and `pending` further tokens a row.
        """
        rows, running = self.rows, self._running
        most = UNLIMITED if self.target.widths is None else self.target.widths[-1] - 1
        commits = len(running) == 1 and pending > _MOST_PENDING
        if commits or (self._weighs_cost and self.cost.wants_plain_step(batch)):
            most = 0
        end = self.criteria.max_length
        if end is None:
            limits = [min(room, most) for room in rows.room(running)]
        else:
            # The step emits one token more than it drafts.
            pairs = zip(rows.room(running), rows.lengths(running), strict=True)
            limits = [min(room, most, end - 1 - length) for room, length in pairs]
        cost = seconds
        if len(running) > 1:
            # By the tokens of all rows; only whole widths come up, the rest is in between.
            tokens = np.arange(1, len(running) * len(seconds) + 1)
            cost = np.interp(tokens, tokens[len(running) - 1 :: len(running)], seconds)
        offers = self._of_logits(seconds)
        found = self.drafter.propose_batch(
            self._requests,
            limits=np.array(limits, np.int32),
            cost=cost,
            padded=True,
            **({} if offers is None else {"offers": offers}),
        )
        require_known_ids(found.token_ids, self.target.vocabulary)
        drafts = StepDrafts.of(found)
        # If some were drawn, all are verified as chains.
        takes_trees = self.target.takes_trees and not drafts.draft_logits
        return drafts if drafts.are_chains or takes_trees else drafts.best_chains()

    def _of_logits(self, seconds: NDArray[np.float64]) -> Offers | None:
        """Offers for each row, learned from its logits; `None` unless drafts are cheap trees."""
        if self._successors is None:
            return None
        assert self._tree_budget is not None
        width = min(self._tree_budget, len(seconds) - 1)
        is_cheap = seconds[width] - seconds[0] <= _CHEAP * width * seconds[0]
        self._likeliest = _LIKELIEST if is_cheap else 0
        return self._successors.offers(self.rows.ends(self._running, 3)) if is_cheap else None

    def _learn(self, contexts: NDArray[np.int64], choice: Choice) -> None:
        """Learns the likeliest tokens behind the last two before each line, (lines, 2)."""
        assert self._successors is not None
        assert choice.likeliest is not None
        assert choice.probabilities is not None
        known = np.where(choice.likeliest < self.target.vocabulary, choice.likeliest, -1)
        self._successors.learn(contexts, known, choice.probabilities.clip(0, 1))

    def _choose(self, logits: torch.Tensor, drafts: StepDrafts) -> Choice:
        """The tokens that the target emits in this step; reading them waits for the device.

        Args:
            logits: (draft tokens + rows, vocabulary), each row's positions together.
            drafts: The drafts.
        """
        if self._reads_text:
            choice = self._follow(logits, drafts)
            if self.keep_logprobs:
                # Verification saw other logits than the model's own.
                choice = choice._replace(raw_logprobs=_raw_logprobs(choice, logits, drafts))
            return choice
        # Plain decoding compares float64 as float32 too.
        scores = logits.to(torch.float32) if logits.dtype == torch.float64 else logits
        depths = [0] * len(self._running)
        choice = self._verify(scores, drafts, self._running, depths, likeliest=self._likeliest)
        if choice.likeliest is not None:
            self._learn(drafts.contexts(self.rows.ends(self._running, 2)), choice)
        if self.keep_scores or self.keep_logits:
            for row, lines in zip(self._running, choice.lines(drafts.first_lines), strict=True):
                self._keep(row, scores, logits, lines)
        return choice

    def _keep(
        self, row: int, scores: torch.Tensor, logits: torch.Tensor, lines: Sequence[int]
    ) -> None:
        """Keeps the scores and logits that tokens of a row were chosen from, if asked for."""
        # Copies, which keep nothing else alive.
        if self.keep_scores:
            own = self.warping(lines_of(scores, lines).to(torch.float32, copy=True))
            self.rows.scores[row].append(own)
        if self.keep_logits:
            self.rows.logits[row].append(lines_of(logits, lines).to(torch.float32, copy=True))

    def _verify(
        self,
        scores: torch.Tensor,
        drafts: StepDrafts,
        rows: Sequence[int],
        depths: Sequence[int],
        *,
        likeliest: int = 0,
    ) -> Choice:
        """Verifies drafts behind the `depths` tokens that each of `rows` has emitted in this step.

        Raises:
            FastdraftError: A row that has emitted none has no token left to emit.
        """
        draws = self.rows.draws(rows, depths) if self.do_sample else None
        choice = self._verifier(scores, drafts, draws=draws, likeliest=likeliest)
        for row, own, depth in zip(rows, choice.tokens, depths, strict=True):
            if not own and not depth:
                raise FastdraftError(
                    f"row {row} has no token left to emit at position {self.rows.position(row)}: "
                    "the logits processors masked the whole vocabulary"
                )
        return choice

    def _follow(self, logits: torch.Tensor, drafts: StepDrafts) -> Choice:
        """`_choose` along the accepted path, with processors and criteria that read the text.

        Where all of them are known, each row goes on until it leaves its draft, in blocks of 1, 2,
        4, ... positions of the most probable chain: so at most about twice as many are processed as
        tokens are emitted. Others are called as plain decoding calls them, for one position of all
        rows at a time, whose texts are of one length; so the first row that leaves its draft or
        ends ends the step. One read for each block.

        Drawn drafts are verified whole, or where others are called, token by token.
        """
        running = self._running
        slots = list(range(len(running)))
        paths = [[-1] for _ in slots]  # from the text's last token on
        tokens: list[list[int]] = [[] for _ in slots]
        logprobs: list[list[float]] | None = [[] for _ in slots] if self.keep_logprobs else None
        ended = None
        size = UNLIMITED if drafts.draft_logits and not self._one_by_one else 1
        while slots:
            chains, lines, block = drafts.block(slots, [paths[slot][-1] for slot in slots], size)
            own = lines_of(logits, lines)
            if self._one_by_one:
                scores, choice = self._token(own, drafts, len(tokens[0]))
            else:
                before = [tokens[slot] for slot in slots]
                rows = [running[slot] for slot in slots]
                scores, choice = self._block(own, rows, before, block)
            children, first = {}, 0
            for at, (slot, chain) in enumerate(zip(slots, chains, strict=True)):
                found = choice.tokens[at][: len(chain)]
                if logprobs is not None and choice.logprobs is not None:
                    logprobs[slot] += choice.logprobs[at][: len(found)]
                self._keep(running[slot], scores, own, range(first, first + len(found)))
                first += len(chain)
                tokens[slot] += found
                paths[slot] += chain[1 : len(found)]
                child = drafts.child(slot, chain[len(found) - 1], found[-1]) if found else None
                if child is not None:
                    children[slot] = child
            if self._one_by_one:
                ended = self._ends_with(tokens)
                if any(ended) or len(children) < len(slots):
                    break
            for slot, child in children.items():
                paths[slot].append(child)
            slots, size = list(children), 1 if self._one_by_one else 2 * size
        accepted = None if drafts.are_chains else [path[1:] for path in paths]
        return Choice(tokens, accepted, logprobs, ended=ended)

    def _block(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        before: Sequence[Sequence[int]],
        block: StepDrafts,
    ) -> tuple[torch.Tensor, Choice]:
        """Verifies chains of some rows, behind the tokens that each has emitted in this step, after
        processors that are all known. Gives the scores too."""
        tails = [[*own, *tail] for own, tail in zip(before, block.tolist(), strict=True)]
        positions = Positions(self.rows, rows, tails, [1 + count for count in block.counts])
        scores = self.processors.at_positions(logits, positions)
        likeliest = 0 if block.draft_logits else self._likeliest
        choice = self._verify(scores, block, rows, list(map(len, before)), likeliest=likeliest)
        if choice.likeliest is not None:
            self._learn(positions.ends(2), choice)
        return scores, choice

    def _token(
        self, logits: torch.Tensor, drafts: StepDrafts, depth: int
    ) -> tuple[torch.Tensor, Choice]:
        """The next token of all rows behind `depth` of this step, which enters their texts, after
        processors that are called as plain decoding calls them. Gives the scores too."""
        running = self._running
        scores = self._processed(logits, depth)
        drawn = drafts.along(
            range(len(running)),
            [
                [depth] if row in drafts.draft_logits and depth < count else []
                for row, count in enumerate(drafts.counts)
            ],
        )
        # The token behind a drawn one is not known yet: its line decides nothing.
        again = [at for at, count in enumerate(drawn.counts) for _ in range(count + 1)]
        depths = [depth] * len(running)
        choice = self._verify(lines_of(scores, again), drawn, running, depths)
        for row, own in zip(running, choice.tokens, strict=True):
            self.rows.write(row, own[:1], behind=depth)
        return scores, choice

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
        (slots,) = on_device(scores.device, np.array(self._running))
        whole = scores.new_zeros((len(self.rows), scores.shape[1]))
        whole[slots] = scores
        processed = self.processors.all(text, whole)
        return processed[slots]

    def _whole_text(self, depth: int, device: torch.device) -> torch.Tensor:
        """The texts of all rows as plain decoding has them, those that have ended padded."""
        lengths = np.array(self.rows.lengths(range(len(self.rows))))
        lengths[self._running] += depth
        text = self.rows.text[:, : lengths[self._running[0]]].copy()
        text[np.arange(text.shape[1]) >= lengths[:, None]] = self.padding
        return on_device(device, text)[0]

    def _ends_with(self, tokens: Sequence[Sequence[int]]) -> list[bool]:
        """Says of each running row whether it ends with the last of its tokens of this step."""
        depth = len(tokens[0])
        lengths = self.rows.lengths(self._running)
        ended = [
            self.criteria.stop_at(own[-1:], length + depth - 1) <= 1
            for own, length in zip(tokens, lengths, strict=True)
        ]
        if self.criteria.read_text:
            stops = self.criteria.stop_rows(self._whole_text(depth, self.target.home))
            ended = [own or bool(stops[row]) for own, row in zip(ended, self._running, strict=True)]
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
        positions = Positions(self.rows, rows, tails, counts)
        return self.warping(self.processors.at_positions(logits, positions))

    def _conclude(self, choice: Choice) -> None:
        """Appends what was emitted, tells the drafter and the streamer, and lets rows end."""
        rows, running = self.rows, self._running
        emitted, ended = self._stopped(choice)
        for row, own in zip(running, emitted, strict=True):
            rows.grow(row, own)
        self.drafter.observe_batch(
            self._requests,
            np.array([token for own in emitted for token in own], np.int32),
            np.array([0, *accumulate(map(len, emitted))], np.int32),
        )

        if choice.logprobs is not None and choice.raw_logprobs is not None:
            for row, own, *kept in zip(
                running, emitted, choice.logprobs, choice.raw_logprobs, strict=True
            ):
                rows.logprobs[row].extend(kept[0][: len(own)])
                rows.raw_logprobs[row].extend(kept[1][: len(own)])
        if self.streamer is not None:
            for token in emitted[0]:
                self.streamer.put(torch.tensor([token], device="cpu"))

        if any(ended):
            for row in compress(running, ended):
                rows.stats[row] = self.session.finish(rows.requests[row])
            staying = compacted_slots(ended)
            self._running = [running[slot] for slot in staying]
            self._requests = [rows.requests[row] for row in self._running]
            if staying:
                self.target.keep(staying)

    def _stopped(self, choice: Choice) -> tuple[list[list[int]], list[bool]]:
        """The emitted tokens that each row keeps, and whether the row ends with them."""
        running, criteria = self._running, self.criteria
        emitted, ended = choice.tokens, choice.ended
        if ended is None:
            ends = list(map(criteria.stop_at, emitted, self.rows.lengths(running)))
            ended = [end <= len(own) for end, own in zip(ends, emitted, strict=True)]
            emitted = [own[:end] for end, own in zip(ends, emitted, strict=True)]
            if criteria.read_text:
                counts = list(map(len, emitted))
                positions = Positions(self.rows, running, emitted, counts)
                stops = criteria.stops(positions, self.target.home)
                of_rows = np.split(stops, list(accumulate(counts))[:-1])
                for slot, stopping in enumerate(of_rows):
                    if stopping.any():
                        emitted[slot] = emitted[slot][: 1 + int(stopping.argmax())]
                        ended[slot] = True
        if criteria.out_of_time():
            ended = [True] * len(running)
        return emitted, ended


def _kept(paths: Sequence[Sequence[int]], longest: int) -> NDArray[np.int64]:
    """Which new token each row keeps in each column, as `RowCache.compact` takes it."""
    kept = np.tile(np.arange(longest + 1), (len(paths), 1))
    for own, path in zip(kept, paths, strict=True):
        own[1 : len(path) + 1] = [node + 1 for node in path]
    return kept


def _raw_logprobs(choice: Choice, logits: torch.Tensor, drafts: StepDrafts) -> list[list[float]]:
    """The log-probabilities of the emitted tokens under the model's own logits, as in `Choice`."""
    lines = [line for own in choice.lines(drafts.first_lines) for line in own]
    tokens = np.array([token for own in choice.tokens for token in own], np.int64)
    (chosen,) = on_device(logits.device, tokens)
    logprobs = lines_of(logits, lines).to(torch.float32).log_softmax(-1)
    found = iter(logprobs.gather(1, chosen[:, None])[:, 0].tolist())
    return [list(islice(found, len(own))) for own in choice.tokens]
