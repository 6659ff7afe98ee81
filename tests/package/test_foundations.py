"""The foundations as the user ordered them: seven packages, and eight names at the top."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
# The folder in which each package does its job, and what shows it.
JOBS = {
    "torch": ("python/fastdraft/verification", "import torch"),
    "transformers": ("python/fastdraft/hf", "import transformers"),
    "triton": ("kernels", "import triton"),
    "numpy": ("python/fastdraft", "import numpy"),
    "pytest-benchmark": ("bench", "benchmark fixture"),
    "pybind11": ("csrc/bindings", "#include <pybind11/"),
    "scikit-build-core": ("pyproject.toml", "scikit_build_core.build"),
}


def required() -> set[str]:
    """All that the package, its extras, its groups and its build require."""
    project = PROJECT["project"]
    lists = [
        PROJECT["build-system"]["requires"],
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
    ]
    lines = [line for each in lists for line in each if isinstance(line, str)]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def python_files(folder: str) -> Iterator[ast.Module]:
    for path in (ROOT / folder).rglob("*.py"):
        yield ast.parse(path.read_text("utf-8"))


def imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", JOBS)
def test_each_ordered_package_is_required_and_used(package: str) -> None:
    assert package in required()
    where, what = JOBS[package]
    if what.startswith("import "):
        module = what.removeprefix("import ")
        assert any(module in imports(tree) for tree in python_files(where))
    elif what == "benchmark fixture":
        takes = {
            node.name: {argument.arg for argument in node.args.args}
            for tree in python_files(where)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
        }
        # By a fixture that takes it, too.
        benchmarks = {"benchmark"} | {name for name in takes if "benchmark" in takes[name]}
        taking = [name for name in takes if name.startswith("test_") and takes[name] & benchmarks]
        assert len(taking) >= 5
        assert re.search(r"pytest bench\b", (ROOT / "Makefile").read_text("utf-8"))
    elif (ROOT / where).is_dir():
        assert any(what in path.read_text("utf-8") for path in (ROOT / where).iterdir())
    else:
        assert PROJECT["build-system"]["build-backend"] == what


def test_the_top_level_is_as_ordered() -> None:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    folders = {name.partition("/")[0] for name in tracked if "/" in name}
    files = {name for name in tracked if "/" not in name}
    assert {"csrc", "python", "kernels", "tests", "bench"} <= folders
    assert {"CMakeLists.txt", "pyproject.toml", "README.md"} <= files


def test_the_rooms_of_the_core_include_only_lower_ones() -> None:
    rooms = ["index", "policy", "store", "draft", "engine"]
    source = ROOT / "csrc/src"
    assert sorted(rooms) == sorted(folder.name for folder in source.iterdir())
    for path in source.rglob("*"):
        if not path.is_file():
            continue
        included = set(re.findall(r'#include "(\w+)/', path.read_text("utf-8")))
        higher = set(rooms[rooms.index(path.parent.name) + 1 :])
        assert not included & higher, path.relative_to(ROOT)
