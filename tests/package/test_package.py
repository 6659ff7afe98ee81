"""The package as it is installed: what importing it needs, what it ships, what it documents."""

from __future__ import annotations

import email
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastdraft

ROOT = Path(__file__).parents[2]
PACKAGE = Path(fastdraft.__file__).parent
PUBLIC_MODULES = (
    "fastdraft",
    "fastdraft.drafters",
    "fastdraft.errors",
    "fastdraft.hf",
    "fastdraft.replay",
    "fastdraft.verification",
)


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_numpy_alone() -> None:
    loaded = run_python(
        "import sys; import numpy; before = set(sys.modules); import fastdraft;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    ).split()
    foreign = set(loaded) - set(sys.stdlib_module_names) - {"fastdraft", "numpy"}
    assert not foreign


def test_version_is_the_installed_one() -> None:
    assert fastdraft.__version__ == importlib.metadata.version("fastdraft")


def test_ships_type_information() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_core.pyi").is_file()


def test_stub_is_the_modules_own(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, ROOT / "tools" / "stubs.py", tmp_path],
        check=True,
        capture_output=True,
    )
    generated = (tmp_path / "fastdraft" / "_core.pyi").read_text()
    committed = (PACKAGE / "_core.pyi").read_text()
    assert committed == generated, "the C++ module has changed: run `make stubs`"


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_public_names_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert inspect.getdoc(module)
    for public in module.__all__:
        value = getattr(module, public)
        if not (inspect.isclass(value) or callable(value)):
            continue
        assert inspect.getdoc(value), f"{name}.{public} has no docstring"
        if not inspect.isclass(value):
            continue
        for member, function in inspect.getmembers(value, inspect.isroutine):
            own = not member.startswith("_") and member not in dir(Exception)
            inherited = any(member in vars(base) for base in (int, dict, list, tuple))
            if own and not inherited:
                assert inspect.getdoc(function), f"{name}.{public}.{member} has no docstring"


METADATA = """
import sys
from scikit_build_core.build import prepare_metadata_for_build_wheel
print(prepare_metadata_for_build_wheel(sys.argv[1], {}))
"""
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("repository", ["https://github.com/somebody/fastdraft", None])
def test_links_of_the_readme_lead_somewhere_on_pypi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: str | None
) -> None:
    """In the metadata of the wheel, as the build writes it."""
    monkeypatch.delenv("FASTDRAFT_REPOSITORY", raising=False)
    if repository is not None:
        monkeypatch.setenv("FASTDRAFT_REPOSITORY", repository)
    subprocess.run([sys.executable, "-c", METADATA, tmp_path], cwd=ROOT, check=True)
    [file] = tmp_path.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(file.read_text(encoding="utf-8"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    addresses = [url.partition(", ")[2] for url in metadata.get_all("Project-URL", [])]
    assert [url.startswith(f"{repository}/") or url == repository for url in addresses] == (
        [True] * 4 if repository else []
    )
    found = LINK.findall(str(metadata.get_payload()))
    expected = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(found) == len(expected) > 20
    for link, relative in zip(found, expected, strict=True):
        if repository is None or "://" in relative:
            assert link == relative
        else:
            kind = "raw" if relative.endswith(".svg") else "blob"
            assert link == f"{repository}/{kind}/v{fastdraft.__version__}/{relative}"
            assert (ROOT / relative.partition("#")[0]).exists()
