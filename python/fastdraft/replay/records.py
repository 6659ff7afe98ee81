"""Recorded requests: JSON lines that any serving loop can write and `fastdraft replay` reads.

One line is one request, and the lines of a file stand in order of arrival. A
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

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastdraft.replay.lines import RecordError, family_files, parse_lines, short

if TYPE_CHECKING:
    from fastdraft.replay.calls import Reader

__all__ = [
    "Record",
    "RecordError",
    "RecordWriter",
    "check_record",
    "family_files",
    "read_families",
    "read_family",
]

Ids = NDArray[np.int32]
Encode = Callable[[list[str]], "list[Sequence[int]]"]
"""Turns texts into their token ids."""
_BATCH_LETTERS = 1 << 18


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded request.

    Attributes:
        id: Its name within the family.
        prompt_ids: The tokens of the whole prompt, int32.
        output_ids: The tokens of the output, int32.
        reference_ids: The tokens that the caller expected in the output, int32; None where the
            record has none or they were not asked for.
        session: What it continues: it arrived when the session's last request was answered.
    """

    id: str
    prompt_ids: Ids
    output_ids: Ids
    reference_ids: Ids | None = None
    session: str | None = None


class RecordWriter(AbstractContextManager["RecordWriter"]):
    """Appends records to a JSON lines file. Thread-safe.

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

    def append(self, **fields: Any) -> None:
        """Writes one record; fields that are None are left out.

        Args:
            fields: As the module describes them: `prompt` and `output` as text, `prompt_ids` and
                `output_ids` as a list or a row of integers, or both; and whatever else.

        Raises:
            RecordError: This is no record; nothing was written.
            OSError: The file cannot be written.
        """
        record = {
            name: np.asarray(value).tolist() if name.endswith("_ids") else value
            for name, value in fields.items()
            if value is not None
        }
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

    def __exit__(self, *_: object) -> None:
        self.close()


def check_record(record: dict[str, Any], location: str) -> None:
    """Raises RecordError, which begins with `location`, if the fields are not those of a record."""
    _checked(record, location, "")


def read_families(
    paths: Sequence[Path],
    encode: Encode,
    *,
    references: bool = False,
    convert: Reader | None = None,
    on_line: Callable[[str, int], object] | None = None,
) -> dict[str, list[Record]]:
    """The records of the families at `paths`, by name.

    Args:
        paths, encode, references, convert: As for `family_files` and `read_family`.
        on_line: Called after each line with the name of its family and the bytes that it takes.

    Raises:
        RecordError: As `family_files` and `read_family` do, and for a family without records. Where
            `convert` joins lines of several files, only one file needs to give records.
    """
    files = family_files(paths, of_any_form=convert is not None)
    families = {}
    for name, file in files.items():
        families[name] = read_family(
            file,
            encode,
            references=references,
            convert=convert,
            on_line=None if on_line is None else partial(on_line, name),
        )
        if not families[name] and convert is None:
            raise RecordError(f"{file} holds no records")
    found = {name: records for name, records in families.items() if records}
    if not found:
        where = ", ".join(map(str, paths))
        if convert is None:
            raise RecordError(f"{where} holds no records")
        raise RecordError(f"{where}: {convert.refusal(next(iter(files.values())))}")
    return found


def read_family(
    path: Path,
    encode: Encode,
    *,
    references: bool = False,
    convert: Reader | None = None,
    on_line: Callable[[int], object] | None = None,
) -> list[Record]:
    """The records of one file, in its order. Of their texts about 0.3 MB is in memory at a time.

    Args:
        path: A JSON lines file; empty lines are passed over.
        encode: Turns texts into token ids; called with some of the texts at a time.
        references: Whether to read what the callers expected.
        convert: Turns lines into the fields of records; else each line is a record.
        on_line: Called after each line with the bytes that it takes of the file.

    Raises:
        RecordError: A line is no record; the message names file, line and what is wrong.
    """
    records: list[Record] = []
    sessions: dict[str, Record] = {}
    batch: list[_Line] = []
    size = 0

    def take_batch() -> None:
        texts = [text for line in batch for text in line.texts]
        encoded = iter(encode(texts) if texts else [])
        for line in batch:
            ids = {
                f"{kind}_ids": np.array(next(encoded), np.int32) if isinstance(part, str) else part
                for kind, part in line.parts.items()
            }
            if line.appends and line.session in sessions:
                before = sessions[line.session]
                said = [before.prompt_ids, before.output_ids, ids["prompt_ids"]]
                ids["prompt_ids"] = np.concatenate(said)
            record = Record(line.id, **ids, session=line.session)
            if line.session is not None:
                sessions[line.session] = record
            records.append(record)
        batch.clear()

    def take(found: Iterable[dict[str, Any]], location: str, number: int) -> None:
        nonlocal size
        for at, fields in enumerate(found):
            each = _checked(fields, location, f"{number}/{at}" if at else str(number))
            if not references:
                each.parts.pop("reference", None)
            batch.append(each)
            size += sum(map(len, each.texts))
        if size >= _BATCH_LETTERS:
            take_batch()
            size = 0

    number = 0
    try:
        for line in parse_lines(path):
            number = line.number
            take([line.value] if convert is None else convert(line), line.location, number)
            if on_line is not None:
                on_line(line.bytes)
    except RecordError as error:
        if convert is None:
            raise
        convert.leave_out("damaged files", str(error))
    if convert is not None:
        take(convert.end(), f"{path}, at its end", number + 1)
    take_batch()
    return records


class _Line(NamedTuple):
    """The checked fields of one line; text is not tokenised yet."""

    id: str
    parts: dict[str, str | Ids]
    """Prompt, output, and the reference where there is one."""
    session: str | None
    appends: bool

    @property
    def texts(self) -> list[str]:
        """Those parts that need tokenising."""
        return [part for part in self.parts.values() if isinstance(part, str)]


def _checked(record: dict[str, Any], location: str, name: str) -> _Line:
    """Checks one record. `location` names it in errors, `name` is its id where it has none."""
    found = {
        kind: _text_or_ids(record, kind, location) for kind in ("prompt", "output", "reference")
    }
    parts = {kind: part for kind, part in found.items() if part is not None}
    for kind in ("prompt", "output"):
        if kind not in parts:
            has = ", ".join(record) or "nothing"
            raise RecordError(f"{location}: {kind!r} or '{kind}_ids' is missing; it has {has}")
    span = record.get("reference_span")
    if "reference" not in parts and span is not None:
        parts["reference"] = _cut(record.get("prompt"), span, location)
    names = [record.get(field) for field in ("id", "session")]
    for field, value in zip(("id", "session"), names, strict=True):
        if not isinstance(value, str | int | float | None):
            raise RecordError(f"{location}: {field} must be a string, got {short(value)}")
    own_name, session = (None if value is None else str(value) for value in names)
    mode = record.get("prompt_mode")
    if mode not in (None, "append"):
        raise RecordError(f"{location}: prompt_mode must be 'append' or missing, got {mode!r}")
    if mode == "append" and session is None:
        raise RecordError(f"{location}: prompt_mode 'append' needs a session, which is missing")
    return _Line(name if own_name is None else own_name, parts, session, mode == "append")


def _text_or_ids(record: dict[str, Any], kind: str, location: str) -> str | Ids | None:
    ids = record.get(f"{kind}_ids")
    if ids is not None:
        if not isinstance(ids, list) or not all(
            type(token) is int and 0 <= token < 2**31 for token in ids
        ):
            raise RecordError(
                f"{location}: {kind}_ids must be a list of integers from 0 to 2^31 - 1, "
                f"got {short(ids)}"
            )
        return np.array(ids, np.int32)
    text = record.get(kind)
    if text is not None and not isinstance(text, str):
        raise RecordError(f"{location}: {kind} must be a string, got {short(text)}")
    return text


def _cut(prompt: Any, span: Any, location: str) -> str:
    if not isinstance(prompt, str):
        raise RecordError(f"{location}: reference_span needs the prompt's text, which is missing")
    if (
        not isinstance(span, list)
        or [type(end) for end in span] != [int, int]
        or not 0 <= span[0] <= span[1] <= len(prompt)
    ):
        raise RecordError(
            f"{location}: reference_span must be [start, end) within the prompt's "
            f"{len(prompt)} characters, got {short(span)}"
        )
    return prompt[span[0] : span[1]]
