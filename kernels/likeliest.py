"""The likeliest tokens of each row.

On a device they come from its row statistics, one program a row: the n likeliest tokens lie in the
n chunks of the largest maxima, so only these are read again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdraft.kernels import grid, statistics
from fastdraft.kernels.chunks import as_float, chunked, largest, mask, slabs, total
from fastdraft.kernels.filters import weigh
from fastdraft.kernels.language import jit, tl
from fastdraft.kernels.operands import Batch, Likeliest, Sampling, Warpers
from fastdraft.kernels.statistics import LOG2_E
from fastdraft.kernels.workspace import LIKELIEST, Scratch, take

# The columns of tokens and probabilities.
COLUMNS = tl.constexpr(LIKELIEST)


def plain(batch: Batch, temperature: Tensor | None = None) -> Likeliest | None:
    """The likeliest tokens of each row, if the batch asks for them.

    temperature: float32 (rows,), 0 counts as 1, like None.
    """
    logits, count, allowed = batch.logits, batch.likeliest, batch.allowed
    if not count:
        return None
    parts = []
    for part in slabs(len(logits), logits):
        x = as_float(logits[part])
        x = chunked(x if allowed is None else mask(x, allowed[part]))
        heat = torch.ones_like(x[:, 0, 0])
        if temperature is not None:
            heat = torch.where(temperature[part] == 0, heat, temperature[part].to(x.dtype))
        maximum = x.amax(-1).amax(-1)
        sums = total(weigh(x, maximum=maximum, warpers=Warpers(heat)))
        # The chunks of the largest maxima hold them all; of equal chunks the first.
        order = x.amax(-1).sort(descending=True, stable=True).indices[:, :count].sort().values
        rest = x.gather(1, order[:, :, None].expand(-1, -1, x.shape[2]))
        tokens, probabilities = [], []
        for _ in range(count):
            column, value = largest(rest)
            rest.flatten(1).scatter_(1, column[:, None], -torch.inf)
            chunk = order.gather(1, column[:, None] // x.shape[2])[:, 0]
            token = chunk * x.shape[2] + column % x.shape[2]
            can_come = maximum.isfinite() & (value > -torch.inf)
            probability = ((value - maximum).double() / heat).exp() / sums
            tokens.append(torch.where(can_come, token, -1).int())
            probabilities.append(torch.where(can_come, probability, 0.0).float())
        parts.append(Likeliest(torch.stack(tokens, 1), torch.stack(probabilities, 1)))
    return Likeliest(*map(torch.cat, zip(*parts, strict=True)))


@jit
def likeliest_kernel(batch, logits, draft, scratch, output, C):
    row = tl.program_id(0)
    token_ids = output.token_ids + row.to(tl.int64) * COLUMNS
    probabilities = output.probabilities + row.to(tl.int64) * COLUMNS
    location, used = grid.locate(row, batch, C)
    if not used:
        column = tl.arange(0, COLUMNS)
        inside = column < batch.likeliest
        tl.store(token_ids + column, tl.full((COLUMNS,), -1, tl.int32), mask=inside)
        tl.store(probabilities + column, tl.zeros((COLUMNS,), tl.float32), mask=inside)
        return
    heat = grid.temperature_of(location, batch, C.GREEDY)
    divisor = statistics.divisor_of(heat)
    keys, key, weights = statistics.totals_of(location, logits, scratch, LOG2_E / divisor, C.BLOCK)
    total = tl.sum(weights)
    maximum = grid.value_of(key)
    has_softmax = (key < grid.INFINITE_KEY) & (key > grid.EMPTY_KEY)

    index = tl.arange(0, C.BLOCK)
    # The key of each chunk's largest logit that is not taken yet.
    best = grid.pack(keys, index)
    taken = (location.first * 0).to(tl.int64) + 0x7FFFFFFFFFFFFFFF
    for column in range(batch.likeliest):
        _, chunk = grid.unpack(tl.max(best))
        x, token = grid.load_chunk(location, batch, logits, chunk, C)
        packed = grid.pack(grid.ordered_key(x), token)
        packed = tl.where((token < logits.vocabulary) & (packed < taken), packed, 0)
        taken = tl.max(tl.max(packed, 1), 0)
        after = tl.max(tl.max(tl.where(packed < taken, packed, 0), 1), 0)
        key, chosen = grid.unpack(taken)
        can_come = has_softmax & (key > grid.EMPTY_KEY)
        probability = tl.exp((grid.value_of(key) - maximum) / divisor) / total
        tl.store(token_ids + column, tl.where(can_come, chosen, -1))
        tl.store(probabilities + column, tl.where(can_come, probability, 0.0))
        key, _ = grid.unpack(after)
        best = tl.where(index == chunk, grid.pack(key, index), best)


def launch(batch: Batch, sampling: Sampling | None, scratch: Scratch) -> Likeliest | None:
    """The same of the batch's rows, if the batch asks for it.

    scratch: with the row statistics, before filters. One launch.
    """
    if not batch.likeliest:
        return None
    names = "likeliest_ids", "likeliest_probabilities"
    found = take(batch, names, lambda of: Likeliest(*map(of, names)))
    rows, scratch = len(batch.logits), scratch.only(batch, "chunk_maximum", "chunk_sum")
    grid.run(likeliest_kernel, rows, batch, sampling, scratch=scratch, output=found)
    return Likeliest(*(each[:, : batch.likeliest] for each in found))
