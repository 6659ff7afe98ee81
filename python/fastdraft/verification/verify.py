"""Verification of drafts without probabilities: greedy and sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import reference
from fastdraft.kernels.reference import Status
from fastdraft.verification.checks import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    check_batch,
    check_integers,
    check_option,
    on_host,
)


@dataclass(frozen=True, eq=False)
class Verified:
    """What a verification emitted, on the logits' device.

    token_ids: int32 (requests, longest draft + 1), accepted tokens, then the recovered or bonus
        token, then -1.
    lengths: int32 (requests,), how many tokens were emitted: accepted + 1, or the accepted ones
        alone where an empty row ended them.
    status: int32 (requests,), bits of `Status`, 0 when all is well.
    """

    token_ids: Tensor
    lengths: Tensor
    status: Tensor
    _tree_path: Tensor | None = None

    @property
    def path(self) -> Tensor:
        """The accepted draft tokens as indices within their draft, in order, then -1.

        int32 (requests, longest draft); for a chain 0, 1, 2, ... These are the draft tokens whose
        keys and values a cache keeps.
        """
        if self._tree_path is not None:
            return self._tree_path
        # The last emitted token is no draft token, unless an empty row left it out.
        stopped = (self.status & Status.EMPTY) != 0
        accepted = (self.lengths - 1 + stopped.int())[:, None]
        index = torch.arange(self.token_ids.shape[1] - 1, dtype=torch.int32, device=accepted.device)
        return torch.where(index < accepted, index, -1)

    def tolist(self) -> list[list[int]]:
        """The emitted tokens of each request, without padding. Waits for the device."""
        rows: list[list[int]] = self.token_ids.tolist()
        lengths: list[int] = self.lengths.tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


@torch.no_grad()
def verify_greedy(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    parents: Tensor | None = None,
    max_draft: int | None = None,
) -> Verified:
    """Keeps the draft tokens that are the target's greedy tokens, and adds the next one.

    Args:
        logits, draft_ids, offsets, parents: the ragged batch, as the module describes it.
        max_draft: the result has max_draft + 1 columns. Without it, that of the longest draft, or
            of all drafted tokens together when the offsets are on a device. On a device, a longer
            draft is cut to max_draft tokens.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range.

    Time is linear in the logits, which are read once.
    """
    draft_ids, offsets, parents, max_draft = check_batch(
        logits, draft_ids, offsets, parents, max_draft
    )
    return Verified(
        *reference.verify_greedy(logits, draft_ids, offsets, parents=parents, max_draft=max_draft)
    )


@torch.no_grad()
def verify_sampled(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seeds: Tensor,
    positions: Tensor,
    parents: Tensor | None = None,
    max_draft: int | None = None,
) -> Verified:
    """Samples the target's token for each row, and keeps the drafts as far as they are the same.

    For drafts without probabilities (all but a draft model's) this accepts a draft token with the
    target's own probability of it, and one of several children with that of their set: the most
    that a lossless verification can.

    The options are one number for all or a tensor (requests,) each. They apply in the order below.
    Tokens that tie with the last one kept by top_k or top_p are kept too.

    Args:
        logits, draft_ids, offsets, parents: the ragged batch, as the module describes it.
        temperature: divides the logits; 0 for greedy. Taken as float32.
        top_k: how many of the likeliest tokens are kept; 0 for all.
        top_p: keeps the fewest of the likeliest tokens that together have at least this share of
            the probability that top_k left; 1 for all, 0 for the likeliest alone. Taken as float32.
        min_p: keeps the tokens at least this fraction as likely as the likeliest; 0 for all.
            Taken as float32.
        seeds: int32 or int64 (requests,), any values.
        positions: int32 or int64 (requests,), the absolute position, from 0, of the token that
            follows the text's last one. A request whose seed stays the same draws independent
            tokens at different positions.
        max_draft: as in `verify_greedy`.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range.

    Time is linear in the logits, plus about a thousand random values a row; top_k and top_p sort
    the most likely tokens, on a device whole rows.
    """
    draft_ids, offsets, parents, max_draft = check_batch(
        logits, draft_ids, offsets, parents, max_draft
    )
    requests, device = len(offsets) - 1, logits.device
    temperatures = check_option(TEMPERATURE, temperature, requests, device)
    top_ks = check_option(TOP_K, top_k, requests, device)
    top_ps = check_option(TOP_P, top_p, requests, device)
    min_ps = check_option(MIN_P, min_p, requests, device)
    check_integers("seeds", seeds, requests, device)
    check_integers("positions", positions, requests, device)
    if on_host(positions) and int(positions.min()) < 0:
        raise InvalidValueError(f"positions must be at least 0, got {int(positions.min())}")
    if temperatures is None:
        return Verified(
            *reference.verify_greedy(
                logits, draft_ids, offsets, parents=parents, max_draft=max_draft
            )
        )
    return Verified(
        *reference.verify_sampled(
            logits,
            draft_ids,
            offsets,
            parents=parents,
            temperature=temperatures,
            top_k=top_ks,
            top_p=top_ps,
            min_p=min_ps,
            seeds=seeds.to(device, torch.int64, non_blocking=True),
            positions=positions.to(device, torch.int64, non_blocking=True),
            max_draft=max_draft,
        )
    )
