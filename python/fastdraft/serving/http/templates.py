"""Templates of a request's tool calls and schema, as the server's own chat template writes them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from fastdraft.errors import InvalidValueError
from fastdraft.serving.http.asgi import Json
from fastdraft.serving.http.servers import Server
from fastdraft.serving.request_options import MOST_IDS
from fastdraft.templates import schema_example, tool_call_ids, tool_calls

__all__ = ["Ask", "RequestTemplates", "ServerError", "tokens_of"]

_MOST_KEPT: Final = 1 << 20
"""Tokens: agents send the same tools with each turn, so their templates are kept."""
_EACH: Final = 64
"""In tokens: what it takes to keep templates, however short."""

Ask = Callable[[str, Json], Coroutine[Any, Any, Json]]
"""Asks the server: a path and the body of a POST, for the answer's JSON. Raises ServerError."""


class ServerError(Exception):
    """A question that the server did not answer."""


def tokens_of(answer: Json) -> list[int]:
    """The token ids in an answer of `/tokenize`. Raises ServerError."""
    try:
        return array("i", answer["tokens"]).tolist()
    except (KeyError, OverflowError, TypeError) as error:
        raise ServerError(f"/tokenize answered without tokens: {error!r}") from error


class RequestTemplates:
    """Turns the tools and the schema in a request's body into the token ids of templates."""

    def __init__(self) -> None:
        # In the order of their last use.
        self._known: dict[bytes, array[int]] = {}
        self._num_kept = 0

    async def ids(
        self, request: Mapping[str, Any], server: Server, caller: Sequence[Any], ask: Ask
    ) -> list[int]:
        """The tokens of all templates of a completion's body; none for most requests.

        Templates are made anew for each `caller`: how fast an answer comes would tell whether
        another one had sent the same tools.

        Raises:
            ServerError: The server does not tokenize.
        """
        tools = _chosen(request.get("tools"), request.get("tool_choice"))
        schema = _schema(request)
        if not tools and schema is None:
            return []
        asked = json.dumps([caller, request.get("model"), tools, schema], sort_keys=True)
        key = hashlib.sha256(asked.encode()).digest()
        ids = self._known.pop(key, None)
        if ids is None:
            tokenizer = _ServerTokenizer(server, request.get("model"), ask)
            # In a thread, since a tokenizer is asked synchronously.
            made = await asyncio.to_thread(_made, tokenizer, tools, schema)
            ids = array("i", made[:MOST_IDS])
            if key not in self._known:  # another request may have made the same meanwhile
                self._num_kept += len(ids) + _EACH
        self._known[key] = ids
        while self._num_kept > _MOST_KEPT:
            self._num_kept -= len(self._known.pop(next(iter(self._known)))) + _EACH
        return ids.tolist()


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
        text = answer.get(self._server.text or "")
        if not isinstance(text, str):
            raise ServerError(f"/detokenize answered without {self._server.text!r}")
        return text

    def _tokens(self, question: Json) -> list[int]:
        return tokens_of(self._answer("/tokenize", question))

    def _answer(self, path: str, question: Json) -> Json:
        asking = self._ask(path, {"model": self._model, **question})
        try:
            return asyncio.run_coroutine_threadsafe(asking, self._loop).result()
        except concurrent.futures.CancelledError as error:
            # The process ends. Templates are rendered without regard to other exceptions.
            raise asyncio.CancelledError from error


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
    if not isinstance(choice, dict):
        return tools
    if choice.get("type") == "none":
        return []
    name = _name(choice)
    return tools if name is None else [tool for tool in tools if _name(tool) == name]


def _name(tool: object) -> object:
    """The name of a tool, or of the one chosen: OpenAI's older API puts it into a "function"."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _schema(request: Mapping[str, Any]) -> object:
    """The JSON schema of the answer, as /v1/chat/completions, /v1/responses and /v1/messages take
    it; None for none."""
    for holder in (
        request.get("response_format"),
        _field(request.get("text"), "format"),
        _field(request.get("output_config"), "format"),
    ):
        if _field(holder, "type") == "json_schema":
            return _field(_field(holder, "json_schema") or holder, "schema")
    return None


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None
