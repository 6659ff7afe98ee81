"""The checked entries to verification: greedy, sampled, and by rejection."""

from __future__ import annotations

from torch import Tensor

from fastdraft.kernels import filters, greedy, rejection, sampled
from fastdraft.kernels.operands import Batch, Verified, Warpers
from fastdraft.kernels.workspace import Workspace
from fastdraft.verification.checks import (
    check_batch,
    check_draft_logits,
    check_sampling,
    without_gradients,
)


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
        logits, draft_ids, offsets, max_draft, parents, allowed, logprobs, raw_logprobs, workspace,
        likeliest,
    )  # fmt: skip
    return _finished(batch, greedy.verify(batch))


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
    batch = check_batch(
        logits, draft_ids, offsets, max_draft, parents, allowed, logprobs, raw_logprobs, workspace,
        likeliest,
    )  # fmt: skip
    sampling = check_sampling(batch, temperature, top_k, top_p, min_p, seeds, positions)
    if sampling is None:
        return _finished(batch, greedy.verify(batch))
    return _finished(batch, sampled.verify(batch, sampling))


@without_gradients
def verify_rejection(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    draft_logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seeds: Tensor,
    positions: Tensor,
    allowed: Tensor | None = None,
    logprobs: bool = False,
    raw_logprobs: bool = False,
    max_draft: int | None = None,
    workspace: Workspace | None = None,
) -> Verified:
    """Accepts drafts drawn from known distributions, as often as lossless verification can.

    With p the target's distribution after temperature and filters, and q those that the draft
    tokens d were drawn from, the first j tokens are accepted with probability k_j = min(1, k_(j-1)
    p(d_j) / q(d_j)), k_0 = 1: a draft is verified as a block (Sun et al., Block verification
    accelerates speculative decoding, 2025). That accepts at least as many tokens on average as
    testing them one by one does, with the same drafts, and more where drafts are long and p and q
    differ in part. The emitted tokens have exactly the distribution p.

    For that, each draft token must be drawn from its q, given the ones before it, with noise that
    is independent of this one *and of that of all earlier steps*: the number of accepted tokens
    depends on the rejected ones, so a step that drew them again by the same random numbers would be
    biased. `verify_sampled` draws them, of a draft model's logits without drafts, in one launch on
    a device; with seeds that are not these, and other ones in each step.

    A bonus token, after a whole draft or none, is the one that `verify_sampled` gives there. A
    draft token's acceptance depends on the request's seed, the position of its next token and its
    own rows, not on the rest of the batch.

    Args:
        logits, draft_ids, offsets: the ragged batch, as the module describes it; the drafts are
            chains.
        draft_logits: bfloat16, float16, float32 or float64 (drafted, vocabulary), on the logits'
            device: row i has the logits that draft token i was drawn by, whose softmax is q.
            Temperature and filters are applied already, and what was never drafted is -inf. Of
            probabilities, pass their logarithms.
        temperature, top_k, top_p, min_p, seeds, positions: as in `verify_sampled`, for the target.
        allowed, max_draft, workspace: as in `verify_greedy`; they are the target's.
        logprobs, raw_logprobs: as in `verify_greedy`, under p, which recovered tokens have too.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range;
            a draft token cannot have been drawn by its draft_logits. Where that cannot be checked,
            on a device, the draft ends before a token outside the vocabulary, or of probability 0
            or NaN. It also ends before a row of the target with NaN, or whose maximum is infinite.

    Time is linear in the logits and in the draft's.
    """
    batch = check_batch(
        logits, draft_ids, offsets, max_draft, None, allowed, logprobs, raw_logprobs, workspace
    )
    check_draft_logits(batch, draft_logits)
    sampling = check_sampling(batch, temperature, top_k, top_p, min_p, seeds, positions)
    if sampling is None:
        # At temperature 0 the target is certain of its argmax, and accepts that alone.
        return _finished(batch, greedy.verify(batch))
    return _finished(batch, rejection.verify(batch, sampling, draft_logits))


def warp(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """The scores of rows of logits (rows, vocabulary), of whose softmax `verify_sampled` draws.

    They are divided by the temperature, above 0, and -inf for what the filters remove. Options are
    tensors (rows,), None for a filter that nobody has; they are not checked.
    """
    return filters.warp(logits, Warpers(temperature, top_k, top_p, min_p))


def _finished(batch: Batch, emitted: Verified) -> Verified:
    """The result, after which later operands in the workspace are trusted."""
    if batch.workspace is not None:
        batch.workspace.has_checked = True
    return emitted
