"""Lints and tests what has changed since main: `make check`.

Linters look at the changed files, but mypy at all, since a change shows in others. Of the tests
those of each changed file's room run: python/fastdraft/ROOM is tested by tests/ROOM. `--needs`
names what has to be installed for that, as targets of make.
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
    "kernels": ("kernels", "verification"),
    "python/fastdraft": ("core", "package"),
    "tests/cpp": ("cpp",),
}
# Rooms whose tests need no more than `make test` installs.
QUICK = ("core", "docs", "kernels", "kernels_compiled", "package", "verification")
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
        return set(_lines("git", "grep", "-lw", path.stem, "--", "tests/*/test_*.py"))
    if path.name == "pyproject.toml":
        return {"tests/package"}
    if path.suffix == ".md":
        return {"tests/docs"}
    tests = set()
    for room in room_of(path):
        named = {str(test) for test in Path("tests", room).glob(f"test_{path.stem}*.py")}
        tests |= (named if room in LARGE else set()) or {f"tests/{room}"}
    return tests


def lint_python(files: list[str]) -> None:
    """Formats, style, types and imports."""
    run("ruff", "check", "--force-exclude", *files)
    run("ruff", "format", "--check", "--force-exclude", *files)
    if any(name.startswith(("python/", "kernels/")) for name in files):
        run("mypy", "-p", "fastdraft", MYPYPATH="python")
        run("lint-imports", PYTHONPATH="python")
    if any(name.startswith("bench/") for name in files):
        run("mypy", "bench", MYPYPATH="python:bench:tests/support:tests/kernels_compiled")


def lint_cpp(files: list[str], jobs: str) -> None:
    """Format, and clang-tidy for the targets that the files are part of."""
    run("clang-format", "--dry-run", "--Werror", *files)
    run("cmake", "--preset", "dev")
    run(sys.executable, "tools/tidy.py", "--jobs", jobs, *files)


def test(tests: set[str], jobs: str) -> None:
    """Runs tests: C++, interpreted kernels, and all others but those that need a host."""
    pytest = [sys.executable, "-m", "pytest", "-n", jobs, "--dist", "worksteal", "-q"]
    by_room: dict[str, list[str]] = {}
    for name in sorted(tests):
        by_room.setdefault(Path(name).parts[1], []).append(name)
    if by_room.pop("cpp", None):
        run("cmake", "--build", "--preset", "dev", "--target", "fastdraft_tests")
        run("ctest", "--preset", "dev")
    kernels, compiled = by_room.pop("kernels", []), by_room.pop("kernels_compiled", [])
    others = [name for room, names in by_room.items() if room != "hosts" for name in names]
    if others:
        run(*pytest, *others, OMP_NUM_THREADS="1")
    if kernels:
        run(*pytest, *kernels, OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
    if compiled:
        run(*pytest, "--dist", "loadgroup", *compiled, OMP_NUM_THREADS="1")


def needs(files: list[Path], environment: str) -> list[str]:
    """The targets of make that install what linting and testing `files` takes."""
    stamps = {".package"} if files else set()
    targets = set()
    if any(path.suffix in (".py", ".pyi", ".cc", ".h") for path in files):
        stamps.add(".lint")
    rooms = {Path(name).parts[1] for path in files for name in tests_of(path)}
    if any(path.suffix in (".cc", ".h") for path in files) or "cpp" in rooms:
        targets.add("gtest")
    if "replay" in rooms:
        targets.add("browser")
    # mypy of bench/ follows its imports into all of tests/support.
    if rooms - {"cpp", "hosts", *QUICK} or any(path.parts[0] == "bench" for path in files):
        stamps.add(".test-all")
    elif rooms - {"cpp", "hosts"}:
        stamps.add(".test")
    return sorted(targets) + [f"{environment}/{stamp}" for stamp in sorted(stamps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default="2", help="how many processes (default: %(default)s)")
    parser.add_argument("--needs", metavar="VENV", help="only name what has to be installed there")
    parser.add_argument("files", nargs="*", type=Path, help="instead of what has changed")
    arguments = parser.parse_args()
    files = arguments.files or changed()
    if arguments.needs:
        print(*needs(files, arguments.needs))
        return
    print("Checked:", *files, sep="\n  ")
    python = [str(path) for path in files if path.suffix in (".py", ".pyi")]
    cpp = [str(path) for path in files if path.suffix in (".cc", ".h")]
    if python:
        lint_python(python)
    if cpp:
        lint_cpp(cpp, arguments.jobs)
    test({name for path in files for name in tests_of(path)}, arguments.jobs)


def run(*command: str, **environment: str) -> None:
    """Runs a command; ends the check with its status if it fails."""
    print("$", *command, flush=True)
    done = subprocess.run(command, env=os.environ | environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


if __name__ == "__main__":
    main()
