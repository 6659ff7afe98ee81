"""Every verification operation by its kernels against its plain version, token for token."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from adversarial import (
    DTYPES,
    INTERPRETED,
    LAYOUTS,
    LENGTHS,
    Random,
    allowed_bits,
    assert_same,
    check_replays,
    in_layout,
    workspace_of,
)
from cases import (
    FILTERS,
    OPERATIONS,
    SHAPES,
    Case,
    case_of,
    greedy_case,
    of_every_shape,
    rejection_case,
    sampled_case,
)

from fastdraft.kernels import config, greedy, rejection
from fastdraft.kernels.operands import Batch, Likeliest, Sampling, Warpers
from fastdraft.kernels.workspace import BUFFERS

# Few rows, since the interpreter takes long over what is behind a choice; with these seeds, rows of
# each odd kind all the same, in one type or another.
FEW = [1, 0, 3, 1, 2, 0, 1, 1]
SEEDS = [0, 7, 3]
# Filters change nothing behind a row's choice, and their thresholds take the interpreter longest.
UNFILTERED = [each for each in SHAPES if each.values[0] != "filters"]
VOCABULARIES = {
    "greedy": [2, 37, 1024, 5001],
    "sampled": [2, 37, 1024, 5001],
    "rejection": [2, 37, 2600],
}


@pytest.mark.parametrize(
    ("operation", "vocabulary"),
    [(name, size) for name, sizes in VOCABULARIES.items() for size in sizes],
)
def test_kernels_are_the_plain_version(operation, vocabulary):
    for seed, dtype in enumerate(DTYPES):
        if operation == "rejection":
            case = case_of(operation, LENGTHS, vocabulary, dtype, seed=vocabulary)
            case.check(logprobs=vocabulary == 37, raw_logprobs=vocabulary == 2600)
        else:
            tree = (seed + vocabulary) % 2 == 1
            case_of(operation, LENGTHS, vocabulary, dtype, seed=seed, tree=tree).check()


@pytest.mark.parametrize("operation", list(VOCABULARIES))
@pytest.mark.parametrize("vocabulary", [31, 2500])
def test_among_allowed_tokens(operation, vocabulary):
    rows = sum(LENGTHS) + len(LENGTHS)
    for seed, dtype in enumerate(DTYPES):
        allowed = allowed_bits(rows, vocabulary, seed=seed)
        if seed:  # rows of the mask apart
            allowed = torch.nn.functional.pad(allowed, (0, 3))[:, : allowed.shape[1]]
        case_of(operation, LENGTHS, vocabulary, dtype, seed=seed).check(allowed=allowed)


@pytest.mark.parametrize(
    ("dtype", "masked", "seed"), [*zip(DTYPES, [False, True, True], SEEDS, strict=True)]
)
def test_logprobs_and_the_likeliest_tokens(dtype, masked, seed):
    allowed = allowed_bits(sum(FEW) + len(FEW), 2100, seed=2) if masked else None
    case = sampled_case(FEW, 2100, dtype, seed=seed, tree=masked, allowed=allowed, logprobs=True)
    case.check(likeliest=8)
    if dtype == torch.float16 and masked:
        case.check(raw_logprobs=False)
        case.check(logprobs=False)
    Case(greedy, case.batch).check(likeliest=3)


@pytest.mark.parametrize(
    ("dtype", "filters", "tree", "seed"),
    [
        (torch.bfloat16, list(FILTERS), False, SEEDS[0]),
        (torch.float16, ["top_k"], False, SEEDS[2]),
        (torch.float32, list(FILTERS), True, SEEDS[1]),
    ],
)
def test_filters(dtype, filters, tree, seed):
    allowed = allowed_bits(sum(FEW) + len(FEW), 3000, seed=1) if tree else None
    options = {"tree": tree, "allowed": allowed, "filters": filters, "logprobs": True}
    # The likeliest tokens are those before filters.
    sampled_case(FEW, 3000, dtype, seed=seed, **options).check(likeliest=5)


@pytest.mark.parametrize(
    ("dtype", "filters"),
    [*zip(DTYPES, [(), ("top_k",), ("top_p", "min_p")], strict=True)],
    ids=str,
)
def test_rows_without_drafts(dtype, filters):
    case = sampled_case([0] * 8, 1500, dtype, seed=9, filters=filters, logprobs=True)
    for each in (case, Case(greedy, case.batch)):
        each.check(likeliest=3, logprobs=False)
        assert each.run(logprobs=False, raw_logprobs=False).likeliest is None


def test_ordinary_drafts_end_everywhere():
    case = rejection_case([4] * 20, 1100, torch.float32, seed=1, odd=False)
    assert {1, 2, 4, 5} <= set(case.check().lengths.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_filtered_rejection(dtype):
    # Few rows: the search for a threshold takes the interpreter long.
    case = rejection_case([3, 1, 2, 0], 1100, dtype, seed=3, odd=False, likeness=0.95)
    case = case.warped(
        top_k=[0, 30, 2, 40], top_p=[0.9, 1.0, 0.9, 0.6], min_p=[0.0, 0.0, 0.05, 0.0]
    )
    allowed = allowed_bits(len(case.batch.logits), 1100, seed=6)
    case.check(allowed=allowed, logprobs=True, raw_logprobs=True)
    size = {"max_rows": 12, "max_requests": 5, "vocabulary": 1200, "max_draft": 4}
    assert case.check(workspace=workspace_of(**size)).lengths.max() > 1


def test_requests_without_a_draft():
    rejection_case([3, 0], 40, torch.float32, seed=8).check()
    batch = Batch(Random(0).normal(3, 1400), torch.empty(0).long(), torch.zeros(4).long(), 0)
    sampling = Sampling(Warpers(torch.tensor([0.7, 1.0, 1.0])), *torch.arange(6).view(2, 3))
    Case(rejection, batch, (sampling, torch.empty(0, 1400))).check()


log_q = rejection._log_q
log_q_of_rows = rejection._Rows.log_q


@triton.jit
def log_2q(row, draft, at, token, scratch, BLOCK: tl.constexpr):
    return log_q(row, draft, at, token, scratch, BLOCK) + 0.6931472


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel keeps its functions")
def test_what_is_left_of_distributions_that_are_the_same(monkeypatch):
    case = rejection_case([1] * 12, 1200, torch.float32, seed=9, odd=False, likeness=1.0)
    case = case._replace(more=(case.more[0], case.batch.logits[::2]))
    case = case.warped(temperature=[1.0])
    assert set(case.check().lengths.tolist()) == {2}
    # As if all tokens had twice their probability: half are refused, and no residual is left.
    monkeypatch.setattr(rejection, "_log_q", log_2q)
    monkeypatch.setattr(rejection._Rows, "log_q", lambda *each: log_q_of_rows(*each) + math.log(2))
    assert set(case.check().lengths.tolist()) == {1, 2}


# All operations.


@pytest.mark.parametrize(("layout", "dtype"), [*zip(LAYOUTS, DTYPES, strict=True)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_strides(operation, layout, dtype):
    options = {"draft_dtype": torch.float32} if operation == "rejection" else {}
    case = case_of(operation, [4, 0, 2], 2051, dtype, seed=6, **options)
    case.check(logits=in_layout(case.batch.logits, layout))
    if operation == "rejection":
        case.check(draft_logits=in_layout(case.more[1], layout))
    if operation == "sampled":
        case = sampled_case([4, 0, 2], 2051, dtype, seed=3, logprobs=True)
        case.check(logits=in_layout(case.batch.logits, layout), likeliest=3)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.usefixtures("any_order")
def test_parts_of_rows_in_any_order(operation):
    vocabulary = {"greedy": 50_257, "rejection": 20_000}.get(operation, 33_000)
    options = {"odd": False} if operation == "rejection" else {}
    if operation in ("sampled", "filters"):
        options = {"logprobs": True}
    assert config.split_chunks(2, vocabulary).programs > 2
    case = case_of(operation, [2, 0], vocabulary, torch.bfloat16, seed=4, **options)
    case.check()
    if operation == "greedy":
        zeros = torch.zeros_like(case.batch.logits)
        case._replace(batch=case.batch._replace(logits=zeros)).check()


@pytest.mark.parametrize(("operation", "tree"), UNFILTERED)
def test_drafts_are_cut_and_padded(operation, tree):
    case = case_of(operation, [3, 0, 5, 1], 50, torch.float32, seed=4, tree=tree)
    # Cut, the reference would not know all depths of a tree.
    for max_draft in (40,) if tree else (0, 3, 40):
        case.check(max_draft=max_draft)
    case.check(draft_ids=case.batch.draft_ids.int())
    if tree:
        case.check(parents=case.batch.parents.int())


@pytest.mark.parametrize(
    ("slots", "operation", "tree"),
    [pytest.param(2, *each.values, id=f"2-{each.id}") for each in SHAPES]
    + [pytest.param(4, *each.values, id=f"4-{each.id}") for each in UNFILTERED],
)
def test_drafts_longer_than_a_block_of_slots(monkeypatch, slots, operation, tree):
    monkeypatch.setattr(config, "SLOTS", slots)
    options = {"likeness": 1.0, "odd": False} if operation == "rejection" else {"tree": tree}
    lengths = []
    for seed in range(2):
        case = case_of(operation, [7, 0, 5, 6], 9, torch.float32, seed=seed, **options)
        lengths += case.check(max_draft=11).lengths.tolist()
    assert max(lengths) > slots


@pytest.mark.parametrize("operation", OPERATIONS)
def test_more_requests_than_a_block(monkeypatch, operation):
    monkeypatch.setattr(config, "FEW_REQUESTS", 1)
    monkeypatch.setattr(config, "REQUESTS", 2)
    case_of(operation, LENGTHS, 20, torch.float32, seed=5).check()


def test_many_requests():
    greedy_case([0, 1] * 20, 20, torch.float32, seed=6).check()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_past_the_last_request_are_ignored(operation):
    case = case_of(operation, [2, 1], 40, torch.bfloat16, seed=7)
    strange = torch.full((9, 40), math.nan).bfloat16()
    more = case.more
    if operation == "rejection":
        more = (more[0], torch.cat([more[1], strange]))
    likeliest = 0 if operation == "rejection" else 4
    padded = case._replace(more=more).run(
        logits=torch.cat([case.batch.logits, strange]),
        draft_ids=torch.cat([case.batch.draft_ids, torch.full((9,), 3)]),
        likeliest=likeliest,
    )
    found = padded.likeliest
    if likeliest:
        assert (found.token_ids[5:] == -1).all()
        assert (found.probabilities[5:] == 0).all()
        padded = padded._replace(likeliest=Likeliest(*(each[:5] for each in found)))
    assert_same(padded, case.expected(likeliest=likeliest))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_workspace_is_used_and_left_as_it_was(operation):
    workspace = workspace_of(max_rows=40, max_requests=9, vocabulary=5000, max_draft=10)
    lengths = [3, 1] if operation == "filters" else LENGTHS
    first = case_of(operation, lengths, 3000, torch.float16, seed=13).check(
        workspace=workspace, logprobs=operation == "rejection"
    )
    tree = {} if operation == "rejection" else {"tree": True}
    second = case_of(operation, [1, 4], 77, torch.float32, seed=14, **tree)
    likeliest = 0 if operation == "rejection" else 4
    second = second.check(max_draft=6, workspace=workspace, likeliest=likeliest)
    assert first.token_ids.data_ptr() == second.token_ids.data_ptr()
    assert_zero(workspace)


@pytest.mark.parametrize("likeliest", [0, 3])
def test_an_argmax_takes_no_exponentials(likeliest):
    workspace = workspace_of(max_rows=40, max_requests=9, vocabulary=1500, max_draft=10)
    sums = workspace.take("chunk_sum", workspace.size).fill_(-1.0)
    greedy_case(LENGTHS, 1500, torch.bfloat16, seed=3).check(
        workspace=workspace, likeliest=likeliest
    )
    assert sums.ne(-1.0).any() == (likeliest > 0)


# In the interpreter, where calls stand for replays, one operation shows that it works.
@pytest.mark.parametrize(("operation", "tree"), SHAPES[:1] if INTERPRETED else SHAPES)
def test_replays_read_operands_where_they_lie(operation, tree):
    lengths, vocabulary = ([2, 1], 40) if INTERPRETED else ([10] * 8, 128_256)
    case, *others = (
        case_of(operation, lengths, vocabulary, torch.bfloat16, seed=seed, tree=tree)
        for seed in (1, 1, 2)
    )
    size = {"max_rows": len(case.batch.logits), "max_requests": len(lengths), "max_draft": 10}
    allowed = allowed_bits(size["max_rows"], vocabulary, seed=1)
    workspace = workspace_of(vocabulary=vocabulary, **size)
    options = {"allowed": allowed, "logprobs": True, "raw_logprobs": True, "workspace": workspace}
    call = partial(case.run, **options)
    check_replays(call, case.operands(), [each.operands() for each in others])


def assert_zero(workspace):
    for name, buffer in BUFFERS.items():
        assert not (buffer.zero and workspace._buffers[name].any()), name


@of_every_shape
def test_results_are_where_the_logits_are(operation, tree):
    """Whatever torch's default device is."""
    case = case_of(operation, [2, 1], 37, torch.float32, seed=1, tree=tree)
    expected = case.run(logprobs=True)
    with torch.device("meta"):
        found = case.run(logprobs=True)
    assert_same(found, expected)


CANARY = 0x5A


def guarded(buffer):
    """A copy of a tensor with bytes before and after it in the same memory, and all of these."""
    count = buffer.numel() * buffer.element_size()
    memory = torch.full((count + 512,), CANARY, dtype=torch.uint8)
    inner = memory[256 : 256 + count].view(buffer.dtype).view(buffer.shape)
    inner.copy_(buffer)
    return inner, memory


@of_every_shape
def test_nothing_is_written_out_of_bounds_whatever_the_operands_hold(operation, tree):
    random = Random(0)
    case = case_of(operation, [3, 1, 4], 33, torch.float32, seed=15, tree=tree)
    for _ in range(4):
        wild = random.integers(-(2**62), 2**62, 12)
        near = random.integers(-3, 14, 12)
        values = torch.where(random.uniform(12) < 0.3, wild, near)
        workspace = workspace_of(max_rows=11, max_requests=3, vocabulary=33, max_draft=5)
        memories = {}
        for name, buffer in list(workspace._buffers.items()):
            workspace._buffers[name], memories[name] = guarded(buffer)
        operands = {"draft_ids": wild[:8], "offsets": values[8:], "max_draft": 5}
        if tree:
            operands["parents"] = values[:8]
        emitted = case.run(**operands, workspace=workspace)
        for name, memory in memories.items():
            assert (memory[:256] == CANARY).all() and (memory[-256:] == CANARY).all(), name
        assert_zero(workspace)
        if operation == "rejection":  # the others leave a request alone that has no row in range
            assert emitted.token_ids.max() < 33
        # Whatever it was, the next batch is verified as ever.
        case.check(workspace=workspace)
