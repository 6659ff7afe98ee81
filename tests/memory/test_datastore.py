"""Datastores, live and frozen, held against a list."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import fastdraft, succeed
from fastdraft import Datastore
from fastdraft.errors import DatastoreClosedError, DatastoreError, InvalidValueError
from fastdraft.memory.datastore import DatastoreWriter, Occurrence, build, fingerprint
from oracles.samples import Samples
from programs import run_python

ORDERS, LINKS, LONGEST = (4, 2, 1), 32, 32
KEPT_LIVE, KEPT_FROZEN = 31, 64  # occurrences of each n-gram
CONTEXT, STEP = 2 * LONGEST, LONGEST
MARK = -1
BLOCK = 4 * 1024 + 80  # the bytes by which a store grows


class Log:
    """The contract of a store: a list of tokens with a mark before each document."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.indexed: list[bool] = []  # True if what ends before the token can be found
        self.prefixes: dict[tuple[int, ...], int] = {}

    def add(self, document: list[int], begin: int) -> None:
        """Adds a document to a store that holds what stands from `begin` on."""
        common = self.stored_prefix(document, begin)
        if common == len(document):
            return
        start = max(0, common - CONTEXT)
        first = len(self.tokens) + 1 - start
        self.add_piece(document[start:common], document[common:])
        for end in range(STEP, len(document) + 1, STEP):
            if end > common:
                self.prefixes[tuple(document[max(0, end - CONTEXT) : end])] = first + end

    @classmethod
    def frozen(cls, documents: list[list[int]], segment_tokens: int) -> Log:
        """The log of a written file: segments that repeat some context."""
        log = cls()
        segment = 0
        for document in filter(None, documents):
            if segment_tokens - (len(log.tokens) - segment) < 2 * CONTEXT:
                segment = len(log.tokens)
            log.add_piece([], [])
            for token in document:
                if len(log.tokens) - segment == segment_tokens:
                    segment = len(log.tokens)
                    log.add_piece(log.read_back(CONTEXT), [])
                log.tokens.append(token)
                log.indexed.append(True)
        return log

    def add_piece(self, context: list[int], tokens: list[int]) -> None:
        self.tokens += [MARK, *context, *tokens]
        self.indexed += [False] * (1 + len(context)) + [True] * len(tokens)

    def read_back(self, most: int) -> list[int]:
        """The last tokens of the last document."""
        tokens = self.tokens[-most:]
        return tokens[len(tokens) - tokens[::-1].index(MARK) :] if MARK in tokens else tokens

    def stored_prefix(self, document: list[int], begin: int) -> int:
        length, position = 0, -1
        for end in range(STEP, len(document) + 1, STEP):
            window = tuple(document[max(0, end - CONTEXT) : end])
            found = self.prefixes.get(window, -1)
            if found - max(len(window), STEP + 1) < begin:
                break
            length, position = end, found
        while (
            length
            and length < len(document)
            and position < len(self.tokens)
            and self.tokens[position] == document[length]
        ):
            length, position = length + 1, position + 1
        return length

    def common(self, position: int, text: list[int], begin: int) -> int:
        most = min(LONGEST, len(text), position - begin)
        length = 0
        while length < most and self.tokens[position - 1 - length] == text[-1 - length]:
            length += 1
        return length

    def find(
        self, text: list[int], most: int, begin: int, kept: int, least: int = 1
    ) -> list[Occurrence]:
        links = LINKS
        found: dict[int, int] = {}
        tokens = np.array(self.tokens, dtype=np.int64)
        for order in ORDERS:
            if len(text) < order or order < least:
                continue
            if len(found) >= most:
                break
            stands = np.array(self.indexed, dtype=bool)
            stands[: begin + order] = False
            for back in range(1, order + 1):
                stands[back:] &= tokens[:-back] == text[-back]
            for end in np.flatnonzero(stands)[::-1][: min(links, kept)].tolist():
                found[end] = self.common(end, text, begin)
                links -= 1
        best = sorted(found.items(), key=lambda item: (-item[1], -item[0]))
        return [Occurrence(*item) for item in best[:most]]

    def read(self, position: int, most: int) -> list[int]:
        tokens = self.tokens[position : position + most]
        return tokens[: tokens.index(MARK)] if MARK in tokens else tokens


def document(seed: int, size: int, alphabet: int) -> list[int]:
    """Random tokens, with runs copied from further up."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, alphabet, size).tolist()
    for _ in range(size // 100):
        start, end, count = sorted(random.integers(0, size, 3).tolist())
        tokens[end : end + count] = tokens[start : start + count]
    return tokens[:size]


documents = st.builds(
    document,
    st.integers(0, 2**32),
    st.integers(0, 40) | st.integers(0, 1500),
    st.sampled_from([1, 2, 5, 300, 2**16, 2**22 - 1]),
)
# A document of its own, or one that goes on after the beginning of one before.
turns = st.tuples(documents, st.none() | st.tuples(st.integers(0, 50), st.floats(0, 1)))
LEAST = Datastore(max_bytes=1 << 20).bytes + BLOCK


def conversation(drawn: list[tuple[list[int], tuple[int, float] | None]]) -> list[list[int]]:
    added: list[list[int]] = []
    for tokens, base in drawn:
        start: list[int] = []
        if base is not None and added:
            earlier = added[base[0] % len(added)]
            start = earlier[: round(base[1] * len(earlier))]
        added.append(start + tokens)
    return added


@settings(max_examples=150, deadline=None)
@given(st.lists(turns, max_size=12), st.sampled_from([0, 1, 4, 16, 1000]), st.data())
def test_live_store_is_a_list_whose_oldest_tokens_leave(
    drawn: list[tuple[list[int], tuple[int, float] | None]], blocks: int, data: st.DataObject
) -> None:
    store = Datastore(max_bytes=LEAST + BLOCK * blocks)
    log = Log()
    added = conversation(drawn)
    for tokens in added:
        store.limit(LEAST + BLOCK * data.draw(st.sampled_from([blocks, blocks // 2])))
        begin = store.begin
        store.add(np.array(tokens, dtype=np.int64))
        log.add(tokens, begin)
        assert store.end == len(log.tokens)
        assert store.bytes <= store.max_bytes
        begin = store.begin
        assert len(store) == sum(token >= 0 for token in log.tokens[begin:])
        assert store.num_documents == log.tokens[begin:].count(MARK)
        text = data.draw(st.sampled_from(added))
        text = text[: data.draw(st.integers(0, len(text)))]
        most = data.draw(st.sampled_from([1, 2, 8, 100]))
        least = data.draw(st.integers(1, 5))
        found = store.find(text, most=most, least=least)
        assert found == log.find(text, most, begin, KEPT_LIVE, least)
        for occurrence in found:
            assert store.read(occurrence.next, 50).tolist() == log.read(occurrence.next, 50)
    assert store.read(store.end, 9).size == store.read(-1, 9).size == store.read(1, 0).size == 0
    assert store.read(-(2**62), 2**62).size == 0
    if store.begin:
        assert store.read(store.begin - 1, 9).size == 0


@pytest.mark.parametrize("token", [2**22, 2**31 - 1])
def test_tokens_beyond_every_vocabulary_end_a_draft(token: int, tmp_path: Path) -> None:
    """As the numbers by which hosts replace an image."""
    store = Datastore(max_bytes=1 << 20)
    text = [1, 2, 3, 4, 2**22 - 2, *[token] * 2000, 5, 6, 7, 8]
    for _ in range(3):
        store.add(text)
    assert len(store) == len(text)
    store.save(tmp_path / "saved.fds")
    for each in (store, Datastore.open(tmp_path / "saved.fds")):
        assert each.find([token] * 4) == []
        for query, following in (([1, 2], [3, 4, 2**22 - 2]), ([5, 6], [7, 8])):
            (found, *_) = each.find(query)
            assert each.read(found.next, 9).tolist() == following


def sample(prompt: int, seed: int, size: int) -> tuple[list[int], list[int]]:
    """A prompt, too short to be stored once, and it with an output that no other has."""
    short = [prompt] * 9
    return short, [*short, *np.random.default_rng(seed).integers(100, 2**22, size).tolist()]


def let_prompts_repeat(store: Datastore) -> list[list[int]]:
    """Two samples of one prompt, long enough to be known by its text."""
    prompt = list(range(50, 90))
    added = [[*prompt, 1], [*prompt, 2]]
    for tokens in added:
        store.add(tokens, prompt_size=len(prompt))
    return added


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9) | st.integers(0, 3000)), max_size=60),
    st.integers(0, 2**32),
    st.sampled_from([0, 2, 8, 30]),
)
def test_prompts_keep_about_as_many_samples_each(
    drawn: list[tuple[int, int]], seed: int, blocks: int
) -> None:
    store = Datastore(max_bytes=LEAST + BLOCK * blocks)
    first, second = let_prompts_repeat(store)
    # When the first one enters, its prompt has no other sample.
    samples = Samples().enter((), first).enter(tuple(second[:-1]), second)
    for number, (prompt, size) in enumerate(drawn):
        short, tokens = sample(prompt, seed + number, size)
        # Every sixth is text without a prompt.
        prompt_size = len(short) if prompt else 0
        expected = samples.outcomes(tuple(short[:prompt_size]), tokens, store.begin)
        store.add(tokens, prompt_size=prompt_size)
        samples = next(each for each in expected if each.end == store.end)
        assert store.bytes <= store.max_bytes
    for each in samples.log:
        if each.start >= store.begin:
            assert store.read(each.start + 1, 2**62).tolist() == each.tokens
            assert store.find(each.tokens[:-1])[0].length == min(len(each.tokens) - 1, LONGEST)


def test_a_prompt_that_returns_finds_its_samples_in_half_of_the_memory() -> None:
    """Epochs in one order, the worst for a memory whose oldest text leaves first: it would hold
    none of what comes next."""
    random = np.random.default_rng(0)
    prompts, of_each, tokens_of_each = 60, 4, 400
    store = Datastore(max_bytes=1_900_000)
    let_prompts_repeat(store)
    found = added = 0
    for epoch in range(5):
        begin = store.end
        for prompt in range(prompts):
            # The output has a run that tells whose it is.
            marks = [1000 * (prompt + 1) + number for number in range(of_each)]
            if epoch > 1:
                found += any(store.find([mark] * 4, least=4) for mark in marks)
            for mark in marks:
                output = random.integers(100_000, 150_000, tokens_of_each)
                output[50:55] = mark
                store.add([*[prompt] * 9, *output.tolist()], prompt_size=9)
        added = prompts * of_each * (10 + tokens_of_each)
        # At most one token is moved for each one that is added.
        assert store.end - begin <= 2 * added
    assert len(store) < 0.52 * added
    assert found >= 0.8 * 3 * prompts


def test_memory_stays_within_the_limit() -> None:
    program = """
import resource
import sys
import numpy as np
from fastdraft import Datastore
LIMIT = 48 << 20
random = np.random.default_rng(0)
texts = [random.integers(0, 50_000, 60_000) for _ in range(3)]
store = Datastore(max_bytes=1 << 20)
store.add(texts[0])
def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
before = peak()
store = Datastore(max_bytes=LIMIT)
for _ in range(40):
    # New n-grams each time, then the same again from elsewhere.
    tokens = random.permutation(texts[0])
    store.add(tokens)
    assert store.bytes <= LIMIT, store.bytes
    store.add(tokens[1:])
    assert store.bytes <= LIMIT, store.bytes
assert store.begin > 0
assert store.bytes > 0.95 * LIMIT, store.bytes
grown = peak() - before
assert grown <= 1.05 * LIMIT, (grown, LIMIT)
"""
    run_python(program)


def test_a_small_store_takes_little_memory() -> None:
    store = Datastore(max_bytes=2 << 30)
    assert store.bytes < 128 << 10
    store.add(document(1, 1000, 50_000))
    assert store.bytes < 192 << 10


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=f"must be at least {LEAST}, got {LEAST - 1}"):
        Datastore(max_bytes=LEAST - 1)
    store = Datastore(max_bytes=LEAST)
    for seed in range(20):
        store.add(document(seed, 1000, 50_000))
        assert store.bytes <= LEAST
    last = document(19, 1000, 50_000)
    assert store.find(last[:900])[0].length == LONGEST


def test_bad_values_are_named() -> None:
    store = Datastore(max_bytes=1 << 20)
    with pytest.raises(InvalidValueError, match="0 or greater, got -1 at index 2"):
        store.add([1, 2, -1])
    with pytest.raises(InvalidValueError, match="most must be at least 1, got 0"):
        store.find([1], most=0)
    with pytest.raises(InvalidValueError, match="least must be at least 1, got 0"):
        store.find([1], least=0)
    with pytest.raises(InvalidValueError, match="token_ids must be integers, got 'a' at index 0"):
        store.add(["a"])
    with pytest.raises(InvalidValueError, match="fingerprint must be 32 bytes, got 3"):
        Datastore(fingerprint=b"abc")
    for prompt_size in (-1, 4):
        with pytest.raises(InvalidValueError, match=f"token_ids, 3, got {prompt_size}"):
            store.add([1, 2, 3], prompt_size=prompt_size)
    assert len(store) == 0
    assert store.find([1, 2, 3]) == []


def test_closed_stores(frozen_path: Path) -> None:
    live = Datastore(max_bytes=1 << 20)
    live.add([1, 2, 3, 4])
    frozen = Datastore.open(frozen_path)
    assert frozen.frozen
    assert frozen.fingerprint == b"f" * 32
    with pytest.raises(DatastoreError, match=r"takes no more text: .*store\.fds"):
        frozen.add([1])
    for store in (live, frozen):
        with store:
            assert not store.closed
        store.close()
        assert store.closed
        assert (len(store), store.bytes) == (0, 0)
        calls: list[Callable[[], object]] = [lambda store=store: store.find([1])]
        calls += [lambda store=store: store.read(0, 1), lambda store=store: store.save(frozen_path)]
        for call in [*calls, lambda: live.add([1])]:
            with pytest.raises(DatastoreClosedError, match="closed"):
                call()
    Datastore.open(frozen_path)


def _write(path: Path, texts: Sequence[Any], segment_tokens: int, **options: Any) -> None:
    with DatastoreWriter(path, segment_tokens=segment_tokens, **options) as writer:
        for text in texts:
            writer.begin_document()
            writer.append(text)


# The largest tokens of two and of three bytes; what is above stands for the ends of documents.
WIDEST = [2**16 - 66, 2**24 - 66, 2**31 - 1]


@pytest.mark.parametrize("largest", [*WIDEST, *(token + 1 for token in WIDEST[:2])])
def test_a_frozen_store_holds_any_token(tmp_path: Path, largest: int) -> None:
    path = tmp_path / "store.fds"
    text = [largest - i * i % 70 for i in range(1500)]
    small = list(range(1100))
    # The second document is another segment, of tokens of another width.
    _write(path, [text, small], 1600)
    store = Datastore.open(path)
    assert store.read(1, 2000).tolist() == text
    for end in (1, 2, 5, 40, 1000):
        (found, *_) = store.find(text[:end], most=100)
        assert found.length == min(end, LONGEST)
        assert store.read(found.next, 1).tolist() == [text[found.next - 1]]
    (found, *_) = store.find([2**31 - 1, *small[:9]])
    assert (found.length, store.read(found.next, 3).tolist()) == (9, [9, 10, 11])
    # These have the bytes of a document's end.
    width = 2 + (largest > WIDEST[0]) + (largest > WIDEST[1])
    if width < 4:
        assert store.find([256**width - 1]) == store.find([256**width - 65]) == []


def test_a_frozen_store_knows_the_latest_occurrences_of_an_ngram(tmp_path: Path) -> None:
    _write(tmp_path / "store.fds", [[7] * 3000], 1024)
    store = Datastore.open(tmp_path / "store.fds")
    found = [each.next for each in store.find([7], most=1000, links=1000)]
    # The last segment holds 59 tokens behind its context.
    kept = {3195: 59, 3071: 64, 2047: 64, 1023: 64}
    assert found == [latest - i for latest, count in kept.items() for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(st.lists(documents, max_size=8), st.integers(1024, 3000), st.data())
def test_frozen_store_is_a_list(
    tmp_path_factory: pytest.TempPathFactory,
    added: list[list[int]],
    segment_tokens: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.getbasetemp() / "list.fds"
    with DatastoreWriter(path, segment_tokens=segment_tokens) as writer:
        for tokens in added:
            writer.begin_document()
            # However the document comes in pieces.
            writer.append(tokens[: len(tokens) // 3])
            writer.append(np.array(tokens[len(tokens) // 3 :], dtype=np.int32))
        assert writer.num_tokens == sum(map(len, added))
        assert writer.num_documents == sum(map(bool, added))
    log = Log.frozen(added, segment_tokens)
    with Datastore.open(path) as store:
        assert (store.begin, store.end) == (0, len(log.tokens))
        assert len(store) == sum(map(len, added))
        assert store.bytes == path.stat().st_size
        for _ in range(4 if any(added) else 0):
            text = data.draw(st.sampled_from(added))
            text = text[: data.draw(st.integers(0, len(text)))]
            most = data.draw(st.sampled_from([1, 2, 8, 100]))
            found = store.find(text, most=most)
            assert found == log.find(text, most, 0, KEPT_FROZEN)
            for occurrence in found:
                expected = log.read(occurrence.next, 50)
                tokens = store.read(occurrence.next, 50).tolist()
                assert tokens == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(turns, max_size=8))
def test_a_saved_store_finds_what_the_live_one_does(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[list[int], tuple[int, float] | None]],
) -> None:
    path = tmp_path_factory.getbasetemp() / "saved.fds"
    live = Datastore(max_bytes=1 << 22, fingerprint=bytes(range(32)))
    added = conversation(drawn)
    for tokens in added:
        live.add(tokens)
    live.save(path)
    with Datastore.open(path, fingerprint=bytes(range(32))) as frozen:
        assert len(frozen) == len(live)
        for tokens in added:
            for end in range(0, len(tokens), 97):
                found = live.find(tokens[:end], links=KEPT_LIVE)
                assert frozen.find(tokens[:end], links=KEPT_LIVE) == found
        frozen.save(path)
    with Datastore.open(path) as again:
        assert len(again) == len(live)


def test_text_that_has_left_is_not_saved(tmp_path: Path) -> None:
    live = Datastore(max_bytes=LEAST + 40 * BLOCK)
    texts = [document(seed, 3000, 50_000) for seed in range(8)]
    for text in texts:
        live.add(text)
    assert live.begin > 0
    live.save(tmp_path / "rest.fds")
    frozen = Datastore.open(tmp_path / "rest.fds")
    assert len(frozen) == len(live)
    assert not frozen.find(texts[0][:100])
    (found,) = frozen.find(texts[-1][:1000], most=1)
    assert frozen.read(found.next, 20).tolist() == texts[-1][1000:1020]


@pytest.fixture(scope="module")
def frozen_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frozen") / "store.fds"
    texts = [document(seed, 700, 20) for seed in range(6)]
    _write(path, texts, 1024, fingerprint=b"f" * 32)
    return path


ENTRY = 72  # bytes of a segment in the directory


def directory_offset(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[120:128], sys.byteorder)


def damage(path: Path, change: Callable[[bytearray], None]) -> Path:
    content = bytearray(path.read_bytes())
    change(content)
    damaged = path.with_name("damaged.fds")
    damaged.write_bytes(content)
    return damaged


def test_truncated_files_are_refused(frozen_path: Path) -> None:
    size = frozen_path.stat().st_size
    for left in [*range(8, 4200, 409), size // 2, size - 1]:
        path = damage(
            frozen_path, lambda content, left=left: content.__delitem__(slice(left, None))
        )
        with pytest.raises(DatastoreError, match="truncated"):
            Datastore.open(path)
    with pytest.raises(DatastoreError, match="truncated or overwritten"):
        Datastore.open(damage(frozen_path, lambda content: content.append(0)))


def test_foreign_and_newer_files_are_refused(frozen_path: Path, tmp_path: Path) -> None:
    for content in [b"", b"short", b"\x89PNG\r\n\x1a\n" + bytes(9000), b"{}" * 5000]:
        (tmp_path / "foreign").write_bytes(content)
        with pytest.raises(DatastoreError, match=r"foreign: not a datastore"):
            Datastore.open(tmp_path / "foreign")
    with pytest.raises(DatastoreError, match=r"cannot open .*missing\.fds: No such file"):
        Datastore.open(tmp_path / "missing.fds")
    os.mkfifo(tmp_path / "fifo")  # whoever opened it as a file would wait for ever
    for path in (tmp_path, Path(os.devnull), tmp_path / "fifo"):
        with pytest.raises(DatastoreError, match=f"{path} is not a regular file"):
            Datastore.open(path)
    newer = damage(frozen_path, lambda content: content.__setitem__(8, 9))
    with pytest.raises(DatastoreError, match=r"version 9 of the format, .* reads version 5$"):
        Datastore.open(newer)
    older = damage(frozen_path, lambda content: content.__setitem__(8, 1))
    with pytest.raises(DatastoreError, match=r"version 1 of .* reads version 5: build it again$"):
        Datastore.open(older)
    expected = r"another tokenizer: its fingerprint is (66){32}, expected (67){32}"
    with pytest.raises(DatastoreError, match=expected):
        Datastore.open(frozen_path, fingerprint=b"g" * 32)


def test_a_flipped_bit_of_header_or_directory_is_refused(frozen_path: Path) -> None:
    size = frozen_path.stat().st_size
    header = zlib.crc32(frozen_path.read_bytes()[:148]).to_bytes(4, sys.byteorder)
    assert frozen_path.read_bytes()[148:152] == header
    for at in [*range(148), *range(directory_offset(frozen_path), size)]:

        def flip(content: bytearray, at: int = at) -> None:
            content[at] ^= 1 << at % 8

        with pytest.raises(DatastoreError):
            Datastore.open(damage(frozen_path, flip))


def test_damage_between_them_is_found_or_harmless(frozen_path: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    end = directory_offset(frozen_path)
    for offsets in [[4096], [end - 1], *random.integers(4096, end, (30, 30)).tolist()]:

        def scramble(content: bytearray, offsets: list[int] = offsets) -> None:
            for at in offsets:
                content[at] ^= int(random.integers(1, 256))

        path = damage(frozen_path, scramble)
        with pytest.raises(DatastoreError, match="the checksum of its segments is wrong: damaged"):
            Datastore.open(path, verify=True)
        for arguments in (["info", path, "--verify"], ["merge", tmp_path / "all.fds", path]):
            assert "segments is wrong" in fastdraft("datastore", *arguments).output
        store = Datastore.open(path)
        text = document(0, 700, 20)
        for at in range(10, 700, 30):
            for found in store.find(text[:at], most=100):
                tokens = store.read(found.next, 100)
                assert ((tokens >= 0) & (tokens < 20)).all()
    assert not list(tmp_path.iterdir())


def seal(content: bytearray) -> None:
    """Makes the checksums of the header and of the directory right again."""
    offset = int.from_bytes(content[120:128], sys.byteorder)
    content[128:136] = len(content).to_bytes(8, sys.byteorder)
    content[136:140] = zlib.crc32(content[offset:]).to_bytes(4, sys.byteorder)
    content[148:152] = zlib.crc32(content[:148]).to_bytes(4, sys.byteorder)


def test_directories_that_no_writer_leaves_are_refused(frozen_path: Path, tmp_path: Path) -> None:
    offset = directory_offset(frozen_path)
    entry = frozen_path.read_bytes()[offset : offset + ENTRY]
    segments = int.from_bytes(frozen_path.read_bytes()[112:120], sys.byteorder)
    assert segments > 2

    def repeat_one(content: bytearray) -> None:
        content[112:120] = (segments + 5).to_bytes(8, sys.byteorder)
        content[offset:offset] = entry * 5
        seal(content)

    def swap_two(content: bytearray) -> None:
        content[offset : offset + 2 * ENTRY] = content[offset + ENTRY : offset + 2 * ENTRY] + entry
        seal(content)

    for change in (repeat_one, swap_two):
        with pytest.raises(DatastoreError, match="its directory is damaged"):
            Datastore.open(damage(frozen_path, change))

    # Segments of one token would be as many lookups as the file has entries.
    build(tmp_path / "short.fds", [])
    header = (tmp_path / "short.fds").read_bytes()[:4096]
    for count in (1, 2):
        body = bytes(320 * count)
        content = bytearray(header + body)
        content[92:96] = bytes(4)  # the largest token is 0
        content[112:120] = count.to_bytes(8, sys.byteorder)
        content[120:128] = len(content).to_bytes(8, sys.byteorder)
        for index in range(count):
            content += np.array([4096 + 320 * index, 1, 2, 0, 0, 0, 1, 1, 1]).tobytes()
        seal(content)
        (tmp_path / "short.fds").write_bytes(content)
        if count == 1:
            assert Datastore.open(tmp_path / "short.fds").find([1, 2]) == []
            continue
        with pytest.raises(DatastoreError, match="its directory is damaged"):
            Datastore.open(tmp_path / "short.fds")


# The largest token, the tokens, the documents and the weights. Were the largest negative, every
# number in the file would pass for a token.
@pytest.mark.parametrize(
    ("at", "numbers", "width"),
    [(96, numbers, 8) for numbers in ([-1, 0], [2**40, 1], [9, -1], [9, 10])]
    + [(92, [largest], 4) for largest in (-1, -2, -(2**31))]
    + [(144, [count], 4) for count in (1, 2**14, 2**16, -1)],
)
def test_impossible_numbers_are_refused(
    frozen_path: Path, at: int, numbers: list[int], width: int
) -> None:
    def change(content: bytearray) -> None:
        content[at : at + width * len(numbers)] = np.array(numbers, f"i{width}").tobytes()
        seal(content)

    with pytest.raises(DatastoreError, match="its header is damaged"):
        Datastore.open(damage(frozen_path, change))


def test_paths_with_nul_bytes_are_refused(frozen_path: Path) -> None:
    store = Datastore(max_bytes=1 << 20)
    before = sorted(frozen_path.parent.iterdir())
    for path in (f"{frozen_path}\0x", str(frozen_path.with_name("new\0.fds"))):
        for call in (store.save, Datastore.open, DatastoreWriter):
            with pytest.raises(InvalidValueError, match="a path must have no NUL byte, got one"):
                call(path)
    assert sorted(frozen_path.parent.iterdir()) == before


def test_paths_need_not_be_utf_8(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.fds")
    build(path, [[1, 2, 3, 4, 5]])
    with Datastore.open(path) as store:
        store.save(path)
    with Datastore.open(path) as store:
        assert store.read(1, 9).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(DatastoreError) as error:
        Datastore.open(path + "x")
    assert path + "x" in str(error.value)


def test_documents_enter_between_the_pieces_of_a_long_one() -> None:
    """Whoever adds a short one does not wait for all of a long one."""
    store = Datastore(max_bytes=1 << 20)
    size = 3 << 16
    long = np.random.default_rng(0).integers(0, 1000, size)
    short = [5000, 5001, 5002, 5003]
    inside, entering = threading.Event(), threading.Event()

    def grow() -> None:  # during the first piece of the long document
        inside.set()
        entering.wait()
        store.limit(store.bytes + (1 << 20))

    adding = threading.Thread(target=store.add, args=(long,), kwargs={"grow": grow})
    adding.start()
    inside.wait()
    other = threading.Thread(target=store.add, args=(short,))
    other.start()
    entering.set()
    other.join()
    adding.join()
    # Three pieces, of which two begin with context, and the other document.
    assert (len(store), store.num_documents) == (size + 2 * CONTEXT + len(short), 4)
    (found,) = store.find(short[:3], most=1)
    assert store.read(found.next, 9).tolist() == short[3:]
    for at in range(size - 10_000, size, 177):
        (found,) = store.find(long[at - 40 : at], most=1)
        assert found.length == LONGEST
        assert store.read(found.next, 1).tolist() == long[at : at + 1].tolist()
    held = len(store)
    store.add(long)
    assert len(store) == held  # which is known by its pieces


def test_an_error_while_writing_leaves_the_old_file(frozen_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.fds"
    path.write_bytes(frozen_path.read_bytes())
    with pytest.raises(InvalidValueError, match="got -5 at index 1"):
        build(path, [[1, 2], [3, -5]])
    with pytest.raises(InvalidValueError, match="segment_tokens must be 1024 to 33554432, got 3"):
        DatastoreWriter(path, segment_tokens=3)
    with pytest.raises(DatastoreError, match=r"cannot create .*nowhere/x\.fds: No such file"):
        build(tmp_path / "nowhere" / "x.fds", [[1]])
    writer = DatastoreWriter(path)
    writer.append([1])
    writer.discard()
    with pytest.raises(DatastoreClosedError):
        writer.append([1])
    assert [file.name for file in tmp_path.iterdir()] == ["kept.fds"]
    assert path.read_bytes() == frozen_path.read_bytes()


@pytest.mark.parametrize("end", ["sys.exit()", "second.discard()", "second.finish()"])
def test_a_fork_leaves_the_file_of_a_writer_alone(tmp_path: Path, end: str) -> None:
    program = f"""
import os
import sys
from fastdraft.memory.datastore import Datastore, DatastoreWriter
path = sys.argv[1]
writer = DatastoreWriter(path)
writer.append([1, 2, 3])
with DatastoreWriter(path + "2") as second:
    second.append([4, 5])
    child = os.fork()
    if child == 0:
        {end}
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    second.append([6])
writer.append([4])
writer.finish()
print(status, *(len(Datastore.open(path + name)) for name in ("", "2")))
"""
    if end == "second.finish()":
        program = program.replace(end, f"try: {end}\n        except Exception: os._exit(3)")
    assert run_python(program, tmp_path / "x.fds") == f"{3 * ('finish' in end)} 4 3\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.fds", "x.fds2"]


def begun(path: Path, then: str) -> subprocess.Popen[str]:
    """A process that has begun a store at `path`, says so, and goes on with `then`."""
    program = f"""
import sys
from fastdraft.memory.datastore import DatastoreWriter
writer = DatastoreWriter(sys.argv[1], segment_tokens=1024)
writer.append(range(5000))
print("begun", flush=True)
{then}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_a_killed_build_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.fds"
    for _ in range(2):
        with begun(path, "input()") as process:
            process.kill()
        assert [file.name for file in tmp_path.iterdir()] == ["x.fds.tmp"]
    build(path, [[1, 2, 3]])
    assert [file.name for file in tmp_path.iterdir()] == ["x.fds"]
    assert len(Datastore.open(path)) == 3


def test_one_writer_of_a_path_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "x.fds"
    with begun(path, "input(); writer.finish()") as process:
        for _ in range(2):
            with pytest.raises(DatastoreError, match=r"another writer is at .*x\.fds"):
                build(path, [[1, 2, 3]])
        process.communicate("\n")
        assert process.returncode == 0
    assert len(Datastore.open(path)) == 5000
    then = f"""
for number in range(300):
    try:
        with DatastoreWriter({str(path)!r}) as one:
            one.append(range(number + 1))
    except Exception as error:
        assert "another writer" in str(error), error
"""
    with DatastoreWriter(path) as own:
        processes = [begun(tmp_path / f"{n}.fds", then) for n in range(3)]
        own.append([1])
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert len(Datastore.open(path)) > 0
    assert sorted(file.name for file in tmp_path.iterdir())[-1] == "x.fds"


def test_a_full_disk_leaves_the_old_file(frozen_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.fds"
    path.write_bytes(frozen_path.read_bytes())
    program = """
import resource
import sys
from fastdraft import Datastore
from fastdraft.errors import DatastoreError
store = Datastore(max_bytes=1 << 24)
store.add(range(60_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    store.save(sys.argv[1])
except DatastoreError as error:
    print(error)
assert len(store) == 60_000
"""
    printed = run_python(program, path)
    assert "cannot write" in printed and "kept.fds: File too large" in printed
    assert [file.name for file in tmp_path.iterdir()] == ["kept.fds"]
    assert path.read_bytes() == frozen_path.read_bytes()


def test_fingerprint(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "ab": 2}

    def tokenizer(words: dict[str, int], merges: list[tuple[str, str]]) -> object:
        return tokenizers.Tokenizer(tokenizers.models.BPE(words, merges))

    one = tokenizer(vocabulary, [("a", "b")])
    one.save(str(tmp_path / "tokenizer.json"))
    known = fingerprint(one)
    assert len(known) == 32
    assert known == fingerprint(tokenizer(dict(reversed(vocabulary.items())), [("a", "b")]))
    assert known == fingerprint(tmp_path) == fingerprint(str(tmp_path / "tokenizer.json"))
    older = json.loads((tmp_path / "tokenizer.json").read_text())
    older["model"]["merges"] = ["a b"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert known == fingerprint(tmp_path / "older.json")
    assert known != fingerprint(tokenizer({"a": 1, "b": 0, "ab": 2}, [("a", "b")]))
    assert known != fingerprint(tokenizer(vocabulary, []))
    one.add_special_tokens(["<end>"])
    assert known != fingerprint(one)
    with pytest.raises(InvalidValueError, match="must be a tokenizer or the path"):
        fingerprint(3)
    with pytest.raises(InvalidValueError, match=r"cannot read a tokenizer from .*nothing"):
        fingerprint(tmp_path / "nothing")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["a", "store", "holds", "text", "and", "finds", "it", "again", "."]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=".")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_command_line_builds_from_every_kind_of_file(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.txt").write_text("a store holds text and finds it again .\n")
    (tmp_path / "b.jsonl").write_text('{"text": "it finds text"}\n\n{"text": [7, 6, 5, 4]}\n')
    np.save(tmp_path / "c.npy", np.arange(20, 32).reshape(2, 6))
    np.save(tmp_path / "d.npy", np.arange(40, 50, dtype=np.int32))
    inputs = sorted(file for file in tmp_path.iterdir())
    out = tmp_path / "out.fds"
    built = succeed("datastore", "build", out, *inputs, "--tokenizer", tokenizer_file)
    assert f"{out}: 38 tokens in 6 documents, {out.stat().st_size:,} bytes" in built.output
    store = Datastore.open(out, fingerprint=fingerprint(tokenizer_file))
    for ids, following in [
        ([1, 2, 3], [4, 5, 6, 7, 8]),
        ([7, 6, 5], [4]),
        ([26, 27, 28], [29, 30, 31]),
        ([40, 41, 42], [43, 44]),
    ]:
        found, *_ = store.find(ids)
        assert store.read(found.next, 5).tolist()[: len(following)] == following
    shown = succeed("datastore", "info", out, "--verify")
    assert shown.output.endswith("checksums    right\n")
    assert "documents    6\n" in shown.output
    assert fingerprint(tokenizer_file).hex() in shown.output


def test_command_line_stores_the_answers_of_logs(tmp_path: Path, tokenizer_file: Path) -> None:
    request, answer = {"prompt": "it finds text"}, {"text": "a store holds text"}
    lines = [
        {"request": request, "response": {"choices": [answer, {"text": "holds it again ."}]}},
        {"prompt_ids": [40, 41, 42, 43], "output_ids": [60, 61, 62, 63]},
        {"of": "no form"},
        {"prompt": "a store holds", "output": "text and finds it"},
    ]
    log, out = tmp_path / "log.jsonl", tmp_path / "answers.fds"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    built = succeed(*("datastore", "build", out), "--answers", log, "--tokenizer", tokenizer_file)
    assert f"left out: 1 x no model call, such as {log}, line 3" in built.output
    assert f"{out}: 16 tokens in 4 documents" in built.output
    store = Datastore.open(out, fingerprint=fingerprint(tokenizer_file))
    assert not store.find([40, 41])  # a prompt
    for ids, following in [([60, 61], [62, 63]), ([0, 1], [2, 3]), ([4, 5], [6])]:
        found, *_ = store.find(ids)
        assert found.output
        assert store.read(found.next, len(following)).tolist() == following


def test_command_line_takes_a_text_of_several_pieces(tmp_path: Path, tokenizer_file: Path) -> None:
    text, out = tmp_path / "long.txt", tmp_path / "out.fds"
    text.write_text("a store holds text and finds it again .\n" * 30_000)
    built = succeed("datastore", "build", out, text, "--tokenizer", tokenizer_file)
    assert "270,000 tokens in 1 document" in built.output


def test_command_line_holds_few_of_many_short_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def encode(batch: list[Any], _tokenizer: None) -> list[Any]:
        sizes.append(len(batch))
        return batch

    monkeypatch.setattr("fastdraft.cli.texts._encode", encode)
    np.save(tmp_path / "short.npy", np.arange(70_000, dtype=np.int32).reshape(-1, 1))
    built = succeed("datastore", "build", tmp_path / "o.fds", tmp_path / "short.npy")
    assert "70,000 tokens in 70,000 documents" in built.output
    assert sum(sizes) == 70_000 and max(sizes) <= 1 << 15


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', r"x\.jsonl, line 2: not JSON"),
        ("x.jsonl", b'{"txt": "a"}\n', r"line 1: expected text .* 'text', got a line with txt"),
        ("x.jsonl", b'{"text": 5}\n', r"line 1: expected text .* 'text', got 5"),
        ("x.jsonl", b'{"text": [5, -5]}\n', r"line 1: token_ids .*got -5 at index 1"),
        ("x.txt", b"a \xff", r"x\.txt is not UTF-8 text"),
        ("x.npy", b"no array", r"x\.npy is not a \.npy file"),
        ("x.npy", b"PK\x05\x06" + bytes(18), r"x\.npy is not a \.npy file"),
        ("x.jsonl", b"[" * 100_000, "is no JSON: nested too deeply"),
        ("x.jsonl", b'{"text": "\\ud800"}', "line 1: a string holds half a surrogate pair"),
        ("x.npy", b"", r"x\.npy is not a \.npy file"),
    ],
)
def test_command_line_names_what_it_cannot_take(
    tmp_path: Path, tokenizer_file: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out.fds"
    out.write_bytes(b"what was there")
    build = ("datastore", "build", out, tmp_path / name, "--tokenizer", tokenizer_file)
    failed = fastdraft(*build)
    assert failed.exit_code == 1
    assert re.search(message, failed.output), failed.output
    assert out.read_bytes() == b"what was there"
    assert len(list(tmp_path.iterdir())) == 2


def test_command_line_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    np.save(tmp_path / "none.npy", np.zeros((3, 0), np.int32))
    (tmp_path / "x.txt").write_text("a")
    for arguments, message in [
        (["build", tmp_path / "o.fds", tmp_path / "x.txt"], "text needs --tokenizer"),
        (["build", tmp_path / "o.fds", tmp_path / "x.npy"], "got 1 of float64"),
        (["build", tmp_path / "o.fds", "--answers", tmp_path / "x.txt"], "needs --tokenizer"),
        (["build", tmp_path / "o.fds", tmp_path / "none.npy"], "none.npy is empty"),
        (["info", tmp_path / "x.txt"], "not a datastore"),
    ]:
        failed = fastdraft("datastore", *arguments)
        assert failed.exit_code != 0
        assert message in failed.output


def test_a_store_that_may_grow_loses_nothing() -> None:
    text = np.random.default_rng(0).integers(0, 2**22 - 2, 100_000)
    source = Datastore()
    source.add(text[:50_000])
    source.add(text[50_000:])
    store, calls = Datastore(max_bytes=1 << 17), []

    def grow() -> None:
        calls.append(store.begin)
        store.limit(store.bytes + (1 << 17))

    store._load(source._dump(0, 1 << 20)[0], grow)
    store.add(text[::-1].copy(), grow=grow)
    assert len(store) == 200_000 + CONTEXT and calls == [0] * len(calls)
    # Only as it is needed.
    assert store.bytes > store.max_bytes - (1 << 18) and len(calls) > 40
    # If the limit stays, the oldest text leaves.
    limit = store.max_bytes
    store.add(text + 1, grow=lambda: None)
    assert store.begin > 0 and store.bytes <= limit


def test_an_error_in_grow_ends_the_call_alone() -> None:
    store = Datastore(max_bytes=1 << 17)
    with pytest.raises(ZeroDivisionError):
        store.add(range(100_000), grow=lambda: 1 // 0)
    store.add([1, 2, 3, 4])
    assert store.find([1, 2, 3])
    with pytest.raises(DatastoreClosedError):
        store.add(range(100_000), grow=store.close)


@pytest.mark.parametrize("alphabet", [3, 70_000])
def test_joined_stores_find_what_their_documents_hold(tmp_path: Path, alphabet: int) -> None:
    """With segments of 1,024 tokens, so that documents go on from one to the next."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, alphabet, size) for size in (3000, 5, 1, 1024, 900, 2500)]
    with DatastoreWriter(tmp_path / "joined.fds", segment_tokens=1024) as joined:
        for part in (documents[:2], documents[2:]):
            _write(tmp_path / "part.fds", part, 1024)
            joined.append_all(Datastore.open(tmp_path / "part.fds"))
    store = Datastore.open(tmp_path / "joined.fds")
    for document in documents:
        for end in range(1, len(document), 7):
            found = store.find(document[:end], most=100, links=1000)
            assert found[0].length == min(end, LONGEST)
            assert document[end] in [store.read(each.next, 1)[0] for each in found]


def test_a_saved_store_is_copied_as_it_is(tmp_path: Path) -> None:
    live = Datastore()
    chat = np.random.default_rng(0).integers(0, 1000, 500)
    for end in (100, 250, 500):
        live.add(chat[:end], prompt_size=end - 60)
    live.save(tmp_path / "saved.fds")
    with DatastoreWriter(tmp_path / "live.fds") as writer:
        writer.append_all(live)
    with DatastoreWriter(tmp_path / "copy.fds") as writer:
        writer.append_all(Datastore.open(tmp_path / "saved.fds"))
    saved = (tmp_path / "saved.fds").read_bytes()
    assert (tmp_path / "live.fds").read_bytes() == saved
    assert (tmp_path / "copy.fds").read_bytes() == saved
    live.close()
    with (
        pytest.raises(DatastoreClosedError),
        DatastoreWriter(tmp_path / "none.fds") as writer,
    ):
        writer.append_all(live)
    assert not (tmp_path / "none.fds").exists()


def test_command_line_merges(tmp_path: Path, tokenizer_file: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(20))
    (tmp_path / "y.txt").write_text("a store holds text")
    option = ("--tokenizer", tokenizer_file)
    for name, inputs in {"x": ["x.npy"], "y": ["y.txt"], "xy": ["x.npy", "y.txt"]}.items():
        paths = (tmp_path / f"{name}.fds", *(tmp_path / each for each in inputs))
        succeed("datastore", "build", *paths, *option)
    out = tmp_path / "out.fds"
    merged = succeed("datastore", "merge", out, tmp_path / "x.fds", tmp_path / "y.fds")
    assert "24 tokens in 2 documents" in merged.output
    assert out.read_bytes() == (tmp_path / "xy.fds").read_bytes()
    succeed("datastore", "build", tmp_path / "other.fds", tmp_path / "x.npy")
    refused = fastdraft("datastore", "merge", out, tmp_path / "x.fds", tmp_path / "other.fds")
    assert refused.exit_code == 1 and "other.fds must be of the tokenizer of" in refused.output


def test_outputs_are_known_in_live_and_in_frozen_stores(tmp_path: Path) -> None:
    live = Datastore(max_bytes=1 << 20)
    live.add([1, 2, 3, 4, 5, 6], prompt_size=3)
    live.add([7, 2, 3, 8])
    live.add([9, 10, 11], prompt_size=0)
    path = tmp_path / "store.fds"
    live.save(path)
    for store in (live, Datastore.open(path)):
        assert [found.output for found in store.find([2, 3])] == [False, True]
        assert [found.output for found in store.find([1, 2])] == [False, False]
        assert [found.output for found in store.find([5])] == [True]
        assert [found.output for found in store.find([9])] == [True]


def test_a_sample_that_comes_again_enters_once() -> None:
    """As a full store gives samples that it moves: with the last tokens of what comes before."""
    random = np.random.default_rng(5)
    for shared in (40, 64, 100, 500):
        prompt = random.integers(0, 1000, shared)
        source, copy = Datastore(max_bytes=1 << 22), Datastore(max_bytes=1 << 22)
        for size in (300, 31, 333):
            output = random.integers(0, 1000, size)
            source.add(np.concatenate([prompt, output]), prompt_size=shared)
        begun, _ = source._dump(source.begin, 1 << 20)
        copy._load(begun, None)
        tokens = len(copy)
        assert tokens == len(source)
        copy._load(begun, None)
        # The store may keep a shared part twice where it is shorter than a step of the index.
        assert len(copy) <= tokens + (64 + 31 if shared >= 64 else 0)
        # A text that goes on otherwise enters.
        source.add(np.concatenate([prompt, output[:200], output[:100]]), prompt_size=shared)
        again, _ = source._dump(source.begin, 1 << 20)
        before = len(copy)
        copy._load(again, None)
        assert len(copy) >= before + 100
    with pytest.raises(ValueError, match="text must have 5 bytes a token, got 7"):
        copy._load(b"1234567", None)
