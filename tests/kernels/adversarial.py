"""Batches for kernels: rows of logits that are odd in every way, drafts that hit now and then."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastdraft.kernels.operands import Verified
from fastdraft.kernels.workspace import BUFFERS, Workspace

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Lengths of drafts in a ragged batch.
LENGTHS = [3, 0, 5, 1, 8, 2, 0, 6]


class Random:
    """Random tensors on the device under test: the same numbers on every device."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return _placed(torch.randn(shape, generator=self._generator, device="cpu"))

    def uniform(self, *shape: int) -> Tensor:
        return _placed(torch.rand(shape, generator=self._generator, device="cpu"))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """From low to before high."""
        return _placed(torch.randint(low, high, shape, generator=self._generator, device="cpu"))


def _placed(values: Tensor) -> Tensor:
    return values.to(torch.get_default_device())


def workspace_of(**size: int) -> Workspace:
    """A workspace on the device under test, with all its buffers."""
    workspace = Workspace(torch.get_default_device(), **size)
    for name in BUFFERS:
        workspace.take(name, workspace.size)
    return workspace


def odd_rows(
    rows: int, vocabulary: int, dtype: torch.dtype, *, seed: int, largest: float = math.inf
) -> Tensor:
    """Rows of one kind after another: every other one ordinary, the rest extreme.

    largest: no finite logit is larger.
    """
    random = Random(seed)
    x = random.normal(rows, vocabulary) * 3
    largest = min(largest, torch.finfo(dtype).max)

    def somewhere(count: int) -> Tensor:
        return random.integers(0, vocabulary, count)

    kinds = [
        lambda row: row.round_(),  # many ties
        lambda row: row.fill_(0.25),
        lambda row: row.fill_(-math.inf),
        lambda row: row.index_fill_(0, somewhere(3), math.nan),
        lambda row: row.index_fill_(0, somewhere(2), math.inf),
        lambda row: row.index_fill_(0, somewhere(2), math.inf).index_fill_(
            0, somewhere(1), math.nan
        ),
        lambda row: row.index_fill_(0, somewhere(vocabulary), -math.inf),
        lambda row: row.fill_(-math.inf).index_fill_(0, somewhere(1), -7.0),
        lambda row: row.fill_(-math.inf).index_fill_(0, somewhere(1), math.nan),
        lambda row: row.fill_(-0.0).index_fill_(0, somewhere(2), 0.0),
        lambda row: row.fill_(-largest).index_fill_(0, somewhere(2), largest),
        lambda row: row.fill_(-largest),
        lambda row: row.mul_(1e-3).add_(1000.0),
        lambda row: row.mul_(torch.finfo(dtype).tiny),
        lambda row: row.fill_(math.nan),
    ]
    for index in range(1, rows, 2):
        kinds[(index // 2 + seed) % len(kinds)](x[index])
    return x.to(dtype)


LAYOUTS = ["rows apart", "tokens apart", "transposed"]


def in_layout(logits: Tensor, layout: str) -> Tensor:
    """The same logits with other strides."""
    rows, vocabulary = logits.shape
    if layout == "contiguous":
        return logits
    if layout == "rows apart":
        return torch.nn.functional.pad(logits, (0, 40 - vocabulary % 8), value=1e4)[:, :vocabulary]
    if layout == "tokens apart":
        wide = logits.new_full((rows, vocabulary, 3), math.nan)
        wide[:, :, 1] = logits
        return wide[:, :, 1]
    assert layout == "transposed"
    return logits.t().contiguous().t()


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def tree_parents(lengths: list[int], *, seed: int) -> Tensor:
    """Parents of trees: children soon after their parents, of which many have several."""
    random = Random(seed)
    parents = [
        max(int(random.integers(-1, node)), node - 4)
        for length in lengths
        for node in range(length)
    ]
    return torch.tensor(parents, dtype=torch.int64)


def hits(tokens: Tensor, vocabulary: int, offsets: Tensor, parents: Tensor | None, *, seed: int):
    """Draft ids of which about four in five are the target's token, and some are out of range.

    tokens: the target's token in each row. Of siblings only the first has the target's token.
    """
    random = Random(seed)
    draft_ids = random.integers(-5, vocabulary + 5, int(offsets[-1]))
    for request, (begin, end) in enumerate(pairwise(offsets.tolist())):
        taken = set()
        for index in range(begin, end):
            node = index - begin
            parent = node - 1 if parents is None else int(parents[index])
            target = int(tokens[begin + request + parent + 1])
            if (parent, target) not in taken and float(random.uniform()) < 0.8:
                draft_ids[index] = target
            while (parent, int(draft_ids[index])) in taken:
                draft_ids[index] += vocabulary + 20  # out of range, and another one
            taken.add((parent, int(draft_ids[index])))
    return draft_ids


def allowed_bits(rows: int, vocabulary: int, *, seed: int) -> Tensor:
    """Bit masks: random, of a few tokens, of all, of none. Bits past the vocabulary are set too."""
    random = Random(seed)
    words = -(-vocabulary // 32)
    bits = random.integers(-(2**31), 2**31, rows, words).int()
    bits[1::5] &= random.integers(-(2**31), 2**31, len(bits[1::5]), words).int()
    bits[2::5] = -1
    bits[3::10] = 0
    return bits


def assert_same(got: Verified, expected: Verified) -> None:
    """Equal tokens, lengths, status and paths; probabilities to within rounding."""
    for name in ("token_ids", "lengths", "status", "path"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == theirs.dtype
            assert ours.tolist() == theirs.tolist(), name
    for name in ("logprobs", "raw_logprobs"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5, equal_nan=True)
    assert (got.likeliest is None) == (expected.likeliest is None)
    if got.likeliest is not None:
        assert got.likeliest.token_ids.dtype == torch.int32
        assert got.likeliest.token_ids.tolist() == expected.likeliest.token_ids.tolist()
        ours, theirs = got.likeliest.probabilities, expected.likeliest.probabilities
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def check_replays(
    call: Callable[[], tuple], operands: Sequence[Tensor], others: Sequence[Sequence[Tensor]]
) -> None:
    """Captures a call in a CUDA graph and replays it on two sets of operands in turn: it gives the
    same bits as the call does, allocates nothing and waits for nothing.

    In the interpreter calls stand for replays. others: the values copied to the operands.
    """

    def load(number: int) -> None:
        for to, values in zip(operands, others[number % 2], strict=True):
            to.copy_(values)

    def bits(found: tuple) -> list[Tensor]:
        leaves = [each for each in tree_leaves(found) if each is not None]
        return [each.view(torch.int32) if each.is_floating_point() else each for each in leaves]

    expected = []
    for number in range(2):
        load(number)
        expected.append([each.clone() for each in bits(call())])
    assert not all(map(torch.equal, *expected))
    replay, replays = call, 2
    if not INTERPRETED:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        call()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()

        def replay() -> tuple:
            graph.replay()
            return captured

        replays = 1000
    for number in range(replays):
        load(number)
        assert all(map(torch.equal, bits(replay()), expected[number % 2]))
