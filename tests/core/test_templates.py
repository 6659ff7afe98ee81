"""Templates: text that parts of an answer may look like, drafted from before the answer has any."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from byte_tokenizer import byte_tokenizer
from fastdraft import Continuations, Datastore, DraftConfig, Engine
from fastdraft.errors import InvalidValueError, RequestLimitError
from fastdraft.templates import schema_example, tool_call_ids, tool_calls

GREEDY = DraftConfig(token_cost=0.0)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}


def test_a_template_is_drafted_from_and_is_no_part_of_the_text():
    engine = Engine(GREEDY)
    template = list(range(100, 120))
    without = engine.add_request([1, 2, 3, 100, 101, 102])
    request = engine.add_request([1, 2, 3, 100, 101, 102], templates=template)
    assert engine.propose(without).tolist() == []
    assert engine.propose(request).tolist()[:4] == [103, 104, 105, 106]
    assert engine.num_tokens(request) == engine.num_tokens(without) == 6
    engine.observe(request, [103, 104])
    assert engine.num_tokens(request) == 8
    assert engine.finish(request).accepted >= 1


def test_templates_never_enter_a_datastore():
    memory = Datastore()
    engine = Engine(GREEDY, datastores=[memory])
    template = list(range(100, 140))
    engine.finish(engine.add_request([1, 2, 3, 4], templates=template))
    assert engine.propose(engine.add_request([7, 100, 101, 102, 103])).tolist() == []
    assert engine.propose(engine.add_request([7, 1, 2])).tolist()[:1] == [3]


@given(
    templates=st.lists(st.integers(0, 5), max_size=30),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 5), min_size=1, max_size=20),
)
def test_drafts_are_those_of_templates_before_the_prompt(templates, prompt, output):
    """Up to the position that the output begins at, nothing tells the two apart."""
    given_apart, joined = Engine(GREEDY), Engine(GREEDY)
    request = given_apart.add_request(prompt, templates=templates)
    other = joined.add_request([*templates, *prompt])
    for token in output:
        assert given_apart.propose(request).tolist() == joined.propose(other).tolist()
        given_apart.observe(request, [token])
        joined.observe(other, [token])
    assert given_apart.num_tokens(request) == len(prompt) + len(output)


def test_continuations_count_the_text_alone():
    engine = Engine(DraftConfig(tree_budget=8, token_cost=0.0))
    request = engine.add_request([1, 100, 101], templates=range(100, 120))
    out = Continuations.allocate(1, 8)
    engine.continue_batch([request], [102, 103], [0, 2], out)
    assert out.base.tolist() == [5]
    assert out.token_ids[0, 0] == 104


@pytest.mark.parametrize(
    ("templates", "message"),
    [([-1], "templates"), ([[1]], "templates"), (["a"], "templates"), ([50], "templates.*50")],
)
def test_what_is_no_text_is_refused(templates, message):
    engine = Engine(DraftConfig(vocabulary=50))
    with pytest.raises((InvalidValueError, TypeError), match=message):
        engine.add_request([1], templates=templates)
    assert engine.num_requests == 0


def test_templates_count_towards_the_longest_request():
    engine = Engine(DraftConfig(max_request_tokens=8))
    with pytest.raises(RequestLimitError, match="prompt_ids and templates have 9 tokens"):
        engine.add_request([1] * 4, templates=[2] * 5)
    request = engine.add_request([1] * 4, templates=[2] * 3)
    with pytest.raises(RequestLimitError):
        engine.observe(request, [1, 1])


def test_only_the_default_drafter_takes_templates():
    with pytest.raises(InvalidValueError, match="only the default drafter"):
        Engine(DraftConfig.prompt_lookup()).add_request([1], templates=[2])
    Engine(DraftConfig.prompt_lookup()).add_request([1], templates=[])


def test_an_example_of_a_schema():
    schema = {
        "$defs": {"City": {"type": "object", "properties": {"city": {"type": "string"}}}},
        "type": "object",
        "properties": {
            "where": {"$ref": "#/$defs/City"},
            "unit": {"enum": ["celsius", "kelvin"]},
            "kind": {"const": "daily"},
            "days": {"type": ["integer", "null"]},
            "share": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "nothing": {"type": "null"},
            "GOOGLE": {"type": "STRING"},
        },
    }
    assert schema_example(schema) == {
        "where": {"city": "city"},
        "unit": "celsius",
        "kind": "daily",
        "days": 1,
        "share": 1,
        "tags": ["tags"],
        "exact": True,
        "nothing": None,
        "GOOGLE": "GOOGLE",
    }


def test_a_recursive_schema_has_an_end():
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert json.dumps(schema_example(schema)).count("next") < 10


def test_a_schema_of_many_references_to_itself_has_an_end():
    """It is 3 kB, and 100 ** 6 values long."""
    properties = {f"p{number}": {"$ref": "#"} for number in range(100)}
    schema = {"type": "object", "properties": properties}
    text = json.dumps(schema_example(schema))
    assert text.startswith('{"p0": {"p0": {"p0": ')
    assert len(text) < 100_000
    tools = [{"name": f"tool{number}", "parameters": schema} for number in range(100)]
    assert len(json.dumps(tool_calls(tools))) < 100_000


@pytest.mark.parametrize(
    "long",
    [
        {"const": "a" * 10_000},
        {"enum": ["a" * 10_000]},
        {"type": "object", "properties": {"a" * 10_000: {"type": "string"}}},
        {"$ref": "#/" + "a" * 10_000},
    ],
)
def test_an_example_of_long_texts_has_an_end(long):
    schema = {"$defs": {"a" * 10_000: {"const": "here"}}, "$long": long}
    schema["properties"] = {str(number): {"$ref": "#/$long"} for number in range(1000)}
    text = json.dumps(schema_example(schema))
    assert text.startswith('{"0": ')
    assert len(text) < 300_000
    assert text.count("here") < 20


def test_an_honest_schema_is_whole():
    properties = {f"name_of_{number}": {"type": "string"} for number in range(1000)}
    assert len(schema_example({"properties": properties})) == 1000
    tools = [
        {"name": f"tool{number}", "parameters": {"properties": dict([*properties.items()][:20])}}
        for number in range(130)
    ]
    calls = tool_calls(tools)
    assert [len(call.arguments) for call in calls] == [20] * 128


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "$ref", "enum", "anyOf", "items", "properties", "const", "x"]),
            children,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(schema=JSON)
def test_any_json_has_an_example(schema):
    json.dumps(schema_example(schema))


def test_tools_of_several_interfaces():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [
        WEATHER,
        {"name": "flat", "parameters": schema},
        {"name": "anthropic", "input_schema": schema},
        {"name": "bare"},
        {"type": "web_search"},
    ]
    assert tool_calls(tools) == [
        ("get_weather", {"city": "city", "days": 1}),
        ("flat", {"a": "a"}),
        ("anthropic", {"a": "a"}),
        ("bare", {}),
    ]


@pytest.mark.parametrize("tools", ["get_weather", {"name": "a"}, [1], None])
def test_tools_of_no_known_form_are_refused(tools):
    with pytest.raises(InvalidValueError, match="must be a"):
        tool_calls(tools)


HERMES = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% else %}{{ m.content }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ONE_CALL = HERMES.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call') }}{% endif %}",
)
NO_CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
OTHER = {"name": "other", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            HERMES,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "city", "days": 1}}'
            '</tool_call><tool_call>{"name": "other", "arguments": {}}</tool_call></s>',
        ),
        (
            ONE_CALL,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "city", "days": 1}}'
            '</tool_call></s><tool_call>{"name": "other", "arguments": {}}</tool_call></s>',
        ),
        *(
            (
                template,
                '<tool_call>\n{"name": "get_weather", "arguments": {"city": "city", "days": 1}}\n'
                '</tool_call>\n<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>\n',
            )
            for template in (NO_CALLS, None)
        ),
    ],
)
def test_calls_are_written_as_the_chat_template_writes_them(template, expected):
    tokenizer = byte_tokenizer(chat_template=template)
    ids = tool_call_ids(tokenizer, [WEATHER, OTHER])
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == expected
    assert tool_call_ids(tokenizer, []) == []
