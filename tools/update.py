"""Tests the newest packages that the requirements allow: `make update`, `make test-newest`.

constraints/ names the exact version of everything that make installs: main.txt for make's own
environment, HOST.txt for that of a host. A file holds for all Pythons: where they differ, lines
have markers. This script resolves them anew in a copy of what is committed, and runs .ci/run there.
If that passes, `make update` writes constraints/, and `make test-newest` leaves them as they are.

To hold a package back, name it in `[tool.uv] constraint-dependencies` of pyproject.toml, or, if
only a host needs it, in tests/hosts/requirements/HOST.txt.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "newest"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Of the same release as PyTorch; a host installs it.
COMPANION = "torchvision"
# What a host's tests only read, by host.
SOURCES = {"vllm": "vllm"}
NAME = re.compile(r"^[A-Za-z0-9][\w.-]*", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--host", help="only write constraints/HOST.txt, for a new host; no tests")
    arguments = parser.parse_args()
    if arguments.host:
        resolve_host(ROOT, arguments.host)
        return
    shutil.rmtree(COPY, ignore_errors=True)
    run("git", "clone", "--quiet", str(ROOT), str(COPY))
    before = read(COPY / "constraints")
    resolve(COPY)
    after = read(COPY / "constraints")
    print(*difference(before, after), sep="\n", flush=True)
    if before == after:
        print("The constraints name the newest packages.")
        return
    if subprocess.run([".ci/run"], cwd=COPY, env=environment(), check=False).returncode:
        sys.exit("The tests fail with the newest packages: constraints/ stays as it is.")
    if not arguments.dry_run:
        for name, text in after.items():
            (ROOT / "constraints" / name).write_text(text)
        print("constraints/ names the newest packages now: commit it.")


def resolve(tree: Path) -> None:
    """Writes the newest versions that go together into constraints/ of `tree`."""
    constraints, scratch = tree / "constraints", tree / "build"
    scratch.mkdir(exist_ok=True)
    main, torch = constraints / "main.txt", scratch / "torch.txt"
    torch.write_text(f"torch=={newest_torch(main)}\n")
    (scratch / "companion.txt").write_text(f"{COMPANION}\n")
    main.unlink()
    tools = [tree / "tools" / name for name in ("build.txt", "release.txt")]
    inputs = [tree / "pyproject.toml", *tools, scratch / "companion.txt"]
    groups = ("bench", "docs", "lint", "test-all")
    lock(
        inputs, main, "--all-extras", *(f"--group={name}" for name in groups), "--constraint", torch
    )
    for python in PYTHONS:  # there are wheels of all that `make test` needs
        everything = ("--group", "test-all", "--constraint", main)
        wheels = ("--only-binary", ":all:", "--python-platform", "x86_64-manylinux_2_31")
        lock(inputs[:2], scratch / "wheels.txt", *everything, *wheels, python=python)
    for requirements in sorted((tree / "tests" / "hosts" / "requirements").glob("*.txt")):
        resolve_host(tree, requirements.stem)
    for host, package in SOURCES.items():
        (scratch / "source.txt").write_text(f"{package}\n")
        lock([scratch / "source.txt"], scratch / "found.txt", "--no-deps")
        # Of the newest Python: what is only read runs on none.
        *_, pin = re.findall(
            rf"^{package}==[\w.]+", (scratch / "found.txt").read_text(), re.MULTILINE
        )
        with (constraints / f"{host}.txt").open("a") as file:
            file.write(f"{pin}\n")


def resolve_host(tree: Path, host: str) -> None:
    """Writes the newest versions that go together with a host into constraints/HOST.txt.

    As far as the host allows it, versions are those of make's own environment; PyTorch's is,
    whatever the host requires. What a package that is installed "alone" requires holds
    for the packages in the list, and adds none.
    """
    requirements = tree / "tests" / "hosts" / "requirements" / f"{host}.txt"
    main, locked = tree / "constraints" / "main.txt", tree / "constraints" / f"{host}.txt"
    torch, wanted, scratch = (
        tree / "build" / name for name in ("torch.txt", "wanted.txt", "host.txt")
    )
    tools = tree / "tools" / "build.txt"
    torch.parent.mkdir(exist_ok=True)
    torch.write_text("".join(re.findall(r"^torch==.*\n", main.read_text(), re.MULTILINE)))
    shutil.copy(main, locked)
    lock([requirements, tools], locked, "--override", torch)
    lines = requirements.read_text().splitlines()
    alone = set(names(line for line in lines if "# alone" in line))
    if not alone:
        return
    pinned = [line for line in locked.read_text().splitlines() if NAME.match(line)]
    listed = set(names(lines))
    wanted.write_text("".join(f"{pin}\n" for pin in pinned if names([pin])[0] in listed))
    scratch.write_text("".join(f"{line}\n" for line in lines if not set(names([line])) & alone))
    shutil.copy(main, locked)
    lock([scratch, tools], locked, "--override", torch, "--constraint", wanted)
    added = "".join(f"{pin}\n" for pin in pinned if names([pin])[0] in alone)
    locked.write_text(locked.read_text() + added)


def lock(inputs: list[Path], output: Path, *options: object, python: str = "") -> None:
    """Resolves `inputs` for all Pythons, from the oldest that has them on, or for one.

    Of what `output` names already it keeps the versions that the inputs allow.
    """
    command = [
        *("uv", "pip", "compile", "--quiet", "--no-annotate", "--output-file", str(output)),
        *("--custom-compile-command", "make update", *map(str, [*options, *inputs])),
    ]
    if python:
        run(*command, "--python-version", python)
        return
    for oldest in PYTHONS:
        done = subprocess.run(
            [*command, "--universal", "--python-version", oldest],
            cwd=output.parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return
        if "Python" not in done.stderr:
            break
    sys.exit(done.stderr)


def newest_torch(locked: Path) -> str:
    """The newest PyTorch whose build for CPUs can be had here."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    [pinned] = re.findall(r"^torch==(\S+)$", locked.read_text(), re.MULTILINE)
    for options in ([], ["--extra-index-url", TORCH_INDEX]):
        done = subprocess.run(
            [*command, *options], env=environment(), capture_output=True, text=True, check=False
        )
        found = re.findall(r"([\d.]+)\+cpu", done.stdout)
        if found:
            return max(found, key=lambda version: [int(part) for part in version.split(".")])
    print(f"No PyTorch for CPUs can be had here: it stays {pinned}", file=sys.stderr)
    return str(pinned)


def environment() -> dict[str, str]:
    """The environment variables that this make was started with."""
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PIP_BUILD_CONSTRAINT", "PIP_CONSTRAINT")
    return {name: value for name, value in os.environ.items() if name not in ours}


def names(lines: Iterable[str]) -> list[str]:
    """The packages of requirement lines, as pip compares their names."""
    found = (NAME.match(line) for line in lines)
    return [re.sub(r"[-_.]+", "-", name[0]).lower() for name in found if name]


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*.txt"))}


def difference(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The changed lines, each file's below its name."""
    changes = []
    for name, text in after.items():
        lines = before.get(name, "").splitlines(), text.splitlines()
        changed = [line for line in difflib.unified_diff(*lines, n=0) if line[1:2].isalnum()]
        changes += [f"constraints/{name}", *(f"  {line}" for line in changed)] if changed else []
    return changes


def run(*command: str) -> None:
    if done := subprocess.run(command, check=False).returncode:
        sys.exit(done)


if __name__ == "__main__":
    main()
