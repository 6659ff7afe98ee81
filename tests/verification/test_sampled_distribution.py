"""Sampled verification as a distribution: chi-square tests against the exact softmax."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from fastdraft.kernels import operands
from fastdraft.verification import verify_sampled

N = 100_000
VOCABULARY = 24
# Every seed here is fixed, so a test that passes keeps passing.
SIGNIFICANT = 1e-3

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
}


def exact(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of a row without ties, in float64."""
    scaled = logits.double().numpy() / temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    above = np.cumsum(p[order]) - p[order]
    p[order[above >= top_p]] = 0.0
    p[p < min_p * p.max()] = 0.0
    return p / p.sum()


def check_counts(counts, probabilities):
    """The chi-square test; rare outcomes count together, and impossible ones never occur."""
    counts, probabilities = np.ravel(counts), np.ravel(probabilities)
    expected = probabilities * counts.sum()
    assert counts[probabilities == 0].sum() == 0
    if probabilities.max() == 1:
        return
    common = expected >= 5
    rare = expected[~common].sum()
    observed, expected = counts[common], expected[common]
    if rare >= 5:
        observed = np.append(observed, counts.sum() - observed.sum())
        expected = np.append(expected, rare)
    p_value = stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue
    assert p_value > SIGNIFICANT


def rows(count, vocabulary=VOCABULARY):
    torch.manual_seed(11)
    return torch.randn(count, vocabulary) * 1.5


def verify_many(logits, draft, *, seeds, position=50, parents=None, **options):
    """The same request and draft for every seed; logits (draft + 1, vocabulary)."""
    n = len(seeds)
    if parents is not None:
        options["parents"] = torch.tensor(parents).repeat(n)
    return verify_sampled(
        logits.repeat(n, 1),
        torch.tensor(draft, dtype=torch.int32).repeat(n),
        torch.arange(n + 1) * len(draft),
        seeds=seeds,
        positions=torch.full((n,), position),
        **options,
    )


# Every second set of options runs with small chunks, so that a row has several.
@pytest.mark.parametrize(
    ("options", "chunk"),
    [
        pytest.param(options, chunk, id=f"{name}-{chunk}")
        for (name, options), chunk in zip(OPTIONS.items(), itertools.cycle([1024, 8]), strict=False)
    ],
)
def test_joint_distribution_of_accepted_and_last_token(options, chunk, monkeypatch):
    monkeypatch.setattr(operands, "CHUNK", chunk)
    logits = rows(3)
    distributions = [exact(row, **options) for row in logits]
    # A likely token, then a middling one, so that every outcome occurs.
    draft = [int(distributions[0].argmax()), int(np.argsort(-distributions[1])[2])]
    verified = verify_many(logits, draft, seeds=torch.arange(N) * 3 + 10**12, **options)
    accepted = verified.lengths.long() - 1
    last = verified.token_ids.gather(1, accepted[:, None])[:, 0]
    counts = np.zeros((3, VOCABULARY))
    np.add.at(counts, (accepted.numpy(), last.numpy()), 1)

    joint, reached = np.zeros((3, VOCABULARY)), 1.0
    for j, distribution in enumerate(distributions):
        joint[j] = reached * distribution
        if j < len(draft):
            joint[j, draft[j]] = 0.0
            reached *= distribution[draft[j]]
    assert joint.sum() == pytest.approx(1)
    check_counts(counts, joint)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_joint_distribution_of_path_and_last_token_of_a_tree(options):
    logits = rows(6)
    distributions = [exact(row, **options) for row in logits]
    likely = [np.argsort(-distribution) for distribution in distributions]
    # Two guesses after the text, two after the first of them, one after the second.
    parents = [-1, -1, 0, 1, 0]
    choices = [likely[0][0], likely[0][2], likely[1][1], likely[2][0], likely[1][0]]
    draft = list(map(int, choices))
    verified = verify_many(
        logits, draft, parents=parents, seeds=torch.arange(N) * 7 - 10**9, **options
    )
    accepted = verified.lengths.long() - 1
    last = verified.token_ids.gather(1, accepted[:, None])[:, 0]
    # The largest index on a path is its last, since parents stand before their children.
    slot = verified.path.amax(1) + 1
    counts = np.zeros((6, VOCABULARY))
    np.add.at(counts, (slot.numpy(), last.numpy()), 1)

    joint, reached = np.zeros((6, VOCABULARY)), [1.0]
    for node, (parent, token) in enumerate(zip(parents, draft, strict=True), 1):
        reached.append(reached[parent + 1] * distributions[parent + 1][token])
        joint[node] = reached[node] * distributions[node]
    joint[0] = distributions[0]
    for parent, token in zip(parents, draft, strict=True):
        joint[parent + 1, token] = 0.0
    assert joint.sum() == pytest.approx(1)
    check_counts(counts, joint)
    # The first token alone has the distribution of plain sampling.
    check_counts(np.bincount(verified.token_ids[:, 0], minlength=VOCABULARY), distributions[0])


def draws(seeds, positions, logits):
    verified = verify_sampled(
        logits.expand(len(seeds), -1),
        torch.empty(0, dtype=torch.int32),
        torch.zeros(len(seeds) + 1, dtype=torch.int32),
        seeds=seeds,
        positions=positions,
    )
    return verified.token_ids[:, 0].numpy()


BASE = torch.arange(N)
SAME = torch.zeros(N, dtype=torch.int64)


# A column's noise does not depend on its chunk: each case has one size.
@pytest.mark.parametrize(
    ("seeds", "positions", "other_seeds", "other_positions", "chunk"),
    [
        (BASE, SAME, BASE, SAME + 1, 8),
        (SAME, BASE, SAME, BASE + 1, 1024),
        (BASE, SAME, BASE + 1, SAME, 8),
        (BASE, SAME, BASE + 2**32, SAME, 1024),
        (BASE, SAME, -BASE - 1, SAME, 8),
        (BASE, SAME + 3, BASE, SAME + 3 + 2**32, 1024),
        (BASE, SAME + 1, SAME + 1, BASE + 2, 8),
    ],
    ids=["next-position", "along-a-text", "next-seed", "high-seed", "minus", "far", "swapped"],
)
def test_pairs_of_draws_are_independent(
    seeds, positions, other_seeds, other_positions, chunk, monkeypatch
):
    monkeypatch.setattr(operands, "CHUNK", chunk)
    logits = rows(1, 20)
    distribution = exact(logits[0])
    pairs = np.zeros((20, 20))
    np.add.at(
        pairs,
        (draws(seeds, positions, logits), draws(other_seeds, other_positions, logits)),
        1,
    )
    check_counts(pairs, np.outer(distribution, distribution))
