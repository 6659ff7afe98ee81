"""The chances that a verification keeps tokens, against all drafts of a small vocabulary."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from block_verification import chances_of_keeping, distributions
from hf_models import tiny_model
from oracles.rejection import keep_chances

VOCABULARY, GAMMA = 3, 3


def test_means_over_all_drafts_are_those_of_the_oracle() -> None:
    torch.manual_seed(3)
    p, q = torch.rand(2, GAMMA + 1, VOCABULARY, dtype=torch.float64).softmax(-1).pow(4)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    expected_block = torch.zeros(GAMMA, dtype=torch.float64)
    expected_token = torch.zeros(GAMMA, dtype=torch.float64)
    found = torch.zeros(2, GAMMA, dtype=torch.float64)
    for draft in product(range(VOCABULARY), repeat=GAMMA):
        chance = torch.stack([q[i, token] for i, token in enumerate(draft)]).prod()
        _, stays, _ = keep_chances(p.tolist(), q.tolist(), draft)
        # The largest number that passes its own test is kept.
        kept, above = [], 1.0
        for k in range(GAMMA, -1, -1):
            kept.append(above * stays[k])
            above *= 1 - stays[k]
        numbers = torch.tensor(kept[::-1])
        expected_block += chance * torch.stack([numbers[i:].sum() for i in range(1, GAMMA + 1)])
        ratios = torch.stack([p[i, t] / q[i, t] for i, t in enumerate(draft)])
        expected_token += chance * ratios.clamp(max=1).cumprod(0)
        pair = chances_of_keeping(p[None, :GAMMA], q[None, :GAMMA], torch.tensor([draft]))
        found += chance * torch.cat(pair)
    assert found[0].tolist() == pytest.approx(expected_token.tolist())
    assert found[1].tolist() == pytest.approx(expected_block.tolist())
    assert found[1, -1] > found[0, -1] + 1e-3


def test_paths_do_not_see_each_other() -> None:
    model = tiny_model("llama")
    text = torch.randint(1, 60, (12,))
    starts = torch.tensor([5, 9, 12])
    drafts = torch.randint(1, 60, (3, 2))
    with torch.inference_mode():
        found = distributions(model, text, starts, drafts, 0.7)
        for start, draft, own in zip(starts.tolist(), drafts, found, strict=True):
            alone = model(torch.cat([text[:start], draft])[None]).logits[0, start - 1 :]
            torch.testing.assert_close(own, (alone.double() / 0.7).softmax(-1), atol=1e-5, rtol=0)
