"""Depths, masks and compaction by the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from adversarial import Random, offsets_of, tree_parents

from fastdraft.kernels import fused, reference
from fastdraft.kernels.fused import config


def check(parents, offsets, max_draft):
    for name in ("tree_depths", "tree_attention_mask"):
        ours, theirs = (
            getattr(kernels, name)(parents, offsets, max_draft=max_draft)
            for kernels in (fused, reference)
        )
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("lengths", [[0], [1], [7, 0, 12, 64], [20, 3, 30, 0, 0, 1]])
def test_layout_is_the_reference(lengths):
    offsets = offsets_of(lengths)
    parents = tree_parents(lengths, seed=1)
    check(parents, offsets, max(lengths) + 1)
    check(parents.int(), offsets, max(lengths) // 2)


def test_a_chain_is_a_triangle():
    check(torch.arange(9) - 1, torch.tensor([0, 9]), 9)


def test_drafts_longer_than_a_block_of_slots(monkeypatch):
    monkeypatch.setattr(config, "SLOTS", 8)
    monkeypatch.setattr(config, "MASK_SLOTS", 4)
    check(tree_parents([13, 5], seed=1), offsets_of([13, 5]), 14)


def test_any_parents_are_slots_before():
    random = Random(0)
    offsets = offsets_of([6, 0, 9])
    for _ in range(3):
        check(random.integers(-(2**40), 2**40, 15), offsets, 9)
        check(random.integers(-4, 20, 15).int(), offsets, 9)


@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (3, 7), (9, 40)])
def test_compaction_is_the_reference(shape):
    random = Random(0)
    path = random.integers(-1, shape[1] + 1, *shape).int()
    for each in (path, torch.nn.functional.pad(path, (0, 2))[:, : shape[1]]):
        ours, theirs = fused.compaction_indices(each), reference.compaction_indices(path)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
