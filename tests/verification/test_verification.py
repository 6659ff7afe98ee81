"""Verification token by token: held against obvious oracles, on ordinary and on odd logits."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import chunks, greedy, noise, operands, trees
from fastdraft.kernels import sampled as sampled_kernel
from fastdraft.kernels.filters import weigh
from fastdraft.kernels.operands import Batch, Warpers
from fastdraft.verification import (
    Status,
    Verified,
    compaction_indices,
    tree_attention_mask,
    tree_depths,
    verify_greedy,
    verify_sampled,
)

INF, NAN = math.inf, math.nan
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


# The oracles: one row, one token at a time, with plain numbers.


def philox_oracle(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def noise_oracle(seed, position, stream, index):
    seed %= 2**64
    counter = (index, position % 2**32, position >> 32, stream)
    high, low, _, _ = philox_oracle(counter, (seed % 2**32, seed >> 32))
    uniform = (high * 2**32 + low + 0.5) / 2**64
    return -math.log1p(-min(uniform, 1 - 2**-53))


def argmax_oracle(row):
    for token, logit in enumerate(row):
        if math.isnan(logit):
            return token
    return row.index(max(row))


def weights_oracle(row, temperature, top_k, top_p, min_p):
    """The weight of each token of a row, by sorting, with the largest weight 1."""
    top = max(row)

    def weight(x):
        return math.exp((x - top) / temperature)

    lowest = sorted(row, reverse=True)[top_k - 1] if 0 < top_k < len(row) else -INF
    kept = [token for token, x in enumerate(row) if x >= lowest]
    if top_p < 1:
        total, above, nucleus = sum(weight(row[token]) for token in kept), 0.0, []
        for token in sorted(kept, key=lambda token: -row[token]):
            if nucleus and above >= top_p * total:
                break
            nucleus.append(token)
            above += weight(row[token])
        kept = nucleus
    if min_p > 0:
        lowest = top + temperature * math.log(min_p)
        kept = [token for token in kept if row[token] >= lowest]
    kept = set(kept)
    return [weight(x) if token in kept else 0.0 for token, x in enumerate(row)]


def draw_oracle(row, seed, position, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    if temperature == 0 or any(math.isnan(x) or x == INF for x in row) or max(row) == -INF:
        return argmax_oracle(row)
    weights = weights_oracle(row, temperature, top_k, top_p, min_p)
    width = operands.CHUNK
    chunks = [weights[start : start + width] for start in range(0, len(row), width)]
    race = [sum(chunk) / noise_oracle(seed, position, 1, c) for c, chunk in enumerate(chunks)]
    best = race.index(max(race))
    race = [
        weight / noise_oracle(seed, position, 0, best * width + t)
        for t, weight in enumerate(chunks[best])
    ]
    return best * width + race.index(max(race))


def accept_oracle(rows, tokens, draft):
    """What a request emits, and its status, from the target's token in each of its rows."""
    emitted, status = [], 0
    for row, token, drafted in zip(rows, tokens, [*draft, None], strict=True):
        if max(row) == -INF and not any(math.isnan(x) for x in row):
            return emitted, status | Status.EMPTY
        if any(math.isnan(x) for x in row):
            status |= Status.NAN
        emitted.append(token)
        if token != drafted:
            break
    return emitted, status


def is_empty(row):
    return max(row) == -INF and not any(math.isnan(x) for x in row)


def walk_oracle(rows, choose, draft, parents):
    """What a request with a tree emits, its path and its status, from the root downwards.

    choose(row, depth) is the target's token in a row of logits at that depth.
    """
    node, emitted, path, status = -1, [], [], 0
    while True:
        row = rows[node + 1]
        if is_empty(row):
            return emitted, path, status | Status.EMPTY
        if any(math.isnan(x) for x in row):
            status |= Status.NAN
        emitted.append(choose(row, len(path)))
        children = [j for j in range(len(draft)) if parents[j] == node and draft[j] == emitted[-1]]
        if not children:
            return emitted, path, status
        (node,) = children
        path.append(node)


def ancestors(parents, node):
    """The node and all that lead to it, -1 for the text's last token among them."""
    line = [node]
    while line[-1] >= 0:
        line.append(parents[line[-1]])
    return line


def ragged(drafts):
    """Draft ids and offsets of a list of drafts."""
    flat = [token for draft in drafts for token in draft]
    offsets = np.cumsum([0, *map(len, drafts)])
    return torch.tensor(flat, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32)


def sampled(logits, drafts, seeds, positions, **options):
    return verify_sampled(
        logits,
        *ragged(drafts),
        seeds=torch.tensor(seeds),
        positions=torch.tensor(positions),
        **options,
    )


def check_padding(verified):
    columns = torch.arange(verified.token_ids.shape[1])
    padding = columns >= verified.lengths[:, None]
    assert (verified.token_ids[padding] == -1).all()
    assert (verified.token_ids[~padding] >= 0).all()
    assert verified.token_ids.dtype == verified.lengths.dtype == torch.int32
    assert verified.status.dtype == torch.int32


# The random words and the noise.


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's kat_vectors for philox4x32-10
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    result = noise.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, result)) == words
    assert philox_oracle(counter, key) == words


def test_exponential_keeps_both_tails():
    words = torch.tensor([0, 1, 2**32 - 1])
    smallest, _, _ = noise.exponential(torch.zeros(3, dtype=torch.int64), words).tolist()
    assert smallest == pytest.approx(2.0**-65, rel=1e-12, abs=0)
    largest = noise.exponential(torch.full((3,), 2**32 - 1), words)
    assert largest.isfinite().all()
    assert float(largest[2]) == pytest.approx(53 * math.log(2), rel=1e-12)
    half = noise.exponential(torch.tensor([2**31]), torch.tensor([0]))
    assert float(half) == pytest.approx(math.log(2), rel=1e-12)


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**63 - 1),
    index=st.integers(0, 2**31 - 1),
    stream=st.integers(0, 3),
)
def test_noise_is_the_documented_one(seed, position, index, stream):
    value = noise.exponential_noise(
        torch.tensor([seed]), torch.tensor([position]), torch.tensor([index]), stream=stream
    )
    assert float(value) == pytest.approx(noise_oracle(seed, position, stream, index), rel=1e-12)


# Ragged batches against the oracles.

LATTICE = [x / 4 for x in range(-12, 13)]
ODD_LOGITS = st.sampled_from([*LATTICE, 0.0, -0.0, -INF, -INF, INF, NAN, 1e4, -1e4])


@st.composite
def batches(draw, logits=ODD_LOGITS):
    """Rows of logits and drafts; the drafts hit often, and hold ids out of range."""
    vocabulary = draw(st.integers(2, 9))
    row = st.lists(logits, min_size=vocabulary, max_size=vocabulary)
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    rows = [draw(st.lists(row, min_size=n + 1, max_size=n + 1)) for n in lengths]
    ids = st.integers(-2, vocabulary + 1)
    drafts = [draw(st.lists(ids, min_size=n, max_size=n)) for n in lengths]
    return rows, drafts


def check_against_oracle(verified, rows, tokens, drafts):
    check_padding(verified)
    expected = [accept_oracle(*request) for request in zip(rows, tokens, drafts, strict=True)]
    assert verified.tolist() == [emitted for emitted, _ in expected]
    assert verified.status.tolist() == [status for _, status in expected]


@settings(max_examples=300, deadline=None)
@given(
    batch=batches(),
    hit=st.lists(st.booleans(), min_size=30, max_size=30),
    dtype=st.sampled_from(DTYPES),
)
def test_greedy_is_the_oracle(batch, hit, dtype):
    rows, drafts = batch
    tokens = [[argmax_oracle(row) for row in request] for request in rows]
    hits = iter(hit)
    drafts = [
        [token if next(hits) else drafted for token, drafted in zip(right, draft, strict=False)]
        for right, draft in zip(tokens, drafts, strict=True)
    ]
    logits = torch.tensor([row for request in rows for row in request], dtype=dtype)
    verified = verify_greedy(logits, *ragged(drafts))
    check_against_oracle(verified, rows, tokens, drafts)
    everywhere_greedy = sampled(logits, drafts, [0] * len(rows), [0] * len(rows), temperature=0)
    assert torch.equal(everywhere_greedy.token_ids, verified.token_ids)
    assert torch.equal(everywhere_greedy.status, verified.status)


@settings(max_examples=300, deadline=None)
@given(
    batch=batches(),
    hit=st.lists(st.booleans(), min_size=30, max_size=30),
    chunk=st.sampled_from([2, 3, 1024]),
    data=st.data(),
)
def test_sampled_is_the_oracle(batch, hit, chunk, data):
    rows, drafts = batch
    n = len(rows)

    def each(values):
        return data.draw(st.lists(values, min_size=n, max_size=n))

    # Shares and fractions that no sum of lattice weights meets to the last bit.
    temperature = each(st.sampled_from([0.0, 0.25, 1.0, 1.5, 1e-30, 1e30]))
    top_k = each(st.sampled_from([0, 1, 2, 3, 8, 50]))
    top_p = each(st.sampled_from([0.0, 0.1171875, 0.5703125, 0.9453125, 1.0]))
    min_p = each(st.sampled_from([0.0, 0.0703125, 0.3203125, 1.0]))
    seeds = each(st.integers(-(2**63), 2**63 - 1))
    positions = each(st.integers(0, 2**62))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "CHUNK", chunk)
        # float32 options, as verification takes them
        exact = [float(np.float32(t)) for t in temperature]
        tokens = [
            [
                draw_oracle(row, seeds[b], positions[b] + j, exact[b], top_k[b], top_p[b], min_p[b])
                for j, row in enumerate(request)
            ]
            for b, request in enumerate(rows)
        ]
        hits = iter(hit)
        drafts = [
            [token if next(hits) else drafted for token, drafted in zip(right, draft, strict=False)]
            for right, draft in zip(tokens, drafts, strict=True)
        ]
        logits = torch.tensor([row for request in rows for row in request], dtype=torch.float64)
        verified = sampled(
            logits,
            drafts,
            seeds,
            positions,
            temperature=torch.tensor(temperature),
            top_k=torch.tensor(top_k),
            top_p=torch.tensor(top_p),
            min_p=torch.tensor(min_p),
        )
    check_against_oracle(verified, rows, tokens, drafts)


# Trees.


def planted(draw, rows, choose):
    """A tree for a request, as (parent, token) pairs, that the target follows now and then."""
    size, vocabulary = len(rows) - 1, len(rows[0])
    ids, depths = range(-2, vocabulary + 2), {-1: 0}
    nodes = []
    for node in range(size):
        parent = draw(st.integers(-1, node - 1))
        taken = {token for other, token in nodes if other == parent}
        token = choose(rows[parent + 1], depths[parent])
        if token in taken or draw(st.booleans()):
            token = draw(st.sampled_from([i for i in ids if i not in taken]))
        nodes.append((parent, token))
        depths[node] = depths[parent] + 1
    return nodes


def check_trees(verified, rows, chooses, trees):
    check_padding(verified)
    expected = [
        walk_oracle(request, choose, [token for _, token in tree], [parent for parent, _ in tree])
        for request, choose, tree in zip(rows, chooses, trees, strict=True)
    ]
    assert verified.tolist() == [emitted for emitted, _, _ in expected]
    assert verified.status.tolist() == [status for _, _, status in expected]
    longest = verified.token_ids.shape[1] - 1
    paths = [[*path, *[-1] * (longest - len(path))] for _, path, _ in expected]
    assert verified.path.tolist() == paths
    assert verified.path.dtype == torch.int32
    kept = compaction_indices(verified.path).tolist()
    for slots, (_, path, _) in zip(kept, expected, strict=True):
        assert slots == [0, *[node + 1 for node in path], *range(len(path) + 1, longest + 1)]


def trees_of(data, rows, chooses):
    """Trees for the requests, and their draft ids, offsets and parents."""
    trees = [
        planted(data.draw, request, choose) for request, choose in zip(rows, chooses, strict=True)
    ]
    ids, offsets = ragged([[token for _, token in tree] for tree in trees])
    parents = torch.tensor([parent for tree in trees for parent, _ in tree], dtype=torch.int32)
    return trees, ids, offsets, parents


@settings(max_examples=200, deadline=None)
@given(batch=batches(), dtype=st.sampled_from(DTYPES), data=st.data())
def test_greedy_trees_are_the_oracle(batch, dtype, data):
    rows, _ = batch
    chooses = [lambda row, _: argmax_oracle(row)] * len(rows)
    trees, ids, offsets, parents = trees_of(data, rows, chooses)
    logits = torch.tensor([row for request in rows for row in request], dtype=dtype)
    verified = verify_greedy(logits, ids, offsets, parents=parents)
    check_trees(verified, rows, chooses, trees)
    wider = verify_greedy(logits, ids, offsets, parents=parents.long(), max_draft=9)
    assert wider.tolist() == verified.tolist()
    assert wider.path.shape == (len(rows), 9)


@settings(max_examples=200, deadline=None)
@given(batch=batches(), data=st.data())
def test_sampled_trees_are_the_oracle(batch, data):
    rows, _ = batch
    n = len(rows)
    seeds = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=n, max_size=n))
    positions = data.draw(st.lists(st.integers(0, 2**62), min_size=n, max_size=n))

    def chooser(b):
        return lambda row, depth: draw_oracle(row, seeds[b], positions[b] + depth, 1.5)

    chooses = [chooser(b) for b in range(n)]
    trees, ids, offsets, parents = trees_of(data, rows, chooses)
    logits = torch.tensor([row for request in rows for row in request], dtype=torch.float64)
    verified = verify_sampled(
        logits,
        ids,
        offsets,
        parents=parents,
        temperature=1.5,
        seeds=torch.tensor(seeds),
        positions=torch.tensor(positions),
    )
    check_trees(verified, rows, chooses, trees)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_layout_of_trees(data, sizes):
    of_requests = [
        [data.draw(st.integers(max(-1, node - 5), node - 1)) for node in range(size)]
        for size in sizes
    ]
    parents, offsets = ragged(of_requests)
    longest = max(sizes) + data.draw(st.integers(0, 2))
    depths = tree_depths(parents, offsets, max_draft=longest)
    sees = tree_attention_mask(parents, offsets, max_draft=longest)
    assert depths.dtype == torch.int64
    assert sees.dtype == torch.bool
    for b, (size, of_request) in enumerate(zip(sizes, of_requests, strict=True)):
        for slot in range(longest + 1):
            line = ancestors(of_request, slot - 1) if slot <= size else [slot - 1]
            assert int(depths[b, slot]) == len(line) - 1
            assert sees[b, slot].nonzero()[:, 0].tolist() == [node + 1 for node in reversed(line)]


def test_layout_of_chains():
    parents, offsets = ragged([[-1, 0, 1], []])
    assert tree_depths(parents, offsets).tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    sees = tree_attention_mask(parents, offsets)
    assert torch.equal(sees[0], torch.ones(4, 4, dtype=torch.bool).tril())
    assert torch.equal(sees[1], torch.eye(4, dtype=torch.bool))
    assert tree_depths(parents[:0], torch.tensor([0, 0])).tolist() == [[0]]


def test_the_path_of_a_chain():
    logits = torch.full((9, 4), -1.0)
    logits[torch.arange(9), [1, 2, 3, 0, 1, 1, 2, 3, 0]] = 1.0
    logits[7] = -INF
    verified = verify_greedy(logits, *ragged([[1, 2, 0], [], [1, 2, 3]]))
    assert verified.tolist() == [[1, 2, 3], [1], [1, 2]]
    assert verified.path.tolist() == [[0, 1, -1], [-1, -1, -1], [0, 1, -1]]
    assert verified.path.dtype == torch.int32
    # The same as trees: one request has two guesses for its first token.
    ids, offsets = ragged([[1, 2, 0], [], [1, 2, 3, 0]])
    parents = torch.tensor([-1, 0, 1, -1, 0, 1, -1])
    logits = torch.cat([logits, logits[:1]])
    verified = verify_greedy(logits, ids, offsets, parents=parents)
    assert verified.tolist() == [[1, 2, 3], [1], [1, 2]]
    assert verified.path.tolist() == [[0, 1, -1, -1], [-1] * 4, [0, 1, -1, -1]]


VOCABULARIES = [2, 3, 1000, 1023, 1024, 1025, 2047, 2048, 4099, 49152, 50257]


@pytest.mark.parametrize("vocabulary", [*VOCABULARIES, 151936, 300000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("few", [0, greedy._FEW])
def test_greedy_is_argmax_for_any_vocabulary(vocabulary, dtype, few, monkeypatch):
    monkeypatch.setattr(greedy, "_FEW", few)
    torch.manual_seed(vocabulary)
    rows = 3
    # Few distinct values, so that nearly every maximum is a tie.
    logits = torch.randint(-8, 9, (rows, vocabulary)).to(dtype) / 4
    logits[1, vocabulary // 2] = NAN
    logits[1, -1] = NAN
    logits[2, vocabulary - 1] = INF
    expected = logits.argmax(-1)
    verified = verify_greedy(logits, *ragged([[]] * rows))
    assert verified.token_ids[:, 0].tolist() == expected.tolist()
    assert verified.status.tolist() == [0, Status.NAN, 0]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"temperature": 1.3, "top_k": 700, "top_p": 0.95, "min_p": 0.001},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_draw_is_the_oracle_for_any_vocabulary(vocabulary, dtype, options):
    torch.manual_seed(vocabulary)
    logits = (torch.randn(2, vocabulary) * 3).to(dtype)
    seeds, positions = [7, -(2**40)], [3, 2**33 + 1]
    verified = sampled(logits, [[], []], seeds, positions, **options)
    rows = logits.double().tolist()
    temperature = float(np.float32(options.get("temperature", 1.0)))
    expected = [
        draw_oracle(row, seed, position, **{**options, "temperature": temperature})
        for row, seed, position in zip(rows, seeds, positions, strict=True)
    ]
    assert verified.tolist() == [[token] for token in expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_have_any_stride(dtype):
    torch.manual_seed(0)
    drafts = [[1, 2], [], [5]]
    dense = torch.randn(6, 1500).to(dtype)
    wide = torch.full((12, 3000), NAN, dtype=dtype)
    wide[::2, :1500] = dense
    spread = torch.full((6, 3000), NAN, dtype=dtype)
    spread[:, ::2] = dense
    transposed = dense.t().contiguous().t()
    one_row = dense[:1].expand(6, -1)
    for view, same in [
        (wide[::2, :1500], dense),
        (spread[:, ::2], dense),
        (transposed, dense),
        (one_row, one_row.contiguous()),
    ]:
        options = {"seeds": [1, 2, 3], "positions": [4, 5, 6], "top_p": 0.8}
        assert (
            sampled(view, drafts, **options).tolist() == sampled(same, drafts, **options).tolist()
        )
        greedy = verify_greedy(view, *ragged(drafts))
        assert greedy.tolist() == verify_greedy(same, *ragged(drafts)).tolist()


# Thresholds.


def kept(logits, **options):
    """The tokens of each row that have a weight, and the weights."""
    rows = len(logits)
    x = chunks.chunked(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    full = {
        "temperature": torch.full((rows,), float(options.get("temperature", 1.0))),
        "top_k": torch.full((rows,), options["top_k"]) if "top_k" in options else None,
        "top_p": torch.full((rows,), float(options["top_p"])) if "top_p" in options else None,
        "min_p": torch.full((rows,), float(options["min_p"])) if "min_p" in options else None,
    }
    weights = weigh(x, maximum=x.amax((-1, -2)), warpers=Warpers(**full))
    return weights.flatten(1)[:, : logits.shape[1]]


@pytest.mark.parametrize("vocabulary", [5, 1024, 5000, 49152])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 4000},
        {"top_p": 0.0},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 1000, "top_p": 0.97, "min_p": 0.003},
    ],
    ids=str,
)
def test_thresholds_are_those_of_transformers(vocabulary, spread, options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(vocabulary)
    # The quantiles of a normal distribution: no ties, which transformers keeps in part.
    logits = torch.stack([torch.randperm(vocabulary) for _ in range(3)]).float()
    logits = spread * torch.erfinv((2 * logits + 1) / vocabulary - 1).mul(math.sqrt(2))
    warpers = transformers.LogitsProcessorList()
    warpers.append(transformers.TemperatureLogitsWarper(options.get("temperature", 1.0)))
    if "top_k" in options:
        warpers.append(transformers.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(transformers.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        warpers.append(transformers.MinPLogitsWarper(options["min_p"]))
    expected = warpers(None, logits.double()).softmax(-1)
    weights = kept(logits, **options).double()
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(
        weights / weights.sum(-1, keepdim=True), expected, rtol=1e-4, atol=1e-6
    )


def test_ties_at_a_threshold():
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    two_first = [False, True, True, True, True, False]
    assert (kept(row, top_k=2) > 0).tolist() == [two_first]
    # Of the three that tie, two are enough.
    assert (kept(row, top_p=0.7) > 0).tolist() == [[False, True, True, True, False, False]]
    assert (kept(row, top_p=0.0) > 0).tolist() == [[False, True, False, False, False, False]]
    assert (kept(torch.zeros(1, 5000), top_k=3) > 0).all()
    assert (kept(torch.zeros(1, 5000), top_p=0.1) > 0).sum() == 500
    assert (kept(torch.zeros(1, 5000), min_p=1.0) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0, 3e8])
def test_neighbouring_values_are_told_apart(dtype, start):
    values = [torch.tensor(start, dtype=dtype)]
    for _ in range(5):
        values.append(values[-1].nextafter(torch.tensor(INF, dtype=dtype)))
    row = torch.stack(values)[None]
    assert (kept(row, top_k=2) > 0).tolist() == [[False] * 4 + [True] * 2]
    assert (kept(row, top_p=0.0) > 0).tolist() == [[False] * 5 + [True]]
    assert (kept(row, min_p=1.0) > 0).tolist() == [[False] * 5 + [True]]


def test_thresholds_of_crowded_values():
    # bfloat16 rows repeat each value many times: more ties than the first places looked at hold.
    torch.manual_seed(1)
    logits = torch.randn(4, 49152).bfloat16()
    for options in ({"top_k": 50}, {"top_k": 3000}, {"top_p": 0.5}, {"top_k": 900, "top_p": 0.7}):
        oracle = [
            weights_oracle(row, 1.0, options.get("top_k", 0), options.get("top_p", 1.0), 0.0)
            for row in logits.double().tolist()
        ]
        assert torch.equal(kept(logits, **options) > 0, torch.tensor(oracle) > 0)


# Odd rows in the middle of a draft.

EMPTY_ROW = [-INF] * 4
NAN_ROW = [0.0, NAN, 9.0, NAN]


def peak(token):
    row = [-INF] * 4
    row[token] = 0.0
    return row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("rows", "draft", "emitted", "status"),
    [
        ([EMPTY_ROW], [], [], Status.EMPTY),
        ([peak(3), EMPTY_ROW, peak(2)], [3, 1], [3], Status.EMPTY),
        ([peak(3), peak(1), EMPTY_ROW], [3, 1], [3, 1], Status.EMPTY),
        ([EMPTY_ROW, peak(1), peak(1)], [0, 1], [], Status.EMPTY),
        ([peak(3), EMPTY_ROW, NAN_ROW], [2, 0], [3], 0),
        ([NAN_ROW], [], [1], Status.NAN),
        ([NAN_ROW, peak(2)], [1], [1, 2], Status.NAN),
        ([NAN_ROW, peak(2)], [2], [1], Status.NAN),
        ([NAN_ROW, EMPTY_ROW], [1], [1], Status.NAN | Status.EMPTY),
        ([peak(0), NAN_ROW], [1], [0], 0),
        ([[1.0, INF, INF, 0.0], peak(0)], [1], [1, 0], 0),
        ([[-INF, NAN, -INF, INF]], [], [1], Status.NAN),
    ],
)
def test_odd_rows(rows, draft, emitted, status, temperature):
    for dtype in DTYPES:
        logits = torch.tensor([*rows, peak(2)], dtype=dtype)
        verified = sampled(logits, [draft, []], [5, 6], [0, 0], temperature=temperature)
        assert verified.tolist() == [emitted, [2]]
        assert verified.status.tolist() == [status, 0]
        check_padding(verified)
        # The same as a tree, with another guess for the first token, which never matches.
        logits = torch.tensor([*rows, peak(0), peak(2)], dtype=dtype)
        tree = {"parents": torch.tensor([*range(-1, len(draft) - 1), -1])}
        drafts = [[*draft, len(logits[0])], []]
        verified = sampled(logits, drafts, [5, 6], [0, 0], temperature=temperature, **tree)
        assert verified.tolist() == [emitted, [2]]
        assert verified.status.tolist() == [status, 0]
        check_padding(verified)


@pytest.mark.parametrize("temperature", [0.0, 2e-38, 1.0, 3e38])
def test_ids_are_in_range_whatever_the_logits_hold(temperature):
    values = [NAN, INF, -INF, 0.0, -0.0, 1e38, -1e38, 3e38, -3e38, 1e-45, 1.0]
    chooser = random.Random(0)
    rows = [[chooser.choice(values) for _ in range(1100)] for _ in range(60)]
    rows += [[value] * 1100 for value in values]
    for dtype in DTYPES:
        logits = torch.tensor(rows, dtype=dtype)
        options = {"top_k": 20, "top_p": 0.9, "min_p": 0.1}
        many = len(rows)
        verified = sampled(
            logits, [[]] * many, [1] * many, [2] * many, temperature=temperature, **options
        )
        assert ((verified.token_ids >= -1) & (verified.token_ids < 1100)).all()
        check_padding(verified)


def test_draft_ids_out_of_range_never_match():
    logits = torch.zeros(3, 4)
    logits[:, 1] = 9.0
    for token in (-1, 4, -(2**31), 2**31 - 1, 2**32 + 1, -(2**32) + 1):
        ids = torch.tensor([token, 1])
        verified = verify_greedy(logits, ids, torch.tensor([0, 2]))
        assert verified.tolist() == [[1]]
    empty = torch.full((2, 4), -INF)
    assert verify_greedy(empty, torch.tensor([-1]), torch.tensor([0, 1])).tolist() == [[]]


# Reproducibility.


def test_token_depends_on_seed_position_and_logits_alone():
    torch.manual_seed(3)
    options = {"temperature": 0.9, "top_k": 400, "top_p": 0.97, "min_p": 0.001}
    text, vocabulary, seed, start = 40, 3000, 2**35 + 11, 1000
    logits = torch.randn(text, vocabulary) * 2
    plain = [
        sampled(logits[i : i + 1], [[]], [seed], [start + i], **options).tolist()[0][0]
        for i in range(text)
    ]
    chooser = random.Random(4)
    for others in (0, 1, 5):
        emitted = []
        while len(emitted) < text - 8:
            at = len(emitted)
            size = chooser.randrange(8)
            right = chooser.randrange(size + 1)
            draft = [*plain[at : at + right], *([vocabulary - 1] * (size - right))]
            slot = chooser.randrange(others + 1)
            drafts = [[7] * chooser.randrange(4) for _ in range(others + 1)]
            drafts[slot] = draft
            rows = [torch.randn(len(other) + 1, vocabulary) for other in drafts]
            rows[slot] = logits[at : at + size + 1]
            seeds = [chooser.randrange(2**60) for _ in drafts]
            seeds[slot] = seed
            positions = [chooser.randrange(2**40) for _ in drafts]
            positions[slot] = start + at
            verified = sampled(torch.cat(rows), drafts, seeds, positions, **options)
            new = verified.tolist()[slot]
            assert len(new) >= right + 1
            emitted += new
        assert emitted == plain[: len(emitted)]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 60, "top_p": 0.9}])
def test_a_seeded_sample_is_the_same_with_any_draft(options):
    # The logits of a place in the text depend on the text before it, as a model's do.
    vocabulary, seed, start = 700, 2**40 + 3, 77
    chooser = random.Random(8)

    def logits_after(text):
        generator = torch.Generator().manual_seed(hash(text) % 2**63)
        return torch.randn(vocabulary, generator=generator) * 3

    def step(text, nodes):
        paths = [()]
        for parent, token in nodes:
            paths.append((*paths[parent + 1], token))
        verified = verify_sampled(
            torch.stack([logits_after(text + path) for path in paths]),
            *ragged([[token for _, token in nodes]]),
            parents=torch.tensor([parent for parent, _ in nodes], dtype=torch.int32),
            seeds=torch.tensor([seed]),
            positions=torch.tensor([start + len(text)]),
            **options,
        )
        return tuple(verified.tolist()[0])

    plain = ()
    while len(plain) < 60:
        plain += step(plain, [])
    text, accepted = (), []
    while len(text) < 45:
        nodes, node, depth = [], -1, 0
        for _ in range(chooser.randrange(12)):
            true = (node, plain[len(text) + depth])
            wrong = (chooser.randrange(-1, len(nodes)), chooser.randrange(vocabulary))
            if chooser.random() < 0.5 and true not in nodes:
                node, depth = len(nodes), depth + 1
                nodes.append(true)
            elif wrong not in nodes:
                nodes.append(wrong)
        new = step(text, nodes)
        assert len(new) >= depth + 1
        text += new
        accepted.append(len(new) - 1)
    assert text == plain[: len(text)]
    assert len(set(accepted)) > 4


def test_requests_of_a_large_batch_are_drawn_alone():
    # More rows than one slab holds, each request with options of its own.
    torch.manual_seed(5)
    requests, vocabulary = 1200, 1100
    assert requests * vocabulary > chunks._SLAB["cpu"]
    logits = torch.randn(requests, vocabulary) * 3
    seeds, positions = torch.arange(requests) - 7, torch.arange(requests) * 3
    options = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(requests // 4),
        "top_k": torch.tensor([0, 5, 1000]).repeat(requests // 3),
        "top_p": torch.tensor([1.0, 0.5, 0.9, 0.99, 1.0]).repeat(requests // 5),
        "min_p": torch.tensor([0.0, 0.01]).repeat(requests // 2),
    }
    together = verify_sampled(
        logits, *ragged([[]] * requests), seeds=seeds, positions=positions, **options
    ).tolist()
    for i in range(0, requests, 37):
        alone = verify_sampled(
            logits[i : i + 1],
            *ragged([[]]),
            seeds=seeds[i : i + 1],
            positions=positions[i : i + 1],
            **{name: option[i].item() for name, option in options.items()},
        )
        assert alone.tolist() == [together[i]]


def test_operands_are_left_alone():
    logits = torch.randn(3, 2048, requires_grad=True)
    before = logits.detach().clone()
    verified = sampled(logits, [[4, 5]], [1], [2], temperature=0.5, top_k=5, top_p=0.5, min_p=0.1)
    assert torch.equal(logits, before)
    assert not verified.token_ids.requires_grad
    with pytest.raises(AttributeError):
        verified.status = verified.lengths


def test_max_draft_and_parents():
    logits = torch.zeros(5, 4)
    ids, offsets = ragged([[0, 0], [3]])
    parents = torch.tensor([-1, 0, -1], dtype=torch.int32)
    verified = verify_greedy(logits, ids, offsets, parents=parents, max_draft=5)
    assert isinstance(verified, Verified)
    assert verified.token_ids.tolist() == [[0, 0, 0, -1, -1, -1], [0, -1, -1, -1, -1, -1]]
    assert verified.lengths.tolist() == [3, 1]


def device(shape, dtype=torch.float32):
    """A meta tensor has a shape and no values: whatever reads one raises."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(batch, sampling=None):
    """Stands for kernels that read nothing back, with results of the right shapes."""
    drawn_by = () if sampling is None else (*sampling.warpers, *sampling[1:])
    given = [*batch, *drawn_by]
    assert all(each.is_meta for each in given if isinstance(each, torch.Tensor))
    ids = device((batch.requests, batch.max_draft + 1), torch.int32)
    path = None if batch.parents is None else ids[:, 1:]
    return Verified(ids, ids[:, 0], ids[:, 0], path, None, None)


def test_no_value_on_a_device_is_read_back(monkeypatch):
    for module in (greedy, sampled_kernel):
        monkeypatch.setattr(module, "verify", launch)
    batch = (device((9, 5000)), device(6, torch.int32), device(4, torch.int32))
    verified = verify_sampled(
        *batch,
        temperature=device(3),
        top_k=device(3, torch.int64),
        top_p=device(3),
        min_p=0.1,
        seeds=device(3, torch.int64),
        positions=torch.zeros(3, dtype=torch.int64),
        max_draft=4,
    )
    assert verified.token_ids.shape == (3, 5)
    assert verified.path.shape == (3, 4)
    parents = device(6, torch.int32)
    verified = verify_sampled(
        *batch,
        parents=parents,
        temperature=0.5,
        seeds=device(3, torch.int64),
        positions=device(3, torch.int64),
        max_draft=4,
    )
    assert verified.token_ids.shape == (3, 5)
    assert compaction_indices(verified.path).shape == (3, 5)
    assert tree_attention_mask(parents, batch[2], max_draft=4).shape == (3, 5, 5)
    assert verify_greedy(*batch).token_ids.shape == (3, 7)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_no_parent_is_read_out_of_bounds(data, sizes):
    # As on a device, where values are not checked.
    anything = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 8))
    parents, ids = (
        torch.tensor([data.draw(values) for _ in range(sum(sizes))], dtype=torch.int64)
        for values in (anything, st.integers(-1, 2))
    )
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    max_draft = data.draw(st.integers(0, 7))
    logits = torch.tensor([data.draw(st.integers(0, 1)) for _ in range(sum(sizes) + len(sizes))])
    logits = torch.nn.functional.one_hot(logits, 2).float()
    emitted = greedy.plain(Batch(logits, ids, offsets, max_draft, parents))
    token_ids, lengths, status, path, *_ = emitted
    check_padding(emitted)
    assert (token_ids < 2).all()
    assert (lengths >= 1).all()
    assert not status.any()
    accepted = (path >= 0).sum(1)
    assert torch.equal(accepted, lengths - 1)
    assert (path < torch.tensor(sizes)[:, None]).all()
    depths = trees.depths(parents, offsets, max_draft=max_draft)
    assert ((depths >= 0) & (depths <= torch.arange(max_draft + 1))).all()


# Errors.

GOOD = {
    "logits": torch.zeros(4, 8),
    "draft_ids": torch.tensor([1, 2]),
    "offsets": torch.tensor([0, 2, 2]),
    "seeds": torch.tensor([1, 2]),
    "positions": torch.tensor([0, 0]),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": [[0.0]]}, "logits must be a torch.Tensor, got list"),
        ({"logits": torch.zeros(4, 8).int()}, "logits must hold one of .*, got torch.int32"),
        ({"logits": torch.zeros(4)}, r"logits must have 2 dimensions, got shape \(4,\)"),
        ({"logits": torch.zeros(4, 0)}, "vocabulary of at least 1 token, got 0"),
        (
            {"logits": torch.zeros(5, 8)},
            r"logits must have 4 rows \(2 draft tokens \+ 2 requests\), got 5",
        ),
        ({"draft_ids": torch.tensor([1.0, 2.0])}, "draft_ids must hold .*, got torch.float32"),
        (
            {"draft_ids": torch.tensor([[1, 2]])},
            r"draft_ids must have 1 dimensions, got .*\(1, 2\)",
        ),
        ({"offsets": torch.tensor([0])}, "offsets must have .* at least 2, got 1"),
        ({"offsets": torch.tensor([1, 2, 2])}, "offsets must start with 0, got 1"),
        (
            {"offsets": torch.tensor([0, 3, 2])},
            "offsets must not decrease, got 3 before 2 at request 1",
        ),
        ({"offsets": torch.tensor([0, 1, 1])}, "end with the number of draft tokens, 2, got 1"),
        ({"max_draft": -1}, "max_draft must be at least 0, got -1"),
        ({"max_draft": 1}, "at least the longest draft's 2 tokens, got 1"),
        ({"parents": torch.tensor([-1])}, "each of the 2 draft tokens, got 1"),
        ({"parents": torch.tensor([-1.0, 0.0])}, "parents must hold .*, got torch.float32"),
        (
            {"parents": torch.tensor([-1, 1])},
            "before their children, from -1 to 0 for draft token 1 of request 0, got 1",
        ),
        (
            {"parents": torch.tensor([-2, 0])},
            "from -1 to -1 for draft token 0 of request 0, got -2",
        ),
        (
            {"parents": torch.tensor([-1, -1]), "draft_ids": torch.tensor([2, 2])},
            "one parent must have different tokens, got 2 twice for parent -1 in request 0",
        ),
        ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or from .*, got -1.0"),
        ({"temperature": NAN}, "temperature must be .*, got nan"),
        ({"temperature": INF}, "temperature must be .*, got inf"),
        ({"temperature": 1e-50}, "temperature must be .*, got 1e-50"),
        ({"temperature": "hot"}, "temperature must be a number or a tensor, got 'hot'"),
        ({"temperature": True}, "temperature must be a number or a tensor, got True"),
        (
            {"temperature": torch.tensor([0.5, -2.0])},
            "temperature must be .*, got -2.0 for request 1",
        ),
        (
            {"temperature": torch.ones(3)},
            r"temperature must have one entry for each of the 2 requests, got shape \(3,\)",
        ),
        ({"temperature": torch.tensor([True, True])}, "must hold numbers, got torch.bool"),
        ({"top_k": -1}, r"top_k must be from 0 \(all tokens\) to 2\*\*31 - 1, got -1"),
        ({"top_k": 2**70}, f"top_k must be .*, got {2**70}"),
        ({"top_k": 2.0}, "top_k must be an integer or a tensor, got 2.0"),
        ({"top_k": torch.ones(2)}, "top_k must hold integers, got torch.float32"),
        ({"top_k": torch.tensor([-3, 1])}, "top_k must be .*, got -3 for request 0"),
        ({"top_p": 1.5}, r"top_p must be from 0 to 1 \(all tokens\), got 1.5"),
        ({"top_p": torch.tensor([0.5, NAN])}, "top_p must be .*, got nan for request 1"),
        ({"min_p": -0.1}, r"min_p must be from 0 \(all tokens\) to 1, got -0.1"),
        ({"seeds": 5}, "seeds must be a torch.Tensor, got int"),
        ({"seeds": torch.tensor([1])}, r"seeds must have .* 2 requests, got shape \(1,\)"),
        ({"seeds": torch.tensor([1.0, 2.0])}, "seeds must hold .*, got torch.float32"),
        ({"positions": torch.tensor([3, -4])}, "positions must be at least 0, got -4"),
    ],
)
def test_errors_name_the_value(change, message):
    given = {**GOOD, **change}
    batch = [given.pop(name) for name in ("logits", "draft_ids", "offsets")]
    with pytest.raises(InvalidValueError, match=message):
        verify_sampled(*batch, **given)
    shared = {name: given[name] for name in ("parents", "max_draft") if name in change}
    if shared or any(name in ("logits", "draft_ids", "offsets") for name in change):
        with pytest.raises(InvalidValueError, match=message):
            verify_greedy(*batch, **shared)
