"""Recorded conversations of many forms become records."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fastdraft.cli.app import app
from fastdraft.replay.importers import FORMS, Importer
from fastdraft.replay.records import JsonLine, RecordError, parse_lines, zstd_module
from fastdraft.replay.tokenizer import TextTokenizer

zstd = zstd_module()

USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "hello"}
ARGUMENTS = {"name": "look", "arguments": '{"at": 1}'}
CALL = {"type": "function", "id": "c1", "function": ARGUMENTS}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "5"}
SYSTEM = {"role": "system", "content": "Be kind."}
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
RESPONSE = {"id": "r", "model": "m", "choices": [{"message": SAID}]}


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


LOG = "openai"
ASKED = {"messages": [USER]}
FIRST_PART = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look"}}]}
CALL_ITEM = {"type": "function_call", "call_id": "c1", **ARGUMENTS}
CALL_BLOCK = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}
TOLD_BLOCK = {"type": "tool_result", "tool_use_id": "c1", "content": "5"}
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
        {"role": "user", "content": [TOLD_BLOCK]},
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
ALL = [SYSTEM, USER, CALLED, TOLD]
CASES: list[tuple[str, Any, list[tuple[Any, Any]]]] = [
    (LOG, logged(json.dumps(ASKED), RESPONSE), [([USER], SAID)]),
    (LOG, logged({**ASKED, "stream": True}, CHAT_EVENTS), [([USER], SAID)]),
    (LOG, logged(ASKED, CALL_EVENTS), [([USER], CALLED)]),
    (LOG, logged({"prompt": "hi"}, TEXT_EVENTS), [("hi", "hello")]),
    (LOG, logged(ITEMS, {"output": [ITEM]}), [(ALL, SAID)]),
    (LOG, logged({"input": "hi"}, ITEM_EVENTS), [([USER], CALLED)]),
    (LOG, logged(BLOCKS, {"type": "message", "content": [text("hello")]}), [(ALL, SAID)]),
    (LOG, logged(ASKED, BLOCK_EVENTS), [([USER], {**SAID, "tool_calls": [CALL]})]),
    (
        "helicone",
        {"request_body": ASKED, "response_body": json.dumps(RESPONSE)},
        [([USER], SAID)],
    ),
    (
        "litellm",
        {**ASKED, "response": RESPONSE, "model_parameters": {"tools": [TOOL]}},
        [([USER], SAID)],
    ),
    (
        "fine-tuning",
        {"messages": [USER, SAID, USER, CALLED], "tools": [TOOL]},
        [([USER], SAID), ([USER, SAID, USER], CALLED)],
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        [([USER], SAID)],
    ),
    ("pairs", {"prompt": "hi", "completion": "hello"}, [("hi", "hello")]),
    ("pairs", {"instruction": "Say", "input": "hi", "output": "hello"}, [("Say\n\nhi", "hello")]),
    ("langsmith", {"inputs": ASKED, "outputs": {"choices": [{"message": SAID}]}}, [([USER], SAID)]),
    ("langfuse", {"input": [USER], "output": SAID}, [([USER], SAID)]),
    ("langfuse", {"input": "hi", "output": "hello"}, [([USER], SAID)]),
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
SPANS_OF_A_CHAT = [
    {"name": "GET", "attributes": [{"key": "n", "value": {"intValue": "5"}}]},
    {
        "name": "chat m",
        "attributes": attributes(**{name: json.dumps(each) for name, each in CHAT.items()}),
    },
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
    ("otel", SPANS, [([SYSTEM, USER, CALLED, TOLD], SAID)]),
    ("otel", {"attributes": NUMBERED}, [([USER], SAID)]),
    ("otel", {"attributes": {"gen_ai.system": "openai"}}, []),
    ("sglang", SGLANG, [([1, 2], [3])]),
    ("sglang", {**SGLANG, "event": "request.received"}, []),
]
BATCH = [
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}},
    {"custom_id": "b", "body": {"prompt": "late"}},
    {"custom_id": "c", "params": {"messages": [USER]}},
    {"custom_id": "d", "body": {"prompt": "never"}},
    {"custom_id": "b", "response": None, "error": {"code": "expired"}},
    {
        "custom_id": "a",
        "response": {"status_code": 200, "body": {"choices": [{"text": "hello"}]}},
    },
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


class Rendered(TextTokenizer):
    """Keeps what the chat template gets."""

    def __init__(self) -> None:
        super().__init__("none")
        self.tools: list[Any] = []

    def render(self, messages: Any, tools: Any, answer: Any) -> tuple[Any, Any]:
        if not all(isinstance(message, dict) for message in messages):
            raise RecordError("not messages")
        self.tools.append(tools)
        return messages, answer


def imported(*lines: Any, form: str | None = None) -> tuple[list[tuple[Any, Any]], Rendered]:
    """Prompts and outputs, before messages are text and after; and what tools they had."""
    tokenizer = Rendered()
    importer = Importer(tokenizer, form=form)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastdraft.replay.importers.check_record", lambda *_: None)
        for number, line in enumerate(lines, 1):
            text = line.encode() if isinstance(line, str) else json.dumps(line).encode()
            for each in importer(JsonLine(number, f"f, line {number}", text, len(text))):
                names = (
                    ("prompt_ids", "output_ids") if "prompt_ids" in each else ("prompt", "output")
                )
                found.append((each[names[0]], each[names[1]]))
    return found, tokenizer


@pytest.mark.parametrize(("form", "line", "expected"), CASES)
def test_each_form_is_known_and_read(form: str, line: Any, expected: list[Any]) -> None:
    assert next(name for name in FORMS if FORMS[name].applies(line)) == form
    found, tokenizer = imported(line)
    assert found == expected
    has_tools = "tools" in json.dumps(line) or "definitions" in json.dumps(line)
    assert tokenizer.tools in ([], [[TOOL] if has_tools else None] * len(expected))


@pytest.mark.parametrize("order", [1, -1])
def test_requests_and_answers_of_batches_are_joined(order: int) -> None:
    found, _ = imported(*BATCH[::order])
    assert found == [("hi", "hello"), ([USER], SAID)][::order]


def test_vllms_log_is_read() -> None:
    # The server logs much before its first request, which is told of.
    first, *lines = VLLM.splitlines()
    with pytest.raises(RecordError, match="line 1: not JSON"):
        imported(first)
    found, _ = imported(*lines)
    assert found == [('it\'s\n"1"', "hello"), ([1, 2], [3]), ("it's", "hello")]


def test_sglangs_log_is_read() -> None:
    found, _ = imported(*SGLANG_TEXT.splitlines())
    assert found == [([1, 2], [3, 4]), ("hi", "hello")]


def test_every_form_has_a_case() -> None:
    assert {form for form, _, _ in CASES} | {"openai-batch", "records"} == FORMS.keys()


def test_a_form_that_is_named_is_not_guessed() -> None:
    line = {"prompt": "hi", "output": "hello", "messages": [USER, SAID]}
    assert imported(line)[0] == imported(line, form="records")[0] == [("hi", "hello")]
    assert imported(line, form="fine-tuning")[0] == [([USER], SAID)]


def test_answers_of_one_conversation_are_a_session() -> None:
    def sessions(line: Any) -> list[str]:
        text = json.dumps(line).encode()
        return [each["session"] for each in Importer(Rendered())(JsonLine(1, "f", text, 0))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastdraft.replay.importers.check_record", lambda *_: None)
        line = {"messages": [USER, SAID, USER, SAID]}
        assert sessions(line) == ["f"] * 2
        assert sessions({"id": "s", **line}) == ["s"] * 2


@pytest.mark.parametrize(
    "line",
    [
        logged("x", {}),
        logged("[" * 100_000, {}),
        logged({}, "data: x"),
        logged({"input": 5}, {"output": []}),
        logged({"messages": [5]}, RESPONSE),
        {"messages": [USER], "response": None, "model_parameters": 5},
        logged({"messages": [5]}, {"type": "message", "content": []}),
        {"messages": [5, 6]},
        {"conversations": [{"from": []}]},
        {"inputs": {}, "outputs": {}},
        {"input": 5, "output": 5},
        {"resourceSpans": [5]},
        {"attributes": {"gen_ai.input.messages": "[5]", "gen_ai.output.messages": "[5]"}},
        {"attributes": {"gen_ai.input.messages": "{", "gen_ai.output.messages": "[5]"}},
        {"attributes": [{"key": "gen_ai.prompt", "value": {}}]},
        {"custom_id": 5},
        {"custom_id": [5], "body": 5},
        {"custom_id": 5, "response": 5},
        {**SGLANG, "out": 5},
        {"vllm": 5},
        {"sglang": 5},
        "[1] Finish: obj=G(text=None, x=1), out={'text': None}",
    ],
)
def test_another_content_is_told(line: Any) -> None:
    with pytest.raises(RecordError, match=r"^f, line 1: "):
        imported(line)


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
def test_damaged_files_are_told(tmp_path: Path, content: bytes) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    result = CliRunner().invoke(app, ["replay", str(log)])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert str(log) in result.stderr
    assert isinstance(result.exception, SystemExit)
