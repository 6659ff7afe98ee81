"""Compiling the kernels of a server before its traffic comes."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from fastdraft.kernels import language
from fastdraft.verification.verify import verify_greedy, verify_rejection, verify_sampled


def warm_up(
    device: torch.device | str,
    dtype: torch.dtype,
    vocabulary: int,
    *,
    sampled: bool = True,
    filters: bool = True,
    allowed: bool = False,
    draft_logits: bool = False,
    likeliest: bool = False,
    logprobs: bool = False,
    raw_logprobs: bool = False,
) -> None:
    """Has every kernel compiled that a server's batches may need, of any number of requests.

    Verifies one draft of two tokens in each way that the options leave open. Draft ids and parents
    are int64, and rows of logits lie one after another; other ones have other kernels. Chains and
    trees have the same. Where no kernel is used, as on a CPU, it does nothing.

    Args:
        device, dtype, vocabulary: those of the logits.
        sampled: whether requests may sample.
        filters: whether they may then have top_k, top_p or min_p.
        allowed: whether there may be masks.
        draft_logits: whether drafts may have probabilities, in logits of the same type.
        likeliest: whether the likeliest tokens may be asked for.
        logprobs, raw_logprobs: whether all results have them.

    Raises:
        InvalidValueError: logits have no such type.
    """
    if not language.has_kernels(torch.empty(0, dtype=dtype, device=device)):
        return
    logits = torch.zeros(3, vocabulary, dtype=dtype, device=device)
    numbers = torch.arange(2, device=device)
    batch: dict[str, Any] = {"logits": logits, "draft_ids": numbers, "offsets": 2 * numbers}
    batch |= {"max_draft": 2, "logprobs": logprobs, "raw_logprobs": raw_logprobs}
    words = torch.full((3, -(-vocabulary // 32)), -1, dtype=torch.int32, device=device)
    masks: list[dict[str, Any]] = [{}, {"allowed": words}] if allowed else [{}]
    warpers: list[dict[str, Any]] = [{}, {"top_p": 0.5}] if filters else [{}]
    for mask, few in product(masks, (0, 1) if likeliest else (0,)):
        verify_greedy(**batch, **mask, likeliest=few)
        for warper in warpers if sampled else ():
            drawn_by = {"seeds": numbers[:1], "positions": numbers[:1], **warper}
            verify_sampled(**batch, **mask, **drawn_by, likeliest=few)
            if draft_logits:
                verify_rejection(**batch, **mask, **drawn_by, draft_logits=logits[:2])
