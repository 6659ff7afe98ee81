"""The host's part of a verification: up to a compiled kernel that does nothing, in a batch of 8.

Beside it stands the launch of a kernel of six arguments. Neither needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from turns import Turn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels_compiled"))

from offline import TARGETS, active

from fastdraft.kernels import language
from fastdraft.verification import Workspace, verify_greedy, verify_rejection, verify_sampled

BATCH, DRAFT, VOCABULARY = 8, 4, 151_936
VERBS = ["greedy", "sampled", "filtered", "rejection", "filtered rejection"]


class Nothing:
    """A compiled kernel that does nothing."""

    function = packed_metadata = None
    __getitem__ = triton.compiler.CompiledKernel.__getitem__

    def _init_handles(self) -> None: ...

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


@language.jit
def six_arguments(one: Any, _two: Any, _three: Any, _4: Any, _5: Any, _6: Any) -> None:
    tl.store(one, 0)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def compiled(self: Any, key: str, _: object, device: Any, *__: object) -> Nothing:
        kept: dict[str, Nothing] = self.device_caches[device][0]
        return kept.setdefault(key, Nothing())

    monkeypatch.setattr(triton.runtime.JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(language, "has_kernels", lambda _: True)
    with active(TARGETS["sm_90"]), torch.no_grad():
        yield


def verification(verb: str) -> Callable[[], object]:
    rows = BATCH * (DRAFT + 1)
    options: dict[str, Any] = {
        "logits": torch.zeros(rows, VOCABULARY, dtype=torch.bfloat16),
        "draft_ids": torch.arange(BATCH * DRAFT),
        "offsets": torch.arange(BATCH + 1) * DRAFT,
        "max_draft": DRAFT,
        "workspace": Workspace(
            "cpu", max_rows=rows, max_requests=BATCH, vocabulary=VOCABULARY, max_draft=DRAFT
        ),
    }
    if verb == "greedy":
        return partial(verify_greedy, **options)
    options["temperature"] = torch.full((BATCH,), 0.8)
    options |= {"seeds": torch.arange(BATCH), "positions": torch.arange(BATCH)}
    if "filtered" in verb:
        options |= {"top_k": torch.full((BATCH,), 50), "top_p": torch.full((BATCH,), 0.9)}
    if "rejection" not in verb:
        return partial(verify_sampled, **options)
    return partial(verify_rejection, draft_logits=options["logits"][: BATCH * DRAFT], **options)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.usefixtures("nothing_runs")
def test_host_path(in_turns: Callable[..., None], verb: str) -> None:
    one = torch.zeros(4)
    launch = partial(six_arguments[(8,)], one, one, one, 1, 2, 3)
    calls: dict[str, Callable[[], object]] = {
        "fastdraft": verification(verb),
        "a kernel of six arguments": launch,
    }

    def turn(call: Callable[[], object]) -> Turn:
        return Turn(lambda _: call, tuple)

    in_turns({name: turn(call) for name, call in calls.items()})
