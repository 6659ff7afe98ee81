"""Steps of fixed shapes: a static cache, and forwards compiled once for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    CompileConfig,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from assistants import bent
from fastdraft import DraftConfig, hf
from fastdraft.drafters import AssistantModel
from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.hf import device
from fastdraft.hf.device import in_one_copy
from fastdraft.hf.interface import CACHE
from fastdraft.hf.static import WIDTHS, StaticModel, StaticRowCache
from fastdraft.step_latency import StepLatency
from hf_models import (
    FAMILIES,
    VOCABULARY,
    Forester,
    Generous,
    Silent,
    TreeBatch,
    assert_decodes,
    assert_same_tokens,
    edited,
    plain_tokens,
    repetitive_batch,
    tiny_model,
)
from watches import counted_forwards

pytestmark = pytest.mark.slow

NEW = 48
PROMPT = 30
STATIC: dict[str, Any] = {"cache_implementation": "static"}
# Drafts that take the two narrow widths, 1 and 4: compiling a width takes a second and more.
NARROW = DraftConfig(lookahead=3)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """The rows and tokens a row of all forwards over static caches."""
    found: set[tuple[int, ...]] = set()
    called = StaticModel._called

    def noted(self: StaticModel, inputs: dict[str, Any]) -> torch.Tensor:
        found.add(tuple(inputs["input_ids"].shape))
        return called(self, inputs)

    monkeypatch.setattr(StaticModel, "_called", noted)
    return found


def _compiled(backend: str = "eager") -> dict[str, Any]:
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    # transformers compiles on GPUs alone otherwise.
    config._compile_all_devices = True
    return {**STATIC, "compile_config": config}


class _Limits(StoppingCriteria):
    """Ends each row of a batch after some tokens of its own."""

    def __init__(self, prompts: torch.Tensor, limits: Sequence[int]) -> None:
        self._columns = prompts.shape[1]
        self._limits = dict(zip(map(tuple, prompts.tolist()), limits, strict=True))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        new = input_ids.shape[1] - self._columns
        prompts = map(tuple, input_ids[:, : self._columns].tolist())
        return torch.tensor([new >= self._limits[prompt] for prompt in prompts])


LIMITS = (21, 9, 27, 12, 56)


def _ending(rows: int = len(LIMITS), *, seed: int = 0) -> dict[str, Any]:
    """A batch whose rows end at different times."""
    inputs = repetitive_batch(rows, seed=seed)
    ends = StoppingCriteriaList([_Limits(inputs["input_ids"], LIMITS[-rows:])])
    return {
        **inputs,
        "stopping_criteria": ends,
        "max_new_tokens": max(LIMITS),
        "eos_token_id": VOCABULARY,  # which never comes
    }


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, None) for family in FAMILIES), ("gemma3", "eager")],
)
def test_rows_that_have_ended_stay_as_padding(
    family: str, attention: str | None, shapes: set[tuple[int, ...]]
) -> None:
    model, options = tiny_model(family, attention=attention), _ending()
    expected = model.generate(**options, do_sample=False)
    # Asks what the model can verify, in other shapes.
    hf.generate(model, **{**options, "max_new_tokens": 1}, **STATIC)
    news = [row[PROMPT:][:limit] for row, limit in zip(expected, LIMITS, strict=True)]
    for more in (
        {"drafter": Silent()},
        {"drafter": Generous(), "prediction": list(map(edited, news))},
        {"drafter": Forester([new.tolist() for new in news], nodes=20)},
    ):
        shapes.clear()
        output = hf.generate(model, **options, do_sample=False, **STATIC, **more)
        mask = options["attention_mask"]
        assert_same_tokens(model, expected, output.sequences, attention_mask=mask)
        assert {rows for rows, _ in shapes} == {len(LIMITS)}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_that_copies_layers_of_the_cache(rows: int) -> None:
    model = tiny_model("dory").double()
    for drafts in ("predicted", "trees"):
        inputs = repetitive_batch(rows)
        assert_decodes(model, inputs, drafts, ours=STATIC, exact=True, max_new_tokens=NEW)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
@pytest.mark.parametrize("row", [0, 1])
def test_a_padded_row_that_ends_with_its_first_token(family: str, row: int) -> None:
    """It goes on as padding, at the positions behind its prompt: before it there are none."""
    model, inputs = tiny_model(family).double(), repetitive_batch(2)
    first = model.generate(**inputs, do_sample=False, max_new_tokens=1)[row, -1]
    options = {"max_new_tokens": 12, "eos_token_id": int(first), "pad_token_id": 0}
    assert_decodes(model, inputs, "found", exact=True, ours=STATIC, **options)


def test_prompts_longer_than_the_window_and_its_ring() -> None:
    model = tiny_model("gemma3")
    options = {"max_new_tokens": 60, "eos_token_id": None}
    assert_decodes(model, repetitive_batch(3, longest=100), "trees", ours=STATIC, **options)


# Drafts of all widths for one row, narrow ones for more: each shape takes a second to compile.
@pytest.mark.any_transformers
@pytest.mark.parametrize(("rows", "nodes", "is_apart"), [(1, 30, False), (3, 3, True)])
def test_each_shape_is_compiled_once(
    llama: Any,
    rows: int,
    nodes: int,
    is_apart: bool,
    compilations: Any,
    shapes: set[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_apart:
        # As on a device with memory of its own: what a step needs is parts of one copy.
        monkeypatch.setattr(device, "on_device", lambda to, *arrays: in_one_copy(to, arrays))
    inputs = repetitive_batch(rows)
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}
    truths = plain_tokens(llama, inputs, **options)[:, PROMPT:].tolist()
    for seed in range(3):
        forester = Forester(truths, nodes=nodes, seed=seed)
        assert_decodes(llama, inputs, forester, ours=_compiled(), exact=True, **options)
        engine = Generous(DraftConfig(lookahead=nodes))
        ours = {**_compiled(), "prediction": truths}
        assert_decodes(llama, inputs, engine, ours=ours, exact=True, **options)
    assert compilations() == len(shapes)
    assert shapes == {(rows, width) for width in WIDTHS if width <= max(nodes + 2, 4)}
    # Other texts of any length that fits, and of other drafts, need no further one.
    shorter = repetitive_batch(rows, seed=5, longest=20)
    options["max_new_tokens"] = 30
    hf.generate(llama, **shorter, **options, **_compiled(), do_sample=False, drafter=Silent())
    assert compilations() == len(shapes)


@pytest.mark.any_transformers
@pytest.mark.usefixtures("compilations")
def test_a_compiled_forward_finds_its_cache_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    # A CUDA graph is recorded anew for other addresses.
    addresses: list[list[int]] = []
    keep = StaticRowCache.keep_buffers

    def noted(cache: StaticRowCache, call: Any) -> None:
        addresses.append([layer.keys.data_ptr() for layer in cache.layers])
        keep(cache, call)

    monkeypatch.setattr(StaticRowCache, "keep_buffers", noted)
    model = tiny_model("gemma3")
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}

    def generated(rows: int, seed: int, drafter: Any = None) -> None:
        inputs = repetitive_batch(rows, seed=seed)
        drafter = drafter or Generous(NARROW)
        assert_decodes(model, inputs, drafter, ours=_compiled(), exact=True, **options)

    for seed in range(3):
        generated(2, seed)
    assert addresses[0] == addresses[1] == addresses[2]
    # Others cannot have them, and those kept last are found again.
    generated(3, 1)
    generated(3, 2)
    assert addresses[3] == addresses[4]
    with torch.inference_mode():
        generated(3, 2)
    generated(3, 1)
    # Two generations at a time have caches of their own.
    addresses.clear()
    held = {}

    class Nested(Generous):
        def add_request(self, *arguments: Any, **more: Any) -> int:
            if not held:
                held["inner"] = True
                generated(3, 5)
            return super().add_request(*arguments, **more)

    generated(3, 6, Nested(NARROW))
    assert not set(addresses[0]) & set(addresses[1])


@pytest.mark.any_transformers
def test_windows_compile_too(compilations: Any, shapes: set[tuple[int, ...]]) -> None:
    model, ours = tiny_model("gemma3"), _compiled("aot_eager")
    truths = model.generate(**_ending(3), do_sample=False)[:, PROMPT:].tolist()
    for seed in range(2):
        forester = Forester(truths, nodes=3, seed=seed)
        output = assert_decodes(model, _ending(3), forester, ours=ours, exact=True).output
        assert output.stats.accepted > 0
    assert {rows for rows, _ in shapes} == {3}
    assert compilations() == len(shapes)


@pytest.mark.any_transformers
def test_inductor(compilations: Any) -> None:
    # A second layer takes the compiler as long again.
    model = tiny_model("llama", num_hidden_layers=1)
    ours = {**_compiled("inductor"), "drafter": Generous(NARROW)}
    options = {"max_new_tokens": NEW, "eos_token_id": None}
    output = assert_decodes(model, repetitive_batch(2), ours=ours, **options).output
    assert output.stats.accepted > NEW / 2
    assert 1 < compilations() <= len(WIDTHS)


def test_models_that_ask_for_a_static_cache_themselves(compilations: Any) -> None:
    model, plain = (tiny_model("llama", num_hidden_layers=1) for _ in range(2))
    inputs = repetitive_batch(1)
    expected = plain_tokens(plain, inputs, max_new_tokens=NEW)
    for name, value in _compiled().items():
        setattr(model.generation_config, name, value)
    assert_decodes(model, inputs, NARROW, plain=plain, exact=True, max_new_tokens=NEW)
    assert compilations() > 0
    decode = hf.speculate(drafter=Generous(NARROW))
    sequences = model.generate(
        **inputs, do_sample=False, max_new_tokens=NEW, custom_generate=decode
    )
    assert torch.equal(sequences, expected)


def test_nothing_is_compiled_where_generate_would_not(llama: Any, compilations: Any) -> None:
    inputs = repetitive_batch(1)
    options = {"do_sample": False, "max_new_tokens": 8, "drafter": Generous()}
    hf.generate(llama, **inputs, **options, **STATIC)
    hf.generate(llama, **inputs, **options, **_compiled(), disable_compile=True)
    assert compilations() == 0


def test_a_seed_gives_the_same_tokens_as_without_fixed_shapes(llama: Any) -> None:
    options = {**_ending(3), "do_sample": True, "top_k": 0, "repetition_penalty": 1.2, "seed": 5}
    expected = hf.generate(llama, **options, drafter=Silent()).sequences
    ours = {
        **STATIC,
        "drafter": Generous(),
        "prediction": [edited(row[PROMPT:]) for row in expected],
    }
    assert torch.equal(hf.generate(llama, **options, **ours).sequences, expected)


def test_draft_models_draft_for_a_static_target(llama: Any) -> None:
    drafter = AssistantModel(bent(llama))
    found = assert_decodes(llama, repetitive_batch(3), drafter, ours=STATIC, max_new_tokens=NEW)
    assert found.output.stats.accepted > 0


def test_the_last_positions_of_a_model_are_used() -> None:
    model, inputs = tiny_model("opt", attention="eager"), repetitive_batch(2, longest=200)
    options = {"max_length": 256, "eos_token_id": None}
    found = assert_decodes(model, inputs, "trees", ours=STATIC, **options)
    assert found.output.sequences.shape[1] == 256


def test_drafts_fill_the_width_that_is_paid_for() -> None:
    cost = StepLatency("cpu", WIDTHS, a_row=True)
    for width, seconds in ((1, 1.0), (4, 1.5), (8, 4.0), (16, 3.0), (32, 8.0)):
        for _ in range(200):
            cost.observe(1, width, seconds)
    seconds, widths = cost.best_widths(1)
    assert len(seconds) == WIDTHS[-1]
    assert set(widths.tolist()) <= set(WIDTHS)
    assert widths[0] == 1
    # 5 to 8 tokens are padded to 16, which takes less time than 8.
    assert widths[1:4].tolist() == [4] * 3
    assert widths[4:16].tolist() == [16] * 12
    assert widths[16:].tolist() == [32] * 16
    for first, last in ((1, 4), (4, 16), (16, 32)):
        assert np.ptp(seconds[first:last]) == 0.0
    assert np.all(np.diff(seconds) >= 0)


class _Boundless(Generous):
    """Drafts more than it was allowed to."""

    def propose_batch(self, requests: Any, **_: Any) -> Any:
        count = WIDTHS[-1]
        return TreeBatch(
            np.full(count, 5, np.int32),
            np.arange(-1, count - 1, dtype=np.int32),
            np.full(count, 0.5, np.float32),
            np.array([0, count], np.int32),
        )


def test_a_draft_that_is_too_wide_is_an_error(llama: Any) -> None:
    with pytest.raises(FastdraftError, match="1, 4, 8, 16, 32 tokens a row, got 33: did the"):
        hf.generate(llama, **repetitive_batch(1), max_new_tokens=8, **STATIC, drafter=_Boundless())


def _alibi() -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4}
    config = transformers.FalconConfig(**sizes, num_hidden_layers=2, alibi=True)
    return transformers.FalconForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (None, {"prefill_chunk_size": 8}, "prefill_chunk_size must be unset with a static cache"),
        (None, {"cache_implementation": "offloaded_static"}, "must stay on the model's device"),
        (None, {"callers": True}, "got StaticCache; leave it out and pass"),
        (_alibi, {}, "several tokens in one forward must be what its code takes"),
    ],
)
def test_what_cannot_run_is_refused_before_any_work(
    llama: Any, make: Any, options: dict[str, Any], message: str
) -> None:
    model = llama if make is None else make()
    options = {**STATIC, **options}
    if "callers" in options:
        options = {CACHE: StaticCache(config=model.config, max_cache_len=64)}
    with counted_forwards(model) as forwards, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **repetitive_batch(1), max_new_tokens=8, **options)
    assert PROMPT not in forwards
