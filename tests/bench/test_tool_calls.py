"""bench/tool_calls.py finds the tools of recorded requests and replays their calls."""

from __future__ import annotations

import json
import zipfile

import pytest

import tool_calls
from fastdraft.demo import ensure_model
from fastdraft.replay import RecordError
from fastdraft.replay.tokenizer import TextTokenizer

FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}


@pytest.mark.parametrize(
    "tools",
    [
        [FUNCTION],
        [{"functionDeclarations": [FUNCTION]}],
        [{"name": "look", "parametersJsonSchema": FUNCTION["parameters"]}],
    ],
)
def test_tools_of_each_interface_are_found(tools):
    found = tool_calls.tools_of(json.dumps({"tools": tools}))
    text = tool_calls.written(found, tool_calls.COMPACT)
    assert text == '<tool_call>\n{"name": "look", "arguments": {"at":{}}}\n</tool_call>\n'


@pytest.mark.parametrize("prompt", ["no JSON", "[1]", "{}", '{"tools": null}'])
def test_prompts_without_tools_have_none(prompt):
    assert tool_calls.tools_of(prompt) == []


def test_templates_take_fewer_steps_for_a_first_call(tmp_path):
    properties = {name: {"type": "string"} for name in ("departure", "destination", "passengers")}
    tools = [{"name": "book_a_flight", "parameters": {"type": "object", "properties": properties}}]
    output = tool_calls.written(tools, tool_calls.SPACED)
    record = {"prompt": json.dumps({"tools": tools}), "output": output}
    (tmp_path / "calls.jsonl").write_text(json.dumps(record) + "\n")
    requests = tool_calls.read(tmp_path)
    (row, *_) = tool_calls.rows(requests)
    assert row["first, spaced"] > row["first, without"]


def test_a_folder_without_calls_is_refused(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "output": "b"}\n')
    with pytest.raises(RecordError, match="requests with tools"):
        tool_calls.read(tmp_path)


def test_the_leaderboard_is_read_from_its_wheel(tmp_path):
    question = {"question": [[{"role": "user", "content": "Look!"}]], "function": [FUNCTION]}
    answer = {"ground_truth": [{"look": {"at": ["here", "there"], "for": ["", 3], "with": []}}]}
    wheel = tmp_path / "bfcl_eval.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for category in tool_calls.BFCL:
            for folder, line in (("data", question), ("data/possible_answer", answer)):
                name = f"bfcl_eval/{folder}/BFCL_v4_{category}.json"
                archive.writestr(name, json.dumps(line) + "\n")
    requests = tool_calls.read_bfcl(wheel)
    assert list(requests) == list(tool_calls.BFCL)
    (request,) = requests["parallel"]
    expected = '<tool_call>\n{"name": "look", "arguments": {"at": "here"}}\n</tool_call>\n'
    assert request.output == TextTokenizer(ensure_model).encode([expected])[0]


@pytest.mark.parametrize("content", [None, b"", b"PK"])
def test_what_is_no_such_wheel_is_refused(tmp_path, content):
    wheel = tmp_path / "other.whl"
    if content is not None:
        wheel.write_bytes(content)
    with pytest.raises(RecordError, match="must be a wheel of bfcl-eval"):
        tool_calls.read_bfcl(wheel)
