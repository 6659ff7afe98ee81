"""The front as a server of its own: `fastdraft proxy`."""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType

import uvicorn

from fastdraft.serving.http.asgi import App
from fastdraft.serving.http.forward import Forward
from fastdraft.serving.http.front import Front
from fastdraft.serving.http.servers import Server

__all__ = ["create", "serve"]


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
