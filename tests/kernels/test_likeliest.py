"""The likeliest tokens of each row by the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from adversarial import DTYPES, LENGTHS, allowed_bits, in_layout, odd_rows, offsets_of, workspace_of

from fastdraft.kernels import greedy, sampled
from fastdraft.kernels.operands import Batch, Sampling, Warpers
from fastdraft.kernels.workspace import BUFFERS

# The extremes make all tokens equally likely, or one of them certain.
# Beside smaller ones the rounding of the least bfloat16 numbers would count.
TEMPERATURES = torch.tensor([1.0, 0.7, 0.0, 1.5, 0.3, 2e-30, 3e30, 0.0])


def batch_of(vocabulary, dtype, *, seed, masked=False, likeliest=8):
    offsets = offsets_of(LENGTHS)
    rows = int(offsets[-1]) + len(LENGTHS)
    # Beside numbers of 38 digits what a temperature leaves of them is lost.
    logits = odd_rows(rows, vocabulary, dtype, seed=seed, largest=1e6)
    ids = torch.zeros(int(offsets[-1]), dtype=torch.int32)
    allowed = allowed_bits(rows, vocabulary, seed=seed) if masked else None
    return Batch(logits, ids, offsets, max(LENGTHS), allowed=allowed, likeliest=likeliest)


def sampling_of(filters=()):
    options = {"top_k": torch.full((8,), 3), "top_p": torch.full((8,), 0.5)}
    numbers = torch.arange(8)
    warpers = Warpers(TEMPERATURES, **{name: options[name] for name in filters})
    return Sampling(warpers, seeds=numbers, positions=numbers)


def check(batch, sampling, **options):
    """Runs the kernels, with other options of the batch, and the reference."""
    if sampling is None:
        expected = greedy.plain(batch).likeliest
        got = greedy.launch(batch._replace(**options)).likeliest
    else:
        expected = sampled.plain(batch, sampling).likeliest
        got = sampled.launch(batch._replace(**options), sampling).likeliest
    assert got.token_ids.dtype == expected.token_ids.dtype == torch.int32
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert got.probabilities.dtype == torch.float32
    torch.testing.assert_close(got.probabilities, expected.probabilities, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 1024, 5001])
def test_they_are_the_reference(vocabulary, dtype):
    batch = batch_of(vocabulary, dtype, seed=vocabulary % 7)
    check(batch, None)
    check(batch, sampling_of())


@pytest.mark.parametrize("filters", [(), ("top_k", "top_p")], ids=str)
def test_with_a_mask_and_before_filters(filters):
    batch = batch_of(2100, torch.bfloat16, seed=3, masked=True, likeliest=5)
    check(batch, sampling_of(filters))
    check(batch._replace(logprobs=True), None)


@pytest.mark.parametrize("layout", ["rows apart", "tokens apart", "transposed"])
def test_any_strides(layout):
    batch = batch_of(1037, torch.float32, seed=2, likeliest=3)
    check(batch, None, logits=in_layout(batch.logits, layout))


def test_a_workspace_is_left_as_it_was():
    workspace = workspace_of(max_rows=40, max_requests=9, vocabulary=1500, max_draft=10)
    check(batch_of(1500, torch.bfloat16, seed=3), sampling_of(), workspace=workspace)
    for name, buffer in BUFFERS.items():
        assert not (buffer.zero and workspace._buffers[name].any()), name


def test_rows_of_no_request_have_none():
    batch = batch_of(40, torch.float32, seed=0)
    batch = batch._replace(logits=torch.zeros(len(batch.logits) + 2, 40))
    found = greedy.launch(batch).likeliest
    assert (found.token_ids[-2:] == -1).all()
    assert (found.probabilities[-2:] == 0).all()
    assert (found.token_ids[:-2] == torch.arange(8)).all()
