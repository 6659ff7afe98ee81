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

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
HOSTS = ROOT / "tests" / "hosts" / "requirements"


def requirements(file: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def environment(python: str = "", machine: str = "x86_64") -> dict[str, str]:
    """What markers are compared with: on Linux with `python`, or here."""
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
    """What the package and its extras require, and what builds it."""
    metadata = importlib.metadata.requires("fastdraft") or []
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


def test_builds_for_gpus_are_not_installed_beside_pytorch_for_cpus() -> None:
    if importlib.metadata.version("torch").endswith("+cpu"):
        names = {
            found.metadata["Name"]
            for found in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
        }
        assert not [name for name in names if name.startswith(("nvidia", "cuda"))]


# What `make check` installs.


def closure(extras: Iterable[str]) -> set[str]:
    """The packages that fastdraft with these extras brings, here."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [("fastdraft", extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate(environment() | {"extra": extra}):
                waiting += [(canonicalize_name(need.name), each) for each in ("", *need.extras)]
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


def modules_of_room(room: str) -> set[str]:
    """What the tests of a room import, by way of the helpers in tests/support too."""
    helpers = {path.stem: path for path in (ROOT / "tests" / "support").glob("*.py")}
    files, found = [*(ROOT / "tests" / room).rglob("*.py")], set()
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


ROOMS = sorted(
    folder.name
    for folder in (ROOT / "tests").iterdir()
    if list(folder.glob("test_*.py")) and folder.name != "hosts"
)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_needs_what_its_own_extras_bring(room: str) -> None:
    """Nothing of it is skipped because a package is missing."""
    provided = importlib.metadata.metadata("fastdraft").get_all("Provides-Extra") or []
    own = [f"test-{room}"] if f"test-{room}" in provided else []
    here = closure(["demo", "test-base", *own])
    packages = packages_of_modules()
    foreign = modules_of_room(room) & set(packages) - {"fastdraft"}
    if room.startswith("kernels"):
        foreign -= {"triton"}
    assert not {name for name in foreign if here.isdisjoint(packages[name])}


def check_needs(*files: str) -> set[str]:
    command = [sys.executable, "tools/check.py", "--needs", "E", *files]
    return set(subprocess.check_output(command, cwd=ROOT, text=True).split())


def test_check_installs_what_the_changed_room_needs() -> None:
    assert check_needs("docs/index.md") == {"E/.package", "E/.test-base", "E/.test-docs"}
    assert check_needs("kernels/greedy.py") == {
        "E/.lint", "E/.package", "E/.test-base", "E/.triton"
    }  # fmt: skip
    assert "gtest" in check_needs("csrc/src/engine/engine.cc") & check_needs("tests/cpp/texts.h")
    assert {"browser", "E/.test-replay"} <= check_needs("tests/replay/test_page.py")
    assert check_needs("LICENSE") == {"E/.package"}
