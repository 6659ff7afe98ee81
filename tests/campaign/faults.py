"""Memory that ends at every allocation, and hosts, models and drafters that fail at every call."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from campaign.families import random_model
from fastdraft import DraftConfig, Engine, hf
from fastdraft.errors import MemoryLimitError
from fastdraft.integrations.vllm import FastdraftProposer
from hf_models import EOS, PAD, VOCABULARY, Generous
from test_vllm_proposer import Host, Job, config

__all__ = ["case"]


def case(seed: int) -> Counter[str]:
    """One script, run again with a fault at each of its steps."""
    chance = random.Random(seed)
    kind = chance.choice([_memory, _host, _decoding])
    return kind(chance)


def _memory(chance: random.Random) -> Counter[str]:
    """The same requests with every budget: what is refused leaves all the rest as it was."""
    drafting: dict[str, Any] = chance.choice(
        [{}, {"tree_budget": 16}, {"max_ngram": 3}, {"ngram_order": 3, "min_probability": 0.1},
         {"recovery": 4}]
    )  # fmt: skip
    script = random.Random(chance.getrandbits(32)).getstate()
    found: Counter[str] = Counter()
    most = _scripted(DraftConfig(**drafting), script, Counter())
    step = max(1, most // chance.choice([50, 100]))
    for budget in range(1 + chance.randrange(step), most + step, step):
        _scripted(DraftConfig(**drafting, max_bytes=budget), script, found)
    return found


def _scripted(drafting: DraftConfig, script: Any, found: Counter[str]) -> int:
    """Requests that come, grow and go. Returns the most bytes that they took."""
    chance = random.Random()
    chance.setstate(script)
    engine = Engine(drafting)
    lengths: dict[int, int] = {}
    most = 0
    for _ in range(60):
        # Drawn before anything can fail, so that all budgets see the same script.
        action, which, size, alphabet = (chance.getrandbits(16) for _ in range(4))
        text = [chance.randrange(2 + alphabet % 9) for _ in range(size % 90)]
        known = sorted(lengths)
        request = known[which % len(known)] if known else None
        try:
            if action % 4 == 0 or request is None:
                lengths[engine.add_request(text, prediction=text[5:30] or None)] = len(text)
            elif action % 4 == 3 and action % 8 == 3:
                (engine.finish if which % 2 else engine.cancel)(request)
                del lengths[request]
            elif action % 4 == 1:
                batch = engine.propose_batch(known, token_cost=0)
                emitted = [(draft + text)[:8] for draft in batch.tolist()]
                before = sum(map(engine.num_tokens, known))
                try:
                    offsets = np.cumsum([0, *map(len, emitted)])
                    engine.observe_batch(known, [*itertools.chain(*emitted)], offsets)
                    assert sum(map(engine.num_tokens, known)) == before + offsets[-1]
                finally:
                    for at in known:
                        lengths[at] = engine.num_tokens(at)
            else:
                before = engine.num_tokens(request)
                engine.propose(request, token_cost=0)
                try:
                    engine.observe(request, text)
                    assert engine.num_tokens(request) == before + len(text)
                finally:
                    lengths[request] = engine.num_tokens(request)
                    assert before <= lengths[request] <= before + len(text)
        except MemoryLimitError:
            found["memory limits met"] += 1
        assert engine.num_requests == len(lengths)
        for known_request, length in lengths.items():
            assert engine.num_tokens(known_request) == length
        if drafting.max_bytes is not None:
            assert engine.num_bytes <= drafting.max_bytes
        most = max(most, engine.num_bytes)
    for request in lengths:
        stats = engine.finish(request)
        assert 0 <= stats.accepted <= stats.drafted
        assert stats.accepted <= stats.emitted
    assert engine.num_bytes == 0, engine.num_bytes
    return most


class _Fault(Exception):
    pass


class _Failing:
    """Stands before an object and fails at its call number `at`, counting all of those named."""

    def __init__(self, inner: Any, names: tuple[str, ...], at: int) -> None:
        self.calls = 0
        for name in names:
            method = getattr(inner, name)
            setattr(inner, name, self._wrapped(method, at))

    def _wrapped(self, method: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise _Fault
            return method(*args, **kwargs)

        return call


_ENGINE_CALLS = (
    "add_request", "propose_batch", "observe_batch", "observe", "num_tokens", "stats", "finish",
    "cancel",
)  # fmt: skip


def _host(chance: random.Random) -> Counter[str]:
    """vLLM's proposer: whatever fails in drafting, every request says all that it has to say."""
    logging.disable(logging.WARNING)
    script = chance.getrandbits(32)
    found: Counter[str] = Counter()
    for at in itertools.count(1):
        failing = _run_host(random.Random(script), at)
        if failing.calls < at:
            break
        found["host faults"] += 1
    return found


def _run_host(chance: random.Random, at: int) -> _Failing:
    proposer = FastdraftProposer(
        config(token_cost=0.02, memory_bytes=chance.choice([0, 1 << 20]), lookahead=8)
    )
    failing = _Failing(proposer.engine, _ENGINE_CALLS, at)
    host = Host(proposer, introduce=chance.random() < 0.5)
    for number in range(5):
        cycle = list(range(number * 10, number * 10 + 8))
        said = (cycle * 9)[: chance.randint(1, 40)]
        host.add(str(number), Job(cycle * 2, said, max_tokens=len(said)))
    jobs = dict(host.jobs)
    faults = proposer.faults
    host.run()
    assert all(job.said == len(job.output) for job in jobs.values())
    if failing.calls >= at:
        assert proposer.faults > faults
    assert proposer.num_requests == 0
    # A request whose end failed cannot be ended again.
    assert proposer.engine.num_requests <= (failing.calls >= at)
    return failing


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


def _decoding(chance: random.Random) -> Counter[str]:
    """What fails in a generation comes out as it is, and the next one is as good as new."""
    family = chance.choice(["llama", "gemma2", "gpt2", "qwen3", "opt"])
    model = random_model(family, chance)
    rows = chance.choice([1, 3])
    motif = torch.tensor([chance.randrange(3, VOCABULARY) for _ in range(4)])
    options = {
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
    found: Counter[str] = Counter()
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
            failing = _Failing(engine, _ENGINE_CALLS, at)
        try:
            output = hf.generate(model, **options, **others, drafter=engine)
        except _Fault:
            found["decoding faults"] += 1
        else:
            assert torch.equal(output.sequences, expected), f"{family}, {what}"
            assert failing.calls < at, f"{family}, {what}: fault {at} was swallowed"
            return found
        finally:
            if hook is not None:
                hook.remove()
        assert engine.num_requests == 0, f"{family}, {what}: {engine.num_requests} after fault {at}"
        again = hf.generate(model, **options, drafter=Generous())
        assert torch.equal(again.sequences, expected), f"{family}, {what}: wrong after fault {at}"
    raise AssertionError
