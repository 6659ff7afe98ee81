"""`fastdraft datastore`: frozen datastores from text and token arrays, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from fastdraft.cli.options import FILE, NUMBER, field_option, open_checked, ray_option
from fastdraft.cli.texts import Part, answers_in, parts_of, tokenised, tokenised_by
from fastdraft.errors import InvalidValueError
from fastdraft.memory.datastore import Datastore, DatastoreWriter
from fastdraft.replay.cluster import Cluster
from fastdraft.replay.display import progress
from fastdraft.replay.tokenizer import TextTokenizer

__all__ = ["datastore"]


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
@field_option
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

    def read(paths: Sequence[Path], texts: TextTokenizer | None) -> Iterator[Part]:
        if answers and texts is not None:
            return answers_in(paths, texts)
        return parts_of(paths, field)

    with ExitStack() as stack:
        if address is None:
            parts = tokenised(read(inputs, texts), texts)
        else:
            cluster = stack.enter_context(Cluster(address))
            parts = tokenised_by(cluster, inputs, read, tokenizer)
        advance = stack.enter_context(progress(sum(path.stat().st_size for path in inputs)))
        writer = stack.enter_context(DatastoreWriter(output, fingerprint=mark))
        for part in parts:
            if part.begins:
                writer.begin_document()
            try:
                writer.append(part.content, output=answers)
            except InvalidValueError as error:
                raise InvalidValueError(f"{part.location}: {error}") from error
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
@click.option(
    "--most", type=NUMBER, default=8, show_default=True, help="How many occurrences to show."
)
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
    with open_checked(Datastore, file, texts) as store:
        found = store.find(wanted, most=most)
        click.echo(f"occurrences: {len(found)}")
        for match in found:
            ids = store.read(match.next, tokens).tolist()
            follows = " ".join(map(str, ids)) if texts is None else repr(texts.decode(ids))
            click.echo(f"{match.length} tokens, at {match.next:,}: {follows}")
