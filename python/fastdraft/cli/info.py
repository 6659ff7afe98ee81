"""`fastdraft info`: what is installed, and what it can use here."""

from __future__ import annotations

from importlib import import_module

import click

from fastdraft.demo.model import is_cached, model_directory
from fastdraft.replay.measurement import describe_machine, versions

__all__ = ["info"]

PARTS = ("fastdraft._core", "fastdraft.verification", "fastdraft.kernels", "fastdraft.hf")


@click.command()
def info() -> None:
    """Show versions, what can be imported, the machine, and where the demo model lies."""
    for package, found in versions().items():
        _line(package, found or "not installed")
    for part in PARTS:
        _line(part, _state(part))
    _line("machine", describe_machine())
    _line("GPU", _gpus())
    state = "there" if is_cached() else "not fetched yet"
    _line("demo model", f"{model_directory()} ({state})")


def _line(name: str, value: str) -> None:
    click.echo(f"{name:<24}{value}")


def _state(module: str) -> str:
    try:
        return f"importable, {import_module(module).__file__}"
    except ImportError as error:
        return f"not importable: {error}"


def _gpus() -> str:
    try:
        import torch
    except ImportError:
        return "unknown without torch"
    if not torch.cuda.is_available():
        return "none that torch can use"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names)
