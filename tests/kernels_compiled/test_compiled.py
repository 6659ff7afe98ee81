"""Every kernel compiled for every target: no spills, shared memory and registers within limits."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from launches import is_compiled, launches, on_a_device
from offline import TARGETS, active, specialisations
from resources import resources_of, waits_before_arrivals
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from fastdraft.hf.drafts import StepDrafts
from fastdraft.hf.processors import Warping
from fastdraft.hf.verifier import Verifier
from fastdraft.verification import (
    Workspace,
    verify_greedy,
    verify_rejection,
    verify_sampled,
    warm_up,
)

# Registers of a thread: with at most these, a multiprocessor runs four programs of four warps.
MOST_REGISTERS = 128
# Three programs, where each logit has an address of its own.
MOST_REGISTERS_ODD = 168
# Thresholds take one program of eight warps: there is one a row, and rows that ask for it are few.
MOST_REGISTERS_THRESHOLD = 208
# Tensor cores' products, of which few programs share a multiprocessor: most in float32.
MOST_REGISTERS_PRODUCTS = 192
MOST_SHARED_PRODUCTS = 64 << 10
# Bytes that the compiler may put aside, outside loops, so that more threads run at a time:
# rejection with filters over float32 takes 32 on sm_80, all others at most 24.
MOST_SCRATCH = 32
# Four programs on the multiprocessor with the least, AMD's with 64 KiB.
MOST_SHARED = 16 << 10


@functools.cache
def asked_for(backend):
    """The specialisations that each launch asks for on a vendor's targets, by the launch's name.

    The first of them tells for all: launchers see the vendor, and no launcher asks for the target.
    """
    target = next(each for each in TARGETS.values() if each.backend == backend)
    return {
        name: specialisations(target, partial(on_a_device, launch, amd=backend == "hip"))
        for name, launch in launches().items()
    }


def kernels():
    """The kernels compiled for each target, named after the first launch that asks for each."""
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
    most = MOST_REGISTERS_ODD if name.endswith("/ odd") else MOST_REGISTERS
    if name.startswith("threshold_kernel"):
        most = MOST_REGISTERS_THRESHOLD
    is_product = name.startswith(("linear_kernel", "attention_kernel"))
    assert took.registers <= (MOST_REGISTERS_PRODUCTS if is_product else most)
    assert took.shared <= (MOST_SHARED_PRODUCTS if is_product else MOST_SHARED)
    if TARGETS[target].backend == "hip":
        # The additions that `last_to_arrive` makes.
        arrivals = kernel.asm["ttir"].count("atomic_rmw add, acq_rel")
        assert waits_before_arrivals(kernel) >= arrivals


ALL = ("filters", "allowed", "draft_logits", "likeliest", "logprobs", "raw_logprobs")


def keys_of(call):
    asked = specialisations(TARGETS["sm_90"], partial(on_a_device, call, amd=False))
    return {each.key for each in asked}


def verify_all(options, requests, drafted, skip, *, dtype=torch.bfloat16, beside=0, workspace=None):
    """Each verb, of chains and trees, with every choice that the options leave to requests.

    Each request drafts `drafted` tokens; operands lie `skip` values behind an address that divides
    by 16 bytes, those of logits `beside` more.
    """

    def each(*shape, dtype=torch.int64):
        return torch.ones(shape[0] + skip, *shape[1:], dtype=dtype)[skip:]

    rows = requests * (drafted + 1)
    heat = each(requests, dtype=torch.float32)
    batch = {
        "logits": each(rows, 3000 + beside, dtype=dtype)[:, beside:],
        "workspace": workspace,
        "draft_ids": torch.arange(-skip, requests * drafted)[skip:] % drafted,
        "offsets": torch.arange(-skip, requests + 1)[skip:] * drafted,
        "max_draft": drafted,
        "logprobs": "logprobs" in options,
        "raw_logprobs": "raw_logprobs" in options,
    }
    trees = [{}, {"parents": -each(requests * drafted)}]
    masks = [{}, {"allowed": each(rows, 94, dtype=torch.int32)}]
    some = [{"top_k": each(requests)}, {"top_p": heat / 2}, {"min_p": heat / 2}]
    warpers = [{}, *some, some[0] | some[1], some[1] | some[2], some[0] | some[1] | some[2]]
    for tree, mask, likeliest in product(
        trees,
        masks if "allowed" in options else masks[:1],
        (0, 8) if "likeliest" in options else (0,),
    ):
        verify_greedy(**batch, **tree, **mask, likeliest=likeliest)
        for warper in warpers if "filters" in options else warpers[:1]:
            drawn_by = {"temperature": heat, "seeds": each(requests), "positions": each(requests)}
            drawn_by |= warper
            verify_sampled(**batch, **tree, **mask, **drawn_by, likeliest=likeliest)
            if "draft_logits" in options:
                drawn = each(requests * drafted, 3000 + beside, dtype=dtype)[:, beside:]
                verify_rejection(**batch, **mask, **drawn_by, draft_logits=drawn)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ((), 2),
        (("filters",), 5),
        (("filters", "likeliest"), 7),
        (("filters", "allowed", "logprobs"), 10),
        (ALL, 24),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_nothing_is_compiled_after_the_warm_up(options, number):
    """Whatever the size of a batch, which filters it has, and wherever its operands lie."""
    chosen = {option: option in options for option in ALL}
    warm = keys_of(partial(warm_up, "cpu", torch.bfloat16, 3000, **chosen))
    assert len(warm) == number
    # At least two tokens a draft: one would be a chain.
    batches = [(1, 2, 0), (2, 15, 1), (16, 2, 0), (33, 2, 1), (64, 3, 0), (341, 2, 1)]
    met = [keys_of(partial(verify_all, options, *batch)) for batch in batches]
    assert all(each <= warm for each in met)
    # Nor is anything compiled that no batch needs.
    assert set().union(*met) == warm


def test_a_vocabulary_of_262_144_has_the_kernels_of_one_of_151_936():
    """Kernels compiled above for one are those of the other."""
    chosen = dict.fromkeys(ALL, True)
    smaller, larger = (
        keys_of(partial(warm_up, "cpu", torch.bfloat16, size, **chosen))
        for size in (151_936, 262_144)
    )
    assert smaller == larger


class Noted:
    """Stands for a compiled kernel: notes that it was launched."""

    function = packed_metadata = None
    __getitem__ = CompiledKernel.__getitem__

    def __init__(self, key, launched):
        self.key, self.launched = key, launched

    def _init_handles(self): ...

    def launch_metadata(self, *_): ...

    def run(self, *arguments):
        self.launched.append((self.key, arguments[0], len(arguments)))


def test_a_workspace_launches_the_kernels_that_triton_would(monkeypatch):
    launched = []

    def compiled(self, key, _, device, *__):
        return self.device_caches[device][0].setdefault(key, Noted(key, launched))

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    target = dataclasses.replace(TARGETS["sm_90"])  # whose kernels are compiled in no other test
    size = {"max_rows": 20, "max_requests": 4, "vocabulary": 3000, "max_draft": 4}
    workspace = Workspace("cpu", **size)
    calls = [
        partial(verify_all, ALL, 2, 2, 0),
        partial(verify_all, ALL, 2, 2, 1, beside=1),
        partial(verify_all, ALL, 4, 3, 0),
        partial(verify_all, ALL, 2, 2, 0, dtype=torch.float16),
    ]
    with active(target):
        for call in 3 * calls:
            for each in (None, workspace):
                on_a_device(partial(call, workspace=each), amd=False)
            half = len(launched) // 2
            assert launched[:half] == launched[half:]
            assert len(launched) > 100
            launched.clear()


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "filters"])
def test_a_generation_compiles_nothing_after_its_first_step(monkeypatch, sampled):
    monkeypatch.setattr("fastdraft.hf.verifier._read", lambda verified, **_: verified)
    verifier = Verifier(Warping(top_k=5) if sampled else Warping())
    draws = [(1, 3), (2, 4)] if sampled else None

    def step(parents, likeliest=0):
        drafts = StepDrafts(
            np.arange(len(parents), dtype=np.int32),
            np.array(parents, np.int32),
            np.full(len(parents), 0.5, np.float32),
            np.array([0, len(parents), len(parents)], np.int32),
        )
        scores = torch.zeros(len(parents) + 2, 3000)
        verifier(scores, drafts, draws=draws, likeliest=likeliest)

    first = keys_of(partial(step, []))
    for parents in ([-1], [-1, 0, 1], [-1, -1, 0]):
        assert keys_of(partial(step, parents)) <= first
        assert keys_of(partial(step, parents, likeliest=8)) <= first
