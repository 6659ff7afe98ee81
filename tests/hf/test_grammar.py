"""Grammars in a generation: the output is transformers' own, and forced text is drafted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from fastdraft import DraftConfig, Source, hf
from fastdraft.errors import InvalidValueError
from grammar_cases import (
    LIBRARIES,
    VOCABULARY,
    accept,
    allowed,
    byte_tokenizer,
    grammar,
    matcher,
    object_of,
    xgrammar,
)
from hf_models import Forester, Generous, Silent, repetitive_batch, tiny_model

NEW = 48
_SCHEMA = object_of(
    city={"enum": ["Oslo", "Paris", "Prague"]},
    temperature={"type": "integer", "minimum": 0, "maximum": 99},
    unit={"enum": ["celsius", "fahrenheit"]},
)
_OTHER = object_of(country={"type": "string", "maxLength": 6}, confirmed={"type": "boolean"})


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama", vocab_size=VOCABULARY)


def _options(*processors: Any, **more: Any) -> dict[str, Any]:
    usual = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    return {**usual, "logits_processor": LogitsProcessorList(processors), **more}


def _of(library: str, *schemas: Any) -> hf.Grammar:
    return hf.Grammar([grammar(library, each) for each in schemas], byte_tokenizer())


def _answers(output: torch.Tensor, inputs: Any) -> list[str]:
    prompt = inputs["input_ids"].shape[1]
    found: list[str] = byte_tokenizer().batch_decode(output[:, prompt:], skip_special_tokens=True)
    return found


class _Reference(LogitsProcessor):
    """The same, by a new matcher for each position."""

    def __init__(self, library: str, schemas: list[Any], prompt: int) -> None:
        self._library, self._schemas, self._prompt = library, schemas, prompt

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for text, schema, line in zip(input_ids.tolist(), self._schemas, scores, strict=True):
            made = matcher(self._library, schema)
            if 2 in text[self._prompt :]:
                continue
            for token in text[self._prompt :]:
                accept(made, token)
            line[~allowed(made)] = -torch.inf
        return scores


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("tree_budget", [None, 12])
def test_output_is_that_of_plain_decoding(
    llama: Any, library: str, tree_budget: int | None
) -> None:
    inputs = repetitive_batch(3)
    schemas = [_SCHEMA, _OTHER, _SCHEMA]
    reference = _Reference(library, schemas, inputs["input_ids"].shape[1])
    expected = llama.generate(**inputs, **_options(reference))
    drafter = DraftConfig(tree_budget=tree_budget, token_cost=0.0)
    output = hf.generate(llama, **inputs, **_options(_of(library, *schemas)), drafter=drafter)
    assert output.sequences.tolist() == expected.tolist()
    answers = [json.loads(each, strict=False) for each in _answers(expected, inputs)]
    assert list(map(len, answers)) == [3, 2, 3]


@pytest.mark.parametrize("library", LIBRARIES)
def test_trees_of_allowed_and_forbidden_tokens(llama: Any, library: str) -> None:
    inputs = repetitive_batch(2)
    schemas = [_SCHEMA, _OTHER]
    expected = llama.generate(**inputs, **_options(_of(library, *schemas)))
    truths = [row[inputs["input_ids"].shape[1] :].tolist() for row in expected]
    forester = Forester(truths, seed=3)
    processor = _of(library, *schemas)
    for _ in range(2):  # it begins anew for each generation
        output = hf.generate(llama, **inputs, **_options(processor), drafter=forester)
        assert output.sequences.tolist() == expected.tolist()
    assert sum(forester.accepted) > 10


def test_xgrammars_own_processor_is_taken(llama: Any) -> None:
    inputs = repetitive_batch(2)

    def processor() -> Any:
        return xgrammar.contrib.hf.LogitsProcessor(grammar("xgrammar", _SCHEMA))

    expected = llama.generate(**inputs, **_options(processor()))
    steps = []
    for tokenizer in (None, byte_tokenizer()):
        ours = {"tokenizer": tokenizer, "drafter": DraftConfig(token_cost=0.0)}
        output = hf.generate(llama, **inputs, **_options(processor()), **ours)
        assert output.sequences.tolist() == expected.tolist()
        steps.append(output.stats.steps)
    assert steps[1] < steps[0]  # with the tokenizer, forced text is drafted


@pytest.mark.parametrize("library", LIBRARIES)
def test_forced_text_takes_fewer_steps(llama: Any, library: str) -> None:
    """The property names take one step each, with a drafter that finds nothing by itself."""
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    names = {f"property_{number}": {"type": "boolean"} for number in range(4)}
    options = _options(_of(library, object_of(**names)), max_new_tokens=120)
    plain, drafted = (
        hf.generate(llama, **inputs, **options, drafter=drafter)
        for drafter in (Silent(), DraftConfig())
    )
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.stats.steps < 0.5 * plain.stats.steps
    assert drafted.stats.accepted_by_source[Source.OFFER] > 20


@pytest.mark.parametrize("library", LIBRARIES)
def test_samples_do_not_depend_on_drafts(llama: Any, library: str) -> None:
    inputs = repetitive_batch(4)
    options = _options(_of(library, _SCHEMA), do_sample=True, top_p=0.9, seed=[7, 8, 9, 10])
    outputs = [
        hf.generate(llama, **inputs, **options, drafter=drafter).sequences
        for drafter in (Silent(), Generous())
    ]
    assert outputs[0].tolist() == outputs[1].tolist()
    answers = [json.loads(each) for each in _answers(outputs[0], inputs)]
    assert len({json.dumps(each) for each in answers}) > 1
    assert all(each["city"] in _SCHEMA["properties"]["city"]["enum"] for each in answers)


def test_text_behind_the_end_is_free(llama: Any) -> None:
    """A generation that does not stop at the end token goes on without the grammar."""
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    for library in LIBRARIES:
        output = hf.generate(llama, **inputs, **_options(_of(library, _SCHEMA), eos_token_id=1))
        answer, _, rest = byte_tokenizer().decode(output.sequences[0, 3:]).partition("<eos>")
        assert json.loads(answer)
        assert rest


def test_logits_wider_than_the_grammar() -> None:
    """Models pad their vocabulary: what the grammar does not know is not allowed."""
    model = tiny_model("llama", vocab_size=VOCABULARY + 40)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    for library in LIBRARIES:
        output = hf.generate(model, **inputs, **_options(_of(library, _SCHEMA)))
        assert output.sequences.max() < VOCABULARY
        assert len(json.loads(_answers(output.sequences, inputs)[0])) == 3


def test_wrong_grammars_are_refused(llama: Any) -> None:
    with pytest.raises(InvalidValueError, match="grammar must be a CompiledGrammar of xgrammar"):
        hf.Grammar({"type": "object"})
    with pytest.raises(InvalidValueError, match="at least one"):
        hf.Grammar([])
    with pytest.raises(InvalidValueError, match="one for each of 3, got 2"):
        hf.generate(llama, **repetitive_batch(3), **_options(_of("xgrammar", _SCHEMA, _SCHEMA)))
