"""Under another default device, as torch.set_default_device sets it, everything comes out the same.

"meta" stands for a GPU: a tensor that is made there by mistake has no values to go on with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assistants import bent, constant
from fastdraft import hf
from fastdraft.drafters import Staged
from hf_models import Forester, Generous, edited, repetitive_batch, tiny_model
from watches import Recorder

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("drafts", "do_sample", "rows"),
    [
        ("chains", False, 1),
        ("chains", True, 3),
        ("trees", False, 3),
        ("trees", True, 1),
        ("model", False, 1),
        ("model", True, 3),
        ("staged", False, 3),
    ],
)
def test_generate(drafts: str, do_sample: bool, rows: int) -> None:
    # A window, and layers without one.
    model = tiny_model("gemma3")
    inputs = repetitive_batch(rows)
    truths = model.generate(**inputs, max_new_tokens=24, eos_token_id=None)[:, 30:]

    def sequences() -> Any:
        drafter: Any = {"chains": Generous(), "trees": Forester(truths.tolist())}.get(drafts)
        if drafter is None:
            drafter = constant(bent(model), 3)
        if drafts == "staged":
            drafter = Staged([bent(model, seed=2), drafter])
        said = Recorder()
        found = hf.generate(
            model,
            **inputs,
            max_time=1000.0,
            repetition_penalty=1.2,
            max_new_tokens=24,
            eos_token_id=None,
            do_sample=do_sample,
            drafter=drafter,
            prediction=[edited(truth) for truth in truths] if drafts == "chains" else None,
            streamer=said if rows == 1 else None,
            logprobs=True,
        ).sequences.tolist()
        if rows == 1:
            prompt, *tokens, _ = said.calls
            assert [[*prompt[0], *(token for [token] in tokens)]] == found
        return found

    torch.manual_seed(3)
    expected = sequences()
    torch.manual_seed(3)
    with torch.device("meta"):
        assert sequences() == expected
