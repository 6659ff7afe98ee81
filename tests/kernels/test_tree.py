"""Depths and masks by the kernel against the plain version."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from adversarial import Random, offsets_of, tree_parents

from fastdraft.kernels import config, language, trees


def check(parents, offsets, max_draft):
    ours, theirs = (
        version(parents, offsets, max_draft=max_draft)
        for version in (trees.launch, trees.plain_mask)
    )
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    expected = trees.depths(parents, offsets, max_draft=max_draft)
    with mock.patch.object(language, "has_kernels", return_value=True):
        depths = trees.depths(parents, offsets, max_draft=max_draft)
        assert torch.equal(trees.attention_mask(parents, offsets, max_draft=max_draft), ours)
    assert depths.dtype == expected.dtype
    assert torch.equal(depths, expected)


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
