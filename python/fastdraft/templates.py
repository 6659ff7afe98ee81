"""Text that parts of an answer may look like: the calls of a request's tools, the JSON of a schema.

A model that calls a tool writes the tool's name and the names of its parameters, which its schema
tells beforehand. So a call can be drafted before any was made: write one down for each tool, with
made-up values, and pass its tokens as the `templates` of `Engine.add_request`:

    from fastdraft.templates import tool_call_ids

    engine.add_request(prompt_ids, templates=tool_call_ids(tokenizer, tools))

A template is a guess like any other: where the answer goes another way, nothing is lost but drafts.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from fastdraft.errors import InvalidValueError

__all__ = ["ToolCall", "schema_example", "tool_call_ids", "tool_calls"]

_DEEPEST: Final = 6
"""Levels of a schema that an example follows; recursive ones have no end."""
_MOST_CALLS: Final = 128
_MOST_VALUES: Final = 1 << 12
_MOST_LETTERS: Final = 1 << 17
"""The most values and letters of all examples of one call: a schema of k references to itself has
k ** 6 values."""
_BY_TYPE: Final[Mapping[str, Any]] = {
    "integer": 1,
    "number": 1,
    "float": 1.0,  # of no JSON schema, but in tools' own
    "boolean": True,
    "null": None,
}


class ToolCall(NamedTuple):
    """A call of a tool, with made-up arguments."""

    name: str
    arguments: Any


def tool_calls(tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    """A call of each tool, in their order: of at most 128, as many as OpenAI's API takes.

    Args:
        tools: As OpenAI's API has them (`{"type": "function", "function": {"name": ...,
            "parameters": SCHEMA}}`), or such functions without the wrapping, or with Anthropic's
            `input_schema`. Tools without a name, such as a host's built-in ones, are left out.

    Raises:
        InvalidValueError: `tools` is not a sequence of mappings.
    """
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise InvalidValueError(f"tools must be a list of objects, got {reprlib.repr(tools)}")
    calls = []
    examples = _Examples()
    for index, tool in enumerate(tools[:_MOST_CALLS]):
        if not isinstance(tool, Mapping):
            raise InvalidValueError(f"tools[{index}] must be an object, got {reprlib.repr(tool)}")
        wrapped = tool.get("function")
        function = wrapped if isinstance(wrapped, Mapping) else tool
        name = function.get("name")
        if isinstance(name, str) and name and examples.take(name):
            schema = function.get("parameters") or function.get("input_schema")
            calls.append(ToolCall(name, examples.of(schema, schema) if schema else {}))
    return calls


def schema_example(schema: Any) -> Any:
    """A JSON value of the form that a JSON schema describes. O(schema).

    Each property of an object is there, each array has one item, and a string is the name of its
    property, since a model writes a word there too. Constants, the first of several alternatives
    and references within the schema (`$ref`) are followed; what is not understood is an empty
    object. An example ends after some thousand values, so a large or recursive schema gives only
    the beginning of one.
    """
    return _Examples().of(schema, schema)


class _Examples:
    """Examples of schemas, all of them together of a bounded size."""

    def __init__(self) -> None:
        self._values = _MOST_VALUES
        self._letters = _MOST_LETTERS

    def take(self, text: str) -> bool:
        """Counts one value that is written or found with `text`; once False, always False."""
        self._values -= 1
        self._letters -= len(text)
        return self._has_room

    @property
    def _has_room(self) -> bool:
        return self._values >= 0 and self._letters >= 0

    def of(self, schema: Any, root: Any, name: str = "text", depth: int = 0) -> Any:
        """An example of a part of the schema `root`, which has this name there."""
        if not self.take(name) or not isinstance(schema, Mapping) or depth > _DEEPEST:
            return {}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            found = _referred(reference, root) if self.take(reference) else None
            return self.of(found, root, name, depth + 1)
        if "const" in schema:
            return self._constant(schema["const"])
        for key in ("enum", "anyOf", "oneOf", "allOf"):
            choices = schema.get(key)
            if isinstance(choices, Sequence) and not isinstance(choices, str) and choices:
                if key == "enum":
                    return self._constant(choices[0])
                return self.of(choices[0], root, name, depth + 1)
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            return {
                str(key): self.of(value, root, str(key), depth + 1)
                for key, value in properties.items()
                if self._has_room
            }
        kind = schema.get("type")
        if isinstance(kind, Sequence) and not isinstance(kind, str):
            kind = kind[0] if kind else None
        kind = kind.lower() if isinstance(kind, str) else ""
        if kind == "array":
            return [self.of(schema.get("items", {}), root, name, depth + 1)]
        return name if kind == "string" else _BY_TYPE.get(kind, {})

    def _constant(self, value: Any) -> Any:
        return value if self.take(json.dumps(value)) else {}


def _referred(reference: str, root: Any) -> Any:
    """The value that a reference such as `#/$defs/City` names; None for one that leads out."""
    path, found = reference.split("/"), root
    if path[0] != "#":
        return None
    for part in path[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def tool_call_ids(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens of a call of each tool, as the tokenizer's chat template writes calls.

    If the tokenizer has no chat template, or one that writes no calls, they are written as most
    open models do: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    Args:
        tokenizer: One of transformers, or what is called as one.
        tools: As for `tool_calls`.

    Raises:
        InvalidValueError: `tools` is not a sequence of mappings.
    """
    calls = tool_calls(tools)
    # All in one answer where the template allows that, else one by one.
    text = _by_template(tokenizer, calls) if calls else ""
    if text is None:
        text = "".join(
            _by_template(tokenizer, [call])
            or f"<tool_call>\n{json.dumps(call._asdict())}\n</tool_call>\n"
            for call in calls
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _by_template(tokenizer: Any, calls: Sequence[ToolCall]) -> str | None:
    """The answer that makes these calls; None where the chat template does not write them."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    user = {"role": "user", "content": "?"}
    made = [
        # Templates want an id; some insist on nine letters.
        {"type": "function", "id": f"call{index:05}", "function": call._asdict()}
        for index, call in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    try:
        before = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([user, answer], tokenize=False)
    except Exception:  # whatever a template raises
        return None
    if not whole.startswith(before) or any(call.name not in whole for call in calls):
        return None
    text: str = whole[len(before) :]
    return text
