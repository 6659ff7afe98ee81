"""OpenAI's predicted outputs, and templates of tool calls, for vLLM's HTTP server.

The middleware turns a request's `prediction` into the token ids that the proposer takes, and writes
into the answer's `usage` what became of them; vLLM itself ignores predictions. A request's tools
and its JSON schema become templates to draft from. It is plain ASGI and knows vLLM's HTTP interface
alone: `/tokenize`, `/detokenize`, `vllm_xargs` and the answers' JSON. Other requests pass as they
are, unless they ask fastdraft for what it does not understand.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastdraft.errors import InvalidValueError
from fastdraft.integrations.host import PREDICTION, TEMPLATES, longest_draft
from fastdraft.integrations.vllm.ledger import FOLDER_VARIABLE, LedgerReader, new_ticket
from fastdraft.integrations.vllm.metrics import exposition
from fastdraft.integrations.vllm.requests import TICKET
from fastdraft.integrations.vllm.tool_templates import RequestTemplates

__all__ = ["PredictionMiddleware"]

_COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
_TOKENIZE = "/tokenize"
# What a body has to hold to be read at all.
_OF_INTEREST = (b'"prediction', b'"fastdraft', b'"tools"', b'"json_schema"')
_METRICS = "/metrics"

_Json = dict[str, Any]
_Message = MutableMapping[str, Any]
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]
_Headers = list[tuple[bytes, bytes]]

logger = logging.getLogger(__name__)


class PredictionMiddleware:
    """Predicted outputs over HTTP: `--middleware fastdraft.integrations.vllm.PredictionMiddleware`.

    On `/v1/chat/completions` and `/v1/completions` it takes OpenAI's `prediction` and reports
    `accepted_prediction_tokens` and `rejected_prediction_tokens` in
    `usage.completion_tokens_details`, where a request has a prediction and an engine on the same
    machine drafts with fastdraft. Calls of a request's `tools`, and JSON of the schema in its
    `response_format`, are drafted before the first one was written. To `/metrics` it adds
    fastdraft's own.
    """

    def __init__(self, app: _App) -> None:
        self.app = app
        self._ledgers = LedgerReader.from_environment()
        self._warned: set[str] = set()
        self.templates = RequestTemplates()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if scope["method"] == "POST" and path in _COMPLETIONS:
                if _header(scope["headers"], b"content-encoding") is None:
                    await _Completion(self, scope, receive, send).run()
                    return
            elif scope["method"] == "GET" and path == _METRICS and self._ledgers is not None:
                await self._metrics(self._ledgers, scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _metrics(
        self, ledgers: LedgerReader, scope: _Scope, receive: _Receive, send: _Send
    ) -> None:
        # What is added is in the plain text format, so vLLM is asked for that.
        headers = _without(scope["headers"], b"accept", b"accept-encoding")
        answer = _WholeAnswer(send, lambda body: body + exposition(ledgers.totals()).encode())
        await self.app({**scope, "headers": headers}, receive, answer.send)

    async def tokenize(self, scope: _Scope, model: object, text: str) -> list[int] | None:
        """The tokens of `text`, by the server's own endpoint; None where it gives none."""
        question = {"model": model, "prompt": text, "add_special_tokens": False}
        answer, problem = await self._ask(scope, _TOKENIZE, question)
        tokens = answer.get("tokens")
        if isinstance(tokens, list):
            return tokens
        self._warn_once("%s %s, so a prediction went unused", _TOKENIZE, problem)
        return None

    async def template_ids(self, scope: _Scope, request: _Json) -> list[int]:
        """The tokens of the templates of a request; none where it has no tools and no schema."""

        async def ask(path: str, question: _Json) -> _Json | None:
            return (await self._ask(scope, path, question))[0] or None

        return await self.templates.ids(request, ask)

    async def _ask(self, scope: _Scope, path: str, question: _Json) -> tuple[_Json, str]:
        """What the server answers to a POST, empty where it fails, and how it did."""
        body = json.dumps(question).encode()
        headers = _json_headers(body)
        authorization = _header(scope["headers"], b"authorization")
        if authorization is not None:
            headers.append((b"authorization", authorization))
        path = scope.get("root_path", "") + path
        request = {
            **scope,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        if "state" in scope:
            request["state"] = dict(scope["state"])
        messages: list[_Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> _Message:
            if messages:
                return messages.pop()
            # A disconnect of the client is for the request itself; this one is over in a moment.
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        status = 0
        answer = bytearray()

        async def send(message: _Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                answer.extend(message.get("body", b""))

        try:
            await self.app(request, receive, send)
        except Exception as error:
            return {}, f"raised {error!r}"
        problem = f"answered with status {status} and {bytes(answer[:200])!r}"
        return _parsed(bytes(answer)) if status == 200 else {}, problem

    def _warn_once(self, what: str, *details: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(what, *details)

    def report(self, usage: _Json, ticket: str) -> None:
        """Adds the counts of a request to its `usage`."""
        counts = None if self._ledgers is None else self._ledgers.prediction_tokens(ticket)
        if counts is None:
            if usage.get("completion_tokens"):
                self._warn_once(
                    "nothing is known of a request's prediction, so its usage goes without counts: "
                    "an engine on another machine cannot send them, nor one that does not draft "
                    "with fastdraft; they travel in %s=%s",
                    FOLDER_VARIABLE,
                    os.environ.get(FOLDER_VARIABLE),
                )
            return
        accepted, rejected = counts
        # The model may verify tokens past the end of the answer in its last step.
        accepted = min(accepted, usage.get("completion_tokens") or 0)
        details = usage.get("completion_tokens_details") or {}
        counted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        # A server that comes to count them itself knows better.
        known = {name: count for name, count in details.items() if count is not None}
        usage["completion_tokens_details"] = {**details, **counted, **known}


class _InvalidRequest(Exception):
    """Why a request is refused, and the parameter that is wrong with it."""

    def __init__(self, reason: str, parameter: str = "prediction") -> None:
        super().__init__(reason)
        self.parameter = parameter


class _Completion:
    """One request for a completion, on its way in and out.

    The body is read when the application asks for it and not before, so after it has checked who is
    calling.
    """

    def __init__(
        self, middleware: PredictionMiddleware, scope: _Scope, receive: _Receive, send: _Send
    ) -> None:
        self._middleware = middleware
        self._scope = scope
        self._client_receive = receive
        self._client_send = send
        self._body_given = False
        self._ticket: str | None = None
        self._refusal: _InvalidRequest | None = None
        self._answer: _WholeAnswer | _EventAnswer | None = None

    async def run(self) -> None:
        # How long the body becomes is not known yet.
        headers = _without(self._scope["headers"], b"content-length")
        try:
            await self._middleware.app(
                {**self._scope, "headers": headers}, self._receive, self._send
            )
        except Exception:
            # An application may take a caller who went away for an error.
            if self._refusal is None:
                raise
        if self._refusal is not None:
            await self._refuse(self._refusal)

    async def _receive(self) -> _Message:
        if self._body_given:
            return await self._client_receive()
        body = bytearray()
        more = True
        while more:
            message = await self._client_receive()
            if message["type"] != "http.request":
                return message
            body.extend(message.get("body", b""))
            more = message.get("more_body", False)
        self._body_given = True
        try:
            changed = await self._with_token_ids(bytes(body))
        except _InvalidRequest as error:
            self._refusal = error
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": changed, "more_body": False}

    async def _with_token_ids(self, body: bytes) -> bytes:
        """The body with prediction and templates as token ids, and with a prediction a ticket."""
        if not any(name in body for name in _OF_INTEREST):
            return body
        request = _parsed(body)
        arguments = request.get("vllm_xargs")
        drafts = True
        if isinstance(arguments, dict):
            try:
                drafts = longest_draft(arguments) > 0
            except InvalidValueError as error:
                raise _InvalidRequest(f"vllm_xargs.{error}", "vllm_xargs") from error
        prediction = request.get("prediction")
        text = None if prediction is None else _prediction_text(prediction)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            # vLLM has its own error for that.
            return body
        added: _Json = {}
        if drafts and TEMPLATES not in arguments:
            template_ids = await self._middleware.template_ids(self._scope, request)
            if template_ids:
                added[TEMPLATES] = template_ids
        if PREDICTION not in arguments and text:
            token_ids = await self._middleware.tokenize(self._scope, request.get("model"), text)
            if token_ids:
                added[PREDICTION] = token_ids
        if PREDICTION in arguments or PREDICTION in added:
            added[TICKET] = self._ticket = new_ticket()
            request.pop("prediction", None)
        if not added:
            return body
        request["vllm_xargs"] = {**arguments, **added}
        return json.dumps(request).encode()

    async def _send(self, message: _Message) -> None:
        if self._refusal is not None:
            # What the application says to a caller who went away.
            return
        if message["type"] == "http.response.start" and self._ticket is not None:
            kind = _header(message["headers"], b"content-type") or b""
            if message["status"] != 200 or _header(message["headers"], b"content-encoding"):
                pass
            elif kind.startswith(b"text/event-stream"):
                self._answer = _EventAnswer(self._client_send, self._reported)
            elif kind.startswith(b"application/json"):
                self._answer = _WholeAnswer(self._client_send, self._reported)
        send = self._client_send if self._answer is None else self._answer.send
        await send(message)

    def _reported(self, document: bytes) -> bytes:
        """A JSON document with the counts in its `usage`, or as it is where it has none."""
        answer = _parsed(document)
        usage = answer.get("usage")
        if self._ticket is None or not isinstance(usage, dict):
            return document
        self._middleware.report(usage, self._ticket)
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()

    async def _refuse(self, refusal: _InvalidRequest) -> None:
        error = {
            "message": str(refusal),
            "type": "BadRequestError",
            "param": refusal.parameter,
            "code": 400,
        }
        body = json.dumps({"error": error}).encode()
        start = {"type": "http.response.start", "status": 400, "headers": _json_headers(body)}
        await self._client_send(start)
        await self._client_send({"type": "http.response.body", "body": body})


class _WholeAnswer:
    """An answer that is changed as a whole, when it is complete."""

    def __init__(self, send: _Send, change: Callable[[bytes], bytes]) -> None:
        self._client_send = send
        self._change = change
        self._start: _Message = {}
        self._body = bytearray()

    async def send(self, message: _Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                body = bytes(self._body)
                if self._start["status"] == 200:
                    body = self._change(body)
                headers = _without(self._start["headers"], b"content-length")
                headers.append((b"content-length", str(len(body)).encode()))
                await self._client_send({**self._start, "headers": headers})
                await self._client_send({"type": "http.response.body", "body": body})
        else:
            await self._client_send(message)


class _EventAnswer:
    """A stream of server-sent events: those with a `usage` are changed, all go on at once."""

    def __init__(self, send: _Send, change: Callable[[bytes], bytes]) -> None:
        self._client_send = send
        self._change = change
        self._unfinished_line = b""

    async def send(self, message: _Message) -> None:
        if message["type"] == "http.response.body":
            body = self._unfinished_line + message.get("body", b"")
            self._unfinished_line = b""
            if message.get("more_body", False):
                complete, newline, self._unfinished_line = body.rpartition(b"\n")
                body = complete + newline
            if b'"usage"' in body:
                body = b"\n".join(map(self._changed_line, body.split(b"\n")))
            message = {**message, "body": body}
        await self._client_send(message)

    def _changed_line(self, line: bytes) -> bytes:
        name, colon, document = line.partition(b":")
        if name != b"data" or b'"usage"' not in document:
            return line
        return name + colon + b" " + self._change(document.strip())


def _prediction_text(prediction: object) -> str:
    """The text of OpenAI's `prediction` field. Raises _InvalidRequest."""
    if not isinstance(prediction, dict):
        raise _InvalidRequest(
            f'prediction must be an object such as {{"type": "content", "content": "..."}}, '
            f"got {_shown(prediction)}"
        )
    if prediction.get("type") != "content":
        raise _InvalidRequest(
            f'prediction.type must be "content", got {_shown(prediction.get("type"))}'
        )
    content = prediction.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _InvalidRequest(
            f"prediction.content must be a string or a list of text parts, got {_shown(content)}"
        )
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _InvalidRequest(
                f'prediction.content[{index}] must be {{"type": "text", "text": "..."}}, '
                f"got {_shown(part)}"
            )
        texts.append(text)
    return "".join(texts)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _parsed(document: bytes) -> _Json:
    """The JSON object in `document`, empty where it is none: what is wrong is the host's to say."""
    try:
        value = json.loads(document)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _header(headers: _Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key.lower() == name), None)


def _without(headers: _Headers, *names: bytes) -> _Headers:
    return [(key, value) for key, value in headers if key.lower() not in names]


def _json_headers(body: bytes) -> _Headers:
    return [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
