"""A small tokenizer of bytes and frequent pairs, and the matchers of JSON schemas over it."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_MISSING = "a grammar library is not installed: pip install 'fastdraft[test]'"
xgrammar: Any = pytest.importorskip("xgrammar", reason=_MISSING)
llguidance: Any = pytest.importorskip("llguidance", reason=_MISSING)
llguidance_hf: Any = pytest.importorskip("llguidance.hf", reason=_MISSING)

LIBRARIES = ("xgrammar", "llguidance")
VOCABULARY = 320

_TEXTS = ('{"city":"Oslo","days":3}', '{"city":"Paris","unit":"celsius"}', '{"country":"Norway"}')


@functools.cache
def byte_tokenizer() -> Any:
    """All bytes, merged where they are neighbours in some JSON, and an end."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_TEXTS * 3, trainer)
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def tokens(text: str) -> list[int]:
    """The tokens of a text."""
    found: list[int] = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


@functools.cache
def _xgrammar_compiler() -> Any:
    info = xgrammar.TokenizerInfo.from_huggingface(byte_tokenizer(), vocab_size=VOCABULARY)
    return xgrammar.GrammarCompiler(info, max_threads=1)


@functools.cache
def _llguidance_tokenizer() -> Any:
    return llguidance_hf.from_tokenizer(byte_tokenizer(), n_vocab=VOCABULARY)


def grammar(library: str, schema: dict[str, Any]) -> Any:
    """What `hf.Grammar` takes: JSON of the schema, without spaces."""
    text = json.dumps(schema)
    if library == "xgrammar":
        return _xgrammar_compiler().compile_json_schema(
            text, any_whitespace=False, separators=(",", ":")
        )
    compact = {"x-guidance": {"whitespace_flexible": False}}
    form = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({**schema, **compact}))
    matcher = llguidance.LLMatcher(_llguidance_tokenizer(), form)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matcher(library: str, schema: dict[str, Any], text: str = "") -> Any:
    """A matcher of the schema that has accepted a text."""
    made = grammar(library, schema)
    if library == "xgrammar":
        made = xgrammar.GrammarMatcher(made)
    for token in tokens(text):
        accept(made, token)
    return made


def accept(matcher: Any, token: int) -> None:
    """Goes on by a token that has to be allowed."""
    if hasattr(matcher, "accept_token"):
        assert matcher.accept_token(token)
    else:
        assert matcher.try_consume_tokens([token]) == 1


def allowed(matcher: Any) -> Any:
    """Which tokens may come next, bool (VOCABULARY,)."""
    if hasattr(matcher, "accept_token"):
        words = xgrammar.allocate_token_bitmask(1, VOCABULARY)
        matcher.fill_next_token_bitmask(words)
        bits = words.numpy().tobytes()
    else:
        bits = matcher.compute_bitmask()
    found = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return torch.from_numpy(found[:VOCABULARY].astype(bool))


def object_of(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has just these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
