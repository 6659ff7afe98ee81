"""A step of `fastdraft.hf` on a device: its launches, and no memory but the workspace's."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from adversarial import INTERPRETED
from torch.utils._python_dispatch import TorchDispatchMode

import fastdraft.hf.verifier
from fastdraft.hf.drafts import StepDrafts
from fastdraft.hf.processors import Warping
from fastdraft.hf.verifier import Verifier
from fastdraft.kernels import language

VOCABULARY = 1100  # two chunks
MAKES = ("empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_full", "empty_strided")
FILLS = ("fill_", "zero_", "zeros", "full", "new_zeros", "new_full")


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def drafts(*rows, tree=False):
    parents = [-1 if tree else at - 1 for row in rows for at in range(len(row))]
    ids = [token for row in rows for token in row]
    offsets = np.cumsum([0, *map(len, rows)])
    return StepDrafts(
        np.array(ids, np.int32),
        np.array(parents, np.int32),
        np.full(len(ids), 0.5, np.float32),
        offsets.astype(np.int32),
    )


@pytest.mark.skipif(not INTERPRETED, reason="launches are counted in the interpreter")
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(
    ("warping", "sampled", "launches"),
    [
        (Warping(), False, 1),
        (Warping(temperature=0.7), True, 1),
        (Warping(temperature=0.7, top_k=50, top_p=0.9), True, 3),
    ],
    ids=["greedy", "sampled", "filters"],
)
def test_a_step_launches_kernels_and_allocates_nothing(warping, sampled, launches, tree):
    from triton.runtime import interpreter

    verifier = Verifier(warping)
    draws = [(3, 10), (4, 20)] if sampled else None
    launched = []
    run = interpreter.GridExecutor.__call__

    names = _Names()

    def counting(executor, *args, **kwargs):
        launched.append(executor.fn.__name__)
        before = list(names.names)
        run(executor, *args, **kwargs)
        names.names = before  # what the interpreter itself does

    logits = torch.randn(5, VOCABULARY)
    step = drafts([5, 6], [7], tree=tree)
    with mock.patch.object(language, "has_kernels", return_value=True):
        verifier(logits, step, draws=draws)
        with (
            mock.patch.object(interpreter.GridExecutor, "__call__", counting),
            mock.patch.object(fastdraft.hf.verifier, "_read", lambda verified, **_: verified),
            names,
        ):
            verified = verifier(logits, step, draws=draws)
    assert len(launched) == launches
    assert [name for name in names.names if name in MAKES + FILLS] == []
    assert verified.token_ids.shape == (2, step.longest + 1)
