"""The calls that replay reads in another package's log, and those that `FakeModels` counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fake_models import FakeModels
from fastdraft.replay.calls import Reader
from fastdraft.replay.lines import family_files, parse_lines
from fastdraft.replay.tokenizer import TextTokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


class Shown(TextTokenizer):
    """Keeps the tools that the chat template gets, and writes messages as JSON."""

    def __init__(self) -> None:
        super().__init__("none")
        self.tools: list[Any] = []

    def render(self, messages: Any, tools: Any, answer: Any) -> tuple[str, str]:
        self.tools.append(tools)
        return json.dumps(messages), json.dumps(answer)


def calls_in(path: Path) -> tuple[list[Any], Reader]:
    """The contents that were asked in each call of a file or folder, with the answer."""
    reader = Reader(Shown())
    found = []
    for file in family_files([path], of_any_form=True).values():
        for line in parse_lines(file):
            found += reader(line)
        found += reader.end()
    return [
        ([each["content"] for each in json.loads(record["prompt"])], json.loads(record["output"]))
        for record in found
    ], reader


def calls_of(models: FakeModels, *, thinks: bool) -> list[Any]:
    """The same as the server counted them."""
    found = []
    for messages, said in models.calls:
        answer = {"role": "assistant", "content": said["content"] or ""}
        if thinks and "reasoning_content" in said:
            answer["reasoning_content"] = said["reasoning_content"]
        if "tool_calls" in said:
            answer["tool_calls"] = []
            for call in said["tool_calls"]:
                named = call["function"]
                function = {"name": named["name"], "arguments": json.loads(named["arguments"])}
                answer["tool_calls"].append({**call, "function": function})
        found.append(([each.get("content") or "" for each in messages], answer))
    return found
