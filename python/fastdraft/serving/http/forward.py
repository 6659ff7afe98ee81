"""Passes ASGI requests on to a server over HTTP, and its answers back as they come."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import httpx

from fastdraft.errors import InvalidValueError
from fastdraft.serving.http.asgi import (
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    send_error,
    values,
    without,
)

__all__ = ["Forward"]

# Headers of one connection, which are not passed on (RFC 9110, 7.6.1), and those made anew here.
_OF_CONNECTION: Final = (
    b"connection expect host keep-alive proxy-authenticate proxy-authorization proxy-connection te "
    b"trailer transfer-encoding upgrade"
).split()
_CONNECT_SECONDS: Final = 10.0

logger = logging.getLogger(__name__)


class _ClientGone(Exception):
    """The client disconnected while its request was read."""


class Forward:
    """An ASGI application that is another server.

    Bodies are passed on as they come, in both directions, and so are the events of a stream. If the
    client goes away, the request to the server ends at once, so that the server can stop working on
    it. A server that cannot be reached is answered with status 502, and one that is silent for too
    long with 504, in the form of OpenAI's errors. If that happens in the middle of an answer, the
    connection to the client is closed, so that the answer does not look complete. WebSockets are
    refused, and so are paths with a `..` in them.

    Each request has a connection of its own, since a server that answers more than it was asked
    would answer the next request on the same connection too.

    Args:
        url: The server's, such as `http://localhost:8000`.
        silence: After how many seconds without a byte from the server a request fails.

    Raises:
        InvalidValueError: Not such a URL.
    """

    def __init__(self, url: str, *, silence: float = 600.0) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InvalidValueError(f"the server's URL is invalid: {error}, got {url!r}") from error
        known = self._url.scheme in ("http", "https") and self._url.host
        if not known or (self._url.port or 0) > 65535:
            raise InvalidValueError(
                f"the server's URL must be such as http://localhost:8000, got {url!r}"
            )
        if self._url.query or self._url.fragment:
            raise InvalidValueError(f"the server's URL must end with its path, got {url!r}")
        if self._url.path.rstrip("/").endswith("/v1"):
            raise InvalidValueError(f"the server's URL must be the one without /v1, got {url!r}")
        self._prefix = self._url.raw_path.rstrip(b"/")
        self._timeout = httpx.Timeout(silence, connect=_CONNECT_SECONDS, pool=None).as_dict()
        self._transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._transport.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("raw_path") or scope["path"].encode()
        if not path.startswith(b"/") or b".." in re.split(rb"[/\\]", unquote_to_bytes(path)):
            await send_error(send, 400, "The path is invalid.", "BadRequestError")
            return
        body = _Body(receive)
        started = False

        async def send_on(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            request = await self._request(scope, path, body)
            await _until_gone(self._answer(request, send_on), body)
        except _ClientGone:
            return
        except httpx.TransportError as error:
            # Queries hold keys.
            logger.warning(
                "%s %s failed: %s: %s",
                scope["method"],
                path.decode("latin-1"),
                type(error).__name__,
                error,
            )
            # What has begun can only be cut off: the server closes what is left incomplete.
            if not started:
                late = isinstance(error, httpx.ReadTimeout)
                text = f"The inference server {'did not answer in time' if late else 'failed'}."
                await send_error(send, 504 if late else 502, text, "APIConnectionError")

    async def _request(self, scope: Scope, path: bytes, body: _Body) -> httpx.Request:
        """The request for the server. Raises _ClientGone."""
        headers = _of_request(scope)
        whole = await body.begin()
        if whole is not None:
            # A front before this may have changed it.
            headers = without(headers, b"content-length")
        query = scope.get("query_string", b"")
        target = self._prefix + path + (b"?" + query if query else b"")
        return httpx.Request(
            scope["method"],
            self._url.copy_with(raw_path=target),
            headers=headers,
            content=body if whole is None else whole or None,
            extensions={"timeout": self._timeout},
        )

    async def _answer(self, request: httpx.Request, send: Send) -> None:
        response = await self._transport.handle_async_request(request)
        try:
            headers = _passed_on([(key.lower(), value) for key, value in response.headers.raw])
            start = {"type": "http.response.start", "status": response.status_code}
            await send({**start, "headers": headers})
            async for part in response.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            await response.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Body:
    """The body of a request, passed on as it comes."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self._first = b""
        self.read = asyncio.Event()
        """Set when it was read to its end: until then nobody else may receive."""

    async def begin(self) -> bytes | None:
        """Reads the first part: the whole body, or None where more is to come."""
        self._first = await self._part()
        return self._first if self.read.is_set() else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        while not self.read.is_set():
            yield await self._part()

    async def _part(self) -> bytes:
        message = await self.receive()
        if message["type"] != "http.request":
            raise _ClientGone
        if not message.get("more_body", False):
            self.read.set()
        part: bytes = message.get("body", b"")
        return part


async def _until_gone(answering: Coroutine[Any, Any, None], body: _Body) -> None:
    """Answers a request until that is done or the client has gone. Raises _ClientGone."""

    async def watch() -> None:
        await body.read.wait()
        while (await body.receive())["type"] != "http.disconnect":
            pass
        raise _ClientGone

    tasks = [asyncio.ensure_future(answering), asyncio.ensure_future(watch())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # The answer first: its end also ends the request for the watch.
    (tasks[0] if tasks[0] in done else tasks[1]).result()


def _of_request(scope: Scope) -> Headers:
    """The headers of a request for the server."""
    headers = _passed_on(scope["headers"])
    client = scope.get("client")
    if client is not None:
        # Lines of one name are one list: the last entry is the nearest, whose word counts most.
        known = values(headers, b"x-forwarded-for")
        headers = without(headers, b"x-forwarded-for")
        headers.append((b"x-forwarded-for", b", ".join([*known, client[0].encode()])))
    headers.append((b"connection", b"close"))
    return headers


def _passed_on(headers: Headers) -> Headers:
    """The headers that are not for one connection alone."""
    named = b",".join(values(headers, b"connection"))
    others = [name.strip().lower() for name in named.split(b",")]
    return without(headers, *_OF_CONNECTION, *others)
