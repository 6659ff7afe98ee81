"""Templates of a request's tool calls and schema, as the server's own chat template writes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from fastdraft.errors import InvalidValueError
from fastdraft.integrations.http.asgi import Json
from fastdraft.integrations.http.servers import Server
from fastdraft.templates import schema_example, tool_call_ids, tool_calls

__all__ = ["Ask", "RequestTemplates", "ServerError"]

_MOST_KEPT: Final = 256
"""Agents send the same tools with each turn, so their templates are kept."""

Ask = Callable[[str, Json], Awaitable[Json]]
"""Asks the server: a path and the body of a POST, for the answer's JSON. Raises ServerError."""


class ServerError(Exception):
    """A question that the server did not answer, and how it failed."""


class RequestTemplates:
    """Turns the tools and the schema in a request's body into the token ids of templates."""

    def __init__(self) -> None:
        # In the order of their last use.
        self._known: dict[str, list[int]] = {}

    async def ids(self, request: Mapping[str, Any], server: Server, ask: Ask) -> list[int]:
        """The tokens of all templates of a request for a completion; none for most requests.

        Raises:
            ServerError: The server does not tokenize.
        """
        tools = _chosen(request.get("tools"), request.get("tool_choice"))
        schema = _schema(request.get("response_format"))
        if not tools and schema is None:
            return []
        key = json.dumps([request.get("model"), tools, schema], sort_keys=True)
        ids = self._known.pop(key, None)
        if ids is None:
            tokenizer = _ServerTokenizer(server, request.get("model"), ask)
            # In a thread, since a tokenizer is asked synchronously.
            ids = await asyncio.to_thread(_made, tokenizer, tools, schema)
        self._known[key] = ids
        if len(self._known) > _MOST_KEPT:
            self._known.pop(next(iter(self._known)))
        return ids


def _made(tokenizer: _ServerTokenizer, tools: list[Any], schema: object) -> list[int]:
    try:
        tool_calls(tools)
    except InvalidValueError:
        tools = []  # what is wrong is the server's to say
    ids = tool_call_ids(tokenizer, tools) if tools else []
    if schema is not None:
        ids += tokenizer(json.dumps(schema_example(schema)))["input_ids"]
    return ids


class _ServerTokenizer:
    """The server's tokenizer and chat template, called as one of transformers; not from the loop.

    Each call asks the server over its own HTTP interface and waits for the answer.
    """

    chat_template = "the server's own"

    def __init__(self, server: Server, model: object, ask: Ask) -> None:
        self._server = server
        self._model = model
        self._ask = ask
        self._loop = asyncio.get_running_loop()

    def __call__(self, text: str, *, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """The tokens of a text."""
        asked = {"prompt": text, "add_special_tokens": add_special_tokens}
        return {"input_ids": self._tokens(asked)}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a chat; `tokenize` must be False."""
        ids = self._tokens(
            {
                "messages": [_encoded(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "add_special_tokens": False,
            }
        )
        answer = self._answer("/detokenize", {"tokens": ids, "skip_special_tokens": False})
        text = answer.get(self._server.text)
        if not isinstance(text, str):
            raise ServerError(f"/detokenize answered without {self._server.text!r}")
        return text

    def _tokens(self, question: Json) -> list[int]:
        tokens = self._answer("/tokenize", question).get("tokens")
        if not isinstance(tokens, list):
            raise ServerError("/tokenize answered without 'tokens'")
        return tokens

    def _answer(self, path: str, question: Json) -> Json:
        asking = self._answered(path, {"model": self._model, **question})
        return asyncio.run_coroutine_threadsafe(asking, self._loop).result()

    async def _answered(self, path: str, question: Json) -> Json:
        return await self._ask(path, question)


def _encoded(message: Mapping[str, Any]) -> Json:
    """A message with the arguments of its calls as JSON text, as OpenAI's API takes them."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


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
