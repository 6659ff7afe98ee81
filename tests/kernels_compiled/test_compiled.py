"""Every kernel compiled for every target: no spills, shared memory and registers within limits."""

from __future__ import annotations

import functools
from functools import partial

import pytest
import torch
from launches import is_compiled, launches, on_a_device
from offline import TARGETS, specialisations
from resources import resources_of, waits_before_arrivals

from fastdraft.verification import verify_sampled

# So that four programs of four warps share a multiprocessor. Below that compilers choose in steps.
MOST_REGISTERS = 128
# Three programs, where each logit has an address of its own.
MOST_REGISTERS_ODD = 168
# Bytes that the compiler may put aside, outside loops, so that more threads run at a time:
# rejection with filters over float32 takes 32 on sm_80, all others at most 24.
MOST_SCRATCH = 32
# Four programs on the multiprocessor with the least, AMD's with 64 KiB.
MOST_SHARED = 16 << 10


@functools.cache
def asked_for(backend):
    """What each launch asks to have compiled for a vendor's targets, by the launch's name.

    The first of them tells for all: launchers see the vendor, and no launcher asks for the target.
    """
    target = next(each for each in TARGETS.values() if each.backend == backend)
    return {
        name: specialisations(target, partial(on_a_device, launch, amd=backend == "hip"))
        for name, launch in launches().items()
    }


def kernels():
    """What is compiled for each target, named after the first launch that asks for it."""
    for target_name, target in TARGETS.items():
        names = {}
        yielded = set()
        for launch_name, asked in asked_for(target.backend).items():
            for each in asked:
                # Named after one that is not compiled here, it has the same name everywhere.
                name = names.setdefault(each.key, f"{each.name} / {launch_name}")
                if each.key in yielded or not is_compiled(launch_name, target_name):
                    continue
                yielded.add(each.key)
                yield pytest.param(name, target_name, each, id=f"{name} / {target_name}")


@pytest.mark.parametrize(("name", "target", "specialisation"), list(kernels()))
def test_compiled(name, target, specialisation):
    kernel = specialisation.compile(TARGETS[target])
    took = resources_of(kernel)
    assert took.scratch <= MOST_SCRATCH, f"a thread puts {took.scratch} bytes aside"
    assert took.registers <= (MOST_REGISTERS_ODD if name.endswith("/ odd") else MOST_REGISTERS)
    assert took.shared <= MOST_SHARED
    if TARGETS[target].backend == "hip":
        # The additions that `last_to_arrive` makes.
        arrivals = kernel.asm["ttir"].count("atomic_rmw add, acq_rel")
        assert waits_before_arrivals(kernel) >= arrivals


def test_no_batch_has_a_kernel_compiled_anew():
    """Whatever its size, and wherever its operands lie."""
    logits = torch.zeros(34, 3000, dtype=torch.bfloat16)

    def launch(requests, drafted, skip):
        def each(*shape, dtype=torch.int64):
            return torch.ones(shape[0] + skip, *shape[1:], dtype=dtype)[skip:]

        verify_sampled(
            logits[: requests + drafted],
            each(drafted),
            torch.tensor([0] * skip + [0, *[drafted] * requests])[skip:],
            max_draft=drafted,
            temperature=each(requests, dtype=torch.float32),
            top_p=each(requests, dtype=torch.float32) / 2,
            top_k=each(requests),
            seeds=each(requests),
            positions=each(requests),
            allowed=each(requests + drafted, 94, dtype=torch.int32),
        )

    target = TARGETS["sm_90"]
    found = [
        {each.key for each in specialisations(target, partial(on_a_device, call, amd=False))}
        for call in (
            partial(launch, 1, 1, 0),
            partial(launch, 2, 15, 1),
            partial(launch, 16, 16, 1),
        )
    ]
    assert len(found[0]) == 3
    assert found[1] == found[2] == found[0]
