"""A head that leaves statistics instead of logits gives the tokens that its logits would."""

from __future__ import annotations

import pytest
import torch

from fastdraft.kernels import head, sampled
from fastdraft.kernels.operands import Sampling, Warpers


@pytest.mark.parametrize("shards", [1, 3])
def test_tokens_are_those_of_the_logits(shards):
    random = torch.Generator().manual_seed(shards)
    # Products of whole numbers are exact, in parts and as one.
    hidden = torch.randint(-4, 5, (300, 16), generator=random).float()
    weight = torch.randint(-2, 3, (5 * 1024 + 77, 16), generator=random).float()
    temperature = torch.tensor([0.0, 0.7, 1.0, 5.0, 20.0]).repeat(60)
    index = torch.arange(300)
    sampling = Sampling(Warpers(temperature), index * 2**33, index * 7)
    parts = weight.tensor_split([2048, 3072][: shards - 1])
    found = head.draw(hidden, parts, sampling)
    assert torch.equal(found, sampled.draw(hidden @ weight.T, sampling).tokens)
    assert len(set((found // 1024).tolist())) == 6


def test_statistics_are_eight_bytes_a_chunk():
    hidden, weight = torch.zeros(2, 4), torch.zeros(151_936, 4)
    left = head.leave_statistics(hidden, weight, torch.ones(2))
    assert sum(each[0].nbytes for each in left) == 1192
