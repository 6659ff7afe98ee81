"""The pages for readers and their code, so that what is copied from there is what is tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(
    r"(?:^<!-- (?P<remark>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_WHOLE_PAGE = re.compile(r"^<!-- (not run on this page: .*?) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        page: The file.
        line: Of its first line of code, from 1.
        language: As the fence names it.
        code: Without the fence.
        remark: The HTML comment before it, or the page's; empty where there is none.
    """

    page: Path
    line: int
    language: str
    code: str
    remark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """The page's blocks in the given languages, in their order."""
    text = page.read_text(encoding="utf-8")
    whole = _WHOLE_PAGE.search(text)
    found = []
    for match in _FENCE.finditer(text):
        if match["language"] in languages:
            line = text.count("\n", 0, match.start("code")) + 1
            code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
            remark = match["remark"] or (whole[1] if whole else "")
            found.append(Block(page, line, match["language"], code, remark))
    return found


def code(page: str, containing: str) -> str:
    """The one block of Python on docs/`page` that holds `containing`."""
    found = [each.code for each in blocks(ROOT / "docs" / page, "python")]
    found = [each for each in found if containing in each]
    assert len(found) == 1, f"{len(found)} blocks of {page} hold {containing!r}"
    return found[0]
