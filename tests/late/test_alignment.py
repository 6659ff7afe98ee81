"""Drafts from continuations through the checked entry: its memory, its refusals, and no waiting."""

from __future__ import annotations

import pytest
import torch

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import align
from fastdraft.late.alignment import Aligner, Texts, Trees
from waiting import Waited, as_on_a_device, no_waiting


def aligner(**more):
    return Aligner("cpu", **{"max_rows": 4, "lookahead": 3, "vocabulary": 100, **more})


def column(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def texts(**more):
    fields = {
        "token_ids": column([5, 6, 7, 0, 0, 0], [1, 2, 3, 1, 2, 0]),
        "lengths": column(3, 5),
        "requests": column(10, 11),
        "limits": column(3, 3),
    }
    return Texts(**{**fields, **more})


def continuations(**more):
    fields = {
        "bases": column(2, 5),
        "counts": column(2, 0),
        "token_ids": column([7, 8], [0, 0]),
        "parents": column([-1, 0], [-1, -1]),
        "probabilities": column([0.5, 0.25], [0, 0], dtype=torch.float32),
        "requests": column(10, 11),
    }
    return Trees(**{**fields, **more})


ROWS = column(1, 0), column(1, 1)


def test_a_draft_from_a_tree_and_one_from_the_own_text():
    drafts = aligner().align(texts(), continuations(), *ROWS)
    assert drafts.token_ids.tolist() == [[3, 2, 2], [8, 7, 7]]
    assert drafts.counts.tolist() == [1, 1]
    # The buffer of 6 tokens has room for one more.
    assert drafts.probabilities[1].tolist() == pytest.approx([0.5, 0, 0])


def test_it_writes_to_the_same_memory_each_time():
    drafter = aligner()
    before = [each.data_ptr() for each in drafter.output]
    for _ in range(2):
        drafts = drafter.align(texts(), continuations(), *ROWS)
        assert [each.data_ptr() for each in drafts] == before
    assert drafts.token_ids.dtype == torch.int64
    assert drafts.token_ids.tolist() == [[3, 2, 2], [8, 7, 7]]


def test_an_empty_batch():
    drafts = aligner().align(texts(), continuations(), column(), column())
    assert drafts.counts.tolist() == []


def test_nothing_waits(monkeypatch):
    monkeypatch.setattr(align, "plain", as_on_a_device(align.plain))
    drafter, operands = aligner(), (texts(), continuations(), *ROWS)
    with no_waiting():
        drafts = drafter.align(*operands)
    assert drafts.counts.tolist() == [1, 1]


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: int(tensor),
        lambda tensor: 1 if tensor else 0,
        lambda tensor: tensor[tensor > 0],
        lambda tensor: torch.equal(tensor, tensor),
        lambda tensor: tensor.to("meta"),
    ],
)
def test_the_guard_finds_what_waits(wait):
    tensor = column(1)
    with no_waiting(), pytest.raises(Waited):
        wait(tensor)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_rows": 0}, "max_rows must be from 1 to 1048576, got 0"),
        ({"lookahead": 0}, "lookahead must be from 1 to 511, got 0"),
        ({"vocabulary": 0}, "vocabulary must be from 1 to 2147483648, got 0"),
        ({"tail": 0}, "tail must be from 1 to 1024, got 0"),
    ],
)
def test_bad_options_are_refused(option, message):
    with pytest.raises(InvalidValueError, match=message):
        aligner(**option)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (
            (texts(token_ids=[[1]]), continuations(), *ROWS),
            "texts.token_ids must be a torch.Tensor, got list",
        ),
        (
            (texts(token_ids=torch.zeros(2, 6).long()), continuations(), *ROWS),
            "texts.token_ids must hold one of torch.int32, got torch.int64",
        ),
        (
            (texts(token_ids=torch.zeros(6, 2, dtype=torch.int32).T), continuations(), *ROWS),
            "texts.token_ids must have the tokens of a row side by side",
        ),
        (
            (texts(lengths=column(1)), continuations(), *ROWS),
            r"texts.lengths must have shape \(2,\), got \(1,\)",
        ),
        (
            (texts(), continuations(parents=column([0], [0])), *ROWS),
            r"trees.parents must have shape \(2, 2\), got \(2, 1\)",
        ),
        (
            (texts(), continuations(token_ids=torch.zeros(2, 0, dtype=torch.int32)), *ROWS),
            "trees.token_ids must have from 1 to 1024 nodes, got 0",
        ),
        (
            (texts(), continuations(parents=torch.zeros(2, 2, dtype=torch.int32).T), *ROWS),
            "trees.parents must be contiguous",
        ),
        (
            (texts(), continuations(probabilities=column([0, 0], [0, 0])), *ROWS),
            "trees.probabilities must hold one of torch.float32, got torch.int32",
        ),
        (
            (texts(), continuations(), torch.zeros(5).long(), column(1)),
            "idx_mapping must have at most max_rows 4 rows, got 5",
        ),
        (
            (texts(), continuations(), column(0), column(1, 1)),
            r"num_sampled must have shape \(1,\), got \(2,\)",
        ),
        (
            (
                texts(limits=torch.zeros(2, dtype=torch.int32, device="meta")),
                continuations(),
                *ROWS,
            ),
            "texts.limits must be on cpu, got meta",
        ),
    ],
)
def test_bad_operands_are_refused(operands, message):
    with pytest.raises(InvalidValueError, match=message):
        aligner().align(*operands)
