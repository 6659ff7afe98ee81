"""Runs clang-tidy on all C++ sources, or the targets of changed files: `make lint`, `make check`.

The sources of a target are read as one file. Apart they take three times as long: most of it goes
into headers that each includes again. They stand one after another in a real file, since the static
analyzer follows no paths through functions of files that another includes. What is found is
reported where it stands.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "dev"
JOINED = ROOT / "build" / "tidy"


def targets() -> dict[str, list[dict[str, str]]]:
    """The commands that compile this project's sources, by the folder of their target's objects."""
    found: dict[str, list[dict[str, str]]] = {}
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        # Fuzzers have one entry point each, and cannot stand in one file.
        if source.suffix == ".cc" and BUILD not in source.parents and source.parent.name != "fuzz":
            target = re.search(r"(\w+)\.dir/", entry["output"])
            assert target is not None, entry["output"]
            found.setdefault(target[1], []).append(entry)
    return found


def concerns(file: Path, entries: list[dict[str, str]]) -> bool:
    """Whether a target is made of a changed file: all are of the core's headers."""
    sources = [Path(entry["file"]) for entry in entries]
    if file.suffix == ".cc":
        return ROOT / file in sources
    folder = ROOT / file.parts[0]
    return folder.name == "csrc" or any(folder in source.parents for source in sources)


def tidy(target: str, entries: list[dict[str, str]]) -> tuple[int, str]:
    """What clang-tidy says of a target's sources, and how it ended."""
    folder = JOINED / target
    folder.mkdir(parents=True, exist_ok=True)
    joined = folder / "sources.cc"
    sources = [Path(entry["file"]) for entry in entries]
    starts: list[int] = []
    lines: list[str] = []
    for source in sources:
        starts.append(len(lines) + 1)
        lines += source.read_text().splitlines()
    joined.write_text("\n".join([*lines, ""]))

    # Checks are chosen by the folder that a file lies in.
    checks = next(
        path for parent in sources[0].parents if (path := parent / ".clang-tidy").exists()
    )
    (folder / ".clang-tidy").write_text(checks.read_text())
    beside = " ".join(f"-I{parent}" for parent in sorted({path.parent for path in sources}))
    command = entries[0]["command"].replace(entries[0]["file"], f"{beside} {joined}")
    entry = {"directory": str(BUILD), "file": str(joined), "command": command}
    (folder / "compile_commands.json").write_text(json.dumps([entry]))

    done = subprocess.run(
        ["clang-tidy", "--quiet", "-p", str(folder), str(joined)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def where(match: re.Match[str]) -> str:
        line = int(match[1])
        place = bisect_right(starts, line) - 1
        return f"{sources[place].relative_to(ROOT)}:{line - starts[place] + 1}"

    return done.returncode, re.sub(rf"{re.escape(str(joined))}:(\d+)", where, done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("files", nargs="*", type=Path, help="what has changed (default: anything)")
    arguments = parser.parse_args()
    found = {
        target: entries
        for target, entries in targets().items()
        if not arguments.files or any(concerns(file, entries) for file in arguments.files)
    }
    failed = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for target, (ended, said) in zip(found, pool.map(tidy, found, found.values()), strict=True):
            print(said, end="", flush=True)
            if ended:
                failed.append(target)
    if failed:
        sys.exit(f"clang-tidy failed on {', '.join(failed)}")


if __name__ == "__main__":
    main()
