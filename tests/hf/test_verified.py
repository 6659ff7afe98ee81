"""`hf.generate` decodes by the three verifications of `fastdraft.kernels`, and by them alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from fastdraft import hf
from fastdraft.drafters import AssistantModel
from hf_models import Forester, Generous, Silent, repetitive_batch, tiny_model

OPTIONS = {"max_new_tokens": 6, "eos_token_id": None, "top_k": 0}


class _UsedError(Exception):
    """One of the three was called."""


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("drafts", ["none", "chains", "trees", "models"])
def test_nothing_else_decodes(sampled: bool, drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    inputs = repetitive_batch(2)
    drafters: dict[str, Any] = {
        "none": Silent(),
        "chains": Generous(),
        "trees": Forester([[5] * 6] * 2),
        "models": AssistantModel(model, schedule="constant", lookup=None),
    }
    options = {**OPTIONS, "do_sample": sampled, "drafter": drafters[drafts]}
    for name in ("greedy", "sampled", "rejection"):
        refuse = mock.Mock(side_effect=_UsedError(name))
        monkeypatch.setattr(f"fastdraft.kernels.{name}.verify", refuse)
    with pytest.raises(_UsedError, match="sampled" if sampled else "greedy"):
        hf.generate(model, **inputs, **options)
