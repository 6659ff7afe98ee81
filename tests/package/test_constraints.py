"""All that make installs is named in constraints/, with one exact version for each Python."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slow_tests import is_slow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
HOSTS = ROOT / "tests" / "hosts" / "requirements"


def requirements(file: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


GROUPS: dict[str, list[Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "dependency-groups"
]


def grouped(*names: str) -> Iterator[str]:
    """The requirements of groups, and of those that they include."""
    for each in (each for name in names for each in GROUPS[name]):
        if isinstance(each, str):
            yield each
        else:
            yield from grouped(each["include-group"])


def environment(python: str = "", machine: str = "x86_64") -> dict[str, str]:
    """The environment of markers: Linux with `python`, or this one."""
    found = {name: str(value) for name, value in default_environment().items()}
    if python:
        found |= {"python_version": python, "python_full_version": f"{python}.7"}
        found |= {"platform_machine": machine, "sys_platform": "linux"}
    return found


def pins(file: Path, where: dict[str, str]) -> dict[str, str]:
    """The version of each package; fails where a package has two, or a range."""
    found: dict[str, str] = {}
    for pin in requirements(file):
        if pin.marker is None or pin.marker.evaluate(where):
            name = canonicalize_name(pin.name)
            [specifier] = pin.specifier
            assert specifier.operator == "==" and name not in found, pin
            found[name] = specifier.version
    return found


def declared() -> list[Requirement]:
    """The requirements of the package, its extras, the groups and its build."""
    metadata = [*(importlib.metadata.requires("fastdraft") or []), *grouped(*GROUPS)]
    tools = [each for name in ("build", "release") for each in requirements(tools_file(name))]
    return [Requirement(line) for line in metadata] + tools


def tools_file(name: str) -> Path:
    return ROOT / "tools" / f"{name}.txt"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_requirement_has_one_version(python: str, machine: str) -> None:
    where = environment(python, machine)
    wanted = {"main": declared()}
    for file in sorted(HOSTS.glob("*.txt")):
        wanted[file.stem] = [*requirements(file), *requirements(tools_file("build"))]
    for name, needs in wanted.items():
        found = pins(ROOT / "constraints" / f"{name}.txt", where)
        for need in needs:
            if canonicalize_name(need.name) != "fastdraft":
                pinned = found[canonicalize_name(need.name)]
                # PyTorch's release of vLLM and SGLang comes for a few Pythons only.
                assert need.specifier.contains(pinned, prereleases=True), (name, need)


def test_pytorch_has_one_version_for_all() -> None:
    """The Makefile reads it without knowing which Python there is."""
    for file in (ROOT / "constraints").glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if line.startswith("torch==")]
        assert len(lines) <= 1 and all(re.fullmatch(r"torch==[\d.]+", line) for line in lines)


@pytest.mark.skipif(
    not Path(sys.prefix, ".package").exists(), reason="this environment was not made by make"
)
def test_this_environment_has_the_versions_named() -> None:
    named = pins(ROOT / "constraints" / "main.txt", environment())
    installed = {
        canonicalize_name(found.metadata["Name"]): found.version.partition("+")[0]
        for found in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    }
    others = {name: version for name, version in installed.items() if named.get(name) != version}
    assert set(others) <= {"fastdraft", "pip", "setuptools"}, "run `make setup`"


def closure(requirements: Iterable[str]) -> set[str]:
    """The packages that the requirements bring, here."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting: list[tuple[str, str]] = []

    def add(lines: Iterable[str], extra: str) -> None:
        for need in map(Requirement, lines):
            if need.marker is None or need.marker.evaluate(environment() | {"extra": extra}):
                waiting.extend((canonicalize_name(need.name), e) for e in ("", *need.extras))

    add(requirements, "")
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) not in seen:
            seen.add((name, extra))
            found.add(name)
            add(importlib.metadata.requires(name) or [], extra)
    return found


def imported(file: Path) -> Iterator[str]:
    """The modules that a file imports anywhere, by their first names."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
            yield ast.literal_eval(node.args[0]).partition(".")[0]


def modules_of_tests(*, slow: bool) -> set[str]:
    """The modules that tests import, all or the quick ones, also by helpers in tests/support."""
    helpers = {path.stem: path for path in (ROOT / "tests" / "support").glob("*.py")}
    files = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if not {"hosts", "support"} & set(path.parts) and (slow or not is_slow(path))
    ]
    found: set[str] = set()
    for file in files:
        new = set(imported(file)) - found
        found |= new
        files += [helpers[name] for name in new if name in helpers]
    return found


@functools.cache
def packages_of_modules() -> dict[str, list[str]]:
    """The packages that have a module of each name: the files of all are read for that."""
    return {
        module: [canonicalize_name(name) for name in names]
        for module, names in importlib.metadata.packages_distributions().items()
    }


@pytest.mark.parametrize("group", ["test", pytest.param("test-all", marks=pytest.mark.slow)])
def test_a_group_brings_what_its_tests_import(group: str) -> None:
    """Nothing is skipped because a package is missing."""
    here = closure(grouped(group))
    packages = packages_of_modules()
    foreign = modules_of_tests(slow=group == "test-all") & set(packages) - {"fastdraft"}
    foreign -= {"tomli"}  # which pytest brings where there is no tomllib
    assert not {name for name in foreign if here.isdisjoint(packages[name])}


def check_needs(*files: str) -> set[str]:
    command = [sys.executable, "tools/check.py", "--needs", "E", *files]
    return set(subprocess.check_output(command, cwd=ROOT, text=True).split())


def test_check_installs_what_the_changed_room_needs() -> None:
    assert check_needs("docs/index.md") == {"E/.package", "E/.test"}
    assert check_needs("kernels/greedy.py") == {"E/.lint", "E/.package", "E/.test"}
    assert "gtest" in check_needs("csrc/src/engine/engine.cc") & check_needs("tests/cpp/texts.h")
    assert {"browser", "E/.test-all"} <= check_needs("tests/replay/test_page.py")
    assert check_needs("LICENSE") == {"E/.package"}


def test_actions_are_named_by_digest() -> None:
    """A tag of somebody else's may move; the comment says which it was."""
    files = [path for path in (ROOT / ".github").rglob("*.yml") if "uses:" in path.read_text()]
    uses = re.findall(r"uses: (.*)", "\n".join(path.read_text("utf-8") for path in files))
    assert len(uses) > 20
    pinned = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert all(each.startswith("./") or pinned.fullmatch(each) for each in uses)


def test_what_builds_the_wheels_has_hashes() -> None:
    lines = (ROOT / "tools" / "cibuildwheel.txt").read_text("utf-8").splitlines()
    pins_of_tools = [line for line in lines if not line.startswith("#")]
    assert pins_of_tools
    for line in pins_of_tools:
        assert re.fullmatch(r"[\w.-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})+", line)
