"""`fastdraft datastore query`: what a frozen store finds, on the command line."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import command_line

fastdraft = functools.partial(command_line.fastdraft, "datastore")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = ["store", "holds", "text", "and", "finds", "it"]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="it"))  # type: ignore[arg-type]
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_query_shows_positions_and_the_text_behind_them(tmp_path: Path, tokenizer: Path) -> None:
    text, ids, out = tmp_path / "a.txt", tmp_path / "b.npy", tmp_path / "out.fds"
    text.write_text("store holds text and finds it\nstore holds it")
    np.save(ids, np.arange(20, 32))
    assert fastdraft("build", out, text, ids, "--tokenizer", tokenizer).exit_code == 0
    shown = fastdraft("query", out, "it store holds", "--tokenizer", tokenizer)
    assert shown.stdout.splitlines() == [
        "occurrences: 2",
        "3 tokens, at 9: 'it'",
        "2 tokens, at 3: 'text and finds it store holds it'",
    ]
    shown = fastdraft("query", out, "20 21 22", "--tokens", 2)
    assert shown.stdout == "occurrences: 1\n3 tokens, at 14: 23 24\n"
    assert fastdraft(
        "query", out, "it store holds", "--tokenizer", tokenizer, "--most", 1
    ).stdout.startswith("occurrences: 1\n")
    assert fastdraft("query", out, "31").stdout == "occurrences: 0\n"


def test_query_names_what_it_cannot_take(tmp_path: Path, tokenizer: Path) -> None:
    ids, out = tmp_path / "a.npy", tmp_path / "out.fds"
    np.save(ids, np.arange(9))
    assert fastdraft("build", out, ids, "--tokenizer", tokenizer).exit_code == 0
    refused = fastdraft("query", out, "finds it")
    assert refused.exit_code == 2
    assert "text needs --tokenizer" in refused.stderr
    tokenizer.write_text(tokenizer.read_text().replace("holds", "hold"))
    refused = fastdraft("query", out, "finds it", "--tokenizer", tokenizer)
    assert refused.exit_code == 1
    assert "another tokenizer" in refused.stderr
