"""Sampling: the model's own distribution, and for a seed the same tokens whatever is drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from distributions import assert_distribution
from fastdraft import DraftConfig, hf
from hf_models import Forester, Generous, Silent, edited, repetitive_batch, tiny_model

NEW = 32
PROMPT = 12  # of the thousands of copies whose distribution is tested
# top_k=0: nothing is cut off unless a test asks for it.
SAMPLE: dict[str, Any] = {
    "do_sample": True,
    "top_k": 0,
    "max_new_tokens": NEW,
    "eos_token_id": None,
}


class _AlongThePath(LogitsProcessor):
    """Unknown to fastdraft, so it is called along the accepted path."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.5 * (input_ids[:, -1:] + torch.arange(scores.shape[1])).cos()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma2", {"top_k": 40, "temperature": 1.2}),
        ("opt", {"logits_processor": LogitsProcessorList([_AlongThePath()])}),
    ],
    ids=["llama", "gemma2-warped", "opt-along the path"],
)
@pytest.mark.parametrize("drafts", ["chains", "trees", "engine's trees"])
def test_a_seed_gives_the_same_tokens_whatever_is_drafted(
    family: str, options: dict[str, Any], drafts: str
) -> None:
    model, inputs = tiny_model(family), repetitive_batch(3)
    options = {**SAMPLE, **options}
    plain = hf.generate(model, **inputs, **options, seed=[5, 6, 7], drafter=Silent())
    said = plain.sequences[:, 30:]
    drafters: dict[str, Any] = {
        "chains": Generous(),
        "trees": Forester(said.tolist()),
        "engine's trees": Generous(DraftConfig(tree_budget=32)),
    }
    drafter, predictions = drafters[drafts], list(map(edited, said))
    drafted = hf.generate(
        model, **inputs, **options, seed=5, drafter=drafter, prediction=predictions
    )
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.stats.drafted > drafted.stats.accepted > 0
    assert drafted.stats.steps < plain.stats.steps
    # Along the path a step ends where the first row leaves its draft.
    if drafts == "trees" and "logits_processor" not in options:
        drafter.assert_was_a_forest(3)


def test_a_seed_gives_the_same_tokens_in_any_row_of_any_batch(model: Any) -> None:
    batch = repetitive_batch(4)
    seeds = [31, 7, 2**62, 0]
    together = hf.generate(model, **batch, **SAMPLE, seed=seeds).sequences[:, 30:]
    order = [2, 0, 3, 1]
    shuffled = hf.generate(
        model,
        input_ids=batch["input_ids"][order],
        attention_mask=batch["attention_mask"][order],
        seed=[seeds[row] for row in order],
        **SAMPLE,
    ).sequences[:, 30:]
    assert torch.equal(together[order], shuffled)
    for row, seed in enumerate(seeds):
        shown = batch["attention_mask"][row].bool()
        alone = hf.generate(model, batch["input_ids"][row : row + 1, shown], **SAMPLE, seed=seed)
        assert torch.equal(alone.sequences[0, int(shown.sum()) :], together[row])


def test_seeds_come_from_torch_unless_given(model: Any) -> None:
    inputs = repetitive_batch(2)

    def sampled(**options: Any) -> torch.Tensor:
        return hf.generate(model, **inputs, **SAMPLE, **options).sequences

    torch.manual_seed(3)
    first, second = sampled(), sampled()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, sampled())
    generator = torch.Generator().manual_seed(9)
    drawn = sampled(generator=generator)
    assert torch.equal(drawn, sampled(generator=torch.Generator().manual_seed(9)))


def test_of_tokens_that_tie_at_the_edge_as_many_stay_as_transformers_keeps() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    prompt = repetitive_batch(1)["input_ids"].repeat(4, 1)
    options = {**SAMPLE, "top_p": 0.5, "seed": 3}
    output = hf.generate(model, prompt, **options, logprobs=True)
    kept = int((TopPLogitsWarper(0.5)(prompt, torch.zeros(1, 97))[0] > -torch.inf).sum())
    # All that stay are as probable.
    for logprobs in output.logprobs:
        torch.testing.assert_close(logprobs.exp() * kept, torch.ones(NEW))
    assert len(set(output.sequences[:, 30:].flatten().tolist())) <= kept


def test_copies_of_a_prompt_are_sampled_independently(model: Any) -> None:
    inputs = repetitive_batch(2)
    output = hf.generate(model, **inputs, **SAMPLE, seed=1, num_return_sequences=3)
    assert output.sequences.shape == (6, 30 + NEW)
    assert len({tuple(row.tolist()) for row in output.sequences}) == 6
    assert torch.equal(output.sequences[::3, :30], inputs["input_ids"])
    assert len(output.row_stats) == 6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.8},
        {
            "sequence_bias": {(24,): 1.5},
            "repetition_penalty": 1.2,
            "bad_words_ids": [[57], [24, 52]],
        },
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_samples_have_the_models_distribution(model: Any, options: dict[str, Any]) -> None:
    prompt = repetitive_batch(1, longest=PROMPT)["input_ids"]
    greedy = model.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=None)
    output = hf.generate(
        model,
        prompt,
        **{**SAMPLE, "max_new_tokens": 8, **options},
        seed=77,
        num_return_sequences=3000,
        prediction=greedy[0, PROMPT:],
        drafter=Generous(),
    )
    # Few in a process that has yet to take its steps without drafts: 198 were seen.
    assert output.stats.accepted > 100
    assert output.stats.drafted - output.stats.accepted > 100
    processors: list[Any] = []
    if "repetition_penalty" in options:
        processors = [
            SequenceBiasLogitsProcessor(options["sequence_bias"]),
            RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]),
            NoBadWordsLogitsProcessor(options["bad_words_ids"]),
        ]
    if "temperature" in options:
        processors.append(TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        processors += TopKLogitsWarper(options["top_k"]), TopPLogitsWarper(options["top_p"])
    assert_distribution(model, output.sequences, prompt=PROMPT, processors=processors)
