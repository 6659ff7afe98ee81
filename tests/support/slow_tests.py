"""Which tests `make test` leaves to `make test-all`."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
# The rooms of `make test`. Single files and tests there are marked slow.
QUICK = ("core", "docs", "hf", "kernels", "late", "memory", "package", "serving", "verification")
# It needs a server of S3.
SLOW = ("memory", "sharing")


def is_slow(path: Path) -> bool:
    """True if all tests of a file are slow."""
    return not is_quick_room(path) or "\npytestmark = pytest.mark.slow\n" in path.read_text("utf-8")


def is_quick_room(path: Path) -> bool:
    """True if a file or folder below that of all tests belongs to a quick room."""
    parts = path.relative_to(TESTS).parts
    return parts[0] in QUICK and parts[:2] != SLOW
