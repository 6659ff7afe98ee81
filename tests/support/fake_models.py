"""A server with the interfaces of models, which keeps what it was asked and what it answered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeModels:
    """Answers chats: the n-th call with n numbered words, thoughts before them, and where tools are
    given and the last message is a user's, a call of the first tool.

    Attributes:
        calls: Of each call the messages, and the answer's text, thoughts and tool calls.
        posted: Other bodies that it was sent, by path; tracers send theirs.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], dict[str, Any]]] = []
        self.posted: list[tuple[str, bytes]] = []
        self.url = ""
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            number = len(self.calls) + 1
            words = " ".join(f"word{number}.{i}" for i in range(number + 2))
            message: dict[str, Any] = {"role": "assistant", "content": f"Answer: {words}."}
            if body.get("reasoning_effort"):
                message["reasoning_content"] = f"Thought {number} comes first."
            if body.get("tools") and body["messages"][-1]["role"] == "user":
                name = body["tools"][0]["function"]["name"]
                called = {"name": name, "arguments": json.dumps({"command": f"echo {number}"})}
                message["content"] = None if number % 2 else message["content"]
                message["tool_calls"] = [
                    {"id": f"call_{number}", "type": "function", "function": called}
                ]
            self.calls.append((body["messages"], message))
        return {
            "id": f"chatcmpl-{number:06}",
            "object": "chat.completion",
            "created": 1_790_000_000,
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
                }
            ],
            "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
        }


def _chunks(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A streamed answer, a few letters at a time."""
    message = whole["choices"][0]["message"]
    base = {name: whole[name] for name in ("id", "created", "model")}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {**base, "object": "chat.completion.chunk", "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        for at in range(0, len(text), 6):
            yield chunk({name: text[at : at + 6]})
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        begun = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        yield chunk({"tool_calls": [begun]})
        for at in range(0, len(function["arguments"]), 5):
            part = {"arguments": function["arguments"][at : at + 5]}
            yield chunk({"tool_calls": [{"index": index, "function": part}]})
    yield chunk({}, whole["choices"][0]["finish_reason"])


@contextmanager
def fake_models() -> Iterator[FakeModels]:
    """Serves until the block ends."""
    models = FakeModels()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(b"{}")

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self.path.endswith("/chat/completions"):
                models.posted.append((self.path, data))
                self._send(b"{}")
                return
            body = json.loads(data)
            whole = models.answer(body)
            if not body.get("stream"):
                self._send(json.dumps(whole).encode())
                return
            events = "".join(f"data: {json.dumps(each)}\n\n" for each in _chunks(whole))
            self._send(f": comment\n\n{events}data: [DONE]\n\n".encode(), "text/event-stream")

        do_PATCH = do_POST  # noqa: N815 - its name there

        def _send(self, data: bytes, kind: str = "application/json") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    models.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield models
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
