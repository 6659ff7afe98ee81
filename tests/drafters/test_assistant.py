"""A small model drafts: the target's tokens and distribution, the cache, bad input."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from assistants import bent, constant, shortened
from fastdraft import DraftConfig, DraftStats, Engine, hf
from fastdraft.drafters import AssistantModel, Staged
from fastdraft.errors import InvalidValueError
from fastdraft.hf.draft_models.drafter import ModelDrafter
from hf_models import VOCABULARY, assert_decodes, repetitive_batch, tiny_model
from watches import counted_forwards

NEW = 32
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}


def _most_probable(model: Any, text: list[int]) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([text])).logits[0, -1].argmax())


def _speculated(target: Any, small: Any, text: list[int], gamma: int, new: int) -> DraftStats:
    """Greedy speculative decoding without any cache: the counts to expect."""
    stats = DraftStats(steps=1, emitted=1)  # the prompt's own forward drafts nothing
    text = [*text, _most_probable(target, text)]
    while stats.emitted < new:
        draft: list[int] = []
        while len(draft) < min(gamma, new - stats.emitted - 1):
            draft.append(_most_probable(small, text + draft))
        accepted = 0
        token = _most_probable(target, text)
        while accepted < len(draft) and draft[accepted] == token:
            accepted += 1
            token = _most_probable(target, text + draft[:accepted])
        text = [*text, *draft[:accepted], token]
        stats += DraftStats(
            steps=1,
            emitted=accepted + 1,
            drafts=bool(draft),
            drafted=len(draft),
            accepted=accepted,
        )
    return stats


@pytest.mark.parametrize(
    ("family", "rows"), [("llama", 1), ("qwen2", 3), ("gemma3", 3), ("gpt2", 3), ("opt", 1)]
)
def test_greedy_tokens_are_the_targets(family: str, rows: int) -> None:
    target = tiny_model(family)
    drafter = constant(bent(target, by=0.05))
    output = assert_decodes(target, repetitive_batch(rows), drafter, **GREEDY).output
    assert 0 < output.stats.accepted < output.stats.drafted
    assert output.stats.steps < output.stats.emitted


@pytest.mark.parametrize("gamma", [1, 9])
def test_what_is_drafted_is_what_the_model_says_without_a_cache(
    model: Any, small: Any, gamma: int
) -> None:
    """Rows of a batch accept different numbers of tokens, and none disturbs another's cache."""
    inputs = repetitive_batch(3)
    output = hf.generate(model, **inputs, **GREEDY, drafter=constant(small, gamma))
    for row, shown in enumerate(inputs["attention_mask"].bool()):
        text = inputs["input_ids"][row, shown].tolist()
        assert output.row_stats[row] == _speculated(model, small, text, gamma, NEW)


def test_rows_that_end_early_leave_the_assistants_batch(model: Any, small: Any) -> None:
    options = {**GREEDY, "eos_token_id": list(range(3, 20)), "pad_token_id": 0}
    widths: list[int] = []
    handle = small.register_forward_pre_hook(
        lambda _, __, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    assert_decodes(model, repetitive_batch(4), constant(small), exact=True, **options)
    handle.remove()
    assert widths[0] == 4 and widths[-1] < 4
    assert widths == sorted(widths, reverse=True)


def test_each_token_is_given_to_the_assistant_once(model: Any) -> None:
    """A perfect assistant lacks the last draft token and the bonus token after every step."""
    fed: list[int] = []
    same = copy.deepcopy(model)
    same.register_forward_pre_hook(
        lambda _, __, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    prompt = repetitive_batch(1)["input_ids"]
    options = {**GREEDY, "max_new_tokens": 1 + 5 * 5}
    output = hf.generate(model, prompt, **options, drafter=constant(same, 4))
    assert fed == [31, 1, 1, 1] + [2, 1, 1, 1] * 4
    assert output.stats.accepted == output.stats.drafted == 20
    [stats] = output.assistants
    assert (stats.alpha, stats.gamma, stats.drafts) == (1.0, 4.0, 5)
    assert stats.judged == stats.accepted == (5, 5, 5, 5)
    assert stats.c == pytest.approx(stats.seconds / stats.target_seconds)


def _draft_lengths(target: Any, assistant: AssistantModel, new: int) -> list[int]:
    """How many forwards of the assistant lie between two of the target."""
    lengths: list[int] = []
    target = copy.deepcopy(target)
    target.register_forward_pre_hook(lambda *_: lengths.append(0))

    def count(*_: Any) -> None:
        lengths[-1] += 1

    handle = assistant.model.register_forward_pre_hook(count)
    hf.generate(
        target,
        repetitive_batch(1)["input_ids"],
        **{**GREEDY, "max_new_tokens": new},
        drafter=assistant,
    )
    handle.remove()
    return lengths[:-1]


def test_the_heuristic_schedule_is_that_of_assisted_generation(model: Any) -> None:
    perfect = AssistantModel(copy.deepcopy(model), schedule="heuristic", lookup=None)
    # After the prompt 5 tokens, and 2 more each time that all are accepted.
    assert _draft_lengths(model, perfect, 1 + 6 + 8 + 10 + 3)[:3] == [5, 7, 9]
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.lm_head.weight.neg_()
    useless = AssistantModel(wrong, schedule="heuristic", num_tokens=4, lookup=None)
    assert _draft_lengths(model, useless, 12)[:7] == [4, 3, 2, 1, 1, 1, 1]


class _Plus(LogitsProcessor):
    """Forbids a token that depends on the last one and the length, so drafts must not lag."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, text in enumerate(input_ids.tolist()):
            scores[row, (text[-1] + len(text)) % VOCABULARY] = -torch.inf
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "bad_words_ids": [[token] for token in range(40)]},
        {"logits_processor": LogitsProcessorList([_Plus()])},
    ],
    ids="-".join,
)
def test_processors_shape_the_drafts_too(model: Any, options: dict[str, Any]) -> None:
    same = constant(copy.deepcopy(model))
    found = assert_decodes(model, repetitive_batch(3), same, exact=True, **GREEDY, **options)
    assert found.output.stats.accepted == found.output.stats.drafted > 0


@pytest.mark.filterwarnings("ignore:the assistant has")  # more parameters, by its adapters
@pytest.mark.parametrize("sample", [False, True])
def test_a_draft_model_with_adapters_drafts_for_a_batch(model: Any, sample: bool) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    small = peft.get_peft_model(copy.deepcopy(model), config).eval()
    options = {**GREEDY, "do_sample": sample, "top_k": 0}
    inputs, seed = repetitive_batch(3), 3 if sample else None
    output = hf.generate(model, **inputs, **options, drafter=constant(small), seed=seed)
    assert output.stats.accepted == output.stats.drafted > 0
    if not sample:
        assert torch.equal(output.sequences, model.generate(**inputs, **options))


@pytest.mark.parametrize("lookup", [None, DraftConfig(lookahead=7)])
@pytest.mark.parametrize("schedule", ["adaptive", "heuristic", "constant"])
def test_assistants_are_shared_by_copies_and_pickled(
    model: Any, small: Any, schedule: Any, lookup: DraftConfig | None
) -> None:
    """Its learned values go along; the engine of another process is a new one."""
    assistant = AssistantModel(small, schedule=schedule, num_tokens=6, lookup=lookup)
    staged = Staged([DraftConfig(), assistant])
    for original in (assistant, staged):
        assert copy.copy(original) is copy.deepcopy([original])[0] is original
    options, inputs = {**GREEDY, "max_new_tokens": 12}, repetitive_batch(2)
    hf.generate(model, **inputs, **options, drafter=assistant)
    sent = pickle.loads(pickle.dumps(assistant))
    assert sent.schedule.num_tokens == 6
    assert sent.schedule.seconds(2) == assistant.schedule.seconds(2)
    assert sent.schedule.estimator.__dict__.keys() == assistant.schedule.estimator.__dict__.keys()
    if lookup is None:
        assert sent.lookup is None
    else:
        assert sent.lookup.config == lookup
        learned = dataclasses.replace(assistant.lookup.calibration(), reliability=())
        assert sent.lookup.calibration() == learned
    expected = hf.generate(model, **inputs, **options, drafter=assistant).sequences
    for drafter in (sent, pickle.loads(pickle.dumps(staged))):
        output = hf.generate(model, **inputs, **options, drafter=drafter)
        assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize(
    ("schedule", "lookup"),
    [
        ("adaptive", Engine()),
        ("adaptive", DraftConfig(tree_budget=16)),
        ("heuristic", DraftConfig()),
        ("constant", DraftConfig(tree_budget=16)),
    ],
)
def test_together_with_lookups(model: Any, small: Any, schedule: Any, lookup: Any) -> None:
    inputs = repetitive_batch(3)
    expected = model.generate(**inputs, **GREEDY)
    assistant = AssistantModel(small, schedule=schedule, lookup=lookup)
    for prediction in (None, [row[30:].tolist() for row in expected]):
        output = hf.generate(model, **inputs, **GREEDY, drafter=assistant, prediction=prediction)
        assert torch.equal(expected, output.sequences)
    assert output.stats.accepted_prediction_tokens > 0
    assert output.stats.emitted == 3 * NEW


def test_what_it_has_to_read_counts(
    model: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt makes its first draft dear, the more so the fewer drafts are to come."""
    times: list[float] = []

    def refuse(*_: Any, time: float, **__: Any) -> np.ndarray:
        times.append(time)
        return np.array([False])

    monkeypatch.setattr(Engine, "wants", refuse)
    cost = np.linspace(1.0, 2.0, 17)

    def asked(prompt: int, left: int, steps: int = 1) -> float:
        drafter = ModelDrafter(
            AssistantModel(small), target=model, tokenizer=None, rows=1, seeds=None
        )
        request = drafter.add_request([1] * prompt)
        for _ in range(steps):
            drafter.propose_batch([request], limits=np.array([left], np.int32), cost=cost)
        return times[-1]

    assert asked(200, 40) > 1.2 * asked(1, 40)
    assert asked(200, 4) > 1.2 * asked(200, 40)
    # It has drafted in none of ten steps, so it will draft in few of the others.
    assert asked(200, 40, steps=10) > 1.2 * asked(200, 40)
    assert asked(1, 40) == asked(1, 4) == asked(1, 40, steps=10)


def test_it_learns_from_one_generation_to_the_next(model: Any, small: Any) -> None:
    assistant = constant(small)

    def probability() -> float:
        estimator = assistant.schedule.estimator
        return float(estimator.extended(estimator.begin("new"), 0.5).sum())

    before = probability()
    hf.generate(model, **repetitive_batch(3), **GREEDY, drafter=assistant)
    assert probability() != before


def test_one_assistant_in_several_threads(model: Any, small: Any) -> None:
    inputs = repetitive_batch(2)
    expected = model.generate(**inputs, **GREEDY)
    assistant = AssistantModel(small)
    outputs: list[torch.Tensor] = []

    def generate() -> None:
        outputs.append(hf.generate(model, **inputs, **GREEDY, drafter=assistant).sequences)

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 3
    assert all(torch.equal(expected, output) for output in outputs)


def test_an_assistants_positions_end_before_the_targets(model: Any) -> None:
    config = copy.deepcopy(tiny_model("gpt2").config)
    config.n_positions, config.n_layer = 40, 1
    small = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = assert_decodes(model, repetitive_batch(3), constant(small), exact=True, **GREEDY)
    assert found.output.stats.drafted > 0


class _Failing(torch.nn.Module):
    """Raises as a GPU without memory does, from its `after`-th forward on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_an_assistant_that_fails_is_left_out(model: Any, after: int, sample: bool) -> None:
    small = bent(model)
    small.register_forward_pre_hook(_Failing(after))
    inputs = repetitive_batch(3)
    options = {**GREEDY, "do_sample": sample}
    assistant = constant(small, lookup=DraftConfig())
    with pytest.warns(RuntimeWarning, match=r"assistant failed .*out of memory"):
        output = hf.generate(model, **inputs, **options, drafter=assistant)
    assert output.stats.emitted == 3 * NEW
    if not sample:
        assert torch.equal(model.generate(**inputs, **options), output.sequences)


def _tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


_WORDS = ["<unk>", *(f"w{index}" for index in range(1, VOCABULARY))]


def test_another_tokenizer_is_refused_with_the_first_difference(model: Any, small: Any) -> None:
    others = [*_WORDS[:40], *reversed(_WORDS[40:])]
    assistant = constant(small, tokenizer=_tokenizer(others))
    with pytest.raises(InvalidValueError, match="token 40 is 'w96', and 'w40' in the target's"):
        hf.generate(
            model, **repetitive_batch(1), **GREEDY, drafter=assistant, tokenizer=_tokenizer(_WORDS)
        )
    assistant = constant(small, tokenizer=_tokenizer(_WORDS))
    output = hf.generate(
        model, **repetitive_batch(1), **GREEDY, drafter=assistant, tokenizer=_tokenizer(_WORDS)
    )
    assert output.stats.accepted > 0


def _of_vocabulary(model: Any, size: int) -> Any:
    resized = copy.deepcopy(model)
    with torch.random.fork_rng():
        resized.resize_token_embeddings(size, mean_resizing=False)
    return resized


@pytest.mark.parametrize("size", [90, 104])
@pytest.mark.parametrize("sample", [False, True])
def test_padded_vocabularies_are_taken_where_a_tokenizer_says_so(
    model: Any, size: int, sample: bool
) -> None:
    """The further ids stand for nothing, so neither model is to say them."""
    inputs = repetitive_batch(3)
    inputs["input_ids"] %= 80
    options = {**GREEDY, "do_sample": sample, "suppress_tokens": list(range(80, VOCABULARY))}
    small = _of_vocabulary(shortened(model), size)
    with pytest.raises(InvalidValueError, match=rf"vocabulary of 97 tokens, got {size}"):
        hf.generate(model, **inputs, **options, drafter=constant(small))
    assistant = constant(small, tokenizer=_tokenizer(_WORDS[:80]))
    output = hf.generate(model, **inputs, **options, drafter=assistant)
    assert output.stats.accepted > 0
    if not sample:
        assert torch.equal(model.generate(**inputs, **options), output.sequences)


def test_a_bigger_assistant_is_warned_of(model: Any) -> None:
    with pytest.warns(UserWarning, match=r"the assistant has 1\.\d times .* takes \d+\.\d\d of a"):
        hf.generate(shortened(model), **repetitive_batch(1), **GREEDY, drafter=constant(model))


def test_texts_that_the_assistant_cannot_be_given_are_not_drafted(model: Any) -> None:
    small = _of_vocabulary(bent(model), 60)
    assistant = constant(small, tokenizer=_tokenizer(_WORDS[:60]))
    inputs = repetitive_batch(2)
    inputs["input_ids"][0] = inputs["input_ids"][0] % 50
    output = assert_decodes(model, inputs, assistant, exact=True, **GREEDY).output
    assert output.row_stats[0].drafted > 0
    assert output.row_stats[1].drafted == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"schedule": "clever"}, "'adaptive', 'heuristic', 'constant', got 'clever'"),
        ({"num_tokens": 0}, "num_tokens must be an integer from 1 to 64, got 0"),
        ({"num_tokens": 2.5}, "num_tokens must be an integer from 1 to 64, got 2.5"),
        ({"lookup": 3}, "lookup must be a DraftConfig, an Engine or None, got 3"),
        ({"lookup": DraftConfig.prompt_lookup()}, "lookup must be of the default drafter"),
        ({"lookup": Engine(DraftConfig.ngram())}, "lookup must be of the default drafter"),
    ],
)
def test_bad_options_are_named(small: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        AssistantModel(small, **options)


def test_models_that_cannot_draft_are_refused(model: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"must be a generating model .* got str"):
        AssistantModel("gpt2")
    mamba = transformers.MambaConfig(
        vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=1
    )
    drafter = constant(transformers.AutoModelForCausalLM.from_config(mamba))
    with pytest.raises(InvalidValueError, match=r"assistant must keep its .* MambaForCausalLM"):
        hf.generate(model, **repetitive_batch(1), **GREEDY, drafter=drafter)
    with pytest.raises(InvalidValueError, match=r"stages must hold at least one model, got \[\]"):
        Staged([])


@pytest.mark.parametrize(
    ("moved", "named"),
    [
        ({"dtype": torch.bfloat16}, "target's dtype, torch.float32, got torch.bfloat16"),
        ({"device": "meta"}, "target's device, cpu, got meta"),
    ],
    ids=["dtype", "device"],
)
def test_assistants_elsewhere_are_refused_before_the_model_is_run(
    model: Any, moved: dict[str, Any], named: str
) -> None:
    assistant = constant(copy.deepcopy(model).to(**moved))
    with counted_forwards(model) as forwards, pytest.raises(InvalidValueError, match=named):
        hf.generate(model, **repetitive_batch(1), **GREEDY, drafter=assistant)
    assert not forwards


def test_a_prompt_of_embeddings_is_refused(model: Any, small: Any) -> None:
    inputs = repetitive_batch(1)
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    with pytest.raises(InvalidValueError, match="prompt as input_ids, got inputs_embeds"):
        hf.generate(model, **embedded, **GREEDY, drafter=constant(small))
