"""Attention to a cache by lengths: the kernel against the reference, that against a loop."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import hf
from fastdraft.kernels import attention, config, language
from fastdraft.kernels.attention import Operands, cached_attention, launch, plain
from hf_models import Forester, assert_same_tokens, repetitive_batch, tiny_model

NEVER = 1e4  # what stands where nothing may look; NaN times a weight of zero would be NaN


def bits(parents, window):
    """What each new token sees of the others, and how deep it stands, given their parents."""
    paths = []
    for index, parent in enumerate(parents):
        paths.append([*(paths[parent] if index else []), index])
    depths = [len(path) - 1 for path in paths]
    sees = [
        [other for other in path if depths[index] - depths[other] < window]
        for index, path in enumerate(paths)
    ]
    return sees, depths


class Case:
    """Rows of texts with trees behind them, in buffers of columns.

    Attributes:
        texts: Of each row, the tokens that each of its queries sees, as the keys' and values' rows.
    """

    def __init__(self, seed, *, rows, key_heads, group, width, sizes, window, longest, dtype):
        chance = random.Random(seed)
        torch.manual_seed(seed)
        size, value_size = sizes
        reach = longest if window is None else min(window, longest)
        columns = reach + width - 1 + chance.randint(0, 9)
        most = math.inf if window is None else window
        shape = (rows, key_heads, columns)
        # As caches lie: (rows, heads, columns, size), and queries of (rows, width, heads, size).
        self.keys = torch.full((*shape, size), NEVER).to(dtype)
        self.values = torch.full((*shape, value_size), NEVER).to(dtype)
        query = torch.randn(rows, width, key_heads * group, size)
        self.query = query.to(dtype).transpose(1, 2)
        self.seen = torch.zeros(rows, 1, width, 3, dtype=torch.int64)
        self.visible = torch.zeros(rows, 1, width, columns, dtype=torch.bool)
        for row in range(rows):
            # A ring goes round as often as it likes; other buffers end where the text does.
            start = chance.randint(0, longest - 1 if reach == longest else 3 * longest)
            padding = chance.choice([0, chance.randint(0, start)])
            parents = [index - 1 for index in range(width)]
            if chance.random() < 0.7:
                parents = [
                    chance.randint(max(index - 4, 0), index - 1) for index in range(1, width)
                ]
                parents.insert(0, -1)
            sees, depths = bits(parents, most)
            for slot in range(width):
                first = max(padding, 0 if window is None else start + depths[slot] - window + 1)
                new = sum(1 << other for other in sees[slot])
                new -= (new >> 63) << 64  # as int64
                self.seen[row, 0, slot] = torch.tensor([start, first, new])
                tokens = [*range(first, start), *(start + other for other in sees[slot])]
                self.visible[row, 0, slot, [token % columns for token in tokens]] = True
            at = self.visible[row, 0].any(0)
            self.keys[row, :, at] = torch.randn(key_heads, int(at.sum()), size).to(dtype)
            self.values[row, :, at] = torch.randn(key_heads, int(at.sum()), value_size).to(dtype)
        self.sinks = torch.randn(key_heads * group).to(dtype)

    def __call__(self, version, **options):
        return version(Operands(self.query, self.keys, self.values, **options), self.seen)


def slowly(case, *, scale, softcap=None, sinks=None):
    """Query by query, head by head, in float64, over what each sees."""
    rows, heads, width, _ = case.query.shape
    group = heads // case.keys.shape[1]
    found = torch.zeros(rows, width, heads, case.values.shape[3], dtype=torch.float64)
    for row in range(rows):
        for slot in range(width):
            at = case.visible[row, 0, slot]
            for head in range(heads):
                keys, values = (
                    each[row, head // group, at].double() for each in (case.keys, case.values)
                )
                scores = keys @ case.query[row, head, slot].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                rest = 0.0 if sinks is None else sinks[head].double().exp()
                found[row, slot, head] = weights @ values / (weights.sum() + rest)
    return found


def options_of(case, scale, softcap, sinks):
    return {"scale": scale, "softcap": softcap, "sinks": case.sinks if sinks else None}


cases = {
    "seed": st.integers(0, 2**32),
    "rows": st.integers(1, 3),
    "key_heads": st.integers(1, 2),
    "group": st.sampled_from([1, 2, 3, 8]),
    "width": st.sampled_from([1, 2, 4, 7, 16]),
    "sizes": st.sampled_from([(8, 8), (16, 16), (20, 12), (64, 64)]),
    "window": st.sampled_from([None, None, 1, 3, 11, 40]),
    "longest": st.sampled_from([1, 9, 70, 120]),
}


@settings(max_examples=60, deadline=None)
@given(
    **cases,
    softcap=st.sampled_from([None, None, 0.7, 30.0]),
    sinks=st.booleans(),
    split=st.booleans(),
)
def test_kernel_reference_and_loop_agree(softcap, sinks, split, **sizes):
    case = Case(dtype=torch.float32, **sizes)
    options = options_of(case, sizes["sizes"][0] ** -0.5, softcap, sinks)
    expected = slowly(case, **options)
    torch.testing.assert_close(
        attention.visible_columns(case.seen, case.keys.shape[2]), case.visible
    )
    with pytest.MonkeyPatch.context() as patch:
        # So that a few tokens are many tiles, in one part or many.
        patch.setattr(config, "_MOST_TOKENS", 16)
        patch.setattr(config, "_LEAST_TILES", 1 if split else 1000)
        found = case(launch, **options)
    assert found.is_contiguous()
    torch.testing.assert_close(case(plain, **options).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("width", "group", "sizes"),
    [
        (64, 1, (64, 64)),
        (64, 3, (24, 40)),
        (33, 4, (16, 16)),
        (1, 8, (128, 128)),
        (5, 2, (200, 256)),
    ],
)
def test_types_sizes_and_the_last_bit(dtype, width, group, sizes):
    case = Case(
        3, rows=2, key_heads=2, group=group, width=width, sizes=sizes, window=None, longest=90,
        dtype=dtype,
    )  # fmt: skip
    options = options_of(case, sizes[0] ** -0.5, None, True)
    found = case(launch, **options)
    assert found.dtype == dtype
    expected = slowly(case, **options)
    torch.testing.assert_close(
        found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    torch.testing.assert_close(
        case(plain, **options).double(),
        expected,
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


@pytest.mark.usefixtures("any_order")
def test_parts_in_any_order(monkeypatch):
    monkeypatch.setattr(config, "_LEAST_TILES", 1)
    sizes = {"key_heads": 2, "group": 3, "width": 6, "sizes": (16, 8), "window": 50, "longest": 90}
    case = Case(4, rows=2, dtype=torch.float32, **sizes)
    options = options_of(case, 0.3, None, True)
    torch.testing.assert_close(case(launch, **options), case(plain, **options))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_generations_say_the_same(family, monkeypatch):
    """On a device by itself; in the interpreter where the kernel is asked for."""
    with torch.device("cpu"):
        inputs = repetitive_batch(3)
        model = tiny_model(family)
    device = torch.get_default_device()
    model, inputs = model.to(device), {name: each.to(device) for name, each in inputs.items()}
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    if device.type == "cpu":
        # Of values in four dimensions, and of the probe: not of logits.
        monkeypatch.setattr(language, "has_kernels", lambda values: values.dim() != 2)
    met = []
    monkeypatch.setattr(attention, "launch", lambda *given: met.append(1) or launch(*given))
    forester = Forester([row[30:].tolist() for row in expected], nodes=15)
    output = hf.generate(
        model,
        **inputs,
        **options,
        cache_implementation="static",
        disable_compile=True,
        drafter=forester,
    )
    assert met
    assert forester.moved > 0
    assert_same_tokens(model, expected, output.sequences, attention_mask=inputs["attention_mask"])


@pytest.mark.parametrize("version", [launch, plain])
def test_a_row_is_the_same_in_any_batch(version):
    sizes = {"key_heads": 1, "group": 2, "width": 4, "sizes": (16, 16), "window": 9, "longest": 60}
    case = Case(5, rows=3, dtype=torch.float32, **sizes)
    together = case(version, scale=0.25)
    for row in range(3):
        only = slice(row, row + 1)
        *operands, seen = (each[only] for each in (case.query, case.keys, case.values, case.seen))
        alone = version(Operands(*operands, scale=0.25), seen)
        torch.testing.assert_close(alone, together[only], atol=1e-6, rtol=1e-6)


def test_heads_that_are_too_large_take_the_plain_version(monkeypatch):
    sizes = {"key_heads": 1, "group": 2, "width": 4, "window": None, "longest": 30}
    case = Case(6, rows=1, dtype=torch.float32, sizes=(300, 16), **sizes)
    monkeypatch.setattr(language, "has_kernels", lambda _: True)
    monkeypatch.setattr(attention, "launch", None)
    torch.testing.assert_close(case(cached_attention, scale=0.05), case(plain, scale=0.05))


def test_programs_and_parts_are_as_many_as_shapes_say():
    for pairs, queries, columns, size in [(8, 128, 32768, 128), (8, 4, 4096, 64), (512, 32, 99, 8)]:
        plan = config.split_attention(pairs, queries, columns, size, torch.bfloat16)
        assert plan.blocks * plan.queries >= queries
        assert plan.tokens * size * 2 <= 16384
        # No part is shorter than a few tiles, but the only one.
        assert plan.splits == 1 or columns // plan.splits >= 4 * plan.tokens
        assert plan.splits == 1 or pairs * plan.blocks * plan.splits < 2 * 264
