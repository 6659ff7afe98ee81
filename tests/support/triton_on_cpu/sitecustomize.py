"""Lets vLLM's V2 model runner start on a CPU, where its Triton kernels are interpreted.

vLLM uses Triton only where a driver is active, and Triton has none for a CPU. Python imports this
module at the start of each process that has the folder on its PYTHONPATH, the engine's too. The
folder above it is to be there as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace


class _Driver:
    """Says that there is a device. The interpreter asks for no more."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> object:
        import torch

        return torch.device("cpu")

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)


def _add_driver(backends: ModuleType) -> None:
    backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)


def _save_time(interpreter: ModuleType) -> None:
    from triton_interpreter import speed_up

    speed_up(interpreter)


class _Finder:
    """Changes modules of Triton when they are first imported, and not before."""

    def __init__(self) -> None:
        self._changes: dict[str, Callable[[ModuleType], None]] = {
            "triton.backends": _add_driver,
            "triton.runtime.interpreter": _save_time,
        }

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> object:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        from importlib.util import find_spec

        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("TRITON_INTERPRET") == "1":
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
