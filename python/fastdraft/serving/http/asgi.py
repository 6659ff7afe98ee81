"""ASGI's words, and what is done with headers and JSON everywhere here."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = [
    "App",
    "Headers",
    "Json",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "header",
    "json_headers",
    "parsed",
    "send_error",
    "without",
]

Json = dict[str, Any]
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


def header(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a header, by its name in lower case; None where there is none."""
    return next((value for key, value in headers if key.lower() == name), None)


def without(headers: Headers, *names: bytes) -> Headers:
    """The headers but for some, named in lower case."""
    return [(key, value) for key, value in headers if key.lower() not in names]


def json_headers(body: bytes) -> Headers:
    """The headers of a JSON document."""
    return [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]


def parsed(document: bytes) -> Json:
    """The JSON object in `document`, empty where it is none: what is wrong is the host's to say."""
    try:
        value = json.loads(document)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


async def send_error(
    send: Send, status: int, message: str, kind: str, parameter: str | None = None
) -> None:
    """Answers with an error in the form of OpenAI's API."""
    error = {"message": message, "type": kind, "param": parameter, "code": status}
    body = json.dumps({"error": error}).encode()
    await send({"type": "http.response.start", "status": status, "headers": json_headers(body)})
    await send({"type": "http.response.body", "body": body})
