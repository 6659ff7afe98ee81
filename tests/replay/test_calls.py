"""Logs of every form become records, each model call once.

Exporters whose packages install here write theirs in test_exporters.py. The other forms are made
from the public sources of what writes them: vLLM, SGLang, llama.cpp, aider, SWE-agent, Claude Code,
Codex, OpenHands, Inspect, Harbor, verl, lm-eval, Helicone, and the exports of Langfuse.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from command_line import fastdraft
from exported import Shown
from fastdraft.replay.calls import Reader
from fastdraft.replay.forms import Row, mapped
from fastdraft.replay.lines import JsonLine, RecordError, parse_lines, zstd_module
from fastdraft.replay.records import read_families

zstd = zstd_module()

USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "hello"}
ARGUMENTS = {"name": "look", "arguments": '{"at": 1}'}
CALL = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"at": 1}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
SYSTEM = {"role": "system", "content": "Be kind."}
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def reply(message: Any) -> dict[str, Any]:
    """The body of an answer with one choice."""
    return {"choices": [{"message": message}]}


RESPONSE = {"id": "r", "model": "m", **reply(SAID)}


def events(*contents: Any) -> str:
    return "".join(f"data: {json.dumps(each)}\n\n" for each in contents) + "data: [DONE]\n\n"


def delta(**fields: Any) -> dict[str, Any]:
    return {"id": "r", "choices": [{"index": 0, "delta": fields}]}


def logged(request: Any, response: Any) -> dict[str, Any]:
    return {"request": request, "response": response}


def text(content: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": content}


def changed(**fields: Any) -> dict[str, Any]:
    """An event of Anthropic's streams."""
    return {"type": "content_block_delta", "index": 0, **fields}


ASKED = {"messages": [USER]}
FIRST_PART = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look"}}]}
CALL_ITEM = {"type": "function_call", "call_id": "c1", **ARGUMENTS}
CALL_BLOCK = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}
RESULT_BLOCK = {"type": "tool_result", "tool_use_id": "c1", "content": "5"}
ITEMS = {
    "instructions": "Be kind.",
    "input": [
        {"role": "user", "content": [text("hi", "input_text")]},
        {"type": "reasoning", "summary": []},
        CALL_ITEM,
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
    ],
    "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
}
ITEM = {"type": "message", "role": "assistant", "content": [text("hello", "output_text")]}
BLOCKS = {
    "system": [text("Be kind.")],
    "messages": [
        USER,
        {"role": "assistant", "content": [CALL_BLOCK]},
        {"role": "user", "content": [RESULT_BLOCK]},
    ],
    "tools": [{"name": "look", "input_schema": SCHEMA}],
}
CHAT_EVENTS = events(delta(role="assistant"), delta(content="hel"), delta(content="lo"))
CALL_EVENTS = events(
    delta(**FIRST_PART),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '{"at":'}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": " 1}"}}]),
    {"choices": [], "usage": {}},
)
TEXT_EVENTS = events({"choices": [{"text": "hel"}]}, {"choices": [{"text": "lo"}]})
ITEM_EVENTS = events(
    {"type": "response.created", "response": {}},
    {"type": "response.completed", "response": {"output": [CALL_ITEM]}},
)
BLOCK_EVENTS = events(
    {"type": "message_start", "message": {"type": "message", "id": "r"}},
    {"index": 0, "content_block": text("")},
    changed(delta={"text": "hel"}),
    changed(delta={"text": "lo"}),
    {"index": 1, "content_block": {**CALL_BLOCK, "input": {}}},
    changed(index=1, delta={"partial_json": '{"at":'}),
    changed(index=1, delta={"partial_json": " 1}"}),
    {"type": "message_stop"},
)
ALL = [SYSTEM, USER, CALLED, TOOL_RESULT]
IDS = {"prompt_token_ids": [1, 2]}
ONE_CALL = [([USER], SAID)]
CASES: list[tuple[Any, list[Any]]] = [
    (logged(ASKED, CALL_EVENTS), [([USER], CALLED)]),
    (logged({"prompt": "hi"}, TEXT_EVENTS), [("hi", "hello")]),
    (logged(ITEMS, {"output": [ITEM]}), [(ALL, SAID)]),
    (logged({"input": "hi"}, ITEM_EVENTS), [([USER], CALLED)]),
    (logged(BLOCKS, {"type": "message", "content": [text("hello")]}), [(ALL, SAID)]),
    (logged(ASKED, BLOCK_EVENTS), [([USER], {**SAID, "tool_calls": [CALL]})]),
    (
        {"messages": [USER, SAID, USER, CALLED], "tools": [TOOL]},
        [([USER], SAID), ([USER, SAID, USER], CALLED)],
    ),
    ({"prompt": "hi", "completion": "hello"}, [("hi", "hello")]),
    ({"instruction": "Say", "input": "hi", "output": "hello"}, [("Say\n\nhi", "hello")]),
    ({"input": "hi", "output": "hello"}, [("hi", "hello")]),
    (logged({"prompt": "a", "echo": True}, {"choices": [{"text": "ab"}]}), [("a", "b")]),
    (
        logged({"prompt": [1, 2]}, {"choices": [{"token_ids": [3, 4], "text": "b", **IDS}]}),
        [([1, 2], [3, 4])],
    ),
]
CASES += [
    (each, ONE_CALL)
    for each in (
        logged(json.dumps(ASKED), RESPONSE),
        logged({**ASKED, "stream": True}, CHAT_EVENTS),
        {"request_body": ASKED, "response_body": json.dumps(RESPONSE)},
        {**ASKED, "response": RESPONSE, "model_parameters": {"tools": [TOOL]}},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"inputs": ASKED, "outputs": reply(SAID)},
        {"input": [USER], "output": SAID},
    )
]


def attributes(**values: Any) -> list[dict[str, Any]]:
    """As OpenTelemetry's collector writes them."""
    return [
        {"key": f"gen_ai.{name}", "value": {"stringValue": value}} for name, value in values.items()
    ]


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def message(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": parts}


CALL_PART = part("tool_call", id="c1", name="look", arguments={"at": 1})
CHAT = {
    "system_instructions": [part("text", content="Be kind.")],
    "input.messages": [
        message("user", part("text", content="hi")),
        message("assistant", CALL_PART),
        message("tool", part("tool_call_response", id="c1", response="5")),
    ],
    "output.messages": [
        message("assistant", part("reasoning", content="Well."), part("text", content="hello"))
    ],
    "tool.definitions": [TOOL],
}
WRITTEN = {name: json.dumps(each) for name, each in CHAT.items()}
SPANS_OF_A_CHAT = [
    {"name": "GET", "attributes": [{"key": "n", "value": {"intValue": "5"}}]},
    *(
        {
            "name": f"{operation} m",
            "attributes": attributes(**WRITTEN, **{"operation.name": operation}),
        }
        for operation in ("invoke_agent", "chat", "execute_tool")  # one call
    ),
]
SPANS = {"resourceSpans": [{"scopeSpans": [{"spans": SPANS_OF_A_CHAT}]}]}
NUMBERED = {
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "hi",
    "gen_ai.completion.0.content": "hello",
}
SGLANG = {
    "event": "request.finished",
    "rid": "r",
    "obj": {"text": "hi", "input_ids": [1, 2]},
    "out": {"text": "hello", "output_ids": [3]},
}
CASES += [
    (SPANS, [([SYSTEM, USER, CALLED, TOOL_RESULT], {**SAID, "reasoning_content": "Well."})]),
    ({"attributes": {"gen_ai.system": "openai"}}, []),
    (SGLANG, [([1, 2], [3])]),
    ({**SGLANG, "event": "request.received"}, []),
]
# Without the call itself, the span around it counts.
AROUND = {**NUMBERED, "gen_ai.operation.name": "invoke_agent"}
CASES += [({"attributes": each}, ONE_CALL) for each in (NUMBERED, AROUND)]

BATCH = [
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}},
    {"custom_id": "b", "body": {"prompt": "late"}},
    {"custom_id": "c", "params": {"messages": [USER]}},
    {"custom_id": "d", "body": {"prompt": "never"}},
    {"custom_id": "b", "response": None, "error": {"code": "expired"}},
    {"custom_id": "a", "response": {"status_code": 200, "body": {"choices": [{"text": "hello"}]}}},
    {
        "custom_id": "c",
        "result": {
            "type": "succeeded",
            "message": {"type": "message", "content": [{"type": "text", "text": "hello"}]},
        },
    },
]
VLLM = """INFO 11-24 10:00:00 [api_server.py:1] Started.
DEBUG 11-24 10:00:01 [request_logger.py:50] Request chatcmpl-1 details: prompt: 'it\\'s\\n"1"', \
prompt_token_ids: [1, 2], prompt_embeds shape: None.
INFO 11-24 10:00:01 [request_logger.py:60] Received request chatcmpl-1: params: SamplingParams(n=1)
INFO 11-24 10:00:01 [logger.py:50] Received request cmpl-2-0: prompt: "it's", params: \
SamplingParams(n=1), prompt_token_ids: [4, 5], prompt_embeds shape: None, lora_request: None.
INFO 11-24 10:00:01 [request_logger.py:90] Generated response chatcmpl-1 (streaming delta): \
output: 'no', finish_reason: None
DEBUG 11-24 10:00:02 [request_logger.py:80] Generated response chatcmpl-1 (streaming complete) \
details: output_token_ids: None
INFO 11-24 10:00:02 [request_logger.py:90] Generated response chatcmpl-1 (streaming complete): \
output: 'hello', finish_reason: streaming_complete
DEBUG 11-24 10:00:02 [request_logger.py:50] Request chatcmpl-3 details: prompt: 'it', \
prompt_token_ids: [1, 2], prompt_embeds shape: None.
DEBUG 11-24 10:00:02 [request_logger.py:80] Generated response chatcmpl-3 details: \
output_token_ids: [3]
INFO 11-24 10:00:02 [request_logger.py:90] Generated response chatcmpl-3: \
output: 'hello', finish_reason: stop
INFO 11-24 10:00:03 [logger.py:90] Generated response cmpl-2: output: 'hello', \
output_token_ids: None, finish_reason: stop
INFO 11-24 10:00:03 [metrics.py:1] Avg prompt throughput: 5
""".replace("\\\n", "")
SGLANG_TEXT = """[2026-11-24 10:00:00] Receive: obj=GenerateReqInput(rid='r', text='it\\'s')
[2026-11-24 10:00:01] Finish: obj=GenerateReqInput(rid='r', text='it\\'s', input_ids=[1, 2], \
sampling_params={'n': 1}), out={'text': 'hel\\nlo', 'output_ids': [3, 4], 'meta_info': {'id': 'r'}}
[2026-11-24 10:00:01] Finish: obj=GenerateReqInput(rid='r', text='hi', input_ids=None, \
stream=False), out={'text': 'hello', 'meta_info': {'id': 'r'}}
""".replace("\\\n", "")


def opened(value: Any) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


def read(*lines: Any, row: Row | None = None) -> tuple[list[tuple[Any, Any]], Reader, list[Any]]:
    """Prompts and outputs, as messages where they were; the reader, and the records."""
    reader = Reader(Shown(), row=row)
    records = []
    for number, line in enumerate(lines, 1):
        text = line.encode() if isinstance(line, str) else json.dumps(line).encode()
        records += reader(JsonLine(number, f"f, line {number}", text, len(text)))
    records += reader.end()
    found = [
        tuple(opened(each.get(kind, each.get(f"{kind}_ids"))) for kind in ("prompt", "output"))
        for each in records
    ]
    assert reader.calls == len(records)
    return found, reader, records  # type: ignore[return-value]


def reasons(reader: Reader) -> dict[str, int]:
    return {reason: count for reason, (count, _) in reader.left_out.items()}


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_each_form_is_read(line: Any, expected: list[Any]) -> None:
    found, reader, _ = read(line)
    assert found == expected
    has_tools = "tools" in json.dumps(line) or "definitions" in json.dumps(line)
    tokenizer = reader._tokenizer
    assert isinstance(tokenizer, Shown)
    assert tokenizer.tools in ([], [[TOOL] if has_tools else None] * len(expected))


@pytest.mark.parametrize("order", [1, -1])
def test_requests_and_answers_of_batches_are_joined(order: int) -> None:
    found, reader, _ = read(*BATCH[::order])
    assert found == [("hi", "hello"), ([USER], SAID)][::order]
    # One has expired, one has no line.
    assert [each for each in reader.summary() if "no answer" in each] == [
        f"left out: 2 x no answer, such as f, line {5 if order == 1 else 6}"
    ]


def test_vllms_log_is_read() -> None:
    found, reader, _ = read(*VLLM.splitlines())
    assert found == [('it\'s\n"1"', "hello"), ([1, 2], [3]), ("it's", "hello")]
    assert reasons(reader) == {"not JSON": 1}  # the server's line before its first request


def test_sglangs_log_is_read() -> None:
    assert read(*SGLANG_TEXT.splitlines())[0] == [([1, 2], [3, 4]), ("hi", "hello")]


def test_llama_cpps_log_is_read() -> None:
    body = {"messages": [USER], "model": "m"}
    log = [
        "srv  log_server_r: done request: POST /v1/chat/completions 127.0.0.1 200",
        f"srv  log_server_r: request:  {json.dumps(body)}",
        f"srv  log_server_r: response: {json.dumps(RESPONSE)}",
        f"srv  log_server_r: request:  {json.dumps({**body, 'stream': True})}",
        "srv  log_server_r: response: ",
    ]
    assert read(*log)[0] == [([USER], SAID)]


def test_aiders_llm_history_is_read() -> None:
    log = """TO LLM 2026-11-27T10:00:00
-------
SYSTEM Be kind.
-------
USER hi
USER there
LLM RESPONSE 2026-11-27T10:00:02
ASSISTANT hello
TO LLM 2026-11-27T10:00:05
-------
USER hi
LLM RESPONSE 2026-11-27T10:00:06
ASSISTANT one
ASSISTANT two
"""
    asked = [SYSTEM, {"role": "user", "content": "hi\nthere"}]
    found = [(asked, SAID), ([USER], {"role": "assistant", "content": "one\ntwo"})]
    assert read(*log.splitlines())[0] == found


def test_a_log_that_its_clients_wrote_into_takes_linear_time() -> None:
    """A prompt of the old pattern's own marks; it took minutes at 4 kB."""
    prompt = "out={'text': 'x text='" * 20_000
    line = f"[x] Finish: obj=G(rid='r', text={prompt!r}, input_ids=None), out={{'text': 'hello'}}"
    cut = line[: len(line) - 20]
    started = time.process_time()
    assert read(line)[0] == [(prompt, "hello")]
    read(cut, cut.replace("'", '"'))
    assert time.process_time() - started < 20


# Counted wrong before: each is the same calls in another form, so it has the same counts.

FOLLOW_UP = {"role": "user", "content": "and then"}
TURNS = [
    ([USER], {"role": "assistant", "content": "one two three"}),
    ([USER, {"role": "assistant", "content": "one two three"}, FOLLOW_UP], SAID),
]


def state(messages: Sequence[Any]) -> list[Any]:
    """As LangChain dumps them."""
    kinds = {"user": "HumanMessage", "assistant": "AIMessage", "tool": "ToolMessage"}
    return [
        {
            "lc": 1,
            "type": "constructor",
            "id": ["langchain", "schema", kinds[each["role"]]],
            "kwargs": {"content": each["content"], "type": "x"},
        }
        for each in messages
    ]


@pytest.mark.parametrize("kind", [None, "chain", "llm"])
@pytest.mark.parametrize("write", [list, state])
def test_a_state_of_messages_is_history_and_one_answer(
    kind: str | None, write: Callable[[Any], Any]
) -> None:
    runs = [
        {
            "id": str(n),
            "inputs": {"messages": write(asked)},
            "outputs": {"messages": write([*asked, said])},
            **({"run_type": kind} if kind else {}),
        }
        for n, (asked, said) in enumerate(TURNS)
    ]
    assert read(*runs)[0] == TURNS
    # In a log with the model's own runs, those around them do not count.
    own = [
        {"id": f"m{n}", "run_type": "llm", "inputs": {"messages": asked}, "outputs": said}
        for n, (asked, said) in enumerate(TURNS)
    ]
    both = [*own, *runs] if kind == "chain" else own
    found, reader, _ = read(*both)
    assert found == TURNS
    assert sum(reasons(reader).values()) == (2 if kind == "chain" else 0)


def test_an_agents_state_has_an_answer_for_each_call_of_the_model() -> None:
    run = {
        "inputs": {"messages": [USER]},
        "outputs": {"messages": [USER, CALLED, TOOL_RESULT, SAID]},
    }
    assert read(run)[0] == [([USER], CALLED), ([USER, CALLED, TOOL_RESULT], SAID)]


@pytest.mark.parametrize("text", [json.dumps, lambda value: value])
def test_langfuses_generations_count_and_spans_do_not(text: Callable[[Any], Any]) -> None:
    rows = []
    for n, (asked, said) in enumerate(TURNS):
        whole = {"messages": [*asked, said]}
        rows += [
            {
                "id": f"s{n}",
                "type": "SPAN",
                "input": text({"messages": asked}),
                "output": text(whole),
            },
            {"id": f"g{n}", "type": "GENERATION", "input": text(asked), "output": text(said)},
            {"id": f"t{n}", "type": "TOOL", "input": "look", "output": "5"},
            {"id": f"e{n}", "type": "EVENT", "input": None, "output": None},
        ]
    found, reader, _ = read(*rows)
    assert found == TURNS
    assert reasons(reader) == {"no model call": 4, "not a model's call, but around one": 2}
    trace = {"input": text({"messages": [USER]}), "output": text(SAID), "observations": rows}
    assert read(trace)[0] == TURNS


def test_equal_ids_with_equal_texts_count_once() -> None:
    log = [
        logged({"messages": asked}, {"id": f"r{n}", "choices": [{"message": said}]})
        for n, (asked, said) in enumerate(TURNS)
    ]
    found, reader, _ = read(*log, *log)
    assert found == TURNS and reader.duplicates == 2
    assert "dropped: 2 that were there twice" in reader.summary()
    # Another answer under a name that somebody numbered is another call.
    other = logged({"messages": [USER]}, {"id": "r0", "choices": [{"message": SAID}]})
    assert len(read(*log, other)[0]) == 3


THOUGHT = {**SAID, "reasoning_content": "Well, so."}
THOUGHTS: list[Any] = [
    logged(ASKED, reply(THOUGHT)),
    logged(ASKED, reply({**SAID, "reasoning": "Well, so."})),
    *(
        logged(
            ASKED,
            events(
                *(delta(**each) for each in ({name: "Well,"}, {name: " so."}, {"content": "hello"}))
            ),
        )
        for name in ("reasoning_content", "reasoning")
    ),
    *(
        logged({"input": [USER]}, {"output": [part("reasoning", **each), ITEM]})
        for each in (
            {"summary": [text("Well, so.", "summary_text")]},
            {"content": [text("Well, so.", "reasoning_text")], "summary": []},
        )
    ),
    logged(ASKED, part("message", content=[part("thinking", thinking="Well, so."), text("hello")])),
    logged(
        ASKED,
        events(
            part("message_start", message=part("message", id="r")),
            part("content_block_start", index=0, content_block=part("thinking", thinking="")),
            changed(delta=part("thinking_delta", thinking="Well,")),
            changed(delta=part("thinking_delta", thinking=" so.")),
            part("content_block_start", index=1, content_block=text("")),
            changed(index=1, delta=text("hello", "text_delta")),
        ),
    ),
    {"inputs": ASKED, "outputs": {"message": {**SAID, "thinking": "Well, so."}}},
]


@pytest.mark.parametrize("line", THOUGHTS)
def test_thoughts_are_part_of_the_answer(line: Any) -> None:
    assert read(line)[0] == [([USER], THOUGHT)]


# Agents' sessions, trainers' files, and shapes that no table names.


def turns_of(session: Sequence[Any], *lines: Any) -> None:
    """The lines have the session's answers, each once, with all before it."""
    expected = [
        (list(session[:n]), each) for n, each in enumerate(session) if each["role"] == "assistant"
    ]
    found, _, records = read(*lines)
    assert found == expected
    assert len({each["session"] for each in records}) == 1


SESSION = [USER, CALLED, TOOL_RESULT, SAID, USER, SAID]


def claude(*messages: Any, parents: bool) -> list[Any]:
    """A session of Claude Code: a line for each block of an answer."""
    lines: list[Any] = [{"type": "summary", "summary": "x", "leafUuid": "y"}]
    for n, (kind, content) in enumerate(messages):
        said = {"role": kind, "content": content, "model": "claude", "id": "msg_1"}
        parent = str(n - 1) if n and parents else None
        line = {
            "parentUuid": parent,
            "sessionId": "s",
            "type": kind,
            "message": said,
            "uuid": str(n),
        }
        lines.append(line)
        if n == 2:
            lines.append({"type": "system", "uuid": "x", "parentUuid": parent, "content": "x"})
    return lines


@pytest.mark.parametrize("parents", [True, False])
def test_claude_codes_sessions_are_read(parents: bool) -> None:
    lines = claude(
        ("user", "hi"),
        ("assistant", [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]),
        ("assistant", [CALL_BLOCK]),
        ("user", [RESULT_BLOCK]),
        ("assistant", [text("hello")]),
        parents=parents,
    )
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    found, reader, _ = read(*lines)
    assert found == [([USER], {**thought, **CALLED}), ([USER, thought, CALLED, TOOL_RESULT], SAID)]
    assert reasons(reader) == {"no model call": 1}  # the summary


def test_codexs_sessions_are_read() -> None:
    def line(kind: str, **payload: Any) -> dict[str, Any]:
        return {"timestamp": "2026", "type": kind, "payload": payload}

    def item(**payload: Any) -> dict[str, Any]:
        return line("response_item", **payload)

    lines = [
        line("session_meta", id="s", instructions="Be kind."),
        item(type="message", role="user", content=[text("hi", "input_text")]),
        line("event_msg", type="user_message", message="hi"),
        item(type="reasoning", summary=[], encrypted_content="x"),
        item(type="function_call", name="look", arguments='{"at": 1}', call_id="c1"),
        item(type="function_call_output", call_id="c1", output="5"),
        line("event_msg", type="agent_message", message="hello"),
        item(type="message", role="assistant", content=[text("hello", "output_text")]),
    ]
    turns_of([SYSTEM, USER, CALLED, TOOL_RESULT, SAID], *lines)


def event(kind: str, source: str, **fields: Any) -> dict[str, Any]:
    """An event of OpenHands'."""
    return {"kind": kind, "source": source, **fields}


OPENHANDS = [
    event("SystemPromptEvent", "agent", system_prompt=text("Be kind.")),
    event("MessageEvent", "user", llm_message={**USER, "content": [text("hi")]}),
    event(
        *("ActionEvent", "agent"),
        thought=[],
        tool_call={"id": "c1", **ARGUMENTS},
        tool_call_id="c1",
        action={"kind": "Look"},
    ),
    event(
        *("ObservationEvent", "environment"),
        tool_call_id="c1",
        observation={"content": [text("5")]},
    ),
    event("MessageEvent", "agent", llm_message={**SAID, "content": [text("hello")]}),
    event("ConversationStateUpdateEvent", "environment", key="x", value={}),
]


def test_openhands_events_are_read() -> None:
    turns_of([SYSTEM, USER, CALLED, TOOL_RESULT, SAID], *OPENHANDS)


STEPS = [
    {"step_id": 1, "source": "user", "message": "hi"},
    {
        "step_id": 2,
        "source": "agent",
        "message": "",
        "tool_calls": [{"tool_call_id": "c1", "function_name": "look", "arguments": {"at": 1}}],
        "observation": {"results": [{"source_call_id": "c1", "content": "5"}]},
    },
    {"step_id": 3, "source": "agent", "message": "hello"},
]


@pytest.mark.parametrize(
    "value",
    [
        SESSION,
        {"messages": SESSION},
        {"trajectory": [{"action": "look", "observation": "5"}], "history": SESSION, "info": {}},
        {
            "conversations": [
                {
                    "from": {"user": "human", "assistant": "gpt"}.get(each["role"], each["role"]),
                    "value": each["content"],
                    **{k: v for k, v in each.items() if k not in ("role", "content")},
                }
                for each in SESSION
            ]
        },
        {"log": json.dumps({"data": [{"messages": SESSION}]})},
        {
            "samples": [
                {"messages": SESSION, "output": {"choices": []}, "target": "x", "events": []}
            ]
        },
    ],
)
def test_conversations_are_read_wherever_they_lie(value: Any) -> None:
    turns_of(SESSION, value)


def test_lines_that_are_messages_are_one_conversation() -> None:
    turns_of(SESSION, *SESSION)


def test_harbors_trajectories_are_read() -> None:
    value = {"schema_version": "ATIF-v1.2", "session_id": "s", "steps": STEPS}
    turns_of([USER, CALLED, TOOL_RESULT, SAID], value)


def test_demonstrations_are_no_answers() -> None:
    shown = [{**USER, "is_demo": True}, {**SAID, "is_demo": True}]
    found, _, _ = read({"trajectory": [], "history": [*shown, USER, SAID]})
    assert [said for _, said in found] == [SAID]


def collected(value: Any) -> dict[str, Any]:
    """A value as OpenTelemetry's collector writes it."""
    if isinstance(value, dict):
        pairs = [{"key": name, "value": collected(each)} for name, each in value.items()]
        return {"kvlistValue": {"values": pairs}}
    if isinstance(value, list):
        return {"arrayValue": {"values": [collected(each) for each in value]}}
    return {"stringValue": value}


MODEL_EVENT = {
    "event": "model",
    "model": "m",
    "input": [USER],
    "tools": [TOOL["function"]],
    "output": {"id": "o1", "model": "m", "choices": [{"message": SAID, "stop_reason": "stop"}]},
    "call": {"request": {"messages": [USER]}, "response": reply(SAID)},
}
SHAPES: list[tuple[Any, list[Any]]] = [
    (
        {"prompt": [USER], "chosen": [SAID], "rejected": [CALLED]},
        [([USER], SAID), ([USER], CALLED)],
    ),
    ({"chosen": [USER, SAID], "rejected": [USER, CALLED]}, [([USER], SAID), ([USER], CALLED)]),
    (
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        [("\n\nHuman: q\n\nAssistant:", " a"), ("\n\nHuman: q\n\nAssistant:", " b")],
    ),
    (
        {"input": "<|user|>hi", "output": "hello", "gts": "x", "score": 1.0, "step": 1},
        [("<|user|>hi", "hello")],
    ),
    (
        {
            "doc_id": 0,
            "doc": {"question": "?"},
            "target": "x",
            "resps": [["hello"]],
            "arguments": {"gen_args_0": {"arg_0": "hi", "arg_1": {"until": []}}},
            "filtered_resps": ["hello"],
        },
        [("hi", "hello")],
    ),
    ({"doc_id": 0, "arguments": [["hi", {}]], "resps": [["hello"]]}, [("hi", "hello")]),
    ({"doc_id": 0, "arguments": [["hi", " no"]], "resps": [[[-1.5, False]]]}, []),
    (
        {
            "run_type": "llm",
            "inputs": {"prompts": ["hi"]},
            "outputs": {"generations": [[{"text": "hello"}]]},
        },
        [("hi", "hello")],
    ),
    (
        {
            "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
            "candidates": [{"content": {"role": "model", "parts": [{"text": "hello"}]}}],
        },
        [],
    ),
    (
        logged({"model": "m", "prompt": "hi"}, {"response": "hello", "done": True}),
        [("hi", "hello")],
    ),
    (logged({"prompt": "hi"}, {"content": "hello", "tokens_predicted": 1}), [("hi", "hello")]),
    (logged({"inputs": "hi"}, [{"generated_text": "hi hello"}]), [("hi", " hello")]),
    (
        logged({"prompt": ["a", "b"], "n": 2}, {"choices": [{"text": each} for each in "cdef"]}),
        [("a", "c"), ("a", "d"), ("b", "e"), ("b", "f")],
    ),
]
SHAPES += [
    (each, ONE_CALL)
    for each in (
        {
            "samples": [
                {
                    "messages": [USER, SAID],
                    "output": reply(SAID),
                    "target": "x",
                    "events": [{"event": "state"}, MODEL_EVENT],
                }
            ]
        },
        {"prompt": [USER], "completion": [SAID]},
        {"doc_id": 0, "arguments": [[json.dumps([USER]), {}]], "resps": [["hello"]]},
        {"run_id": "r", "type": "sampling", "data": {"prompt": [USER], "sampled": ["hello"]}},
        {"op_name": "openai.chat", "inputs": {"messages": [USER]}, "output": reply(SAID)},
        {
            "id": "1",
            "run_type": "llm",
            "inputs": {"messages": [state([USER])]},
            "outputs": {
                "generations": [[{"text": "hello", "message": state([SAID])[0]}]],
                "llm_output": {},
            },
        },
        logged(
            {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
            {"candidates": [{"content": {"role": "model", "parts": [{"text": "hello"}]}}]},
        ),
        logged(
            {"modelId": "m", "messages": [{"role": "user", "content": [{"text": "hi"}]}]},
            {"output": {"message": {"role": "assistant", "content": [{"text": "hello"}]}}},
        ),
        logged(ASKED, [delta(role="assistant"), delta(content="hel"), delta(content="lo")]),
        logged(ASKED, ": ping\n\n" + CHAT_EVENTS.replace("\n", "\r\n")),
        {
            "eventName": "gen_ai.client.inference.operation.details",
            "spanId": "1",
            "attributes": collected(
                {
                    "gen_ai.input.messages": [message("user", part("text", content="hi"))],
                    "gen_ai.output.messages": [message("assistant", part("text", content="hello"))],
                }
            )["kvlistValue"]["values"],
        },
        {
            "attributes": {
                "llm": {
                    "input_messages": [{"message": USER}],
                    "output_messages": [{"message": SAID}],
                },
                "openinference": {"span": {"kind": "LLM"}},
            }
        },
    )
]


CALLS_OF_THE_AI_SDK = [{"toolCallId": "c1", "toolName": "look", "args": {"at": 1}}]
SHAPES += [
    (
        {"input": ASKED, "preferred_output": [SAID], "non_preferred_output": [CALLED]},
        [([USER], SAID), ([USER], CALLED)],
    ),
    (
        {
            "name": "ai.generateText.doGenerate",
            "attributes": {
                "gen_ai.system": "openai",
                "ai.prompt.messages": json.dumps([{**USER, "content": [text("hi")]}]),
                "ai.response.toolCalls": json.dumps(CALLS_OF_THE_AI_SDK),
            },
        },
        [([USER], CALLED)],
    ),
    (
        {"results": [{"prompt": {"raw": "hi", "label": "x"}, "response": {"output": "hello"}}]},
        [("hi", "hello")],
    ),
    (
        {"prompt": [USER], "completion": [CALLED, TOOL_RESULT, SAID]},
        [([USER], CALLED), ([USER, CALLED, TOOL_RESULT], SAID)],
    ),
]
SHAPES += [
    (each, ONE_CALL)
    for each in (
        {
            "input": {"inputBodyJson": {"messages": [USER]}},
            "modelId": "m",
            "output": {
                "outputBodyJson": {
                    "type": "message",
                    "role": "assistant",
                    "content": [text("hello")],
                }
            },
        },
        {"full_request": ASKED, "full_response": RESPONSE},
        [
            {"author": "user", "content": {"role": "user", "parts": [{"text": "hi"}]}},
            {"author": "a", "content": {"role": "model", "parts": [{"text": "hello"}]}},
        ],
        [{"task_id": 0, "reward": 1.0, "traj": [USER, SAID]}],
        {
            "object": "trace.span",
            "span_data": {"type": "generation", "input": [USER], "output": [SAID]},
        },
    )
]


@pytest.mark.parametrize(("value", "expected"), SHAPES)
def test_calls_are_known_by_their_shape(value: Any, expected: list[Any]) -> None:
    assert read(value)[0] == expected


def test_messages_that_opentelemetry_logs_one_by_one_are_one_call() -> None:
    def event(name: str, **body: Any) -> dict[str, Any]:
        return {"event_name": f"gen_ai.{name}", "span_id": "1", "body": body}

    log = [
        event("system.message", content="Be kind."),
        event("user.message", content="hi"),
        event("assistant.message", tool_calls=[{**CALL, "function": ARGUMENTS}]),
        event("tool.message", id="c1", content="5"),
        event("choice", index=0, finish_reason="stop", message=SAID),
    ]
    found, _, _ = read(*log)
    assert [said for _, said in found] == [SAID]
    assert [each["role"] for each in found[0][0]] == ["system", "user", "assistant", "tool"]


def test_a_form_of_ones_own_is_mapped() -> None:
    line = {"in": {"msgs": [USER]}, "out": {"text": ["hello"]}, "chat": 7, "uid": "u"}
    row = mapped("messages=in.msgs, answer=out.text[0], session=chat, id = uid")
    found, _, records = read(line, row=row)
    assert found == [([USER], SAID)]
    assert (records[0]["session"], records[0]["id"]) == ("7", "u")
    for bad in ("messages", "messages=a.[", "what=a, answer=b", "answer=b"):
        with pytest.raises(RecordError):
            mapped(bad)


def test_images_are_left_out_and_counted() -> None:
    seen = {
        "role": "user",
        "content": [text("hi"), {"type": "image_url", "image_url": {"url": "x"}}],
    }
    found, reader, _ = read(logged({"messages": [seen]}, RESPONSE))
    assert found == [([{**USER, "left_out": 1}], SAID)]
    assert reader.summary()[-1] == "left out of prompts: 1 images or other attachments"


@pytest.mark.parametrize(
    "message",
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**CALL, "function": {"name": "look", "arguments": None}}],
        },
        {
            "role": "assistant",
            "content": [],
            "tool_calls": [{**CALL, "function": {"name": "look", "arguments": ""}}],
        },
        {"role": "assistant", "content": None, "function_call": {"name": "look"}},
    ],
)
def test_null_contents_and_arguments_are_read(message: Any) -> None:
    [(_, said)], _, _ = read(logged(ASKED, reply(message)))
    assert said["content"] == ""
    assert said["tool_calls"][0]["function"] == {"name": "look", "arguments": {}}
    assert read(logged(ASKED, reply({"role": "assistant", "content": None})))[0] == [
        ([USER], {"role": "assistant", "content": ""})
    ]


NO_CALLS: list[tuple[Any, str]] = [
    (line, "")
    for line in (
        logged(json.dumps({"prompt": "\ud800"}), {"choices": [{"text": "x"}]}),
        logged("[" * 100_000, {}),
        logged({}, "data: x"),
        logged({"input": 5}, {"output": []}),
        logged({"messages": [5]}, RESPONSE),
        {"messages": [USER], "response": None, "model_parameters": 5},
        logged({"messages": [5]}, {"type": "message", "content": []}),
        logged(ASKED, {"what": 5}),
        {"messages": [5, 6]},
        {"messages": []},
        {"conversations": [{"from": []}]},
        {"inputs": {}, "outputs": {}},
        {"input": 5, "output": 5},
        {"resourceSpans": [5]},
        {"attributes": {"gen_ai.input.messages": "[5]", "gen_ai.output.messages": "[5]"}},
        {"attributes": {"gen_ai.input.messages": "{", "gen_ai.output.messages": "[5]"}},
        {"attributes": [{"key": "gen_ai.prompt", "value": {}}]},
        {"attributes": {"gen_ai.prompt.0": 5, "gen_ai.prompt.0.role": 5}},
        {"custom_id": 5},
        {"custom_id": [5], "body": 5},
        {"custom_id": 5, "response": 5},
        {**SGLANG, "out": 5},
        {"vllm": 5},
        {"type": "user", "message": {"role": 5}},
        "[1] Finish: obj=G(text=None, x=1), out={'text': None}",
        "5",
        "null",
        "x",
    )
]
TEXT = {"choices": [{"text": "y"}]}
NO_CALLS += [
    ({"prompt": "x"}, "no model call, such as f, line 1, which has prompt"),
    (logged("x", {}), "no answer, such as f, line 1"),
    (logged({"prompt": "x"}, {"choices": [{}]}), "no answer, such as f, line 1"),
    (logged(ASKED, {"error": {"message": "slow down"}}), "no answer, such as f, line 1"),
    (logged({}, [1]), "no messages and no prompt"),
    (logged({}, TEXT), "a request holds no messages and no prompt"),
    ({"prompt": "x", "output": 5}, "must be text, messages or choices, got 5"),
    (logged({"prompt": [1]}, TEXT), "a prompt of token ids needs those of its answer"),
    (
        logged({"prompt": [1]}, {"choices": [{**IDS, "token_ids": [-1]}]}),
        "output_ids must be a list of integers from 0 to 2^31 - 1, got [-1]",
    ),
    (
        logged({"messages": [{"role": "user", "content": [5]}]}, RESPONSE),
        "a message's content must be text or parts, got 5",
    ),
    (
        logged({"prompt": "x", "prediction": {"content": 5}}, TEXT),
        "prediction.content must be a string or a list of text parts, got 5",
    ),
]


@pytest.mark.parametrize(("line", "reason"), NO_CALLS)
def test_a_line_that_is_no_call_is_counted_and_named(line: Any, reason: str) -> None:
    found, reader, _ = read(line, logged(ASKED, RESPONSE))
    assert found == [([USER], SAID)]
    left_out = [each for each in reader.summary() if each.startswith("left out: 1 x ")]
    assert len(left_out) == 1 and "f, line 1" in left_out[0] and reason in left_out[0]


def test_a_fault_within_a_string_that_is_json_is_named() -> None:
    bad = logged({"messages": [5]}, RESPONSE)
    _, reader, _ = read({"log": json.dumps(bad)})
    assert reader.left_out["not understood"][1] == "f, line 1: a message must be an object, got 5"


def test_one_bad_call_costs_no_other() -> None:
    bad = {"attributes": {"gen_ai.input.messages": "[5]", "gen_ai.output.messages": "[5]"}}
    negative = {"prompt_ids": [-1], "output_ids": [1]}
    good = [{"attributes": {**NUMBERED, "gen_ai.response.id": str(n)}} for n in range(2)]
    found, reader, _ = read({"spans": [good[0], bad, negative, good[1]]})
    assert len(found) == reader.calls == 2
    assert reasons(reader) == {"not understood": 2}


NAMES = """messages role content parts request response choices message input output type lc kwargs
attributes body event payload inputs outputs prompt completion history id delta custom_id function
arguments events steps source uuid parentUuid tool_calls""".split()  # noqa: SIM905
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "text", "[{}]", "data: {}"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=24,
)


@given(st.lists(JSON, max_size=4))
def test_no_value_fails_the_reader(values: list[Any]) -> None:
    _, reader, records = read(*values)
    assert len(records) == reader.calls
    assert all(isinstance(each.get("output", ""), str) for each in records)


PAIRS = [
    {"prompt": f"p{number}", "output": "é" * size}
    for number, size in enumerate([0, 5, 600_000, 3_000_000, 7, 0])
]


def zstd_frames(content: bytes) -> bytes:
    """Two frames, as a log that was appended to has them."""
    half = len(content) // 2
    return b"".join(map(zstd.compress, (content[:half], content[half:])))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd_frames])
@pytest.mark.parametrize("form", ["lines", "array", "indented array"])
def test_files_are_read_as_they_come(
    tmp_path: Path, pack: Callable[[bytes], bytes], form: str
) -> None:
    text = "\n".join(json.dumps(pair, ensure_ascii=False) for pair in PAIRS)
    if form != "lines":
        text = json.dumps(PAIRS, indent=1 if "indented" in form else None, ensure_ascii=False)
    log = tmp_path / "log"
    log.write_bytes(pack(text.encode()))
    assert [line.value for line in parse_lines(log)] == PAIRS
    assert sum(line.bytes for line in parse_lines(log)) <= log.stat().st_size


@pytest.mark.parametrize("text", [VLLM, SGLANG_TEXT])
def test_a_servers_log_is_read_by_lines(tmp_path: Path, text: str) -> None:
    log = tmp_path / "server.log"
    log.write_text(text)
    assert [line.text.decode() for line in parse_lines(log)] == text.splitlines(keepends=True)


@pytest.mark.parametrize(
    "content",
    [
        b"[{}, {",
        b"[x]",
        b"[" * 100_000,
        b'["\xff"]',
        gzip.compress(b"{}\n{}\n", mtime=0)[:-9],
        b"\x1f\x8bxx",
        zstd.compress(b"{}\n" * 9_999)[:-9] + b"xxxxxxxxxx",
        zstd.compress(b"{}\n{}\n")[:-3],
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    result = fastdraft("replay", log)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert str(log) in result.stderr
    assert isinstance(result.exception, SystemExit)


LINE = json.dumps(logged({"messages": [{"role": "user", "content": "é"}]}, RESPONSE))
PRETTY = json.dumps(json.loads(LINE), indent=2, ensure_ascii=False)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + LINE.encode(),
        f"{LINE}\r\n\r\n".encode(),
        *(f"{LINE}\n".encode(each) for each in ("utf-16", "utf-16-le", "utf-16-be")),
        PRETTY.encode(),
        b"\xef\xbb\xbf" + f"  [{PRETTY}\n]".encode(),
        f'{{"request": \n{LINE}\nnull\n{"[" * 900 + "]" * 900}\n{{"request": {{"mess'.encode(),
        f'{LINE}\n{LINE[:-1]}, "more": "{"x" * (1 << 20)}"}}\n'.encode(),
    ],
)
def test_one_call_is_read_from_a_file_in_any_state(tmp_path: Path, content: bytes) -> None:
    marks = {b"{\x00": codecs.BOM_UTF16_LE, b"\x00{": codecs.BOM_UTF16_BE}
    content = marks.get(content[:2], b"") + content
    log = tmp_path / "log"
    log.write_bytes(content)
    reader = Reader(Shown())
    records = [record for line in parse_lines(log) for record in reader(line)]
    assert [json.loads(each["prompt"])[0]["content"] for each in records] == ["é"]
    assert reader.calls == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: a line has more than 1,048,576 bytes"),
        (zstd.compress(b"\x00" * 3_000_000), "a line has more than"),
        (
            zstd.compress((b"{}" + b" " * 9_999 + b"\n") * 900),
            "unpacks to more than 1000 times its size",
        ),
        (b"[" + b"[" * 3_000_000, "nested too deeply"),
        (b'{\n"a": "' + b"x\n" * 1_500_000, "a value has more than"),
        (b"[" + json.dumps("x" * 3_000_000).encode() + b"]", "a value has more than"),
    ],
)
def test_input_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    """The bound made smaller: a line, a value, an unpacked file and a device."""
    monkeypatch.setattr("fastdraft.replay.lines.MOST_BYTES", 1 << 20)
    log = tmp_path / "log"
    log.write_bytes(content) if content else log.symlink_to("/dev/zero")
    result = fastdraft("replay", log)
    assert result.exit_code == 1, result.output
    assert message in result.stderr


def test_a_pipe_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(log.write_text, f"{LINE}\n")
        [line] = parse_lines(log)
    assert done.result() == line.bytes == len(LINE) + 1


def test_a_long_text_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdraft.replay.calls.MOST_TEXT", 1_000)
    found, reader, _ = read({"prompt": "x" * 1_001, "output": "y"}, {"prompt": "x", "output": "y"})
    assert len(found) == 1
    assert "a text has more than 1,000 characters" in reader.left_out["not understood"][1]


def test_parquet_and_archives_of_inspect_are_read(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": [USER], "completion": [SAID]}] * 70
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "log.parquet")
    sample = {"messages": [USER, SAID], "events": [MODEL_EVENT], "output": {}, "target": "x"}
    with zipfile.ZipFile(tmp_path / "log.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"samples": [sample]}))
        archive.writestr("samples/1_epoch_1.json", json.dumps(sample))
    for name, count in (("log.parquet", 70), ("log.eval", 1)):
        reader = Reader(Shown())
        lines = list(parse_lines(tmp_path / name))
        assert sum(len(reader(line)) for line in lines) == count
    (tmp_path / "log.parquet").write_bytes(b"PAR1xxxxxxxx")
    with pytest.raises(RecordError, match="cannot read"):
        list(parse_lines(tmp_path / "log.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.csv", 'input,output\n"hi","hello"\n', "CSV is not read: pandas.read_csv(FILE)"),
        ("log.yaml", "request: hi\nresponse: hello\n", "YAML is not read: json.dump("),
        (
            "server.log",
            "INFO 11-24 10:00:00 [loggers.py:1] Avg prompt throughput: 5 tokens/s\n",
            "only with --enable-log-requests --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG",
        ),
        ("bench.json", '{"generated_texts": ["x"]}', "answers without their prompts"),
        ("log.jsonl", '{"what": 5}\n', "1 x no model call, such as {log}, line 1, which has what"),
    ],
)
def test_a_refusal_says_what_to_do(tmp_path: Path, name: str, content: str, message: str) -> None:
    log = tmp_path / name
    log.write_text(content)
    out = tmp_path / "out.fds"
    (tmp_path / "tokenizer.json").write_text(Tokenizer(WordLevel({"x": 0}, "x")).to_str())
    tokenizer = tmp_path / "tokenizer.json"
    store = ["datastore", "build", out, "--answers", log, "--tokenizer", tokenizer]
    for command in (["replay", log], store):
        result = fastdraft(*command)
        assert result.exit_code == 1, result.output
        assert message.format(log=log) in result.stderr
        assert "Forms that are read: " in result.stderr and "others by --map" in result.stderr
    assert not out.exists()


def test_a_folder_of_any_files_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.traj").write_text(json.dumps({"trajectory": [], "history": SESSION}))
    (tmp_path / "b.json").write_text(PRETTY)
    (tmp_path / "b.jsonl").write_text(f"{LINE.replace('u00e9', 'u00e8')}\n{PRETTY}")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (tmp_path / ".hidden").write_text(LINE)
    reader = Reader(Shown())
    families = read_families([tmp_path], lambda texts: [[1]] * len(texts), convert=reader)
    counts = {name: len(each) for name, each in families.items()}
    assert counts == {"a/one": 3, "b": 1, "b.jsonl": 1}
    assert reader.calls == 5


def test_openhands_keeps_a_file_for_each_event(tmp_path: Path) -> None:
    """As its conversations lie on a disk: a folder is one of them."""
    for conversation in ("a", "b"):
        folder = tmp_path / conversation / "events"
        folder.mkdir(parents=True)
        for number, event in enumerate(OPENHANDS):
            (folder / f"event-{number:05}-0a-1b.json").write_text(json.dumps(event))
    reader = Reader(Shown())
    found = read_families([tmp_path], lambda texts: [[1, 2] for _ in texts], convert=reader)
    assert {name: len(records) for name, records in found.items()} == {"a/events": 2, "b/events": 2}
    assert reader.calls == 4 and not reader.left_out


def test_inspects_references_are_followed_and_its_cache_is_not_asked() -> None:
    pool = [SYSTEM, {**USER, "content": "attachment://x"}]
    event = {"event": "model", "input": [], "input_refs": [[0, 1], [1, 2]], "model": "m"}
    event["output"] = {"choices": [{"message": {**SAID, "content": "attachment://y"}}]}
    sample = {
        "messages": [USER, SAID],
        "output": {},
        "target": "",
        "events": [{"event": "state"}, event, {**event, "cache": "read"}],
        "events_data": {"messages": pool},
        "attachments": {"x": "hi", "y": "hello"},
    }
    # Several samples in one value are not read by their messages too.
    found, reader, _ = read({"samples": [sample, sample]})
    assert found == [([SYSTEM, USER], SAID)] * 2
    assert reasons(reader) == {"no model call": 2}


def test_inspects_archive_is_read_where_zipfile_does_not_know_how_it_is_packed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.eval"
    sample = json.dumps({"messages": [USER], "answer": "hello"}).encode()
    packed = zstd.compress(sample)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("samples/1_epoch_1.json", packed)
    # The same as an archive of that method: both headers name it, and the size unpacked.
    data = bytearray(path.read_bytes())
    for sign, method, size in ((b"PK\3\4", 8, 22), (b"PK\1\2", 10, 24)):
        at = data.index(sign)
        data[at + method : at + method + 2] = (93).to_bytes(2, "little")
        data[at + size : at + size + 4] = len(sample).to_bytes(4, "little")
    path.write_bytes(data)
    assert [line.text for line in parse_lines(path)] == [sample]


def test_an_answer_with_the_ids_of_its_prompt_is_a_call_by_itself() -> None:
    ids = {"prompt_token_ids": [1, 2, 3], "choices": [{"token_ids": [1, 2]}]}
    assert read(logged({}, ids))[0] == [([1, 2, 3], [1, 2])]
