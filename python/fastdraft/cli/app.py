"""The command group. A new command is a file beside this one and a name in the list below."""

from __future__ import annotations

import click

import fastdraft
from fastdraft.cli.datastore import datastore
from fastdraft.cli.demo import demo
from fastdraft.cli.doctor import check
from fastdraft.cli.memory import memory
from fastdraft.cli.ngrams import ngrams
from fastdraft.cli.replay import replay
from fastdraft.errors import FastdraftError

__all__ = ["app"]

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

# Each package that the commands import when they run, and the extra that installs it.
EXTRAS = {
    "torch": "hf",
    "transformers": "cli",
    "accelerate": "demo",
    "backports": "cli",
    "filelock": "cli",
    "fsspec": "fleet",
    "gguf": "demo",
    "jmespath": "cli",
    "matplotlib": "plot",
    "ray": "ray",
    "tokenizers": "cli",
}


class _Group(click.Group):
    """Turns the errors that a user can act on into one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except FastdraftError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            raise click.ClickException(
                f"this command needs {package}, which is not installed: "
                f"pip install 'fastdraft[{EXTRAS[package]}]'"
            ) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fastdraft.__version__, prog_name="fastdraft")
def app() -> None:
    """Speculative decoding from text that is already known; the output stays the model's own.

    \b
    To complete commands and options with Tab, put into ~/.bashrc (or zsh, or fish):
      eval "$(_FASTDRAFT_COMPLETE=bash_source fastdraft)"
    """


@app.command()
@click.pass_context
def doctor(context: click.Context) -> None:
    """Show versions, which hosts load fastdraft, and how to turn drafting on in each.

    Loading a host takes as long as its own start. Exits with 1 where an installed host cannot load
    fastdraft.
    """
    context.exit(check())


for command in (datastore, demo, memory, ngrams, replay):
    app.add_command(command)
