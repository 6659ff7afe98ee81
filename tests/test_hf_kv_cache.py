"""The cache whose rows have lengths of their own, against lists of what each row should hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import Cache, StaticLayer

from fastdraft.errors import InvalidValueError
from fastdraft.hf.kv_cache import RowCache

HEADS, SIZE = 2, 3


def _states(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, HEADS, width, SIZE), torch.randn(rows, HEADS, width, SIZE)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), prompt=st.integers(1, 70))
def test_rows_hold_what_was_accepted(data: st.DataObject, rows: int, prompt: int) -> None:
    cache = RowCache(DynamicCache())
    keys, values = _states(rows, prompt)
    for layer in range(2):
        cache.update(keys, values, layer)
    held = [(keys[row], values[row]) for row in range(rows)]
    for _ in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(1, 20))
        lengths = [row_keys.shape[1] for row_keys, _ in held]
        cache.prepare(lengths, width, torch.device("cpu"))
        assert cache.get_seq_length() == max(lengths)
        assert cache.get_mask_sizes(width, 0) == (max(lengths) + width, 0)
        keys, values = _states(len(held), width)
        for layer in range(2):
            all_keys, all_values = cache.update(keys, values, layer)
            assert all_keys.shape[2] == max(lengths) + width
            for row, length in enumerate(lengths):
                expected = torch.cat([held[row][0], keys[row]], 1)
                assert torch.equal(all_keys[row, :, : length + width], expected)
                expected = torch.cat([held[row][1], values[row]], 1)
                assert torch.equal(all_values[row, :, : length + width], expected)
            assert not all_keys.isnan().any()
        accepted = [list(range(data.draw(st.integers(1, width)))) for _ in held]
        if data.draw(st.booleans()):
            # Of a tree any new tokens may stay, in their order.
            choices = st.sets(st.integers(0, width - 1), min_size=1).map(sorted)
            accepted = [data.draw(choices) for _ in held]
            kept = [[*path, *range(len(path), width)] for path in accepted]
            cache.compact(lengths, torch.tensor(kept), torch.device("cpu"))
        held = [
            (
                torch.cat([row_keys, keys[row][:, accepted[row]]], 1),
                torch.cat([row_values, values[row][:, accepted[row]]], 1),
            )
            for row, (row_keys, row_values) in enumerate(held)
        ]
        if len(held) > 1 and data.draw(st.booleans()):
            gone = data.draw(st.integers(0, len(held) - 1))
            slots = list(range(len(held) - 1))
            if gone < len(held) - 1:
                slots[gone] = len(held) - 1
            cache.keep(slots)
            held = [held[slot] for slot in slots]


def test_a_filled_cache_is_copied_and_written_back() -> None:
    prepared = DynamicCache()
    keys, values = _states(1, 5)
    prepared.update(keys, values, 0)
    cache = RowCache(prepared)
    assert cache.get_seq_length() == 5
    more_keys, more_values = _states(1, 3)
    cache.prepare([5], 3, torch.device("cpu"))
    cache.update(more_keys, more_values, 0)
    assert prepared.get_seq_length() == 5
    cache.write_back(prepared, 7)
    assert torch.equal(prepared.layers[0].keys, torch.cat([keys, more_keys[:, :, :2]], 2))
    assert torch.equal(prepared.layers[0].values, torch.cat([values, more_values[:, :, :2]], 2))


def test_other_caches_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="DynamicCache, got Cache"):
        RowCache(Cache(layers=[StaticLayer(max_cache_len=8)]))
