"""Drafts for rejection sampling, drawn as a draft model's would be."""

from __future__ import annotations

import torch

from fastdraft.kernels.filters import weigh_rows
from fastdraft.kernels.operands import Warpers
from fastdraft.verification import verify_sampled


def drawn(logits, *, seeds, positions, **shape):
    """A token from each row of a draft model's logits, and the distributions that they were drawn
    from.

    seeds: those of verification, of which other ones are made; shape: the options of the
    distribution. None of the rows is decided by its argmax.
    """
    count, vocabulary = logits.shape
    nothing = torch.zeros(count + 1, dtype=torch.int64, device=logits.device)
    tokens = verify_sampled(
        logits, nothing[:0], nothing, seeds=seeds + 2**40, positions=positions, **shape
    ).token_ids[:, 0]
    options = {"temperature": 1.0, **shape}
    each = {
        name: None if value is None else torch.full((count,), value, device=logits.device)
        for name, value in options.items()
    }
    weights, *_ = weigh_rows(logits, Warpers(**each))
    distribution = weights.flatten(1)[:, :vocabulary].double()
    return tokens, (distribution / distribution.sum(1, keepdim=True)).to(weights.dtype)
