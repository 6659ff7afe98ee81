"""Which tokens temperature and filters keep: as transformers, and as sorting has it."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from fastdraft.kernels.chunks import chunked
from fastdraft.kernels.filters import weigh
from fastdraft.kernels.operands import Warpers

INF = math.inf


def kept(logits, **options):
    """The weights of each row's tokens, 0 for those that are removed."""
    x = chunked(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    of_each = {
        name: torch.full((len(logits),), value)
        for name, value in {"temperature": 1.0, **options}.items()
    }
    weights = weigh(x, maximum=x.amax((-1, -2)), warpers=Warpers(**of_each))
    return weights.flatten(1)[:, : logits.shape[1]]


@pytest.mark.parametrize("vocabulary", [5, 1024, 5000, 49152])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 4000},
        {"top_p": 0.0},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 1000, "top_p": 0.97, "min_p": 0.003},
    ],
    ids=str,
)
def test_thresholds_are_those_of_transformers(vocabulary, spread, options):
    torch.manual_seed(vocabulary)
    # The quantiles of a normal distribution: no ties, which transformers keeps in part.
    logits = torch.stack([torch.randperm(vocabulary) for _ in range(3)]).float()
    logits = spread * torch.erfinv((2 * logits + 1) / vocabulary - 1).mul(math.sqrt(2))
    warpers = transformers.LogitsProcessorList()
    warpers.append(transformers.TemperatureLogitsWarper(options.get("temperature", 1.0)))
    if "top_k" in options:
        warpers.append(transformers.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(transformers.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        warpers.append(transformers.MinPLogitsWarper(options["min_p"]))
    expected = warpers(None, logits.double()).softmax(-1)
    weights = kept(logits, **options).double()
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(
        weights / weights.sum(-1, keepdim=True), expected, rtol=1e-4, atol=1e-6
    )


def test_ties_at_a_threshold():
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    two_first = [False, True, True, True, True, False]
    assert (kept(row, top_k=2) > 0).tolist() == [two_first]
    # Two of the three that tie are enough.
    assert (kept(row, top_p=0.7) > 0).tolist() == [[False, True, True, True, False, False]]
    assert (kept(row, top_p=0.0) > 0).tolist() == [[False, True, False, False, False, False]]
    assert (kept(torch.zeros(1, 5000), top_k=3) > 0).all()
    assert (kept(torch.zeros(1, 5000), top_p=0.1) > 0).sum() == 500
    assert (kept(torch.zeros(1, 5000), min_p=1.0) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0, 3e8])
def test_neighbouring_values_are_distinguished(dtype, start):
    values = [torch.tensor(start, dtype=dtype)]
    for _ in range(5):
        values.append(values[-1].nextafter(torch.tensor(INF, dtype=dtype)))
    row = torch.stack(values)[None]
    assert (kept(row, top_k=2) > 0).tolist() == [[False] * 4 + [True] * 2]
    assert (kept(row, top_p=0.0) > 0).tolist() == [[False] * 5 + [True]]
    assert (kept(row, min_p=1.0) > 0).tolist() == [[False] * 5 + [True]]
