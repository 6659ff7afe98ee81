"""A fleet in SGLang's corpus, and what hosts know of their tokenizers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdraft import Memory
from fastdraft.errors import InvalidValueError
from fastdraft.memory.datastore import fingerprint
from fastdraft.memory.sharing import Objects
from fastdraft.serving.host import Target, open_replica
from fastdraft.serving.sglang import Corpus
from fleets import KEY, contents

TOKENIZER = '{"model": {"vocab": {"a": 0, "b": 1}, "merges": []}}'


def test_sglang_shares_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDRAFT_MEMORY_URL", str(tmp_path / "fleet"))
    monkeypatch.setenv("FASTDRAFT_MEMORY_KEY", KEY.decode())
    server_args = SimpleNamespace(tp_size=1, model_path="model", tokenizer_path=None)
    corpora = [Corpus(draft_token_num=8, server_args=server_args) for _ in range(2)]
    for corpus in corpora:
        assert corpus.replica is not None
        corpus.memory.of("t")[0].add([1, 2, 3])
        assert corpus.replica.refresh()
    assert len(contents(str(tmp_path / "fleet"))) == 2
    for corpus in corpora:
        assert corpus.replica is not None
        corpus.replica.close()
    monkeypatch.delenv("FASTDRAFT_MEMORY_KEY")
    with pytest.raises(InvalidValueError, match="FASTDRAFT_MEMORY_KEY, got none"):
        Corpus(draft_token_num=8, server_args=server_args)
    monkeypatch.delenv("FASTDRAFT_MEMORY_URL")
    assert Corpus(draft_token_num=8).replica is None


def test_models_with_the_same_tokenizer_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTDRAFT_MEMORY_KEY", KEY.decode())
    url = str(tmp_path / "fleet")
    found = set()
    for number, text in enumerate((TOKENIZER, TOKENIZER, TOKENIZER.replace('"b"', '"c"'))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(text)
        replica = open_replica(Memory(1 << 20), url, Target("model", str(folder)))
        replica.memory.of("t")[0].add([1, 2, 3])
        assert replica.refresh()
        found.add(fingerprint(folder))
        replica.close()
    assert len(found) == 2 and len(Objects(url, KEY).ls()) == 2
    # One that is nowhere has no fingerprint.
    open_replica(Memory(1 << 20), url, Target("model", "none/such")).close()
