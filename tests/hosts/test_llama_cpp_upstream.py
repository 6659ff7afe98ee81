"""The patches for llama-cpp-python apply to the released source, and their tests pass with it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from llama_models import tiny_model
from upstream import applied, applies, patches, run_tests


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def package() -> Path:
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


@pytest.mark.parametrize("patch", patches("llama-cpp"), ids=lambda path: path.stem)
def test_each_applies_by_itself(patch: Path, package: Path, tmp_path: Path) -> None:
    applies(patch, package, tmp_path)


def test_their_own_tests_pass(package: Path, model: str, tmp_path: Path) -> None:
    root = applied("llama-cpp", package, tmp_path)
    run_tests("llama-cpp", tmp_path, root, LLAMA_TEST_MODEL=model)


def test_without_the_patch_its_test_fails(package: Path, model: str, tmp_path: Path) -> None:
    shutil.rmtree(applied("llama-cpp", package, tmp_path) / "llama_cpp")
    with pytest.raises(AssertionError, match="could not broadcast input array"):
        run_tests("llama-cpp", tmp_path, package.parent, LLAMA_TEST_MODEL=model)
