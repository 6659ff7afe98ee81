"""What compiled kernels take: registers, memory, and the instructions of loops over the logits."""

from __future__ import annotations

import dataclasses
import re
import struct
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import sm_arch_from_capability
from triton.compiler import CompiledKernel

WIDE_LOADS = {
    "cuda": re.compile(r"LDG\.E\.\S*128"),
    "hip": re.compile(r"(global|buffer)_load_dwordx4"),
}
# Of a thread's own memory: what is put aside for want of registers.
PUT_ASIDE = {"cuda": re.compile(r"LDL|STL"), "hip": re.compile(r"scratch_")}
EXPONENTIALS = {"cuda": re.compile(r"MUFU\."), "hip": re.compile(r"v_(exp|log|rcp|sqrt)_f")}
# What the processor drops or waits in, which costs no place of a vector instruction.
NOT_COUNTED = re.compile(r"NOP|s_")


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    jump: int | None
    """The index of the instruction that may come next in place of the following one."""
    goes_on: bool
    """Whether the following one may come next."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes, and costs a logit.

    registers, scratch (bytes: stack, local memory and spills), shared (bytes): of a thread, of a
    thread and of a program. put_aside: loads and stores of scratch in loops. wide_loads: loads of
    16 bytes. size: instructions in all. instructions, exponentials: a logit, in the costliest of
    the innermost loops with wide loads, None without such a loop. The logits of a loop are those
    that its wide loads bring.
    """

    registers: int
    scratch: int
    put_aside: int
    shared: int
    wide_loads: int
    size: int
    instructions: float | None
    exponentials: float | None


def code_of(kernels: list[CompiledKernel]) -> list[list[Instruction]]:
    """The instructions of each of some kernels for the same target.

    All at once, since NVIDIA's disassembler takes ten times as long to start as for a kernel.
    """
    target = kernels[0].metadata.target
    if target.backend == "cuda":
        return _cuda_code([kernel.asm["cubin"] for kernel in kernels], target.arch)
    return [_hip_code(kernel.asm["amdgcn"]) for kernel in kernels]


def examine(kernel: CompiledKernel, code: list[Instruction], logit_bytes: int) -> Compiled:
    backend = kernel.metadata.target.backend
    if backend == "cuda":
        registers, scratch = _cuda_resources(kernel.asm["cubin"])
    else:
        registers, scratch = _hip_resources(kernel.asm["amdgcn"])
    wide = WIDE_LOADS[backend]
    loops = [
        _loop(code, instruction.jump, last)
        for last, instruction in enumerate(code)
        if instruction.jump is not None and instruction.jump < last
    ]
    costs = []
    for body in _hot(code, loops, wide):
        logits = _count(body, wide) * 16 // logit_bytes
        counted = sum(not NOT_COUNTED.match(each.name) for each in body)
        costs.append((counted / logits, _count(body, EXPONENTIALS[backend]) / logits))
    instructions, exponentials = max(costs, default=(None, None))
    looped = [code[index] for index in set().union(*loops)]
    return Compiled(
        registers,
        scratch,
        _count(looped, PUT_ASIDE[backend]),
        kernel.metadata.shared,
        _count(code, wide),
        sum(not NOT_COUNTED.match(each.name) for each in code),
        instructions,
        exponentials,
    )


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


def _count(code: list[Instruction], pattern: re.Pattern[str]) -> int:
    return sum(bool(pattern.match(instruction.name)) for instruction in code)


def _hot(
    code: list[Instruction], loops: list[set[int]], wide: re.Pattern[str]
) -> list[list[Instruction]]:
    """The innermost loops with wide loads."""
    hot = [loop for loop in loops if _count([code[index] for index in loop], wide)]
    innermost = [loop for loop in hot if not any(other < loop for other in hot)]
    return [[code[index] for index in sorted(loop)] for loop in innermost]


def _loop(code: list[Instruction], first: int, last: int) -> set[int]:
    """The instructions on ways from first to last between them; none where last jumps back from
    code that is moved out of the way and no loop."""
    follows = {
        index: {
            follower
            for follower in ({index + 1} if code[index].goes_on else set()) | {code[index].jump}
            if follower is not None and first < follower <= last
        }
        for index in range(first, last + 1)
    }
    leads: dict[int, set[int]] = {index: set() for index in follows}
    for index, followers in follows.items():
        for follower in followers:
            leads[follower].add(index)
    return _reached(first, follows) & _reached(last, leads)


def _reached(start: int, edges: dict[int, set[int]]) -> set[int]:
    reached, left = set(), [start]
    while left:
        index = left.pop()
        if index not in reached:
            reached.add(index)
            left.extend(edges[index])
    return reached


def _nvidia(tool: str, *options: str, file: bytes) -> str:
    """What a tool that Triton brings says of a file."""
    with tempfile.NamedTemporaryFile() as written:
        written.write(file)
        written.flush()
        return subprocess.run(
            [Path(triton.__file__).parent / "backends/nvidia/bin" / tool, *options, written.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    text = _nvidia("cuobjdump", "--dump-resource-usage", file=cubin)
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _cuda_text(cubin: bytes) -> bytes:
    """The machine code of the one kernel in a cubin, which is an ELF file."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<3H", cubin, 0x3A)
    # name, type, flags, address, offset, size
    headers = [struct.unpack_from("<2I4Q", cubin, start + size * place) for place in range(count)]
    names = headers[of_names][4]
    (text,) = (
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if cubin.startswith(b".text.", names + name)
    )
    return text


def _cuda_code(cubins: list[bytes], capability: int) -> list[list[Instruction]]:
    texts = [_cuda_text(cubin) for cubin in cubins]
    # sm_90a is SM90a here.
    architecture = sm_arch_from_capability(capability).replace("sm_", "SM")
    said = _nvidia("nvdisasm", "--binary", architecture, file=b"".join(texts))
    line = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(@!?\w+ )?\s*([A-Z][\w.]*)\s*(.*?)\s*;")
    lines = [match.groups() for match in map(line.match, said.splitlines()) if match]
    found = []
    end = 0
    for text in texts:
        start, end = end, end + len(text)
        found.append([each for each in lines if start <= int(each[0], 16) < end])
    return [_instructions(each) for each in found]


def _instructions(found: list[tuple[str, str | None, str, str]]) -> list[Instruction]:
    """Of lines: place, predicate, name, operands."""
    index = {int(place, 16): number for number, (place, *_) in enumerate(found)}
    code = []
    for _, predicate, name, operands in found:
        jumps = name.startswith("BRA")
        target = re.search(r"0x[0-9a-f]+$", operands) if jumps else None
        # A branch may have its condition among its operands.
        always = predicate is None and (operands.startswith("0x") or not jumps)
        code.append(
            Instruction(
                name,
                index[int(target.group(), 16)] if target else None,
                not (always and (jumps or name in ("EXIT", "RET"))),
            )
        )
    return code


def _hip_resources(text: str) -> tuple[int, int]:
    usage = dict(
        re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text)
    )
    scratch = int(usage["private_segment_fixed_size"]) + 4 * int(usage["vgpr_spill_count"])
    return int(usage["vgpr_count"]), scratch


def _hip_code(text: str) -> list[Instruction]:
    found: list[tuple[str, str]] = []
    labels = {}
    pattern = re.compile(r"\s+((?:[vs]|ds|flat|global|buffer|scratch)_\w+)\s*(\S*)")
    for line in text.splitlines():
        if label := re.match(r"(\.?\w+):", line):
            labels[label[1]] = len(found)
        elif instruction := pattern.match(line):
            found.append((instruction[1], instruction[2]))
    return [
        Instruction(
            name,
            labels[operand] if name == "s_branch" or name.startswith("s_cbranch") else None,
            name not in ("s_branch", "s_endpgm"),
        )
        for name, operand in found
    ]
