"""Triton without a GPU: which specialisations launches ask for, and what a compiler makes of them.

A launcher is called as in serving, on CPU tensors. Triton's own runtime works out the types, the
alignments and the constants of each launch; a hook of its takes them down and keeps it from going
on. So nothing here says a second time what the launchers decide, and nothing runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Offline(DriverBase):  # type: ignore[misc]  # untyped in Triton
    """A driver that has a target and nothing to run on it."""

    def __init__(self, target: GPUTarget):
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        # The runtime keeps kernels by device: each target has its own.
        return self.target

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> None:
        raise NotImplementedError

    def get_benchmarker(self) -> None:
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Specialisation:
    """A unit that Triton compiles: a kernel, its arguments' types, alignments and constants."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, int]
    key: str

    @property
    def name(self) -> str:
        """That of the body, where there is one."""
        names = self.kernel.arg_names
        body = self.constants[names.index("BODY"),] if "BODY" in names else self.kernel
        name: str = body.__name__
        return name

    def compile(self, target: GPUTarget) -> CompiledKernel:
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        with (
            active(target),
            triton.knobs.cache.scope(),
            triton.knobs.compilation.scope(),
            TemporaryDirectory() as cache,
        ):
            triton.knobs.cache.dir = cache
            # Lines for a debugger are a third of what LLVM does, and change no instruction.
            triton.knobs.compilation.disable_line_info = True
            return triton.compile(source, target=target, options=self.options)


@contextmanager
def active(target: GPUTarget) -> Iterator[None]:
    driver.set_active(Offline(target))
    try:
        yield
    finally:
        driver._active = None


def specialisations(target: GPUTarget, launch: Callable[[], object]) -> list[Specialisation]:
    """The specialisations that the launches of `launch` would compile for the target, in order."""
    found: list[Specialisation] = []

    def take_down(*, fn: Any, **launch: Any) -> bool:
        asked = launch["compile"]
        found.append(
            Specialisation(
                fn.jit_function,
                asked["signature"],
                asked["constants"],
                asked["configs"][0],
                {name: asked[name] for name in ("num_warps", "num_stages", "num_ctas")},
                f"{fn.module}.{fn.name}{launch['key']}",
            )
        )
        return True  # as if it were compiled already: do not go on

    with active(target), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = take_down
        launch()
    return found
