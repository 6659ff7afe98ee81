"""Tables of n-grams, held against dictionaries, and what they promise of their files."""

from __future__ import annotations

import copy
import json
import pickle
import struct
from collections.abc import Sequence
from itertools import chain
from math import log2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import fastdraft, succeed
from fastdraft import Datastore, DraftConfig, Engine, NgramTable, Source
from fastdraft.config import PromptLookup
from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.memory.datastore import fingerprint
from fastdraft.memory.ngrams import NgramGuess, build
from oracles.ngram_table import count, guess

LARGEST = (1 << 20) - 1
HEADER = 96
CHECKSUM = HEADER - 4
# Few tokens, of which contexts return, and the largest one.
tokens = st.integers(0, 3) | st.just(LARGEST)
texts_of_groups = st.lists(st.tuples(st.lists(tokens, max_size=20), st.integers(0, 4)), max_size=12)


def guessed(table: NgramTable, text: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """As the oracle has them: token, order, half bits."""
    return [
        (each.token, each.order, round(-2 * log2(each.probability)))
        for each in table.guess(text, most=most)
    ]


@settings(max_examples=300, deadline=None)
@given(texts_of_groups, st.lists(st.lists(tokens, max_size=5), max_size=5), st.integers(1, 24))
def test_a_table_is_the_oracles(
    tmp_path_factory: pytest.TempPathFactory,
    given_texts: list[tuple[list[int], int]],
    asked: list[list[int]],
    most: int,
) -> None:
    path = tmp_path_factory.mktemp("tables") / "table.fdn"
    texts, groups = [text for text, _ in given_texts], [group for _, group in given_texts]
    build(path, texts, groups=groups)
    table, oracle = NgramTable.open(path), count(texts, groups)
    assert table.num_contexts == len(oracle)
    assert table.num_entries == sum(map(len, oracle.values()))
    assert table.largest_token == max(chain(*texts), default=-1)
    assert table.bytes == path.stat().st_size
    for text in [*map(list, oracle), *asked, *texts]:
        assert guessed(table, text, most) == guess(oracle, text, most)
        known = [
            text[i] in [token for token, *_ in guess(oracle, text[:i], most)]
            for i in range(1, len(text))
        ]
        assert table.count_known(text, most=most) == sum(known)


def test_a_large_text_is_counted_as_the_oracle_does(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    texts = [(random.zipf(1.3, 300) % 50_000).tolist() for _ in range(60)]
    build(tmp_path / "table.fdn", texts)
    table, oracle = NgramTable.open(tmp_path / "table.fdn"), count(texts, range(60))
    assert table.num_contexts == len(oracle) > 900
    for context in oracle:
        assert guessed(table, context, 24) == guess(oracle, context, 24)


def test_answers_to_one_question_count_once(tmp_path: Path) -> None:
    build(tmp_path / "one.fdn", [[1, 2, 3]] * 5, groups=[7] * 5)
    assert NgramTable.open(tmp_path / "one.fdn").num_contexts == 0
    build(tmp_path / "two.fdn", [[1, 2, 3]] * 5, groups=[7, 7, 8, 8, 8])
    table = NgramTable.open(tmp_path / "two.fdn")
    assert [g.token for g in table.guess([1, 2])] == [3]
    assert table.guess([0]) == table.guess([]) == []
    with pytest.raises(ValueError, match="zip"):
        build(tmp_path / "three.fdn", [[1, 2, 3]] * 5, groups=[7])


def table_of(folder: Path, texts: Sequence[Sequence[int]], mark: bytes | None = None) -> NgramTable:
    build(folder / "table.fdn", texts, fingerprint=mark)
    return NgramTable.open(folder / "table.fdn")


def test_numbers_out_of_range_are_refused(tmp_path: Path) -> None:
    for text, message in (
        ([1, -1], "token_ids must be from 0 to 1048575, got -1 at index 1"),
        ([LARGEST + 1], "token_ids must be from 0 to 1048575, got 1048576 at index 0"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            build(tmp_path / "table.fdn", [text])
    with pytest.raises(InvalidValueError, match="group must be at least 0, got -1"):
        build(tmp_path / "table.fdn", [[1]], groups=[-1])
    assert list(tmp_path.iterdir()) == []
    table = table_of(tmp_path, [[1, 2]] * 2)
    for most in (0, 25):
        with pytest.raises(InvalidValueError, match=f"most must be at .* got {most}"):
            table.guess([1], most=most)
    with pytest.raises(TypeError, match=r"NgramTable\.open"):
        NgramTable()


def test_a_file_that_is_no_table_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path, other = tmp_path / "table.fdn", tmp_path / "other.fdn"
    table = table_of(tmp_path, [[1, 2, 3, 4]] * 2, b"t" * 32)
    content = path.read_bytes()

    def newer(header: bytes) -> bytes:
        return header[:8] + struct.pack("<I", 2) + header[12:]

    def refusal(content: bytes, **options: bytes) -> str:
        other.write_bytes(content)
        with pytest.raises(DatastoreError) as refused:
            NgramTable.open(other, **options)
        return str(refused.value).removeprefix(f"{other}: ")

    assert refusal(b"") == refusal(b"text") == refusal(b"x" * 4096) == "not a table of n-grams"
    assert refusal(content[:50]) == "truncated: 50 bytes are less than a header"
    size = len(content)
    assert refusal(content[:-1]) == f"truncated or overwritten: it has {size - 1} bytes of {size}"
    assert refusal(newer(content)) == (
        "written in version 2 of the format, this fastdraft reads version 1"
    )
    assert refusal(content, fingerprint=b"u" * 32) == (
        f"of another tokenizer: its fingerprint is {'74' * 32}, expected {'75' * 32}"
    )
    with pytest.raises(DatastoreError, match=r"cannot open .*: No such file"):
        DraftConfig(ngrams=tmp_path / "none.fdn")
    assert NgramTable.open(path, fingerprint=b"t" * 32).fingerprint == table.fingerprint


def test_each_damaged_byte_is_noticed(tmp_path: Path) -> None:
    table_of(tmp_path, [[1, 2, 3, 4], [2, 3, 5]] * 2)
    content = (tmp_path / "table.fdn").read_bytes()
    for offset in range(len(content)):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << offset % 8
        (tmp_path / "damaged.fdn").write_bytes(damaged)
        with pytest.raises(DatastoreError):
            NgramTable.open(tmp_path / "damaged.fdn")


def test_a_config_opens_the_table_and_checks_that_it_fits(tmp_path: Path) -> None:
    table = table_of(tmp_path, [[1, 2, 30]] * 2, b"t" * 32)
    assert isinstance(DraftConfig(ngrams=str(tmp_path / "table.fdn")).ngrams, NgramTable)
    with pytest.raises(InvalidValueError, match="got a table with token 30 for a vocabulary of 30"):
        DraftConfig(ngrams=table, vocabulary=30)
    DraftConfig(ngrams=table, vocabulary=31, tree_budget=8)
    with pytest.raises(InvalidValueError, match="ngrams must be a table of n-grams or the path"):
        DraftConfig(ngrams=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="ngrams is for the default drafter"):
        DraftConfig(ngrams=table, drafter=PromptLookup())
    with pytest.raises(InvalidValueError, match="datastores and ngrams must be of one tokenizer"):
        Engine(DraftConfig(ngrams=table), datastores=[Datastore(fingerprint=b"u" * 32)])
    Engine(DraftConfig(ngrams=table), datastores=[Datastore(fingerprint=b"t" * 32), Datastore()])


def test_a_table_is_shared_and_goes_to_other_processes_by_its_path(tmp_path: Path) -> None:
    table = table_of(tmp_path, [[1, 2, 3]] * 2, b"t" * 32)
    assert copy.deepcopy(table) is table
    other = pickle.loads(pickle.dumps(DraftConfig(ngrams=table))).ngrams
    assert other.guess([1, 2]) == table.guess([1, 2]) == [NgramGuess(3, 2, 1.0)]
    assert repr(table) == "<NgramTable, 3 n-grams after 3 contexts, 127 bytes>"


def test_text_without_a_match_is_drafted_from_the_table(tmp_path: Path) -> None:
    table = table_of(tmp_path, [[1, 2, 3, 4, 5], [9, 2, 3, 4, 5]] * 20)
    with_table = Engine(DraftConfig(ngrams=table, lookahead=3), datastores=[])
    request = with_table.add_request([8, 1, 2])
    draft = with_table.propose(request, token_cost=0)
    assert draft.tolist() == [3, 4, 5]
    assert set(draft.sources.tolist()) == {Source.NGRAMS}
    with_table.observe(request, [3, 4, 5, 7])
    assert with_table.finish(request).accepted_by_source[Source.NGRAMS] == 3
    without = Engine(DraftConfig(lookahead=3), datastores=[])
    assert without.propose(without.add_request([8, 1, 2]), token_cost=0).tolist() == []
    # A long match is followed without a look at the table.
    copied = with_table.add_request([1, 2, 3, 4, 6, 0, 1, 2, 3, 4])
    assert with_table.propose(copied, token_cost=0).tolist() == [6, 0, 1]


def test_the_command_counts_answers_once_a_question_and_reports(
    tmp_path: Path, model: Path
) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.fdn"
    lines = [
        {"prompt": f"question {number // 2}", "output": f"The answer is {number % 2}."}
        for number in range(40)
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    option = ("--tokenizer", model)
    built = succeed("ngrams", "build", out, log, "--answers", "--no-common", *option)
    table = NgramTable.open(out, fingerprint=fingerprint(model))
    assert f"{table.num_entries} n-grams after {table.num_contexts} contexts" in built.output
    assert "from 640 tokens in 20 texts" in built.output
    # Two questions of twenty are held out; in their answers all is known.
    assert "held out: 100.0% of 60 tokens of every tenth text" in built.output
    with_common = succeed("ngrams", "build", out, log, "--answers", *option)
    assert "held out: 100.0% of 60 tokens" in with_common.output
    assert NgramTable.open(out).num_entries > 1000 > table.num_entries
    shown = succeed("ngrams", "info", out, "The answer i", *option)
    assert fingerprint(model).hex() in shown.output
    assert "'s', after the last 3" in shown.output


def test_the_command_cuts_long_texts_and_takes_any_file(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be. " * 200)
    (tmp_path / "b.jsonl").write_text('{"text": "to be"}\n{"text": [1, 2, 3]}\n')
    np.save(tmp_path / "c.npy", np.arange(20, 32).reshape(2, 6))
    inputs = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.npy")]
    out, option = tmp_path / "out.fdn", ("--tokenizer", model)
    built = succeed("ngrams", "build", out, *inputs, "--no-common", *option)
    assert "from 4,020 tokens in 8 texts" in built.output  # 4 pieces of the first file
    assert "held out" not in built.output
    for arguments, message in (
        (["build", tmp_path / "o.fdn", inputs[0]], "Missing option '--tokenizer'"),
        (["info", inputs[0]], "a.txt: not a table of n-grams"),
        (["info", tmp_path / "out.fdn", "to"], "TEXT needs --tokenizer"),
    ):
        refused = fastdraft("ngrams", *arguments)
        assert refused.exit_code != 0
        assert message in refused.output
    assert not (tmp_path / "o.fdn").exists()


@pytest.mark.usefixtures("cache")
def test_replay_drafts_from_a_table(tmp_path: Path, model: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.fdn"
    answer = "This is an important step, which no prompt holds: xqzj."
    log.write_text(json.dumps({"prompt": "2 + 2", "output": answer}) + "\n")
    texts = tmp_path / "texts.jsonl"
    texts.write_text(2 * (json.dumps({"text": answer}) + "\n"))
    option = ("--tokenizer", model)
    succeed("ngrams", "build", out, texts, "--no-common", *option)

    def accepted(*options: object) -> int:
        results = tmp_path / "results.json"
        succeed("replay", log, *option, "--json", results, "--token-cost", 0, *options)
        [family] = json.loads(results.read_text())["runs"][0]["families"].values()
        return int(family["accepted"])

    # Without options it drafts from the table that comes with fastdraft.
    assert accepted("--no-ngrams") < accepted() < accepted("--ngrams", out)
    refused = fastdraft("replay", log, *option, "--ngrams", log, "--no-ngrams")
    assert "give either --ngrams or --no-ngrams" in refused.output
    build(out, [[1, 2]] * 2, fingerprint=b"o" * 32)
    refused = fastdraft("replay", log, *option, "--ngrams", out)
    assert "out.fdn: of another tokenizer" in refused.output
