"""Names and comments of the code use the field's words, as the pages do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("csrc", "kernels", "python/fastdraft", "bench/cpp"),
    *(f"tests/{room}" for room in ("bench", "campaign", "cli", "core", "cpp", "docs", "drafters")),
    *(f"tests/{room}" for room in ("examples", "hf", "kernels", "kernels_compiled", "late")),
    *(f"tests/{room}" for room in ("memory", "package", "replay", "serving", "support")),
    "tests/verification",
)
# Each with the word to write.
WORDS = {
    "chance": "probability",
    "came": "observed",
    "footing": "match kind",
    "hopeful": "optimistic",
    "lesson": "sample",
    "moment": "version",
    "place": "index, slot or position",
    "told": "predicted",
}
# Parts of names in any style, and words of comments.
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
SO_MANY = re.compile(r"\bso (many|much)\b", re.IGNORECASE)  # n
# A comment or docstring that begins so names no noun.
BEGINNING = re.compile(r"^(?:# |// |r?\"\"\")(?:What|Whether|Where|Of|So)\b")
COMMENT = re.compile(r"^(?:#|//) ")


def findings(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers, and what is wrong there."""
    before = ""
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        for part in map(str.lower, PART.findall(line)):
            word = part.removesuffix("s")
            if word in WORDS:
                yield number, f"{part}: write {WORDS[word]}"
        if SO_MANY.search(line):
            yield number, "so many, so much: write n"
        if BEGINNING.match(line) and not COMMENT.match(before):
            yield number, line
        before = line


def sources() -> Iterator[Path]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".h", ".cc", ".py") and path != Path(__file__):
                yield path


def test_the_code_uses_the_fields_words() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {what}"
        for path in sources()
        for number, what in findings(path.read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_finding_is_found() -> None:
    wrong = "// Whether it is.\nfloat a_chance;\nint kMostPlaces, MOST_PLACES;\n// Keeps so many.\n"
    assert [number for number, _ in findings(wrong)] == [1, 2, 3, 3, 4]
    right = "std::vector<int>().emplace();\n// The probability\n// of so-called places_: replaced\n"
    assert [number for number, _ in findings(right)] == [3]
