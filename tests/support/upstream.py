"""The patches for hosts, applied to copies of what is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["applied", "applies", "patches", "run_tests"]

FOLDER = Path(__file__).parents[1] / "hosts" / "upstream"


def patches(host: str) -> list[Path]:
    """The patches for a host, in the order in which they apply together."""
    found = sorted((FOLDER / host).glob("*.patch"))
    assert found, f"no patches for {host}"
    return found


def _touched(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.MULTILINE)


def _apply(folder: Path, patch: Path, *options: str) -> None:
    command = ["git", "apply", *options, str(patch)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{patch.name}: {done.stderr}"


def applies(patch: Path, package: Path, folder: Path, *, below: str = "") -> None:
    """Asserts that a patch applies to a package's files, by itself.

    folder: An empty one.
    below: Where the host's repository keeps its package.
    """
    for name in _touched(patch):
        source = package.parent / name.removeprefix(below)
        if source.exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    _apply(folder, patch, "--check")


def applied(host: str, package: Path, folder: Path, *, below: str = "") -> Path:
    """A copy of a package with all patches of its host; the folder to import it from.

    What no patch touches is linked. What is touched is compiled.
    """
    root = folder / below
    root.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-rs", package.resolve(), root / package.name], check=True)
    for patch in patches(host):
        for name in _touched(patch):
            file = folder / name
            if file.is_symlink():
                source = file.resolve()
                file.unlink()
                shutil.copy(source, file)
        _apply(folder, patch)
        for name in _touched(patch):
            compile((folder / name).read_text(), name, "exec")
    return root


def run_tests(host: str, folder: Path, root: Path, **variables: str) -> None:
    """Runs the tests that the patches bring, with the patched package."""
    names = [name for patch in patches(host) for name in _touched(patch) if "test_" in name]
    assert len(names) == len(patches(host)), "each patch brings its test"
    path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names],
        cwd=folder,
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout
