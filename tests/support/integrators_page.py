"""The code of the integrators' page, so that what is copied from there is what is tested."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "python" / "fastdraft" / "integrations" / "README.md"


def blocks() -> list[str]:
    """The page's Python code, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text(), re.DOTALL | re.MULTILINE)


def code(containing: str) -> str:
    """The one block that holds `containing`."""
    found = [block for block in blocks() if containing in block]
    assert len(found) == 1, f"{len(found)} blocks of the page hold {containing!r}"
    return found[0]
