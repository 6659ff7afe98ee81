"""What the pages for readers name is there, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastdraft.cli.doctor import HOSTS
from pages import PAGES, ROOT

# Pages may leave out what comes before a room's name.
ROOTS = (ROOT, ROOT / "python" / "fastdraft", ROOT / "tests")
# What is built, installed or read, and so in no checkout.
ABSENT = ("build", ".venv")

LINK = re.compile(r"\]\(([^)\s]+)\)")
# Two or more names with a slash between them or behind the last one, not part of an address.
NAMED = re.compile(r"(?<![\w/.:@~$-])(?:[\w.*-]+/)+(?:[\w*-]+(?:\.[\w*-]+)*)?")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def exists(name: str) -> bool:
    """Whether a page's name for a file or a folder means one; HOST and the like mean any name."""
    patterns = (name, re.sub(r"[A-Z]{3,}", "*", name) if not name.endswith(".md") else name)
    return any(any(root.glob(pattern)) for root in ROOTS for pattern in patterns)


def is_ours(name: str) -> bool:
    """Whether a name begins as a path in the tree does."""
    first = name.split("/")[0]
    return first not in ABSENT and any((root / first).is_dir() for root in ROOTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = text_of(page)
    named = {name.rstrip("/") for name in NAMED.findall(LINK.sub("]", text)) if is_ours(name)}
    assert not sorted(name for name in named if not exists(name))


def anchors(page: Path) -> set[str]:
    """What GitHub calls the page's headings."""
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
