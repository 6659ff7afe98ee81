"""Draft models that draft for each other draft just what the last of them would alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from assistants import bent, constant, shortened
from fastdraft import DraftConfig, Engine, hf
from fastdraft.drafters import AssistantModel, Staged
from fastdraft.errors import InvalidValueError
from hf_models import VOCABULARY, assert_decodes, repetitive_batch

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}


@pytest.mark.parametrize(
    ("names", "rows"),
    [("tiny", 3), ("near", 1), ("tiny near", 3), ("lookups", 3), ("trees", 1), ("engine near", 3)],
)
def test_stages_draft_what_the_last_model_would(
    model: Any, small: Any, names: str, rows: int
) -> None:
    stages: dict[str, Any] = {
        "tiny": constant(shortened(model), 2),
        "near": constant(bent(small, by=0.05, seed=9), 3),
        "lookups": DraftConfig(),
        "trees": DraftConfig(tree_budget=12),
        "engine": Engine(),
    }
    last = constant(small, 5)
    inputs = repetitive_batch(rows)
    alone = hf.generate(model, **inputs, **GREEDY, drafter=last)
    staged = Staged([*(stages[name] for name in names.split()), last])
    output = assert_decodes(model, inputs, staged, exact=True, **GREEDY).output
    assert output.row_stats == alone.row_stats
    ours, [only] = output.assistants[-1], alone.assistants
    assert (ours.judged, ours.accepted) == (only.judged, only.accepted)


def test_a_perfect_sub_draft_saves_forwards_of_the_draft_model(model: Any, small: Any) -> None:
    forwards: list[int] = []
    counted = copy.deepcopy(small)
    counted.register_forward_pre_hook(lambda *_: forwards.append(1))
    staged = Staged([constant(copy.deepcopy(small), 5), constant(counted, 6)])
    prompt = repetitive_batch(1)["input_ids"]
    output = hf.generate(model, prompt, **GREEDY, drafter=staged)
    sub, draft = output.assistants
    assert sub.alpha == 1.0
    assert 0 < draft.alpha < 1
    assert len(forwards) < 0.6 * draft.drafted


def test_lookups_feed_a_model_that_feeds_the_target(model: Any) -> None:
    forwards: list[int] = []
    same = copy.deepcopy(model)
    same.register_forward_pre_hook(lambda *_: forwards.append(1))
    prompt = repetitive_batch(1)["input_ids"]
    expected = model.generate(prompt, **GREEDY)
    staged = Staged([DraftConfig(token_cost=0.0), constant(same, 8)])
    output = hf.generate(model, prompt, **GREEDY, drafter=staged, prediction=expected[0, 30:])
    assert torch.equal(output.sequences, expected)
    assert len(forwards) < output.stats.drafted


def test_a_forward_that_reads_the_prompt_does_not_tell_what_a_draft_token_takes(model: Any) -> None:
    always = copy.deepcopy(model)
    always.lm_head = torch.nn.Linear(model.lm_head.in_features, VOCABULARY)
    always.lm_head.weight.data.zero_()
    always.lm_head.bias.data = torch.nn.functional.one_hot(torch.tensor(5), VOCABULARY).float()
    same, prompt = copy.deepcopy(always), torch.full((1, 30), 5)
    below = DraftConfig.prompt_lookup(max_ngram=2, num_tokens=16)
    for _ in range(2):  # by the second time it is known what a forward takes
        staged = Staged([below, constant(same, 8)])
        hf.generate(always, prompt, **GREEDY, drafter=staged)
    # That forward gave all eight tokens of the first draft.
    assert staged.models[0].schedule.seconds(1) > 1e-5


def test_requests_of_the_engine_end_with_the_generation(model: Any, small: Any) -> None:
    engines = [Engine(), Engine()]
    last = AssistantModel(small, lookup=engines[1])
    hf.generate(model, **repetitive_batch(3), **GREEDY, drafter=Staged([engines[0], last]))

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    target = copy.deepcopy(model)
    handle = target.register_forward_pre_hook(lambda *_: handle.remove())
    target.register_forward_pre_hook(
        lambda _, __, kwargs: stopped() if kwargs["input_ids"].shape[1] < 30 else None,
        with_kwargs=True,
    )
    with pytest.raises(KeyboardInterrupt):
        hf.generate(target, **repetitive_batch(3), **GREEDY, drafter=Staged([engines[0], last]))
    assert [engine.num_requests for engine in engines] == [0, 0]


def test_models_are_made_into_stages(model: Any, small: Any) -> None:
    staged = Staged([shortened(model), small])
    output = assert_decodes(model, repetitive_batch(2), staged, exact=True, **GREEDY).output
    assert len(output.assistants) == 2


def test_a_stage_that_is_no_model_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"a generating model .* got int"):
        Staged([3])
