"""Files of frozen datastores, damaged at random: an error, or tokens that the file says it has."""

from __future__ import annotations

import random
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.datastore import DatastoreWriter
from fastdraft.errors import DatastoreError, InvalidValueError

__all__ = ["case"]

_FILES = 200  # of one store
_SECONDS = 2.0  # of CPU that a lookup or a draft may take; they take microseconds

# Where the header (csrc/src/store/datastore_file.h) keeps what.
_HEADER, _CHECKSUM = 4096, 140
_LARGEST, _DIRECTORY, _DIRECTORY_CHECKSUM = 92, 120, 136


def case(seed: int) -> Counter[str]:
    """One store, and many files that were made of it."""
    chance = random.Random(seed)
    alphabet = chance.choice([2, 5, 300])
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.fds"
        texts = [_text(chance, alphabet) for _ in range(chance.randint(1, 6))]
        with DatastoreWriter(path, segment_tokens=1024) as writer:
            for text in texts:
                writer.begin_document()
                writer.append(text)
        whole = path.read_bytes()
        hostile = Path(folder) / "hostile.fds"
        for _ in range(_FILES):
            hostile.write_bytes(_damaged(chance, whole))
            found[_opened(chance, hostile, texts)] += 1
            # A new file: the one before may still be mapped by what was made of it.
            hostile.unlink()
    return found


def _opened(chance: random.Random, path: Path, texts: list[list[int]]) -> str:
    try:
        store = Datastore.open(path, verify=chance.random() < 0.1)
    except DatastoreError:
        return "hostile files refused"
    header = path.read_bytes()[:_HEADER]
    largest = int.from_bytes(header[_LARGEST : _LARGEST + 4], "little", signed=True)
    with store:
        for _ in range(6):
            text = chance.choice(texts)
            text = text[: chance.randint(0, len(text))]
            started = time.process_time()
            for occurrence in store.find(text, most=chance.choice([1, 8, 100])):
                assert store.begin <= occurrence.next < store.end, occurrence
                _check(store.read(occurrence.next, 40), largest)
            _check(store.read(chance.randint(-5, len(store) + 5), 1 << 40), largest)
            _check_time(started, "a lookup")
        copy = path.with_suffix(".copy")
        with DatastoreWriter(copy) as writer:
            writer.append_all(store)
        with Datastore.open(copy, verify=True) as copied:
            _check(copied.read(chance.randint(-5, len(copied) + 5), 1 << 40), largest)
        copy.unlink()
        engine = Engine(
            DraftConfig(token_cost=0, tree_budget=chance.choice([None, 16])), datastores=[store]
        )
        text = chance.choice(texts)
        try:
            request = engine.add_request(text[: len(text) // 2])
        except InvalidValueError:
            return "hostile files read"
        known = max(largest, *text)
        for token in text[len(text) // 2 :][:12]:
            started = time.process_time()
            _check(engine.propose(request).token_ids, known)
            engine.observe(request, [token])
            _check_time(started, "a step")
        engine.finish(request)
    return "hostile files read"


def _check(tokens: np.ndarray, largest: int) -> None:
    assert tokens.min(initial=0) >= 0, tokens
    assert tokens.max(initial=0) <= max(largest, 0), (tokens, largest)


def _check_time(started: float, what: str) -> None:
    taken = time.process_time() - started
    assert taken < _SECONDS, f"{what} took {taken:.1f} s"


def _text(chance: random.Random, alphabet: int) -> list[int]:
    tokens = [chance.randrange(alphabet) for _ in range(chance.choice([0, 40, 700, 1500]) + 1)]
    for _ in range(len(tokens) // 200):
        start, end = sorted(chance.sample(range(len(tokens)), 2))
        tokens[end:] = tokens[start : start + len(tokens) - end]
    return tokens


def _damaged(chance: random.Random, whole: bytes) -> bytes:
    content = bytearray(whole)
    size = len(content)
    directory = int.from_bytes(whole[_DIRECTORY : _DIRECTORY + 8], "little")
    for _ in range(chance.choice([0, 1, 1, 3, 20])):
        # Header and directory say what the rest means.
        begin, end = chance.choice([(0, 144), (directory, size), (_HEADER, directory), (0, size)])
        at = chance.randrange(begin, end) if begin < end else 0
        match chance.randrange(5):
            case 0:
                content[at] ^= 1 << chance.randrange(8)
            case 1:
                content[at] = chance.randrange(256)
            case 2:  # a whole number, of the sizes that numbers have there
                width = chance.choice([4, 8])
                at -= at % width
                number = chance.choice(
                    [
                        0,
                        1,
                        -1,
                        size,
                        size - 64,
                        1 << 31,
                        (1 << 31) - 1,
                        (1 << 62),
                        chance.getrandbits(31),
                    ]
                )
                content[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
            case 3:  # a stretch from elsewhere
                count = chance.choice([4, 8, 64, 1024])
                source = chance.randrange(size)
                stretch = whole[source : source + count]
                content[at : at + len(stretch)] = stretch
            case _:
                content[at : at + chance.choice([4, 64, 4096])] = b""
        del content[size:]
        content += bytes(size - len(content))
    match chance.randrange(8):
        case 0:
            del content[chance.randrange(len(content)) :]
        case 1:
            content += bytes(chance.choice([1, 64, 5000]))
    if chance.random() < 0.8:
        _seal(content)
    return bytes(content)


def _seal(content: bytearray) -> None:
    """Makes the checksums right again, without which hardly a file would be opened."""
    if len(content) < 144:
        return
    directory = int.from_bytes(content[_DIRECTORY : _DIRECTORY + 8], "little")
    if directory <= len(content):
        checksum = zlib.crc32(content[directory:]).to_bytes(4, "little")
        content[_DIRECTORY_CHECKSUM : _DIRECTORY_CHECKSUM + 4] = checksum
    content[_CHECKSUM : _CHECKSUM + 4] = zlib.crc32(content[:_CHECKSUM]).to_bytes(4, "little")
