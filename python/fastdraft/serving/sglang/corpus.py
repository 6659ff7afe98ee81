"""The engine, called as SGLang's n-gram corpus."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastdraft import DraftConfig, DraftStats, Offers, Successors
from fastdraft.errors import InvalidValueError
from fastdraft.serving.host import HostRequests, host_arguments, report_totals
from fastdraft.serving.ledger import Ledger
from fastdraft.serving.metrics import Totals
from fastdraft.serving.sglang.environment import (
    drafts_from_logits,
    memory_settings,
    ranks_of,
    target_of,
)
from fastdraft.serving.sglang.logits import Nodes
from fastdraft.serving.sglang.texts import RequestText, Row, ends_of

__all__ = ["Corpus"]

_Ints = NDArray[np.int64]

_REPORT_INTERVAL: Final = 1.0  # in seconds
_SLOTS: Final = 4096  # of each request's successors


class Corpus(HostRequests[RequestText]):
    """An engine that replaces SGLang's `NgramCorpus`, and is called as that is.

    Each rank of a tensor-parallel group has one, and all must draft the same. They do, since they
    get the same calls, and nothing here depends on a clock or, with several ranks, on a thread.

    Not thread-safe: SGLang calls it from the thread that schedules.
    """

    def __init__(
        self,
        *,
        draft_token_num: int,
        max_bfs_breadth: int = 2,
        vocabulary: int | None = None,
        server_args: Any = None,
        report: Callable[[Totals], None] | None = None,
        ledger: Ledger | None = None,
        **_: Any,
    ) -> None:
        """Makes a corpus as SGLang's worker makes its own.

        Args:
            draft_token_num: The nodes of a tree, its root included.
            max_bfs_breadth: 1 drafts chains, for attention backends that take no others.
            vocabulary: The number of tokens that the target knows.
            server_args: The server's own, which name the model.
            report: Takes the totals, once a second while there are requests, and when there are
                none any more.
            ledger: Takes what became of each prediction; of several ranks, one has it.

        The last four are fastdraft's own. What the worker has no option for comes from the
        environment, see `environment`.

        Raises:
            InvalidValueError: A value out of its range.
            DatastoreError: A datastore cannot be opened.
        """
        if draft_token_num < 2:
            raise InvalidValueError(
                f"speculative_num_draft_tokens must be at least 2, got {draft_token_num}"
            )
        longest = draft_token_num - 1
        # The host verifies all nodes whether they are drafted or not, so drafts cost nothing more.
        config = DraftConfig(
            lookahead=longest,
            tree_budget=None if max_bfs_breadth == 1 else longest,
            token_cost=0.0,
            vocabulary=vocabulary,
        )
        super().__init__(
            **host_arguments(memory_settings(server_args), config, target_of(server_args)),
            ledger=ledger,
            in_step=ranks_of(server_args) > 1,
        )
        self._width = draft_token_num
        self._vocabulary = vocabulary
        self._drafts_from_logits = max_bfs_breadth != 1 and drafts_from_logits(server_args)
        self._drafted: Nodes | None = None  # since the target saw them last
        self._report = report
        self._reported_at = -math.inf
        self._guard([], self._tell)
        if self.replica is not None and report is not None:
            report_totals(self.replica, report)

    def begin(self, reqs: Iterable[Any]) -> None:
        """Takes up those of a batch's `Req`s that are new. O(text) for a new one, else O(1)."""
        for req in reqs:
            text = self._texts.get(req.rid)
            if text is not None and text.output_ids is req.output_ids:
                continue
            self._end([req.rid])
            text = self._texts[req.rid] = RequestText(output_ids=req.output_ids)
            self._guard([text], self._start, text, req)

    def _start(self, text: RequestText, req: Any) -> None:
        params = getattr(req.sampling_params, "custom_params", None)
        # Requests that share no cache of prefixes in the host share no text here. The host adds the
        # adapter to the key of a request.
        adapter = getattr(req, "lora_id", None)
        salt = getattr(req, "cache_salt", None) or None
        key = getattr(req, "extra_key", None) or None
        own_key = None if key == adapter else key
        # As it was before the host put hashes of the images into it.
        prompt = getattr(req, "origin_input_ids_unpadded", req.origin_input_ids)
        text.prompt_size, text.begun = len(prompt), len(req.output_ids)
        most = req.sampling_params.max_new_tokens
        if most is not None and most - len(req.output_ids) < 2:
            # One token follows every draft.
            return
        known = [np.asarray(part, dtype=np.int64) for part in (prompt, req.output_ids)]
        params = params if isinstance(params, Mapping) else {}
        self._add(
            text,
            np.concatenate(known),
            params,
            adapter=adapter,
            salt=None if salt is None and own_key is None else (salt, own_key),
        )
        self._open_row(text, params)
        if self._drafts_from_logits and text.is_drafted:
            text.successors = Successors(slots=_SLOTS)

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: list[int]
    ) -> tuple[_Ints, _Ints]:
        """The drafts of the next step, after what the last one emitted.

        Args:
            req_ids: The requests, which `begin` has taken up.
            batch_tokens: The last tokens of each text, all new ones at least.
            total_lens: The length of each text, prompt and output.

        Returns:
            For each request the tokens of its nodes, int64, (requests * nodes,), and which nodes
            are their ancestors or themselves, 0 or 1, int64, (requests * nodes * nodes,). A node
            comes after its parent, and the tokens of its siblings differ. Unused nodes hold token
            0, each a child of the one before: siblings of the same token would count its
            probability several times when the host samples.

        One call of the engine for what was emitted and one for the drafts, and with logits one for
        what they said and one for what they offer; O(requests * nodes^2).
        """
        started = time.perf_counter()
        self._settle()
        tokens = np.zeros((len(req_ids), self._width), dtype=np.int64)
        tokens[:, 0] = [tail[-1] for tail in batch_tokens]
        parents = np.tile(np.maximum(np.arange(-1, self._width - 1), 0), (len(req_ids), 1))
        rows = [
            Row(slot, text, batch_tokens[slot], total_lens[slot])
            for slot, rid in enumerate(req_ids)
            if (text := self._texts.get(rid)) is not None and text.request is not None
        ]
        # Without what the logits say, requests are drafted for from text alone.
        self._guard([], self._learn)
        self._guard([row.text for row in rows], self._step, rows, tokens, parents)
        self._guard([], self._note, [row.text for row in rows])
        self._steps += 1
        self._seconds += time.perf_counter() - started
        self._guard([], self._tell)
        return tokens.reshape(-1), _ancestors(parents).reshape(-1)

    def _step(self, rows: list[Row], tokens: _Ints, parents: _Ints) -> None:
        # Rows whose tail does not fit their text have lost their request, and are left out.
        emitted = [self._guard([row.text], self._emitted, row) for row in rows]
        live = [(row, part) for row, part in zip(rows, emitted, strict=True) if part is not None]
        flat = [token for _, part in live for token in part]
        offsets = np.cumsum([0, *(len(part) for _, part in live)])
        self._observe([row.text for row, _ in live], flat, offsets)
        rows = [row for row, _ in live if row.text.request is not None]
        if not rows:
            return
        texts = [row.text for row in rows]
        offers = ends = None
        if self._drafts_from_logits:
            ends = ends_of(rows)
            offers = self._guard([], self._offers, texts, ends)
        drafts = self._propose(texts, [text.lookahead for text in texts], offers=offers)
        counts = np.diff(drafts.offsets)
        slots = np.array([row.slot for row in rows])
        at = np.repeat(slots, counts)
        nodes = 1 + np.arange(len(at)) - np.repeat(drafts.offsets[:-1], counts)
        tokens[at, nodes] = drafts.token_ids
        parents[at, nodes] = 1 + drafts.parents
        if ends is not None:
            used = np.arange(self._width) <= counts[:, None]
            last = tokens[slots]
            before = np.take_along_axis(last, parents[slots], axis=1)
            before[:, 0] = ends[:, -2]
            self._drafted = Nodes(
                texts,
                np.append(0, np.cumsum(1 + counts)),
                np.stack([before[used], last[used]], axis=1).astype(np.int32),
                (slots[:, None] * self._width + np.arange(self._width))[used],
            )

    def _offers(self, texts: list[RequestText], ends: NDArray[np.int32]) -> Offers:
        """The tokens that may follow each text, by the logits so far."""
        tables = [text.successors for text in texts if text.successors is not None]
        return Successors.offers_each(tables, ends, nodes=min(self._width - 1, 48))

    def verified(self, logits: Any) -> None:
        """Takes the logits that the drafts of the last `batch_get` were verified by.

        Their likeliest tokens are found on the device, whose stream copies them behind what the
        host copies; the next `batch_get` reads them. Waits for nothing.

        Args:
            logits: (requests * nodes, vocabulary), as the host sampled from them.
        """
        nodes = self._drafted
        # After an error no logits are taken any more: the next ones would hardly do better.
        if nodes is not None and not self._guard([], nodes.find_likeliest, logits, self._width):
            self._forgo_logits()

    def _learn(self) -> None:
        """Learns what the target said of the last drafts."""
        nodes, self._drafted = self._drafted, None
        if nodes is not None:
            nodes.learn(self._vocabulary)

    def _forgo_logits(self) -> None:
        """Drafts from text alone from here on."""
        self._drafts_from_logits = False
        self._drafted = None
        for text in self._texts.values():
            text.successors = None

    def _emitted(self, row: Row) -> Sequence[int]:
        """The last tokens of a text that the engine does not have yet."""
        assert row.text.request is not None
        known = self.engine.num_tokens(row.text.request)
        missing, reach = row.total - known, len(row.tail)
        # Those before the tail were emitted while the prompt was indexed.
        size = row.text.prompt_size
        before = (
            row.text.output_ids[known - size : row.total - reach - size] if missing > reach else []
        )
        if missing < 0 or missing > reach + len(before):
            raise InvalidValueError(
                f"a text of {row.total} tokens must be at most {reach} ahead of the one known, "
                f"got {missing}"
            )
        return [*before, *row.tail[max(reach - missing, 0) :]]

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing: `batch_get` takes in what requests emitted."""

    def synchronize(self) -> None:
        """Nothing: there is no work in the background."""

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Ends requests that finished, were aborted or must wait; unknown ones are skipped.

        Those that had to wait begin anew when they come back.
        """
        self._end(req_ids)
        self._guard([], self._tell)

    def _note(self, texts: Iterable[RequestText]) -> None:
        """Writes what became of predictions into the ledger."""
        for text in texts:
            if text.row is not None and text.request is not None:
                self._record(text, self.engine.stats(text.request))

    def _tell(self) -> None:
        """Reports the totals, where it is time to."""
        now = time.monotonic()
        if self._report is not None and (
            not self._texts or now - self._reported_at >= _REPORT_INTERVAL
        ):
            self._reported_at = now
            self._report(self.totals(self.stats))

    def totals(self, stats: DraftStats) -> dict[str, float]:
        """As for every host; what is learned from logits counts as part of the indexes."""
        found = super().totals(stats)
        tables = (text.successors for text in self._texts.values())
        found["request_bytes"] += sum(table.num_bytes for table in tables if table is not None)
        return found

    def _end(self, keys: Iterable[Hashable]) -> None:
        keys = list(keys)
        for key in keys:
            if key in self._texts:
                self._texts[key].successors = None
        super()._end(keys)

    def _give_up(self, text: RequestText) -> None:
        text.successors = None
        super()._give_up(text)

    def _finish(self, text: RequestText) -> None:
        if text.request is not None:
            known = self.engine.num_tokens(text.request)
            last = text.output_ids[known - text.prompt_size :]
            if last:
                self.engine.observe(text.request, last)
        else:
            text.missed = [list(text.output_ids[text.begun :])]
        super()._finish(text)

    def reset(self) -> None:
        """Forgets all running requests, as the host empties its key-value cache: weights change
        there, and text stays true. What is remembered stays: see `forget`."""
        for text in self._texts.values():
            self._give_up(text)
        self._texts.clear()
        self._drafted = None
        self._guard([], self._tell)

    def forget(self) -> None:
        """Forgets the text of all finished requests."""
        self.drain()
        self.memory.clear()
        self._memory_bytes = None
        self._guard([], self._tell)


def _ancestors(parents: _Ints) -> _Ints:
    """Which nodes are ancestors of each node or itself, 0 or 1, (requests, nodes, nodes).

    Args:
        parents: The parent of each node, (requests, nodes), the root's the root itself.

    Each pass looks twice as far up: O(requests * nodes^2 * log(nodes)).
    """
    rows, nodes = parents.shape
    every = np.arange(rows)[:, None]
    mask = np.tile(np.eye(nodes, dtype=np.bool_), (rows, 1, 1))
    for _ in range((nodes - 1).bit_length()):
        mask |= mask[every, parents]
        parents = parents[every, parents]
    return mask.astype(np.int64)
