"""A small inference server with the HTTP interface of vLLM or another, as an ASGI application."""

from __future__ import annotations

import json
import threading
from typing import Any

from fastdraft.serving.ledger import Ledger

__all__ = ["CHAT", "InferenceServer", "chat", "content"]

CHAT = "/v1/chat/completions"
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


class InferenceServer:
    """Tokenises by character, answers every completion alike, and notes what it was asked.

    Its chat template writes `most_calls` calls in an answer and fails for more; with 0 it writes
    none.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        *,
        sglang: bool = False,
        counts: tuple[int, int] = (4, 2),
        most_calls: int = 9,
    ) -> None:
        self.ledger, self.counts = ledger, counts
        self.sglang = sglang
        self.field = "custom_params" if sglang else "vllm_xargs"
        self.most_calls = most_calls
        self.keys: tuple[bytes, ...] = ()
        """Those that it takes, if not all."""
        self.tokenize_status = 200
        self.events: list[bytes] = []
        """The answer, if it is a stream."""
        self.usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        self.asked: list[tuple[str, bytes]] = []
        self.scopes: list[Any] = []
        self.disconnected = threading.Event()

    def bodies(self, path: str) -> list[Any]:
        return [json.loads(body) for asked, body in self.asked if asked == path]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        key = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
        if self.keys and key not in (b"", *self.keys):
            await _answer(send, {"error": "Unauthorized"}, 401)
            return
        self.scopes.append(scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == "/metrics":
            await _start(send, 200, (b"content-type", b"text/plain; version=0.0.4"))
            await _end(send, b"vllm:num_requests_running 0.0\n")
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                raise ConnectionError("the client went away")
            body, more = body + message["body"], message["more_body"]
        self.asked.append((path, body))
        if path == "/tokenize":
            asked = json.loads(body)
            text = self._chat(asked) if "messages" in asked else asked["prompt"]
            status = 400 if text is None else self.tokenize_status
            await _answer(send, {"tokens": list(map(ord, text or ""))}, status)
        elif path == "/detokenize":
            text = "".join(map(chr, json.loads(body)["tokens"]))
            await _answer(send, {"text" if self.sglang else "prompt": text})
        else:
            await self._complete(body, send)

    async def _complete(self, body: bytes, send: Any) -> None:
        try:
            request = json.loads(body)
            ticket = request.get(self.field, {}).get("prediction_ticket")
        except (AttributeError, ValueError):
            await _answer(send, {"error": "not what was expected"}, 400)
            return
        for _ in range(request.get("n", 1)):
            row = None if self.ledger is None else self.ledger.open(ticket)
            if self.ledger is not None and row is not None:
                self.ledger.record(row, *self.counts)
                self.ledger.close(row)
        if not self.events:
            await _answer(send, {"choices": ["naïve"], "usage": self.usage})
            return
        await _start(send, 200, _EVENTS)
        for event in self.events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await _end(send)

    def _chat(self, asked: Any) -> str | None:
        text = ""
        for message in asked["messages"]:
            text += f"<{message['role']}>{message['content']}"
            calls = message.get("tool_calls", [])
            if 0 < self.most_calls < len(calls):
                return None
            for call in calls[: self.most_calls]:
                text += f"{call['function']['name']}({call['function']['arguments']});"
        return text + ("<assistant>" if asked.get("add_generation_prompt", True) else "")


async def _start(send: Any, status: int, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def _end(send: Any, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _answer(send: Any, value: Any, status: int = 200, *more: tuple[bytes, bytes]) -> None:
    body = json.dumps(value).encode()
    size = (b"content-length", str(len(body)).encode())
    await _start(send, status, (b"content-type", b"application/json"), size, *more)
    await _end(send, body)


def chat(**fields: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"model": "m", "messages": [{"role": "user", "content": "?"}], **fields}


def content(text: Any) -> dict[str, Any]:
    """A prediction."""
    return {"type": "content", "content": text}
