"""Recorded requests: JSON lines that any serving loop can write and `fastdraft replay` reads.

One line is one request, and the lines of a file stand in the order in which the requests came. A
file is a family: its requests are of one kind, and one memory of earlier requests serves them all.

- `prompt` or `prompt_ids`: what the model was given, as text or as token ids. Ids go before text.
- `output` or `output_ids`: what it answered.
- `reference`, `reference_ids` or `reference_span`: what the caller expected in the output, as text,
  token ids, or `[start, end)` in the prompt's characters. May be missing or null.
- `id`: any string; by default the number of the line.
- `session`: any string. With `"prompt_mode": "append"` everything said before in the session,
  prompts and outputs, stands before the prompt.

Further fields are kept and not read. Importing this module needs numpy alone:

    with RecordWriter("traffic.jsonl") as records:
        records.append(prompt_ids=[5, 6, 7], output_ids=[6, 7, 8], session="user 7")
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import reprlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastdraft.errors import FastdraftError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Record",
    "RecordError",
    "RecordWriter",
    "check_record",
    "family_files",
    "parse_lines",
    "parse_object",
    "read_families",
    "read_family",
    "short",
]

Ids = NDArray[np.int32]
Encode = Callable[[list[str]], "list[Sequence[int]]"]
"""Turns texts into their token ids."""


class RecordError(FastdraftError, ValueError):
    """A line or a call that holds no record, or a file that cannot be read as records."""


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded request.

    Attributes:
        id: Its name within the family.
        prompt_ids: The tokens of the whole prompt, int32.
        output_ids: The tokens of the output, int32.
        reference_ids: The tokens that the caller expected in the output, int32; None where the
            record has none or they were not asked for.
        session: What it continues: it came when the session's last request was answered.
    """

    id: str
    prompt_ids: Ids
    output_ids: Ids
    reference_ids: Ids | None = None
    session: str | None = None


class RecordWriter:
    """Appends records to a JSON lines file. Calls may come from several threads at once.

    Each record is in the file when `append` returns, so an interrupted process loses none; what
    stood in the file before stays.
    """

    def __init__(self, path: str | Path) -> None:
        """Opens `path`, which is made where it does not exist. Raises OSError."""
        self._lock = threading.Lock()
        self._file = Path(path).open("ab+")  # noqa: SIM115 - closed by close
        # A process that died while it wrote leaves half a line, which must not swallow the next.
        if self._file.tell() > 0:
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(
        self,
        *,
        prompt: str | None = None,
        output: str | None = None,
        prompt_ids: ArrayLike | None = None,
        output_ids: ArrayLike | None = None,
        reference: str | None = None,
        reference_ids: ArrayLike | None = None,
        **fields: Any,
    ) -> None:
        """Writes one record.

        Text, token ids (a list or a row of integers) or both are taken, of prompt and output at
        least one each. `fields` are written as they are: `id`, `session`, `model`, ...

        Raises:
            RecordError: This is no record; nothing was written.
            OSError: The file cannot be written.
        """
        record = {
            **fields,
            "prompt": prompt,
            "output": output,
            "prompt_ids": _as_list(prompt_ids),
            "output_ids": _as_list(output_ids),
            "reference": reference,
            "reference_ids": _as_list(reference_ids),
        }
        record = {name: value for name, value in record.items() if value is not None}
        check_record(record, "this call")
        try:
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"this call: no JSON can hold it: {error}") from error
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_record(record: dict[str, Any], place: str) -> None:
    """Raises RecordError, which begins with `place`, where the fields are not those of a record."""
    _Line.of(record, place, "")


def family_files(paths: Sequence[Path]) -> dict[str, Path]:
    """The families at `paths`, by name: each a JSON lines file, or a folder of `*.jsonl` files.

    Raises:
        RecordError: A folder without such files, or two files of one name.
    """
    families: dict[str, Path] = {}
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise RecordError(f"{path} must hold *.jsonl files, and holds none")
        for file in files:
            if file.stem in families:
                raise RecordError(
                    f"{families[file.stem]} and {file} are both named {file.stem}, "
                    "expected one file a family"
                )
            families[file.stem] = file
    return families


def read_families(
    paths: Sequence[Path],
    encode: Encode,
    *,
    names: Sequence[str] = (),
    limit: int | None = None,
    references: bool = False,
    on_family: Callable[[str], object] | None = None,
) -> dict[str, list[Record]]:
    """The records of the families at `paths`, by name.

    Args:
        paths, encode, limit, references: As for `family_files` and `read_family`.
        names: Which families; all without any.
        on_family: Called with the name of each family that was read.

    Raises:
        RecordError: As `family_files` and `read_family` do, and for a family without records or
            one of `names` that is not there.
    """
    files = family_files(paths)
    for name in names:
        if name not in files:
            raise RecordError(f"{name!r} is not one of {', '.join(files)}")
    families = {}
    for name, file in files.items():
        if names and name not in names:
            continue
        families[name] = read_family(file, encode, limit=limit, references=references)
        if not families[name]:
            raise RecordError(f"{file} holds no records")
        if on_family is not None:
            on_family(name)
    return families


def read_family(
    path: Path,
    encode: Encode,
    *,
    limit: int | None = None,
    references: bool = False,
) -> list[Record]:
    """The records of one file, in its order.

    Args:
        path: A JSON lines file; empty lines are passed over.
        encode: Turns texts into token ids; called at most once, with all texts of the file.
        limit: How many records to read at most.
        references: Whether to read what the callers expected.

    Raises:
        RecordError: A line is no record; the message names file, line and what is wrong.
    """
    lines = [
        _Line.of(line.value, line.place, str(line.number))
        for line in islice(parse_lines(path), limit)
    ]
    texts = [text for line in lines for text in line.texts(references)]
    encoded = iter(encode(texts) if texts else [])

    def ids(text: str | Ids) -> Ids:
        return np.array(next(encoded), np.int32) if isinstance(text, str) else text

    sessions: dict[str, Ids] = {}
    records: list[Record] = []
    for line in lines:
        prompt, output = ids(line.prompt), ids(line.output)
        reference = None if line.reference is None or not references else ids(line.reference)
        if line.appends and line.session in sessions:
            prompt = np.concatenate([sessions[line.session], prompt])
        if line.session is not None:
            sessions[line.session] = np.concatenate([prompt, output])
        records.append(Record(line.id, prompt, output, reference, line.session))
    return records


class JsonLine(NamedTuple):
    """A line of a JSON lines file."""

    number: int
    """Counted from 1."""
    place: str
    """File and line, for messages."""
    text: bytes
    bytes: int
    """How much of the file it takes."""

    @property
    def value(self) -> dict[str, Any]:
        """What it holds. Raises RecordError where that is no JSON object."""
        return parse_object(self.text, self.place)


def parse_lines(path: Path) -> Iterator[JsonLine]:
    """The lines of a JSON lines file but for empty ones, or the items of an array in a JSON file.
    Either may be packed with gzip.

    Raises:
        RecordError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            unpacked: io.BufferedReader = file
            if file.peek(2)[:2] == b"\x1f\x8b":
                unpacked = io.BufferedReader(gzip.GzipFile(fileobj=file))
            kind, parts = "line", iter(unpacked)
            if unpacked.peek(1)[:1] == b"[":
                kind, parts = "item", _items(unpacked, path)
            at = 0
            for number, line in enumerate(parts, 1):
                before, at = at, file.tell()
                if line.strip():
                    yield JsonLine(number, f"{path}, {kind} {number}", line, at - before)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordError(f"cannot read {path}: {reason}") from error


def _items(file: io.BufferedReader, path: Path) -> Iterator[bytes]:
    """The items of a JSON array, read as far as they are needed."""
    decoder = json.JSONDecoder()
    text, at, size = "", 1, 1 << 20
    reader = codecs.getreader("utf-8")(file)
    try:
        while more := reader.read(size):
            text, at = text[at:] + more, 0 if text else 1
            while (at := _between(text, at)) < len(text) and text[at] != "]":
                try:
                    _, end = decoder.raw_decode(text, at)
                except json.JSONDecodeError:
                    break
                yield text[at:end].encode()
                at, size = end, 1 << 20
            # What is longer than a part is not read again for each part that it takes.
            size = max(size, len(text) - at)
    except RecursionError as error:
        raise RecordError(f"{path} is no JSON array: nested too deeply") from error
    except UnicodeError as error:
        raise RecordError(f"{path} is no JSON array: {error}") from error
    if not text[at:].startswith("]"):
        raise RecordError(f"{path} is no JSON array: what begins at {short(text[at:])} has no end")


def _between(text: str, at: int) -> int:
    """Where the next item begins."""
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def parse_object(text: bytes | str, place: str) -> dict[str, Any]:
    """A JSON object. Raises RecordError, which begins with `place`."""
    try:
        value = json.loads(text)
        # JSON may hold one half of a surrogate pair, which no tokenizer and no file takes.
        if re.search(rb"\\u[dD]", text.encode() if isinstance(text, str) else text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{place}: a string holds half a surrogate pair") from error
    except ValueError as error:
        raise RecordError(f"{place}: not JSON: {error}") from error
    except RecursionError as error:
        raise RecordError(f"{place}: nested too deeply") from error
    if not isinstance(value, dict):
        raise RecordError(
            f"{place}: expected a JSON object, got {type(value).__name__} {short(value)}"
        )
    return value


@dataclass(frozen=True, slots=True)
class _Line:
    """What one line says, checked; text is not tokenised yet."""

    id: str
    prompt: str | Ids
    output: str | Ids
    reference: str | Ids | None
    session: str | None
    appends: bool

    @classmethod
    def of(cls, record: dict[str, Any], place: str, name: str) -> _Line:
        """Checks one record. `place` names it in errors, `name` is its id where it has none."""
        parts = {
            kind: _text_or_ids(record, kind, place) for kind in ("prompt", "output", "reference")
        }
        for kind in ("prompt", "output"):
            if parts[kind] is None:
                has = ", ".join(record) or "nothing"
                raise RecordError(f"{place}: {kind!r} or '{kind}_ids' is missing; it has {has}")
        span = record.get("reference_span")
        if parts["reference"] is None and span is not None:
            parts["reference"] = _cut(record.get("prompt"), span, place)
        names = [record.get(field) for field in ("id", "session")]
        for field, value in zip(("id", "session"), names, strict=True):
            if not isinstance(value, str | int | float | None):
                raise RecordError(f"{place}: {field} must be a string, got {short(value)}")
        own_name, session = (None if value is None else str(value) for value in names)
        mode = record.get("prompt_mode")
        if mode not in (None, "append"):
            raise RecordError(f"{place}: prompt_mode must be 'append' or missing, got {mode!r}")
        if mode == "append" and session is None:
            raise RecordError(f"{place}: prompt_mode 'append' needs a session, which is missing")
        prompt, output = parts["prompt"], parts["output"]
        assert prompt is not None and output is not None
        return cls(
            id=name if own_name is None else own_name,
            prompt=prompt,
            output=output,
            reference=parts["reference"],
            session=session,
            appends=mode == "append",
        )

    def texts(self, references: bool) -> list[str]:
        """The texts that need tokenising, in the order in which their ids are taken."""
        parts = (self.prompt, self.output, self.reference if references else None)
        return [part for part in parts if isinstance(part, str)]


def _text_or_ids(record: dict[str, Any], kind: str, place: str) -> str | Ids | None:
    ids = record.get(f"{kind}_ids")
    if ids is not None:
        if not isinstance(ids, list) or not all(
            type(token) is int and 0 <= token < 2**31 for token in ids
        ):
            raise RecordError(
                f"{place}: {kind}_ids must be a list of integers from 0 to 2^31 - 1, "
                f"got {short(ids)}"
            )
        return np.array(ids, np.int32)
    text = record.get(kind)
    if text is not None and not isinstance(text, str):
        raise RecordError(f"{place}: {kind} must be a string, got {short(text)}")
    return text


def _cut(prompt: Any, span: Any, place: str) -> str:
    if not isinstance(prompt, str):
        raise RecordError(f"{place}: reference_span needs the prompt's text, which is missing")
    if (
        not isinstance(span, list)
        or [type(end) for end in span] != [int, int]
        or not 0 <= span[0] <= span[1] <= len(prompt)
    ):
        raise RecordError(
            f"{place}: reference_span must be [start, end) within the prompt's "
            f"{len(prompt)} characters, got {short(span)}"
        )
    return prompt[span[0] : span[1]]


def _as_list(ids: ArrayLike | None) -> Any:
    return None if ids is None else np.asarray(ids).tolist()


def short(value: Any) -> str:
    """A value for messages, in 60 characters at most."""
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
