"""`fastdraft datastore`: frozen datastores from text and token arrays, and what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from fastdraft.cli.options import FILE, NUMBER, open_datastore, ray_option
from fastdraft.cluster import Cluster
from fastdraft.datastore import Datastore, DatastoreWriter
from fastdraft.errors import InvalidValueError
from fastdraft.replay.calls import Reader
from fastdraft.replay.display import progress
from fastdraft.replay.lines import RecordError, parse_lines, short
from fastdraft.replay.tokenizer import TextTokenizer

__all__ = ["datastore"]

PIECE_CHARACTERS = 1 << 20
"""Text is tokenised in pieces of about this many, which bounds the memory that it takes."""
SLICE_TOKENS = 1 << 22
"""How many tokens of an array are appended at a time."""
_PART_TOKENS = 64
"""The least that a part counts for: a short one takes more memory than its tokens."""


@click.group()
def datastore() -> None:
    """Build frozen datastores, and look into them."""


@datastore.command()
@click.argument("output", metavar="OUT.fds", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("inputs", metavar="INPUTS...", nargs=-1, required=True, type=FILE)
@click.option(
    "--tokenizer",
    metavar="MODEL",
    help="The model whose tokens these are: a folder, a tokenizer.json, or a name on the Hugging "
    "Face hub; needed for text, and kept with the store to recognise it by.",
)
@click.option(
    "--field",
    default="text",
    show_default=True,
    help="The field of a JSON line that holds its text, or its token ids as a list.",
)
@click.option(
    "--answers",
    is_flag=True,
    help="The inputs are logs, as `fastdraft replay` reads them: store the answers in them.",
)
@ray_option
def build(
    output: Path,
    inputs: tuple[Path, ...],
    tokenizer: str | None,
    field: str,
    answers: bool,
    address: str | None,
) -> None:
    """Write a frozen datastore from files of text or token ids.

    \b
    .jsonl   one document a line, see --field
    .npy     one row of int32 or int64 token ids, or a document a row
    others   text in UTF-8, one document a file

    The file takes its name when it is complete. Before, it is OUT.fds.*.tmp; the next build of
    OUT.fds removes what one that was killed left. Memory stays below about 1 GB, however large the
    inputs are.

    With --answers, each answer in the logs is a document. A line that is no request with its answer
    is left out and named.

    With --ray, each input file is read and tokenised on one core of the cluster, and this process
    writes the store: the same file, bit for bit. It helps where there is text to tokenise, and more
    than one machine.
    """
    if answers and tokenizer is None:
        raise click.UsageError("--answers needs --tokenizer, which renders what the model said")
    texts = None if tokenizer is None else TextTokenizer(tokenizer)
    mark = None if texts is None else texts.fingerprint()

    def read(paths: Sequence[Path], texts: TextTokenizer | None) -> Iterator[_Part]:
        if answers and texts is not None:
            return _answers(paths, texts)
        return _parts(paths, field)

    with ExitStack() as stack:
        if address is None:
            parts = _tokenised(read(inputs, texts), texts)
        else:
            cluster = stack.enter_context(Cluster(address))
            parts = _tokenised_by(cluster, inputs, read, tokenizer)
        advance = stack.enter_context(progress(sum(path.stat().st_size for path in inputs)))
        writer = stack.enter_context(DatastoreWriter(output, fingerprint=mark))
        for part in parts:
            if part.begins:
                writer.begin_document()
            try:
                writer.append(part.content, output=answers)
            except InvalidValueError as error:
                raise InvalidValueError(f"{part.place}: {error}") from error
            advance(f"{writer.num_tokens / 1e6:.1f} M tokens", part.bytes)
        counts = f"{writer.num_tokens:,} tokens in {writer.num_documents:,} documents"
    click.echo(f"{output}: {counts}, {output.stat().st_size:,} bytes")


@datastore.command()
@click.argument("output", metavar="OUT.fds", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("inputs", metavar="IN.fds...", nargs=-1, required=True, type=FILE)
def merge(output: Path, inputs: tuple[Path, ...]) -> None:
    """Join frozen datastores of one tokenizer to one, in their order.

    The checksums of each are compared first.
    """
    stores = [Datastore.open(path, verify=True) for path in inputs]
    marks = {store.fingerprint: path for store, path in zip(stores, inputs, strict=True)}
    if len(marks) > 1:
        one, other, *_ = marks.values()
        raise InvalidValueError(f"{other} must be of the tokenizer of {one}, got another or none")
    [mark] = marks
    with (
        progress(sum(map(len, stores))) as advance,
        DatastoreWriter(output, fingerprint=mark) as writer,
    ):
        for store, path in zip(stores, inputs, strict=True):
            writer.append_all(store)
            advance(path.name, len(store))
        counts = f"{writer.num_tokens:,} tokens in {writer.num_documents:,} documents"
    click.echo(f"{output}: {counts}, {output.stat().st_size:,} bytes")


@datastore.command()
@click.argument("file", type=FILE)
@click.option("--verify", is_flag=True, help="Read all of it and compare its checksums.")
def info(file: Path, verify: bool) -> None:
    """Show what a frozen datastore holds."""
    with Datastore.open(file, verify=verify) as store:
        click.echo(f"tokens       {len(store):,}")
        click.echo(f"documents    {store.num_documents:,}")
        click.echo(f"bytes        {store.bytes:,} ({store.bytes / max(len(store), 1):.1f} a token)")
        tokenizer = "not known" if store.fingerprint is None else store.fingerprint.hex()
        click.echo(f"tokenizer    {tokenizer}")
        click.echo(f"checksums    {'right' if verify else 'not compared (--verify)'}")


@datastore.command()
@click.argument("file", type=FILE)
@click.argument("text")
@click.option(
    "--tokenizer",
    metavar="MODEL",
    help="The model of --tokenizer when the store was built. Without it, TEXT is token ids, such "
    "as '17 4 99'.",
)
@click.option("--most", type=NUMBER, default=8, show_default=True, help="How many places to show.")
@click.option(
    "--tokens", type=NUMBER, default=16, show_default=True, help="How many tokens of each to show."
)
def query(file: Path, text: str, tokenizer: str | None, most: int, tokens: int) -> None:
    """Show where the last tokens of TEXT occur in a frozen datastore, and what follows them."""
    texts = None if tokenizer is None else TextTokenizer(tokenizer)
    if texts is not None:
        (wanted,) = texts.encode([text])
    elif not re.fullmatch(r"\d+( \d+)*", text):
        raise click.UsageError(
            f"text needs --tokenizer, and token ids look like '17 4', got {text!r}"
        )
    else:
        wanted = [int(each) for each in text.split()]
    with open_datastore(file, texts) as store:
        found = store.find(wanted, most=most)
        click.echo(f"{len(found)} places")
        for place in found:
            ids = store.read(place.next, tokens).tolist()
            follows = " ".join(map(str, ids)) if texts is None else repr(texts.decode(ids))
            click.echo(f"{place.length} tokens, at {place.next:,}: {follows}")


class _Part(NamedTuple):
    """Part of a document: text or token ids."""

    place: str
    """Where it is from, for messages."""
    content: Any
    begins: bool
    """Whether it is the document's first."""
    bytes: int
    """How much of its file it takes."""


def _parts(inputs: Sequence[Path], field: str) -> Iterator[_Part]:
    for path in inputs:
        if path.suffix == ".jsonl":
            yield from _json_lines(path, field)
        elif path.suffix == ".npy":
            yield from _rows(path)
        else:
            yield from _text(path)


def _json_lines(path: Path, field: str) -> Iterator[_Part]:
    for line in parse_lines(path):
        value = line.value.get(field)
        if not isinstance(value, str | list):
            has = f"a line with {', '.join(line.value):.80}"
            got = has if value is None else short(value)
            raise InvalidValueError(
                f"{line.place}: expected text or a list of token ids in the field {field!r}, "
                f"got {got}"
            )
        yield _Part(line.place, value, True, line.bytes)


def _answers(inputs: Sequence[Path], tokenizer: TextTokenizer) -> Iterator[_Part]:
    """The answers in logs; what was left out on standard error. Raises RecordError without any."""
    reader = Reader(tokenizer)

    def parts(found: Iterable[dict[str, Any]], place: str, size: int) -> Iterator[_Part]:
        for at, fields in enumerate(found):
            answer = fields.get("output_ids") or fields["output"]
            yield _Part(place, answer, True, 0 if at else size)

    for path in inputs:
        try:
            for line in parse_lines(path):
                yield from parts(reader(line), line.place, line.bytes)
        except RecordError as error:
            reader.leave_out("damaged files", str(error))
        yield from parts(reader.end(), f"{path}, at its end", 0)
    if not reader.calls:
        raise RecordError(f"{', '.join(map(str, inputs))}: {reader.refusal(inputs[0])}")
    for sentence in reader.told():
        click.echo(sentence, err=True)


def _text(path: Path) -> Iterator[_Part]:
    begins = True
    try:
        with path.open(encoding="utf-8", newline="") as file:
            # A cut within a line could change tokens; at the end of one it hardly ever does.
            while piece := file.read(PIECE_CHARACTERS):
                piece += file.readline(PIECE_CHARACTERS)
                yield _Part(str(path), piece, begins, len(piece.encode()))
                begins = False
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"{path} is not UTF-8 text: {error}") from error


def _rows(path: Path) -> Iterator[_Part]:
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
            place = f"{path}, row {number}, from token {start} on"
            yield _Part(place, np.asarray(ids), start == 0, ids.nbytes)


def _tokenised(parts: Iterator[_Part], tokenizer: TextTokenizer | None) -> Iterator[_Part]:
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


def _tokenised_by(
    cluster: Cluster,
    inputs: Sequence[Path],
    read: Callable[[Sequence[Path], TextTokenizer | None], Iterator[_Part]],
    tokenizer: str | None,
) -> Iterator[_Part]:
    """The same parts, each file's by a task of its own."""
    # The nodes work in folders of their own.
    where = tokenizer
    if where is not None and Path(where).exists():
        where = str(Path(where).resolve())

    def file_parts(path: Path) -> Iterator[list[_Part]]:
        # The other cores have tasks of their own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        texts = None if where is None else TextTokenizer(where)
        for batch in _batches(read((path,), texts)):
            yield _encode(batch, texts)

    return chain.from_iterable(cluster.run(file_parts, [path.resolve() for path in inputs]))


def _batches(parts: Iterator[_Part]) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += _PART_TOKENS + len(part.content)
        if size >= 2 * PIECE_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: list[_Part], tokenizer: TextTokenizer | None) -> list[_Part]:
    places = [i for i, part in enumerate(batch) if isinstance(part.content, str)]
    if not places:
        return batch
    if tokenizer is None:
        raise InvalidValueError(f"{batch[places[0]].place}: text needs --tokenizer")
    encoded = batch.copy()
    ids = tokenizer.encode([batch[i].content for i in places])
    for i, tokens in zip(places, ids, strict=True):
        encoded[i] = batch[i]._replace(content=np.array(tokens, np.int32))
    return encoded
