"""The front as a server of its own: `fastdraft proxy`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from types import FrameType
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fastdraft.serving.http.asgi import App
from fastdraft.serving.http.forward import Forward
from fastdraft.serving.http.front import Front
from fastdraft.serving.http.servers import Server

__all__ = ["IDLE_SECONDS", "create", "serve"]

IDLE_SECONDS: Final = 30.0
"""How long a client may keep a connection waiting before it is closed, and at most twice that."""


def create(
    url: str,
    *,
    server: Server | None = None,
    silence: float = 600.0,
    namespace_by_key: bool = False,
) -> App:
    """An ASGI application that stands before an inference server.

    With `FASTDRAFT_VLLM_LEDGER` in the environment, the folder of a vLLM server on the same
    machine, it also reports what became of predictions, and adds fastdraft's metrics to vLLM's.

    Args:
        url: The server's, such as `http://localhost:8000`.
        server: Which one it is; None to ask it when the first request needs to know.
        silence: After how many seconds without a byte from the server a request fails.
        namespace_by_key: Whether each key has a memory of its own, as for `Front`.

    Raises:
        InvalidValueError: The URL is invalid.
    """
    return Front(Forward(url, silence=silence), server, namespace_by_key=namespace_by_key)


def serve(app: App, *, host: str, port: int) -> None:
    """Serves the application until a signal ends the process: SIGTERM when the answers that have
    begun are complete, SIGINT at once."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=_Connection,
        access_log=False,
        # What the inference server says of itself is passed on.
        server_header=False,
        date_header=False,
        proxy_headers=False,
        log_config=None,
    )
    server = _Server(config)
    # uvicorn raises the signal again when it has ended.
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(3)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.force_exit |= sig == signal.SIGINT


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A client's connection, closed where the client keeps it waiting: for the head of a request,
    or for more of its body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._heard = False
        self._last: Any = None
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        super().data_received(data)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._check)

    def _check(self) -> None:
        request = self.cycle
        running = request is not None and not request.response_complete
        waits = not running or (request.more_body and not self.flow.read_paused)
        moved = request is not self._last or (running and self._heard)
        if waits and not moved:
            self.transport.close()
        else:
            self._last, self._heard = request, False
            self._wait()
