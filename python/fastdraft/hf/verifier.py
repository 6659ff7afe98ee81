"""Verification of the drafts of a step, by the functions of `fastdraft.verification`.

The target's decoding loop and the stages of draft models verify by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.hf.device import lines_of, on_device
from fastdraft.hf.drafts import FlatDrafts
from fastdraft.hf.positions import Warping
from fastdraft.kernels.workspace import Size
from fastdraft.verification import (
    Verified,
    Workspace,
    verify_greedy,
    verify_rejection,
    verify_sampled,
)

__all__ = ["Choice", "Verifier"]

# A workspace has room for drafts of so many tokens from the start.
_MOST_DRAFTED = 16


class Choice(NamedTuple):
    """What the target made of the drafts of a step, on the host.

    Attributes:
        tokens: What each row emits: accepted tokens, then the target's own unless all tokens of its
            scores are -inf.
        paths: The accepted tokens of each row, as indices within its draft; `None` where all drafts
            are chains, of which it is the first ones.
        likeliest: int32 (lines, n), the likeliest tokens of each line of scores, -1 for what cannot
            come; `None` unless asked for.
        chances: float32 (lines, n), their probabilities.
        logprobs: The log-probability of each row's tokens in the distribution that they were chosen
            from; `None` unless asked for.
        raw_logprobs: The same under the softmax of the scores.
    """

    tokens: list[list[int]]
    paths: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None
    raw_logprobs: list[list[float]] | None = None
    likeliest: NDArray[np.int32] | None = None
    chances: NDArray[np.float32] | None = None

    def of(self, rows: Sequence[int]) -> Choice:
        """The same of these rows, without `likeliest`."""

        def chosen(column: list[Any] | None) -> Any:
            return None if column is None else [column[row] for row in rows]

        return Choice(*map(chosen, (self.tokens, self.paths, self.logprobs, self.raw_logprobs)))


class Verifier:
    """Verifies the drafts of one generation, step after step, in memory that it keeps.

    Args:
        warping: The last of the logits processors, which verification applies itself.
        logprobs: Whether to give log-probabilities.
    """

    def __init__(self, warping: Warping, *, logprobs: bool = False) -> None:
        self._warping = warping
        self._logprobs = logprobs
        self._workspaces: dict[bool, Workspace] = {}
        self._options: dict[int, dict[str, Any]] = {}

    def __call__(
        self,
        scores: torch.Tensor,
        drafts: FlatDrafts,
        *,
        seeds: NDArray[np.int64] | None,
        positions: NDArray[np.int64] | None,
        likeliest: int = 0,
    ) -> Choice:
        """Verifies the drafts of a step: greedily without seeds, else by sampling.

        Args:
            scores: (draft tokens + rows, vocabulary), as `fastdraft.verification` lays them out.
            drafts: The drafts; those that were drawn are chains.
            seeds: (rows,), the seed of each row, for its random numbers.
            positions: (rows,), the position of each row's first emitted token, for the same.
            likeliest: How many of each line's likeliest tokens to find. Drafts that were drawn have
                none.
        """
        drawn = sorted(drafts.draft_logits)
        if seeds is None or positions is None or len(drawn) in (0, len(drafts.by_row)):
            return _read(
                [self._verify(scores, drafts, seeds, positions, likeliest=likeliest)],
                is_tree=not drafts.are_chains,
            )
        # Drafts that were drawn and those that were not are verified apart, and read together.
        others = [row for row in range(len(seeds)) if row not in drafts.draft_logits]
        found = []
        for rows in (drawn, others):
            lines = np.flatnonzero(drafts.are_lines_of(rows))
            part = self._verify(
                lines_of(scores, lines), drafts.of(rows), seeds[rows], positions[rows]
            )
            found.append(part)
        choice = _read(found, is_tree=not drafts.are_chains)
        return choice.of(np.argsort(drawn + others).tolist())

    def _verify(
        self,
        scores: torch.Tensor,
        drafts: FlatDrafts,
        seeds: NDArray[np.int64] | None,
        positions: NDArray[np.int64] | None,
        *,
        likeliest: int = 0,
    ) -> Verified:
        # Copies, since a drafter may hand out read-only arrays.
        arrays = [drafts.token_ids.astype(np.int64), drafts.offsets.astype(np.int64)]
        if not drafts.are_chains:
            arrays.append(drafts.parents.astype(np.int64))
        if seeds is not None and positions is not None:
            arrays += seeds, positions
        ids, offsets, *more = on_device(scores.device, *arrays)
        memory = self._memory(scores, drafts, is_drawn=bool(drafts.draft_logits))
        options: dict[str, Any] = {"max_draft": drafts.longest, "workspace": memory}
        if self._logprobs:
            options.update(logprobs=True, raw_logprobs=True)
        if seeds is not None:
            rows = len(seeds)
            if rows not in self._options:
                self._options[rows] = self._warping.of_rows(rows, scores.device)
            options.update(self._options[rows], seeds=more[-2], positions=more[-1])
        if drafts.draft_logits:
            logits = torch.cat([drafts.draft_logits[row] for row in sorted(drafts.draft_logits)])
            return verify_rejection(scores, ids, offsets, draft_logits=logits, **options)
        if not drafts.are_chains:
            options["parents"] = more[0]
        if likeliest:
            options["likeliest"] = likeliest
        if seeds is None:
            return verify_greedy(scores, ids, offsets, **options)
        return verify_sampled(scores, ids, offsets, **options)

    def _memory(self, scores: torch.Tensor, drafts: FlatDrafts, *, is_drawn: bool) -> Workspace:
        """The workspace of one kind of verification, larger than any so far where it has to be."""
        rows, vocabulary = scores.shape
        needed = Size(rows, vocabulary, len(drafts.by_row), drafts.longest)
        workspace = self._workspaces.get(is_drawn)
        if workspace is None or not workspace.has_room(needed):
            most = needed if workspace is None else Size(*map(max, needed, workspace.size))
            max_draft = max(1 << (most.max_draft - 1).bit_length(), _MOST_DRAFTED)
            larger = Workspace(
                scores.device,
                max_rows=max(1 << most.rows.bit_length(), most.requests * (_MOST_DRAFTED + 1)),
                max_requests=most.requests,
                vocabulary=most.vocabulary,
                max_draft=max_draft,
            )
            # The operands of a generation are made alike, so they are checked once.
            larger.has_checked = workspace is not None and workspace.has_checked
            self._workspaces[is_drawn] = workspace = larger
        return workspace


def _read(found: Sequence[Verified], *, is_tree: bool) -> Choice:
    """What was verified, on the host: in one read."""
    names = ["token_ids"]
    if is_tree:
        names.append("path")
    if found[0].logprobs is not None:
        names += "logprobs", "raw_logprobs"
    parts = [getattr(verified, name) for name in names for verified in found]
    likeliest = found[0].likeliest
    if likeliest is not None:
        parts += likeliest
    if len(parts) == 1:
        return Choice(_without_padding(parts[0].numpy(force=True)))
    bits = [part.view(torch.int32) if part.is_floating_point() else part for part in parts]
    flat = torch.cat([part.reshape(-1) for part in bits]).numpy(force=True)
    ends = np.cumsum([part.numel() for part in parts])[:-1]
    arrays = [
        array.reshape(part.shape) for array, part in zip(np.split(flat, ends), parts, strict=True)
    ]
    columns: dict[str, Any] = {}
    for at, name in enumerate(names):
        of_requests = arrays[at * len(found) : (at + 1) * len(found)]
        if name in ("token_ids", "path"):
            columns[name] = [row for array in of_requests for row in _without_padding(array)]
        else:
            rows = [row for array in of_requests for row in array.view(np.float32).tolist()]
            tokens = columns["token_ids"]
            columns[name] = [row[: len(own)] for row, own in zip(rows, tokens, strict=True)]
    choice = Choice(columns.pop("token_ids"), columns.pop("path", None), **columns)
    if likeliest is None:
        return choice
    return choice._replace(likeliest=arrays[-2], chances=arrays[-1].view(np.float32))


def _without_padding(lines: NDArray[np.int32]) -> list[list[int]]:
    """The numbers of each line up to the first -1."""
    rows: list[list[int]] = lines.tolist()
    return [row[: row.index(-1)] if -1 in row else row for row in rows]
