"""Rejection sampling token by token: held against an obvious oracle, on ordinary and odd
distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verification import (
    INF,
    NAN,
    argmax_oracle,
    check_padding,
    draw_oracle,
    is_empty,
    noise_oracle,
    ragged,
    weights_oracle,
)

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import operands, rejection
from fastdraft.kernels.operands import DraftDistribution, Sampling, Warpers
from fastdraft.verification import (
    Status,
    verify_greedy,
    verify_rejection,
    verify_sampled,
)
from oracles.rejection import keep_chances
from rejection_cases import drawn

ACCEPT, RESIDUAL_TOKEN, RESIDUAL_CHUNK = 2, 3, 4


def softmax_oracle(row):
    """The distribution of a row of draft logits; NaN throughout where it has none."""
    top = max(row)
    if any(math.isnan(x) for x in row) or not math.isfinite(top):
        return [NAN] * len(row)
    weights = [math.exp(x - top) for x in row]
    return [weight / sum(weights) for weight in weights]


def race_oracle(weights, seed, position, chunk_stream, token_stream):
    width = operands.CHUNK
    chunks = [weights[start : start + width] for start in range(0, len(weights), width)]
    race = [
        sum(chunk) / noise_oracle(seed, position, chunk_stream, c) for c, chunk in enumerate(chunks)
    ]
    best = race.index(max(race))
    race = [
        weight / noise_oracle(seed, position, token_stream, best * width + t)
        for t, weight in enumerate(chunks[best])
    ]
    return best * width + race.index(max(race))


def rejection_oracle(rows, draft, distributions, seed, position, options):
    """What a request emits, and its status: one row, one token at a time, with plain numbers."""

    def has_softmax(row):
        return not is_empty(row) and all(x == x and x != INF for x in row)

    def drawn(j):
        row, q = rows[j], distributions[j]
        return has_softmax(row) and 0 <= draft[j] < len(row) and q[draft[j]] > 0

    residual = None
    if options[0] == 0:
        matches = [
            not is_empty(rows[j]) and argmax_oracle(rows[j]) == draft[j] for j in range(len(draft))
        ]
        last = [*matches, False].index(False)
    else:
        end = [*map(drawn, range(len(draft))), False].index(False)
        weights = [weights_oracle(row, *options) for row in rows[:end]]
        p = [[weight / sum(row) for weight in row] for row in weights]
        # After the end any distribution does: all of it is left.
        p.append([1.0] + [0.0] * (len(rows[0]) - 1))
        _, chances, residuals = keep_chances(p, distributions, draft[:end])
        last = max(
            j
            for j, chance in enumerate(chances)
            if j == 0
            or (chance > 0 and noise_oracle(seed, position, ACCEPT, j) > -math.log(chance))
        )
        if last < end:
            residual = residuals[last] if max(residuals[last]) > 0 else p[last]
    status = Status.NAN * any(math.isnan(x) for row in rows[: last + 1] for x in row)
    if is_empty(rows[last]):
        return draft[:last], status | Status.EMPTY
    if residual is None:
        return [*draft[:last], draw_oracle(rows[last], seed, position + last, *options)], status
    token = race_oracle(residual, seed, position + last, RESIDUAL_CHUNK, RESIDUAL_TOKEN)
    return [*draft[:last], token], status


LATTICE = [x / 4 for x in range(-12, 13)]
ODD_LOGITS = st.sampled_from([*LATTICE, 0.0, -0.0, -INF, -INF, INF, NAN, 1e4, -1e4])
ODD_PROBABILITIES = st.sampled_from([0.0, 0.0, 0.01, 0.07, 0.11, 0.19, 0.31, 0.67, 1.0, NAN])


@settings(max_examples=400, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    vocabulary=st.integers(2, 9),
    chunk=st.sampled_from([2, 3, 1024]),
    as_logits=st.booleans(),
    odd=st.booleans(),
    data=st.data(),
)
def test_rejection_is_the_oracle(lengths, vocabulary, chunk, as_logits, odd, data):
    def rows(count, values):
        row = st.lists(values, min_size=vocabulary, max_size=vocabulary)
        return data.draw(st.lists(row, min_size=count, max_size=count))

    def each(values):
        return data.draw(st.lists(values, min_size=len(lengths), max_size=len(lengths)))

    of_logits = ODD_LOGITS if odd else st.sampled_from(LATTICE)
    of_drafts = of_logits if as_logits else ODD_PROBABILITIES
    logits = [rows(n + 1, of_logits) for n in lengths]
    given_distributions = [rows(n, of_drafts) for n in lengths]
    ids = st.integers(-2 * odd, vocabulary - 1 + 2 * odd)
    drafts = [data.draw(st.lists(ids, min_size=n, max_size=n)) for n in lengths]
    # Shares and fractions that no sum of lattice weights meets to the last bit.
    options = {
        "temperature": each(st.sampled_from([0.0, 0.25, 1.0, 1.5, 1e-30, 1e30])),
        "top_k": each(st.sampled_from([0, 1, 2, 3, 8, 50])),
        "top_p": each(st.sampled_from([0.0, 0.1171875, 0.5703125, 0.9453125, 1.0])),
        "min_p": each(st.sampled_from([0.0, 0.0703125, 0.3203125, 1.0])),
    }
    options["temperature"] = [float(np.float32(t)) for t in options["temperature"]]
    seeds = each(st.integers(-(2**63), 2**63 - 1))
    positions = each(st.integers(0, 2**62))
    flat = [row for request in given_distributions for row in request]
    distribution = torch.tensor(flat, dtype=torch.float64).reshape(-1, vocabulary)
    draft_ids, offsets = ragged(drafts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "CHUNK", chunk)
        # Not through the checked entry, which refuses the odd distributions: on a device they come
        # through.
        emitted = rejection.plain(
            operands.Batch(
                torch.tensor([row for request in logits for row in request], dtype=torch.float64),
                draft_ids,
                offsets.long(),
                max(lengths),
            ),
            Sampling(
                Warpers(
                    torch.tensor(options["temperature"], dtype=torch.float32),
                    *(torch.tensor(options[name]) for name in ("top_k", "top_p", "min_p")),
                ),
                torch.tensor(seeds),
                torch.tensor(positions),
            ),
            DraftDistribution(distribution, is_logits=as_logits),
        )
        expected = [
            rejection_oracle(
                logits[b],
                drafts[b],
                [softmax_oracle(row) for row in given_distributions[b]]
                if as_logits
                else given_distributions[b],
                seeds[b],
                positions[b],
                [values[b] for values in options.values()],
            )
            for b in range(len(lengths))
        ]
    check_padding(emitted)
    found = [
        ids[:n] for ids, n in zip(emitted.token_ids.tolist(), emitted.lengths.tolist(), strict=True)
    ]
    assert found == [tokens for tokens, _ in expected]
    assert emitted.status.tolist() == [status for _, status in expected]


# Batches of several hundred requests, drawn as a draft model would draw them.

OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 20},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
}


class Batch:
    """Random requests with drafts drawn from their own distributions."""

    def __init__(self, lengths, vocabulary, *, dtype=torch.float32, likeness=0.7, seed=0, **shape):
        torch.manual_seed(seed)
        rows, drafted = sum(lengths) + len(lengths), sum(lengths)
        self.offsets = torch.tensor(np.cumsum([0, *lengths]))
        self.logits = (torch.randn(rows, vocabulary) * 2).to(dtype)
        self.seeds = torch.arange(len(lengths)) * 7 + 10**10
        self.positions = torch.arange(len(lengths)) + 5
        request = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        own = self.logits[torch.arange(drafted) + request].float()
        self.draft_logits = likeness * own + (1 - likeness) * torch.randn(drafted, vocabulary) * 2
        self.draft_ids, self.draft_probs = drawn(
            self.draft_logits,
            seeds=self.seeds[request],
            positions=self.positions[request] + torch.arange(drafted) - self.offsets[request],
            **shape,
        )

    def verify(self, **options):
        distributions = {"draft_probs": self.draft_probs} if "draft_logits" not in options else {}
        return verify_rejection(
            self.logits,
            self.draft_ids,
            self.offsets,
            **distributions,
            **{"seeds": self.seeds, "positions": self.positions, **options},
        )


LENGTHS = [0, 1, 2, 3, 4, 7, 16, 0, 5]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocabulary", [2, 50, 1500])
def test_a_bonus_token_is_the_sample_at_its_position(vocabulary, options):
    batch = Batch(LENGTHS * 10, vocabulary, likeness=0.95, **options)
    verified = batch.verify(**options)
    whole = (verified.lengths - 1 == batch.offsets.diff()).nonzero()[:, 0]
    assert 20 <= len(whole) < len(verified.lengths)
    last = verified.token_ids.gather(1, verified.lengths[:, None].long() - 1)[:, 0]
    bonus_rows = batch.offsets[1:] + torch.arange(len(verified.lengths))
    plain = verify_sampled(
        batch.logits[bonus_rows],
        torch.empty(0, dtype=torch.int64),
        torch.zeros(len(bonus_rows) + 1, dtype=torch.int64),
        seeds=batch.seeds,
        positions=batch.positions + batch.offsets.diff(),
        **options,
    )
    assert torch.equal(last[whole], plain.token_ids[whole, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["draft_probs", "draft_logits"])
def test_a_draft_of_the_targets_own_distribution_is_accepted_whole(form, dtype):
    lengths = [5] * 200
    batch = Batch(lengths, 300, dtype=dtype, likeness=1.0)
    options = {"draft_logits": batch.draft_logits} if form == "draft_logits" else {}
    assert (batch.verify(**options).lengths == 6).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_probabilities_and_logits_are_the_same_distribution(options):
    batch = Batch(LENGTHS * 20, 400, **options)
    by_logits = batch.verify(draft_logits=batch.draft_probs.log(), **options)
    assert torch.equal(batch.verify(**options).token_ids, by_logits.token_ids)
    assert by_logits.lengths.float().mean() > 1.5


def test_a_request_is_verified_alone():
    batch = Batch(LENGTHS, 1500)
    together = batch.verify(top_p=0.9).tolist()
    for b in range(len(LENGTHS)):
        first, end = batch.offsets[b : b + 2].tolist()
        alone = verify_rejection(
            batch.logits[first + b : end + b + 1],
            batch.draft_ids[first:end],
            torch.tensor([0, end - first]),
            draft_probs=batch.draft_probs[first:end],
            top_p=0.9,
            seeds=batch.seeds[b : b + 1],
            positions=batch.positions[b : b + 1],
            max_draft=20,
        )
        assert alone.tolist() == together[b : b + 1]
        assert alone.token_ids.shape == (1, 21)


def test_a_large_batch_is_verified_in_slabs():
    # More logits than one slab holds: all requests are the first, but for where they stand.
    batch = Batch([8], 4096, likeness=0.95)
    alone = batch.verify().tolist()
    assert len(alone[0]) > 2
    n = 60
    for name in ("logits", "draft_probs"):
        setattr(batch, name, getattr(batch, name).repeat(n, 1))
    for name in ("draft_ids", "seeds", "positions"):
        setattr(batch, name, getattr(batch, name).repeat(n))
    batch.offsets = torch.arange(n + 1) * 8
    assert batch.verify().tolist() == alone * n


def test_rows_may_have_any_stride():
    batch = Batch(LENGTHS, 700)
    expected = batch.verify().tolist()
    for name in ("logits", "draft_probs"):
        value = getattr(batch, name)
        wide = torch.full((2 * len(value), 3 * 700), -7.0)
        wide[::2, ::3] = value
        setattr(batch, name, wide[::2, ::3])
    before = batch.draft_probs.clone()
    assert batch.verify().tolist() == expected
    assert torch.equal(batch.draft_probs, before)


def test_temperature_0_is_greedy_whatever_the_draft_says():
    batch = Batch(LENGTHS * 5, 60, likeness=0.9)
    greedy = verify_greedy(batch.logits, batch.draft_ids, batch.offsets)
    assert (greedy.lengths > 2).any()
    assert batch.verify(temperature=0).tolist() == greedy.tolist()
    temperature = torch.tensor([0.0, 1.0, 0.5] * 15)
    mixed = batch.verify(temperature=temperature).tolist()
    assert mixed[::3] == greedy.tolist()[::3]
    assert mixed[1::3] == batch.verify(temperature=1.0).tolist()[1::3]
    assert mixed[2::3] == batch.verify(temperature=0.5).tolist()[2::3]


def many(logits, distribution, token, *, n=20_000, **options):
    """One draft token, the same for many seeds; logits (2, vocabulary), distribution
    (vocabulary,)."""
    return verify_rejection(
        torch.tensor(logits).repeat(n, 1),
        torch.full((n,), token),
        torch.arange(n + 1),
        draft_probs=torch.tensor([distribution]).expand(n, -1),
        seeds=torch.arange(n),
        positions=torch.zeros(n, dtype=torch.int64),
        **options,
    )


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ([1.0, -INF, 0.5], {}),
        ([1.0, -200.0, 0.5], {}),
        ([1.0, 0.0, 0.5], {"top_k": 2}),
        ([1.0, 0.0, 0.5], {"top_p": 0.7}),
        ([1.0, 0.0, 0.5], {"min_p": 0.5}),
        ([1.0, 0.99, 0.5], {"temperature": 0.0001}),
        ([1.0, 0.99, 0.5], {"temperature": torch.zeros(20_000)}),
        ([1.0, 3.0, 0.5], {"allowed": torch.tensor([[0b101], [0b111]]).int().repeat(20_000, 1)}),
    ],
)
@pytest.mark.parametrize("chance", [1e-30, 0.5, 1.0])
def test_what_the_target_never_says_is_never_accepted(row, options, chance):
    distribution = [(1 - chance) / 2, chance, (1 - chance) / 2]
    verified = many([row, row], distribution, 1, **options)
    assert (verified.lengths == 1).all()
    assert (verified.token_ids[:, 0] != 1).all()


def test_distributions_without_a_common_token():
    verified = many([[2.0, 1.0, -INF, -INF], [0.0] * 4], [0.0, 0.0, 0.75, 0.25], 2)
    assert (verified.lengths == 1).all()
    # Nothing of the draft's distribution is the target's, so the target's is left whole.
    share = float((verified.token_ids[:, 0] == 0).double().mean())
    assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=0.02)


def test_a_residual_of_nothing_gives_the_targets_distribution():
    # Twice the target's distribution: each token is refused half of the time, and p - q is nowhere
    # above 0.
    p = torch.tensor([0.5, 0.3, 0.2])
    verified = many(torch.stack([p.log()] * 2).tolist(), (2 * p).tolist(), 1)
    accepted = verified.lengths == 2
    assert float(accepted.double().mean()) == pytest.approx(0.5, abs=0.02)
    counts = np.bincount(verified.token_ids[~accepted, 0], minlength=3)
    assert counts / counts.sum() == pytest.approx(p.numpy(), abs=0.02)


@pytest.mark.parametrize("form", ["draft_probs", "draft_logits"])
@pytest.mark.parametrize("distribution", [[NAN, NAN, NAN], [0.1, NAN, 0.1]], ids=["all", "its own"])
def test_a_draft_token_without_a_distribution_leaves_the_targets_alone(form, distribution):
    n = 20_000
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]])
    emitted = rejection.plain(
        operands.Batch(
            logits.repeat(n, 1), torch.ones(n, dtype=torch.int64), torch.arange(n + 1), 1
        ),
        Sampling(Warpers(torch.ones(n)), torch.arange(n), torch.zeros(n, dtype=torch.int64)),
        DraftDistribution(
            torch.tensor([distribution]).expand(n, -1), is_logits=form == "draft_logits"
        ),
    )
    assert (emitted.lengths == 1).all()
    counts = np.bincount(emitted.token_ids[:, 0], minlength=3)
    assert counts / n == pytest.approx(logits[0].softmax(-1).numpy(), abs=0.02)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("rows", "draft", "emitted", "status"),
    [
        ([[0.0, NAN, 9.0], [0.0, 9.0, 0.0]], [0], [1], Status.NAN),
        ([[0.0, NAN, NAN], [-90.0, 90.0, -90.0]], [1], [1, 1], Status.NAN),
        ([[0.0, INF, INF], [-90.0, 90.0, -90.0]], [1], [1, 1], 0),
        ([[-INF] * 3, [0.0, 9.0, 0.0]], [0], [], Status.EMPTY),
        ([[-90.0, 90.0, -90.0], [-INF] * 3], [1], [1], Status.EMPTY),
        ([[-90.0, 90.0, -90.0], [NAN] * 3], [2], [1], 0),
    ],
)
def test_odd_rows(rows, draft, emitted, status, temperature):
    if temperature and any(math.isnan(x) or x == INF for x in rows[0]):
        emitted = emitted[:1]  # such a row has no distribution, and ends the draft
    verified = verify_rejection(
        torch.tensor(rows),
        torch.tensor(draft),
        torch.tensor([0, len(draft)]),
        draft_probs=torch.full((len(draft), 3), 1 / 3),
        temperature=torch.tensor([temperature]),
        seeds=torch.tensor([3]),
        positions=torch.tensor([4]),
    )
    assert verified.tolist() == [emitted]
    assert verified.status.tolist() == [status]
    accepted = len(emitted) - 1 + (status == Status.EMPTY)
    assert verified.path.tolist() == [[0] if accepted == 1 else [-1]]


# The options that all verbs share.


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_masked_tokens_are_no_tokens(options):
    vocabulary = 70
    batch = Batch(LENGTHS * 5, vocabulary, **options)
    torch.manual_seed(4)
    allowed = torch.randint(-(2**31), 2**31, (len(batch.logits), 3)).int()
    bits = np.unpackbits(allowed.numpy().view(np.uint8), axis=1, bitorder="little")
    bits = torch.from_numpy(bits[:, :vocabulary]).bool()
    masked = batch.verify(allowed=allowed, **options)
    batch.logits = batch.logits.where(bits, -INF)
    assert masked.tolist() == batch.verify(**options).tolist()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logprobs_are_those_of_the_targets_distribution(options):
    batch = Batch(LENGTHS * 5, 300, **options)
    temperature = torch.tensor([0.0, options.get("temperature", 1.0)] * 22 + [1.0])
    options = {**options, "temperature": temperature}
    verified = batch.verify(logprobs=True, raw_logprobs=True, **options)
    row = batch.offsets[:-1] + torch.arange(len(LENGTHS) * 5)
    for b, tokens in enumerate(verified.tolist()):
        for j in range(verified.token_ids.shape[1]):
            if j >= len(tokens):
                assert verified.logprobs[b, j].isnan()
                assert verified.raw_logprobs[b, j].isnan()
                continue
            logits = batch.logits[int(row[b]) + j].tolist()
            raw = weights_oracle(logits, 1.0, 0, 1.0, 0.0)
            distribution = raw
            if temperature[b] > 0:
                shape = [options.get("top_k", 0), options.get("top_p", 1), options.get("min_p", 0)]
                distribution = weights_oracle(logits, float(temperature[b]), *shape)
            for found, weights in ((verified.logprobs, distribution), (verified.raw_logprobs, raw)):
                expected = math.log(weights[tokens[j]] / sum(weights))
                assert float(found[b, j]) == pytest.approx(expected, abs=2e-6, rel=2e-6)
    plain = batch.verify(**options)
    assert torch.equal(plain.token_ids, verified.token_ids)
    assert plain.logprobs is None
    assert plain.raw_logprobs is None


def test_the_logprob_of_a_greedy_batch():
    batch = Batch(LENGTHS, 40)
    verified = batch.verify(temperature=0, logprobs=True, raw_logprobs=True)
    assert torch.equal(verified.logprobs.isnan(), verified.token_ids < 0)
    assert torch.equal(verified.logprobs.nan_to_num(), verified.raw_logprobs.nan_to_num())


# Bad input.


def arguments(**changes):
    """Two requests that drafted tokens 1 and 0, 3 of a vocabulary of 4."""
    return {
        "logits": torch.zeros(5, 4),
        "draft_ids": torch.tensor([1, 0, 3]),
        "offsets": torch.tensor([0, 1, 3]),
        "draft_probs": torch.full((3, 4), 0.25),
        "seeds": torch.tensor([0, 0]),
        "positions": torch.tensor([0, 0]),
        **changes,
    }


def distribution_with(value, token=3):
    distribution = torch.full((3, 4), 0.25)
    distribution[2, token] = value
    return distribution


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_probs": None}, "one of draft_probs and draft_logits must be given, got neither"),
        (
            {"draft_logits": torch.zeros(3, 4)},
            "one of draft_probs and draft_logits must be given, got both",
        ),
        ({"draft_probs": [[1.0]]}, "draft_probs must be a torch.Tensor, got list"),
        (
            {"draft_probs": torch.zeros(3, 4).long()},
            "draft_probs must hold one of .*, got torch.int64",
        ),
        (
            {"draft_probs": torch.zeros(12)},
            r"draft_probs must have 2 dimensions, got shape \(12,\)",
        ),
        (
            {"draft_probs": torch.zeros(5, 4)},
            r"draft_probs must have a row for each draft token .* \(3, 4\), got shape \(5, 4\)",
        ),
        (
            {"draft_probs": torch.zeros(3, 4, device="meta")},
            "draft_probs must be on the logits' device, cpu, got meta",
        ),
        (
            {"draft_probs": distribution_with(0.0)},
            r"draft_probs must be in \(0, 1\] for .* drawn, got 0.0 for token 3 in request 1",
        ),
        (
            {"draft_probs": distribution_with(1.5)},
            r"draft_probs must be in \(0, 1\] .* got 1.5 for token 3",
        ),
        (
            {"draft_probs": distribution_with(NAN)},
            r"draft_probs must be in \(0, 1\] .* got nan for token 3",
        ),
        (
            {"draft_probs": distribution_with(-0.5, 0)},
            r"draft_probs must be in \[0, 1\], got -0.5 in the row of draft token 1 of request 1",
        ),
        (
            {"draft_probs": distribution_with(1.25, 0)},
            r"draft_probs must be in \[0, 1\], got 1.25 in",
        ),
        (
            {"draft_probs": distribution_with(NAN, 0)},
            r"draft_probs must be in \[0, 1\], got nan in",
        ),
        (
            {"draft_probs": None, "draft_logits": distribution_with(-INF)},
            "draft_logits must be finite for the tokens drawn, got -inf for token 3 in request 1",
        ),
        (
            {"draft_ids": torch.tensor([1, 4, 3])},
            "draft_ids must be drawn from their distributions, from 0 to 3, got 4 in request 1",
        ),
        ({"temperature": -0.5}, "temperature must be .* got -0.5"),
        ({"top_p": 2.0}, "top_p must be .* got 2.0"),
        ({"positions": torch.tensor([0, -3])}, "positions must be at least 0, got -3"),
        ({"logprobs": 1}, "logprobs must be True or False, got 1"),
        ({"max_draft": 1}, "max_draft must be at least the longest draft's 2 tokens, got 1"),
    ],
)
def test_errors_name_the_value(changes, message):
    with pytest.raises(InvalidValueError, match=message):
        verify_rejection(**arguments(**changes))


def test_no_value_on_a_device_is_read_back():
    # The meta device has shapes and no values: whatever looks at one fails.
    def on_device(value):
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    for temperature in (1.0, torch.ones(2)):
        given_there = {name: on_device(value) for name, value in arguments().items()}
        verified = verify_rejection(**given_there, temperature=on_device(temperature), top_p=0.5)
        assert verified.token_ids.shape == (2, 4)
        assert verified.token_ids.device.type == "meta"
