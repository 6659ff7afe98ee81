"""Hosts share their memory by their tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdraft import Memory
from fastdraft.memory.datastore import fingerprint
from fastdraft.memory.sharing import Objects
from fastdraft.serving.host import Target, open_replica
from fleets import KEY

TOKENIZER = '{"model": {"vocab": {"a": 0, "b": 1}, "merges": []}}'


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
