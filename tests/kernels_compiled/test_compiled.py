"""Every kernel compiled for every target: no spills, wide loads, few instructions a logit."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import pytest
import torch
from assembly import code_of, examine, waits_before_arrivals
from launches import (
    BEYOND_MEMORY,
    OVER_THE_VOCABULARY,
    TWO_SUMS,
    is_compiled,
    launches,
    on_a_device,
)
from offline import TARGETS, specialisations

from fastdraft.verification import verify_sampled

# Instructions of one lane for each byte of logits, before the memory is no longer what limits: an
# H200 has 132 multiprocessors, which issue 128 lanes at 1.8 GHz, and reads 4.3 TB a second.
INSTRUCTIONS_A_BYTE = 6.9
# Exponentials have units of their own, an eighth as wide.
EXPONENTIALS_A_BYTE = INSTRUCTIONS_A_BYTE / 8
# So that four programs of four warps share a multiprocessor. Below that compilers choose in steps.
MOST_REGISTERS = 128
# Three programs, where each logit has an address of its own.
MOST_REGISTERS_ODD = 168
# Bytes that the compiler may put aside, outside loops, so that more threads run at a time:
# rejection with filters over float32 takes 32 on sm_80, all others at most 24.
MOST_SCRATCH = 32
# Instructions in all of kernels that a step waits for and that read little: latency is what counts.
MOST_INSTRUCTIONS = {"align_kernel": 1000}
# How much more than expected.json a kernel may take.
SLACK = 1.1


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
                batch = f"{target_name} {launch_name.split()[-1]}"
                yield pytest.param(
                    batch,
                    name,
                    target_name,
                    each,
                    id=f"{name} / {target_name}",
                    marks=pytest.mark.xdist_group(batch),
                )


@pytest.fixture(scope="session")
def compiled(request):
    """The kernels of a batch, by its name: each one and its code.

    A batch is looked at together, and once: of its kernels those of the tests that run.
    """

    @functools.lru_cache(maxsize=4)  # they take turns where tests run in the order of the file
    def of_batch(batch):
        found = {
            params["specialisation"]: params["specialisation"].compile(TARGETS[params["target"]])
            for params in (
                item.callspec.params for item in request.session.items if hasattr(item, "callspec")
            )
            if params.get("batch") == batch
        }
        codes = code_of([*found.values()])
        return {each: (found[each], code) for each, code in zip(found, codes, strict=True)}

    return of_batch


@pytest.mark.parametrize(("batch", "name", "target", "specialisation"), list(kernels()))
def test_compiled(batch, name, target, specialisation, compiled, expected, record_property):
    logit_bytes = specialisation.logit_bytes or 4
    kernel, code = compiled(batch)[specialisation]
    took = examine(kernel, code, logit_bytes)
    record_property("compiled", (name, target, dataclasses.asdict(took)))

    assert took.scratch <= MOST_SCRATCH, f"a thread puts {took.scratch} bytes aside"
    is_odd = name.endswith("/ odd")
    most = MOST_REGISTERS_ODD if is_odd else MOST_REGISTERS
    assert took.registers <= most
    if specialisation.name in OVER_THE_VOCABULARY and not is_odd:
        assert took.put_aside == 0, "a thread puts values aside in a loop"
        assert took.wide_loads > 0, "the logits are not read 16 bytes at a time"
        if target.startswith("sm") and not name.endswith(BEYOND_MEMORY):
            assert took.instructions is not None, "no loop goes over the logits"
            assert took.instructions <= INSTRUCTIONS_A_BYTE * logit_bytes
            if not name.endswith(TWO_SUMS):
                assert took.exponentials <= EXPONENTIALS_A_BYTE * logit_bytes

    if specialisation.name in MOST_INSTRUCTIONS:
        assert took.put_aside == 0, "a thread puts values aside in a loop"
        assert took.size <= MOST_INSTRUCTIONS[specialisation.name]

    if TARGETS[target].backend == "hip":
        # The additions that `last_to_arrive` makes.
        arrivals = kernel.asm["ttir"].count("atomic_rmw add, acq_rel")
        assert waits_before_arrivals(kernel) >= arrivals

    for field, value in expected.get(name, {}).get(target, {}).items():
        now = getattr(took, field)
        assert value is None or now is None or now <= value * SLACK, (
            f"{field}: {now}, where {value} was expected. If that is meant, renew what is: "
            "python -m pytest -n 2 --dist loadgroup tests/kernels_compiled --renew"
        )


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
