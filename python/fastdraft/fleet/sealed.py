"""Sealed objects: text of many namespaces in one, which only those who have the key can write.

    fastdraft memory 1\\n
    n\\n
    n entries of 88 bytes: namespace, offset, size, tokens, SHA-256
    the text of each entry: frames of a length in 4 bytes and zlib's bytes

The object's name ends in an HMAC over its kind, group and place and all bytes before the text, so a
namespace's text can be read and checked alone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft.errors import DatastoreError, InvalidValueError

__all__ = ["Chunk", "Head", "digest", "frame", "ids_of", "seal", "secret_of", "texts_of"]

_MAGIC = b"fastdraft memory 1\n"
_ENTRY = np.dtype(
    [("id", "S32"), ("at", "<u8"), ("size", "<u8"), ("tokens", "<u8"), ("sha", "V32")]
)
_MOST_HEAD = 1 << 27
_LEAST_KEY = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text of a namespace."""

    content: bytes
    """Its frames."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Head:
    """What an object holds, without the text."""

    begin: int
    """Where the text begins."""
    index: NDArray[np.void]
    """Entries by namespace."""
    content: bytes
    """The object's first bytes, as many as were read."""

    @classmethod
    def size_of(cls, content: bytes) -> int:
        """The bytes before the text, as the first of them say. Raises DatastoreError."""
        magic, _, rest = content.partition(b"\n")
        line = rest[:64].partition(b"\n")[0]
        if magic + b"\n" != _MAGIC or not line.isdigit():
            raise DatastoreError("it is no sealed object")
        size = len(_MAGIC) + len(line) + 1 + int(line) * _ENTRY.itemsize
        if size > _MOST_HEAD:
            raise DatastoreError(f"it says to have {int(line)} entries")
        return size

    @classmethod
    def parse(cls, content: bytes, begin: int, size: int) -> Head:
        """From an object's first bytes.

        Those before `begin`, where its text begins, were checked. Raises DatastoreError where they
        do not describe an object of `size` bytes.
        """
        first = content.index(b"\n", len(_MAGIC)) + 1
        index: NDArray[np.void] = np.frombuffer(content[first:begin], _ENTRY)
        names, ends = index["id"], index["at"].astype(np.float64) + index["size"]
        if np.any(names[1:] <= names[:-1]) or ends.max(initial=0) > size - begin:
            raise DatastoreError("its entries are out of range")
        return cls(begin, index, content)

    @property
    def names(self) -> list[str]:
        """What stands for the namespaces."""
        return [bytes(name).ljust(32, b"\0").hex() for name in self.index["id"].tolist()]

    def find(self, name: str) -> int | None:
        """The entry of a namespace."""
        wanted = np.array(bytes.fromhex(name), "S32")
        place = int(np.searchsorted(self.index["id"], wanted))
        return place if place < len(self.index) and self.index["id"][place] == wanted else None

    def span(self, entry: int) -> tuple[int, int]:
        """The place of an entry's text in the object."""
        first = self.begin + int(self.index["at"][entry])
        return first, first + int(self.index["size"][entry])

    def chunk(self, entry: int, content: bytes) -> Chunk:
        """An entry's text. Raises DatastoreError where it is not what was sealed."""
        if hashlib.sha256(content).digest() != self.index["sha"][entry].tobytes():
            raise DatastoreError("it is damaged")
        return Chunk(content, int(self.index["tokens"][entry]))


def seal(chunks: Mapping[str, Iterable[Chunk]]) -> tuple[bytes, bytes]:
    """The bytes of an object before the text, and its text, from the chunks by namespace."""
    index = np.zeros(len(chunks), _ENTRY)
    text: list[bytes] = []
    at = 0
    for place, (name, parts) in enumerate(sorted(chunks.items())):
        joined = list(parts)
        content = b"".join(part.content for part in joined)
        tokens = sum(part.tokens for part in joined)
        sha = np.void(hashlib.sha256(content).digest())
        index[place] = (bytes.fromhex(name), at, len(content), tokens, sha)
        text.append(content)
        at += len(content)
    return b"%s%d\n%s" % (_MAGIC, len(index), index.tobytes()), b"".join(text)


def ids_of(text: bytes) -> NDArray[np.int32]:
    """The token ids of a store's text, as `Datastore._dump` gives it: negative where a document
    begins."""
    # Behind the ids, of 4 bytes each, is a byte for each that says who wrote it.
    return np.frombuffer(text, np.int32, len(text) // 5)


def frame(text: bytes) -> bytes:
    """The text of a store, as `Datastore._dump` gives it, as a frame."""
    content = zlib.compress(text, 1)
    return struct.pack("<I", len(content)) + content


def texts_of(chunk: Chunk) -> Iterator[bytes]:
    """The texts of a chunk, for `Datastore._load`."""
    at = 0
    while at < len(chunk.content):
        (size,) = struct.unpack_from("<I", chunk.content, at)
        yield zlib.decompress(chunk.content[at + 4 : at + 4 + size])
        at += 4 + size


def secret_of(key: bytes | str) -> bytes:
    """The operator's key as bytes. Raises InvalidValueError where it is too short."""
    secret = key.encode() if isinstance(key, str) else bytes(key)
    if len(secret) < _LEAST_KEY:
        raise InvalidValueError(f"key must have at least {_LEAST_KEY} bytes, got {len(secret)}")
    return secret


def digest(secret: bytes, *parts: Hashable) -> str:
    """The HMAC-SHA-256 of names, 64 hexadecimal digits. Raises InvalidValueError for a name that
    is no data."""
    text = json.dumps([_plain(part) for part in parts], ensure_ascii=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _plain(name: Hashable) -> Any:
    """A namespace's name as data that JSON keeps apart."""
    if name is None or isinstance(name, (str, int)):
        return name
    if isinstance(name, bytes):
        return {"bytes": name.hex()}
    if isinstance(name, tuple):
        return [_plain(part) for part in name]
    raise InvalidValueError(
        "a namespace that is shared must be a text, a number, bytes, or a tuple of these, got "
        f"{name!r}"
    )
