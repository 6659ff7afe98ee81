"""Calls of the public entry that between them launch every kernel there is, in every variant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdraft.kernels import config, language, products
from fastdraft.late.alignment import Aligner, Head, Texts, Trees
from fastdraft.verification import (
    verify_greedy,
    verify_rejection,
    verify_sampled,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VOCABULARY = 128_256
# A kernel depends on the power of two that holds its chunks: these have the others in use.
VOCABULARIES = (32_000, 151_936)
DRAFT = 3


def batch(dtype: torch.dtype, vocabulary: int = VOCABULARY, step: int = 1) -> dict[str, Any]:
    """Two requests with a draft each; step: the stride of a row's logits."""
    logits = torch.zeros(2 * (DRAFT + 1), vocabulary * step, dtype=dtype)[:, ::step]
    return {
        "logits": logits,
        "draft_ids": torch.arange(2 * DRAFT),
        "offsets": torch.tensor([0, DRAFT, 2 * DRAFT]),
    }


def sampling(**more: Any) -> dict[str, Any]:
    return {"seeds": torch.zeros(2).long(), "positions": torch.zeros(2).long(), **more}


def allowed() -> Tensor:
    return torch.zeros(2 * (DRAFT + 1), VOCABULARY // 32, dtype=torch.int32)


FILTERS = {"temperature": torch.tensor([0.5, 0.0]), "top_k": 50, "top_p": 0.9, "min_p": 0.1}
LOGPROBS = {"logprobs": True, "raw_logprobs": True}
# The two drafts fork at their first tokens.
TREE = {"parents": torch.tensor([-1, -1, 1] * 2)}
EVERYTHING = {**FILTERS, **LOGPROBS, "allowed": allowed()}


def greedy(dtype: torch.dtype, vocabulary: int = VOCABULARY, **options: Any) -> None:
    verify_greedy(**batch(dtype, vocabulary), **options)


def sampled(dtype: torch.dtype, vocabulary: int = VOCABULARY, **options: Any) -> None:
    verify_sampled(**batch(dtype, vocabulary), **sampling(**options))


def rejection(dtype: torch.dtype, vocabulary: int = VOCABULARY, **options: Any) -> None:
    draft_logits = torch.zeros(2 * DRAFT, vocabulary, dtype=dtype)
    verify_rejection(**batch(dtype, vocabulary), draft_logits=draft_logits, **sampling(**options))


def continuations(
    slots: int = 64, longest: int = 32_768, nodes: int = 128, beside_head: bool = False
) -> None:
    """Drafts for a host that waits for nothing, also beside those of a head."""

    def column(dtype: torch.dtype = torch.int32, *more: int) -> Tensor:
        return torch.zeros(slots, *more, dtype=dtype)

    texts = Texts(column(torch.int32, longest), column(), column(), column())
    nodes_of = column(torch.int32, nodes), column(torch.int32, nodes), column(torch.float32, nodes)
    trees = Trees(column(), column(), *nodes_of, column())
    aligner = Aligner(
        "cpu", max_rows=slots, lookahead=16, vocabulary=VOCABULARY, beside_head=beside_head
    )
    head = Head(column(torch.int64, 16), torch.zeros(16), torch.zeros(2, 8))
    aligner.align(texts, trees, column(), column(), head if beside_head else None)


def bitwise(dtype: torch.dtype) -> None:
    """A forward's products: linear layers with and without a bias, attention, a mean."""
    x, weight = torch.zeros(33, 4096, dtype=dtype), torch.zeros(1024, 4096, dtype=dtype)
    products.linear(x, weight)
    products.linear(x, weight, x[0, :1024])
    query, keys = torch.zeros(2, 32, 3, 128, dtype=dtype), torch.zeros(2, 8, 64, 128, dtype=dtype)
    order = torch.zeros(2, 1, 64, dtype=torch.int64)
    products.attend(query, keys, keys, order, torch.zeros(2, 3, dtype=torch.int32), 0.1)
    products.mean(x)


def odd() -> None:
    """Rows that are not aligned to 16 bytes, and whose logits do not lie side by side."""
    rows = batch(torch.bfloat16, 50_257, step=2)
    verify_greedy(**rows)
    verify_sampled(**rows, **sampling(**FILTERS))


# The targets for which every call is compiled; the other ones compile the usual calls.
MAIN = ("sm_90", "gfx942")


def launches() -> dict[str, Callable[[], None]]:
    """The calls by a name each, which ends in the type of the logits where there is a choice."""
    found: dict[str, Callable[[], None]] = {}
    for name, dtype in DTYPES.items():
        calls = {
            "greedy": partial(greedy, dtype),
            "greedy tree likeliest": partial(greedy, dtype, likeliest=8, **TREE),
            "sampled": partial(sampled, dtype),
            "sampled mask": partial(sampled, dtype, likeliest=8, allowed=allowed()),
            "sampled filters": partial(sampled, dtype, **FILTERS),
            "sampled logprobs": partial(sampled, dtype, **LOGPROBS, **TREE),
            "rejection": partial(rejection, dtype),
            "rejection filters": partial(rejection, dtype, **FILTERS),
            "sampled everything": partial(sampled, dtype, **EVERYTHING),
            "rejection everything": partial(rejection, dtype, **EVERYTHING),
            "bitwise": partial(bitwise, dtype),
        }
        found.update({f"{call} {name}": launch for call, launch in calls.items()})
    for size in VOCABULARIES:
        of_size = {
            "greedy": partial(greedy, torch.bfloat16, size),
            "rejection": partial(rejection, torch.bfloat16, size),
        }
        if size > VOCABULARY:  # with fewer chunks, filters hold less in registers
            of_size["sampled filters"] = partial(sampled, torch.bfloat16, size, **FILTERS)
            of_size["rejection filters"] = partial(rejection, torch.bfloat16, size, **FILTERS)
        found.update({f"{call} of {size}": launch for call, launch in of_size.items()})
    found["continuations"] = continuations
    found["continuations beside a head"] = lambda: continuations(beside_head=True)
    found["odd"] = odd
    return found


# The calls that serving makes most: compiled for every target.
USUAL = ("greedy", "sampled", "sampled filters", "rejection", "rejection filters", "bitwise")
# Calls that between them have every kernel. float32 takes the most registers; float16 differs from
# bfloat16 in how it is converted, and in the threshold's search.
OF_EVERY_TYPE = {
    "fp16": ("sampled filters", "bitwise"),
    "fp32": ("sampled filters", "rejection", "rejection filters", "bitwise"),
}


def is_compiled(launch: str, target: str) -> bool:
    """Says whether a launch, given by its name, is compiled for a target."""
    call, _, dtype = launch.rpartition(" ")
    if launch.startswith("continuations"):
        return True
    if dtype == "bf16":
        return target in MAIN or call in USUAL
    # LLVM takes five times as long as ptxas over what is unrolled most: float32 and odd rows.
    return target == MAIN[0] and call in OF_EVERY_TYPE.get(dtype, (call,))


def on_a_device(launch: Callable[[], None], *, amd: bool) -> None:
    """Calls what launches kernels for operands on a GPU, with operands on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if amd:
            patch.setattr(config, "wait_for_stores", lambda: config.WAIT_GFX9)
        patch.setattr(language, "has_kernels", lambda _: True)
        launch()
