"""Kernels run in Triton's interpreter, one program after another in any order, or on a device."""

from __future__ import annotations

import math
import random

import pytest
import torch
from adversarial import INTERPRETED

if not INTERPRETED and not torch.cuda.is_available():
    raise pytest.UsageError(
        "tests/kernels needs a process with TRITON_INTERPRET=1, or a CUDA or ROCm device"
    )


if INTERPRETED:
    from triton.runtime import interpreter

    from triton_interpreter import speed_up

    speed_up(interpreter)


# In `make test`: each operation at one size, a threshold, and the rules of alignment.
QUICK = {
    "test_kernels_are_the_plain_version": {"vocabulary": 37},
    "test_odd_rows": {"vocabulary": 33},
    "test_each_way_to_a_draft": {},
    "test_noise_is_the_reference": {},
    "test_linear": {"dtype": torch.bfloat16, "sizes": (90, 33, 70), "transposed": False},
    "test_attention": {"dtype": torch.bfloat16, "heads": 6},
}


def pytest_itemcollected(item):
    wanted = QUICK.get(item.originalname)
    if wanted is None or not wanted.items() <= item.callspec.params.items():
        item.add_marker("slow")


def pytest_collection_modifyitems(items):
    for item in items:
        # NumPy, which the interpreter calculates with, warns of infinities and NaN.
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(autouse=True)
def _on_the_device():
    """Tensors are made where the kernels run: inputs, and so the reference's results."""
    with torch.device("cpu" if INTERPRETED else "cuda"):
        yield


@pytest.fixture(params=["backwards", "shuffled"] if INTERPRETED else ["at once"])
def any_order(request, monkeypatch):
    """Runs the programs of each launch one after another in an order that no kernel may rely on.

    A device has an order of its own.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx
    orders = {}

    def reordered(x, y, z):
        count = math.prod(builder.grid_dim)
        if count not in orders:
            orders[count] = list(range(count))
            if request.param == "backwards":
                orders[count].reverse()
            elif request.param == "shuffled":
                random.Random(count).shuffle(orders[count])
        assert (y, z) == (0, 0)
        set_grid_idx(orders[count][x], 0, 0)

    monkeypatch.setattr(builder, "set_grid_idx", reordered)
