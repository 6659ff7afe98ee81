"""Sampled verification by the kernels against the reference, token for token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from adversarial import (
    DTYPES,
    LENGTHS,
    Random,
    allowed_bits,
    assert_same,
    hits,
    in_layout,
    odd_rows,
    offsets_of,
    tree_parents,
    workspace_of,
)

from fastdraft.kernels import fused, reference
from fastdraft.kernels.fused import config
from fastdraft.kernels.operands import Batch, Sampling, Warpers
from fastdraft.kernels.reference.acceptance import rows_of
from fastdraft.kernels.workspace import BUFFERS

# Greedy and sampled requests side by side; the extremes make all weights equal, or one of them 1.
TEMPERATURES = [1.0, 0.7, 0.0, 1.5, 0.3, 2e-38, 3e38, 0.0]
FILTERS = {
    "top_k": [0, 5, 3, 1, 0, 2, 4000, 40],
    "top_p": [0.9, 1.0, 0.5, 0.3, 1.0, 0.0, 0.99, 1.0],
    "min_p": [0.0, 0.0, 0.1, 0.2, 0.05, 0.0, 1.0, 0.0],
}


@dataclass
class Case:
    """A batch, and what its tokens are drawn by."""

    batch: Batch
    sampling: Sampling

    def check(self, *, logits=None, workspace=None, **options):
        """Runs the kernels and the reference; the kernels on `logits` if given."""
        batch = self.batch._replace(**options)
        expected = reference.verify_sampled(batch, self.sampling)
        logits = batch.logits if logits is None else logits
        batch = batch._replace(logits=logits, workspace=workspace)
        got = fused.verify_sampled(batch, self.sampling)
        assert_same(got, expected)
        return got


def case_of(
    lengths, vocabulary, dtype, *, seed, tree=False, allowed=None, filters=(), logprobs=False
):
    """A batch whose drafts follow what the reference draws, for about four tokens in five."""
    offsets = offsets_of(lengths)
    random = Random(seed)
    requests = len(lengths)
    # Beside numbers of 38 digits a log-probability of the reference is lost.
    largest = 1e6 if logprobs else torch.inf
    rows = int(offsets[-1]) + requests
    logits = odd_rows(rows, vocabulary, dtype, seed=seed, largest=largest)
    parents = tree_parents(lengths, seed=seed) if tree else None
    warpers = Warpers(
        torch.tensor((TEMPERATURES * requests)[seed:][:requests]),
        **{name: torch.tensor(FILTERS[name][:requests]) for name in filters},
    )
    sampling = Sampling(
        warpers,
        random.integers(-(2**63), 2**63 - 1, requests),
        random.integers(0, 2**33, requests),
    )
    request, depth = rows_of(len(logits), offsets)
    if parents is not None:
        depth = reference.tree_depths(parents, offsets, max_draft=max(lengths))[request, depth]
    of_rows = sampling.of(request)
    of_rows = of_rows._replace(positions=of_rows.positions + depth)
    tokens = reference.draw(logits, of_rows, allowed).tokens
    ids = hits(tokens, vocabulary, offsets, parents, seed=seed)
    batch = Batch(logits, ids, offsets, max(lengths), parents, allowed, logprobs, logprobs)
    return Case(batch, sampling)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 37, 1024, 5001])
def test_sampled_is_the_reference(vocabulary, dtype):
    for tree in (False, True):
        case_of(LENGTHS, vocabulary, dtype, seed=int(tree), tree=tree).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "allowed tokens"])
def test_logprobs_are_the_reference(dtype, masked):
    vocabulary, tree = 2100, masked
    rows = sum(LENGTHS) + len(LENGTHS)
    allowed = allowed_bits(rows, vocabulary, seed=2) if masked else None
    case = case_of(LENGTHS, vocabulary, dtype, seed=2, tree=tree, allowed=allowed, logprobs=True)
    case.check()
    if dtype == torch.float16 and masked:
        case.check(raw_logprobs=False)
        case.check(logprobs=False)
    assert_same(fused.verify_greedy(case.batch), reference.verify_greedy(case.batch))


@pytest.mark.parametrize(
    ("dtype", "filters", "tree"),
    [
        (torch.bfloat16, list(FILTERS), False),
        (torch.float16, ["top_k"], False),
        (torch.float32, list(FILTERS), True),
    ],
)
def test_filtered_is_the_reference(dtype, filters, tree):
    vocabulary = 3000
    allowed = allowed_bits(sum(LENGTHS) + len(LENGTHS), vocabulary, seed=1) if tree else None
    case = case_of(
        LENGTHS,
        vocabulary,
        dtype,
        seed=1,
        tree=tree,
        allowed=allowed,
        filters=filters,
        logprobs=True,
    )
    case.check()


@pytest.mark.parametrize("layout", ["rows apart", "tokens apart", "transposed"])
def test_sampled_of_any_strides(layout):
    for dtype in DTYPES:
        case = case_of([4, 0, 2], 2051, dtype, seed=3, logprobs=True)
        case.check(logits=in_layout(case.batch.logits, layout))


@pytest.mark.parametrize("filters", [[], list(FILTERS)], ids=["one launch", "three launches"])
@pytest.mark.usefixtures("any_order")
def test_parts_of_rows_in_any_order(filters):
    vocabulary = 33_000
    assert config.split_chunks(4, vocabulary).programs > 8
    case_of([2, 0], vocabulary, torch.bfloat16, seed=4, filters=filters, logprobs=True).check()


def test_more_requests_than_a_block(monkeypatch):
    monkeypatch.setattr(config, "requests_block", lambda _: 2)
    case_of(LENGTHS, 20, torch.float32, seed=5).check()


def test_a_workspace_is_used_and_left_as_it_was():
    workspace = workspace_of(max_rows=40, max_requests=9, vocabulary=5000, max_draft=10)
    first = case_of(LENGTHS, 5000, torch.float16, seed=6, logprobs=True).check(workspace=workspace)
    case = case_of([1, 4], 77, torch.float32, seed=7, tree=True, filters=FILTERS)
    second = case.check(workspace=workspace, max_draft=6)
    assert first.token_ids.data_ptr() == second.token_ids.data_ptr()
    for name, buffer in BUFFERS.items():
        if buffer.zero:
            assert not workspace._buffers[name].any(), name


def test_a_seed_has_its_tokens_with_any_draft_and_anywhere():
    vocabulary, length = 1500, 6
    random = Random(0)
    logits = random.normal(length + 1, vocabulary)
    one = Sampling(Warpers(torch.ones(1)), torch.tensor([5]), torch.tensor([40]))
    offsets = torch.tensor([0, length])
    tokens = []
    for slot in range(length + 1):  # token by token, without drafts
        none = torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])
        step = Batch(logits[slot : slot + 1], *none, max_draft=0)
        emitted = fused.verify_sampled(step, one._replace(positions=one.positions + slot))
        tokens.append(int(emitted.token_ids))
    whole = Batch(logits, torch.tensor(tokens[:length]), offsets, max_draft=length)
    assert fused.verify_sampled(whole, one).token_ids.tolist() == [tokens]
    # Behind another request, with a tree whose second branch is the right one.
    ids = torch.tensor([*tokens[:3], vocabulary, tokens[0], *tokens[1:length]])
    parents = torch.tensor([-1, 0, 1, -1, -1, 1, 2, 3, 4, 5])
    rows = torch.cat([logits[:4], logits[:1], logits[:1], logits[1:]])
    both = Batch(rows, ids, torch.tensor([0, 3, 10]), max_draft=7, parents=parents)
    emitted = fused.verify_sampled(both, one.of(torch.tensor([0, 0])))
    assert emitted.token_ids[0, :4].tolist() == tokens[:4]
    assert emitted.token_ids[1, : length + 1].tolist() == tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filters", [(), ("top_k",), ("top_p", "min_p")], ids=str)
def test_rows_without_drafts_are_the_reference(dtype, filters):
    logits = odd_rows(len(TEMPERATURES), 1500, dtype, seed=9)
    options = {name: torch.tensor(FILTERS[name]) for name in filters}
    warpers = Warpers(torch.tensor(TEMPERATURES), **options)
    numbers = torch.arange(len(logits))
    sampling = Sampling(warpers, seeds=numbers, positions=numbers + 40)
    nothing, offsets = torch.zeros(0).int(), torch.zeros(len(logits) + 1).long()
    batch = Batch(logits, nothing, offsets, max_draft=0, likeliest=3)
    for kernels in (reference, fused):
        assert kernels.verify_sampled(batch._replace(likeliest=0), sampling).likeliest is None
    for verb, drawn_by in (("verify_greedy", ()), ("verify_sampled", (sampling,))):
        expected, got = (getattr(each, verb)(batch, *drawn_by) for each in (reference, fused))
        assert torch.equal(got.likeliest.token_ids, expected.likeliest.token_ids)
        assert_same(got, expected)
