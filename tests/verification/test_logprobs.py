"""Masks of allowed tokens, and log-probabilities: held against torch's log_softmax, row by row."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import chunks
from fastdraft.verification import (
    Status,
    Workspace,
    verify_greedy,
    verify_rejection,
    verify_sampled,
)

INF, NAN = math.inf, math.nan
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
V = 70


def bitmask(allowed):
    """bool (rows, vocabulary) as words of 32 bits, by Python's integers."""
    words = []
    for row in allowed.tolist():
        whole = sum(1 << token for token, bit in enumerate(row) if bit)
        count = -(-len(row) // 32)
        found = [(whole >> (32 * word)) & 0xFFFFFFFF for word in range(count)]
        words.append([word - 2**32 if word >= 2**31 else word for word in found])
    return torch.tensor(words, dtype=torch.int32)


def batch(seed=0, *, vocabulary=V, dtype=torch.float32, requests=5, tree=False):
    """Logits, draft_ids, offsets, parents of drafts that a greedy or sampled target often takes."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [rng.randint(0, 5) for _ in range(requests)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    logits = (torch.randn(sum(lengths) + requests, vocabulary) * 2).to(dtype)
    parents = [rng.randrange(-1, node) if tree else node - 1 for n in lengths for node in range(n)]
    ids = torch.randint(vocabulary, (sum(lengths),), dtype=torch.int32)
    return logits, ids, offsets, torch.tensor(parents, dtype=torch.int32)


def follow(verify, logits, ids, offsets, parents):
    """The draft ids changed to what the target takes, as far as siblings allow it; and the result.

    Each round makes the next token on the target's path right.
    """
    ids = ids.clone()
    for _ in range(6):
        verified = verify(logits.clone(), ids, offsets, parents=parents)
        for b, tokens in enumerate(verified.tolist()):
            start, end = int(offsets[b]), int(offsets[b + 1])
            path = verified.path[b].tolist()
            last = path[len(tokens) - 2] if len(tokens) > 1 else -1
            for node in range(end - start):
                if tokens and int(parents[start + node]) == last:
                    ids[start + node] = tokens[-1]
                    break
    return ids, verify(logits.clone(), ids, offsets, parents=parents)


def check_logprobs(found, verified, offsets, distribution):
    """distribution: (rows, vocabulary), the log-probabilities of each row."""
    assert found.dtype == torch.float32
    assert found.shape == verified.token_ids.shape
    for b, tokens in enumerate(verified.tolist()):
        slots = [0, *(node + 1 for node in verified.path[b].tolist() if node >= 0)]
        for step, token in enumerate(tokens):
            expected = float(distribution[int(offsets[b]) + b + slots[step], token])
            assert float(found[b, step]) == pytest.approx(expected, rel=1e-5, abs=1e-5, nan_ok=True)
        assert found[b, len(tokens) :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_greedy_logprobs_are_the_log_softmax(dtype, tree):
    logits, ids, offsets, parents = batch(1, dtype=dtype, tree=tree)
    ids, _ = follow(verify_greedy, logits, ids, offsets, parents)
    verified = verify_greedy(
        logits, ids, offsets, parents=parents, logprobs=True, raw_logprobs=True
    )
    assert (verified.lengths > 2).any()
    check_logprobs(verified.logprobs, verified, offsets, logits.double().log_softmax(-1))
    assert torch.equal(verified.raw_logprobs.nan_to_num(), verified.logprobs.nan_to_num())
    plain = verify_greedy(logits, ids, offsets, parents=parents)
    assert plain.logprobs is None and plain.raw_logprobs is None
    assert torch.equal(plain.token_ids, verified.token_ids)


FILTERS = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": 0.6},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 0.9, "top_p": 0.7},
    "min_p": {"temperature": 1.1, "min_p": 0.2},
    "all": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
}


def filtered(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The log-probabilities after temperature and filters, in float64."""
    distribution = (logits.double() / temperature).softmax(-1)
    if top_k:
        distribution = torch.where(
            distribution >= distribution.topk(top_k).values[:, -1:], distribution, 0.0
        )
    distribution /= distribution.sum(-1, keepdim=True)
    best = distribution.sort(descending=True)
    kept = best.values.cumsum(-1) - best.values < top_p
    distribution = torch.zeros_like(distribution).scatter(1, best.indices, best.values * kept)
    distribution = torch.where(
        distribution >= min_p * distribution.amax(-1, keepdim=True), distribution, 0.0
    )
    return (distribution / distribution.sum(-1, keepdim=True)).log()


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_sampled_logprobs_are_those_of_what_was_drawn_from(options, dtype, tree):
    logits, ids, offsets, parents = batch(2, dtype=dtype, tree=tree)
    shared = {**options, "seeds": torch.arange(5), "positions": torch.arange(5) * 9}

    def verify(*operands, **more):
        return verify_sampled(*operands, **shared, **more)

    ids, _ = follow(verify, logits, ids, offsets, parents)
    verified = verify(logits, ids, offsets, parents=parents, logprobs=True, raw_logprobs=True)
    assert (verified.lengths > 2).any()
    check_logprobs(verified.logprobs, verified, offsets, filtered(logits, **options))
    check_logprobs(verified.raw_logprobs, verified, offsets, logits.double().log_softmax(-1))


def test_greedy_requests_among_sampled_ones_have_unfiltered_logprobs():
    logits, ids, offsets, _ = batch(3)
    temperature = torch.tensor([0.0, 0.7, 0.0, 0.7, 0.0])
    verified = verify_sampled(
        logits,
        ids,
        offsets,
        temperature=temperature,
        top_k=3,
        top_p=0.5,
        min_p=0.3,
        seeds=torch.arange(5),
        positions=torch.arange(5),
        logprobs=True,
    )
    request, _ = chunks.rows_of(len(logits), offsets)
    distribution = filtered(logits, temperature=0.7, top_k=3, top_p=0.5, min_p=0.3)
    greedy = (temperature == 0)[request][:, None]
    distribution = torch.where(greedy, logits.double().log_softmax(-1), distribution)
    check_logprobs(verified.logprobs, verified, offsets, distribution)


def test_rows_without_a_softmax_have_no_logprobs():
    rows = torch.zeros(4, 5)
    rows[1, 2] = INF
    rows[2, 3] = NAN
    rows[3] = -INF
    offsets = torch.arange(5) * 0
    verified = verify_greedy(
        rows, torch.empty(0, dtype=torch.int32), offsets, logprobs=True, raw_logprobs=True
    )
    assert verified.tolist() == [[0], [2], [3], []]
    for found in (verified.logprobs, verified.raw_logprobs):
        assert float(found[0, 0]) == pytest.approx(-math.log(5))
        assert found[1:].isnan().all()


def test_logprobs_of_more_rows_than_a_slab(monkeypatch):
    logits, ids, offsets, _ = batch(4)
    options = {
        "temperature": 0.8,
        "seeds": torch.arange(5),
        "positions": torch.arange(5),
        "allowed": bitmask(torch.rand(logits.shape) < 0.5),
        "logprobs": True,
        "raw_logprobs": True,
    }
    whole = verify_sampled(logits, ids, offsets, **options)
    monkeypatch.setitem(chunks._SLAB, "cpu", 3 * V)
    parts = verify_sampled(logits, ids, offsets, **options)
    for name in ("token_ids", "status", "logprobs", "raw_logprobs"):
        assert torch.equal(getattr(parts, name).nan_to_num(), getattr(whole, name).nan_to_num())


# Masks.


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([2, 31, 32, 33, 64, 70]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_a_token_that_is_not_allowed_counts_as_minus_infinity(
    seed, vocabulary, share, dtype, temperature
):
    logits, ids, offsets, parents = batch(seed, vocabulary=vocabulary, dtype=dtype)
    # Nothing that a row holds makes a difference where it is not allowed.
    logits[0, 0], logits[1, 1] = NAN, INF
    allowed = torch.rand(logits.shape) < share
    masked = logits.masked_fill(~allowed, -INF)
    options = {
        "temperature": temperature,
        "top_k": 4,
        "seeds": torch.arange(5) + seed,
        "positions": torch.arange(5),
        "parents": parents,
        "logprobs": True,
    }
    expected = verify_sampled(masked, ids, offsets, **options)
    found = verify_sampled(logits, ids, offsets, allowed=bitmask(allowed), **options)
    for name in ("token_ids", "lengths", "status", "path", "logprobs"):
        assert torch.equal(
            getattr(found, name).nan_to_num(nan=7.0), getattr(expected, name).nan_to_num(nan=7.0)
        )
    for row, (known, got) in enumerate(
        zip(found.tolist(), allowed[(offsets[:-1] + torch.arange(5))].tolist(), strict=True)
    ):
        assert not known or got[known[0]], row


def test_masks_leave_raw_logprobs_and_logits_alone():
    logits, ids, offsets, _ = batch(5)
    allowed = torch.rand(logits.shape) < 0.3
    before = logits.clone()
    verified = verify_greedy(
        logits, ids, offsets, allowed=bitmask(allowed), logprobs=True, raw_logprobs=True
    )
    assert torch.equal(logits, before)
    masked = logits.double().masked_fill(~allowed, -INF)
    check_logprobs(verified.logprobs, verified, offsets, masked.log_softmax(-1))
    check_logprobs(verified.raw_logprobs, verified, offsets, logits.double().log_softmax(-1))


def test_a_row_with_nothing_allowed_is_empty():
    logits, ids, offsets = torch.zeros(2, 40), torch.tensor([3]), torch.tensor([0, 1])
    allowed = torch.zeros(2, 2, dtype=torch.int32)
    verified = verify_greedy(logits, ids, offsets, allowed=allowed)
    assert verified.tolist() == [[]]
    assert verified.status.tolist() == [Status.EMPTY]
    allowed[0, 0] = 8
    verified = verify_greedy(logits, ids, offsets, allowed=allowed)
    assert verified.tolist() == [[3]]
    assert verified.status.tolist() == [Status.EMPTY]


# With all options.


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_with_filters_and_masks(tree, temperature, dtype):
    logits, ids, offsets, parents = batch(6, dtype=dtype, tree=tree)
    allowed = torch.rand(logits.shape) < 0.6
    shared = {
        "temperature": temperature,
        "top_p": 0.9,
        "seeds": torch.arange(5),
        "positions": torch.arange(5),
        "allowed": bitmask(allowed),
    }

    def verify(*operands, **more):
        return verify_sampled(*operands, **shared, **more)

    ids, _ = follow(verify, logits, ids, offsets, parents)
    raw = logits.double().log_softmax(-1)
    distribution = logits.double().masked_fill(~allowed, -INF)
    distribution = (
        distribution.log_softmax(-1)
        if temperature == 0
        else filtered(distribution, temperature=0.8, top_p=0.9)
    )

    verified = verify(logits, ids, offsets, parents=parents, logprobs=True, raw_logprobs=True)
    assert (verified.lengths > 2).any()
    check_logprobs(verified.logprobs, verified, offsets, distribution)
    check_logprobs(verified.raw_logprobs, verified, offsets, raw)


def test_rejection_takes_the_same_options():
    logits, ids, offsets, _ = batch(7)
    allowed = torch.rand(logits.shape) < 0.7
    request = torch.repeat_interleave(torch.arange(5), offsets.diff())
    likely = logits.masked_fill(~allowed, -INF).argmax(-1)
    ids = likely[torch.arange(len(ids)) + request].int()
    distribution = torch.nn.functional.one_hot(ids.long(), V).float()
    options = {
        "temperature": 0.4,
        "seeds": torch.arange(5),
        "positions": torch.arange(5),
        "allowed": bitmask(allowed),
        "logprobs": True,
        "raw_logprobs": True,
    }
    raw = logits.double().log_softmax(-1)
    verified = verify_rejection(logits, ids, offsets, draft_probs=distribution, **options)
    assert (verified.lengths > 2).any()
    masked = logits.double().masked_fill(~allowed, -INF)
    check_logprobs(verified.logprobs, verified, offsets, filtered(masked, temperature=0.4))
    check_logprobs(verified.raw_logprobs, verified, offsets, raw)


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed": [[1]]}, "allowed must be a torch.Tensor, got list"),
        (
            {"allowed": torch.zeros(2, 3)},
            "allowed must hold one of .*, got torch.float32",
        ),
        (
            {"allowed": torch.zeros(2, 2, dtype=torch.int32)},
            r"allowed must have 3 words for each of the 2 rows .* of 70 tokens, got shape \(2, 2\)",
        ),
        ({"allowed": torch.zeros(1, 3, dtype=torch.int32)}, r"2 rows .*, got shape \(1, 3\)"),
        ({"logprobs": 5}, "logprobs must be True or False, got 5"),
        ({"raw_logprobs": None}, "raw_logprobs must be True or False, got None"),
        ({"workspace": 1 << 20}, "workspace must be a Workspace, got int"),
    ],
)
def test_wrong_options_are_named(options, message):
    operands = torch.zeros(2, V), torch.tensor([3]), torch.tensor([0, 1])
    with pytest.raises(InvalidValueError, match=message):
        verify_greedy(*operands, **options)
    with pytest.raises(InvalidValueError, match=message):
        verify_sampled(*operands, seeds=torch.tensor([1]), positions=torch.tensor([1]), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_rows": 1}, "workspace must have rows of at least 2, got 1"),
        ({"vocabulary": 69}, "workspace must have vocabulary of at least 70, got 69"),
        ({"max_draft": 0}, "workspace must have max_draft of at least 1, got 0"),
    ],
)
def test_a_workspace_that_is_too_small_is_named(change, message):
    size = {"max_rows": 2, "max_requests": 1, "vocabulary": V, "max_draft": 1}
    operands = torch.zeros(2, V), torch.tensor([3]), torch.tensor([0, 1])
    verify_greedy(*operands, workspace=Workspace("cpu", **size))
    with pytest.raises(InvalidValueError, match=message):
        verify_greedy(*operands, workspace=Workspace("cpu", **{**size, **change}))
