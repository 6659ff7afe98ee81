"""Verification of drafts without probabilities: greedy and sampled."""

from __future__ import annotations

from torch import Tensor

from fastdraft.kernels.operands import Batch, Verified
from fastdraft.kernels.workspace import Workspace
from fastdraft.verification.backend import kernels_for
from fastdraft.verification.checks import check_batch, check_sampling, without_gradients


@without_gradients
def verify_greedy(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    parents: Tensor | None = None,
    allowed: Tensor | None = None,
    logprobs: bool = False,
    raw_logprobs: bool = False,
    likeliest: int = 0,
    max_draft: int | None = None,
    workspace: Workspace | None = None,
) -> Verified:
    """Keeps the draft tokens that are the target's greedy tokens, and adds the next one.

    Args:
        logits, draft_ids, offsets, parents: the ragged batch, as the module describes it.
        allowed: int32 (rows of logits, ceil(vocabulary / 32)), the tokens that may come in each
            row, as grammars give them (xgrammar's layout): bit t % 32 of word t // 32 is 1 where
            token t may. All others count as -inf, whatever their logits.
        logprobs, raw_logprobs: whether the result has them.
        likeliest: how many of each row's likeliest tokens the result has, at most 8. Rows of
            refused draft tokens have them too. On a device they take another launch, which reads
            as many chunks of 1,024 logits again.
        max_draft: the result has max_draft + 1 columns. Without it, that of the longest draft, or
            when the offsets are on a device, the workspace's, or without one that of all drafted
            tokens together. On a device, a longer draft is cut to max_draft tokens.
        workspace: memory for the kernels on a device, the result's too, so that nothing is
            allocated; the next call with it overwrites the result. On a CPU, operands are checked
            whole in the first call with it; from then on, where max_draft is given, in shape and
            type alone.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range.

    Time is linear in the logits, which are read once.
    """
    batch = check_batch(
        logits,
        draft_ids,
        offsets,
        parents=parents,
        allowed=allowed,
        logprobs=logprobs,
        raw_logprobs=raw_logprobs,
        max_draft=max_draft,
        workspace=workspace,
        likeliest=likeliest,
    )
    return finished(batch, kernels_for(logits).verify_greedy(batch))


@without_gradients
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
    allowed: Tensor | None = None,
    logprobs: bool = False,
    raw_logprobs: bool = False,
    likeliest: int = 0,
    max_draft: int | None = None,
    workspace: Workspace | None = None,
) -> Verified:
    """Samples the target's token for each row, and keeps the drafts as far as they are the same.

    For drafts without probabilities (all but a draft model's) this accepts a draft token with the
    target's own probability of it, and one of several children with that of their set: the most
    that a lossless verification can.

    The options are one number for all or a tensor (requests,) each. They apply in the order below,
    after the mask. Tokens that tie with the last one kept by top_k are kept too;
    of those that tie at the edge of top_p, no more than it needs, the lowest ids.

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
        allowed, logprobs, raw_logprobs, likeliest, max_draft, workspace: as in
            `verify_greedy`.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range.

    Time is linear in the logits, plus about a thousand random values a row; top_k and top_p look
    several times at the logits that they may keep.
    """
    trusted = isinstance(workspace, Workspace) and workspace.has_checked
    batch = check_batch(
        logits,
        draft_ids,
        offsets,
        parents=parents,
        allowed=allowed,
        logprobs=logprobs,
        raw_logprobs=raw_logprobs,
        max_draft=max_draft,
        workspace=workspace,
        likeliest=likeliest,
    )
    sampling = check_sampling(
        batch,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
        trusted=trusted,
    )
    kernels = kernels_for(logits)
    if sampling is None:
        emitted = kernels.verify_greedy(batch)
    else:
        emitted = kernels.verify_sampled(batch, sampling)
    return finished(batch, emitted)


def finished(batch: Batch, emitted: Verified) -> Verified:
    """The result, after which later operands in the workspace are trusted."""
    if batch.workspace is not None:
        batch.workspace.has_checked = True
    return emitted
