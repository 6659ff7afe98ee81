"""The interface of decoding besides tokens: streamers, stops, outputs, caches, refusals."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from fastdraft import Datastore, DraftConfig, DraftStats, Engine, Source, hf
from fastdraft.drafters import AssistantModel
from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.hf.interface import CACHE
from fastdraft.hf.plan import _engine as engine
from fastdraft.hf.plan import _engines
from hf_models import (
    EOS,
    PAD,
    VOCABULARY,
    Generous,
    TreeBatch,
    assert_decodes,
    drafting,
    edited,
    plain_tokens,
    repetitive_batch,
    tiny_model,
)
from tiny_tokenizer import tiny_tokenizer
from watches import Recorder, counted_forwards

pytestmark = pytest.mark.slow

NEW = 40


def _prediction(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    columns = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs, do_sample=False, max_new_tokens=NEW, eos_token_id=None, **options
    )
    return [edited(row[columns:]) for row in output]


@pytest.mark.parametrize(("drafts", "inside"), [("predicted", True), ("trees", False)])
def test_streamers_get_the_calls_of_plain_decoding(model: Any, inside: bool, drafts: str) -> None:
    inputs = repetitive_batch(1)
    options = {"do_sample": False, "max_new_tokens": NEW}
    expected = Recorder()
    said = model.generate(**inputs, **options, streamer=expected)[:, 30:]
    more = drafting(drafts, said)
    with counted_forwards(model) as forwards:
        more["streamer"] = actual = Recorder(forwards)
        if inside:
            model.generate(**inputs, **options, custom_generate=hf.speculate(**more))
        else:
            hf.generate(model, **inputs, **options, **more)
    assert actual.calls == expected.calls
    assert actual.forwards_at[1] == 1
    assert actual.forwards_at == sorted(actual.forwards_at)
    assert len(set(actual.forwards_at)) == len(forwards) + 1


def test_as_the_models_method_it_is_the_method() -> None:
    model = tiny_model("llama")
    ids, mask = repetitive_batch(3).values()
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False}
    config = transformers.GenerationConfig(max_new_tokens=NEW, pad_token_id=PAD)
    expected = model.generate(ids, config, **options)
    model.generate = functools.partial(hf.generate, model, drafter=Generous())
    sequences = model.generate(ids, config, **options)
    assert torch.equal(sequences, expected)
    assert torch.equal(sequences[:, ids.shape[1] :], expected[:, ids.shape[1] :])
    output = model.generate(
        ids, config, LogitsProcessorList(), **options, return_dict_in_generate=True
    )
    assert isinstance(output, hf.SpeculativeOutput)
    assert torch.equal(output.sequences, expected)
    with pytest.raises(TypeError, match="multiple values for argument 'generation_config'"):
        model.generate(ids, config, generation_config=config)
    with pytest.raises(InvalidValueError, match="choose what drafts with drafter="):
        model.generate(ids, config, assistant_model=model)
    del model.generate
    assert isinstance(hf.generate(model, ids, config, **options), hf.SpeculativeOutput)


def _healing_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Tokens of one letter, which those of two letters extend."""
    letters = "abcdefghij"
    words = ["<pad>", "<bos>", "<eos>", *letters, *(a + b for a in letters for b in letters)]
    vocabulary = {word: index for index, word in enumerate(words[:VOCABULARY])}
    core = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    core.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


@pytest.mark.parametrize(
    ("where", "rows"), [("keyword", 1), ("keyword", 2), ("config", 2), ("method", 1)]
)
def test_token_healing(where: str, rows: int) -> None:
    model, tokenizer = tiny_model("llama"), _healing_tokenizer()
    prompts = ["abcdefabcdefabcda", "bcdacbdabcdabcdab"][:rows]
    ids = tokenizer(prompts, return_tensors="pt").input_ids
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "tokenizer": tokenizer}
    options["token_healing"] = True
    if where == "config":
        del options["token_healing"]
        options["generation_config"] = transformers.GenerationConfig(token_healing=True)
    said = [Recorder() if rows == 1 else None for _ in range(2)]
    expected = model.generate(ids, **options, streamer=said[0])
    assert not torch.equal(expected[:, : ids.shape[1]], ids)
    decode = functools.partial(hf.generate, model)
    if where == "method":
        decode = model.generate = decode
    output = decode(ids, **options, streamer=said[1])
    sequences = output if where == "method" else output.sequences
    assert torch.equal(sequences, expected)
    assert rows > 1 or said[0].calls == said[1].calls
    # The model's engine learned from it, and the model is as it was.
    assert model in _engines
    assert "heal_tokens" not in vars(model)


@pytest.mark.parametrize(("rows", "where"), [(1, "keyword"), (3, "config")])
def test_stop_strings(model: Any, rows: int, where: str) -> None:
    tokenizer = tiny_tokenizer()
    inputs = repetitive_batch(rows)
    ours = {"drafter": Generous(), "prediction": _prediction(model, inputs)}
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    words = tokenizer.convert_ids_to_tokens(plain[0, 42:44].tolist())
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "stop_strings": [words[0][1] + words[1][0], "zz"],
    }
    if where == "config":
        options = {"generation_config": transformers.GenerationConfig(**options)}
    options["tokenizer"] = tokenizer
    expected = model.generate(**inputs, **options)
    output = hf.generate(model, **inputs, **options, **ours)
    assert torch.equal(output.sequences, expected)
    assert int((expected[0] != PAD).sum()) < 30 + NEW
    assert output.stats.accepted > 0


class _Sum(StoppingCriteria):
    """Ends a row when its tokens sum to a multiple, which differs from row to row."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.sum(-1) % (29 + torch.arange(len(input_ids))) == 0


@pytest.mark.parametrize("drafts", ["predicted", "trees"])
def test_stops_in_the_middle_of_a_draft(model: Any, drafts: str) -> None:
    inputs = repetitive_batch(3)
    plain = plain_tokens(model, inputs, max_new_tokens=NEW, eos_token_id=None)
    said = plain[:, 30:]
    for options in (
        {"max_new_tokens": NEW, "stopping_criteria": StoppingCriteriaList([_Sum()])},
        {"max_new_tokens": NEW, "eos_token_id": [EOS, *plain[:, 43].tolist()]},
        {"max_new_tokens": 7, "eos_token_id": None},
    ):
        # Drafts go on where plain decoding would have.
        ours = drafting(drafts, said)
        found = assert_decodes(model, inputs, "found", ours=ours, exact=True, **options)
        assert found.expected.shape[1] < 30 + NEW


def test_max_time_ends_after_a_step(model: Any) -> None:
    output = hf.generate(model, **repetitive_batch(3), max_new_tokens=NEW, max_time=0.0)
    assert output.sequences.shape[1] == 31


@pytest.mark.parametrize(("rows", "cache"), [(1, None), (1, "static"), (2, None)])
def test_the_cache_is_given_for_a_row_alone(model: Any, rows: int, cache: str | None) -> None:
    """A static cache ends with the generation, and one of several rows is nobody's."""
    options = {"max_new_tokens": 4, "cache_implementation": cache}
    output = hf.generate(model, **repetitive_batch(rows), **options, return_dict_in_generate=True)
    assert (getattr(output, CACHE) is None) == (rows > 1 or cache == "static")


@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_the_cache_goes_by_each_name_that_transformers_takes(model: Any, name: str) -> None:
    ids = repetitive_batch(1)["input_ids"]
    cache = DynamicCache(config=model.config)
    output = hf.generate(
        model, ids, max_new_tokens=4, return_dict_in_generate=True, **{name: cache}
    )
    assert cache.get_seq_length() == output.sequences.shape[1] - 1
    assert getattr(output, name) is output[name] is cache


WINDOWED = ["mistral", "gemma2", "gemma3", "qwen2", "phi3", "gpt_oss"]


def _precise(family: str) -> Any:
    model = tiny_model(family)
    # Its experts take no float64.
    return model if family == "gpt_oss" else model.double()


@pytest.mark.parametrize(
    ("family", "drafts", "swapped"),
    [
        *((family, "predicted", True) for family in ("llama", *WINDOWED, "dory")),
        *((family, "trees", True) for family in ("llama", "mistral", "gemma3")),
        *((family, "found", False) for family in ("gemma3", "dory")),
    ],
)
def test_the_cache_of_an_output_goes_into_the_next_turn(
    family: str, drafts: str, swapped: bool
) -> None:
    """Between turns a window holds its last tokens alone, in plain decoding's cache too.

    Swapped, each loop goes on from what the other has left.
    """
    model = _precise(family)
    ids = repetitive_batch(1)["input_ids"]
    options: dict[str, Any] = {"eos_token_id": None, "max_new_tokens": 20}
    dicts = {"return_dict_in_generate": True, "do_sample": False}
    caches: list[Any] = [None, None]
    for turn in range(4):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        ours = {**dicts, CACHE: caches[0]}
        output = assert_decodes(model, inputs, drafts, ours=ours, exact=True, **options).output
        plain = model.generate(**inputs, **options, **dicts, **{CACHE: caches[1]})
        assert torch.equal(output.sequences, plain.sequences)
        caches = [output[CACHE], plain[CACHE]]
        assert [cache.get_seq_length() for cache in caches] == [ids.shape[1] + 19] * 2
        if swapped:
            caches.reverse()
        ids = torch.cat([plain.sequences, ids[:, : 3 + 9 * turn]], -1)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_turn_may_be_given_as_its_new_tokens(family: str) -> None:
    model = _precise(family)
    first = repetitive_batch(1)["input_ids"]
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 20}
    output = hf.generate(model, first, **options, return_dict_in_generate=True)
    text = torch.cat([output.sequences, first[:, :7]], -1)
    cache = output[CACHE]
    expected = model.generate(text, **options)
    new = text[:, cache.get_seq_length() :]
    mask = torch.ones_like(text)
    output = hf.generate(
        model, new, **options, attention_mask=mask, **{CACHE: cache}, drafter=Generous()
    )
    assert torch.equal(output.sequences[:, new.shape[1] :], expected[:, text.shape[1] :])


def test_the_models_own_generation_config_counts() -> None:
    model = tiny_model("llama")
    model.generation_config.max_new_tokens = 7
    model.generation_config.repetition_penalty = 1.5
    found = assert_decodes(model, repetitive_batch(2), "found", exact=True)
    assert found.expected.shape[1] == 37


def test_the_engine_of_a_configuration_learns_on(model: Any) -> None:
    config = DraftConfig(lookahead=7)
    before = engine(model, config, None)
    for _ in range(2):
        assert_decodes(model, repetitive_batch(1), config, exact=True, max_new_tokens=NEW)
    assert engine(model, config, None) is before is not engine(model, DraftConfig(), None)


def test_generations_in_several_threads(model: Any) -> None:
    engine = Engine()
    batches = [repetitive_batch(rows, seed=rows) for rows in (1, 2, 3, 4)]
    options = {"do_sample": False, "max_new_tokens": NEW}
    expected = [model.generate(**inputs, **options) for inputs in batches]

    def decode(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return hf.generate(model, **inputs, **options, drafter=engine).sequences

    with ThreadPoolExecutor(4) as pool:
        for ours, theirs in zip(pool.map(decode, batches * 3), expected * 3, strict=True):
            assert torch.equal(ours, theirs)


class _Broken(Engine):
    """Fails at the end of its second request, and at giving up the third."""

    ended = 0

    def finish(self, request: int) -> DraftStats:
        self.ended += 1
        if self.ended == 2:
            raise ZeroDivisionError
        return super().finish(request)

    def cancel(self, request: int) -> None:
        super().cancel(request)
        if self.num_requests == 1:
            raise RuntimeError


def test_a_drafter_that_fails_at_the_end_of_a_request_is_what_comes_out(model: Any) -> None:
    engine: Any = _Broken()
    # All rows end in the same step, the first of them well.
    with pytest.raises(ZeroDivisionError):
        hf.generate(model, **repetitive_batch(4), do_sample=False, max_new_tokens=1, drafter=engine)
    assert engine.num_requests == 0


class _MaskAll(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)


def test_a_vocabulary_masked_whole_is_an_error(model: Any) -> None:
    with pytest.raises(FastdraftError, match="row 0 has no token left to emit at position 30"):
        hf.generate(model, **repetitive_batch(1), max_new_tokens=8, logits_processor=[_MaskAll()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "greedy search or sampling, got beam_search"),
        ({"num_beams": 2, "do_sample": True}, "got beam_sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "got contrastive_search"),
        ({"prompt_lookup_num_tokens": 5}, "got assisted_generation; choose what drafts"),
        ({"assistant_model": object()}, "got assisted_generation; choose what drafts"),
        ({"token_healing": True}, "must pass the model's tokenizer"),
        ({"use_cache": False}, "key-value cache, got use_cache=False"),
        ({"cache_implementation": "offloaded"}, "DynamicCache, got offloaded DynamicCache"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"synced_gpus": True}, "synced_gpus must be off"),
        ({"streamer": Recorder()}, "batch of 1 row, got 2 rows"),
        ({"stop_strings": "x"}, "tokenizer must be given with stop_strings 'x', got None"),
        ({"do_sample": True, "seed": -1}, "seed must be from 0 to 2\\*\\*63 - 1, got -1"),
        ({"do_sample": True, "seed": [1, 2, 3]}, "each of 2 rows, got 3"),
        ({"prediction": [3, 97]}, "from 0 to 96, got 97"),
        ({"prediction": [[3], [4], [5]]}, "each of 2 rows, got 3"),
        ({"prediction": [[3], [0.5]]}, "got float64 of shape"),
        *(
            ({"read_only": wrong}, "read_only must be a list of Datastores, got")
            for wrong in (5, ["path.fds"], Datastore(max_bytes=1 << 20))
        ),
        (
            {
                "drafter": AssistantModel(tiny_model("llama"), lookup=None),
                "read_only": [Datastore(max_bytes=1 << 20)],
            },
            "read_only must be left out where models draft",
        ),
        ({"drafter": "lookup"}, "drafter must be a DraftConfig, .* got 'lookup'"),
        ({"token_type_ids": torch.zeros(2, 30)}, "token_type_ids"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals_before_the_model_is_run(
    model: Any, options: dict[str, Any], message: str
) -> None:
    options = {**repetitive_batch(2), "do_sample": False, "max_new_tokens": 4, **options}
    with counted_forwards(model) as forwards, pytest.raises(ValueError, match=message):
        hf.generate(model, **options)
    assert not forwards


def test_the_callers_cache_for_a_batch_is_refused(model: Any) -> None:
    inputs = repetitive_batch(2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs["input_ids"][:, :5], **{CACHE: cache})
    with pytest.raises(InvalidValueError, match="batch of 1 row, got 2 rows"):
        hf.generate(model, **inputs, max_new_tokens=4, **{CACHE: cache})


def test_batches_of_models_that_take_no_positions_are_refused() -> None:
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        **sizes, vocab_size=97, decoder_ffn_dim=16, is_encoder_decoder=False
    )
    with pytest.raises(InvalidValueError, match="takes position_ids, got BartForCausalLM"):
        hf.generate(
            transformers.BartForCausalLM(config).eval(), torch.full((2, 3), 4), max_new_tokens=8
        )


def test_changing_rotary_embeddings_are_refused_beyond_their_range() -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
    }
    with pytest.raises(InvalidValueError, match=r"at most 32 .* got 34"):
        hf.generate(model, **repetitive_batch(1), max_new_tokens=4)


def test_attention_that_takes_no_mask_is_refused_for_batches(model: Any) -> None:
    inputs = repetitive_batch(2)
    before = model.config._attn_implementation
    model.config._attn_implementation = "flash_attention_2"
    try:
        with pytest.raises(InvalidValueError, match="'sdpa' or 'eager', got 'flash_attention_2'"):
            hf.generate(model, **inputs, max_new_tokens=4)
    finally:
        model.config._attn_implementation = before


class _Foreign(Generous):
    """Drafts a token that no model here knows, as a datastore of another tokenizer may."""

    def propose_batch(self, requests: Any, **_: Any) -> Any:
        count = len(requests)
        return TreeBatch(
            np.full(count, 2**30, np.int32),
            np.full(count, -1, np.int32),
            np.full(count, 0.5, np.float32),
            np.arange(count + 1, dtype=np.int32),
        )


def test_a_datastore_of_another_tokenizer_is_named_before_it_reaches_the_model(model: Any) -> None:
    engine, message = _Foreign(), r"got 1073741824: a datastore of another tokenizer"
    with counted_forwards(model) as forwards, pytest.raises(InvalidValueError, match=message):
        hf.generate(model, **repetitive_batch(2), max_new_tokens=60, drafter=engine)
    assert len(forwards) == 1
    assert engine.num_requests == 0


@pytest.mark.parametrize("route", ["generate", "speculate"])
def test_datastores_that_are_only_read(route: str) -> None:
    model = tiny_model("llama")
    inputs = {"input_ids": torch.tensor([[7, 11, 13]])}
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    own, corpus = Datastore(max_bytes=1 << 20), Datastore(max_bytes=1 << 20)
    corpus.add(plain[0].tolist())
    drafting = {
        "drafter": Engine(DraftConfig(token_cost=0), datastores=[own]),
        "read_only": [corpus],
    }
    if route == "generate":
        output = hf.generate(model, **inputs, **options, **drafting)
    else:
        loop = hf.speculate(**drafting)
        output = model.generate(
            **inputs, **options, custom_generate=loop, return_dict_in_generate=True
        )
    assert torch.equal(output.sequences, plain)
    assert output.stats.accepted_by_source[Source.READ_ONLY] > 10
    # The text enters the engine's store alone.
    assert len(corpus) == plain.shape[1] and len(own) > 40
