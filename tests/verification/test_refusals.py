"""Refusals of the checked entries, with the value in the message."""

from __future__ import annotations

import math

import pytest
import torch

from fastdraft.errors import InvalidValueError
from fastdraft.kernels.workspace import Workspace
from fastdraft.verification import verify_greedy, verify_rejection, verify_sampled

INF, NAN = math.inf, math.nan
GOOD = {
    "logits": torch.zeros(4, 8),
    "draft_ids": torch.tensor([1, 2]),
    "offsets": torch.tensor([0, 2, 2]),
    "seeds": torch.tensor([1, 2]),
    "positions": torch.tensor([0, 0]),
}
# Options that greedy verification does not take, and rejection sampling.
OF_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "seeds", "positions"}
OF_OTHERS = {"parents", "likeliest"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": [[0.0]]}, "logits must be a torch.Tensor, got list"),
        ({"logits": torch.zeros(4, 8).int()}, "logits must hold one of .*, got torch.int32"),
        ({"logits": torch.zeros(4)}, r"logits must have 2 dimensions, got shape \(4,\)"),
        ({"logits": torch.zeros(4, 0)}, "vocabulary of at least 1 token, got 0"),
        (
            {"logits": torch.zeros(5, 8)},
            r"logits must have 4 rows \(2 draft tokens \+ 2 requests\), got 5",
        ),
        ({"draft_ids": torch.tensor([1.0, 2.0])}, "draft_ids must hold .*, got torch.float32"),
        (
            {"draft_ids": torch.tensor([[1, 2]])},
            r"draft_ids must have 1 dimensions, got .*\(1, 2\)",
        ),
        ({"offsets": torch.tensor([0])}, "offsets must have .* at least 2, got 1"),
        ({"offsets": torch.tensor([1, 2, 2])}, "offsets must start with 0, got 1"),
        (
            {"offsets": torch.tensor([0, 3, 2])},
            "offsets must not decrease, got 3 before 2 at request 1",
        ),
        ({"offsets": torch.tensor([0, 1, 1])}, "end with the number of draft tokens, 2, got 1"),
        ({"max_draft": -1}, "max_draft must be at least 0, got -1"),
        ({"max_draft": 1}, "at least the longest draft's 2 tokens, got 1"),
        ({"parents": torch.tensor([-1])}, "each of the 2 draft tokens, got 1"),
        ({"parents": torch.tensor([-1.0, 0.0])}, "parents must hold .*, got torch.float32"),
        (
            {"parents": torch.tensor([-1, 1])},
            "before their children, from -1 to 0 for draft token 1 of request 0, got 1",
        ),
        (
            {"parents": torch.tensor([-2, 0])},
            "from -1 to -1 for draft token 0 of request 0, got -2",
        ),
        (
            {"parents": torch.tensor([-1, -1]), "draft_ids": torch.tensor([2, 2])},
            "one parent must have different tokens, got 2 twice for parent -1 in request 0",
        ),
        ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or from .*, got -1.0"),
        ({"temperature": NAN}, "temperature must be .*, got nan"),
        ({"temperature": INF}, "temperature must be .*, got inf"),
        ({"temperature": 1e-50}, "temperature must be .*, got 1e-50"),
        ({"temperature": "hot"}, "temperature must be a number or a tensor, got 'hot'"),
        ({"temperature": True}, "temperature must be a number or a tensor, got True"),
        (
            {"temperature": torch.tensor([0.5, -2.0])},
            "temperature must be .*, got -2.0 for request 1",
        ),
        (
            {"temperature": torch.ones(3)},
            r"temperature must have one entry for each of the 2 requests, got shape \(3,\)",
        ),
        ({"temperature": torch.tensor([True, True])}, "must hold numbers, got torch.bool"),
        ({"top_k": -1}, r"top_k must be from 0 \(all tokens\) to 2\*\*31 - 1, got -1"),
        ({"top_k": 2**70}, f"top_k must be .*, got {2**70}"),
        ({"top_k": 2.0}, "top_k must be an integer or a tensor, got 2.0"),
        ({"top_k": torch.ones(2)}, "top_k must hold integers, got torch.float32"),
        ({"top_k": torch.tensor([-3, 1])}, "top_k must be .*, got -3 for request 0"),
        ({"top_p": 1.5}, r"top_p must be from 0 to 1 \(all tokens\), got 1.5"),
        ({"top_p": torch.tensor([0.5, NAN])}, "top_p must be .*, got nan for request 1"),
        ({"min_p": -0.1}, r"min_p must be from 0 \(all tokens\) to 1, got -0.1"),
        ({"seeds": 5}, "seeds must be a torch.Tensor, got int"),
        ({"seeds": torch.tensor([1])}, r"seeds must have .* 2 requests, got shape \(1,\)"),
        ({"seeds": torch.tensor([1.0, 2.0])}, "seeds must hold .*, got torch.float32"),
        ({"positions": torch.tensor([3, -4])}, "positions must be at least 0, got -4"),
        ({"allowed": [[1]]}, "allowed must be a torch.Tensor, got list"),
        (
            {"allowed": torch.zeros(2, 3)},
            "allowed must hold one of .*, got torch.float32",
        ),
        (
            {"allowed": torch.zeros(4, 2, dtype=torch.int32)},
            r"allowed must have 1 words for each of the 4 rows .* of 8 tokens, got shape \(4, 2\)",
        ),
        ({"allowed": torch.zeros(1, 1, dtype=torch.int32)}, r"4 rows .*, got shape \(1, 1\)"),
        ({"logprobs": 5}, "logprobs must be True or False, got 5"),
        ({"raw_logprobs": None}, "raw_logprobs must be True or False, got None"),
        ({"workspace": 1 << 20}, "workspace must be a Workspace, got int"),
        *[
            ({"likeliest": wrong}, f"likeliest must be from 0 to 8, got {wrong}")
            for wrong in (-1, 9, 1.5)
        ],
    ],
)
def test_every_entry_names_the_value(change, message):
    operands = {**GOOD, **change}
    with pytest.raises(InvalidValueError, match=message):
        verify_sampled(**operands)
    if not change.keys() & OF_SAMPLING:
        left = {name: each for name, each in operands.items() if name not in OF_SAMPLING}
        with pytest.raises(InvalidValueError, match=message):
            verify_greedy(**left)
    if not change.keys() & OF_OTHERS:
        with pytest.raises(InvalidValueError, match=message):
            verify_rejection(**operands, draft_logits=torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_logits": [[1.0]]}, "draft_logits must be a torch.Tensor, got list"),
        (
            {"draft_logits": torch.zeros(3, 4).long()},
            "draft_logits must hold one of .*, got torch.int64",
        ),
        (
            {"draft_logits": torch.zeros(12)},
            r"draft_logits must have 2 dimensions, got shape \(12,\)",
        ),
        (
            {"draft_logits": torch.zeros(5, 4)},
            r"draft_logits must have a row for each draft token .* \(3, 4\), got shape \(5, 4\)",
        ),
        (
            {"draft_logits": torch.zeros(3, 4, device="meta")},
            "draft_logits must be on the logits' device, cpu, got meta",
        ),
        (
            {"draft_logits": torch.zeros(3, 4).index_fill(1, torch.tensor(3), -INF)},
            "draft_logits must be finite for the tokens drawn, got -inf for token 3 in request 1",
        ),
        (
            {"draft_ids": torch.tensor([1, 4, 3])},
            "draft_ids must be drawn from draft_logits, from 0 to 3, got 4 in request 1",
        ),
    ],
)
def test_draft_logits_that_cannot_be_are_named(change, message):
    """Two requests drafted tokens 1 and 0, 3 of a vocabulary of 4."""
    operands = {
        **GOOD,
        "logits": torch.zeros(5, 4),
        "draft_ids": torch.tensor([1, 0, 3]),
        "offsets": torch.tensor([0, 1, 3]),
        "draft_logits": torch.zeros(3, 4),
    }
    with pytest.raises(InvalidValueError, match=message):
        verify_rejection(**{**operands, **change})


SIZE = {"max_rows": 4, "max_requests": 2, "vocabulary": 8, "max_draft": 2}


@pytest.mark.parametrize(
    ("name", "field"),
    [("max_rows", "rows"), ("vocabulary", "vocabulary"), ("max_draft", "max_draft")],
)
def test_a_workspace_that_is_too_small_is_named(name, field):
    batch = [GOOD[each] for each in ("logits", "draft_ids", "offsets")]
    verify_greedy(*batch, workspace=Workspace("cpu", **SIZE))
    small = Workspace("cpu", **{**SIZE, name: SIZE[name] - 1})
    message = f"workspace must have {field} of at least {SIZE[name]}, got {SIZE[name] - 1}"
    with pytest.raises(InvalidValueError, match=message):
        verify_greedy(*batch, workspace=small)


def test_a_workspace_has_room():
    for name, least in {"max_rows": 1, "max_requests": 1, "vocabulary": 1, "max_draft": 0}.items():
        with pytest.raises(InvalidValueError, match=f"{name} must be at least {least}, got"):
            Workspace("cpu", **{**SIZE, name: least - 1})
