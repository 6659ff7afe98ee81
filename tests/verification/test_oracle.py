"""Every verification operation against oracles with plain numbers, on plain and odd logits."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import pytest
import torch
from cases import case_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import _core
from fastdraft.errors import InvalidValueError
from fastdraft.kernels import greedy, noise, operands, rejection, sampled, trees
from fastdraft.kernels.operands import Batch, Sampling, Warpers
from fastdraft.verification import (
    Status,
    compaction_indices,
    tree_attention_mask,
    tree_depths,
    verify_greedy,
    verify_sampled,
)
from oracles import verification as oracle

INF, NAN = math.inf, math.nan
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def ragged(drafts):
    """Draft ids and offsets of a list of drafts."""
    flat = [token for draft in drafts for token in draft]
    offsets = [0, *accumulate(map(len, drafts))]
    return torch.tensor(flat, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32)


def check_padding(verified):
    columns = torch.arange(verified.token_ids.shape[1])
    padding = columns >= verified.lengths[:, None]
    assert (verified.token_ids[padding] == -1).all()
    assert (verified.token_ids[~padding] >= 0).all()
    assert verified.token_ids.dtype == verified.lengths.dtype == torch.int32
    assert verified.status.dtype == verified.path.dtype == torch.int32


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
    assert oracle.philox(counter, key) == words


def test_exponential_keeps_both_tails():
    words = torch.tensor([0, 1, 2**32 - 1])

    def exponential(high, low):
        return noise.exponential(noise.uniform(high, low))

    smallest, _, _ = exponential(torch.zeros(3, dtype=torch.int64), words).tolist()
    assert smallest == pytest.approx(2.0**-65, rel=1e-12, abs=0)
    largest = exponential(torch.full((3,), 2**32 - 1), words)
    assert largest.isfinite().all()
    assert float(largest[2]) == pytest.approx(53 * math.log(2), rel=1e-12)
    half = exponential(torch.tensor([2**31]), torch.tensor([0]))
    assert float(half) == pytest.approx(math.log(2), rel=1e-12)


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**63 - 1),
    index=st.integers(0, 2**31 - 1),
    stream=st.integers(0, 4),
)
def test_noise_is_the_documented_one(seed, position, index, stream):
    found = noise.exponential_noise(
        torch.tensor([seed]), torch.tensor([position]), torch.tensor([index]), stream=stream
    )
    assert float(found) == pytest.approx(oracle.noise(seed, position, stream, index), rel=1e-12)


@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
    position=st.integers(0, 2**63 - 1),
    first=st.integers(0, 2**32 - 1),
    n=st.integers(0, 40),
    stream=st.integers(0, 4),
    own_indices=st.booleans(),
    own_streams=st.booleans(),
)
def test_the_core_draws_the_same_bits(seeds, position, first, n, stream, own_indices, own_streams):
    rows = len(seeds)
    seeds, positions = torch.tensor(seeds), position - torch.arange(rows).clamp(max=position)
    indices = (first + 977 * torch.arange(n)) % 2**32
    if own_indices:
        indices = (indices + torch.arange(rows)[:, None]) % 2**32
    streams = (stream + torch.arange(rows)) % 5 if own_streams else torch.tensor([stream])
    found = _core.uniform_noise(*(each.numpy() for each in (seeds, positions, indices, streams)))
    expected = noise.uniform_noise(seeds, positions, indices, streams)
    assert torch.equal(torch.from_numpy(found), expected.expand(rows, n))


def test_noise_of_other_shapes_is_refused():
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    for arrays in [
        (one, two, one, one),
        (two, two, one, np.zeros(3)),
        (two, two, one[None], one),
    ]:
        with pytest.raises(InvalidValueError, match="same rows"):
            _core.uniform_noise(*arrays)


# Ragged batches.

LATTICE = [x / 4 for x in range(-12, 13)]
ODD_LOGITS = st.sampled_from([*LATTICE, 0.0, -0.0, -INF, -INF, INF, NAN, 1e4, -1e4])
# Shares and fractions that no sum of lattice weights meets to the last bit. Temperatures in
# float32, as verification takes them.
OPTIONS = {
    "temperature": [float(np.float32(t)) for t in (0.0, 0.25, 1.0, 1.5, 1e-30, 1e30)],
    "top_k": [0, 1, 2, 3, 8, 50],
    "top_p": [0.0, 0.1171875, 0.5703125, 0.9453125, 1.0],
    "min_p": [0.0, 0.0703125, 0.3203125, 1.0],
}


def rows_of(data, values, count, vocabulary):
    row = st.lists(values, min_size=vocabulary, max_size=vocabulary)
    return data.draw(st.lists(row, min_size=count, max_size=count))


def each_of(data, requests, values):
    return data.draw(st.lists(values, min_size=requests, max_size=requests))


def options_of(data, requests):
    """Options, seeds and positions of the requests, in lists."""
    options = {
        name: each_of(data, requests, st.sampled_from(values)) for name, values in OPTIONS.items()
    }
    seeds = each_of(data, requests, st.integers(-(2**63), 2**63 - 1))
    return options, seeds, each_of(data, requests, st.integers(0, 2**62))


def planted(data, rows, choose, *, is_tree):
    """A draft that the target follows now and then, some ids out of range: tokens and parents."""
    vocabulary, depths = len(rows[0]), {-1: 0}
    ids, parents = [], []
    for node in range(len(rows) - 1):
        parent = data.draw(st.integers(-1, node - 1)) if is_tree else node - 1
        taken = {token for token, other in zip(ids, parents, strict=True) if other == parent}
        token = choose(rows[parent + 1], depths[parent])
        if token in taken or data.draw(st.booleans()):
            others = [i for i in range(-2, vocabulary + 2) if i not in taken]
            token = data.draw(st.sampled_from(others))
        ids.append(token)
        parents.append(parent)
        depths[node] = depths[parent] + 1
    return ids, parents


def check(verified, rows, chooses, drafts, parents):
    check_padding(verified)
    expected = [oracle.walk(*each) for each in zip(rows, chooses, drafts, parents, strict=True)]
    assert verified.tolist() == [emitted for emitted, _, _ in expected]
    assert verified.status.tolist() == [status for _, _, status in expected]
    longest = verified.token_ids.shape[1] - 1
    paths = [[*path, *[-1] * (longest - len(path))] for _, path, _ in expected]
    assert verified.path.tolist() == paths
    kept = compaction_indices(verified.path).tolist()
    for slots, (_, path, _) in zip(kept, expected, strict=True):
        assert slots == [0, *[node + 1 for node in path], *range(len(path) + 1, longest + 1)]


lengths_of_drafts = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    lengths=lengths_of_drafts,
    vocabulary=st.integers(2, 9),
    dtype=st.sampled_from(DTYPES),
    is_tree=st.booleans(),
    max_draft=st.sampled_from([None, 9]),
    data=st.data(),
)
def test_greedy_is_the_oracle(lengths, vocabulary, dtype, is_tree, max_draft, data):
    rows = [rows_of(data, ODD_LOGITS, n + 1, vocabulary) for n in lengths]
    chooses = [lambda row, _: oracle.argmax(row)] * len(rows)
    made = [planted(data, each, chooses[0], is_tree=is_tree) for each in rows]
    drafts, parents = zip(*made, strict=True)
    batch = torch.tensor([row for each in rows for row in each], dtype=dtype), *ragged(drafts)
    options = {"max_draft": max_draft, "parents": ragged(parents)[0] if is_tree else None}
    verified = verify_greedy(*batch, **options)
    check(verified, rows, chooses, drafts, parents)
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    cold = verify_sampled(*batch, temperature=0, seeds=nothing, positions=nothing, **options)
    for name in ("token_ids", "lengths", "status", "path"):
        assert torch.equal(getattr(cold, name), getattr(verified, name))


@settings(max_examples=300, deadline=None)
@given(
    lengths=lengths_of_drafts,
    vocabulary=st.integers(2, 9),
    chunk=st.sampled_from([2, 3, 1024]),
    is_tree=st.booleans(),
    data=st.data(),
)
def test_sampled_is_the_oracle(lengths, vocabulary, chunk, is_tree, data):
    rows = [rows_of(data, ODD_LOGITS, n + 1, vocabulary) for n in lengths]
    options, seeds, positions = options_of(data, len(rows))

    def chooser(b):
        own = [values[b] for values in options.values()]
        return lambda row, depth: oracle.draw(row, seeds[b], positions[b] + depth, *own)

    chooses = [chooser(b) for b in range(len(rows))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "CHUNK", chunk)
        made = [
            planted(data, each, choose, is_tree=is_tree)
            for each, choose in zip(rows, chooses, strict=True)
        ]
        drafts, parents = zip(*made, strict=True)
        verified = verify_sampled(
            torch.tensor([row for each in rows for row in each], dtype=torch.float64),
            *ragged(drafts),
            parents=ragged(parents)[0].long() if is_tree else None,
            seeds=torch.tensor(seeds),
            positions=torch.tensor(positions),
            **{name: torch.tensor(values) for name, values in options.items()},
        )
        check(verified, rows, chooses, drafts, parents)


@settings(max_examples=250, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    vocabulary=st.integers(2, 9),
    chunk=st.sampled_from([2, 3, 1024]),
    odd=st.booleans(),
    data=st.data(),
)
def test_rejection_is_the_oracle(lengths, vocabulary, chunk, odd, data):
    of_logits = ODD_LOGITS if odd else st.sampled_from(LATTICE)
    logits = [rows_of(data, of_logits, n + 1, vocabulary) for n in lengths]
    draft_logits = [rows_of(data, of_logits, n, vocabulary) for n in lengths]
    ids = st.integers(-2 * odd, vocabulary - 1 + 2 * odd)
    drafts = [each_of(data, n, ids) for n in lengths]
    options, seeds, positions = options_of(data, len(lengths))
    flat = [row for request in draft_logits for row in request]
    draft_ids, offsets = ragged(drafts)
    warpers = {name: torch.tensor(values) for name, values in options.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "CHUNK", chunk)
        # Not through the checked entry, which refuses the odd distributions: on a device they come
        # through.
        emitted = rejection.plain(
            Batch(
                torch.tensor([row for request in logits for row in request], dtype=torch.float64),
                draft_ids,
                offsets.long(),
                max(lengths),
            ),
            Sampling(Warpers(**warpers), torch.tensor(seeds), torch.tensor(positions)),
            torch.tensor(flat, dtype=torch.float64).reshape(-1, vocabulary),
        )
        expected = [
            oracle.reject(
                logits[b],
                drafts[b],
                [oracle.softmax(row) for row in draft_logits[b]],
                seeds[b],
                positions[b],
                [values[b] for values in options.values()],
            )
            for b in range(len(lengths))
        ]
    check_padding(emitted)
    assert emitted.tolist() == [tokens for tokens, _ in expected]
    assert emitted.status.tolist() == [status for _, status in expected]


@pytest.mark.parametrize(
    ("operation", "top_p"),
    [("sampled", None), ("filters", None), ("rejection", None), ("rejection", [0.945, 1.0, 0.57])],
)
def test_ordinary_drafts_are_the_oracles(operation, top_p, monkeypatch):
    """Trees, and drafts that were drawn: the target leaves them at every depth."""
    monkeypatch.setattr(operands, "CHUNK", 4)
    lengths = [0, 1, 2, 3, 5, 9] * 30
    options = {"likeness": 0.7, "shape": {}} if operation == "rejection" else {"tree": True}
    case = case_of(operation, lengths, 6, torch.float64, seed=4, odd=False, **options)
    case = case.warped(temperature=[0.75, 1.0, 1.5], **({"top_p": top_p} if top_p else {}))
    verified = case.verify()
    assert {1, 2, 3, 4} <= set(verified.lengths.tolist())
    for request, emitted in enumerate(verified.tolist()):
        _, batch, (drawn_by, *draft_logits) = case.alone(request)
        off = zip(drawn_by.warpers, (1.0, 0, 1.0, 0.0), strict=True)
        by = [other if each is None else each.item() for each, other in off]
        seed, position = int(drawn_by.seeds), int(drawn_by.positions)
        rows, draft = batch.logits.tolist(), batch.draft_ids.tolist()
        if draft_logits:
            distributions = [oracle.softmax(row) for row in draft_logits[0].tolist()]
            expected, _ = oracle.reject(rows, draft, distributions, seed, position, by)
        else:

            def choose(row, depth, seed=seed, position=position, by=by):
                return oracle.draw(row, seed, position + depth, *by)

            expected, *_ = oracle.walk(rows, choose, draft, batch.parents.tolist())
        assert emitted == expected


# Vocabularies of all sizes, a token from each row.

VOCABULARIES = [2, 3, 1000, 1023, 1024, 1025, 2047, 2048, 4099, 49152, 50257]


@pytest.mark.parametrize("vocabulary", [*VOCABULARIES, 151936, 300000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_is_argmax_for_any_vocabulary(vocabulary, dtype):
    torch.manual_seed(vocabulary)
    rows = 3
    # Few distinct values, so that nearly every maximum is a tie.
    logits = torch.randint(-8, 9, (rows, vocabulary)).to(dtype) / 4
    logits[1, vocabulary // 2] = NAN
    logits[1, -1] = NAN
    logits[2, vocabulary - 1] = INF
    verified = verify_greedy(logits, *ragged([[]] * rows))
    assert verified.token_ids[:, 0].tolist() == logits.argmax(-1).tolist()
    assert verified.status.tolist() == [0, Status.NAN, 0]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
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
def test_draw_is_the_oracle_for_any_vocabulary(vocabulary, options):
    torch.manual_seed(vocabulary)
    # Two of the types, another pair for the next options.
    for dtype in DTYPES[len(options) % 2 :: 2]:
        logits = (torch.randn(2, vocabulary) * 3).to(dtype)
        seeds, positions = [7, -(2**40)], [3, 2**33 + 1]
        drawn_by = {"seeds": torch.tensor(seeds), "positions": torch.tensor(positions)}
        verified = verify_sampled(logits, *ragged([[], []]), **drawn_by, **options)
        exact = {**options, "temperature": float(np.float32(options.get("temperature", 1.0)))}
        rows = zip(logits.double().tolist(), seeds, positions, strict=True)
        assert verified.tolist() == [[oracle.draw(*each, **exact)] for each in rows]


# Odd rows in the middle of a draft.

EMPTY_ROW = [-INF] * 4
NAN_ROW = [0.0, NAN, 9.0, NAN]


def peak(token):
    return [0.0 if each == token else -INF for each in range(4)]


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
    drawn_by = {"seeds": torch.tensor([5, 6]), "positions": torch.tensor([0, 0])}
    for dtype in DTYPES:
        # As a chain, and as a tree with another guess for the first token, which never matches.
        for more in ([], [4]):
            logits = torch.tensor([*rows, *[peak(0) for _ in more], peak(2)], dtype=dtype)
            parents = torch.tensor([*range(-1, len(draft) - 1), *[-1 for _ in more]])
            batch = logits, *ragged([[*draft, *more], []])
            verified = verify_sampled(
                *batch, temperature=temperature, parents=parents if more else None, **drawn_by
            )
            assert verified.tolist() == [emitted, [2]]
            assert verified.status.tolist() == [status, 0]
            check_padding(verified)


@pytest.mark.parametrize("temperature", [0.0, 2e-38, 1.0, 3e38])
def test_ids_are_in_range_whatever_the_logits_hold(temperature):
    values = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e38, -1e38, 3e38, -3e38, 1e-45, 1.0])
    generator = torch.Generator().manual_seed(0)
    mixed = values[torch.randint(len(values), (60, 1100), generator=generator)]
    rows = torch.cat([mixed, values[:, None].expand(-1, 1100)])
    many = torch.ones(len(rows), dtype=torch.int64)
    options = {"temperature": temperature, "top_k": 20, "top_p": 0.9, "min_p": 0.1}
    for dtype in DTYPES:
        verified = verify_sampled(
            rows.to(dtype), *ragged([[]] * len(rows)), seeds=many, positions=many, **options
        )
        assert ((verified.token_ids >= -1) & (verified.token_ids < 1100)).all()
        check_padding(verified)


def test_draft_ids_out_of_range_never_match():
    logits = torch.zeros(3, 4)
    logits[:, 1] = 9.0
    for token in (-1, 4, -(2**31), 2**31 - 1, 2**32 + 1, -(2**32) + 1):
        verified = verify_greedy(logits, torch.tensor([token, 1]), torch.tensor([0, 2]))
        assert verified.tolist() == [[1]]
    empty = torch.full((2, 4), -INF)
    assert verify_greedy(empty, torch.tensor([-1]), torch.tensor([0, 1])).tolist() == [[]]


# The likeliest tokens.

# Small numbers tie; what models should not give is rare, so that some rows hold none of it.
few_logits = st.sampled_from([*[-2.0, -0.0, 0.0, 1.0, 3.0] * 4, -INF, -INF, NAN])


@settings(deadline=None)
@given(
    st.data(),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.booleans(),
    st.sampled_from([2, 3, 1024]),
)
def test_the_likeliest_tokens_are_the_oracles(data, vocabulary, count, most, heat, masked, chunk):
    logits = rows_of(data, few_logits, count, vocabulary)
    x, allowed = torch.tensor(logits), None
    if masked:
        bits = data.draw(st.integers(0, 2**vocabulary - 1))
        allowed = torch.full((count, 1), bits, dtype=torch.int32)
        logits = [[v if bits >> t & 1 else -INF for t, v in enumerate(row)] for row in logits]
    batch = x, torch.zeros(count - 1, dtype=torch.int64), torch.tensor([0, count - 1])
    zeros = torch.zeros(1, dtype=torch.int64)
    drawn_by = {"temperature": heat, "top_k": 1, "seeds": zeros, "positions": zeros}
    shared = {"allowed": allowed, "likeliest": most}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "CHUNK", chunk)
        found = verify_greedy(*batch, **shared), verify_sampled(*batch, **drawn_by, **shared)
    for verified, temperature in zip(found, (1.0, heat or 1.0), strict=True):
        token_ids, probabilities = verified.likeliest
        expected = [oracle.likeliest(row, temperature, most) for row in logits]
        assert token_ids.tolist() == [[token for token, _ in row] for row in expected]
        of_rows = torch.tensor([[probability for _, probability in row] for row in expected])
        torch.testing.assert_close(probabilities, of_rows)
    assert verify_greedy(*batch).likeliest is None


# The layout of trees.


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
            line = [slot - 1]  # the node and all that lead to it
            while slot <= size and line[-1] >= 0:
                line.append(of_request[line[-1]])
            assert int(depths[b, slot]) == len(line) - 1
            assert sees[b, slot].nonzero()[:, 0].tolist() == [node + 1 for node in reversed(line)]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_no_parent_is_read_out_of_bounds(data, sizes):
    # As on a device, where values are not checked.
    anything = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 8))
    parents, ids = (
        torch.tensor(each_of(data, sum(sizes), values), dtype=torch.int64)
        for values in (anything, st.integers(-1, 2))
    )
    offsets = torch.tensor([0, *accumulate(sizes)])
    max_draft = data.draw(st.integers(0, 7))
    chosen = torch.tensor(each_of(data, sum(sizes) + len(sizes), st.integers(0, 1)))
    logits = torch.nn.functional.one_hot(chosen, 2).float()
    nothing = torch.zeros(len(sizes), dtype=torch.int64)
    batch = Batch(logits, ids, offsets, max_draft, parents)
    drawn_by = Sampling(Warpers(torch.full((len(sizes),), 1e-6)), nothing, nothing)
    for emitted in (greedy.plain(batch), sampled.plain(batch, drawn_by)):
        check_padding(emitted)
        assert (emitted.token_ids < 2).all()
        assert (emitted.lengths >= 1).all()
        assert not emitted.status.any()
        assert torch.equal((emitted.path >= 0).sum(1), emitted.lengths - 1)
        assert (emitted.path < torch.tensor(sizes)[:, None]).all()
    depths = trees.depths(parents, offsets, max_draft=max_draft)
    assert ((depths >= 0) & (depths <= torch.arange(max_draft + 1))).all()
