"""The command line, run in this process."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from fastdraft.cli.app import app

__all__ = ["fastdraft", "succeed"]


def fastdraft(*arguments: object, **options: Any) -> Result:
    """The result of a command; options: those of `CliRunner.invoke`."""
    return CliRunner().invoke(app, [*map(str, arguments)], **options)


def succeed(*arguments: object, **options: Any) -> Result:
    """The result of a command that must succeed."""
    result = fastdraft(*arguments, **options)
    assert result.exit_code == 0, result.output
    return result
