"""Drafts that are trees are verified in one forward, and the output stays the model's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache

from fastdraft import DraftConfig, Engine, hf
from fastdraft.errors import InvalidValueError
from fastdraft.hf.drafts import StepDrafts
from fastdraft.hf.interface import CACHE
from fastdraft.step_latency import StepLatency
from hf_models import (
    VOCABULARY,
    Forester,
    Generous,
    TreeBatch,
    assert_decodes,
    drawn,
    repetitive_batch,
    tiny_model,
)

pytestmark = pytest.mark.slow

NEW = 48


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_cache_that_is_handed_over_holds_the_path(family: str) -> None:
    model = tiny_model(family)
    ids = repetitive_batch(1, longest=8)["input_ids"]
    options = {"do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options, max_new_tokens=NEW)
    for new in range(NEW - 5, NEW):
        forester = Forester([expected[0, 8:].tolist()], seed=new)
        cache = DynamicCache(config=model.config)
        first = hf.generate(
            model, ids, **options, max_new_tokens=new, **{CACHE: cache}, drafter=forester
        )
        plain = DynamicCache(config=model.config)
        with torch.no_grad():
            model(first.sequences[:, :-1], **{CACHE: plain})
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


class _Planter(Generous):
    """The engine's own trees, whatever they cost."""

    def __init__(self) -> None:
        super().__init__(DraftConfig(tree_budget=32))
        self.trees = 0

    def propose_batch(self, requests: Any, **options: Any) -> Any:
        batch = super().propose_batch(requests, **options)
        self.trees += not StepDrafts.of(batch).are_chains
        return batch


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_trees_of_the_engine(family: str) -> None:
    model = tiny_model(family)
    planter = _Planter()
    for rows, drafter in ((1, planter), (3, planter), (3, DraftConfig(tree_budget=32))):
        options = {"max_new_tokens": NEW, "eos_token_id": None}
        ours = {"drafter": drafter}
        output = assert_decodes(model, repetitive_batch(rows), ours=ours, **options).output
        assert output.stats.accepted == output.stats.emitted - output.stats.steps
    assert planter.trees > 0


def _bare(kind: str) -> Any:
    """Models whose attention takes no tree: for each of the reasons that there are."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4}
    if kind == "chunks":
        config = transformers.Llama4TextConfig(
            **sizes,
            num_hidden_layers=2,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=32,
            intermediate_size_mlp=32,
            num_local_experts=2,
            attention_chunk_size=8,
        )
    elif kind == "columns":
        config = transformers.GPTNeoConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=11,
            max_position_embeddings=256,
        )
    elif kind == "alibi":
        config = transformers.FalconConfig(**sizes, num_hidden_layers=2, alibi=True)
    else:
        config = transformers.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4
        )
    return drawn(transformers.AutoModelForCausalLM.from_config, config)


@pytest.mark.parametrize("kind", ["chunks", "columns", "alibi", "no positions"])
def test_models_that_take_no_trees_verify_chains(kind: str) -> None:
    model = _bare(kind)
    options = {"max_new_tokens": NEW, "eos_token_id": None}
    assert assert_decodes(model, repetitive_batch(1), "trees", **options).drafter.cut > 0


class _Crooked(Forester):
    """Gives each draft token a parent that does not stand before it."""

    def propose_batch(self, *arguments: Any, **keywords: Any) -> Any:
        batch = super().propose_batch(*arguments, **keywords)
        return replace(batch, parents=np.arange(len(batch.parents), dtype=np.int32))


class _Twins(Forester):
    """Drafts the next true token twice."""

    def _tree(self, truth: Any, most: int) -> list[tuple[int, int]]:
        return [(token, -1) for token in (*truth[:1], *truth[:1])][:most]


@pytest.mark.parametrize("kind", ["llama", "alibi"])
def test_parents_behind_their_children_are_refused(kind: str, llama: Any) -> None:
    drafter = _Crooked([range(3, 60)])
    model = llama if kind == "llama" else _bare(kind)
    with pytest.raises(InvalidValueError, match=r"their children, from -1 to -1 .* got 0"):
        hf.generate(model, **repetitive_batch(1), max_new_tokens=NEW, drafter=drafter)
    assert drafter.cancelled == 1


def test_of_equal_siblings_the_first_counts(llama: Any) -> None:
    inputs = repetitive_batch(1)
    plain = llama.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    drafter = _Twins([plain[0, inputs["input_ids"].shape[1] :].tolist()])
    output = hf.generate(llama, **inputs, max_new_tokens=NEW, do_sample=False, drafter=drafter)
    assert output.sequences.tolist() == plain.tolist()
    assert output.stats.accepted == output.stats.drafts


def _batch(parents: list[list[int]], probabilities: list[float]) -> TreeBatch:
    count = len(probabilities)
    return TreeBatch(
        token_ids=np.arange(10, 10 + count, dtype=np.int32),
        parents=np.array([parent for row in parents for parent in row], np.int32),
        probabilities=np.array(probabilities, np.float32),
        offsets=np.cumsum([0, *map(len, parents)], dtype=np.int32),
    )


def test_the_best_chain_goes_on_with_the_most_probable_child() -> None:
    # The second of two children, and the first of its own; then nothing; then a chain as it is.
    batch = _batch([[-1, -1, 1, 1, 0], [], [-1, 0]], [0.5, 0.9, 0.8, 0.4, 0.5, 0.2, 0.1])
    chains = StepDrafts.of(batch).best_chains()
    assert chains.token_ids.tolist() == [11, 12, 15, 16]
    assert chains.offsets.tolist() == [0, 2, 2, 4]
    assert chains.are_chains
    assert chains.token_ids.dtype == chains.offsets.dtype == np.int32


class _Flat(StepLatency):
    """A device on which a draft token costs nothing that can be measured."""

    def best_widths(self, rows: int, widest: int = 33) -> tuple[Any, Any]:
        return 1 + 1e-4 * np.arange(widest), np.arange(1, widest + 1)

    def wants_plain_step(self, rows: int) -> bool:
        return False


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 5, "temperature": 0.7}], ids=str
)
def test_what_logits_expect_is_drafted_where_drafts_are_cheap(
    rows: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is the same; it takes fewer steps than with the likeliest tokens left out."""
    model = tiny_model("llama")
    StepLatency._of_model[model] = {("cpu", ()): _Flat("cpu")}
    inputs = repetitive_batch(rows)
    common = {"do_sample": False, "max_new_tokens": 64, "eos_token_id": None, **options}

    def decode(engine: Any) -> Any:
        return hf.generate(model, **inputs, **common, drafter=engine)

    chains = decode(Engine())
    engine = Engine(DraftConfig(tree_budget=32))
    output = decode(engine)
    assert output.sequences.tolist() == chains.sequences.tolist()
    assert engine.offer_kinds == ("successors",)
    monkeypatch.setattr("fastdraft.hf.loop._CHEAP", -1)
    without = Engine(DraftConfig(tree_budget=32))
    plain = decode(without)
    assert plain.sequences.tolist() == chains.sequences.tolist()
    assert without.offer_kinds == ()
    assert output.stats.accepted > plain.stats.accepted
