"""Attention by lengths: what it sees, what it says, and where it takes the place of masks."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CompileConfig
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fastdraft.drafters import AssistantModel
from fastdraft.errors import InvalidValueError
from fastdraft.hf import attention
from fastdraft.hf.attention import ATTENTION, attending, shares_keys, takes_sights
from fastdraft.hf.kv_cache import Frame
from fastdraft.hf.masks import Masks
from fastdraft.hf.static import WIDTHS
from fastdraft.kernels import attention as operation
from fastdraft.kernels import language
from hf_models import (
    VOCABULARY,
    Forester,
    assert_decodes,
    plain_tokens,
    repetitive_batch,
    tiny_model,
)

NEW = 48
PROMPT = 30
STATIC: dict[str, Any] = {"do_sample": False, "cache_implementation": "static"}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Triton has a kernel, with the plain version in its place."""
    # Of values in four dimensions, and of the probe: not of logits.
    monkeypatch.setattr(language, "has_kernels", lambda values: values.dim() != 2)
    monkeypatch.setattr(operation, "launch", operation.plain)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 4),
    width=st.sampled_from([1, 2, 4, 8, 32]),
    window=st.integers(1, 40),
    longest=st.integers(1, 80),
    is_tree=st.booleans(),
    is_padded=st.booleans(),
)
def test_each_token_sees_what_the_mask_shows(
    seed: int, rows: int, width: int, window: int, longest: int, is_tree: bool, is_padded: bool
) -> None:
    random = np.random.default_rng(seed)
    config = SimpleNamespace(
        _attn_implementation=ATTENTION,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention"],
    )
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda **_: config),
        dtype=torch.float32,
        modules=list,
    )
    lengths = random.integers(1, longest + 1, rows)
    visible = None
    if is_padded:
        prompts = int(lengths.min())
        visible = torch.from_numpy(np.arange(prompts) >= random.integers(0, prompts, rows)[:, None])
    sizes = random.integers(1, width + 1, rows)
    depths = np.minimum(np.arange(width), sizes[:, None] - 1)
    trees = None
    if is_tree:
        trees = np.zeros((rows, width, width), bool)
        for row, slot in np.ndindex(rows, width):
            if slot:
                trees[row, slot] = trees[row, random.integers(max(slot - 3, 0), slot)]
            trees[row, slot, slot] = True
        depths = trees.sum(-1) - 1
    ring = window + WIDTHS[-1] - 1
    frames = {
        None: Frame([0] * rows, longest + width),
        window: Frame((lengths + width - ring).tolist(), ring, is_ring=True),
    }
    found = []
    for by_lengths in (False, True):
        masks = Masks(model, visible=visible, rows=rows, is_fixed=True)
        masks.by_lengths = by_lengths
        numbers, made = masks.planned(
            range(rows), lengths.tolist(), depths, frames=frames, trees=trees
        )
        assert made is not None
        found.append(made(map(torch.from_numpy, numbers)))
    expected, sights = found
    for kind, mask in expected.items():
        count = frames[window if kind == "sliding_attention" else None].columns
        assert torch.equal(operation.visible_columns(sights[kind], count), mask)


@pytest.mark.usefixtures("fast")
def test_padding_stands_at_the_front_or_masks_are_made() -> None:
    model = tiny_model("llama")
    shown = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for visible, by_lengths in ((None, True), (shown, True), (shown.flip(1), False)):
        assert Masks(model, visible=visible, rows=2, is_fixed=True).by_lengths == by_lengths
    assert not Masks(model, visible=None, rows=2).by_lengths


def _gpt_oss(implementation: str) -> Any:
    model = tiny_model("gpt_oss", attention=implementation)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("rows", [1, 3])
def test_sinks(rows: int, cache: str | None, lengths: list[torch.Tensor]) -> None:
    options = {"max_new_tokens": 60, "eos_token_id": None}
    ours = {"cache_implementation": cache}
    plain, inputs = _gpt_oss("eager"), repetitive_batch(rows)
    assert_decodes(_gpt_oss(ATTENTION), inputs, "trees", plain=plain, ours=ours, **options)
    assert bool(lengths) == (cache == "static")


@pytest.mark.usefixtures("fast")
def test_it_takes_the_place_of_sdpa_for_the_time_of_a_generation(
    lengths: list[torch.Tensor],
) -> None:
    model, inputs = tiny_model("llama"), repetitive_batch(2)
    used: list[str] = []
    model.register_forward_pre_hook(lambda *_: used.append(model.config._attn_implementation))
    plain_tokens(model, inputs, max_new_tokens=20)
    used.clear()
    assert_decodes(model, inputs, "found", ours=STATIC, exact=True, max_new_tokens=20)
    assert lengths
    assert set(used) == {"sdpa", ATTENTION}
    assert model.config._attn_implementation == "sdpa"
    # An error ends it too.
    with pytest.raises(ZeroDivisionError), attending(model, stands_in=True):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_generations_at_a_time_share_it() -> None:
    model = tiny_model("llama")
    first, second = threading.Event(), threading.Event()

    def other() -> None:
        with attending(model, stands_in=True):
            first.set()
            second.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    first.wait(10)
    with attending(model, stands_in=True):
        second.set()
        thread.join()
        assert model.config._attn_implementation == ATTENTION
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("fast")
def test_where_masks_stay(lengths: list[torch.Tensor]) -> None:
    inputs = repetitive_batch(2)
    inputs["attention_mask"][0, 7] = 0  # in the midst of a prompt
    for model in (tiny_model("llama"), tiny_model("llama", attention="eager")):
        assert_decodes(model, inputs, "found", ours=STATIC, exact=True, max_new_tokens=20)
    assert not lengths
    # Scores with a bias, and a mask that the layer changes.
    config = transformers.DogeConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    assert not takes_sights(transformers.AutoModelForCausalLM.from_config(config))
    kinds = [[["global"], 1]]
    config = transformers.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=1, num_heads=2, attention_types=kinds
    )
    assert not takes_sights(transformers.AutoModelForCausalLM.from_config(config))
    # Soft caps, which 'sdpa' leaves out.
    gemma2 = tiny_model("gemma2")
    gemma2.config._attn_implementation = "sdpa"
    assert not takes_sights(gemma2)
    gemma2.config._attn_implementation = ATTENTION
    assert takes_sights(gemma2)
    assert takes_sights(tiny_model("llama"))
    assert not takes_sights(tiny_model("llama", attention="eager"))


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
    # Of these PyTorch does not know whether they have changed.
    with torch.inference_mode():
        unknown = mask.clone()
    first = attention._packed_mask(unknown, 2, torch.float32)
    with torch.inference_mode():
        unknown.logical_not_()
    assert torch.equal(attention._packed_mask(unknown, 2, torch.float32) == 0, first != 0)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many tokens keys or values were copied for each query head, behind the prompts."""
    found: list[int] = []
    real = sdpa_attention.repeat_kv

    def counting(states: torch.Tensor, groups: int) -> torch.Tensor:
        if states.shape[2] > PROMPT:
            found.append(states.shape[2])
        return real(states, groups)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", counting)
    return found


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("drafts", ["predicted", "trees", "models"])
@pytest.mark.parametrize("rows", [1, 3])
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
    copied.clear()
    if not shares:
        for module in ("plan", "draft_models.stage"):
            monkeypatch.setattr(f"fastdraft.hf.{module}.shares_keys", lambda _: False)
    assistant = copy.deepcopy(model)
    if drafts == "models":
        # Drafts that are accepted whole leave the draft model several tokens to read at a time.
        drafts = AssistantModel(assistant, schedule="constant", lookup=None)
    ours = {"cache_implementation": cache}
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
    # Soft caps, which 'sdpa' leaves out.
    gemma2 = tiny_model("gemma2")
    gemma2.config._attn_implementation = "sdpa"
    assert not shares_keys(gemma2)


def test_nothing_changes_without_a_kernel() -> None:
    assert not takes_sights(tiny_model("llama"))


def test_dropout_is_refused_where_nothing_else_can_drop() -> None:
    model = _gpt_oss(ATTENTION).train()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(InvalidValueError, match=r"has no dropout, got 0\.5"):
        model(torch.ones(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_each_width_is_compiled_once(family: str, compilations: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True
    ours = {**STATIC, "compile_config": compile_config}
    model, inputs = tiny_model(family), repetitive_batch(3)
    said = plain_tokens(model, inputs, **options)[:, PROMPT:].tolist()
    chosen = tiny_model(family, attention=ATTENTION)
    # Narrow drafts: each width takes a second to compile.
    for seed in range(2):
        forester = Forester(said, nodes=3, seed=seed)
        output = assert_decodes(chosen, inputs, forester, plain=model, ours=ours, **options).output
        assert output.stats.accepted > 0
    assert compilations() == 2
