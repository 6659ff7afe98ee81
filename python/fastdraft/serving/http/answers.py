"""Answers that are changed on their way to the client: whole documents, and streams of events."""

from __future__ import annotations

from collections.abc import Callable

from fastdraft.serving.http.asgi import Message, Send, without

__all__ = ["EventAnswer", "WholeAnswer"]


class WholeAnswer:
    """An answer that is changed as a whole, when it is complete."""

    def __init__(self, send: Send, change: Callable[[bytes], bytes]) -> None:
        self._client_send = send
        self._change = change
        self._start: Message = {}
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Takes the application's next message."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                body = bytes(self._body)
                if self._start["status"] == 200:
                    body = self._change(body)
                headers = without(self._start["headers"], b"content-length")
                headers.append((b"content-length", str(len(body)).encode()))
                await self._client_send({**self._start, "headers": headers})
                await self._client_send({"type": "http.response.body", "body": body})
        else:
            await self._client_send(message)


class EventAnswer:
    """A stream of server-sent events: those with a `usage` are changed, all go on at once."""

    def __init__(self, send: Send, change: Callable[[bytes], bytes]) -> None:
        self._client_send = send
        self._change = change
        self._unfinished_line = b""

    async def send(self, message: Message) -> None:
        """Takes the application's next message."""
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
