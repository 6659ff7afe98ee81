"""Text that grammars force is offered, as far as it is certain."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import Engine
from fastdraft.errors import InvalidValueError
from fastdraft.grammars import ForcedText
from grammar_cases import LIBRARIES, accept, byte_tokenizer, matcher, object_of, tokens

_CITY = object_of(city={"type": "string"}, days={"type": "integer"})


def _text(token_ids: list[int]) -> str:
    found: str = byte_tokenizer().decode(token_ids)
    return found


@pytest.mark.parametrize("library", LIBRARIES)
def test_forced_text_is_offered_but_for_its_last_token(library: str) -> None:
    forced = ForcedText(byte_tokenizer())
    assert forced.token_ids(matcher(library, _CITY)) == tokens('{"city":"')[:-1]
    assert forced.token_ids(matcher(library, _CITY, '{"city":"Os')) == []
    behind = forced.token_ids(matcher(library, _CITY, '{"city":"Oslo"'))
    assert behind == tokens(',"days":')[: len(behind)]
    assert len(behind) >= len(tokens(',"days":')) - 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_is_forced_at_the_end(library: str) -> None:
    at_end = matcher(library, _CITY, '{"city":"Oslo","days":3}')
    forced = ForcedText(byte_tokenizer())
    assert forced.token_ids(at_end) == []
    if library == "xgrammar":
        accept(at_end, byte_tokenizer().eos_token_id)
        assert forced.token_ids(at_end) == []


_NAMES = st.text("abcity", min_size=1, max_size=9)


@st.composite
def _schema_and_value(draw: st.DrawFn) -> tuple[dict[str, Any], Any]:
    """A schema, and JSON of it."""
    properties, value = {}, dict[str, Any]()
    for name in draw(st.lists(_NAMES, min_size=1, max_size=4, unique=True)):
        choices = draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
        if draw(st.booleans()):
            properties[name] = {"enum": choices}
            value[name] = draw(st.sampled_from(choices))
        else:
            properties[name] = {"type": "integer"}
            value[name] = draw(st.integers(-200, 200))
    return object_of(**properties), value


@pytest.mark.parametrize("library", LIBRARIES)
@given(_schema_and_value())
@settings(max_examples=40, deadline=None)
def test_offered_text_is_what_the_answer_says(library: str, case: tuple[Any, Any]) -> None:
    """Whatever answer the grammar allows, it goes on with the text that is offered."""
    schema, value = case
    answer = json.dumps(value, separators=(",", ":"))
    token_ids = tokens(answer)
    own = matcher(library, schema)
    forced = ForcedText(byte_tokenizer())
    seen = 0
    for at, token in enumerate(token_ids):
        offered = forced.token_ids(own)
        assert _text(token_ids[at:]).startswith(_text(offered))
        assert forced.token_ids(own) == offered
        seen += len(offered)
        accept(own, token)
    assert seen > 0


def test_a_batch_has_a_row_for_each_matcher() -> None:
    rows = [matcher("xgrammar", _CITY), None, matcher("llguidance", _CITY)]
    offers = ForcedText(byte_tokenizer()).offers(rows)
    assert offers is not None
    one = tokens('{"city":"')[:-1]
    assert offers.token_ids.tolist() == one * 2
    assert offers.offsets.tolist() == [0, len(one), len(one), 2 * len(one)]
    assert offers.kind == "grammar"
    engine = Engine()
    requests = [engine.add_request([5, 6, 7]) for _ in rows]
    drafts = engine.propose_batch(requests, offers=offers, token_cost=0.0).tolist()
    assert [draft[: len(one)] for draft in drafts] == [one, [], one]
    assert (
        ForcedText(byte_tokenizer()).offers([None, matcher("xgrammar", _CITY, '{"city":"')]) is None
    )


def test_a_space_that_the_tokenizer_puts_before_texts_is_not_offered() -> None:
    """As tokenizers of sentencepiece do."""

    def spaced(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": tokens(" " + text)}

    assert ForcedText(spaced).token_ids(matcher("xgrammar", _CITY)) == tokens('{"city":"')[:-1]


def test_long_forced_text_is_cut() -> None:
    name = "city" * 1000
    offered = ForcedText(byte_tokenizer()).token_ids(
        matcher("xgrammar", object_of(**{name: {"type": "integer"}}))
    )
    assert 100 < len(offered) < 512
    assert ('{"' + name).startswith(_text(offered))


def test_wrong_matchers_are_refused() -> None:
    forced = ForcedText(byte_tokenizer())
    with pytest.raises(InvalidValueError, match="matcher must be a GrammarMatcher of xgrammar"):
        forced.token_ids("{")
    with pytest.raises(InvalidValueError, match="tokenizer must be given"):
        ForcedText().token_ids(matcher("xgrammar", _CITY))
    assert ForcedText().token_ids(matcher("llguidance", _CITY)) == tokens('{"city":"')[:-1]
