"""The patches for vLLM apply to the released source, and their tests pass with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from upstream import applied, applies, patches, run_tests
from vllm_source import drafts_ngrams_on_v2, sources

RECENT = [source for source in sources() if drafts_ngrams_on_v2(source)]


@pytest.mark.parametrize("source", RECENT, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("patch", patches("vllm"), ids=lambda path: path.stem)
def test_each_applies_by_itself(patch: Path, source: Path, tmp_path: Path) -> None:
    applies(patch, source, tmp_path)


def test_their_own_tests_pass(tmp_path: Path) -> None:
    root = applied("vllm", sources()[0], tmp_path)
    run_tests("vllm", tmp_path, root)
