"""Templates of a request's tool calls and schema, as the server's own chat template writes them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from fastdraft.errors import InvalidValueError
from fastdraft.templates import ToolCall, call_messages, schema_example, tool_calls

__all__ = ["RequestTemplates"]

_MOST_KEPT: Final = 256
"""Agents send the same tools with each turn, so their templates are kept."""

_Json = dict[str, Any]
Ask = Callable[[str, _Json], Awaitable[_Json | None]]
"""Asks the server: a path and the body of a POST, for the answer's JSON; None where it fails."""


class RequestTemplates:
    """Turns the tools and the schema in a request's body into the token ids of templates."""

    def __init__(self) -> None:
        # In the order of their last use.
        self._known: dict[str, list[int]] = {}

    async def ids(self, request: Mapping[str, Any], ask: Ask) -> list[int]:
        """The tokens of all templates of a request for a completion; none for most requests."""
        what = {
            "model": request.get("model"),
            "tools": _chosen(request.get("tools"), request.get("tool_choice")),
            "schema": _schema(request.get("response_format")),
        }
        if not what["tools"] and what["schema"] is None:
            return []
        key = json.dumps(what, sort_keys=True)
        ids = self._known.pop(key, None)
        if ids is None:
            ids = await self._made(what, ask)
        self._known[key] = ids
        if len(self._known) > _MOST_KEPT:
            self._known.pop(next(iter(self._known)))
        return ids

    async def _made(self, what: _Json, ask: Ask) -> list[int]:
        ids: list[int] = []
        try:
            calls = tool_calls(what["tools"])
        except InvalidValueError:
            calls = []  # what is wrong is the server's to say
        if calls:
            ids += await _of_calls(calls, what["model"], ask)
        if what["schema"] is not None:
            text = json.dumps(schema_example(what["schema"]))
            ids += await _tokens(ask, {"model": what["model"], "prompt": text}) or []
        return ids


async def _of_calls(calls: list[ToolCall], model: object, ask: Ask) -> list[int]:
    """All calls in one answer where the chat template allows that, else one by one."""
    ids = await _by_template(calls, model, ask)
    if ids is not None:
        return ids
    found: list[int] = []
    for call in calls:
        one = await _by_template([call], model, ask)
        if one is None:
            text = json.dumps({"name": call.name, "arguments": call.arguments})
            one = await _tokens(ask, {"model": model, "prompt": f"<tool_call>\n{text}\n"}) or []
        found += one
    return found


async def _by_template(calls: list[ToolCall], model: object, ask: Ask) -> list[int] | None:
    """The answer that makes these calls; None where the chat template does not write them."""
    user, answer = call_messages(calls, encoded=True)
    before = await _tokens(ask, {"model": model, "messages": [user]})
    chat = {"model": model, "messages": [user, answer], "add_generation_prompt": False}
    whole = await _tokens(ask, chat)
    if before is None or whole is None or whole[: len(before)] != before:
        return None
    ids = whole[len(before) :]
    text = (await ask("/detokenize", {"model": model, "tokens": ids}) or {}).get("prompt")
    if not isinstance(text, str) or any(call.name not in text for call in calls):
        return None
    return ids


async def _tokens(ask: Ask, body: _Json) -> list[int] | None:
    answer = await ask("/tokenize", {"add_special_tokens": False, **body})
    tokens = None if answer is None else answer.get("tokens")
    return tokens if isinstance(tokens, list) else None


def _chosen(tools: object, choice: object) -> list[Any]:
    """The tools that may be called."""
    if not isinstance(tools, list) or choice == "none":
        return []
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict):
        return tools
    return [
        tool
        for tool in tools
        if isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and tool["function"].get("name") == function.get("name")
    ]


def _schema(response_format: object) -> object:
    """The JSON schema of the answer; None for none."""
    if not isinstance(response_format, dict) or response_format.get("type") != "json_schema":
        return None
    named = response_format.get("json_schema")
    return named.get("schema") if isinstance(named, dict) else None
