"""The table that comes with fastdraft: its text, its file in the cache, and where it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import torch
import transformers

from byte_tokenizer import byte_tokenizer
from fastdraft import DraftConfig, Engine, NgramTable, hf
from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.files import cache_directory
from fastdraft.hf import plan
from fastdraft.memory.common_ngrams import (
    common_ngrams,
    common_texts,
    default_ngrams,
    tokenizer_file,
)
from fastdraft.memory.datastore import fingerprint
from fastdraft.memory.ngrams import build
from fastdraft.serving.host import Target, host_arguments
from fastdraft.serving.settings import MemorySettings
from hf_models import tiny_model


def file_in(cache: Path) -> Path:
    [path] = cache.glob("*.fdn")
    return path


def test_one_of_three_processes_counts_the_texts_of_the_package(
    whole_text_cache: Path, tmp_path: Path, model: Path
) -> None:
    code = (
        "import sys; from fastdraft.memory.common_ngrams import common_ngrams\n"
        "print(common_ngrams(sys.argv[1]))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, model], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    texts = list(common_texts())
    assert len(texts) > 500 and all(texts)
    encode = byte_tokenizer().encode
    build(
        tmp_path / "same.fdn",
        (encode(text, add_special_tokens=False) for text in texts),
        fingerprint=fingerprint(model),
    )
    printed = {process.communicate()[0].strip() for process in processes}
    table = common_ngrams(model)
    assert printed == {repr(table)}
    assert [path.suffix for path in sorted(whole_text_cache.iterdir())] == [".fdn", ".lock"]
    assert file_in(whole_text_cache).read_bytes() == (tmp_path / "same.fdn").read_bytes()
    assert table.fingerprint == fingerprint(model)
    guess = table.guess(encode("th", add_special_tokens=False), most=1)
    assert byte_tokenizer().decode([guess[0].token]) == "e"


def test_a_tokenizer_in_use_gives_the_same_file_and_stays_as_it_is(
    cache: Path, model: Path
) -> None:
    common_ngrams(model)
    content = file_in(cache).read_bytes()
    file_in(cache).unlink()
    tokenizer = byte_tokenizer(pad_token="a", padding_side="left", truncation_side="left")
    padded = tokenizer(["a", "ab"], padding="max_length", truncation=True, max_length=5)
    common_ngrams(tokenizer)
    assert file_in(cache).read_bytes() == content
    state = tokenizer.backend_tokenizer.to_str()
    assert common_ngrams(tokenizer).bytes == len(content)
    assert tokenizer.backend_tokenizer.to_str() == state
    again = tokenizer(["a", "ab"], padding="max_length", truncation=True, max_length=5)
    assert again == padded


def test_a_damaged_file_is_written_anew_and_a_whole_one_is_kept(cache: Path, model: Path) -> None:
    common_ngrams(model)
    path = file_in(cache)
    content, written = path.read_bytes(), path.stat().st_mtime_ns
    common_ngrams(model)
    assert path.stat().st_mtime_ns == written
    for damaged in (b"", content[:-1], content[:200] + b"?" + content[201:]):
        path.write_bytes(damaged)
        assert common_ngrams(model).bytes == len(content)
        assert path.read_bytes() == content


def test_a_table_that_cannot_be_kept_costs_drafts_alone(
    cache: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file")
    with pytest.raises(DatastoreError, match=f"cannot keep a table of n-grams in {cache}"):
        common_ngrams(model)
    with pytest.raises(InvalidValueError, match="tokenizer must be a tokenizer"):
        common_ngrams(3)
    with caplog.at_level("INFO"):
        assert default_ngrams(model, None) is None
    assert "drafts have no common n-grams: cannot keep" in caplog.text
    assert default_ngrams(None, 300) is None


@pytest.mark.usefixtures("cache")
def test_a_tokenizer_written_in_python_gets_no_table() -> None:
    tokenizer = transformers.ByT5Tokenizer()
    with pytest.raises(InvalidValueError, match=r"tokenizer\.json, got a ByT5Tokenizer without"):
        common_ngrams(tokenizer)
    assert default_ngrams(tokenizer, None) is None


@pytest.mark.usefixtures("cache")
def test_a_file_that_tokenizers_cannot_read_gives_no_table(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"type": "of tomorrow", "vocab": {"a": 0}}}')
    with pytest.raises(
        InvalidValueError, match=r"cannot read a tokenizer from .*tokenizer\.json: "
    ):
        common_ngrams(path)
    assert default_ngrams(path, None) is None


@pytest.mark.usefixtures("cache")
def test_a_vocabulary_that_lacks_tokens_gets_no_table(model: Path) -> None:
    table = default_ngrams(model, None)
    assert table is not None
    assert default_ngrams(model, table.largest_token) is None
    assert default_ngrams(model, table.largest_token + 1) is not None


def test_a_tokenizer_is_found_on_this_machine_alone(tmp_path: Path, model: Path) -> None:
    assert tokenizer_file(str(model)) == str(model / "tokenizer.json")
    for name in (str(tmp_path), "", "no/such-model", "no name"):
        assert tokenizer_file(name) is None


def test_the_cache_is_where_the_environment_says(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_directory() == cache
    monkeypatch.delenv("FASTDRAFT_CACHE")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert cache_directory() == Path.home() / ".cache" / "fastdraft"


@pytest.mark.usefixtures("cache")
def test_a_generation_has_it_where_its_tokenizer_is_known(model: Path) -> None:
    prompt = torch.tensor([[1, 2, 3]])

    def config_of(name: str, **options: object) -> DraftConfig:
        llama = tiny_model("llama", vocab_size=256)
        llama.name_or_path = name
        hf.generate(llama, prompt, max_new_tokens=2, **options)
        [engine] = plan._engines[llama].values()
        return engine.config

    for config in (config_of("", tokenizer=byte_tokenizer()), config_of(str(model))):
        assert isinstance(config.ngrams, NgramTable)
        assert config.ngrams.fingerprint == fingerprint(model)
    assert config_of("").ngrams is None
    assert config_of(str(model), drafter=DraftConfig()).ngrams is None


@pytest.mark.usefixtures("cache")
def test_a_host_has_it_unless_its_operator_says_otherwise(tmp_path: Path, model: Path) -> None:
    target = Target("any", str(model))
    own = tmp_path / "own.fdn"
    build(own, [[1, 2]] * 2)

    def engine(target: Target | None, config: DraftConfig | None = None, **given: object) -> Engine:
        settings = MemorySettings(**given)  # type: ignore[arg-type]
        made = host_arguments(settings, config or DraftConfig(), target)["engine"]
        assert isinstance(made, Engine)
        return made

    assert isinstance(engine(target).config.ngrams, NgramTable)
    assert engine(target, ngrams=None).config.ngrams is None
    assert repr(engine(target, ngrams=str(own)).config.ngrams) == repr(NgramTable.open(own))
    assert engine(None).config.ngrams is None
    assert engine(Target("any", str(tmp_path))).config.ngrams is None
    assert engine(target, DraftConfig(vocabulary=64)).config.ngrams is None
