"""Promises of every verification operation: layouts, masks, log-probabilities, seeds, memory."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from adversarial import LAYOUTS, LENGTHS, allowed_bits, assert_same, in_layout
from cases import case_of, of_every_shape

from fastdraft.kernels import chunks, greedy, rejection, sampled
from fastdraft.kernels.operands import Batch, Verified
from fastdraft.kernels.workspace import Scratch, take_output
from fastdraft.verification import (
    Workspace,
    compaction_indices,
    tree_attention_mask,
    verify_greedy,
    verify_rejection,
    verify_sampled,
)
from oracles import verification as oracle

INF = math.inf


def made(operation, tree=False, *, vocabulary=70, dtype=torch.float32, lengths=LENGTHS, **more):
    """A case whose drafts hit; with odd rows, but for rejection, which refuses odd drafts."""
    options = {"odd": False} if operation == "rejection" else {"tree": tree}
    if operation == "rejection":
        options["likeness"] = 0.95
    return case_of(operation, lengths, vocabulary, dtype, seed=3, **options, **more)


def ordinary(operation, tree=False, **more):
    """The same without odd rows; a greedy one as a sampled one's batch."""
    if operation == "rejection":
        return made(operation, **more)
    of = operation if operation == "filters" else "sampled"
    case = case_of(of, LENGTHS, 70, torch.float32, seed=3, tree=tree, odd=False, **more)
    return case._replace(operation=greedy, more=()) if operation == "greedy" else case


@of_every_shape
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_strides(operation, tree, layout, dtype):
    case = made(operation, tree, vocabulary=1037, dtype=dtype, lengths=[4, 0, 2])
    expected = case.verify()
    assert_same(case.verify(logits=in_layout(case.batch.logits, layout)), expected)
    if operation == "rejection":
        assert_same(case.verify(draft_logits=in_layout(case.more[1], layout)), expected)


@of_every_shape
def test_a_request_is_verified_alone(operation, tree):
    case = made(operation, tree, vocabulary=1500)
    together = case.verify()
    assert len(set(together.lengths.tolist())) > 2
    for request in range(len(LENGTHS)):
        alone = case.alone(request).verify(max_draft=20)
        assert alone.token_ids.shape == (1, 21)
        assert alone.tolist() == together.tolist()[request : request + 1]
        assert alone.status.tolist() == together.status[request : request + 1].tolist()


@of_every_shape
def test_more_rows_than_a_slab(operation, tree, monkeypatch):
    case = made(operation, tree)
    allowed = allowed_bits(len(case.batch.logits), 70, seed=1)
    asked = {"allowed": allowed, "logprobs": True, "raw_logprobs": True}
    if operation != "rejection":
        asked["likeliest"] = 3
    whole = case.verify(**asked)
    monkeypatch.setitem(chunks._SLAB, "cpu", 3 * 70)
    parts = case.verify(**asked)
    assert_same(parts, whole)
    if operation != "rejection":
        assert all(map(torch.equal, parts.likeliest, whole.likeliest))


@of_every_shape
def test_operands_are_left_alone(operation, tree):
    case = made(operation, tree)
    tensors = [case.batch.logits, *case.more[1:]]
    before = [each.clone() for each in tensors]
    for each in tensors:
        each.requires_grad_()
    verified = case.verify(allowed=allowed_bits(len(case.batch.logits), 70, seed=2), logprobs=True)
    for each, same in zip(tensors, before, strict=True):
        torch.testing.assert_close(each.detach(), same, rtol=0, atol=0, equal_nan=True)
    assert not verified.logprobs.requires_grad
    with pytest.raises(AttributeError):
        verified.status = verified.lengths


@of_every_shape
def test_masked_tokens_count_as_minus_infinity(operation, tree):
    # Whatever a row holds where it is not allowed.
    for vocabulary in (2, 31, 33, 64, 70):
        case = made(operation, tree, vocabulary=vocabulary)
        allowed = allowed_bits(len(case.batch.logits), vocabulary, seed=vocabulary)
        tokens = torch.arange(vocabulary)
        bits = (allowed[:, tokens // 32] >> (tokens % 32)) & 1
        masked = case.batch.logits.where(bits.bool(), -INF)
        found = case.verify(allowed=allowed, logprobs=True)
        assert_same(found, case.verify(logits=masked, logprobs=True))
        for request, emitted in enumerate(found.tolist()):
            row = int(case.batch.offsets[request]) + request
            assert not emitted or bits[row, emitted[0]]


@of_every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "allowed tokens"])
def test_logprobs_are_those_of_what_was_chosen_from(operation, tree, dtype, masked):
    case = ordinary(operation, tree)
    rows = len(case.batch.logits)
    logits = case.batch.logits.to(dtype)
    allowed = allowed_bits(rows, 70, seed=4) if masked else None
    if masked:
        allowed[3::10] = -1  # a token may come in every row
    verified = case.verify(logits=logits, allowed=allowed, logprobs=True, raw_logprobs=True)
    assert masked or (verified.lengths > 2).any()
    warpers = case.more[0].warpers if case.more else None
    for b, tokens in enumerate(verified.tolist()):
        slots = [0, *(node + 1 for node in verified.path[b].tolist() if node >= 0)]
        options = [1.0, 0, 1.0, 0.0]
        if warpers is not None and warpers.temperature[b] > 0:
            off = zip(warpers, options, strict=True)
            options = [other if each is None else each[b].item() for each, other in off]
        for step, token in enumerate(tokens):
            row = int(case.batch.offsets[b]) + b + slots[step]
            raw = logits[row].tolist()
            may = [allowed is None or allowed[row, t // 32] >> t % 32 & 1 for t in range(70)]
            own = [x if each else -INF for x, each in zip(raw, may, strict=True)]
            for found, x, by in (
                (verified.logprobs, own, options),
                (verified.raw_logprobs, raw, [1.0, 0, 1.0, 0.0]),
            ):
                weights = oracle.weights(x, *by)
                expected = math.log(weights[token] / sum(weights))
                assert float(found[b, step]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert verified.logprobs[b, len(tokens) :].isnan().all()
        assert verified.raw_logprobs[b, len(tokens) :].isnan().all()
    plain = case.verify(logits=logits, allowed=allowed)
    assert plain.logprobs is None and plain.raw_logprobs is None
    assert torch.equal(plain.token_ids, verified.token_ids)


def test_rows_without_a_softmax_have_no_logprobs():
    rows = torch.zeros(4, 5)
    rows[1, 2], rows[2, 3], rows[3] = INF, math.nan, -INF
    nothing = torch.empty(0, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    zeros = torch.zeros(4, dtype=torch.int64)
    for verified in (
        verify_greedy(rows, *nothing, logprobs=True, raw_logprobs=True),
        verify_sampled(
            rows, *nothing, temperature=1e-4, seeds=zeros, positions=zeros, logprobs=True,
            raw_logprobs=True,
        ),
    ):  # fmt: skip
        assert verified.tolist()[1:] == [[2], [3], []]
        for found in (verified.logprobs, verified.raw_logprobs):
            assert float(found[0, 0]) == pytest.approx(-math.log(5))
            assert found[1:].isnan().all()


def test_a_workspace_keeps_the_views_of_its_last_sizes(monkeypatch):
    """At the size of a step that comes again nothing is made, and all views lie in its memory."""
    workspace = Workspace("cpu", max_rows=9, max_requests=3, vocabulary=2000, max_draft=4)
    monkeypatch.setattr("fastdraft.kernels.workspace._MOST_VIEWS", 3)
    offsets = torch.tensor([0, 1, 2])
    batches = [
        Batch(torch.zeros(rows, vocabulary), offsets[:2], offsets, 3, workspace=workspace)
        for rows in (4, 9)
        for vocabulary in (1000, 2000)
    ]
    first = Scratch.take(batches[-1], "chunk_sum").chunk_sum
    for batch in batches * 2:
        scratch = Scratch.take(batch, "chunk_sum", "row_results")
        rows, vocabulary = batch.logits.shape
        assert scratch.chunk_sum.shape == (rows, -(-vocabulary // 1024))
        assert scratch.chunk_sum.is_contiguous()
        assert scratch.chunk_sum.data_ptr() == first.data_ptr()
        assert scratch.row_results.shape == (rows,)
        assert Scratch.take(batch, "chunk_sum", "row_results") is scratch
        assert take_output(batch).lengths.shape == (2,)
        assert len(workspace._views) <= 3


@of_every_shape
def test_a_workspace_is_checked_whole_in_the_first_call_alone(operation, tree):
    case = made(operation, tree)
    size = {"max_rows": 40, "max_requests": 9, "vocabulary": 80, "max_draft": 10}
    workspace = Workspace("cpu", **size)
    wrong = case.batch.offsets.clone()
    wrong[0] = 1
    with pytest.raises(ValueError, match="offsets must start with 0"):
        case.verify(offsets=wrong, max_draft=8, workspace=workspace)
    expected = case.verify(max_draft=8)
    for _ in range(2):
        assert_same(case.verify(max_draft=8, workspace=workspace), expected)
    assert workspace.has_checked
    with pytest.MonkeyPatch.context() as patch:
        # Values are looked at no more.
        patch.setattr("fastdraft.verification.checks._check_offsets", None)
        assert_same(case.verify(max_draft=8, workspace=workspace), expected)


# Waiting for a device.


def on_meta(shape, dtype=torch.float32):
    """A meta tensor has a shape and no values: whatever reads one raises."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(batch, sampling=None):
    """Stands for kernels that read nothing back, with results of the right shapes."""
    drawn_by = () if sampling is None else (*sampling.warpers, *sampling[1:])
    given = [*batch, *drawn_by]
    assert all(each.is_meta for each in given if isinstance(each, torch.Tensor))
    ids = on_meta((batch.requests, batch.max_draft + 1), torch.int32)
    return Verified(ids, ids[:, 0], ids[:, 0], ids[:, 1:], None, None)


def test_no_value_on_a_device_is_read_back(monkeypatch):
    for module in (greedy, sampled):
        monkeypatch.setattr(module, "verify", launched)
    batch = (on_meta((9, 5000)), on_meta(6, torch.int32), on_meta(4, torch.int32))
    parents = on_meta(6, torch.int32)
    for temperature, more in ((on_meta(3), {}), (0.5, {"parents": parents})):
        verified = verify_sampled(
            *batch,
            temperature=temperature,
            top_k=on_meta(3, torch.int64),
            top_p=on_meta(3),
            min_p=0.1,
            seeds=on_meta(3, torch.int64),
            positions=torch.zeros(3, dtype=torch.int64),
            max_draft=4,
            **more,
        )
        assert verified.token_ids.shape == (3, 5)
        assert verified.path.shape == (3, 4)
    assert compaction_indices(verified.path).shape == (3, 5)
    assert tree_attention_mask(parents, batch[2], max_draft=4).shape == (3, 5, 5)
    assert verify_greedy(*batch).token_ids.shape == (3, 7)
    # The plain version of rejection sampling reads nothing either.
    for temperature in (1.0, on_meta(3)):
        verified = verify_rejection(
            *batch,
            draft_logits=on_meta((6, 5000)),
            temperature=temperature,
            top_p=0.5,
            seeds=on_meta(3, torch.int64),
            positions=on_meta(3, torch.int64),
        )
        assert verified.token_ids.shape == (3, 7)
        assert verified.token_ids.is_meta


# Rejection sampling.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_draft_of_the_targets_own_distribution_is_accepted_whole(dtype):
    case = case_of("rejection", [5] * 200, 300, dtype, seed=2, odd=False, likeness=1.0, shape={})
    case = case.warped(temperature=[1.0])
    rows = torch.arange(1000) + torch.arange(200).repeat_interleave(5)
    assert (case.verify(draft_logits=case.batch.logits[rows].double()).lengths == 6).all()


def many(logits, distribution, token, *, n=20_000, **options):
    """One draft token, the same for many seeds; logits (2, vocabulary), distribution
    (vocabulary,)."""
    return verify_rejection(
        torch.tensor(logits).repeat(n, 1),
        torch.full((n,), token),
        torch.arange(n + 1),
        draft_logits=torch.tensor([distribution]).log().expand(n, -1),
        seeds=torch.arange(n),
        positions=torch.zeros(n, dtype=torch.int64),
        **options,
    )


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ([1.0, -INF, 0.5], {}),
        ([1.0, -200.0, 0.5], {}),
        ([1.0, 0.0, 0.5], {"top_k": 2}),
        ([1.0, 0.0, 0.5], {"top_p": 0.7}),
        ([1.0, 0.0, 0.5], {"min_p": 0.5}),
        ([1.0, 0.99, 0.5], {"temperature": 0.0001}),
        ([1.0, 0.99, 0.5], {"temperature": torch.zeros(20_000)}),
        ([1.0, 3.0, 0.5], {"allowed": torch.tensor([[0b101], [0b111]]).int().repeat(20_000, 1)}),
    ],
)
@pytest.mark.parametrize("probability", [1e-30, 0.5, 1.0])
def test_what_the_target_never_says_is_never_accepted(row, options, probability):
    other = (1 - probability) / 2
    verified = many([row, row], [other, probability, other], 1, **options)
    assert (verified.lengths == 1).all()
    assert (verified.token_ids[:, 0] != 1).all()


def test_a_residual_of_nothing_gives_the_targets_distribution(monkeypatch):
    # As if all tokens had twice their probability: each is refused half of the time, and p - q is
    # nowhere above 0.
    log_q = rejection._Rows.log_q
    monkeypatch.setattr(rejection._Rows, "log_q", lambda *each: log_q(*each) + math.log(2))
    p = torch.tensor([0.5, 0.3, 0.2])
    verified = many(torch.stack([p.log()] * 2).tolist(), p.tolist(), 1)
    accepted = verified.lengths == 2
    assert float(accepted.double().mean()) == pytest.approx(0.5, abs=0.02)
    counts = verified.token_ids[~accepted, 0].bincount(minlength=3)
    torch.testing.assert_close(counts / counts.sum(), p, atol=0.02, rtol=0)


# Without Triton.

WITHOUT_TRITON = """
import sys

sys.modules["triton"] = None  # as where it is not installed
import torch

from fastdraft import verification
from fastdraft.kernels import language, rejection
from fastdraft.late import alignment

logits, offsets = torch.eye(3), torch.tensor([0, 2])
verified = verification.verify_greedy(logits, torch.tensor([0, 2]), offsets)
assert verified.tolist() == [[0, 1]], verified
assert not language.has_kernels(logits)
"""


def test_triton_is_not_needed():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)
