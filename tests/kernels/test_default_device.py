"""Launchers say where their tensors are, whatever torch's default device is."""

from __future__ import annotations

import torch
from adversarial import assert_same, odd_rows, offsets_of, tree_parents

from fastdraft.kernels import greedy, sampled, trees
from fastdraft.kernels.operands import Batch, Sampling, Warpers

LENGTHS = [2, 1]


def batch():
    torch.manual_seed(0)
    offsets = offsets_of(LENGTHS)
    logits = odd_rows(int(offsets[-1]) + len(LENGTHS), 37, torch.float32, seed=1)
    draft_ids = torch.randint(37, (int(offsets[-1]),))
    return logits, draft_ids, offsets


def test_results_are_where_the_logits_are():
    operands = batch()
    parents = tree_parents(LENGTHS, seed=1)
    sampling = Sampling(Warpers(torch.full((2,), 0.8)), torch.arange(2), torch.arange(2))

    def verified():
        return (
            greedy.launch(Batch(*operands, max_draft=2, parents=parents)),
            sampled.launch(Batch(*operands, max_draft=2, logprobs=True), sampling),
        )

    def layout():
        mask = trees.launch(parents, operands[2], max_draft=2)
        return mask, trees.compaction_indices(verified()[0].path)

    expected, expected_layout = verified(), layout()
    with torch.device("meta"):
        found, found_layout = verified(), layout()
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert all(map(torch.equal, found_layout, expected_layout))
