"""Files that the pages for readers name exist, and their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdraft.cli.doctor import HOSTS
from pages import PAGES, ROOT, blocks

# Pages may leave out what comes before a room's name.
ROOTS = (ROOT, ROOT / "python" / "fastdraft", ROOT / "tests")
# Folders that are built or installed, and so in no checkout.
ABSENT = ("build", ".venv")

LINK = re.compile(r"\]\(([^)\s]+)\)")
# Two or more names with a slash between them or behind the last one, not part of an address.
NAMED = re.compile(r"(?<![\w/.:@~$-])(?:[\w.*-]+/)+(?:[\w*-]+(?:\.[\w*-]+)*)?")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def exists(name: str) -> bool:
    """Says whether a page's name of a file or folder means one; HOST and the like are any name."""
    patterns = (name, re.sub(r"[A-Z]{3,}", "*", name) if not name.endswith(".md") else name)
    return any(any(root.glob(pattern)) for root in ROOTS for pattern in patterns)


def is_ours(name: str) -> bool:
    """Says whether a name begins as a path in the tree does."""
    first = name.split("/")[0]
    return first not in ABSENT and any((root / first).is_dir() for root in ROOTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = text_of(page)
    named = {name.rstrip("/") for name in NAMED.findall(LINK.sub("]", text)) if is_ours(name)}
    assert not sorted(name for name in named if not exists(name))


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(text_of(page)) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_a_wrong_name_is_noticed() -> None:
    assert exists("hf/loop.py") and exists("tests/hosts/test_HOST.py") and exists("csrc/src/*/*.cc")
    assert not exists("hf/loops.py") and not exists("docs/HOST.md")
    assert NAMED.findall("see `hf/loop.py`, csrc/src/ and https://a.b/c/d.") == [
        "hf/loop.py",
        "csrc/src/",
    ]


def test_the_installation_has_what_doctor_says_was_tested() -> None:
    lines = text_of(ROOT / "docs/start/install.md").splitlines()
    for host in HOSTS:
        rows = [line for line in lines if line.startswith(f"| {host.title}")]
        for part in host.tested.split(", "):
            assert any(part in row for row in rows), (host.title, part)


FRONT, INSTALLATION = ROOT / "README.md", ROOT / "docs" / "start" / "install.md"
INSTALLS = re.compile(r"\bpip install\b[^\n`]*(?:\bfastdraft\b| '?\.(?:\[|[ '\n]))")


def test_one_line_says_how_to_install() -> None:
    """A release changes README's line, and no other page has one of its own."""
    (front,) = [each.code for each in blocks(FRONT, "bash") if INSTALLS.search(each.code)]
    (page,) = [each.code for each in blocks(INSTALLATION, "bash") if INSTALLS.search(each.code)]
    assert page == front
    examples = [each for end in ("py", "ipynb") for each in ROOT.glob(f"examples/**/*.{end}")]
    releasing = ROOT / "docs" / "contributing" / "maintaining.md"
    others = [each for each in (*PAGES, *examples) if each not in (FRONT, INSTALLATION, releasing)]
    assert len(others) > 40
    assert not [str(each) for each in others if INSTALLS.search(text_of(each))]


def test_an_extra_is_added_to_what_is_installed() -> None:
    """README's second line, and what errors say to install, ask no index for fastdraft."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "fastdraft[demo]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied: fastdraft[demo]" in done.stdout


def test_another_line_that_installs_is_noticed() -> None:
    for line in ("pip install fastdraft", "pip install 'fastdraft[cli]'", "pip install '.[hf]'"):
        assert INSTALLS.search(line) and INSTALLS.search(f"text `{line}` text")
    assert INSTALLS.search("pip install .\n")
    assert not INSTALLS.search("pip install torch\nfastdraft doctor")
