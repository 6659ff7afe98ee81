"""Rejection sampling as a distribution: chi-square tests against the exact distribution of the
target."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from cases import drawn
from scipy import stats
from test_sampled_distribution import OPTIONS, SIGNIFICANT, N, check_counts, exact

from fastdraft.kernels import operands
from fastdraft.verification import verify_rejection
from oracles.verification import keep_probabilities

pytestmark = pytest.mark.slow

VOCABULARY = 12


def rows(count, vocabulary=VOCABULARY, *, seed=11):
    torch.manual_seed(seed)
    return torch.randn(count, vocabulary) * 1.5


def kept_lengths(distributions, draft_distributions):
    """The probability that at least 0, 1, ... draft tokens are kept, of rows that do not depend on
    them: all drafts counted."""
    probabilities, drawn, kept = [1.0], np.ones(1), np.ones(1)
    for p, q in zip(distributions, draft_distributions, strict=False):
        possible = q > 0
        kept = np.minimum(np.outer(kept, p[possible] / q[possible]), 1).ravel()
        drawn = np.outer(drawn, q[possible]).ravel()
        probabilities.append(float(drawn @ kept))
    return probabilities


# All options, over several small chunks and over one in turn.
CASES = [
    pytest.param(options, chunk, 3, id=f"{name}-{chunk}")
    for (name, options), chunk in zip(OPTIONS.items(), itertools.cycle([4, 1024]), strict=False)
]


@pytest.mark.parametrize(
    ("options", "chunk", "drafted"), [*CASES, pytest.param({}, 1024, 16, id="long")]
)
def test_every_token_has_the_targets_distribution(options, chunk, drafted, monkeypatch):
    monkeypatch.setattr(operands, "CHUNK", chunk)
    logits, draft_logits = rows(drafted + 1), rows(drafted, seed=12)
    if drafted == 16:  # alike, so that many are accepted to the end
        draft_logits = logits[:-1] + 0.2 * draft_logits
    n = 3 * N // drafted
    seeds, positions = torch.arange(n) * 3, torch.full((n,), 50)
    ids, shaped = drawn(
        draft_logits.repeat(n, 1),
        seeds=seeds.repeat_interleave(drafted),
        positions=50 + torch.arange(drafted).repeat(n),
        **options,
    )
    offsets = torch.arange(n + 1) * drafted
    verified = verify_rejection(
        logits.repeat(n, 1), ids, offsets, draft_logits=shaped, seeds=seeds, positions=positions,
        **options,
    )  # fmt: skip
    distributions = [exact(row, **options) for row in logits]
    kept = kept_lengths(distributions, [exact(row, **options) for row in draft_logits[:3]])
    assert drafted == 3 or int((verified.lengths == 17).sum()) >= 1000
    for j, distribution in enumerate(distributions):
        reached = verified.lengths > j
        tried = int(reached.sum())
        if tried >= 1000:
            counts = np.bincount(verified.token_ids[reached, j], minlength=VOCABULARY)
            check_counts(counts, distribution)
        if 0 < j < len(kept):
            # Drafts are kept as often as can be.
            assert stats.binomtest(tried, n, kept[j]).pvalue > SIGNIFICANT


@pytest.mark.parametrize("seed", range(12))
def test_the_rule_gives_the_targets_joint_distribution_and_never_fewer_tokens(seed):
    # All drafts counted: the law of a text of `drafted` + 1 tokens that a verification begins and
    # the target goes on with.
    random = np.random.default_rng(seed)
    vocabulary, drafted = 2 + seed % 3, 1 + seed // 4
    tables = {}

    def step(kind, text):
        """A distribution for each text, with zeros here and there."""
        if (kind, text) not in tables:
            weights = random.dirichlet([0.7] * vocabulary) * (random.random(vocabulary) < 0.8)
            weights[random.integers(vocabulary)] += 0.05
            tables[kind, text] = weights / weights.sum()
        return tables[kind, text]

    def probability(kind, text):
        return np.prod([step(kind, text[:at])[token] for at, token in enumerate(text)])

    texts = list(itertools.product(range(vocabulary), repeat=drafted + 1))
    law, kept, one_by_one = dict.fromkeys(texts, 0.0), 0.0, 0.0
    for draft in itertools.product(range(vocabulary), repeat=drafted):
        if (drawn := probability("draft", draft)) == 0:
            continue
        p = [step("target", draft[:j]) for j in range(drafted + 1)]
        q = [step("draft", draft[:j]) for j in range(drafted)]
        at_least, probabilities, residuals = keep_probabilities(p, q, draft)
        ratios = [min(1, p[j][draft[j]] / q[j][draft[j]]) for j in range(drafted)]
        kept += drawn * sum(at_least[1:])
        one_by_one += drawn * np.cumprod(ratios).sum()
        for j in range(drafted, -1, -1):
            ends = drawn * (probabilities[j] if j else 1.0)
            drawn -= ends
            if ends == 0:
                continue
            for text in texts:
                if text[:j] == draft[:j]:
                    token = residuals[j][text[j]] / sum(residuals[j])
                    rest = [step("target", text[:at])[text[at]] for at in range(j + 1, drafted + 1)]
                    law[text] += ends * token * np.prod(rest)
    assert [*law.values()] == pytest.approx(
        [probability("target", text) for text in texts], abs=1e-12
    )
    assert kept >= one_by_one - 1e-12
    if drafted == 1:
        assert kept == pytest.approx(one_by_one)
