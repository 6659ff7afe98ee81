"""Greedy verification: the argmax of each row, against the draft.

On a device it is the kernel of sampled verification at temperature 0, in one launch.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from fastdraft.kernels import language, likeliest, sampled
from fastdraft.kernels.acceptance import Chosen, emit, join
from fastdraft.kernels.chunks import chunked, largest, mask, reads_back, slabs
from fastdraft.kernels.filters import log_softmax_of
from fastdraft.kernels.operands import Batch, Verified

# numpy's argmax has vector instructions for these, PyTorch's has none.
_NUMPY: Final = (torch.float32, torch.float64)


def verify(batch: Batch) -> Verified:
    """Greedy verification."""
    return launch(batch) if language.has_kernels(batch.logits) else plain(batch)


def plain(batch: Batch) -> Verified:
    """The definition."""
    emitted = emit(argmax(batch.logits, batch.allowed, **batch.wanted), batch)
    return emitted._replace(likeliest=likeliest.plain(batch))


def argmax(
    logits: Tensor,
    allowed: Tensor | None = None,
    *,
    logprobs: bool = False,
    raw_logprobs: bool = False,
) -> Chosen:
    """The token and the value of each row's maximum, for logits (rows, vocabulary) of any stride.

    Ties go to the lowest id and NaN is above all, as in torch.argmax, which gives the same tokens
    but looks at one logit at a time on a CPU. allowed: as in `mask`.
    """
    if allowed is None and not logprobs and not raw_logprobs:
        if reads_back(logits) and logits.dtype in _NUMPY:
            values = logits.detach().numpy()
            tokens = values.argmax(1)
            maxima = values[np.arange(len(values)), tokens]
            return Chosen(torch.from_numpy(tokens), torch.from_numpy(maxima), None, None)
        return Chosen(*largest(chunked(logits)), None, None)
    parts = []
    for part in slabs(len(logits), logits):
        raw = logits[part]
        x = raw if allowed is None else mask(raw, allowed[part])
        token, maximum = largest(chunked(x))
        logprob = log_softmax_of(token, x) if logprobs else None
        raw_logprob = None
        if raw_logprobs:
            same = logprobs and allowed is None
            raw_logprob = logprob if same else log_softmax_of(token, raw)
        parts.append(Chosen(token, maximum, logprob, raw_logprob))
    return join(parts)


def launch(batch: Batch) -> Verified:
    """The same of logits of 16 or 32 bits: `sampled`, where nothing is drawn."""
    return sampled.launch(batch, None)
