"""The decoding loop: draft, one forward of the target model over all rows, verification.

One loop for every drafter, for greedy decoding and for sampling. Rows accept different numbers of
tokens and end at different times; a row that has ended leaves the batch, and no row waits for
another.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft import DraftStats
from fastdraft.drafters import Drafter, Drafts
from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.hf.kv_cache import RowCache, on_host, places_after
from fastdraft.hf.masks import Masks
from fastdraft.hf.positions import PositionCriteria, PositionProcessors, Positions
from fastdraft.hf.row_model import RowModel
from fastdraft.hf.trees import TreeLayout, are_chains, best_chains
from fastdraft.step_cost import StepCost
from fastdraft.verification import (
    compaction_indices,
    verify_greedy,
    verify_rejection,
    verify_sampled,
)

__all__ = ["Decoding", "Row", "Target", "give_up"]

_UNLIMITED = int(np.iinfo(np.int32).max)


@dataclass
class Row:
    """One row of the batch.

    Attributes:
        index: Its place in the batch that the caller passed.
        prompt_tokens: Tokens of its prompt, padding not counted.
        seed: What its samples are drawn from.
        request: Its id at the drafter.
        emitted: How many tokens it has grown by.
        stats: What its drafts were worth, once it has ended.
        scores: The processed scores of its emitted tokens, each (vocabulary,), when they are kept.
        logits: The same before any processor.
    """

    index: int
    prompt_tokens: int
    seed: int
    request: int
    emitted: int = 0
    stats: DraftStats | None = None
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def give_up(drafter: Drafter, rows: Sequence[Row]) -> None:
    """Ends the requests of rows that have not ended. What went wrong before is what the caller
    hears of, not that the drafter fails here too."""
    for row in rows:
        if row.stats is None:
            with contextlib.suppress(Exception):
                drafter.cancel(row.request)


class Target:
    """The target model behind its prompts: answers the logits of the tokens that follow.

    Args:
        model: A causal language model.
        cache: Holds the keys and values of the prompts, each of `cached` columns.
        cached: Columns of the prompts in the cache, padding included.
        masks: Makes the attention masks that the model cannot make itself.
        next_positions: (..., rows or 1, 1) int64, where the model places the first token after the
            prompts; `None` when it places tokens by what the cache holds.
        last_position: The last position that the model can place; `None` for no end.
        kwargs: What every forward takes besides, as `generate` prepared it.
        device: Where the model takes its inputs.
        home: Where the caller's tensors are, and the logits are wanted.

    Attributes:
        vocabulary: How many token ids the model knows.
        takes_trees: Whether a draft may be a tree. The model's attention has to take a mask in
            which a token does not see all before it, and the model has to place a token where it
            is told to and not behind the one before it.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache: RowCache,
        cached: int,
        masks: Masks,
        next_positions: torch.Tensor | None,
        last_position: int | None,
        kwargs: dict[str, Any],
        device: torch.device,
        home: torch.device,
    ) -> None:
        self.cache = cache
        self.prompt_columns = cached
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.takes_trees = masks.takes_trees and next_positions is not None
        self._rows = RowModel(
            model, cache=cache, masks=masks, kwargs=kwargs, device=device, home=home
        )
        self._next_positions = next_positions
        self._last_position = last_position
        # Of each row, or one for all; the furthest of those along several axes.
        first = on_host([[cached]]) if next_positions is None else next_positions
        flat = first[..., 0].reshape(-1, first.shape[-2])
        self._first_places: list[int] = flat.amax(0).tolist()

    def room(self, row: Row) -> int:
        """How many tokens the model can place behind the last one of `row`."""
        if self._last_position is None:
            return _UNLIMITED
        first = self._first_places[row.index if len(self._first_places) > 1 else 0]
        return max(self._last_position - (first + row.emitted - 1), 0)

    def widest(self, row: Row) -> int:
        """How wide a forward with `row` may be.

        Where a model is told the positions, padding takes those of other tokens.
        """
        return _UNLIMITED if self._next_positions is not None else 1 + self.room(row)

    def cached(self, row: Row) -> int:
        """Columns of `row` in the cache: all of its text but the token emitted last."""
        return self.prompt_columns + row.emitted - 1

    def forward(
        self,
        rows: list[Row],
        input_ids: NDArray[np.int64],
        drafted: NDArray[np.int32],
        trees: TreeLayout | None,
    ) -> torch.Tensor:
        """The logits after each token, of shape (rows, width, vocabulary).

        Args:
            rows: The rows that run.
            input_ids: (rows, width), each row's last token, its draft, then padding.
            drafted: (rows,), the length of each draft.
            trees: How the tokens stand to each other; `None` where every draft is a chain.
        """
        indices = [row.index for row in rows]
        positions = None
        if self._next_positions is not None:
            # Padding stays at a token's position: one further on may not exist.
            if trees is None:
                steps = np.minimum(np.arange(input_ids.shape[1]), drafted[:, None])
            else:
                steps = trees.depths.numpy()
            steps = steps + np.array([[row.emitted - 1] for row in rows])
            first = self._next_positions
            if first.shape[-2] > 1:
                first = first[..., indices, :]
            positions = first + torch.from_numpy(steps).to(first.device)
        return self._rows.forward(
            torch.from_numpy(input_ids),
            rows=indices,
            cached=[self.cached(row) for row in rows],
            positions=positions,
            trees=trees,
        )

    def keep_accepted(self, rows: list[Row], kept: torch.Tensor) -> None:
        """Leaves of the latest forward's trees the accepted paths in the cache.

        Args:
            rows: The rows of the forward, not grown yet.
            kept: (rows, tokens) int64, for each place behind the text the token to stand there.
        """
        self.cache.compact([self.cached(row) for row in rows], kept, self._rows.device)


class Decoding:
    """One generation, from the logits of the prompts' last tokens to the end of every row.

    Args:
        target: The target model, the prompts in its cache.
        text: (rows, columns) int64, the padded prompts.
        rows: One for each row of `text`.
        processors: The logits processors.
        criteria: The stopping criteria.
        do_sample: Whether tokens are drawn, or the most probable is taken.
        drafter: What guesses.
        cost: What is known of the model's step cost.
        streamer: Receives every token as soon as it is accepted; for a single row. May be `None`.
        keep_scores: Whether to keep the processed scores of every emitted token.
        keep_logits: Whether to keep its logits.
    """

    def __init__(
        self,
        target: Target,
        *,
        text: NDArray[np.int64],
        rows: list[Row],
        processors: PositionProcessors,
        criteria: PositionCriteria,
        do_sample: bool,
        drafter: Drafter,
        cost: StepCost,
        streamer: Any,
        keep_scores: bool,
        keep_logits: bool,
    ) -> None:
        self.text = text
        self.rows = rows
        self._running = list(rows)
        self._columns: int = text.shape[1]
        self._target = target
        self._processors = processors
        self._criteria = criteria
        self._do_sample = do_sample
        self._drafter = drafter
        self._cost = cost
        self._streamer = streamer
        self._keep_scores = keep_scores
        self._keep_logits = keep_logits

    def length(self, row: Row) -> int:
        """Tokens of `row`, padding included."""
        return self._columns + row.emitted

    def run(self, first_logits: torch.Tensor) -> None:
        """Decodes to the end, given the logits after each prompt, of shape (rows, vocabulary)."""
        try:
            count = len(self._running)
            nothing = np.zeros(count + 1, dtype=np.int32)
            chosen = self._choose(first_logits, nothing[:0], None, nothing, {})
            self._conclude(chosen, nothing)
            while self._running:
                self._step()
        except BaseException:
            give_up(self._drafter, self._running)
            raise

    def _step(self) -> None:
        rows = self._running
        seconds, widths = self._cost.best_widths(len(rows))
        # Time by the tokens of all rows; only whole widths come up, the rest is in between.
        tokens = np.arange(1, len(rows) * len(seconds) + 1)
        batch = self._propose(np.interp(tokens, tokens[len(rows) - 1 :: len(rows)], seconds))
        offsets, draft_ids = batch.offsets, batch.token_ids
        if len(draft_ids) and int(draft_ids.max()) >= self._target.vocabulary:
            # On a GPU such an id would end the process.
            raise InvalidValueError(
                f"draft tokens must be below the model's vocabulary of {self._target.vocabulary}, "
                f"got {int(draft_ids.max())}: a datastore of another tokenizer?"
            )
        parents = None if are_chains(batch.parents, offsets) else batch.parents
        if parents is not None and not self._target.takes_trees:
            (draft_ids, offsets), parents = best_chains(batch), None
        drafted = np.diff(offsets)
        laws = self._laws(batch, drafted)
        longest = int(drafted.max())
        # A wider forward can be the faster one; its further tokens are padding.
        width = int(widths[longest]) if 0 < longest < len(widths) else longest + 1
        width = max(min(width, *map(self._target.widest, rows)), longest + 1)

        self._reserve(max(self.length(row) for row in rows) + longest)
        input_ids = np.empty((len(rows), width), dtype=np.int64)
        for slot, row in enumerate(rows):
            length, count = self.length(row), int(drafted[slot])
            line = self.text[row.index]
            line[length : length + count] = draft_ids[offsets[slot] : offsets[slot + 1]]
            input_ids[slot, : count + 1] = line[length - 1 : length + count]
            input_ids[slot, count + 1 :] = line[length + count - 1]

        started = time.perf_counter()
        trees = None if parents is None else TreeLayout.of(parents, offsets, width=width)
        logits = self._target.forward(rows, input_ids, drafted, trees)  # (rows, width, vocabulary)
        if len(rows) == 1:
            logits = logits[0, : longest + 1]
        elif width == 1:
            logits = logits[:, 0]
        else:
            # By index: what a mask selects is not known before the device has come to it.
            used = torch.from_numpy(np.flatnonzero(np.arange(width) <= drafted[:, None]))
            logits = logits.flatten(0, 1)[used.to(logits.device)]
        chosen = self._choose(logits, draft_ids, parents, offsets, laws)
        if chosen.kept is not None:
            self._target.keep_accepted(rows, chosen.kept)
        self._cost.observe(len(rows), width, time.perf_counter() - started)
        self._conclude(chosen, offsets)

    def _propose(self, cost: NDArray[np.float64]) -> Drafts:
        rows = self._running
        limits = np.full(len(rows), _UNLIMITED, dtype=np.int32)
        weighs_cost = getattr(self._drafter, "weighs_cost", True)
        if weighs_cost and self._cost.wants_plain_step(len(rows)):
            limits[:] = 0
        for slot, row in enumerate(rows):
            # The step emits one token more than it drafts.
            if self._criteria.max_length is not None:
                limits[slot] = min(limits[slot], self._criteria.max_length - self.length(row) - 1)
            limits[slot] = min(limits[slot], self._target.room(row))
        return self._drafter.propose_batch(
            [row.request for row in rows], limits=limits, cost=cost, padded=True
        )

    def _choose(
        self,
        logits: torch.Tensor,
        draft_ids: NDArray[np.int32],
        parents: NDArray[np.int32] | None,
        offsets: NDArray[np.int32],
        laws: dict[int, torch.Tensor],
    ) -> _Chosen:
        """What the target emits in this step; reading it waits for the device.

        Args:
            logits: (draft tokens + rows, vocabulary), each row's positions together.
            draft_ids: All drafts, one row after the other.
            parents: The parent of each of their tokens, an index within its own draft; `None` where
                all are chains.
            offsets: Where each row's draft begins.
            laws: What drafts were drawn from, as `Drafter.propose_batch` has it.
        """
        rows = self._running
        scores = logits
        if self._processors or self._keep_scores or logits.dtype == torch.float64:
            # As plain decoding has them. Processors may write to what they are given.
            scores = logits.to(torch.float32, copy=bool(self._processors))
        if self._processors:
            positions = self._positions(draft_ids, parents, offsets, logits.device)
            scores = self._processors(positions, scores)
        drafted = np.diff(offsets)
        drawn = [slot for slot in range(len(rows)) if slot in laws or not drafted[slot]]
        if laws and len(drawn) < len(rows):
            # Drafts that were drawn and those that were not have verifications of their own.
            tokens, kept = self._verify_apart(scores, draft_ids, parents, offsets, laws, drawn)
        else:
            in_order = [laws[slot] for slot in sorted(laws)]
            tokens, kept = self._verify(rows, scores, draft_ids, parents, offsets, in_order)
        for row, emitted in zip(rows, tokens, strict=True):
            if not emitted:
                raise FastdraftError(
                    f"row {row.index} has no token left to emit at position "
                    f"{row.prompt_tokens + row.emitted}: "
                    "the logits processors masked the whole vocabulary"
                )
        return _Chosen(tokens=tokens, scores=scores, logits=logits, kept=kept)

    def _verify_apart(
        self,
        scores: torch.Tensor,
        draft_ids: NDArray[np.int32],
        parents: NDArray[np.int32] | None,
        offsets: NDArray[np.int32],
        laws: dict[int, torch.Tensor],
        drawn: list[int],
    ) -> tuple[list[list[int]], torch.Tensor | None]:
        """As `_verify`, for the rows at the places `drawn` and the others, one after the other."""
        count = len(self._running)
        tokens: list[list[int]] = [[] for _ in range(count)]
        longest = int(np.diff(offsets).max())
        kept = torch.arange(longest + 1, device="cpu").repeat(count, 1)
        of_row = np.repeat(np.arange(count), np.diff(offsets))
        others = [slot for slot in range(count) if slot not in drawn]
        for slots in (drawn, others):
            rows = [self._running[slot] for slot in slots]
            in_part = np.isin(of_row, slots)
            starts = np.zeros(len(slots) + 1, dtype=np.int32)
            np.cumsum(np.diff(offsets)[slots], out=starts[1:])
            lines = np.concatenate(
                [np.arange(offsets[slot], offsets[slot + 1] + 1) + slot for slot in slots]
            )
            part_tokens, part_kept = self._verify(
                rows,
                scores[torch.from_numpy(lines).to(scores.device)],
                draft_ids[in_part],
                None if parents is None or slots is drawn else parents[in_part],
                starts,
                [laws[slot] for slot in slots if slot in laws],
            )
            for place, slot in enumerate(slots):
                tokens[slot] = part_tokens[place]
                if part_kept is not None:
                    kept[slot, : part_kept.shape[1]] = part_kept[place]
        return tokens, None if parents is None else kept

    def _verify(
        self,
        rows: list[Row],
        scores: torch.Tensor,
        draft_ids: NDArray[np.int32],
        parents: NDArray[np.int32] | None,
        offsets: NDArray[np.int32],
        laws: list[torch.Tensor],
    ) -> tuple[list[list[int]], torch.Tensor | None]:
        """The tokens that each of `rows` emits, and what the cache keeps of trees.

        As `_choose`; `laws` are those of all drafts, one after the other, or none.
        """
        # Copies, since a drafter may hand out read-only arrays.
        ids, starts = on_host(draft_ids), on_host(offsets)
        tree_parents = None if parents is None else on_host(parents)
        if not self._do_sample:
            verified = verify_greedy(scores, ids, starts, parents=tree_parents)
        else:
            seeds = on_host([row.seed for row in rows])
            positions = on_host([row.prompt_tokens + row.emitted for row in rows])
            if laws:
                verified = verify_rejection(
                    scores,
                    ids,
                    starts,
                    draft_logits=torch.cat(laws),
                    seeds=seeds,
                    positions=positions,
                )
            else:
                verified = verify_sampled(
                    scores, ids, starts, seeds=seeds, positions=positions, parents=tree_parents
                )
        kept = None if parents is None else compaction_indices(verified.path.cpu())
        return verified.tolist(), kept

    def score_drafts(
        self,
        logits: torch.Tensor,
        requests: Sequence[int],
        depths: Sequence[int],
        tails: dict[int, list[int]],
    ) -> torch.Tensor:
        """Shapes the logits of a draft model as those of the target are shaped.

        Args:
            logits: (positions, vocabulary).
            requests: The row of each position.
            depths: How many tokens stand before it behind the row's text.
            tails: These tokens, for each row.
        """
        if not self._processors:
            return logits
        scores = logits.to(torch.float32, copy=True)
        if not self._processors.read_text:
            positions = Positions(self._text_on(logits.device, 0), [], [], batch=len(self.rows))
            return self._processors(positions, scores)
        lengths = [self.length(self.rows[row]) for row in requests]
        lengths = [length + depth for length, depth in zip(lengths, depths, strict=True)]
        self._reserve(max(lengths))
        for row, tail in tails.items():
            start = self.length(self.rows[row])
            self.text[row, start : start + len(tail)] = tail
        text = self._text_on(logits.device, max(lengths))
        positions = Positions(text, requests, lengths, batch=len(self.rows))
        return self._processors(positions, scores)

    def _laws(self, batch: Any, drafted: NDArray[np.int32]) -> dict[int, torch.Tensor]:
        """What drafts were drawn from, for the tokens that are verified."""
        laws: dict[int, torch.Tensor] = getattr(batch, "laws", {})
        return {slot: law[: int(drafted[slot])] for slot, law in laws.items()}

    def _positions(
        self,
        draft_ids: NDArray[np.int32],
        parents: NDArray[np.int32] | None,
        offsets: NDArray[np.int32],
        device: torch.device,
    ) -> Positions:
        batch = len(self.rows)
        if not self._processors.read_text:
            return Positions(self._text_on(device, 0), [], [], batch=batch)
        drafted = np.diff(offsets)
        of_rows = np.repeat([row.index for row in self._running], drafted + 1).tolist()
        if parents is None:
            lengths = [
                self.length(row) + count
                for row, longest in zip(self._running, drafted.tolist(), strict=True)
                for count in range(longest + 1)
            ]
            return Positions(self._text_on(device, max(lengths)), of_rows, lengths, batch=batch)
        # A line for each position: the text, and the draft tokens that lead there.
        firsts = np.repeat([self.length(row) for row in self._running], drafted + 1).tolist()
        paths: list[list[int]] = []
        for start, end in pairwise(offsets.tolist()):
            root = len(paths)
            paths.append([])
            drafts = zip(draft_ids[start:end].tolist(), parents[start:end].tolist(), strict=True)
            for token, parent in drafts:
                paths.append([*paths[root + 1 + parent], token])
        lengths = [first + len(path) for first, path in zip(firsts, paths, strict=True)]
        lines = self.text[of_rows, : max(lengths)]
        for line, first, path in zip(lines, firsts, paths, strict=True):
            line[first : first + len(path)] = path
        text = torch.from_numpy(lines).to(device)
        return Positions(text, of_rows, lengths, lines=range(len(lines)), batch=batch)

    def _text_on(self, device: torch.device, columns: int) -> torch.Tensor:
        return torch.from_numpy(self.text[:, :columns]).to(device)

    def _conclude(self, chosen: _Chosen, offsets: NDArray[np.int32]) -> None:
        """Appends what was emitted, tells the drafter and the streamer, and lets rows end."""
        rows = self._running
        self._reserve(max(map(self.length, rows)) + max(map(len, chosen.tokens)))
        for row, emitted in zip(rows, chosen.tokens, strict=True):
            start = self.length(row)
            self.text[row.index, start : start + len(emitted)] = emitted
        standing, ended = self._standing(chosen)

        emitted_offsets = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(standing, out=emitted_offsets[1:])
        emitted_ids = np.concatenate(
            [
                np.array(emitted[:count], np.int32)
                for emitted, count in zip(chosen.tokens, standing, strict=True)
            ]
        )
        self._drafter.observe_batch([row.request for row in rows], emitted_ids, emitted_offsets)

        for slot, (row, count) in enumerate(zip(rows, standing, strict=True)):
            first = int(offsets[slot]) + slot
            chosen_from: slice | torch.Tensor = slice(first, first + count)
            if chosen.kept is not None:
                chosen_from = first + chosen.kept[slot, :count]
            if self._keep_scores:
                row.scores.extend(chosen.scores[chosen_from].clone())
            if self._keep_logits:
                row.logits.extend(chosen.logits[chosen_from].to(torch.float32, copy=True))
            row.emitted += count
        if self._streamer is not None:
            for token in emitted_ids.tolist():
                self._streamer.put(on_host([token]))

        if any(ended):
            for row, over in zip(rows, ended, strict=True):
                if over:
                    row.stats = self._drafter.finish(row.request)
            staying = places_after(ended)
            self._running = [rows[slot] for slot in staying]
            if staying:
                self._target.cache.keep(staying)

    def _standing(self, chosen: _Chosen) -> tuple[list[int], list[bool]]:
        """How many emitted tokens of each row stand, and whether the row ends with them."""
        rows, criteria = self._running, self._criteria
        standing: list[int] = []
        ended: list[bool] = []
        for row, emitted in zip(rows, chosen.tokens, strict=True):
            stop = criteria.stop_at(emitted, self.length(row))
            standing.append(len(emitted) if stop is None else stop)
            ended.append(stop is not None)
        if criteria.read_text:
            of_slots = [slot for slot, count in enumerate(standing) for _ in range(count)]
            counts = [number for count in standing for number in range(1, count + 1)]
            lengths = [
                self.length(rows[slot]) + number
                for slot, number in zip(of_slots, counts, strict=True)
            ]
            text = self._text_on(chosen.logits.device, max(lengths))
            indices = [rows[slot].index for slot in of_slots]
            positions = Positions(text, indices, lengths, batch=len(self.rows))
            stopped = criteria.stops(positions)
            for slot, number, stops in zip(of_slots, counts, stopped, strict=True):
                if stops and number <= standing[slot]:
                    standing[slot], ended[slot] = number, True
        if criteria.out_of_time():
            ended = [True] * len(rows)
        return standing, ended

    def _reserve(self, columns: int) -> None:
        if columns > self.text.shape[1]:
            grown = np.zeros((len(self.rows), 2 * columns), dtype=np.int64)
            grown[:, : self.text.shape[1]] = self.text
            self.text = grown


@dataclass(frozen=True)
class _Chosen:
    """What the target emits in a step: the tokens of each row, and what they were chosen from.

    Emitted token i of a row was chosen from the logits of its token `kept[row, i]` in the forward,
    of token i where `kept` is None, and the cache has to keep just these.
    """

    tokens: list[list[int]]
    scores: torch.Tensor  # (draft tokens + rows, vocabulary)
    logits: torch.Tensor
    kept: torch.Tensor | None  # (rows, longest draft + 1) int64
