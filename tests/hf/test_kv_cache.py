"""The cache whose rows have lengths of their own, against lists of what each row should hold."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import Cache, StaticLayer

import cache_memory
from assistants import bent
from fastdraft import hf
from fastdraft.drafters import AssistantModel, Staged
from fastdraft.errors import InvalidValueError
from fastdraft.hf import kv_cache
from fastdraft.hf.device import Transfer
from fastdraft.hf.interface import CACHE
from fastdraft.hf.kv_cache import RowCache
from fastdraft.hf.masks import Masks
from hf_models import Forester, plain_tokens, repetitive_batch, tiny_model

HEADS, SIZE = 2, 3


def _prepare(cache: RowCache, lengths: list[int], width: int, **more: Any) -> None:
    transfer = Transfer()
    cache.plan(transfer, lengths, width, **more)
    transfer.send(torch.device("cpu"))


# Lets buffers of short texts grow as often as those of long ones.
OFTEN = mock.patch.object(kv_cache, "_LEAST_SLACK", 0)


def _states(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, HEADS, width, SIZE), torch.randn(rows, HEADS, width, SIZE)


def test_buffers_of_short_texts_do_not_grow_at_every_step() -> None:
    cache = RowCache(DynamicCache())
    cache.update(*_states(2, 10), 0)
    layer: Any = cache.layers[0]
    capacities = []
    for length in range(10, 74):
        _prepare(cache, [length, length], 1)
        cache.update(*_states(2, 1), 0)
        capacities.append(layer.layout.capacity)
    assert len(set(capacities)) <= 3


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), prompt=st.integers(1, 40))
@OFTEN
def test_rows_show_what_plain_decoding_sees(data: st.DataObject, rows: int, prompt: int) -> None:
    """Rows may keep paths of trees or go back to their floors, and every query sees the last tokens
    up to its own."""
    model = _gemma()
    window = model.config.sliding_window
    cache = RowCache(DynamicCache(config=model.config))
    masks = Masks(model, visible=None, rows=rows)
    keys, values = _states(rows, prompt)
    for layer in range(2):
        cache.update(keys, values, layer)
    held = [(keys[row], values[row]) for row in range(rows)]
    floors = [prompt] * rows
    for _ in range(data.draw(st.integers(1, 6))):
        # Mostly narrow, and now and then wider than the window.
        width = data.draw(st.sampled_from([1, 2, 3, 5, 8, 20]))
        lengths = [row_keys.shape[1] for row_keys, _ in held]
        floors = [
            data.draw(st.integers(floor, length))
            for floor, length in zip(floors, lengths, strict=True)
        ]
        _prepare(cache, lengths, width, floors=floors)
        assert cache.get_seq_length() == max(lengths)
        depths = np.arange(width)[None]
        transfer = Transfer()
        made = masks.plan(transfer, range(len(held)), lengths, depths, frames=cache.frames)
        transfer.send(torch.device("cpu"))
        mask = made and made()
        sizes = [cache.get_mask_sizes(width, layer) for layer in range(2)]
        keys, values = _states(len(held), width)
        shown = [cache.update(keys, values, layer) for layer in range(2)]
        held = [
            (torch.cat([row_keys, keys[row]], 1), torch.cat([row_values, values[row]], 1))
            for row, (row_keys, row_values) in enumerate(held)
        ]
        for layer, kind in enumerate(model.config.layer_types):
            reach = window if kind == "sliding_attention" else 1 << 20
            assert not shown[layer][0].isnan().any()
            for row, length in enumerate(lengths):
                for query in range(width):
                    own = length + query
                    begin = max(own - reach + 1, 0)
                    if mask is None:
                        # The model's mask knows the columns by the first one's position.
                        columns, first = sizes[layer]
                        assert shown[layer][0].shape[2] == columns
                        seen = slice(begin - first, own - first + 1)
                        assert seen.start >= 0
                    else:
                        assert isinstance(mask, dict)
                        seen = mask[kind][row, 0, query]
                    for part in range(2):
                        expected = held[row][part][:, begin : own + 1]
                        assert torch.equal(shown[layer][part][row][:, seen], expected)
        kept = [
            data.draw(st.integers(max(floor, 1), length + width))
            for floor, length in zip(floors, lengths, strict=True)
        ]
        if data.draw(st.booleans()):
            # Any new tokens of a tree may stay, in their order.
            choices = st.sets(st.integers(0, width - 1), min_size=1).map(sorted)
            paths = [data.draw(choices) for _ in held]
            moves = np.array([[*path, *range(len(path), width)] for path in paths])
            cache.compact(range(len(held)), lengths, moves)
            orders = [
                [*range(length), *(length + move)]
                for length, move in zip(lengths, moves, strict=True)
            ]
            held = [
                (row_keys[:, order], row_values[:, order])
                for order, (row_keys, row_values) in zip(orders, held, strict=True)
            ]
            kept = [length + len(path) for length, path in zip(lengths, paths, strict=True)]
        held = [
            (row_keys[:, :count], row_values[:, :count])
            for count, (row_keys, row_values) in zip(kept, held, strict=True)
        ]
        if len(held) > 1 and data.draw(st.booleans()):
            cache.keep(range(len(held) - 1))
            held.pop()
            floors.pop()


@functools.cache
def _gemma() -> Any:
    return tiny_model("gemma3")


def test_a_filled_cache_is_taken_over_and_written_back() -> None:
    prepared = DynamicCache()
    keys, values = _states(1, 5)
    prepared.update(keys, values, 0)
    cache = RowCache(prepared)
    assert cache.get_seq_length() == prepared.get_seq_length() == 5
    cache.take_over()
    more_keys, more_values = _states(1, 3)
    _prepare(cache, [5], 3)
    cache.update(more_keys, more_values, 0)
    # Nothing is held twice, and should the generation fail, an empty cache is of use yet.
    assert prepared.get_seq_length() == 0
    cache.write_back(prepared, 7)
    assert prepared.get_seq_length() == 7
    assert torch.equal(prepared.layers[0].keys, torch.cat([keys, more_keys[:, :, :2]], 2))
    assert torch.equal(prepared.layers[0].values, torch.cat([values, more_values[:, :, :2]], 2))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.any_transformers
@pytest.mark.parametrize("staged", [False, True])
def test_draft_models_lose_nothing_by_windows(
    rows: int, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They draft what they would with all of the text in their caches, whatever is rejected."""
    model = _gemma()
    inputs = repetitive_batch(rows)
    options = {"max_new_tokens": 60, "eos_token_id": None}
    expected = plain_tokens(model, inputs, **options)
    found = []
    init = kv_cache._GrowingLayer.__init__
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(kv_cache._GrowingLayer, "__init__", lambda self, _=None: init(self))
        drafter: Any = AssistantModel(
            bent(model, by=0.05), schedule="constant", num_tokens=5, lookup=None
        )
        if staged:
            smaller = bent(model, by=0.1, seed=2)
            drafter = Staged(
                [AssistantModel(smaller, schedule="constant", num_tokens=3, lookup=None), drafter]
            )
        output = hf.generate(model, **inputs, **options, do_sample=False, drafter=drafter)
        assert torch.equal(output.sequences, expected)
        found.append((output.row_stats, output.assistants[-1].accepted))
    assert found[0] == found[1]
    stats = output.stats
    assert stats.drafted / 5 < stats.accepted < stats.drafted


def test_a_window_that_lacks_tokens_is_refused() -> None:
    model = _gemma()
    cache = DynamicCache(config=model.config)
    model.generate(
        repetitive_batch(1)["input_ids"], max_new_tokens=5, **{CACHE: cache}, eos_token_id=None
    )
    cache.layers[0].keys = cache.layers[0].keys[:, :, 1:]
    with pytest.raises(InvalidValueError, match="the last 10 of its 34 tokens, got layer 0 with 9"):
        RowCache(cache)


def _forest(sequences: torch.Tensor, prompt: int) -> dict[str, Any]:
    return {"drafter": Forester([row[prompt:].tolist() for row in sequences], nodes=8)}


def _unequal(sequences: torch.Tensor, prompt: int) -> dict[str, Any]:
    """One row's drafts are always right, the others' never: by its end they are far behind."""
    return {"drafter": Forester([sequences[0, prompt:].tolist(), [], []], nodes=8)}


@pytest.mark.any_transformers
@pytest.mark.parametrize(
    ("family", "rows", "options"),
    [
        ("llama", 3, {}),
        ("llama", 1, {"allowed": 1 << 15}),
        ("mistral", 3, {}),
        ("gemma3", 1, {"turns": 2, "length": 150}),
        ("gemma3", 1, {"drafts": _forest, "length": 100}),
        ("gemma3", 3, {"drafts": _unequal, "length": 100}),
    ],
)
def test_memory_at_its_peak(family: str, rows: int, options: dict[str, Any]) -> None:
    # Every sixth layer of Gemma's is another one; the others' are alike.
    model = cache_memory.model_of(family, layers=6 if family == "gemma3" else 2, window=96)
    inputs = cache_memory.prompts(rows, 120)
    # A buffer may have 32 columns and a draft's width to spare. In a text of this length they are
    # few. How many there are depends on measured times, since these decide how wide a forward is.
    plain, drafted = cache_memory.peaks(model, inputs, **{"length": 300, **options})
    # A DynamicCache takes `plain`.
    assert drafted <= 1.15 * plain


def test_other_caches_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="DynamicCache, got Cache"):
        RowCache(Cache(layers=[StaticLayer(max_cache_len=8)]))
