"""The patch of logits in Triton: bit for bit what the reference makes of them."""

from __future__ import annotations

import random

import pytest
import torch
import triton.language as tl
from adversarial import DTYPES, Random, workspace_of
from triton.runtime import interpreter

import processor_cases
from fastdraft.kernels import fused, reference
from fastdraft.kernels.fused import config
from fastdraft.kernels.operands import Batch
from fastdraft.verification import Processors, verify_greedy, verify_sampled
from processor_cases import INF, Case, batch_of, processed, random_case

NAN = float("nan")


@pytest.fixture(autouse=True)
def _rounded(monkeypatch):
    """The interpreter cuts float32 off to bfloat16, where devices round to the nearest."""
    if torch.get_default_device().type != "cpu":
        return
    builder = interpreter.interpreter_builder
    cast = builder.create_fp_trunc

    def rounded(source, target):
        if target.scalar != tl.bfloat16:
            return cast(source, target)
        values = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.uint16)
        return interpreter.TensorHandle(values.numpy(), target.scalar)

    monkeypatch.setattr(builder, "create_fp_trunc", rounded)


def processors_of(cases, **options):
    """The processors on the device under test."""
    return processor_cases.processors_of(cases, device=torch.get_default_device(), **options)


def random_cases(rng, count, vocabulary, *, tree, longest=6):
    """Requests whose penalties are not exact in binary."""
    cases = [
        random_case(rng, vocabulary=vocabulary, tree=tree, longest=longest) for _ in range(count)
    ]
    for case in cases:
        case.repetition_penalty *= rng.choice([1.0, 1.3])
        case.presence_penalty *= 1.1
        case.frequency_penalty *= 0.7
    return cases


def random_logits(rng, cases, vocabulary, dtype):
    rows = sum(len(case.draft) + 1 for case in cases)
    odd = [0.0, -0.0, INF, -INF, NAN, 6e4, -6e4]
    return torch.tensor(
        [
            [rng.gauss(0, 3) if rng.random() < 0.8 else rng.choice(odd) for _ in range(vocabulary)]
            for _ in range(rows)
        ]
    ).to(dtype)


def bits(logits):
    """The bits, which tell -0.0 from 0.0, with one NaN."""
    integer = torch.int32 if logits.dtype == torch.float32 else torch.int16
    return torch.where(logits.isnan(), torch.full_like(logits, NAN), logits).view(integer)


def both(cases, logits, processors, *, tree, max_draft=None, keep=False):
    """The logits as the reference and as the kernel patches them."""
    ids, offsets, parents = batch_of(cases)
    longest = max(len(case.draft) for case in cases) if max_draft is None else max_draft
    batch = Batch(logits, ids, offsets, longest, parents if tree else None, raw_logprobs=keep)
    patched = []
    for kernels in (reference, fused):
        copy = logits.clone()
        kernels.patch(batch._replace(logits=copy), processors)
        patched.append(copy)
    return patched


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_patch_is_the_reference(seed, tree, dtype):
    rng = random.Random(seed)
    vocabulary = rng.choice([3, 9, 50])
    cases = random_cases(rng, 8, vocabulary, tree=tree)
    logits = random_logits(rng, cases, vocabulary, dtype)
    expected, got = both(cases, logits, processors_of(cases, room=seed), tree=tree, keep=seed > 1)
    assert torch.equal(bits(got), bits(expected))


def test_patch_is_the_oracle():
    rng = random.Random(5)
    cases = [random_case(rng, vocabulary=9, tree=True) for _ in range(12)]
    values = [*(x / 2 for x in range(-8, 9)), INF, -INF]
    rows = sum(len(case.draft) + 1 for case in cases)
    logits = torch.tensor([[rng.choice(values) for _ in range(9)] for _ in range(rows)])
    _, got = both(cases, logits, processors_of(cases), tree=True)
    assert torch.equal(got, processed(cases, logits))


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_many_entries_and_long_drafts_take_several_blocks(tree):
    rng = random.Random(6)
    vocabulary = 3000
    (case,) = random_cases(rng, 1, vocabulary, tree=False)
    case.repetition_penalty = 1.7
    case.prompt = rng.sample(range(vocabulary), 80)
    case.output = [rng.randrange(vocabulary) for _ in range(20)]
    # Paths whose tokens stand twice, in the text and beside it.
    ids = rng.sample(range(vocabulary), 40)
    case.draft = [
        (rng.randrange(max(node - 30, -1), node) if tree else node - 1, rng.choice(ids))
        for node in range(66)
    ]
    case.bad_words = [case.path(66)[-4:], [ids[0]]]
    logits = random_logits(rng, [case], vocabulary, torch.float32)
    assert config.path_slots(66) < 66
    expected, got = both([case], logits, processors_of([case]), tree=tree, keep=True)
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.usefixtures("any_order")
def test_programs_may_come_in_any_order(monkeypatch):
    monkeypatch.setattr(config, "_COMPARED", 16 * 8)
    rng = random.Random(12)
    cases = random_cases(rng, 3, 50, tree=True)
    for case in cases:
        case.repetition_penalty = 1.3
        case.prompt = rng.sample(range(50), 30)
    assert config.split_entries(20, 30, 16).programs > 1
    logits = random_logits(rng, cases, 50, torch.float32)
    expected, got = both(cases, logits, processors_of(cases), tree=True, keep=True)
    assert torch.equal(bits(got), bits(expected))


def test_strided_logits_are_patched_and_nothing_beside_them():
    rng = random.Random(7)
    cases = random_cases(rng, 4, 9, tree=False)
    logits = random_logits(rng, cases, 9, torch.float32)
    ids, offsets, _ = batch_of(cases)
    processors = processors_of(cases)
    memories = []
    for kernels in (reference, fused):
        memory = torch.full((len(logits) * 2 + 1, 9 * 3 + 2), 5.0)
        memory[1::2, 1:-1:3] = logits
        kernels.patch(Batch(memory[1::2, 1:-1:3], ids, offsets, max_draft=6), processors)
        memories.append(memory)
    assert torch.equal(bits(memories[1]), bits(memories[0]))


def test_rows_that_are_not_reached_are_left_alone():
    rng = random.Random(8)
    cases = [Case(prompt=[1, 2], output=[3], draft=[(-1, 4), (0, 5)], presence_penalty=1.0)]
    logits = random_logits(rng, cases, 9, torch.float32)
    padded = torch.cat([logits, torch.zeros(3, 9)])
    expected, got = both(cases, padded, processors_of(cases), tree=False, max_draft=1)
    assert torch.equal(bits(got), bits(expected))
    assert torch.equal(bits(got[2:]), bits(padded[2:]))


def test_nothing_is_out_of_bounds_whatever_the_tensors_hold():
    # Tensors on a device are not checked; the memory around the logits must stay as it is.
    rng = random.Random(9)
    wild = [-(2**31), -7, -1, 0, 1, 2, 5, 9, 1000, 2**31 - 1]

    class Unchecked(Processors):
        def __post_init__(self):
            pass

    def ints(*shape, dtype=torch.int32):
        values = [rng.choice(wild) for _ in range(torch.Size(shape).numel())]
        return torch.tensor(values, dtype=dtype).view(shape)

    for attempt in range(40):
        requests, entries, words = 3, rng.randint(0, 20), rng.randint(0, 4)
        processors = Unchecked(
            token_ids=ints(entries),
            counts=ints(entries),
            in_prompt=ints(entries) > 0,
            bias=torch.randn(entries),
            ends=ints(entries) > 0,
            words=ints(entries, 2),
            offsets=ints(requests + 1, dtype=torch.int64),
            sizes=ints(requests),
            repetition_penalty=torch.rand(requests) + 0.5,
            presence_penalty=torch.randn(requests),
            frequency_penalty=torch.randn(requests),
            min_left=ints(requests),
            tail=ints(requests, 2),
            word_ids=ints(words * 2),
            word_offsets=ints(words + 1, dtype=torch.int64),
            capacity=rng.randint(0, 9),
        )
        drafted = rng.randint(0, 9)
        memory = torch.full((drafted + requests + 2, 12), 5.0)
        logits = memory[1:-1, 2:9]
        logits.normal_()
        offsets = ints(requests + 1, dtype=torch.int64)
        parents = ints(drafted) if attempt % 2 else None
        fused.patch(Batch(logits, ints(drafted), offsets, rng.randint(0, 6), parents), processors)
        logits.fill_(5.0)
        assert (memory == 5.0).all()
        fused.observe(processors, ints(requests, 3), ints(requests))


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_logprobs_are_those_before_the_patch(tree, dtype):
    rng = random.Random(10)
    cases = random_cases(rng, 8, 40, tree=tree)
    for case in cases:
        case.min_tokens = 0
    logits = random_logits(rng, cases, 40, dtype).nan_to_num(nan=1.0).clamp(-20, 20)
    ids, offsets, parents = batch_of(cases)
    processors = processors_of(cases)
    batch = Batch(logits, ids.clone(), offsets, 6, parents if tree else None)
    # Drafts that are taken, so that there is something on the paths.
    emitted = reference.verify_greedy(batch)
    for _ in range(6):
        patched = batch._replace(logits=logits.clone())
        reference.patch(patched, processors)
        emitted = reference.verify_greedy(patched)
        for b, tokens in enumerate(emitted.token_ids.tolist()):
            for j in range(len(cases[b].draft) if not tree else 0):
                if tokens[j] >= 0:
                    batch.draft_ids[int(offsets[b]) + j] = tokens[j]
    if not tree:
        assert (emitted.lengths > 3).any()
    raw = []
    for kernels in (reference, fused):
        patched = batch._replace(logits=logits.clone(), raw_logprobs=True)
        touched = kernels.patch(patched, processors)
        emitted = reference.verify_greedy(patched._replace(raw_logprobs=False))
        raw.append(kernels.raw_logprobs(patched, emitted, touched))
    torch.testing.assert_close(raw[1], raw[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    distribution = logits.double().log_softmax(-1)
    rows = reference.acceptance.emitted_rows(offsets, emitted.path, max_draft=6)
    for b, length in enumerate(emitted.lengths.tolist()):
        for j in range(length):
            expected = distribution[rows[b, j], emitted.token_ids[b, j].long()]
            assert float(raw[1][b, j]) == pytest.approx(float(expected), rel=1e-4, abs=1e-4)
        assert raw[1][b, length:].isnan().all()


def test_a_workspace_keeps_what_is_overwritten():
    cases = random_cases(random.Random(13), 3, 40, tree=False)
    ids, offsets, _ = batch_of(cases)
    processors = processors_of(cases)
    logits = Random(13).normal(len(ids) + 3, 40)
    size = {"max_rows": 40, "max_requests": 3, "vocabulary": 40, "max_draft": 6}
    workspace = workspace_of(**size, max_touched=processors.capacity + 6)
    batch = Batch(logits, ids, offsets, max_draft=6, raw_logprobs=True)
    kept = [
        fused.patch(batch._replace(logits=logits.clone(), workspace=memory), processors)
        for memory in (None, workspace, workspace)
    ]
    assert kept[1].before.data_ptr() == kept[2].before.data_ptr()
    assert kept[0].before.shape == kept[1].before.shape


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("temperature", [None, 0.8], ids=["greedy", "sampled"])
def test_verification_is_the_same_with_all_options(tree, temperature, monkeypatch):
    rng = random.Random(11)
    cases = random_cases(rng, 3, 40, tree=tree, longest=4)
    ids, offsets, parents = batch_of(cases)
    logits = Random(11).normal(len(ids) + 3, 40) * 2
    options = {
        "parents": parents,
        "processors": processors_of(cases),
        "allowed": Random(12).integers(-(2**31), 2**31, len(logits), 2).int(),
        "logprobs": True,
        "raw_logprobs": True,
        "max_draft": 6,
    }
    verb = verify_greedy
    if temperature is not None:
        verb = verify_sampled
        # Numbers that do not lie one after the other.
        options |= {"temperature": torch.tensor(temperature).expand(3), "top_k": 9}
        options |= {"seeds": torch.arange(6)[::2], "positions": torch.arange(3)}
    found = []
    size = {"max_rows": 99, "max_requests": 9, "vocabulary": 50, "max_draft": 7}
    workspace = workspace_of(**size, max_touched=options["processors"].capacity + 6)
    for kernels in (reference, fused):
        monkeypatch.setattr("fastdraft.verification.verify.kernels_for", lambda _, k=kernels: k)
        verified = verb(logits.clone(), ids, offsets, workspace=workspace, **options)
        found.append([verified.tolist(), verified.status.tolist(), verified.path.tolist()])
        found[-1] += [verified.logprobs, verified.raw_logprobs]
    assert found[1][:3] == found[0][:3]
    for got, expected in zip(found[1][3:], found[0][3:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("seed", range(3))
def test_observing_is_the_reference(seed):
    rng = random.Random(seed)
    cases = random_cases(rng, 6, 9, tree=False)
    kept = [processors_of(cases, room=rng.choice([0, 2, 9])) for _ in range(1)]
    kept.append(Processors(**{name: _copy(value) for name, value in vars(kept[0]).items()}))
    for _ in range(3):
        columns = rng.randint(1, 5)
        lengths = torch.tensor([rng.randint(0, columns) for _ in cases], dtype=torch.int32)
        emitted = torch.tensor([[rng.randrange(9) for _ in range(columns)] for _ in cases])
        emitted = torch.where(torch.arange(columns) < lengths[:, None], emitted, -1).int()
        reference.observe(kept[0], emitted, lengths)
        fused.observe(kept[1], emitted, lengths)
    for name, value in vars(kept[0]).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(vars(kept[1])[name])), name


def _copy(value):
    return value.clone() if isinstance(value, torch.Tensor) else value
