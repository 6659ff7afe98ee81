"""Verification of drafts with probabilities, those of draft models."""

from __future__ import annotations

from torch import Tensor

from fastdraft.errors import InvalidValueError
from fastdraft.kernels.operands import Batch, DraftDistribution, Verified
from fastdraft.kernels.workspace import Workspace
from fastdraft.verification.backend import kernels_for
from fastdraft.verification.checks import (
    LOGIT_TYPES,
    check_batch,
    check_sampling,
    check_tensor,
    on_host,
    request_of,
    without_gradients,
)
from fastdraft.verification.verify import finished


@without_gradients
def verify_rejection(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    draft_probs: Tensor | None = None,
    draft_logits: Tensor | None = None,
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
    differ in places. What is emitted has exactly the distribution p.

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
        draft_probs: bfloat16, float16, float32 or float64 (drafted, vocabulary), on the logits'
            device: row i is the distribution of draft token i. It is taken as it is: where it does
            not sum to 1, what is emitted is off by about as much.
        draft_logits: given instead, logits whose softmax is the distribution: temperature and
            filters are applied already, and what was never drafted is -inf.
        temperature, top_k, top_p, min_p, seeds, positions: as in `verify_sampled`, for the target.
        allowed, max_draft, workspace: as in `verify_greedy`; they are the target's.
        logprobs, raw_logprobs: as in `verify_greedy`, under p, which recovered tokens have too.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range;
            draft_probs and draft_logits are both given or both missing; a draft token cannot have
            been drawn from its distribution. Where that cannot be checked, on a device, the draft
            ends before a token outside the vocabulary, or of probability 0 or NaN. It also ends
            before a row of the target with NaN, or whose maximum is infinite.

    Time is linear in the logits and in the draft's.
    """
    trusted = isinstance(workspace, Workspace) and workspace.has_checked
    batch = check_batch(
        logits,
        draft_ids,
        offsets,
        allowed=allowed,
        logprobs=logprobs,
        raw_logprobs=raw_logprobs,
        max_draft=max_draft,
        workspace=workspace,
    )
    draft_distribution = _check_distributions(batch, draft_probs, draft_logits, trusted=trusted)
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
        # At temperature 0 the target is certain of its argmax, and accepts that alone.
        emitted = kernels.verify_greedy(batch)
    else:
        emitted = kernels.verify_rejection(batch, sampling, draft_distribution)
    return finished(batch, emitted)


def _check_distributions(
    batch: Batch, draft_probs: Tensor | None, draft_logits: Tensor | None, *, trusted: bool
) -> DraftDistribution:
    """Checks the drafts' distributions; on a CPU, unless trusted, also that each can have given its
    token."""
    if (draft_probs is None) == (draft_logits is None):
        raise InvalidValueError(
            "one of draft_probs and draft_logits must be given, got "
            + ("neither" if draft_probs is None else "both")
        )
    logits, draft_ids, offsets = batch[:3]
    name = "draft_logits" if draft_probs is None else "draft_probs"
    distribution = draft_logits if draft_probs is None else draft_probs
    check_tensor(name, distribution, LOGIT_TYPES, dimensions=2)
    assert distribution is not None
    expected = (len(draft_ids), logits.shape[1])
    if distribution.shape != expected:
        raise InvalidValueError(
            f"{name} must have a row for each draft token and a column for each token of the "
            f"vocabulary, {expected}, got shape {tuple(distribution.shape)}"
        )
    if distribution.device != logits.device:
        raise InvalidValueError(
            f"{name} must be on the logits' device, {logits.device}, got {distribution.device}"
        )
    checked = DraftDistribution(distribution, is_logits=draft_probs is None)
    if trusted or not on_host(distribution) or not len(distribution):
        return checked
    ids = draft_ids.long()
    unknown = (ids < 0) | (ids >= logits.shape[1])
    if unknown.any():
        token = int(unknown.int().argmax())
        raise InvalidValueError(
            "draft_ids must be drawn from their distributions, from 0 to "
            f"{logits.shape[1] - 1}, got "
            f"{int(ids[token])} in request {request_of(token, offsets)}"
        )
    drawn = distribution.gather(1, ids[:, None])[:, 0]
    if draft_probs is None:
        wrong, likely = ~drawn.isfinite(), "finite for the tokens drawn"
    else:
        wrong, likely = ~((drawn > 0) & (drawn <= 1)), "in (0, 1] for the tokens drawn"
    if wrong.any():
        token = int(wrong.int().argmax())
        raise InvalidValueError(
            f"{name} must be {likely}, got {drawn[token].item()} for token {int(ids[token])} in "
            f"request {request_of(token, offsets)}"
        )
    if draft_probs is not None:
        lowest, highest = draft_probs.aminmax(dim=1)
        wrong = ~((lowest >= 0) & (highest <= 1))
        if wrong.any():
            token = int(wrong.int().argmax())
            found = lowest if not lowest[token] >= 0 else highest
            raise InvalidValueError(
                f"draft_probs must be in [0, 1], got {found[token].item()} in the row of draft "
                f"token {token - int(offsets[request_of(token, offsets)])} of request "
                f"{request_of(token, offsets)}"
            )
    return checked
