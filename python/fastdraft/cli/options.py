"""Options of several commands, and files given by name."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from fastdraft.memory.datastore import Datastore
from fastdraft.memory.ngrams import NgramTable
from fastdraft.replay.tokenizer import TextTokenizer

__all__ = [
    "FILE",
    "NEW_FILE",
    "NUMBER",
    "command_line",
    "field_option",
    "model_options",
    "open_checked",
    "ray_option",
    "read_text",
    "write_text",
    "writing",
]

_File = TypeVar("_File", Datastore, NgramTable)

NUMBER = click.IntRange(min=1)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class _NewFile(click.Path):
    """A file to write, in a folder that exists."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is not a directory", param, ctx)
        return path


NEW_FILE = _NewFile(dir_okay=False, writable=True, path_type=Path)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of every command that runs a model: which one, and where."""
    for option in (
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            show_default=True,
            help="Type of the weights; auto is the checkpoint's own.",
        ),
        click.option(
            "--device", help="Such as cpu or cuda:0.  [default: a GPU where there is one]"
        ),
        click.option(
            "--model",
            metavar="MODEL",
            help="A causal language model: a directory or a name on the Hugging Face hub.  "
            "[default: SmolLM2-135M-Instruct, fetched at first use]",
        ),
    ):
        command = option(command)
    return command


field_option = click.option(
    "--field",
    default="text",
    show_default=True,
    help="The field of a JSON line that holds its text, or its token ids as a list.",
)
ray_option = click.option(
    "--ray",
    "address",
    metavar="ADDRESS",
    help="Work on the Ray cluster at this address, or on the one that 'auto' finds; fastdraft and "
    "the files must be on all of its nodes.",
)


def open_checked(kind: type[_File], path: Path, texts: TextTokenizer | None) -> _File:
    """A frozen store or a table of n-grams, refused if it says that its tokens are not those of
    `texts`."""
    found = kind.open(path)
    if found.fingerprint is None or texts is None:
        return found
    return kind.open(path, fingerprint=texts.fingerprint())


def read_text(path: Path) -> str:
    """The text of a file; a `click` error when it is not UTF-8 text."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While a file is written: a `click` error where it cannot be."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file."""
    with writing(path):
        path.write_text(text, "utf-8")


def command_line() -> str:
    """The command that runs now, as a shell takes it."""
    return shlex.join(["fastdraft", *sys.argv[1:]])
