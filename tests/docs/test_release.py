"""The files that name the version agree."""

from __future__ import annotations

import re

import pytest

import fastdraft
from pages import ROOT

RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)


def check(version: str, changelog: str, citation: str) -> None:
    """Raises AssertionError where they do not agree."""
    headings = re.findall(r"^## .*$", changelog, re.MULTILINE)
    assert headings[0] == "## [Unreleased]"
    assert all(RELEASE.fullmatch(heading) for heading in headings[1:])
    releases = [
        (tuple(map(int, number.split("."))), day) for number, day in RELEASE.findall(changelog)
    ]
    assert releases == sorted(releases, reverse=True)
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [version]
    days = re.findall(r'^date-released: "?(.*?)"?$', citation, re.MULTILINE)
    numbers = tuple(map(int, version.split(".")))
    if releases and releases[0][0] >= numbers:
        assert releases[0] == (numbers, *days)
    else:
        assert not days, "a version that is not in the changelog has no date"


def test_versions_agree() -> None:
    check(
        fastdraft.__version__,
        (ROOT / "CHANGELOG.md").read_text(),
        (ROOT / "CITATION.cff").read_text(),
    )


def test_what_does_not_agree_is_noticed() -> None:
    log = "## [Unreleased]\n## [0.2.0] - 2027-01-02\n## [0.1.0] - 2026-12-01\n"
    check("0.2.0", log, "version: 0.2.0\ndate-released: 2027-01-02\n")
    check("0.3.0", log, "version: 0.3.0\n")
    for version, citation in (
        ("0.2.0", "version: 0.1.0\ndate-released: 2027-01-02\n"),
        ("0.2.0", "version: 0.2.0\ndate-released: 2026-12-01\n"),
        ("0.1.0", "version: 0.1.0\ndate-released: 2026-12-01\n"),
        ("0.3.0", "version: 0.3.0\ndate-released: 2027-01-02\n"),
    ):
        with pytest.raises(AssertionError):
            check(version, log, citation)
