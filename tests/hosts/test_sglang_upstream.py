"""The patches for SGLang apply to the released source, and their tests pass with it."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest

from upstream import applied, applies, patches, run_tests

# SGLang's compiled kernels need a GPU: what imports them gets empty modules.
WITHOUT_KERNELS = """
    import sys
    import types

    import torch

    for name in ("sgl_kernel", "sgl_kernel.speculative"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = lambda name: None if name.startswith("__") else object
        sys.modules[name] = module
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""


@pytest.fixture
def package() -> Path:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


@pytest.mark.parametrize("patch", patches("sglang"), ids=lambda path: path.stem)
def test_each_applies_by_itself(patch: Path, package: Path, tmp_path: Path) -> None:
    applies(patch, package, tmp_path, below="python/")


def test_their_own_tests_pass(package: Path, tmp_path: Path) -> None:
    root = applied("sglang", package, tmp_path, below="python/")
    (tmp_path / "conftest.py").write_text(textwrap.dedent(WITHOUT_KERNELS))
    run_tests("sglang", tmp_path, root, SGLANG_USE_CPU_ENGINE="1")
