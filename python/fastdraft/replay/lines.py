"""Files of any form as JSON values: lines, arrays, objects over several lines, packed or not.

Whatever a file holds, memory stays bounded: no value is longer than `MOST_BYTES`, and no file
unpacks to more than `MOST_TIMES` its size. Importing this module needs the standard library alone.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import reprlib
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from fastdraft.errors import FastdraftError

__all__ = [
    "JsonLine",
    "RecordError",
    "family_files",
    "parse_lines",
    "parse_object",
    "parse_value",
    "short",
    "zstd_module",
]

MOST_BYTES = 1 << 28
"""The longest line or item of an array."""
MOST_TIMES = 1000
"""How many times its size a packed file may have when it is unpacked, beyond `MOST_BYTES`."""
_ZIP_ZSTANDARD: Final = 93
_EVENT: Final = re.compile(r"event-\d+-[\w-]+\.json")
"""A file of a folder that is one conversation, as OpenHands keeps it."""
_KNOWN_ENDS = re.compile(r"(?<=.)(\.jsonl?|\.log|\.txt|\.parquet|\.eval|\.traj)?(\.gz|\.zst)?$")


class RecordError(FastdraftError, ValueError):
    """A line or a call that holds no record, or a file that cannot be read as records."""


class JsonLine(NamedTuple):
    """A line of a file."""

    number: int
    """Counted from 1."""
    location: str
    """File and line, for messages."""
    text: bytes
    bytes: int
    """How much of the file it takes."""

    @property
    def value(self) -> dict[str, Any]:
        """The JSON object of the line. Raises RecordError where it holds none."""
        return parse_object(self.text, self.location)


def family_files(paths: Sequence[Path], *, of_any_form: bool = False) -> dict[str, Path]:
    """The families at `paths`, by name: each a file, or the files of a folder.

    Args:
        paths: Files and folders.
        of_any_form: Of a folder and its folders all files but hidden ones; else its `*.jsonl`
            files, which may be packed as `*.jsonl.gz` or `*.jsonl.zst`.

    Raises:
        RecordError: A folder without such files, or two files of one name.
    """
    families: dict[str, Path] = {}
    for path in paths:
        files = [path]
        if path.is_dir():
            ends = ["**/*"] if of_any_form else ["*.jsonl", "*.jsonl.gz", "*.jsonl.zst"]
            inside = sorted(each for end in ends for each in path.glob(end) if each.is_file())
            shown = (e for e in inside if "/." not in f"/{e.relative_to(path).as_posix()}")
            files = [*dict.fromkeys(e.parent if _EVENT.fullmatch(e.name) else e for e in shown)]
        if not files:
            what = "files" if of_any_form else "*.jsonl files"
            raise RecordError(f"{path} must hold {what}, and holds none")
        for file in files:
            whole = file.relative_to(path).as_posix() if path.is_dir() else file.name
            name = _KNOWN_ENDS.sub("", whole) or whole
            if path.is_dir() and name in families:  # log.json beside log.jsonl
                name = whole
            if name in families:
                raise RecordError(
                    f"{families[name]} and {file} are both named {name}, expected one file a family"
                )
            families[name] = file
    return families


def parse_lines(path: Path) -> Iterator[JsonLine]:
    """The values in a file, each as the text of one line: its lines but for empty ones, the items
    of a JSON array, or JSON objects over several lines; the rows of a Parquet file; the samples of
    an archive of Inspect's; the files of a folder of events. A file may be packed with gzip or
    Zstandard, and be UTF-8 or UTF-16.

    Raises:
        RecordError: The file cannot be read, or holds more than fits into the bounds.
    """
    if path.is_dir():
        for event in sorted(each for each in path.iterdir() if _EVENT.fullmatch(each.name)):
            yield from parse_lines(event)
        return
    damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, zipfile.BadZipFile)
    try:
        with path.open("rb") as file:
            unpacked: io.BufferedReader = file
            packed = file.peek(4)[:4]
            if packed == b"PAR1":
                yield from _rows(path)
                return
            if packed == b"PK\x03\x04":
                yield from _samples(path)
                return
            if packed[:2] == b"\x1f\x8b":
                unpacked = io.BufferedReader(gzip.GzipFile(fileobj=file))
            elif packed == b"\x28\xb5\x2f\xfd":
                zstd = zstd_module()
                damage = (*damage, zstd.ZstdError)
                unpacked = io.BufferedReader(zstd.ZstdFile(file))
            kind, parts = _parts(unpacked, path)
            at = total = 0
            for number, line in enumerate(parts, 1):
                total += len(line)
                before, at = at, file.tell() if file.seekable() else total
                if unpacked is not file and total > MOST_BYTES + MOST_TIMES * path.stat().st_size:
                    raise RecordError(f"{path} unpacks to more than {MOST_TIMES} times its size")
                if line.strip():
                    yield JsonLine(number, f"{path}, {kind} {number}", line, at - before)
    except damage as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordError(f"cannot read {path}: {reason}") from error


def _parts(file: io.BufferedReader, path: Path) -> tuple[str, Iterator[bytes]]:
    """The parts of a file, each with its name."""
    begin = file.peek(4)
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = file.read(MOST_BYTES)
        if file.read(1):
            raise RecordError(f"{path} is UTF-16 and longer than {MOST_BYTES} bytes: make it UTF-8")
        file = io.BufferedReader(io.BytesIO(text.decode("utf-16", "replace").encode()))
    elif begin.startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    begin = file.peek(6)
    # A server's log has lines that begin with a date in brackets.
    if re.match(rb"\s*\[\s*([\[{\"\]]|$)", begin):
        return "item", _items(file, path)
    lines = _lines(file, path)
    first = list(islice(lines, 2))
    if len(first) == 2 and first[0].lstrip()[:1] == b"{" and first[1].strip()[:1] in (b'"', b"}"):
        try:
            json.loads(first[0])
        except (ValueError, RecursionError):
            return "item", _items(file, path, b"".join(first).decode("utf-8", "replace"))
    return "line", chain(first, lines)


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MOST_BYTES):
        number += 1
        if len(line) == MOST_BYTES:
            raise RecordError(f"{path}, line {number}: a line has more than {MOST_BYTES:,} bytes")
        yield line


def _items(file: IO[bytes], path: Path, text: str = "") -> Iterator[bytes]:
    """The items of a JSON array, or values one after another, read as far as they are needed.

    text: What was read of the values before.
    """
    decoder = json.JSONDecoder()
    reader = codecs.getreader("utf-8")(file)
    size, is_array = 1 << 20, not text
    at = 0
    try:
        if is_array:
            text = reader.read(size).lstrip()[1:]
        while True:
            while (at := _between(text, at)) < len(text) and not (is_array and text[at] == "]"):
                try:
                    _, end = decoder.raw_decode(text, at)
                except json.JSONDecodeError:
                    break
                yield text[at:end].encode()
                at, size = end, 1 << 20
            # An item longer than a part is not scanned again with each part.
            size = max(size, len(text) - at)
            if size > MOST_BYTES:
                raise RecordError(f"{path}: a value has more than {MOST_BYTES:,} bytes")
            if not (more := reader.read(size)):
                break
            text, at = text[at:] + more, 0
    except RecursionError as error:
        raise RecordError(f"{path} is no JSON: nested too deeply") from error
    except UnicodeError as error:
        raise RecordError(f"{path} is no JSON: {error}") from error
    if (text[at : at + 1] != "]") if is_array else text[at:]:
        raise RecordError(f"{path} is no JSON: what begins at {short(text[at:])} has no end")


def _between(text: str, at: int) -> int:
    """The offset at which the next item begins."""
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _rows(path: Path) -> Iterator[JsonLine]:
    """The rows of a Parquet file."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise RecordError(
            f"{path} is a Parquet file, which needs pyarrow: pip install 'fastdraft[parquet]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as table:
            share = path.stat().st_size // max(1, table.metadata.num_rows)
            number = 0
            for batch in table.iter_batches(64):
                for row in batch.to_pylist():
                    number += 1
                    text = json.dumps(row, default=str).encode()
                    yield JsonLine(number, f"{path}, row {number}", text, share)
    except ArrowException as error:
        raise RecordError(f"cannot read {path}: {error}") from error


def _samples(path: Path) -> Iterator[JsonLine]:
    """The samples in a log of Inspect's (`.eval`)."""
    with zipfile.ZipFile(path) as archive:
        number = 0
        for each in archive.infolist():
            if not re.search(r"(^|/)samples/.*\.json$", each.filename):
                continue
            number += 1
            if each.file_size > MOST_BYTES:
                raise RecordError(f"{path}, {each.filename} has more than {MOST_BYTES:,} bytes")
            if each.compress_type == _ZIP_ZSTANDARD:  # which zipfile knows from Python 3.14 on
                with path.open("rb") as file:
                    file.seek(each.header_offset + 26)
                    names, extra = struct.unpack("<HH", file.read(4))
                    file.seek(names + extra, io.SEEK_CUR)
                    with zstd_module().ZstdFile(
                        io.BytesIO(file.read(each.compress_size))
                    ) as packed:
                        text = packed.read(each.file_size + 1)
            else:
                text = archive.read(each)
            yield JsonLine(number, f"{path}, {each.filename}", text, each.compress_size)


def zstd_module() -> Any:
    """The module that Python has from 3.14 on."""
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def parse_value(text: bytes | str, location: str) -> Any:
    """A JSON value. Raises RecordError, which begins with `location`."""
    try:
        value = json.loads(text)
        # JSON may hold one half of a surrogate pair, which no tokenizer and no file takes.
        if re.search(rb"\\u[dD]", text.encode() if isinstance(text, str) else text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{location}: a string holds half a surrogate pair") from error
    except ValueError as error:
        raise RecordError(f"{location}: not JSON: {error}") from error
    except RecursionError as error:
        raise RecordError(f"{location}: nested too deeply") from error
    return value


def parse_object(text: bytes | str, location: str) -> dict[str, Any]:
    """A JSON object. Raises RecordError, which begins with `location`."""
    value = parse_value(text, location)
    if not isinstance(value, dict):
        raise RecordError(
            f"{location}: expected a JSON object, got {type(value).__name__} {short(value)}"
        )
    return value


def short(value: Any) -> str:
    """A value for messages, in 60 characters at most."""
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
