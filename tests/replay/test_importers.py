"""Recorded conversations of many forms become records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fastdraft.cli.app import app
from fastdraft.replay.importers import FORMS, exchanges_of
from fastdraft.replay.records import RecordError, parse_lines

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


LOG = "requests with their responses"
PAIR = "pairs of a prompt and an answer"
FIRST_PART = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look"}}]}
CASES: list[tuple[str, Any, list[tuple[Any, Any]]]] = [
    (LOG, logged(json.dumps({"messages": [USER]}), RESPONSE), [([USER], SAID)]),
    (
        LOG,
        logged(
            {"messages": [USER], "stream": True},
            events(delta(role="assistant"), delta(content="hel"), delta(content="lo")),
        ),
        [([USER], SAID)],
    ),
    (
        LOG,
        logged(
            {"messages": [USER]},
            events(
                delta(**FIRST_PART),
                delta(tool_calls=[{"index": 0, "function": {"arguments": '{"at":'}}]),
                delta(tool_calls=[{"index": 0, "function": {"arguments": " 1}"}}]),
                {"choices": [], "usage": {}},
            ),
        ),
        [([USER], CALLED)],
    ),
    (
        LOG,
        logged(
            {"prompt": "hi"},
            events({"choices": [{"text": "hel"}]}, {"choices": [{"text": "lo"}]}),
        ),
        [("hi", "hello")],
    ),
    (
        LOG,
        logged(
            {
                "instructions": "Be kind.",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "call_id": "c1", **ARGUMENTS},
                    {"type": "function_call_output", "call_id": "c1", "output": "5"},
                ],
                "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            },
            {
                "output": [
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "hello"}],
                    }
                ]
            },
        ),
        [([SYSTEM, USER, CALLED, TOLD], SAID)],
    ),
    (
        LOG,
        logged(
            {"input": "hi"},
            events(
                {"type": "response.created", "response": {}},
                {
                    "type": "response.completed",
                    "response": {
                        "output": [{"type": "function_call", "call_id": "c1", **ARGUMENTS}]
                    },
                },
            ),
        ),
        [([USER], CALLED)],
    ),
    (
        LOG,
        logged(
            {
                "system": [{"type": "text", "text": "Be kind."}],
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}
                        ],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "5"}],
                    },
                ],
                "tools": [{"name": "look", "input_schema": SCHEMA}],
            },
            {"type": "message", "content": [{"type": "text", "text": "hello"}]},
        ),
        [([SYSTEM, USER, CALLED, TOLD], SAID)],
    ),
    (
        "Helicone's lines",
        {"request_body": {"messages": [USER]}, "response_body": json.dumps(RESPONSE)},
        [([USER], SAID)],
    ),
    (
        "LiteLLM's lines",
        {"messages": [USER], "response": RESPONSE, "model_parameters": {"tools": [TOOL]}},
        [([USER], SAID)],
    ),
    (
        "fine-tuning files",
        {"messages": [USER, SAID, USER, CALLED], "tools": [TOOL]},
        [([USER], SAID), ([USER, SAID, USER], CALLED)],
    ),
    (
        "ShareGPT's lines",
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        [([USER], SAID)],
    ),
    (PAIR, {"prompt": "hi", "completion": "hello"}, [("hi", "hello")]),
    (
        PAIR,
        {"instruction": "Say", "input": "hi", "output": "hello"},
        [("Say\n\nhi", "hello")],
    ),
    (
        "LangSmith's lines",
        {"inputs": {"messages": [USER]}, "outputs": {"choices": [{"message": SAID}]}},
        [([USER], SAID)],
    ),
    ("Langfuse's lines", {"input": [USER], "output": SAID}, [([USER], SAID)]),
    ("Langfuse's lines", {"input": "hi", "output": "hello"}, [([USER], SAID)]),
]


@pytest.mark.parametrize(("form", "line", "expected"), CASES)
def test_each_form_is_known_and_read(form: str, line: Any, expected: list[Any]) -> None:
    assert next(name for name, (applies, _) in FORMS.items() if applies(line)) == form
    found = []
    for each in exchanges_of(line, "f, line 1"):
        request, [choice] = each["request"], each["response"]["choices"]
        request = json.loads(request) if isinstance(request, str) else request
        chat = "message" in choice
        found.append(
            (request["messages"], choice["message"])
            if chat
            else (request["prompt"], choice["text"])
        )
        assert request.get("tools") == ([TOOL] if "tools" in json.dumps(line) else None)
    assert found == expected


def test_every_form_has_a_case() -> None:
    assert {form for form, _, _ in CASES} == FORMS.keys()


def test_answers_of_one_conversation_are_a_session() -> None:
    line = {"messages": [USER, SAID, USER, SAID]}
    assert [each["session"] for each in exchanges_of(line, "f, line 1")] == ["f, line 1"] * 2
    assert [each["session"] for each in exchanges_of({"id": "s", **line}, "f")] == ["s"] * 2
    assert "session" not in exchanges_of({"messages": [USER, SAID]}, "f")[0]


@pytest.mark.parametrize(
    "line",
    [
        logged("x", {}),
        logged({}, "data: x"),
        logged({"input": 5}, {"output": []}),
        logged({"messages": [5]}, {"type": "message", "content": []}),
        {"messages": [5, 6]},
        {"messages": [USER], "response": None, "model_parameters": 5},
        {"conversations": [{"from": []}]},
        {"inputs": {}, "outputs": {}},
        {"input": 5, "output": 5},
    ],
)
def test_another_content_is_told(line: Any) -> None:
    with pytest.raises(RecordError, match=r"^f, line 1: "):
        exchanges_of(line, "f, line 1")


PAIRS = [
    {"prompt": f"p{number}", "completion": "é" * size}
    for number, size in enumerate([0, 5, 600_000, 3_000_000, 7, 0])
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["lines", "array", "indented array"])
def test_files_are_read_as_they_come(tmp_path: Path, packed: bool, form: str) -> None:
    text = "\n".join(json.dumps(pair, ensure_ascii=False) for pair in PAIRS)
    if form != "lines":
        text = json.dumps(PAIRS, indent=1 if "indented" in form else None, ensure_ascii=False)
    log, out = tmp_path / "log", tmp_path / "out.jsonl"
    log.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert [line.value for line in parse_lines(log)] == PAIRS
    assert sum(line.bytes for line in parse_lines(log)) <= log.stat().st_size
    result = CliRunner().invoke(app, ["record", str(out), "--log", str(log)])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert records == [{"prompt": p["prompt"], "output": p["completion"]} for p in PAIRS]


@pytest.mark.parametrize(
    "content",
    [
        b"[{}, {",
        b"[x]",
        b"[" * 100_000,
        b'["\xff"]',
        gzip.compress(b"{}\n{}\n", mtime=0)[:-9],
        b"\x1f\x8bxx",
    ],
)
def test_damaged_files_are_told(tmp_path: Path, content: bytes) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    result = CliRunner().invoke(app, ["record", str(tmp_path / "out"), "--log", str(log)])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert str(log) in result.stderr
    assert isinstance(result.exception, SystemExit)
