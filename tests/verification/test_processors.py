"""Logits processors under speculation: held against plain decoding, token by token."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import reference
from fastdraft.kernels.operands import Batch
from fastdraft.verification import Processors, Status, verify_greedy, verify_sampled
from processor_cases import INF, Case, batch_of, processed, processors_of, random_case

NAN = float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def patched(cases, logits, *, chains=False, **options):
    """A copy of the logits, patched."""
    ids, offsets, parents = batch_of(cases)
    logits = logits.clone()
    longest = max(len(case.draft) for case in cases)
    batch = Batch(logits, ids, offsets, longest, parents=None if chains else parents)
    reference.patch(batch, processors_of(cases, **options))
    return logits


def random_logits(rng, cases, vocabulary, dtype):
    """Logits on a lattice coarse enough for bfloat16 to hold what becomes of them."""
    rows = sum(len(case.draft) + 1 for case in cases)
    values = [*(x / 2 for x in range(-8, 9)), 0.0, -0.0, INF, -INF, NAN]
    return torch.tensor(
        [[rng.choice(values) for _ in range(vocabulary)] for _ in range(rows)], dtype=dtype
    )


# The patch against the oracle.


@settings(max_examples=300, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    vocabulary=st.integers(2, 9),
    requests=st.integers(1, 5),
    tree=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    room=st.integers(0, 3),
)
def test_patch_is_the_oracle(rng, vocabulary, requests, tree, dtype, room):
    cases = [random_case(rng, vocabulary=vocabulary, tree=tree) for _ in range(requests)]
    logits = random_logits(rng, cases, vocabulary, dtype)
    expected = processed(cases, logits)
    assert torch.equal(
        patched(cases, logits, room=room).nan_to_num(nan=99.0), expected.nan_to_num(nan=99.0)
    )
    if not tree:
        chained = patched(cases, logits, chains=True)
        assert torch.equal(chained.nan_to_num(nan=99.0), expected.nan_to_num(nan=99.0))


def test_rows_are_patched_in_slabs(monkeypatch):
    rng = random.Random(1)
    cases = [random_case(rng, vocabulary=9, tree=True) for _ in range(20)]
    logits = random_logits(rng, cases, 9, torch.float32).nan_to_num(nan=9.0)
    whole = patched(cases, logits)
    monkeypatch.setattr("fastdraft.kernels.reference.processors._SLAB", 60)
    assert torch.equal(patched(cases, logits), whole)


def test_strided_logits_are_patched_where_they_are():
    rng = random.Random(2)
    cases = [random_case(rng, vocabulary=7) for _ in range(4)]
    logits = random_logits(rng, cases, 7, torch.float32).nan_to_num(nan=9.0)
    ids, offsets, _ = batch_of(cases)
    memory = torch.full((len(logits) * 2, 7 * 3), 5.0)
    strided = memory[::2, 1::3]
    strided.copy_(logits)
    verify_greedy(strided, ids, offsets, processors=processors_of(cases))
    assert torch.equal(strided, processed(cases, logits))
    strided.fill_(5.0)
    assert (memory == 5.0).all()


# Against those who do the same, row by row.


def long_cases(rng, count, **options):
    """Requests with texts longer than any banned sequence, and with ids in range."""
    cases = []
    for _ in range(count):
        case = random_case(rng, vocabulary=50, longest=5, out_of_range=False, **options)
        case.prompt = [rng.randrange(50) for _ in range(12)]
        cases.append(case)
    return cases


@pytest.mark.parametrize("tree", [False, True])
def test_patch_is_that_of_transformers(tree):
    rng = random.Random(3)
    torch.manual_seed(3)
    cases = long_cases(rng, 40, tree=tree)
    for case in cases:
        case.repetition_penalty = rng.uniform(0.5, 2)
        case.presence_penalty = case.frequency_penalty = 0.0
        case.logit_bias = {rng.randrange(50): rng.uniform(-9, 9) for _ in range(4)}
        case.stop_ids = [7, 9]
        text = case.prompt + case.output
        case.bad_words = [[rng.randrange(50)], [*text[-2:], 3], [*text[-3:], 4], [text[-2], 5]]
    logits = torch.randn(sum(len(case.draft) + 1 for case in cases), 50) * 3
    ours = iter(patched(cases, logits))
    rows = iter(logits)
    for case in cases:
        theirs = LogitsProcessorList(
            [
                SequenceBiasLogitsProcessor(
                    [[[token], value] for token, value in case.logit_bias.items()]
                ),
                RepetitionPenaltyLogitsProcessor(case.repetition_penalty),
                NoBadWordsLogitsProcessor(case.bad_words),
                MinNewTokensLengthLogitsProcessor(len(case.prompt), case.min_tokens, case.stop_ids),
            ]
        )
        for slot in range(len(case.draft) + 1):
            text = torch.tensor([case.prompt + case.output + case.path(slot)])
            assert torch.equal(next(ours), theirs(text, next(rows)[None].clone())[0])


def test_patch_is_that_of_vllm():
    # The formulas of vLLM's sampler, on tables of the whole vocabulary.
    rng = random.Random(4)
    torch.manual_seed(4)
    cases = long_cases(rng, 40)
    for case in cases:
        case.repetition_penalty = rng.choice([1.0, 1.3, 0.7])
        case.presence_penalty = rng.uniform(-2, 2)
        case.frequency_penalty = rng.uniform(-2, 2)
        case.logit_bias = case.bad_words = case.stop_ids = None
    logits = torch.randn(sum(len(case.draft) + 1 for case in cases), 50) * 3
    ours = iter(patched(cases, logits))
    rows = iter(logits)
    for case in cases:
        penalties = torch.tensor(
            [case.repetition_penalty, case.presence_penalty, case.frequency_penalty]
        )
        for slot in range(len(case.draft) + 1):
            output = torch.tensor(case.output + case.path(slot), dtype=torch.int64)
            counts = torch.bincount(output, minlength=50)
            in_text = (counts > 0) | (torch.bincount(torch.tensor(case.prompt), minlength=50) > 0)
            row = next(rows)
            penalised = torch.where(row > 0, row / penalties[0], row * penalties[0])
            row = torch.where(in_text, penalised, row)
            row = row - penalties[2] * counts
            row = row - penalties[1] * (counts > 0)
            assert torch.equal(next(ours), row)


# Decoding with them.

VOCABULARY = 12


def decode(case, tokens, *, draft, seed, room=None, temperature=0.9):
    """Emits some tokens of a toy model, whose logits follow from the text's last token.

    draft(text) is a list of (parent, token) pairs. With room, the processors observe what was
    emitted, or else are made anew at each step.
    """
    torch.manual_seed(5)
    table = torch.randn(VOCABULARY, VOCABULARY)
    case = dataclasses.replace(case, output=list(case.output))
    kept = None if room is None else processors_of([case], room=room)
    end = len(case.output) + tokens
    while len(case.output) < end:
        text = case.prompt + case.output
        case.draft = draft(text)
        ids, offsets, parents = batch_of([case])
        last = [text[-1], *(token for _, token in case.draft)]
        verified = verify_sampled(
            table[last],
            ids,
            offsets,
            parents=parents,
            temperature=temperature,
            seeds=torch.tensor([seed]),
            positions=torch.tensor([len(text)]),
            processors=kept or processors_of([case]),
        )
        if kept:
            kept.observe(verified.token_ids, verified.lengths)
        case.output += verified.tolist()[0]
    return case.output[:end]


HEAVY = Case(
    prompt=[1, 2, 3],
    output=[4],
    repetition_penalty=1.5,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={5: 1.0, 6: -1.0},
    bad_words=[[7], [5, 5], [2, 5, 8]],
    min_tokens=20,
    stop_ids=[0, 9],
)


def no_draft(_):
    return []


@pytest.mark.parametrize("temperature", [0.9, 0.0])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_emitted_is_the_same_with_any_draft(seed, temperature):
    def decoded(draft, room=None):
        return decode(HEAVY, 40, draft=draft, seed=seed, room=room, temperature=temperature)

    plain = decoded(no_draft)
    assert not {0, 9} & set(plain[:20])
    assert 7 not in plain
    assert (5, 5) not in list(itertools.pairwise(plain))

    known = HEAVY.prompt + plain
    rng = random.Random(seed)

    def right(text):
        return list(enumerate(known[len(text) : len(text) + 6], -1))

    def half_right(text):
        chain = [
            token if rng.random() < 0.8 else rng.randrange(VOCABULARY) for _, token in right(text)
        ]
        return list(enumerate(chain, -1))

    def tree(text):
        nodes = []
        for parent, token in right(text):
            # The right child after a wrong one, which is a leaf.
            before = max((node for node, (_, known) in enumerate(nodes) if known >= 0), default=-1)
            parent = -1 if parent < 0 else before
            nodes.append((parent, (token + 1) % VOCABULARY))
            nodes.append((parent, token))
        return nodes

    for draft in (right, half_right, tree):
        assert decoded(draft) == plain
        assert decoded(draft, room=VOCABULARY) == plain


def test_greedy_under_processors_takes_fewer_steps_with_drafts():
    plain = decode(HEAVY, 12, draft=no_draft, seed=1, temperature=0.0)
    steps = []

    def right(text):
        steps.append(text)
        known = HEAVY.prompt + plain
        return list(enumerate(known[len(text) : len(text) + 5], -1))

    assert decode(HEAVY, 12, draft=right, seed=1, temperature=0.0) == plain
    assert len(steps) == 2


def test_a_row_with_all_banned_is_empty():
    case = Case(prompt=[1], output=[], bad_words=[[0], [1]])
    ids, offsets, _ = batch_of([case])
    verified = verify_greedy(torch.zeros(1, 2), ids, offsets, processors=processors_of([case]))
    assert verified.tolist() == [[]]
    assert verified.status.tolist() == [Status.EMPTY]


# Observing.


@settings(max_examples=200, deadline=None)
@given(rng=st.randoms(use_true_random=False), requests=st.integers(1, 4))
def test_observing_is_making_anew(rng, requests):
    cases = [random_case(rng, vocabulary=9, out_of_range=False) for _ in range(requests)]
    kept = processors_of(cases, room=9)
    for _ in range(3):
        columns = rng.randint(1, 4)
        emitted = [[rng.randrange(9) for _ in range(rng.randint(0, columns))] for _ in cases]
        padded = [tokens + [-1] * (columns - len(tokens)) for tokens in emitted]
        kept.observe(
            torch.tensor(padded, dtype=torch.int32),
            torch.tensor([len(tokens) for tokens in emitted], dtype=torch.int32),
        )
        for case, tokens in zip(cases, emitted, strict=True):
            case.output += tokens
    ids, offsets, parents = batch_of(cases)
    logits = random_logits(rng, cases, 9, torch.float32).nan_to_num(nan=9.0)
    expected = processed(cases, logits)
    longest = max(len(case.draft) for case in cases)
    reference.patch(Batch(logits, ids, offsets, longest, parents), kept)
    assert torch.equal(logits, expected)
    assert torch.equal(kept.tail, processors_of(cases).tail)
    assert torch.equal(kept.min_left, processors_of(cases).min_left)


def test_without_room_new_tokens_stay_without_penalty():
    cases = [
        Case(prompt=[1], output=[], presence_penalty=1.0),
        Case(prompt=[1], output=[2], presence_penalty=1.0),
    ]
    kept = processors_of(cases, room=1)
    kept.observe(
        torch.tensor([[3, 4, 3], [2, 5, -1]], dtype=torch.int32),
        torch.tensor([3, 2], dtype=torch.int32),
    )
    assert kept.sizes.tolist() == [1, 2]
    assert kept.token_ids.tolist() == [3, 2, 5]
    assert kept.counts.tolist() == [2, 2, 1]


# What is touched, and what is refused.


def test_nothing_is_touched_without_processors():
    logits = torch.randn(3, 5)
    expected = logits.clone()
    processors = Processors.from_requests([[1, 2], []], [[3], []])
    assert processors.capacity == 0
    ids, offsets = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1, 1])
    verify_greedy(logits, ids, offsets, processors=processors)
    assert torch.equal(logits, expected)


def test_a_token_stands_once_in_the_entries():
    case = Case(
        prompt=[3, 3, 1],
        output=[3, 2, 3],
        repetition_penalty=2.0,
        logit_bias={3: 1.0},
        bad_words=[[1, 3], [3], [2, 3]],
        min_tokens=9,
        stop_ids=[3],
    )
    made = processors_of([case])
    assert made.token_ids.tolist() == [1, 2, 3]
    assert made.counts.tolist() == [0, 1, 2]
    assert made.in_prompt.tolist() == [True, False, True]
    assert made.ends.tolist() == [False, False, True]
    assert made.words.tolist() == [[0, 0], [0, 0], [0, 3]]
    assert made.tail.tolist() == [[3]]
    assert made.min_left.tolist() == [6]


def test_texts_may_be_arrays():
    listed = Processors.from_requests([[1, 2]], [[2, 3]], repetition_penalty=2.0)
    arrays = Processors.from_requests(
        np.array([[1, 2]]), [torch.tensor([2, 3])], repetition_penalty=np.float32(2.0)
    )
    assert torch.equal(listed.token_ids, arrays.token_ids)
    assert torch.equal(listed.counts, arrays.counts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "prompts must hold at least 1 request, got 0"),
        ({"outputs": [[1]]}, "outputs must have one entry for each of the 2 requests, got 1"),
        (
            {"prompts": [[1], [-3]]},
            "prompts must hold token ids from 0 to .*, got -3 for request 1",
        ),
        ({"outputs": [[2**31], []]}, f"outputs must hold .*, got {2**31} for request 0"),
        ({"prompts": [[1.5], []]}, "prompts must hold a list of token ids .* float64 .* request 0"),
        ({"prompts": [[[1]], []]}, r"prompts must .* shape \(1, 1\) for request 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a number above 0, got 0.0"),
        ({"repetition_penalty": [1.0, NAN]}, "above 0, got nan for request 1"),
        ({"repetition_penalty": [1.0]}, "repetition_penalty must have one entry .* 2 .*, got 1"),
        ({"presence_penalty": INF}, "presence_penalty must be a number that is finite, got inf"),
        ({"frequency_penalty": "much"}, "frequency_penalty must have one entry .* 2 .*, got 4"),
        ({"frequency_penalty": [True, 0]}, "frequency_penalty must .*, got True for request 0"),
        ({"logit_bias": [{1: NAN}, None]}, "logit_bias must be finite, got nan for token 1 of req"),
        ({"logit_bias": [{-1: 1.0}, None]}, "logit_bias must hold token ids .*, got -1"),
        ({"logit_bias": [{}]}, "logit_bias must have one entry for each of the 2 requests, got 1"),
        (
            {"bad_words": [None, [[1], []]]},
            "bad_words must have at least 1 token each, .* request 1",
        ),
        ({"bad_words": [None, [[-1]]]}, "bad_words must hold token ids .*, got -1 for request 1"),
        ({"min_tokens": -1}, "min_tokens must be an integer from 0 to .*, got -1 for request 0"),
        ({"min_tokens": [1, 2.0]}, "min_tokens must be an integer .*, got 2.0 for request 1"),
        ({"stop_ids": [[-5], None]}, "stop_ids must hold token ids .*, got -5 for request 0"),
        ({"stop_ids": 5}, "stop_ids must have one entry for each of the 2 requests, got 5"),
        ({"stop_ids": [5, 6]}, r"stop_ids must hold a list .* shape \(\) for request 0"),
        ({"logit_bias": {1: 0.5, 2: 0.5}}, "logit_bias must have one entry .*, got {1: 0.5"),
        ({"logit_bias": [[1], None]}, r"logit_bias must map .*, got \[1\] for request 0"),
        ({"bad_words": [[1], None]}, r"bad_words must hold a list .* shape \(\) for request 0"),
        ({"room": -1}, "room must be at least 0, got -1"),
    ],
)
def test_wrong_requests_are_named(change, message):
    options = {"prompts": [[1], [2]], "outputs": [[], [3]], **change}
    with pytest.raises(InvalidValueError, match=message):
        Processors.from_requests(options.pop("prompts"), options.pop("outputs"), **options)


GOOD = processors_of(
    [
        Case(prompt=[1], output=[2, 3], presence_penalty=1.0, bad_words=[[1, 2]]),
        Case(prompt=[1], output=[2], repetition_penalty=2.0),
    ]
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1]}, "token_ids must be a torch.Tensor, got list"),
        ({"sizes": 3}, "sizes must be a torch.Tensor, got int"),
        ({"counts": torch.zeros(4)}, "counts must hold one of torch.int32, got torch.float32"),
        ({"bias": torch.zeros(3)}, r"bias must have shape \(4,\), got \(3,\)"),
        ({"words": torch.zeros(4, 3).int()}, r"words must have shape \(4, 2\), got \(4, 3\)"),
        ({"tail": torch.zeros(3, 1).int()}, r"tail must have shape \(2, 1\), got \(3, 1\)"),
        ({"offsets": torch.tensor([0, 3, 4])}, "capacity must be at least .* 3, got 2"),
        (
            {"offsets": torch.tensor([0, 2, 5])},
            r"offsets must go from 0 up to 4 .*, got \[0, 2, 5\]",
        ),
        ({"sizes": torch.tensor([2, 3]).int()}, "sizes must be from 0 to .*, got 3 at index 1"),
        (
            {"token_ids": torch.tensor([1, 2, 5, 5]).int()},
            "token_ids must be different in each request, got 5 twice for request 1",
        ),
        ({"counts": torch.tensor([0, -1, 0, 0]).int()}, "counts must be .*, got -1 at index 1"),
        ({"bias": torch.tensor([0, INF, 0, 0])}, "bias must be finite, got inf at index 1"),
        ({"repetition_penalty": torch.tensor([1.0, 0.0])}, "above 0, got 0.0 at index 1"),
        ({"frequency_penalty": torch.tensor([NAN, 0.0])}, "finite, got nan at index 0"),
        ({"min_left": torch.tensor([0, -1]).int()}, "min_left must be at least 0, got -1"),
        ({"tail": torch.zeros(2, 0).int()}, "tail must have a column for each of the 1 tokens"),
        ({"word_offsets": torch.tensor([1, 1])}, "word_offsets must go from 0 up to 1"),
        ({"words": torch.ones(4, 2).int() * 2}, "words must be ranges from 0 to 1, got 2"),
        ({"bias": torch.zeros(1).expand(4)}, r"bias must be contiguous, got strides \(0,\)"),
        ({"capacity": -1}, "capacity must be at least 0, got -1"),
    ],
)
def test_wrong_tensors_are_named(change, message):
    with pytest.raises(InvalidValueError, match=message):
        dataclasses.replace(GOOD, **change)


def test_processors_that_do_not_fit_the_batch_are_named():
    ids, offsets = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1])
    logits = torch.zeros(2, 5)
    with pytest.raises(InvalidValueError, match="those of the 1 requests, got 2"):
        verify_greedy(logits, ids, offsets, processors=GOOD)
    with pytest.raises(InvalidValueError, match="processors must be a Processors, got dict"):
        verify_greedy(logits, ids, offsets, processors={})
    one = processors_of([Case(prompt=[1], output=[])])
    with pytest.raises(InvalidValueError, match=r"logits must not share memory .*, got .*\(0, 1\)"):
        verify_greedy(torch.zeros(5).expand(2, 5), ids, offsets, processors=one)


def test_observing_what_does_not_fit_is_named():
    tokens, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(InvalidValueError, match=r"token_ids must hold one of torch\.int32, got"):
        GOOD.observe(tokens.long(), lengths)
    with pytest.raises(InvalidValueError, match=r"each of the 2 requests, got shape \(1, 3\)"):
        GOOD.observe(tokens[:1], lengths)
    with pytest.raises(InvalidValueError, match=r"each of the 2 requests, got shape \(1,\)"):
        GOOD.observe(tokens, lengths[:1])
