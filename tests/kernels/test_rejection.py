"""Rejection sampling by the kernels against the reference, token for token."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from adversarial import (
    DTYPES,
    LENGTHS,
    Random,
    allowed_bits,
    assert_same,
    in_layout,
    odd_rows,
    offsets_of,
    workspace_of,
)
from torch import Tensor

from fastdraft.kernels import fused, reference
from fastdraft.kernels.fused import config
from fastdraft.kernels.operands import Batch, DraftDistribution, Sampling, Warpers
from fastdraft.kernels.workspace import BUFFERS
from rejection_cases import drawn

FORMS = ["draft_probs", "draft_logits"]
FILTERS = {
    "top_k": [0, 30, 2, 40],
    "top_p": [0.9, 1.0, 0.9, 0.6],
    "min_p": [0.0, 0.0, 0.05, 0.0],
}


class Case(NamedTuple):
    logits: Tensor
    draft_ids: Tensor
    offsets: Tensor
    form: str
    distribution: Tensor

    def operands(self, **changes):
        """What the verb takes, with a temperature, seed and position for each request.

        changes: fields of the batch, and lists of the warpers' options for the requests in turn.
        """
        requests = len(self.offsets) - 1
        options = {"temperature": [0.7, 1.0, 1.0, 0.0, 1.3, 1.0, 0.2, 1.0]}
        options |= {name: changes.pop(name) for name in Warpers._fields if name in changes}
        warpers = {
            name: torch.tensor((each * requests)[:requests]) for name, each in options.items()
        }
        index = torch.arange(requests)
        longest = int(self.offsets.diff().max())
        return (
            Batch(self.logits, self.draft_ids, self.offsets, longest)._replace(**changes),
            Sampling(Warpers(**warpers), index * 2**33 - 5, index * 2**31 + 1),
            DraftDistribution(self.distribution, is_logits=self.form == "draft_logits"),
        )


def batch_of(lengths, vocabulary, dtype, form, *, seed, likeness=0.8, odd=True, draft_dtype=None):
    """Drafts drawn from distributions that are like the target's; if odd, half of all rows are
    extreme."""
    random = Random(seed)
    offsets = offsets_of(lengths)
    drafted, requests = int(offsets[-1]), len(lengths)
    logits = (random.normal(drafted + requests, vocabulary) * 3).to(dtype)
    if odd:
        logits = odd_rows(drafted + requests, vocabulary, dtype, seed=seed)
    request = torch.arange(requests).repeat_interleave(torch.tensor(lengths))
    own = logits[torch.arange(drafted) + request].float()
    own = torch.where(own.isfinite(), own, 0.0).clamp(-20, 20)
    guess = likeness * own + (1 - likeness) * 3 * random.normal(drafted, vocabulary)
    draft_ids, distribution = drawn(
        guess,
        seeds=torch.arange(drafted) + seed,
        positions=torch.arange(drafted),
        top_k=max(vocabulary // 2, 1),
    )
    draft_ids = draft_ids.long()
    if form == "draft_logits":
        distribution = distribution.log()
    if odd:
        strange = [math.nan, math.inf, -math.inf] if form == "draft_logits" else [math.nan, 0.0]
        for index, value in enumerate(strange * 2):
            place = (5 * index + seed) % drafted
            token = slice(None) if index % 2 else int(draft_ids[place])
            distribution[place, token] = value
        draft_ids[seed % drafted :: 7] = vocabulary
        draft_ids[(seed + 3) % drafted :: 9] = -3
    return Case(logits, draft_ids, offsets, form, distribution.to(draft_dtype or dtype))


def check(batch, *, logits=None, distribution=None, workspace=None, **changes):
    """Runs the kernels and the reference; the kernels on `logits` and `distribution` if given."""
    operands, sampling, draft_distribution = batch.operands(**changes)
    expected = reference.verify_rejection(operands, sampling, draft_distribution)
    logits = batch.logits if logits is None else logits
    operands = operands._replace(logits=logits, workspace=workspace)
    draft_distribution = draft_distribution._replace(
        values=batch.distribution if distribution is None else distribution
    )
    got = fused.verify_rejection(operands, sampling, draft_distribution)
    assert_same(got, expected)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 37, 2600])
@pytest.mark.parametrize("form", FORMS)
def test_rejection_is_the_reference(form, vocabulary, dtype):
    batch = batch_of(LENGTHS, vocabulary, dtype, form, seed=vocabulary)
    check(batch, logprobs=vocabulary != 2, raw_logprobs=vocabulary == 2600)


@pytest.mark.parametrize("form", FORMS)
def test_ordinary_drafts(form):
    batch = batch_of([4] * 20, 1100, torch.float32, form, seed=1, odd=False)
    lengths = check(batch).lengths
    assert {1, 2, 4, 5} <= set(lengths.tolist())


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.bfloat16, "draft_logits"),
        (torch.float16, "draft_probs"),
        (torch.float32, "draft_logits"),
    ],
)
def test_filters(dtype, form):
    # Few rows: the search for a threshold takes the interpreter long.
    lengths = [3, 1, 2, 0]
    batch = batch_of(lengths, 1100, dtype, form, seed=3, odd=False, likeness=0.95)
    allowed = allowed_bits(len(batch.logits), 1100, seed=6)
    check(batch, allowed=allowed, logprobs=True, raw_logprobs=True, **FILTERS)
    size = {"max_rows": 12, "max_requests": 5, "vocabulary": 1200, "max_draft": 4}
    assert check(batch, workspace=workspace_of(**size), **FILTERS).lengths.max() > 1


@pytest.mark.parametrize("vocabulary", [31, 2600])
def test_among_allowed_tokens(vocabulary):
    for form in FORMS:
        batch = batch_of(LENGTHS, vocabulary, torch.bfloat16, form, seed=5)
        allowed = allowed_bits(len(batch.logits), vocabulary, seed=5)
        check(batch, allowed=allowed, logprobs=True, raw_logprobs=True)


@pytest.mark.parametrize("layout", ["rows apart", "tokens apart", "transposed"])
def test_any_strides(layout):
    for form in FORMS:
        batch = batch_of([4, 0, 2], 2099, torch.bfloat16, form, seed=6, draft_dtype=torch.float32)
        check(batch, logits=in_layout(batch.logits, layout))
        check(batch, distribution=in_layout(batch.distribution, layout))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("any_order")
def test_parts_of_rows_in_any_order(form):
    vocabulary = 20_000
    batch = batch_of([2, 0], vocabulary, torch.float16, form, seed=7, odd=False)
    assert config.split_chunks(2, vocabulary).programs > 2
    check(batch)


@pytest.mark.parametrize("form", FORMS)
def test_requests_without_a_draft(form):
    check(batch_of([3, 0], 40, torch.float32, form, seed=8))
    nothing = Case(
        Random(0).normal(3, 1400),
        torch.empty(0).long(),
        torch.zeros(4).long(),
        form,
        torch.empty(0, 1400),
    )
    check(nothing)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_of_distributions_that_are_the_same(form):
    # Twice the target's distribution refuses half of its tokens, and leaves nothing.
    batch = batch_of([1] * 12, 1200, torch.float32, form, seed=9, odd=False, likeness=1.0)
    distribution = batch.logits[::2].softmax(-1)
    double = 2 * distribution if form == "draft_probs" else distribution.log()
    emitted = check(batch._replace(distribution=double), temperature=[1.0])
    assert set(emitted.lengths.tolist()) == ({1, 2} if form == "draft_probs" else {2})


def test_drafts_are_cut_and_padded():
    batch = batch_of([3, 0, 5, 1], 50, torch.float32, "draft_probs", seed=10)
    for max_draft in (0, 3, 40):
        check(batch, max_draft=max_draft)
    check(batch._replace(draft_ids=batch.draft_ids.int()))


def test_more_than_a_block_of_slots_and_of_requests(monkeypatch):
    monkeypatch.setattr(config, "SLOTS", 2)
    monkeypatch.setattr(config, "requests_block", lambda _: 2)
    batch = batch_of([7, 5, 6], 9, torch.float32, "draft_probs", seed=11, likeness=1.0, odd=False)
    assert check(batch, logprobs=True, max_draft=9).lengths.max() > 4


def test_rows_past_the_last_request_are_ignored():
    batch = batch_of([2, 1], 40, torch.bfloat16, "draft_logits", seed=12)
    operands, sampling, draft_distribution = batch.operands()
    expected = reference.verify_rejection(operands, sampling, draft_distribution)
    distribution = torch.cat([batch.distribution, torch.full((9, 40), math.nan).bfloat16()])
    padded = torch.cat([batch.logits, torch.full((9, 40), math.nan).bfloat16()])
    ids = torch.cat([batch.draft_ids, torch.full((9,), 3)])
    operands = operands._replace(logits=padded, draft_ids=ids)
    assert_same(
        fused.verify_rejection(
            operands, sampling, draft_distribution._replace(values=distribution)
        ),
        expected,
    )


def test_a_workspace_is_used_and_left_as_it_was():
    workspace = workspace_of(max_rows=40, max_requests=9, vocabulary=3000, max_draft=10)
    batch = batch_of(LENGTHS, 3000, torch.float32, "draft_logits", seed=13)
    first = check(batch, workspace=workspace, logprobs=True)
    batch = batch_of([1, 4], 77, torch.bfloat16, "draft_probs", seed=14)
    second = check(batch, max_draft=6, workspace=workspace)
    assert first.token_ids.data_ptr() == second.token_ids.data_ptr()
    for name, buffer in BUFFERS.items():
        if buffer.zero:
            assert not workspace._buffers[name].any(), name


CANARY = 0x5A


def guarded(buffer):
    """A copy of a tensor with bytes before and after it in the same memory, and all of these."""
    count = buffer.numel() * buffer.element_size()
    memory = torch.full((count + 512,), CANARY, dtype=torch.uint8)
    inner = memory[256 : 256 + count].view(buffer.dtype).view(buffer.shape)
    inner.copy_(buffer)
    return inner, memory


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_written_out_of_bounds_whatever_the_operands_hold(form):
    random = Random(0)
    batch = batch_of([3, 1, 4], 33, torch.float32, form, seed=15)
    for _ in range(4):
        wild = random.integers(-(2**62), 2**62, 12)
        near = random.integers(-3, 14, 12)
        values = torch.where(random.uniform(12) < 0.3, wild, near)
        workspace = workspace_of(max_rows=11, max_requests=3, vocabulary=33, max_draft=5)
        memories = {}
        for name, buffer in list(workspace._buffers.items()):
            workspace._buffers[name], memories[name] = guarded(buffer)
        operands = {"draft_ids": wild[:8], "offsets": values[8:], "workspace": workspace}
        emitted = fused.verify_rejection(*batch.operands(max_draft=5, **operands))
        for name, memory in memories.items():
            assert (memory[:256] == CANARY).all() and (memory[-256:] == CANARY).all(), name
            if BUFFERS[name].zero:
                assert not workspace._buffers[name].any(), name
        assert emitted.token_ids.max() < 33
        # Whatever it was, the next batch is verified as ever.
        check(batch, workspace=workspace)
