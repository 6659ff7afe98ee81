"""Which tests `make test` leaves to `make test-all`."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
# The rooms of `make test`. Single files and tests there are marked slow.
QUICK = ("core", "docs", "hf", "kernels", "package", "serving", "verification")


def is_slow(path: Path) -> bool:
    """Whether all tests of a file are slow."""
    return not is_quick_room(path) or "\npytestmark = pytest.mark.slow\n" in path.read_text("utf-8")


def is_quick_room(path: Path) -> bool:
    """Whether a file or folder below that of all tests belongs to a quick room."""
    return path.relative_to(TESTS).parts[0] in QUICK
