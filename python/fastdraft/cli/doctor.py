"""`fastdraft doctor`: what is installed, which hosts load fastdraft, how to turn drafting on."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version

import click

from fastdraft.demo.model import is_cached, model_directory
from fastdraft.replay.measurement import describe_machine, versions

__all__ = ["doctor"]

PARTS = ("fastdraft._core", "fastdraft.verification", "fastdraft.kernels", "fastdraft.hf")


@dataclass(frozen=True)
class Host:
    """A decoding loop of others that fastdraft drafts for.

    Attributes:
        title: Its name.
        package: What is installed of it.
        module: What of fastdraft works in it.
        group: The entry point by which it finds fastdraft; None where the user's code imports it.
        turn_on: How to turn drafting on.
    """

    title: str
    package: str
    module: str
    group: str | None
    turn_on: str


HOSTS = (
    Host(
        "transformers",
        "transformers",
        "fastdraft.hf",
        None,
        "fastdraft.hf.generate(model, input_ids) in place of model.generate(input_ids)",
    ),
    Host(
        "vLLM",
        "vllm",
        "fastdraft.integrations.vllm",
        "vllm.general_plugins",
        "vllm serve MODEL --speculative-config '"
        '{"method": "custom_class", "num_speculative_tokens": 16, '
        '"model": "fastdraft.integrations.vllm.FastdraftProposer"}\'',
    ),
    Host(
        "SGLang",
        "sglang",
        "fastdraft.integrations.sglang",
        "sglang.srt.plugins",
        "python -m sglang.launch_server --model MODEL --speculative-algorithm FASTDRAFT "
        "--speculative-num-draft-tokens 16",
    ),
    Host(
        "llama-cpp-python",
        "llama-cpp-python",
        "fastdraft.integrations.llama_cpp",
        None,
        "fastdraft.integrations.llama_cpp.FastdraftDraftModel(llama)",
    ),
)


@click.command()
def doctor() -> None:
    """Show versions, which hosts load fastdraft, and how to turn drafting on in each.

    Loading a host takes as long as its own start. Exits with 1 where an installed host cannot load
    fastdraft.
    """
    for package, found in versions().items():
        _line(package, found or "not installed")
    for part in PARTS:
        _line(part, _state(part))
    _line("machine", describe_machine())
    _line("GPU", _gpus())
    state = "there" if is_cached() else "not fetched yet"
    _line("demo model", f"{model_directory()} ({state})")
    broken = [host.title for host in HOSTS if not _show_host(host)]
    if broken:
        raise click.ClickException(f"cannot load fastdraft: {', '.join(broken)}")


def _show_host(host: Host) -> bool:
    """Prints whether a host is installed and loads fastdraft. False where it should and cannot."""
    click.echo()
    try:
        found = version(host.package)
    except PackageNotFoundError:
        _line(host.title, "not installed")
        return True
    problem = _problem(host)
    _line(host.title, f"{found}, {'loads fastdraft' if problem is None else problem}")
    if problem is None:
        _line("", f"to turn it on: {host.turn_on}")
    return problem is None


def _problem(host: Host) -> str | None:
    """Why a host does not load fastdraft; None if it does."""
    try:
        module = import_module(host.module)
    except Exception as error:  # Hosts raise whatever they like when they are imported.
        return f"cannot load {host.module}: {type(error).__name__}: {error}"
    if host.group is None:
        return None
    ours = [each for each in entry_points(group=host.group) if each.name == "fastdraft"]
    if not ours:
        return f"finds no fastdraft among its plugins ({host.group}): install fastdraft again"
    if ours[0].load() is not module.register:
        return f"finds another fastdraft among its plugins: {ours[0].value}"
    return None


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
