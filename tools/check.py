"""Lints and tests what has changed since main: `make check`.

Linters look at the changed files, but mypy at all, since a change shows in others. Of the tests
those of each changed file's room run: python/fastdraft/ROOM is tested by tests/ROOM.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

# Where the room's name is not the folder's.
ROOMS = {
    "csrc": ("cpp", "core"),
    "kernels": ("kernels",),
    "kernels/reference": ("verification",),
    "python/fastdraft": ("core", "package"),
    "tests/cpp": ("cpp",),
}
# Rooms that are too large for every change: of these, the tests named after the changed file.
LARGE = ("kernels",)


def changed() -> list[Path]:
    """The files that differ from where the branch left main, and new ones."""
    base = subprocess.run(
        ["git", "merge-base", "HEAD", "main"], capture_output=True, text=True, check=False
    )
    since = base.stdout.strip() or "HEAD"
    listed = [
        *_lines("git", "diff", "--name-only", "--diff-filter=d", since),
        *_lines("git", "ls-files", "--others", "--exclude-standard"),
    ]
    return [Path(name) for name in sorted(set(listed))]


def room_of(path: Path) -> tuple[str, ...]:
    """The folders of tests/ that test the file."""
    for folder in map(str, path.parents):
        if folder in ROOMS:
            return ROOMS[folder]
        room = Path(folder).name
        if folder.startswith(("python/fastdraft/", "tests/")) and Path("tests", room).is_dir():
            return (room,)
    return ()


def tests_of(path: Path) -> set[str]:
    """The tests to run for a changed file, as pytest takes them."""
    if path.parts[0] == "tests" and path.suffix == ".py":
        if path.name.startswith("test_"):
            return {str(path)}
        if path.name == "conftest.py":
            return {str(path.parent)}
        # A helper: whoever imports it by its name.
        users = _lines("git", "grep", "-lw", path.stem, "--", "tests/*/test_*.py")
        return {user for user in users if room_of(Path(user)) != ("hosts",)}
    if path.name == "pyproject.toml":
        return {"tests/package"}
    if path.suffix == ".md" and path.parts[0] != "python":
        return set()
    tests = set()
    for room in room_of(path):
        named = {str(test) for test in Path("tests", room).glob(f"test_{path.stem}*.py")}
        tests |= (named if room in LARGE else set()) or {f"tests/{room}"}
    return tests


def users_of(header: Path, sources: list[Path]) -> list[Path]:
    """The C++ sources that include a header, be it by way of others."""
    found, wanted = set(), {header.name}
    while True:
        names = "|".join(sorted(wanted))
        pattern = rf"#include [\"<](.*/)?({names})[\">]"
        users = {Path(name) for name in _lines("git", "grep", "-lE", pattern, "--", "*.cc", "*.h")}
        if users <= found:
            return sorted(found & set(sources))
        found |= users
        wanted |= {user.name for user in users if user.suffix == ".h"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default="2", help="how many processes (default: %(default)s)")
    jobs = parser.parse_args().jobs
    files = changed()
    print("Changed:", *files, sep="\n  ")
    python = [str(path) for path in files if path.suffix in (".py", ".pyi")]
    cpp = [path for path in files if path.suffix in (".cc", ".h")]
    if python:
        run("ruff", "check", "--force-exclude", *python)
        run("ruff", "format", "--check", "--force-exclude", *python)
    if any(name.startswith(("python/", "kernels/")) for name in python):
        run("mypy", "-p", "fastdraft", MYPYPATH="build/sources")
        run("lint-imports", PYTHONPATH="build/sources")
    if any(name.startswith("bench/") for name in python):
        run("mypy", "bench", MYPYPATH="build/sources:bench")
    if cpp:
        run("clang-format", "--dry-run", "--Werror", *map(str, cpp))
        run("cmake", "--preset", "dev")
        sources = [
            Path(name) for name in _lines("git", "ls-files", "csrc", "tests/cpp", "bench/cpp")
        ]
        sources = [
            path for path in {*sources, *cpp} if path.suffix == ".cc" and "fuzz" not in path.parts
        ]
        concerned = {path for path in cpp if path in sources}
        for header in cpp:
            if header.suffix == ".h":
                concerned.update(users_of(header, sources))
        names = "\n".join(map(str, sorted(concerned)))
        run(
            "xargs",
            "-r",
            "-n",
            "1",
            "-P",
            jobs,
            "clang-tidy",
            "--quiet",
            "-p",
            "build/dev",
            stdin=names,
        )

    tests = set().union(*map(tests_of, files))
    if "tests/cpp" in tests or any(path.parts[:2] == ("tests", "cpp") for path in files):
        tests.discard("tests/cpp")
        run("cmake", "--build", "--preset", "dev", "--target", "fastdraft_tests")
        run("ctest", "--preset", "dev")
    test(jobs, [name for name in sorted(tests) if not name.startswith("tests/kernels")])
    test(
        jobs,
        [name for name in sorted(tests) if name.startswith("tests/kernels/")],
        TRITON_INTERPRET="1",
    )
    test(jobs, [name for name in sorted(tests) if name.startswith("tests/kernels_compiled")])


def test(jobs: str, tests: list[str], **environment: str) -> None:
    """Runs tests; those without a test file of their own are none."""
    tests = [name for name in tests if not name.startswith(("tests/hosts", "tests/campaign"))]
    if tests:
        options = ["-n", jobs, "--dist", "worksteal", "-q"]
        run(sys.executable, "-m", "pytest", *options, *tests, OMP_NUM_THREADS="1", **environment)


def run(*command: str, stdin: str = "", **environment: str) -> None:
    """Runs a command; ends the check with its status if it fails."""
    print("$", *command, flush=True)
    done = subprocess.run(
        command, input=stdin, text=True, env=os.environ | environment, check=False
    )
    if done.returncode:
        sys.exit(done.returncode)


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


if __name__ == "__main__":
    main()
