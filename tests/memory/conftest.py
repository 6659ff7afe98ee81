"""Tables of n-grams: a folder for the one that comes with fastdraft, and a tokenizer."""

from __future__ import annotations

import bz2
from pathlib import Path

import pytest

from fastdraft.memory import common_ngrams


@pytest.fixture
def whole_text_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cache(whole_text_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, for tables of a part of the text: all of it takes a byte tokenizer seconds."""
    lines = bz2.decompress(common_ngrams._packed()).splitlines(keepends=True)
    part = bz2.compress(b"".join(lines[:400]))
    monkeypatch.setattr(common_ngrams, "_packed", lambda: part)
    return whole_text_cache


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of bytes."""
    pytest.importorskip("transformers")
    from byte_tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    return folder
