"""What passes through a proxy, request by request, for a record of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fastdraft.serving.http.asgi import App, Message, Receive, Scope, Send, header
from fastdraft.serving.http.servers import COMPLETIONS

__all__ = ["Recorder"]

_MOST_BYTES: Final = 1 << 26
"""The longest request and the longest answer that are kept."""

logger = logging.getLogger(__name__)


class Recorder:
    """Passes all on to another application, and hands each answered completion to `write`.

    A request is recorded when its whole answer has gone to the client: none of status 200 alone,
    none that was broken off or compressed. What `write` raises is logged and fails no request.

    Args:
        app: What answers.
        write: Called with the bodies of a request and its answer, a document or a stream of events,
            in one thread of its own.
    """

    def __init__(self, app: App, write: Callable[[bytes, bytes], object]) -> None:
        self._app = app
        self._write = write
        self._thread = ThreadPoolExecutor(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in COMPLETIONS:
            await self._app(scope, receive, send)
            if scope["type"] == "lifespan":
                self._thread.shutdown()  # writes what is left
            return
        request, answer = bytearray(), bytearray()
        is_kept = header(scope["headers"], b"content-encoding") is None

        def keep(body: bytearray, message: Message) -> None:
            nonlocal is_kept
            body.extend(message.get("body", b"") if is_kept else b"")
            is_kept = is_kept and len(body) <= _MOST_BYTES

        async def receive_and_keep() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                keep(request, message)
            return message

        async def send_and_keep(message: Message) -> None:
            nonlocal is_kept
            await send(message)
            if message["type"] == "http.response.start":
                is_compressed = header(message["headers"], b"content-encoding") is not None
                is_kept = is_kept and message["status"] == 200 and not is_compressed
            elif message["type"] == "http.response.body":
                keep(answer, message)
                if is_kept and not message.get("more_body", False):
                    # Nobody waits for it: a client that leaves now would break it off.
                    self._thread.submit(self._record, bytes(request), bytes(answer))

        await self._app(scope, receive_and_keep, send_and_keep)

    def _record(self, request: bytes, answer: bytes) -> None:
        try:
            self._write(request, answer)
        except Exception as error:  # Nothing of a record may fail a request.
            logger.warning("a request was not recorded: %s", error)
