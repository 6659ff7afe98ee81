"""Models with recurrent layers: rejected tokens leave no trace in states that cannot be cropped."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import Cache

from assistants import bent, constant
from fastdraft import Datastore, DraftConfig, Engine, hf
from fastdraft.drafters import AssistantModel, Staged
from fastdraft.errors import InvalidValueError
from fastdraft.hf import loop
from fastdraft.hf.interface import CACHE
from hf_models import (
    PAD,
    Forester,
    Generous,
    OfRows,
    Silent,
    assert_decodes,
    assert_goes_on,
    assert_same_tokens,
    edited,
    plain_tokens,
    repetitive_batch,
    tiny_model,
)
from recurrent_models import FAMILIES, WRONG, recurrent_model
from watches import counted_forwards

pytestmark = pytest.mark.slow

if not hasattr(Cache, "is_recording_past"):
    pytest.skip("needs transformers 5.21", allow_module_level=True)

OPTIONS: dict[str, Any] = {"max_new_tokens": 28, "eos_token_id": None}
PROMPT = 30
# To make a model, and to ask what it can verify, takes as long as to decode with it.
_recurrent = functools.cache(recurrent_model)


def _assert_logits(plain: Any, ours: Any, *, columns: int, end: int | None) -> None:
    """Each token was chosen from plain decoding's logits, while the text was the same.

    Tokens may be equal by luck where a state is wrong: it changes logits by a tenth and more.
    """
    for row, (expected, said) in enumerate(zip(plain.sequences, ours.sequences, strict=True)):
        for step, (own, other) in enumerate(zip(plain.logits, ours.logits, strict=True)):
            largest = float(own[row].abs().max())
            assert float((own[row] - other[row]).abs().max()) < 2e-3 * largest, (row, step)
            token = int(said[columns + step])
            if token == end or token != expected[columns + step]:
                break


LOGITS: dict[str, Any] = {
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def _decoded(model: Any, inputs: dict[str, torch.Tensor], every: int = 7, **options: Any) -> Any:
    """Decodes with drafts right and wrong in turn, and compares with plain decoding."""
    options = {**OPTIONS, **LOGITS, **options}
    plain = model.generate(**inputs, **options)
    columns = inputs["input_ids"].shape[1]
    prediction = [
        edited(line, every=every, row=row) for row, line in enumerate(plain.sequences[:, columns:])
    ]
    ours = hf.generate(model, **inputs, **options, drafter=Generous(), prediction=prediction)
    _assert_logits(plain, ours, columns=columns, end=options["eos_token_id"])
    assert 0 < ours.stats.accepted < ours.stats.drafted
    return ours


@pytest.mark.parametrize("family", FAMILIES)
def test_one_row(family: str) -> None:
    model, inputs = _recurrent(family), repetitive_batch(1)
    with counted_forwards(model) as widths:
        ours = _decoded(model, inputs)
    # No forward is made for a state, but one for the cache that is handed over in the end.
    made = widths[::-1].index(PROMPT) + 1
    assert made <= ours.stats.steps + 1
    assert ours.stats.steps < OPTIONS["max_new_tokens"] * 3 / 4


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_unequal_length(family: str) -> None:
    _decoded(_recurrent(family), repetitive_batch(3))


@pytest.mark.parametrize("family", ["FalconH1", "Mamba2", "Qwen3_5"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_accept_what_they_like(family: str, seed: int) -> None:
    """Some have no pending token when others have one, or many."""
    model, inputs = _recurrent(family), repetitive_batch(4)
    plain = model.generate(**inputs, **OPTIONS, **LOGITS)
    drafter = Forester(plain.sequences[:, PROMPT:].tolist(), nodes=4, seed=seed)
    with mock.patch.object(loop, "_PART_BEHIND", seed / 3):
        ours = hf.generate(model, **inputs, **OPTIONS, **LOGITS, drafter=drafter)
    _assert_logits(plain, ours, columns=PROMPT, end=None)
    assert ours.stats.accepted > 0


def test_rows_of_equal_length() -> None:
    inputs = {name: each.repeat(3, 1) for name, each in repetitive_batch(1).items()}
    model = _recurrent("Qwen3_5")
    ours = _decoded(model, inputs)
    assert ours.stats.mean_accepted_tokens > 1.5


@pytest.mark.parametrize("family", WRONG)
@pytest.mark.parametrize("rows", [1, 2])
def test_what_transformers_continues_wrongly_is_refused(family: str, rows: int) -> None:
    model = recurrent_model(family)
    message = "several tokens .*in one forward must have the logits of plain decoding"
    with counted_forwards(model) as widths, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **repetitive_batch(rows), **OPTIONS)
    assert PROMPT not in widths
    with counted_forwards(model) as widths, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **repetitive_batch(rows), **OPTIONS)
    assert not widths  # the answer is kept


@pytest.fixture(scope="module")
def qwen() -> Any:
    return _recurrent("Qwen3_5")


@pytest.mark.parametrize("rows", [1, 3])
def test_recurrent_rows_that_end_leave(qwen: Any, rows: int) -> None:
    inputs = repetitive_batch(rows)
    said = plain_tokens(qwen, inputs, **OPTIONS)[:, PROMPT:]
    end = int(said[0, 24])
    _decoded(qwen, inputs, eos_token_id=end, pad_token_id=PAD)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 4},
        {"logits_processor": transformers.LogitsProcessorList([OfRows()])},
    ],
    ids=["known", "along the path"],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_processors_over_recurrent_layers(qwen: Any, rows: int, options: dict[str, Any]) -> None:
    _decoded(qwen, repetitive_batch(rows), every=5, **options)


@pytest.mark.parametrize("rows", [1, 3])
def test_draft_models_for_recurrent_targets(qwen: Any, rows: int) -> None:
    dense = tiny_model("llama")
    output = hf.generate(
        qwen, **repetitive_batch(rows), **OPTIONS, do_sample=False, drafter=constant(dense)
    )
    expected = plain_tokens(qwen, repetitive_batch(rows), **OPTIONS)
    mask = repetitive_batch(rows)["attention_mask"]
    assert_same_tokens(qwen, expected, output.sequences, attention_mask=mask)
    assert output.stats.drafted > 0


def test_a_datastore_of_recurrent_text(qwen: Any) -> None:
    engine = Engine(DraftConfig(token_cost=0.001), datastores=[Datastore(max_bytes=1 << 20)])
    inputs = repetitive_batch(1)
    first, second = (
        hf.generate(qwen, **inputs, **OPTIONS, do_sample=False, drafter=engine) for _ in range(2)
    )
    assert torch.equal(first.sequences, second.sequences)
    assert second.stats.steps < first.stats.steps


@pytest.mark.parametrize("rows", [1, 3])
def test_seeds_give_the_same_samples_over_recurrent_layers(qwen: Any, rows: int) -> None:
    options = {**OPTIONS, "do_sample": True, "top_k": 0, "seed": 5}
    plain = hf.generate(qwen, **repetitive_batch(rows), **options, drafter=Silent())
    prediction = [edited(line, every=5, row=at) for at, line in enumerate(plain.sequences[:, 30:])]
    drafted = hf.generate(
        qwen, **repetitive_batch(rows), **options, drafter=Generous(), prediction=prediction
    )
    assert torch.equal(drafted.sequences, plain.sequences)
    assert 0 < drafted.stats.accepted < drafted.stats.drafted


# One family of each kind of layers: states are handed over by layer, whatever the family.
@pytest.mark.parametrize(
    "family", ["FalconH1", "GraniteMoeHybrid", "Lfm2", "MiniMax", "NemotronH", "Qwen3_5", "Zamba2"]
)
def test_a_recurrent_cache_is_handed_over_and_goes_on(family: str) -> None:
    model, inputs = _recurrent(family), repetitive_batch(1)
    said = plain_tokens(model, inputs, **OPTIONS)[0, PROMPT:].tolist()
    # It ends within an accepted draft: the cache has to be brought to its end.
    end = max(said, key=said.index)
    first = _decoded(model, inputs, every=5, eos_token_id=end, pad_token_id=PAD)
    assert_goes_on(model, first, inputs)


def test_a_cache_that_recorded_its_past_goes_on_with_recurrent_layers(qwen: Any) -> None:
    inputs = repetitive_batch(1)
    cache = DynamicCache(config=qwen.config)
    cache.activate_past_recording()
    qwen(inputs["input_ids"][:, :20], **{CACHE: cache})
    assert_decodes(qwen, inputs, every=7, ours={CACHE: cache}, **OPTIONS)


_WINDOWS: dict[str, Any] = {
    "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    "conv_L_cache": 7,
    "sliding_window": 11,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("family", "changes", "inputs"),
    [
        ("Lfm2", {"conv_L_cache": 1}, repetitive_batch(3)),
        ("Lfm2", {"conv_L_cache": 7}, repetitive_batch(3)),
        ("Lfm2", {"conv_L_cache": 7}, repetitive_batch(1, longest=2)),
        ("Lfm3", _WINDOWS, repetitive_batch(1)),
        ("Lfm3", _WINDOWS, repetitive_batch(3)),
    ],
)
def test_convolutions_of_any_width(
    family: str, changes: dict[str, Any], inputs: dict[str, torch.Tensor]
) -> None:
    # In double precision no rounding of wide and narrow forwards decides a token.
    model = recurrent_model(family, **changes).double()
    stats = assert_decodes(model, inputs, every=7, exact=True, **OPTIONS).output.stats
    assert 0 < stats.accepted < stats.drafted


def test_a_cache_without_the_inputs_is_refused() -> None:
    model = recurrent_model("Lfm2")
    cache = DynamicCache(config=model.config)
    inputs = repetitive_batch(1)
    model(inputs["input_ids"][:, :20], **{CACHE: cache})
    cache.layers[2].reset()
    with pytest.raises(InvalidValueError, match="states of its 20 tokens, got layer 2 without"):
        hf.generate(model, **inputs, **OPTIONS, **{CACHE: cache})


# The larger one agrees with the target always, or hardly ever; the smaller one with the larger one.
@pytest.mark.parametrize(("small", "large", "rows"), [(0.3, 0.0, 3), (0.0, 0.3, 3), (0.3, 0.3, 1)])
def test_draft_models_with_convolutions(rows: int, small: float, large: float) -> None:
    model = recurrent_model("Lfm2").double()
    drafter: Any = Staged(
        [
            AssistantModel(bent(model, by=small, seed=2), schedule="constant", num_tokens=3),
            AssistantModel(bent(model, by=large), schedule="constant", num_tokens=5),
        ]
    )
    stats = assert_decodes(
        model, repetitive_batch(rows), drafter, exact=True, **OPTIONS
    ).output.stats
    assert stats.accepted < stats.drafted if large else stats.accepted > 0


def test_a_static_cache_is_refused(qwen: Any) -> None:
    message = "a static cache needs layers of"
    with counted_forwards(qwen) as forwards, pytest.raises(InvalidValueError, match=message):
        hf.generate(qwen, **repetitive_batch(1), **OPTIONS, cache_implementation="static")
    assert not forwards
