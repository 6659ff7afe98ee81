"""Resources that compiled kernels take, and whether AMD's waves wait for their stores."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.compiler import CompiledKernel


class Resources(NamedTuple):
    """A thread's share: registers, and bytes of its own memory, which are spills for the most
    part; and the bytes of shared memory that a program takes."""

    registers: int
    scratch: int
    shared: int


def resources_of(kernel: CompiledKernel) -> Resources:
    if kernel.metadata.target.backend == "cuda":
        found = _cuda_usage(kernel.asm["cubin"])
        return Resources(found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared)
    names = "vgpr_count|vgpr_spill_count|private_segment_fixed_size"
    usage = dict(re.findall(rf"\.({names}):\s+(\d+)", kernel.asm["amdgcn"]))
    scratch = int(usage["private_segment_fixed_size"]) + 4 * int(usage["vgpr_spill_count"])
    return Resources(int(usage["vgpr_count"]), scratch, kernel.metadata.shared)


def _cuda_usage(cubin: bytes) -> dict[str, int]:
    """The resources of a kernel as cuobjdump, which Triton brings, prints them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile() as written:
        written.write(cubin)
        written.flush()
        command = [tool, "--dump-resource-usage", written.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def waits_before_arrivals(kernel: CompiledKernel) -> int:
    """How many arrivals an AMD kernel counts, each after a wait of every wave for its stores.

    An arrival is the atomic addition whose result is used. Before it stands the barrier that all
    waves come to; before that they wait, with no store in between.

    Raises:
        AssertionError: an arrival may be counted before a store has landed.
    """
    code = [
        line.strip().partition(";")[0].split(None, 1)
        for line in kernel.asm["amdgcn"].splitlines()
        if re.match(r"\s+(?:[vs]|ds|flat|global|buffer|scratch)_\w+", line)
    ]
    operands = [(name, *rest) for name, *rest in code]
    arrivals = [
        index
        for index, (name, *rest) in enumerate(operands)
        if re.match(r"(global|buffer|flat)_atomic_add$", name) and re.search(r"sc0", rest[0])
    ]
    stores = re.compile(r"(global|buffer|flat)_(store|atomic)")
    for arrival in arrivals:
        names = [name for name, *_ in operands[:arrival]]
        barrier = len(names) - 1 - names[::-1].index("s_barrier")
        assert not any(map(stores.match, names[barrier:])), "a store after the barrier"
        waits = [
            index
            for index, (name, *rest) in enumerate(operands[:barrier])
            if name == "s_waitcnt" and "vmcnt(0)" in rest[0]
        ]
        assert waits, "nothing waits for stores"
        assert not any(map(stores.match, names[waits[-1] : barrier])), "a store after the wait"
        moved = [name for name in names[waits[-1] : barrier] if name.startswith("s_cbranch")]
        assert not moved, "not every wave waits"
    return len(arrivals)
