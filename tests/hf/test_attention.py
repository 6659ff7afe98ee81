"""Query heads that share keys attend without copies of them."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fastdraft import hf
from fastdraft.drafters import AssistantModel
from fastdraft.hf import attention
from fastdraft.hf.attention import STAND_IN, attending, shares_keys
from hf_models import (
    assert_decodes,
    plain_tokens,
    repetitive_batch,
    tiny_model,
)

pytestmark = pytest.mark.slow

NEW = 48
PROMPT = 30


def test_it_stands_in_for_sdpa_for_the_time_of_a_generation() -> None:
    model = tiny_model("llama")
    used: list[str] = []
    model.register_forward_pre_hook(lambda *_: used.append(model.config._attn_implementation))
    hf.generate(model, **repetitive_batch(2), max_new_tokens=20)
    assert (used[0], set(used[1:])) == ("sdpa", {STAND_IN})
    assert model.config._attn_implementation == "sdpa"
    # An error ends it too.
    with pytest.raises(ZeroDivisionError), attending(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_generations_at_a_time_share_it() -> None:
    model = tiny_model("llama")
    first, second = threading.Event(), threading.Event()

    def other() -> None:
        with attending(model):
            first.set()
            second.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    first.wait(10)
    assert shares_keys(model)
    with attending(model):
        second.set()
        thread.join()
        assert model.config._attn_implementation == STAND_IN
    assert model.config._attn_implementation == "sdpa"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    width=st.integers(1, 70),
    columns=st.integers(70, 90),
    of_rows=st.booleans(),
    is_additive=st.booleans(),
)
def test_heads_that_share_keys_attend_as_with_copies_of_them(
    seed: int,
    rows: int,
    heads: int,
    groups: int,
    width: int,
    columns: int,
    of_rows: bool,
    is_additive: bool,
) -> None:
    torch.manual_seed(seed)
    query = torch.randn(rows, width, heads * groups, 4, dtype=torch.float64).transpose(1, 2)
    key, value = torch.randn(2, rows, heads, columns, 4, dtype=torch.float64)
    mask = torch.rand(rows if of_rows else 1, 1, width, columns) < 0.6
    mask[..., 0] = True
    if is_additive:
        mask = torch.where(mask, 0.0, -1e30).double()
    layer: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    found, _ = attention._attention_forward(layer, query, key, value, mask, scaling=0.3)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_layers_share_a_packed_mask_until_it_changes() -> None:
    mask = torch.rand(2, 1, 3, 7) < 0.5
    first = attention._packed_mask(mask, 2, torch.float32)
    assert attention._packed_mask(mask, 2, torch.float32) is first
    assert attention._packed_mask(mask, 3, torch.float32).shape == (2, 1, 9, 7)
    assert attention._packed_mask(mask, 2, torch.float64).dtype == torch.float64
    first = attention._packed_mask(mask, 2, torch.float32)
    mask.logical_not_()
    inverse = attention._packed_mask(mask, 2, torch.float32)
    assert torch.equal(inverse == 0, first != 0)
    # PyTorch does not know whether these have changed.
    with torch.inference_mode():
        unknown = mask.clone()
    first = attention._packed_mask(unknown, 2, torch.float32)
    with torch.inference_mode():
        unknown.logical_not_()
    assert torch.equal(attention._packed_mask(unknown, 2, torch.float32) == 0, first != 0)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths behind prompts whose keys or values were copied for each query head."""
    found: list[int] = []
    real = sdpa_attention.repeat_kv

    def counting(states: torch.Tensor, groups: int) -> torch.Tensor:
        if states.shape[2] > PROMPT:
            found.append(states.shape[2])
        return real(states, groups)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", counting)
    return found


@pytest.mark.parametrize(
    ("rows", "drafts", "shares", "cache"),
    [
        (1, "predicted", True, None),
        (1, "predicted", False, None),
        (3, "predicted", True, "static"),
        (3, "trees", True, None),
        (1, "trees", True, "static"),
        (3, "models", True, None),
        (3, "models", False, "static"),
    ],
)
def test_drafts_copy_no_keys(
    rows: int,
    drafts: Any,
    shares: bool,
    cache: str | None,
    copied: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = tiny_model("llama").double(), repetitive_batch(rows)
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}
    plain_tokens(model, inputs, **options)
    ours = {"cache_implementation": cache}
    hf.generate(model, **inputs, **ours, max_new_tokens=1)  # asks what the model can verify
    copied.clear()
    if not shares:
        monkeypatch.setattr(attention, "shares_keys", lambda _: None)
    assistant = copy.deepcopy(model)
    if drafts == "models":
        # Drafts that are accepted whole leave the draft model several tokens to read at a time.
        drafts = AssistantModel(assistant, schedule="constant", lookup=None)
    output = assert_decodes(model, inputs, drafts, ours=ours, exact=True, **options).output
    assert output.stats.accepted > 0
    assert bool(copied) != shares
    assert model.config._attn_implementation == "sdpa"
    assert assistant.config._attn_implementation == "sdpa"


def test_which_models_share_keys() -> None:
    assert shares_keys(tiny_model("llama"))
    assert shares_keys(tiny_model("gemma3"))
    assert not shares_keys(tiny_model("llama", num_key_value_heads=4))
    assert not shares_keys(tiny_model("gpt2"))
    assert not shares_keys(tiny_model("llama", attention="eager"))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_a_mask_does_not_say_is_left_to_sdpa(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        attention, "sdpa_attention_forward", lambda *_, **more: given.append(more[name])
    )
    query, key = torch.ones(1, 4, 2, 8), torch.ones(1, 2, 6, 8)
    mask = torch.ones(1, 1, 2, 6, dtype=torch.bool)
    layer = torch.nn.Identity()
    attention._attention_forward(layer, query, key, key, mask, **{name: None})
    assert not given
    attention._attention_forward(layer, query, key, key, mask, **{name: 3.0})
    assert given == [3.0]
