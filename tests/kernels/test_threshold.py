"""Thresholds of top-k, top-p and min-p against sorted rows in float64, and the reference."""

from __future__ import annotations

import math

import pytest
import torch
from adversarial import DTYPES, INTERPRETED, Random, allowed_bits, odd_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from fastdraft.kernels import filters, grid
from fastdraft.kernels.chunks import mask
from fastdraft.kernels.filters import weigh_rows
from fastdraft.kernels.operands import CHUNK, Batch, Sampling, Warpers
from fastdraft.kernels.sampled import leave_statistics
from fastdraft.kernels.workspace import PARTS, Scratch

# Temperature, top-k, top-p, min-p.
FILTERS = [
    (1.0, 3, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.3, 50, 0.95, 0.0),
    (1.0, 1, 0.5, 0.0),
    (2.0, 0, 0.5, 0.2),
    (1.0, 0, 0.0, 0.0),
    (0.0, 5, 0.5, 0.5),
    (1.0, 10**9, 0.999999, 0.0),
    (1e-30, 7, 0.9, 0.01),
    (1.0, 0, 1.0, 1.0),
    (1e30, 20, 0.6, 0.0),
    (0.8, 0, 1.0, 0.0),
    (1.0, 1000, 0.3, 0.05),
]
# How much sums in float32 may be off.
ROUNDING = 2e-6


def options(rows, *, of=FILTERS, first=0):
    """Filters of that many requests, in turn."""
    each = zip(*((of * rows)[first:][:rows]), strict=True)
    return Warpers(*map(torch.tensor, each))


def run(logits, warpers, *, allowed=None, offsets=None, max_draft=0):
    """The statistics of rows, as they were and with the filters' thresholds."""
    offsets = torch.zeros(len(warpers.temperature) + 1).long() if offsets is None else offsets
    batch = Batch(logits, torch.zeros(int(offsets[-1])).long(), offsets, max_draft, None, allowed)
    scratch = Scratch.take(batch, *filters.BUFFERS, "chunk_maximum", "chunk_sum")
    scratch.lowest.fill_(7.0)
    scratch.chunk_sum.fill_(7.0)  # what was in memory may be NaN, which equals nothing
    sampling = Sampling(warpers, offsets[1:], offsets[1:])
    leave_statistics(batch, sampling, scratch)
    before = scratch.chunk_sum.clone()
    filters.launch(batch, sampling, scratch)
    return scratch, before


def count_kept(row, temperature, top_k, top_p, min_p, *, rounding):
    """How many of a row's finite values, float64, are kept; rounding: the part more for top-p."""
    ordered = row[row > -math.inf].sort(descending=True).values
    weights = ((ordered - ordered[0]) / temperature).exp()
    lowest = float(ordered[0]) + temperature * math.log(min_p) if min_p else -math.inf
    # As float32, which can be in a tie.
    bounds = [float(torch.tensor(lowest, dtype=torch.float32))]
    if 0 < top_k < len(ordered):
        bounds.append(float(ordered[top_k - 1]))
        weights = torch.where(ordered >= bounds[-1], weights, 0.0)
    count = int((ordered >= max(bounds)).sum())
    if top_p < 1:
        enough = weights.cumsum(0) >= top_p * weights.sum() * (1 + rounding)
        if enough.any():
            count = min(count, int(enough.int().argmax()) + 1)
    return count


def kept_of(row, lowest, last_tied):
    """Which logits of a row the filters keep."""
    tokens = torch.arange(len(row))
    return (row > lowest) | ((row == lowest) & (tokens <= last_tied))


def check(logits, warpers, *, allowed=None):
    """Compares what is kept of each row, and the sums of what is, with what they should be."""
    x = logits.float() if allowed is None else mask(logits.float(), allowed)
    scratch, before = run(logits, warpers, allowed=allowed)
    lowest, sums = scratch.lowest, scratch.chunk_sum
    weights, *_ = weigh_rows(x, warpers)
    for index, row in enumerate(x):
        temperature, top_k, top_p, min_p = (float(value[index]) for value in warpers)
        idle = not (0 < top_k < len(row) or top_p < 1 or min_p > 0)
        if idle or temperature == 0 or not math.isfinite(row.max()):
            assert lowest[index] == -math.inf
            assert torch.equal(sums[index], before[index]) or row.isnan().any()
            continue
        kept = kept_of(row, lowest[index], scratch.last_tied[index])
        count = int((kept & (row > -math.inf)).sum())
        few, many = (
            count_kept(row.double(), temperature, int(top_k), top_p, min_p, rounding=rounding)
            for rounding in (-ROUNDING, ROUNDING)
        )
        assert few <= count <= many, (index, few, count, many)
        if few == many:
            weighed = ((row - row.max()) / temperature).exp() > 2.0**-125
            removed = weights[index].flatten()[: len(row)] == 0
            assert torch.equal(kept & weighed, ~removed), index
        chunks = torch.nn.functional.pad(
            torch.where(kept, row, -math.inf), (0, -len(row) % CHUNK), value=-math.inf
        ).view(-1, CHUNK)
        largest = scratch.chunk_maximum[index][:, None]
        powers = ((chunks - torch.where(largest == -math.inf, 0.0, largest)) / temperature).exp()
        torch.testing.assert_close(sums[index], powers.sum(1), rtol=2e-5, atol=0.0)


def ladder(rows, vocabulary, dtype):
    """Rows of neighbouring values, the smallest steps that the type has, around some value."""
    steps = torch.arange(rows * vocabulary).view(rows, vocabulary) * 7 % vocabulary
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    values = torch.linspace(-3.0, 11.0, rows).to(dtype)[:, None]
    return (values.view(integer) + steps.to(integer)).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 33, 5001])
def test_odd_rows(vocabulary, dtype):
    rows, seed = 14, vocabulary + 7 * DTYPES.index(dtype)
    check(odd_rows(rows, vocabulary, dtype, seed=seed), options(rows, first=seed % 13))


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbouring_values(dtype):
    check(ladder(8, 1500, dtype), options(8, first=3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_negative_values(dtype):
    """Rounding a key down is rounding away from zero for these."""
    random = Random(2)
    logits = -random.uniform(8, 5000) * torch.logspace(-3, 3, 8)[:, None]
    check(logits.to(dtype), options(8, of=[(1.0, 4, 1.0, 0.0), *FILTERS[:3]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_values_to_keep(dtype):
    """In most parts of a row."""
    vocabulary = 20_000
    chosen = [
        (1.0, 0, 0.9, 0.0),
        (1.0, 15_000, 0.7, 0.0),
        (1.0, vocabulary - 1, 1.0, 0.0),
        (0.2, 0, 0.99, 0.0),
    ]
    random = Random(0)
    logits = random.normal(4, vocabulary).to(dtype)
    check(logits, options(4, of=chosen))


def test_large_vocabularies():
    vocabulary = 262_144
    random = Random(0)
    logits = (random.normal(2, vocabulary) * 3).bfloat16()
    check(logits, options(2, of=[(1.0, 50, 0.9, 0.0), (0.5, 0, 0.8, 0.0)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_allowed_tokens(dtype):
    rows, vocabulary = 20, 3011
    logits = odd_rows(rows, vocabulary, dtype, seed=3)
    check(logits, options(rows), allowed=allowed_bits(rows, vocabulary, seed=3))


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_one_filter_alone(name):
    warpers = options(6)
    logits = odd_rows(6, 2500, torch.float32, seed=5)
    scratch, _ = run(logits, Warpers(warpers.temperature, **{name: getattr(warpers, name)}))
    without = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    others = {
        key: torch.full_like(getattr(warpers, key), off)
        for key, off in without.items()
        if key != name
    }
    expected, _ = run(logits, warpers._replace(**others))
    assert torch.equal(scratch.lowest, expected.lowest)
    assert torch.equal(scratch.last_tied, expected.last_tied)


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_ties(data):
    """Few different values, so that most thresholds are in a tie."""
    vocabulary = data.draw(st.integers(2, 80))
    rows = 4
    values = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 0.5 + 2**-7, 3.0])
    logits = torch.tensor(
        data.draw(st.lists(values, min_size=rows * vocabulary, max_size=rows * vocabulary))
    )
    one = st.tuples(
        st.sampled_from([0.0, 0.5, 1.0]),
        st.integers(0, vocabulary + 1),
        st.sampled_from([0.0, 0.3, 0.9, 1.0]),
        st.sampled_from([0.0, 0.05, 0.6, 1.0]),
    )
    chosen = data.draw(st.lists(one, min_size=rows, max_size=rows))
    dtype = data.draw(st.sampled_from(DTYPES))
    check(logits.view(rows, vocabulary).to(dtype), options(rows, of=chosen))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9])
def test_top_p_keeps_as_many_tied_tokens_as_transformers(dtype, share):
    """Equal logits: those with the lowest ids stay, as many as sorting keeps one by one."""
    random = Random(4)
    flat = torch.zeros(97)
    # An eighth of a row weighs little, the others tie.
    steps = torch.where(random.uniform(3001) < 0.125, -4.0, (random.uniform(3001) * 3).floor())
    for row in (flat, steps):
        logits = row.to(dtype)[None]
        warpers = Warpers(torch.ones(1), None, torch.tensor([share]))
        scratch, _ = run(logits, warpers)
        expected = TopPLogitsWarper(share)(None, logits.float())[0] > -math.inf
        kept = kept_of(logits.float()[0], scratch.lowest[0], scratch.last_tied[0])
        assert int(kept.sum()) == int(expected.sum())
        weights, *_ = weigh_rows(logits, warpers)
        assert torch.equal(weights.flatten()[: len(row)] > 0, kept)
        tied = (logits.float()[0] == scratch.lowest[0]).nonzero()[:, 0]
        assert kept[tied].int().diff().le(0).all()


def spread_rows(vocabulary):
    """Rows nearly flat and peaked, one of equal logits, and one of all values of bfloat16."""
    rows = Random(11).normal(2, vocabulary) * torch.tensor([0.5, 3.0])[:, None]
    every = torch.arange(vocabulary).to(torch.int16).view(torch.bfloat16).float()
    every = torch.where(every.isfinite(), every, 0.0)
    return torch.cat([rows, torch.zeros(1, vocabulary), every[None]])


@pytest.mark.skipif(not INTERPRETED, reason="reads are counted in the interpreter")
@pytest.mark.parametrize(
    ("dtype", "chosen", "passes"),
    [
        (torch.bfloat16, (1.0, 0, 0.9, 0.0), 4),
        (torch.bfloat16, (0.7, 0, 0.95, 0.05), 4),
        (torch.bfloat16, (1.0, 20_000, 1.0, 0.0), 4),
        (torch.bfloat16, (1e30, 0, 0.9, 0.0), 4),
        (torch.bfloat16, (1.0, 50, 0.9, 0.1), 3),
        (torch.bfloat16, (1e30, 30_000, 0.5, 0.0), 7),
        (torch.float16, (1.0, 0, 0.9, 0.0), 5),
        (torch.float32, (1.0, 0, 0.9, 0.0), 8),
        (torch.float32, (1.0, 0, 1.0, 0.1), 1),
    ],
    ids=str,
)
def test_filters_read_a_row_a_few_times(monkeypatch, dtype, chosen, passes):
    vocabulary, read = 65_536, []
    load_allowed = grid.load_allowed

    def counting(rows, values, allowed, unit, masked):
        read[-1] += math.prod(unit.shape) * 16 // dtype.itemsize
        return load_allowed(rows, values, allowed, unit, masked)

    monkeypatch.setattr(grid, "load_allowed", counting)
    for row in spread_rows(vocabulary).to(dtype):
        read.append(0)
        run(row[None], options(1, of=[chosen]))
    # And the chunk in which the last tie is that is kept.
    assert 0 < max(read) <= passes * vocabulary + CHUNK


def test_a_row_has_its_threshold_in_any_batch():
    logits = odd_rows(8, 9000, torch.float32, seed=6)
    warpers = options(8, first=1)
    together, _ = run(logits, warpers)
    for row in (0, 3, 6):
        alone, _ = run(logits[row : row + 1], warpers.of(slice(row, row + 1)))
        assert torch.equal(alone.lowest[0], together.lowest[row])
        if warpers.temperature[row]:  # an argmax needs no sums
            assert torch.equal(alone.chunk_sum[0], together.chunk_sum[row])


def test_rows_beyond_the_last_request_are_left_alone():
    logits = odd_rows(7, 300, torch.float32, seed=7)
    # Requests of 3 and 1 rows, of which the first's last is past max_draft; three rows of nobody.
    scratch, _ = run(logits, options(2), offsets=torch.tensor([0, 2, 2]), max_draft=1)
    assert (scratch.lowest == 7.0).tolist() == [False, False, True, False, True, True, True]


def test_options_that_are_no_numbers_end():
    """Options on a device are not looked at: whatever they hold, nothing is touched but the row."""
    random = Random(8)
    logits = random.normal(7, 2100) * 4
    nan = math.nan
    chosen = [
        (1.0, 5, 0.9, 0.1),
        (nan, 5, 0.9, 0.1),
        (-1.0, 5, 0.9, 0.1),
        (1.0, -5, nan, nan),
        (1e-42, 0, -2.0, 7.0),
        (1.0, 0, 0.9, 7.0),
        (1.0, 5, 0.9, 0.1),
    ]
    logits[-1] = logits[0]
    scratch, _ = run(logits, options(7, of=chosen))
    for name in ("lowest", "chunk_sum"):
        assert torch.equal(getattr(scratch, name)[0], getattr(scratch, name)[-1])


def test_the_parts_of_a_chunk_are_those_of_the_statistics():
    for dtype in DTYPES:
        logits = odd_rows(1, 3000, dtype, seed=9)
        batch = Batch(logits, torch.zeros(0).long(), torch.tensor([0, 0]), max_draft=0)
        scratch = Scratch.take(batch, "chunk_maximum", "chunk_sum", "part_maximum")
        nothing = torch.zeros(1).long()
        leave_statistics(batch, Sampling(Warpers(torch.ones(1)), nothing, nothing), scratch)
        filled = torch.nn.functional.pad(logits.float(), (0, 72), value=-math.inf)
        unit = 16 // dtype.itemsize
        parts = filled.view(1, 3, -1, PARTS, 2 * unit).amax((2, 4))
        assert torch.equal(scratch.part_maximum, parts)
