"""`fastdraft ngrams`: tables of n-grams from text, and what is in them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np

from fastdraft import _core
from fastdraft.cli.options import FILE, field_option
from fastdraft.cli.texts import answers_in, parts_of, tokenised
from fastdraft.errors import InvalidValueError
from fastdraft.memory.common_ngrams import common_texts
from fastdraft.memory.ngrams import NgramTable
from fastdraft.replay.display import progress
from fastdraft.replay.tokenizer import TextTokenizer

__all__ = ["ngrams"]

TEXT_TOKENS = 1024
"""Longer texts count as several: a book tells more than a sentence."""
HELD_OUT = 10
"""Every tenth question is kept out of the table that the report is about."""


@click.group()
def ngrams() -> None:
    """Build tables of n-grams, which draft where nothing can be copied."""


@ngrams.command()
@click.argument("output", metavar="OUT.fdn", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("inputs", metavar="TEXT...", nargs=-1, required=True, type=FILE)
@click.option(
    "--tokenizer",
    metavar="MODEL",
    required=True,
    help="The target model: a folder with its tokenizer, or its name on the Hugging Face hub.",
)
@field_option
@click.option(
    "--answers",
    is_flag=True,
    help="The inputs are logs, as `fastdraft replay` reads them: count the answers in them, those "
    "to one question as one text.",
)
@click.option(
    "--common/--no-common",
    default=True,
    help="Whether to also count the text that comes with fastdraft.  [default: common]",
)
def build(
    output: Path,
    inputs: tuple[Path, ...],
    tokenizer: str,
    field: str,
    answers: bool,
    common: bool,
) -> None:
    """Count the n-grams of texts, and write their table.

    \b
    .jsonl   one text a line, see --field
    .npy     a text of int32 or int64 token ids a row
    others   text in UTF-8

    An n-gram counts once for each text that has it, and stands in the table if two have it; of a
    long text each 1,024 tokens count as a text. Takes about 100 bytes of memory a token.

    The report says how many tokens of every tenth text are among the two likeliest of a table of
    the other texts. That is how good guesses are in text like this, without the common one.
    """
    texts = TextTokenizer(tokenizer)
    mark = texts.fingerprint()
    parts = answers_in(inputs, texts) if answers else parts_of(inputs, field)
    groups: dict[object, int] = {}
    questions: dict[object, int] = {}
    held_out: list[np.ndarray] = []
    with TemporaryDirectory(prefix="fastdraft-") as folder:
        rest = Path(folder) / "rest.fdn"
        writers = [
            _core.NgramTableWriter(path=bytes(path), fingerprint=mark) for path in (output, rest)
        ]
        with progress(sum(path.stat().st_size for path in inputs)) as advance:
            for number, part in enumerate(tokenised(parts, texts)):
                ids = np.asarray(part.content)
                for piece in range(0, len(ids), TEXT_TOKENS):
                    text = ids[piece : piece + TEXT_TOKENS]
                    question = part.question or (number, piece)
                    group = groups.setdefault((question, piece), len(groups))
                    asked_at = questions.setdefault(question, len(questions))
                    is_held_out = asked_at % HELD_OUT == HELD_OUT - 1
                    if is_held_out:
                        held_out.append(text)
                    try:
                        for writer in writers[: 1 if is_held_out else 2]:
                            writer.add(text, group=group)
                    except InvalidValueError as error:
                        raise InvalidValueError(f"{part.location}: {error}") from error
                advance(f"{writers[0].num_tokens / 1e6:.1f} M tokens", part.bytes)
            for number, row in enumerate(texts.encode([*common_texts()]) if common else ()):
                writers[0].add(row, group=len(groups) + number)
            advance("counting", 0)
            for writer in writers:
                writer.finish()
        others = NgramTable.open(rest)
        known = sum(others.count_known(text) for text in held_out)
    table = NgramTable.open(output)
    counted = f"{writers[0].num_tokens:,} tokens in {len(groups):,} texts"
    click.echo(f"{output}: {_held(table)}, {table.bytes:,} bytes, from {counted}")
    asked = sum(len(text) - 1 for text in held_out)
    if asked:
        click.echo(
            f"held out: {known / asked:.1%} of {asked:,} tokens of every tenth text are among the "
            "two likeliest of a table of the others"
        )


@ngrams.command()
@click.argument("file", type=FILE)
@click.argument("text", required=False)
@click.option("--tokenizer", metavar="MODEL", help="For TEXT: the model that it was built for.")
def info(file: Path, text: str | None, tokenizer: str | None) -> None:
    """Show what a table holds, and with TEXT which tokens it has after that."""
    table = NgramTable.open(file)
    click.echo(f"n-grams      {_held(table)}")
    click.echo(f"bytes        {table.bytes:,}")
    mark = "not known" if table.fingerprint is None else table.fingerprint.hex()
    click.echo(f"tokenizer    {mark}")
    if text is None:
        return
    if tokenizer is None:
        raise click.UsageError("TEXT needs --tokenizer")
    texts = TextTokenizer(tokenizer)
    table = NgramTable.open(file, fingerprint=texts.fingerprint())
    for guess in table.guess(texts.encode([text])[0], most=8):
        token = repr(texts.decode([guess.token]))
        click.echo(f"{guess.probability:6.1%}  {token}, after the last {guess.order}")


def _held(table: NgramTable) -> str:
    return f"{table.num_entries:,} n-grams after {table.num_contexts:,} contexts"
