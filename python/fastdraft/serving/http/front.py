"""Two things of OpenAI's API that inference servers lack: predictions, templates of tool calls.

A front is ASGI middleware in a server. It turns a request's `prediction` into what the server's
drafter takes; the servers themselves ignore predictions. A request's tools and its JSON schema
become templates to draft from. Other requests pass as they are, unless they ask fastdraft for what
it does not understand.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Final

from fastdraft.errors import InvalidValueError
from fastdraft.serving.handover import ASKED, Asked
from fastdraft.serving.http.answers import EventAnswer, WholeAnswer
from fastdraft.serving.http.asgi import (
    App,
    Json,
    Message,
    Receive,
    Scope,
    Send,
    header,
    json_headers,
    parsed,
    send_error,
    without,
)
from fastdraft.serving.http.record import RECORD_VARIABLE, Record
from fastdraft.serving.http.servers import COMPLETIONS, VLLM, Server
from fastdraft.serving.http.templates import RequestTemplates, ServerError, tokens_of
from fastdraft.serving.ledger import FOLDER_VARIABLE, LedgerReader, new_ticket
from fastdraft.serving.metrics import exposition
from fastdraft.serving.request_options import (
    MOST_IDS,
    OPTIONS,
    PREDICTION,
    TEMPLATES,
    TICKET,
    request_options,
)

__all__ = ["Front"]

_MOST_BYTES: Final = 1 << 26
"""The largest body of a request for a completion, which is read whole, and the largest answer that
is recorded. OpenAI takes 50 MB."""
_MOST_LETTERS: Final = 16 * MOST_IDS
"""The longest prediction that the server is asked to tokenize."""
_KEYS: Final = (b"authorization", b"x-api-key")
# A body with none of these passes without being parsed.
_OF_INTEREST: Final = (b'"prediction', b'"fastdraft', b'"tools"', b'"json_schema"')

logger = logging.getLogger(__name__)


class Front:
    """Predicted outputs, and templates of tool calls, in a server with OpenAI's API.

    With `FASTDRAFT_RECORD` in the environment, each request that was answered whole is appended to
    that file with its answer, unless its options keep it from the memory or switch drafts off.

    Args:
        app: The server's application.
        server: Which one it is.

    Raises:
        InvalidValueError: The file of the record cannot be written.
    """

    def __init__(self, app: App, server: Server) -> None:
        self.app = app
        self.server = server
        record = os.environ.get(RECORD_VARIABLE)
        self.record = Record(record) if record else None
        self._ledgers = None if server.text is None else LedgerReader.from_environment()
        self._warned: set[str] = set()
        self._templates = RequestTemplates()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"] if scope["type"] == "http" else ""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        readable = bool(method) and header(scope["headers"], b"content-encoding") is None
        if method == "POST" and path in COMPLETIONS and readable:
            await _Completion(self, scope, path, receive, send).run()
        elif method == "GET" and path == "/metrics" and self.server is VLLM and self._ledgers:
            await self._metrics(self._ledgers, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _metrics(
        self, ledgers: LedgerReader, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # Our lines are in the plain text format, so vLLM is asked for that one.
        headers = without(scope["headers"], b"accept", b"accept-encoding")
        answer = WholeAnswer(send, lambda body: body + exposition(ledgers.totals()).encode())
        await self.app({**scope, "headers": headers}, receive, answer.send)

    def new_ticket(self) -> str | None:
        """A ticket, under which an engine reports on a prediction; None if no engine reports."""
        return None if self._ledgers is None else new_ticket()

    def counts(self, ticket: str) -> tuple[int, int] | None:
        """Accepted and rejected tokens of the prediction of `ticket`; None if not reported."""
        return None if self._ledgers is None else self._ledgers.prediction_tokens(ticket)

    def report(self, usage: Json, counts: tuple[int, int] | None) -> None:
        """Adds what became of a prediction to an answer's `usage`."""
        # /v1/responses and /v1/messages have another word for it.
        total = "completion_tokens" if "completion_tokens" in usage else "output_tokens"
        if counts is None:
            if usage.get(total):
                self.warn_once(
                    "nothing is known of a request's prediction, so its usage goes without counts: "
                    "an engine on another machine cannot send them, nor one that does not draft "
                    "with fastdraft; they travel in %s=%s",
                    FOLDER_VARIABLE,
                    os.environ.get(FOLDER_VARIABLE),
                )
            return
        accepted, rejected = counts
        # The model may verify tokens past the end of the answer in its last step.
        accepted = min(accepted, usage.get(total) or 0)
        details = usage.get(f"{total}_details") or {}
        counted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        # A server that comes to count them itself knows better.
        known = {name: count for name, count in details.items() if count is not None}
        usage[f"{total}_details"] = {**details, **counted, **known}

    async def prediction_ids(self, scope: Scope, model: object, text: str) -> list[int]:
        """The tokens of a prediction, by the server's own endpoint; none where it gives none."""
        question = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            return tokens_of(await self._ask(scope, "/tokenize", question))
        except ServerError as error:
            self.warn_once("%s, so a prediction went unused", error)
            return []

    async def template_ids(self, scope: Scope, request: Json, namespace: object) -> list[int]:
        """The tokens of the templates of a request; none where it has no tools and no schema."""

        async def ask(path: str, question: Json) -> Json:
            return await self._ask(scope, path, question)

        caller = [_key(scope), namespace, request.get("cache_salt")]
        try:
            return await self._templates.ids(request, self.server, caller, ask)
        except ServerError as error:
            self.warn_once("%s, so tools and schemas are not drafted from", error)
            return []

    async def _ask(self, scope: Scope, path: str, question: Json) -> Json:
        """The server's answer to a question of ours, sent with a request's credentials."""
        body = json.dumps(question).encode()
        headers = json_headers(body)
        headers += [pair for pair in scope["headers"] if pair[0].lower() in _KEYS]
        target = scope.get("root_path", "") + path
        request = {
            **scope,
            "path": target,
            "raw_path": target.encode(),
            "query_string": b"",
            "headers": headers,
        }
        if "state" in scope:
            request["state"] = dict(scope["state"])
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            # A disconnect of the client is for the request itself; this one ends soon.
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        status, answer = 0, bytearray()

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))

        try:
            await self.app(request, receive, send)
        except Exception as error:
            raise ServerError(f"{path} raised {error!r}") from error
        if status != 200:
            raise ServerError(f"{path} answered with status {status} and {bytes(answer[:200])!r}")
        return parsed(bytes(answer))

    def warn_once(self, what: str, *details: object) -> None:
        """Logs a warning that was not logged before."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(what, *details)


def _key(scope: Scope) -> str:
    """The key that a request comes with; empty where there is none."""
    values = (header(scope["headers"], name) for name in _KEYS)
    key = next((value for value in values if value), b"")
    return key.decode("latin-1").removeprefix("Bearer ").strip()


class _InvalidRequest(Exception):
    """Why a request is refused, and the parameter that is wrong with it."""

    def __init__(
        self, reason: str, parameter: str | None = "prediction", *, status: int = 400
    ) -> None:
        super().__init__(reason)
        self.parameter = parameter
        self.status = status


class _Completion:
    """One request for a completion, on its way in and out.

    The body is read when the application asks for it and not before, so after it has checked who is
    calling.
    """

    def __init__(self, front: Front, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        self._front = front
        self._scope = scope
        self._path = path
        self._client_receive = receive
        self._client_send = send
        self._body_given = False
        self._ticket: str | None = None
        self._asked = Asked()
        self._refusal: _InvalidRequest | None = None
        self._answer: WholeAnswer | EventAnswer | None = None
        # The body to record; None if the request is not recorded.
        self._kept: bytes | None = None
        self._kept_answer = bytearray()

    async def run(self) -> None:
        if self._front.server.text is None:
            ASKED.set(self._asked)  # filled in when the body is read
        # How long the body becomes is not known yet.
        headers = without(self._scope["headers"], b"content-length")
        try:
            await self._front.app({**self._scope, "headers": headers}, self._receive, self._send)
        except Exception:
            # An application may take a caller who went away for an error.
            if self._refusal is None:
                raise
        if self._refusal is not None:
            wrong = self._refusal
            send, text = self._client_send, str(wrong)
            await send_error(send, wrong.status, text, "BadRequestError", wrong.parameter)

    async def _receive(self) -> Message:
        if self._refusal is not None:
            return {"type": "http.disconnect"}
        if self._body_given:
            return await self._client_receive()
        try:
            body = await self._body()
            if body is None:
                return {"type": "http.disconnect"}
            self._body_given = True
            body = await self._with_token_ids(body)
        except _InvalidRequest as error:
            self._refusal = error
        except RecursionError:
            self._refusal = _InvalidRequest("the body is nested too deeply", None)
        if self._refusal is not None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    async def _body(self) -> bytes | None:
        """The whole body; None where the client goes away. Raises _InvalidRequest."""
        size = header(self._scope["headers"], b"content-length") or b"0"
        body = bytearray()
        more = True
        while more:
            if len(body) > _MOST_BYTES or (size.isdigit() and int(size) > _MOST_BYTES):
                text = f"the body must be at most {_MOST_BYTES} bytes"
                raise _InvalidRequest(text, None, status=413)
            message = await self._client_receive()
            if message["type"] != "http.request":
                return None
            body.extend(message.get("body", b""))
            more = message.get("more_body", False)
        return bytes(body)

    async def _with_token_ids(self, body: bytes) -> bytes:
        """The body with prediction and templates as token ids, and with a prediction a ticket.

        What is wrong with a body, fastdraft's options aside, is the server's to say.
        """
        front, server = self._front, self._front.server
        if front.record is None and not any(name in body for name in _OF_INTEREST):
            return body
        try:
            request = json.loads(body)
        except ValueError:
            return body
        if not isinstance(request, dict):
            return body
        prediction = request.get("prediction")
        text = None if prediction is None else _prediction_text(prediction)
        field = server.parameters
        if self._path not in server.paths:
            if text:
                front.warn_once("%s takes no predictions at %s", server.title, self._path)
            return body
        arguments = request.get(field)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            return body
        for name in request:
            if name in OPTIONS or name.startswith("fastdraft"):
                raise _InvalidRequest(f"{_shown(name)} belongs in {field}", name)
        try:
            options = request_options(arguments)
        except InvalidValueError as error:
            raise _InvalidRequest(f"{field}.{error}", field) from error
        if front.record is not None and options.remember and options.lookahead:
            self._kept = body
        if text and len(text) > _MOST_LETTERS:
            raise _InvalidRequest(
                f"prediction must be at most {_MOST_LETTERS} characters, got {len(text)}"
            )
        if server.text is None:
            # The server refuses fields that it does not know.
            self._asked.params, self._asked.prediction = arguments, text
            given = len(request)
            request = {k: v for k, v in request.items() if k not in (field, "prediction")}
            return body if len(request) == given else json.dumps(request).encode()
        added: Json = {}
        if options.lookahead and options.templates is None:
            ids = await front.template_ids(self._scope, request, options.namespace)
            added = {TEMPLATES: ids} if ids else {}
        if options.prediction is None and text:
            added |= await self._predicted(request.get("model"), text)
        if PREDICTION in arguments or PREDICTION in added:
            self._ticket = front.new_ticket()
            if self._ticket is not None:
                added[TICKET] = self._ticket
            request.pop("prediction", None)
        if not added:
            return body
        request[field] = {**arguments, **added}
        return json.dumps(request).encode()

    async def _predicted(self, model: object, text: str) -> Json:
        """The parameters of a prediction. Raises _InvalidRequest."""
        token_ids = await self._front.prediction_ids(self._scope, model, text)
        if len(token_ids) > MOST_IDS:
            raise _InvalidRequest(
                f"prediction must be at most {MOST_IDS} tokens, got {len(token_ids)}"
            )
        return {PREDICTION: token_ids} if token_ids else {}

    @property
    def _is_predicted(self) -> bool:
        asked = self._asked
        return self._ticket is not None or bool(asked.prediction or asked.params.get(PREDICTION))

    async def _send(self, message: Message) -> None:
        if self._refusal is not None:
            # The application answers the disconnect; the caller gets our refusal.
            return
        if message["type"] == "http.response.start":
            packed = header(message["headers"], b"content-encoding")
            if message["status"] != 200 or packed:
                self._kept = None
            elif self._is_predicted:
                kind = header(message["headers"], b"content-type") or b""
                if kind.startswith(b"text/event-stream"):
                    self._answer = EventAnswer(self._client_send, self._reported)
                elif kind.startswith(b"application/json"):
                    self._answer = WholeAnswer(self._client_send, self._reported)
        send = self._client_send if self._answer is None else self._answer.send
        await send(message)
        if self._kept is not None and message["type"] == "http.response.body":
            self._keep(self._kept, message)

    def _keep(self, request: bytes, message: Message) -> None:
        """Records the request once its whole answer has gone to the client."""
        self._kept_answer.extend(message.get("body", b""))
        if len(self._kept_answer) > _MOST_BYTES:
            self._kept = None
        elif not message.get("more_body", False) and self._front.record is not None:
            self._front.record.append(request, bytes(self._kept_answer))
            self._kept = None

    def _reported(self, document: bytes) -> bytes:
        """A JSON document with the counts in its `usage`, or as it is where it has none."""
        answer = parsed(document)
        # The last event of /v1/responses holds the whole answer.
        inner = answer.get("response")
        usage = (inner if isinstance(inner, dict) else answer).get("usage")
        if not isinstance(usage, dict):
            return document
        ticket = self._ticket
        self._front.report(
            usage, self._asked.counts if ticket is None else self._front.counts(ticket)
        )
        text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        # Half a surrogate pair has no encoding; JSON writes it as Python's backslashes do.
        return text.encode("utf-8", "backslashreplace")


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
