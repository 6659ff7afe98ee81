"""Verification of the drafts of a step, by the kernels of `fastdraft.verification`.

The target's decoding loop and the stages of draft models verify by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.hf.device import on_device
from fastdraft.hf.drafts import StepDrafts
from fastdraft.hf.processors import Warping
from fastdraft.verification import Size, Verified, Workspace, warm_up
from fastdraft.verification.trusted import (
    Batch,
    Sampling,
    Warpers,
    check_batch,
    check_draft_logits,
    greedy,
    rejection,
    sampled,
)

__all__ = ["Choice", "Verifier"]

# Initial workspace capacity, in draft tokens.
_MOST_DRAFTED = 16


class Choice(NamedTuple):
    """The target's verdict on the drafts of a step, on the host.

    Attributes:
        tokens: What each row emits: accepted tokens, then the target's own unless all tokens of
            its scores are -inf.
        paths: The accepted tokens of each row, as indices within its draft; `None` where all drafts
            are chains, of which it is the first ones.
        likeliest: int32 (lines, n), the likeliest tokens of each line of scores, -1 for what cannot
            come; `None` unless asked for.
        probabilities: float32 (lines, n), theirs.
        logprobs: The log-probability of each token in the distribution that it was chosen from;
            `None` unless asked for.
        raw_logprobs: The same under the softmax of the scores.
        ended: Whether each row ends with its last token, where criteria were called along the path.
    """

    tokens: list[list[int]]
    paths: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None
    raw_logprobs: list[list[float]] | None = None
    likeliest: NDArray[np.int32] | None = None
    probabilities: NDArray[np.float32] | None = None
    ended: list[bool] | None = None

    def lines(self, firsts: Iterable[int]) -> list[list[int]]:
        """The line of scores that each token was chosen from, given each row's first one."""
        if self.paths is None:
            return [
                list(range(first, first + len(own)))
                for first, own in zip(firsts, self.tokens, strict=True)
            ]
        return [
            [first, *(first + 1 + node for node in path)][: len(own)]
            for first, path, own in zip(firsts, self.paths, self.tokens, strict=True)
        ]


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
        self._warpers: dict[int, Warpers] = {}
        # Operands of greedy steps without drafts, which are many.
        self._nothing: dict[StepDrafts, list[torch.Tensor]] = {}

    def __call__(
        self,
        scores: torch.Tensor,
        drafts: StepDrafts,
        *,
        draws: Sequence[tuple[int, int]] | None,
        likeliest: int = 0,
    ) -> Choice:
        """Verifies the drafts of a step: greedily without draws, else by sampling.

        Args:
            scores: (draft tokens + rows, vocabulary), as `fastdraft.verification` lays them out.
            drafts: The drafts; chains where some were drawn.
            draws: Of each row its seed and the position of its first emitted token, which random
                numbers depend on.
            likeliest: How many of each line's likeliest tokens to find; none where drafts were
                drawn.
        """
        ids, offsets, *more = self._operands(scores.device, drafts, draws)
        is_drawn = bool(drafts.draft_logits)
        parents = None if drafts.are_chains else more[0]
        if is_drawn not in self._workspaces:
            # The operands of a generation are made alike, so they are checked once.
            check_batch(scores, ids, offsets, None, parents, None, False, False, None)
            self._warm_up(scores, sampled=draws is not None, is_drawn=is_drawn)
        batch = Batch(
            scores,
            ids,
            offsets,
            drafts.longest,
            parents,
            logprobs=self._logprobs,
            raw_logprobs=self._logprobs,
            workspace=self._memory(scores, drafts, is_drawn=is_drawn),
            likeliest=likeliest,
        )
        if draws is None:
            return _read(greedy.verify(batch), paths=not drafts.are_chains)
        rows = len(draws)
        if rows not in self._warpers:
            self._warpers[rows] = Warpers(**self._warping.of_rows(rows, scores.device))
        sampling = Sampling(self._warpers[rows], *more[-2:])
        if is_drawn:
            logits = _draft_logits(drafts, ids, scores)
            check_draft_logits(batch, logits)
            return _read(rejection.verify(batch, sampling, logits))
        return _read(sampled.verify(batch, sampling), paths=not drafts.are_chains)

    def _operands(
        self,
        device: torch.device,
        drafts: StepDrafts,
        draws: Sequence[tuple[int, int]] | None,
    ) -> list[torch.Tensor]:
        """Draft tokens and offsets, parents of trees, and when sampling seeds and positions."""
        if draws is None and drafts in self._nothing:
            return self._nothing[drafts]
        # Copies, since a drafter may hand out read-only arrays.
        arrays = [drafts.token_ids.astype(np.int64), drafts.offsets.astype(np.int64)]
        if not drafts.are_chains:
            arrays.append(drafts.parents.astype(np.int64))
        if draws is not None:
            arrays += (np.array(each, np.int64) for each in zip(*draws, strict=True))
        sent = on_device(device, *arrays)
        if draws is None and not drafts.longest:
            self._nothing[drafts] = sent
        return sent

    def _warm_up(self, scores: torch.Tensor, *, sampled: bool, is_drawn: bool) -> None:
        """Has the kernels compiled on a GPU that steps after the first one may need."""
        warping = self._warping
        warm_up(
            scores.device,
            scores.dtype,
            scores.shape[1],
            sampled=sampled,
            filters=warping != Warping(temperature=warping.temperature),
            draft_logits=is_drawn,
            likeliest=not is_drawn,
            logprobs=self._logprobs,
            raw_logprobs=self._logprobs,
        )

    def _memory(self, scores: torch.Tensor, drafts: StepDrafts, *, is_drawn: bool) -> Workspace:
        """The workspace of one kind of verification, larger than any so far where it has to be."""
        rows, vocabulary = scores.shape
        needed = Size(rows, vocabulary, len(drafts.counts), drafts.longest)
        workspace = self._workspaces.get(is_drawn)
        if workspace is None or not workspace.has_room(needed):
            most = needed if workspace is None else Size(*map(max, needed, workspace.size))
            max_draft = max(1 << (most.max_draft - 1).bit_length(), _MOST_DRAFTED)
            workspace = Workspace(
                scores.device,
                max_rows=max(1 << most.rows.bit_length(), most.requests * (_MOST_DRAFTED + 1)),
                max_requests=most.requests,
                vocabulary=most.vocabulary,
                max_draft=max_draft,
            )
            self._workspaces[is_drawn] = workspace
        return workspace


def _draft_logits(drafts: StepDrafts, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The logits that each draft token was drawn from: of one that was not, itself alone."""
    parts = []
    tokens = torch.arange(scores.shape[1], device=scores.device)
    for row, (start, end) in enumerate(pairwise(drafts.offsets.tolist())):
        if row in drafts.draft_logits:
            parts.append(drafts.draft_logits[row])
        elif end > start:
            parts.append(torch.where(ids[start:end, None] == tokens, 0.0, -torch.inf))
    return torch.cat(parts)


def _read(verified: Verified, *, paths: bool = False) -> Choice:
    """The verified tokens, on the host: in one read."""
    parts = {"tokens": verified.token_ids}
    if paths:
        parts["paths"] = verified.path
    if verified.logprobs is not None and verified.raw_logprobs is not None:
        parts |= {"logprobs": verified.logprobs, "raw_logprobs": verified.raw_logprobs}
    if verified.likeliest is not None:
        parts["likeliest"], parts["probabilities"] = verified.likeliest
    if len(parts) == 1:
        return Choice(_without_padding(verified.token_ids.tolist()))
    bits = [each.view(torch.int32) if each.is_floating_point() else each for each in parts.values()]
    flat = torch.cat([each.reshape(-1) for each in bits])
    ends = np.cumsum([part.numel() for part in parts.values()])[:-1]
    found: dict[str, Any] = {}
    for array, (name, part) in zip(
        np.split(flat.numpy(force=True), ends), parts.items(), strict=True
    ):
        kind = np.float32 if part.is_floating_point() else np.int32
        found[name] = array.view(kind).reshape(part.shape)
    for name in ("tokens", "paths"):
        if name in found:
            found[name] = _without_padding(found[name].tolist())
    for name in ("logprobs", "raw_logprobs"):
        if name in found:
            rows = zip(found[name].tolist(), found["tokens"], strict=True)
            found[name] = [values[: len(own)] for values, own in rows]
    return Choice(**found)


def _without_padding(rows: list[list[int]]) -> list[list[int]]:
    """Rows of numbers up to the first -1."""
    return [row[: row.index(-1)] if row and row[-1] < 0 else row for row in rows]
