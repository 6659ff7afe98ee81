"""A fleet in SGLang's corpus, and what hosts know of their tokenizers."""

from __future__ import annotations

from collections import ChainMap
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdraft import Memory
from fastdraft.datastore import fingerprint
from fastdraft.errors import InvalidValueError
from fastdraft.fleet import Manifest, groups
from fastdraft.fleet.objects import Objects
from fastdraft.integrations.host import Namespace, share
from fastdraft.integrations.metrics import SOURCES, Totals
from fastdraft.integrations.sglang import Corpus
from fleets import KEY

TOKENIZER = '{"model": {"vocab": {"a": 0, "b": 1}, "merges": []}}'


def test_sglang_shares_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDRAFT_FLEET_URL", str(tmp_path / "fleet"))
    monkeypatch.setenv("FASTDRAFT_MEMORY_KEY", KEY.decode())
    server_args = SimpleNamespace(tp_size=1, model_path="model", tokenizer_path=None)
    corpora = [Corpus(draft_token_num=8, server_args=server_args) for _ in range(2)]
    for corpus in corpora:
        assert corpus.replica is not None
        corpus.memory.of("t")[0].add([1, 2, 3])
        assert corpus.replica.refresh()
    [published] = groups(Objects(str(tmp_path / "fleet")), KEY)
    assert len(published.texts(Manifest())) == 2
    for corpus in corpora:
        assert corpus.replica is not None
        corpus.replica.close()
    with pytest.raises(InvalidValueError, match="must not be set with tp_size 2"):
        Corpus(draft_token_num=8, server_args=SimpleNamespace(tp_size=2))
    monkeypatch.delenv("FASTDRAFT_MEMORY_KEY")
    with pytest.raises(InvalidValueError, match="FASTDRAFT_MEMORY_KEY, got none"):
        Corpus(draft_token_num=8, server_args=server_args)
    monkeypatch.delenv("FASTDRAFT_FLEET_URL")
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
        replica = share(Memory(1 << 20), url, model="model", tokenizer=str(folder))
        replica.memory.of("t")[0].add([1, 2, 3])
        assert replica.refresh()
        found.add(fingerprint(folder))
        replica.close()
    assert len(found) == 2 and len(groups(Objects(url), KEY)) == 2
    # One that is nowhere has no fingerprint.
    share(Memory(1 << 20), url, model="model", tokenizer="none/such").close()


def merged(reports: list[Totals]) -> dict[str, float]:
    """What the reports leave."""
    return dict(ChainMap(*map(dict, reversed(reports))))


def test_sglang_counts_what_one_replica_drafts_from_anothers_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "fleet")
    monkeypatch.setenv("FASTDRAFT_FLEET_URL", url)
    monkeypatch.setenv("FASTDRAFT_MEMORY_KEY", KEY.decode())
    server_args = SimpleNamespace(tp_size=1, model_path="model", tokenizer_path=None)
    told: list[list[Totals]] = [[], []]
    writer, reader = (
        Corpus(draft_token_num=8, server_args=server_args, report=reports.append)
        for reports in told
    )
    assert writer.replica is not None and reader.replica is not None
    text = list(range(40, 60))

    def serve(corpus: Corpus, rid: str) -> None:
        params = {"fastdraft_namespace": "tenant"}
        req = SimpleNamespace(
            rid=rid,
            origin_input_ids=text[:4],
            output_ids=[],
            sampling_params=SimpleNamespace(custom_params=params, max_new_tokens=64),
        )
        corpus.begin([req])
        while len(req.output_ids) < len(text) - 4:
            said = [*text[:4], *req.output_ids]
            tokens, _ = corpus.batch_get([rid], [said[-8:]], [len(said)])
            # The target says the text; of the first path of the tree what agrees is accepted.
            accepted = 0
            while accepted < 7 and text[len(said) + accepted :][:1] == [tokens[1 + accepted]]:
                accepted += 1
            end = len(said) + accepted + 1
            req.output_ids.extend(text[len(said) : end])
        corpus.erase_match_state([rid])

    serve(writer, "a")
    assert sum(merged(told[0]).get(f"named_{source}", 0.0) for source in SOURCES) == 0
    reader.replica.find([Namespace(name="tenant")])  # a first request would: fetched from now on
    assert writer.replica.refresh()
    for published in groups(Objects(url), KEY):
        published.join()
    assert reader.replica.refresh()
    assert len(reader.memory.namespaces) == 0
    serve(reader, "b")
    totals = merged(told[1])
    assert totals["named_read_only"] > 8
    assert totals["named_read_only"] == reader.stats.accepted
    assert totals["manifest_number"] == 1 and totals["published_bytes"] > 0
    assert totals["steps"] >= 1 and totals["seconds"] > 0 and totals["requests"] == 0
    of_writer = merged(told[0])
    assert of_writer["steps"] > totals["steps"]
    assert of_writer["published_tokens"] == len(text)
    for corpus in (writer, reader):
        assert corpus.replica is not None
        corpus.replica.close()
