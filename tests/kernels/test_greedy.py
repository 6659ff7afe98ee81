"""Greedy verification by the kernel against the reference, token for token."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from adversarial import (
    DTYPES,
    LENGTHS,
    Random,
    allowed_bits,
    assert_same,
    hits,
    in_layout,
    odd_rows,
    offsets_of,
    tree_parents,
    workspace_of,
)

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import fused, reference
from fastdraft.kernels.fused import config
from fastdraft.kernels.operands import Batch, Sampling, Warpers
from fastdraft.kernels.workspace import BUFFERS, Workspace


def batch_of(lengths, vocabulary, dtype, *, seed, tree=False, allowed=None):
    offsets = offsets_of(lengths)
    logits = odd_rows(int(offsets[-1]) + len(lengths), vocabulary, dtype, seed=seed)
    parents = tree_parents(lengths, seed=seed) if tree else None
    tokens = reference.argmax(logits, allowed).tokens
    ids = hits(tokens, vocabulary, offsets, parents, seed=seed)
    return Batch(logits, ids, offsets, max(lengths), parents, allowed)


def check(batch, *, logits=None, workspace=None, **options):
    """Runs the kernel and the reference; the kernel on `logits` if given."""
    batch = batch._replace(**options)
    expected = reference.verify_greedy(batch)
    logits = batch.logits if logits is None else logits
    got = fused.verify_greedy(batch._replace(logits=logits, workspace=workspace))
    assert_same(got, expected)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 37, 1024, 5001])
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_greedy_is_the_reference(vocabulary, dtype, tree):
    for seed in range(2):
        check(batch_of(LENGTHS, vocabulary, dtype, seed=seed, tree=tree))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [31, 2500])
def test_greedy_among_allowed_tokens(vocabulary, dtype):
    rows = sum(LENGTHS) + len(LENGTHS)
    allowed = allowed_bits(rows, vocabulary, seed=1)
    batch = batch_of(LENGTHS, vocabulary, dtype, seed=1, allowed=allowed)
    check(batch)
    wide = torch.nn.functional.pad(allowed, (0, 3))[:, : allowed.shape[1]]
    check(batch, allowed=wide)


@pytest.mark.parametrize("layout", ["rows apart", "tokens apart", "transposed"])
def test_greedy_of_any_strides(layout):
    for dtype in DTYPES:
        batch = batch_of([4, 0, 2], 4099, dtype, seed=2)
        check(batch, logits=in_layout(batch.logits, layout))


@pytest.mark.usefixtures("any_order")
def test_parts_of_rows_in_any_order():
    vocabulary = 50_257
    batch = batch_of([2, 0], vocabulary, torch.bfloat16, seed=3)
    assert config.split_greedy(4, vocabulary, torch.bfloat16).programs > 8
    check(batch)
    check(batch._replace(logits=torch.zeros_like(batch.logits)))


def test_drafts_are_cut_and_padded():
    lengths = [3, 0, 5, 1]
    batch = batch_of(lengths, 50, torch.float32, seed=4)
    check(batch, max_draft=3)
    check(batch, max_draft=0)
    check(batch, max_draft=40)
    check(batch._replace(draft_ids=batch.draft_ids.int()))
    trees = batch_of(lengths, 50, torch.float32, seed=5, tree=True)
    check(trees, max_draft=40)
    check(trees._replace(parents=trees.parents.int()))


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("slots", [2, 4])
def test_drafts_longer_than_a_block_of_slots(monkeypatch, slots, tree):
    monkeypatch.setattr(config, "SLOTS", slots)
    for seed in range(2):
        check(batch_of(LENGTHS, 9, torch.float32, seed=seed, tree=tree), max_draft=11)


def test_more_requests_than_a_block(monkeypatch):
    monkeypatch.setattr(config, "requests_block", lambda _: 2)
    check(batch_of(LENGTHS, 20, torch.float32, seed=6))


def test_many_requests():
    check(batch_of([0, 1] * 20, 20, torch.float32, seed=6))


def test_rows_past_the_last_request_are_ignored():
    batch = batch_of([2, 1], 40, torch.bfloat16, seed=7)
    padded = torch.cat([batch.logits, torch.full((9, 40), math.nan).bfloat16()])
    ids = torch.cat([batch.draft_ids, torch.full((9,), 3)])
    expected = reference.verify_greedy(batch._replace(max_draft=4))
    assert_same(fused.verify_greedy(Batch(padded, ids, batch.offsets, 4)), expected)


def test_a_workspace_is_used_and_left_as_it_was():
    workspace = workspace_of(max_rows=40, max_requests=9, vocabulary=5000, max_draft=10)
    first = check(batch_of(LENGTHS, 5000, torch.float32, seed=8), workspace=workspace)
    batch = batch_of([1, 4], 77, torch.bfloat16, seed=9, tree=True)
    second = check(batch, max_draft=6, workspace=workspace)
    assert first.token_ids.data_ptr() == second.token_ids.data_ptr()
    for name, buffer in BUFFERS.items():
        if buffer.zero:
            assert not workspace._buffers[name].any(), name


def test_a_workspace_has_room():
    size = {"max_rows": 1, "max_requests": 1, "vocabulary": 1, "max_draft": 0}
    for name, least in size.items():
        with pytest.raises(InvalidValueError, match=f"{name} must be at least {least}, got"):
            Workspace("cpu", **{**size, name: least - 1})


CANARY = 0x5A


def guarded(buffer):
    """A copy of a tensor with bytes before and after it in the same memory, and all of these."""
    count = buffer.numel() * buffer.element_size()
    memory = torch.full((count + 512,), CANARY, dtype=torch.uint8)
    inner = memory[256 : 256 + count].view(buffer.dtype).view(buffer.shape)
    inner.copy_(buffer)
    return inner, memory


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_nothing_is_written_out_of_bounds_whatever_the_operands_hold(sampled, tree):
    random = Random(0)
    vocabulary, lengths = 33, [3, 1, 4]
    warpers = Warpers(torch.tensor([0.5, 0.0, 2.0]))
    sampling = Sampling(warpers, torch.arange(3), torch.arange(3))
    for _ in range(3 if sampled else 6):
        batch = batch_of(lengths, vocabulary, torch.float32, seed=1, tree=True)
        wild = random.integers(-(2**62), 2**62, 12)
        near = random.integers(-3, 14, 12)
        values = torch.where(random.uniform(12) < 0.3, wild, near)
        workspace = workspace_of(max_rows=11, max_requests=3, vocabulary=33, max_draft=5)
        memories = {}
        for name, buffer in list(workspace._buffers.items()):
            workspace._buffers[name], memories[name] = guarded(buffer)
        verify = (
            partial(fused.verify_sampled, sampling=sampling) if sampled else fused.verify_greedy
        )
        parents = values[:8] if tree else None
        verify(Batch(batch.logits, wild[:8], values[8:], 5, parents, workspace=workspace))
        for name, memory in memories.items():
            assert (memory[:256] == CANARY).all() and (memory[-256:] == CANARY).all(), name
            if BUFFERS[name].zero:
                assert not workspace._buffers[name].any(), name
        # Whatever it was, the next batch is verified as ever.
        check(batch if tree else batch._replace(parents=None), workspace=workspace)
