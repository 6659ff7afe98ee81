"""The texts in files, as token ids: what datastores and tables of n-grams are built from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from fastdraft.errors import InvalidValueError
from fastdraft.replay.calls import Reader
from fastdraft.replay.cluster import Cluster
from fastdraft.replay.lines import RecordError, parse_lines, short
from fastdraft.replay.tokenizer import TextTokenizer

__all__ = ["Part", "answers_in", "parts_of", "tokenised", "tokenised_by"]

PIECE_CHARACTERS = 1 << 20
"""Text is tokenised in pieces of about this many, which bounds the memory that it takes."""
SLICE_TOKENS = 1 << 22
"""How many tokens of an array are appended at a time."""
_PART_TOKENS = 64
"""The least that a part counts for: a short one takes more memory than its tokens."""


class Part(NamedTuple):
    """Part of a document: text or token ids."""

    location: str
    """The file and line it is from, for messages."""
    content: Any
    begins: bool
    """True for the document's first part."""
    bytes: int
    """How much of its file it takes."""
    question: str | None = None
    """A digest of the question that it answers; None: it answers none."""


def parts_of(inputs: Sequence[Path], field: str) -> Iterator[Part]:
    for path in inputs:
        if path.suffix == ".jsonl":
            yield from _json_lines(path, field)
        elif path.suffix == ".npy":
            yield from _rows(path)
        else:
            yield from _text(path)


def _json_lines(path: Path, field: str) -> Iterator[Part]:
    for line in parse_lines(path):
        value = line.value.get(field)
        if not isinstance(value, str | list):
            has = f"a line with {', '.join(line.value):.80}"
            got = has if value is None else short(value)
            raise InvalidValueError(
                f"{line.location}: expected text or a list of token ids in the field {field!r}, "
                f"got {got}"
            )
        yield Part(line.location, value, True, line.bytes)


def answers_in(inputs: Sequence[Path], tokenizer: TextTokenizer) -> Iterator[Part]:
    """The answers in logs; what was left out on standard error. Raises RecordError without any."""
    reader = Reader(tokenizer)

    def parts(found: Iterable[dict[str, Any]], location: str, size: int) -> Iterator[Part]:
        for at, fields in enumerate(found):
            answer = fields.get("output_ids") or fields["output"]
            asked = fields.get("prompt_ids") or fields["prompt"]
            question = hashlib.sha256(repr(asked).encode()).hexdigest()
            yield Part(location, answer, True, 0 if at else size, question)

    for path in inputs:
        try:
            for line in parse_lines(path):
                yield from parts(reader(line), line.location, line.bytes)
        except RecordError as error:
            reader.leave_out("damaged files", str(error))
        yield from parts(reader.end(), f"{path}, at its end", 0)
    if not reader.calls:
        raise RecordError(f"{', '.join(map(str, inputs))}: {reader.refusal(inputs[0])}")
    for sentence in reader.summary():
        click.echo(sentence, err=True)


def _text(path: Path) -> Iterator[Part]:
    begins = True
    try:
        with path.open(encoding="utf-8", newline="") as file:
            # A cut within a line could change tokens; at the end of one it hardly ever does.
            while piece := file.read(PIECE_CHARACTERS):
                piece += file.readline(PIECE_CHARACTERS)
                yield Part(str(path), piece, begins, len(piece.encode()))
                begins = False
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"{path} is not UTF-8 text: {error}") from error


def _rows(path: Path) -> Iterator[Part]:
    array: NDArray[Any]
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise InvalidValueError(f"{path} is not a .npy file: {error}") from error
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        raise InvalidValueError(
            f"{path} must hold one or two dimensions of integers, got {array.ndim} of {array.dtype}"
        )
    if array.size == 0:
        raise InvalidValueError(f"{path} is empty")
    for number, row in enumerate(array.reshape(-1, array.shape[-1])):
        for start in range(0, len(row), SLICE_TOKENS):
            ids = row[start : start + SLICE_TOKENS]
            location = f"{path}, row {number}, from token {start} on"
            yield Part(location, np.asarray(ids), start == 0, ids.nbytes)


def tokenised(parts: Iterator[Part], tokenizer: TextTokenizer | None) -> Iterator[Part]:
    """The parts in their order, all as token ids.

    The tokenizer cuts the texts of a batch side by side, on all cores and without the GIL, while
    the batch before is written.
    """
    with ThreadPoolExecutor(1) as pool:
        pending = None
        for batch in _batches(parts):
            coming = pool.submit(_encode, batch, tokenizer)
            if pending is not None:
                yield from pending.result()
            pending = coming
        if pending is not None:
            yield from pending.result()


def tokenised_by(
    cluster: Cluster,
    inputs: Sequence[Path],
    read: Callable[[Sequence[Path], TextTokenizer | None], Iterator[Part]],
    tokenizer: str | None,
) -> Iterator[Part]:
    """The same parts, each file's by a task of its own."""
    # The nodes work in folders of their own.
    where = tokenizer
    if where is not None and Path(where).exists():
        where = str(Path(where).resolve())

    def file_parts(path: Path) -> Iterator[list[Part]]:
        # The other cores have tasks of their own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        texts = None if where is None else TextTokenizer(where)
        for batch in _batches(read((path,), texts)):
            yield _encode(batch, texts)

    return chain.from_iterable(cluster.run(file_parts, [path.resolve() for path in inputs]))


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += _PART_TOKENS + len(part.content)
        if size >= 2 * PIECE_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: list[Part], tokenizer: TextTokenizer | None) -> list[Part]:
    texts = [i for i, part in enumerate(batch) if isinstance(part.content, str)]
    if not texts:
        return batch
    if tokenizer is None:
        raise InvalidValueError(f"{batch[texts[0]].location}: text needs --tokenizer")
    encoded = batch.copy()
    ids = tokenizer.encode([batch[i].content for i in texts])
    for i, tokens in zip(texts, ids, strict=True):
        encoded[i] = batch[i]._replace(content=np.array(tokens, np.int32))
    return encoded
