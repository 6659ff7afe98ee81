"""Bitwise products: torch's own to within rounding, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from adversarial import DTYPES
from transformers import DynamicCache

from fastdraft.hf import bitwise
from fastdraft.hf.bitwise import Bitwise
from fastdraft.kernels import language, products
from hf_models import tiny_model


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    drawn = torch.randn(*shape, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, *, roundings: int = 4) -> None:
    error = (found.double() - expected.double()).abs().max() / expected.abs().max()
    assert error < roundings * torch.finfo(found.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(90, 33, 70), (64, 128, 64)])
@pytest.mark.parametrize("transposed", [False, True])
def test_linear(dtype: torch.dtype, sizes: tuple[int, int, int], transposed: bool) -> None:
    tokens, inputs, outputs = sizes
    x, bias = drawn(tokens, inputs, dtype=dtype), drawn(outputs, dtype=dtype)
    weight = drawn(inputs, outputs, dtype=dtype).T
    weight = weight if transposed else weight.contiguous()
    found = products.linear(x, weight, bias)
    assert_close(found, x.double() @ weight.double().T + bias)
    for first, count in ((0, 1), (5, 1), (3, 17), (tokens - 2, 2), (1, tokens - 1)):
        part = products.linear(x[first : first + count], weight, bias)
        assert torch.equal(part, found[first : first + count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "size", "width"), [(6, 2, 24, 40), (4, 4, 64, 64)])
def test_attention(dtype: torch.dtype, heads: int, key_heads: int, size: int, width: int) -> None:
    """Rows of other lengths, drafts that fork, padding whose columns hold what nobody wrote."""
    rows, queries, columns = 2, 5, 75
    query = drawn(rows, heads, queries, size, dtype=dtype)
    key = drawn(rows, key_heads, columns, size, dtype=dtype)
    value = drawn(rows, key_heads, columns, width, dtype=dtype)
    mask = torch.ones(rows, 1, queries, columns, dtype=torch.bool).tril(columns - queries)
    mask[1, :, :, :9] = False
    mask[1, :, 3, 71] = False
    key[1, :, :9] = torch.nan
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double().nan_to_num(), value.double(), mask, enable_gqa=True
    )

    def attend(row: slice, some: slice, mask: torch.Tensor, pad: int = 0) -> torch.Tensor:
        shape = len(mask), *mask.shape[2:]
        order, _, hidden = bitwise._seen(mask, shape, mask.device, is_causal=False)
        seen = (~hidden).sum(-1, dtype=torch.int32)
        keys, values = (torch.nn.functional.pad(each[row], (0, 0, pad, 0)) for each in (key, value))
        return products.attend(query[row, :, some], keys, values, order, seen, size**-0.5)

    every = slice(None)
    found = attend(every, every, mask)
    assert_close(found, expected)
    for at in range(queries):
        own = attend(slice(1, 2), slice(at, at + 1), mask[1:, :, at : at + 1])
        assert torch.equal(own[0, :, 0], found[1, :, at])
    padded = torch.nn.functional.pad(mask[:1], (40, 0))
    assert torch.equal(attend(slice(0, 1), every, padded, pad=40)[0], found[0])
    mask[0, :, 0] = False
    assert not attend(every, every, mask)[0, :, 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mean(dtype: torch.dtype) -> None:
    x = drawn(3, 5, 1500, dtype=dtype) + 1
    found = products.mean(x)
    assert_close(found, x.double().mean(-1, keepdim=True))
    assert torch.equal(products.mean(x[1:2, 3]), found[1:2, 3])


def test_logits_do_not_depend_on_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "has_kernels", lambda _: True)
    launches = []
    for name in ("attend", "linear", "mean"):
        launch = getattr(products, name)
        monkeypatch.setattr(
            products, name, lambda *args, n=name, of=launch: launches.append(n) or of(*args)
        )
    model = tiny_model("llama").to(torch.bfloat16)
    ids = (30 * drawn(2, 40, dtype=torch.float32).abs()).long().clamp(3, 89).to(model.device)

    def logits(rows: torch.Tensor, widths: list[int]) -> torch.Tensor:
        cache, parts, at = DynamicCache(config=model.config), [], 0
        for width in widths:
            parts.append(model(rows[:, at : at + width], past_key_values=cache).logits)
            at += width
        return torch.cat(parts, 1)

    with torch.no_grad(), Bitwise():
        expected = logits(ids, [40])
        for widths in ([30, 1, 1, 8], [37, 3]):
            assert torch.equal(logits(ids, widths), expected)
        assert torch.equal(logits(ids[1:], [33, 7])[0], expected[1])
    assert {*launches} == {"attend", "linear", "mean"}
    with torch.no_grad():
        assert_close(expected, logits(ids, [40]), roundings=64)
