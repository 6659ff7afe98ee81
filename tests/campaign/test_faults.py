"""Hosts, models, processors and drafters that fail at every one of their calls."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from campaign.families import random_model
from fastdraft import DraftConfig, Engine, hf
from hf_models import EOS, PAD, VOCABULARY, Generous
from random_cases import cases
from vllm_host import Job, V1Host

_CALLS = (
    "add_request", "propose_batch", "observe_batch", "observe", "num_tokens", "stats", "finish",
    "cancel",
)  # fmt: skip


@cases(2)
def test_a_host_outlives_every_fault(seed: int) -> None:
    """One script, run again with a fault at each call."""
    calls = next(at for at in itertools.count(1) if _run(random.Random(seed), at) < at)
    assert calls > len(_CALLS)


class _Fault(Exception):
    pass


class _Failing:
    """Lets an engine fail at its call number `at`."""

    def __init__(self, engine: Engine, at: int) -> None:
        self.calls, self._at = 0, at
        for name in _CALLS:
            setattr(engine, name, functools.partial(self._call, getattr(engine, name)))

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self._at:
            raise _Fault
        return method(*arguments, **options)


def _run(chance: random.Random, at: int) -> int:
    """Whatever fails, every request says all it has to say. Returns how many calls there were."""
    host = V1Host(token_cost=0.02, memory_bytes=chance.choice([0, 1 << 20]), lookahead=8)
    proposer = host.proposer
    failing = _Failing(proposer.engine, at)
    for number in range(5):
        cycle = list(range(number * 10, number * 10 + 8))
        said = (cycle * 9)[: chance.randint(1, 40)]
        host.add(str(number), Job(cycle * 2, said, max_tokens=len(said)))
    jobs = dict(host.jobs)
    faults = proposer.faults
    host.run()
    assert all(job.said == len(job.output) for job in jobs.values())
    failed = failing.calls >= at
    assert proposer.faults > faults or not failed
    assert proposer.num_requests == 0
    # A request whose end failed cannot be ended again.
    assert proposer.engine.num_requests <= failed
    return failing.calls


class _FailingProcessor(LogitsProcessor):
    """Fails at its call number `at`."""

    def __init__(self, at: int) -> None:
        self.calls, self._at = 0, at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.hook()
        return scores

    def hook(self, *_: Any) -> None:
        """Before a forward."""
        self.calls += 1
        if self.calls == self._at:
            raise _Fault


@cases(1)
def test_a_generation_after_every_fault(seed: int) -> None:
    """What fails in a generation comes out as it is, and the next one is as good as new."""
    chance = random.Random(seed)
    family = chance.choice(["llama", "gemma2", "gpt2", "qwen3", "opt"])
    model = random_model(family, chance)
    rows = chance.choice([1, 3])
    motif = torch.tensor([chance.randrange(3, VOCABULARY) for _ in range(4)])
    options: dict[str, Any] = {
        "input_ids": motif.repeat(rows, 5),
        "attention_mask": torch.ones(rows, 20, dtype=torch.int64),
        "max_new_tokens": 24,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "do_sample": False,
    }
    expected = model.generate(**options)
    drafting = DraftConfig(tree_budget=chance.choice([None, 8]))
    what = chance.choice(["forward", "processor", "drafter"])
    for at in itertools.count(1):
        engine = Generous(drafting)
        failing: Any = _FailingProcessor(at)
        others: dict[str, Any] = {}
        hook = None
        if what == "forward":
            hook = model.register_forward_pre_hook(failing.hook)
        elif what == "processor":
            others["logits_processor"] = LogitsProcessorList([failing])
        else:
            failing = _Failing(engine, at)
        try:
            output = hf.generate(model, **options, **others, drafter=engine)
        except _Fault:
            pass
        else:
            assert torch.equal(output.sequences, expected), f"{family}, {what}"
            assert 0 < failing.calls < at, f"{family}, {what}: fault {at} was swallowed"
            return
        finally:
            if hook is not None:
                hook.remove()
        assert engine.num_requests == 0, f"{family}, {what}: {engine.num_requests} after fault {at}"
        again = hf.generate(model, **options, drafter=Generous())
        assert torch.equal(again.sequences, expected), f"{family}, {what}: wrong after fault {at}"
    raise AssertionError
