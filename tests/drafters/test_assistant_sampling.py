"""Sampling with draft models: exactly the target's distribution, whatever drafts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from assistants import bent, constant, shortened
from distributions import assert_distribution
from fastdraft import DraftConfig, DraftStats, Engine, hf
from fastdraft.drafters import AssistantModel, Staged
from fastdraft.hf.verifier import Verifier
from hf_models import VOCABULARY, TreeBatch, repetitive_batch

LENGTH, COPIES, PROMPT = 8, 1000, 12
PROMPT_IDS = repetitive_batch(1, longest=PROMPT)["input_ids"]
SAMPLE: dict[str, Any] = {"do_sample": True, "top_k": 0, "eos_token_id": None}


def _assert_distribution(model: Any, sequences: torch.Tensor, options: dict[str, Any]) -> None:
    warpers: list[Any] = [
        kind(options[name])
        for name, kind in (
            ("temperature", TemperatureLogitsWarper),
            ("top_k", TopKLogitsWarper),
            ("top_p", TopPLogitsWarper),
        )
        if name in options
    ]
    warpers = [*options.get("logits_processor", ()), *warpers]
    assert_distribution(model, sequences, prompt=PROMPT, processors=warpers)


def _sampled(model: Any, drafter: Any, **options: Any) -> Any:
    return hf.generate(
        model,
        PROMPT_IDS,
        **{**SAMPLE, "max_new_tokens": LENGTH, "num_return_sequences": COPIES, **options},
        seed=7,
        drafter=drafter,
    )


class _AlongThePath(LogitsProcessor):
    """Unknown to fastdraft, so it shapes the target's scores alone, along the accepted path."""

    def __init__(self, by: float) -> None:
        self._by = by

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self._by * (input_ids[:, -1:] + torch.arange(scores.shape[1])).cos()


@pytest.mark.parametrize(
    ("gamma", "options"),
    [
        (1, {}),
        (3, {"temperature": 0.5, "top_k": 12}),
        (16, {"temperature": 1.4, "top_p": 0.8}),
        (2, {"logits_processor": LogitsProcessorList([_AlongThePath(by=0.5)])}),
    ],
)
def test_samples_have_the_targets_distribution(
    model: Any, small: Any, gamma: int, options: dict[str, Any]
) -> None:
    output = _sampled(model, constant(small, gamma), **options)
    assert output.stats.accepted > 200
    assert output.stats.drafted - output.stats.accepted > 200
    _assert_distribution(model, output.sequences, options)


def _drafters(model: Any, small: Any) -> dict[str, Any]:
    return {
        "adaptive": AssistantModel(small, lookup=None),
        "with lookups": constant(small, 3, lookup=DraftConfig()),
        "with trees": constant(small, 3, lookup=DraftConfig(tree_budget=8)),
        "staged thrice": Staged(
            [
                constant(shortened(model), 2),
                constant(bent(model, seed=4), 3),
                constant(small, 5),
            ]
        ),
        "staged on lookups": Staged([DraftConfig(), constant(small, 5)]),
    }


def _let_everything_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other draft is the model's and every other one the engine's, whatever they cost."""
    propose = Engine.propose_batch

    def wants(_: Engine, __: str, requests: Any, **___: Any) -> np.ndarray:
        coins = np.random.default_rng(len(steps)).random(len(requests)) < 0.5
        steps.append(coins.mean())
        return coins

    def costless(self: Engine, requests: Any, **options: Any) -> Any:
        return propose(self, requests, **{**options, "cost": None, "token_cost": 0.0})

    steps: list[float] = []
    monkeypatch.setattr(Engine, "wants", wants)
    monkeypatch.setattr(Engine, "propose_batch", costless)


@pytest.mark.parametrize(
    "name",
    ["adaptive", "with lookups", "with trees", "staged thrice", "staged on lookups"],
)
def test_no_way_of_drafting_bends_the_distribution(
    model: Any, small: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("with"):
        _let_everything_pay(monkeypatch)
    prediction = model.generate(
        PROMPT_IDS,
        do_sample=False,
        max_new_tokens=LENGTH,
        eos_token_id=None,
    )[0, PROMPT:]
    output = _sampled(model, _drafters(model, small)[name], prediction=prediction)
    if name != "adaptive":
        assert 200 < output.stats.accepted < output.stats.drafted - 200
    _assert_distribution(model, output.sequences, {})


def test_stages_draft_from_the_last_models_own_distribution(model: Any) -> None:
    """If that is the target too, all is accepted, and the emitted tokens are the drafted ones."""
    staged = Staged([constant(bent(model, by=0.3, seed=4), 3), constant(copy.deepcopy(model), 6)])
    output = _sampled(model, staged)
    assert output.stats.accepted > 0.999 * output.stats.drafted > 0
    sub, _ = output.assistants
    assert 0.1 < sub.alpha < 0.9
    _assert_distribution(model, output.sequences, {})


def test_drafts_are_accepted_along_the_path_as_they_were_drawn(model: Any) -> None:
    """All of them, if the model that drafts is the target."""
    drafter = constant(copy.deepcopy(model), 4)
    options = {"logits_processor": LogitsProcessorList([_AlongThePath(by=0.0)])}
    output = _sampled(model, drafter, num_return_sequences=3, max_new_tokens=21, **options)
    assert output.stats.accepted == output.stats.drafted == 3 * 4 * 4


def test_stages_draw_by_numbers_of_their_own(
    model: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification is exact for drafts that are independent of it."""
    seeds: dict[int, set[int]] = {}
    verify = Verifier.__call__

    def noting(verifier: Verifier, *arguments: Any, **options: Any) -> Any:
        drawn = {seed for seed, _ in options["draws"]}
        seeds.setdefault(id(verifier), set()).update(drawn)
        return verify(verifier, *arguments, **options)

    monkeypatch.setattr(Verifier, "__call__", noting)
    staged = Staged([constant(shortened(model), 2), constant(small, 5)])
    _sampled(model, staged, num_return_sequences=1)
    target, *stages = seeds.values()
    assert len(target) == 1
    assert len(stages) == 2
    assert min(map(len, stages)) > 1
    assert not target & stages[0] and not target & stages[1] and not stages[0] & stages[1]


def test_supports_that_do_not_meet(model: Any) -> None:
    """The target never says a token of the assistant: nothing is accepted, nothing is bent."""
    opposed = copy.deepcopy(model)
    with torch.no_grad():
        opposed.lm_head.weight.neg_().mul_(50)
    options = {"top_k": 2}
    output = _sampled(model, constant(opposed, 2), **options)
    assert output.stats.drafted > 1000
    assert output.stats.accepted < 0.01 * output.stats.drafted
    _assert_distribution(model, output.sequences, options)


@dataclass(frozen=True)
class _Batch(TreeBatch):
    draft_logits: dict[int, torch.Tensor]


class _Mixed:
    """Draws from a distribution of its own in every other row, and drafts fixed trees in the
    rest.

    Both hold the tokens that greedy decoding would give. Counts the accepted ones of each.
    """

    def __init__(self, greedy: list[int]) -> None:
        self._greedy = greedy
        self._random = np.random.default_rng(11)
        self._emitted: list[int] = []
        self._kinds: dict[int, str] = {}
        self.accepted = {"drawn": 0, "tree": 0}

    def add_request(self, prompt_ids: Any, *, prediction: Any = None) -> int:
        self._emitted.append(0)
        return len(self._emitted) - 1

    def propose_batch(self, requests: Any, *, limits: Any = None, **_: Any) -> Any:
        nodes: list[tuple[int, int]] = []
        offsets, draft_logits = [0], {}
        self._kinds = {}
        for slot, request in enumerate(requests):
            at = self._emitted[request]
            if limits[slot] >= 4 and (request + at) % 2:
                self._kinds[request] = "tree"
                first, second = self._greedy[at : at + 2]
                nodes += [(first, -1), ((first + 1) % VOCABULARY, -1), (second, 0), (second, 1)]
            elif limits[slot] >= 2 and (request + at) % 2 == 0:
                self._kinds[request] = "drawn"
                distribution = np.full((2, VOCABULARY), 0.4 / VOCABULARY)
                distribution[[0, 1], self._greedy[at : at + 2]] += 0.6
                drawn = [int(self._random.choice(VOCABULARY, p=row)) for row in distribution]
                nodes += [(drawn[0], -1), (drawn[1], 0)]
                draft_logits[slot] = torch.from_numpy(distribution).log().float()
            offsets.append(len(nodes))
        tokens, parents = zip(*nodes, strict=True) if nodes else ((), ())
        return _Batch(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.full(len(nodes), 0.5, np.float32),
            np.array(offsets, np.int32),
            draft_logits,
        )

    def observe_batch(self, requests: Any, emitted_ids: Any, offsets: Any) -> None:
        for slot, request in enumerate(requests):
            count = int(offsets[slot + 1] - offsets[slot])
            self._emitted[request] += count
            if request in self._kinds:
                self.accepted[self._kinds[request]] += count - 1

    def finish(self, request: int) -> DraftStats:
        return DraftStats(steps=1)

    def cancel(self, request: int) -> None: ...


def test_drawn_drafts_beside_trees(model: Any) -> None:
    """In one batch, each is verified by its own rule, and each row keeps its own path."""
    greedy = model.generate(
        PROMPT_IDS,
        do_sample=False,
        max_new_tokens=LENGTH + 2,
        eos_token_id=None,
    )[0, PROMPT:].tolist()
    drafter = _Mixed(greedy)
    output = _sampled(model, drafter, temperature=0.5, logprobs=True)
    assert min(drafter.accepted.values()) > 200
    with torch.no_grad():
        scores = model(output.sequences).logits[:, PROMPT - 1 : -1] / 0.5
    expected = scores.log_softmax(-1).gather(2, output.sequences[:, PROMPT:, None])[..., 0]
    torch.testing.assert_close(torch.stack(output.logprobs), expected, rtol=0, atol=1e-4)
    _assert_distribution(model, output.sequences, {"temperature": 0.5})


def test_a_seed_gives_the_same_tokens_again(model: Any, small: Any) -> None:
    def sampled(seed: int) -> torch.Tensor:
        drafter = constant(small, 4)
        return hf.generate(
            model, **repetitive_batch(3), **SAMPLE, max_new_tokens=32, seed=seed, drafter=drafter
        ).sequences

    assert torch.equal(sampled(5), sampled(5))
    assert not torch.equal(sampled(5), sampled(6))


def test_processors_shape_both_distributions(model: Any) -> None:
    """The same filters on both sides, so an assistant that is the target is always accepted."""
    output = hf.generate(
        model,
        **repetitive_batch(3),
        **{**SAMPLE, "top_k": 5},
        temperature=0.7,
        repetition_penalty=1.2,
        max_new_tokens=40,
        seed=1,
        drafter=constant(copy.deepcopy(model), 4),
    )
    assert output.stats.accepted == output.stats.drafted > 60
