"""The front as a server of its own: `fastdraft proxy`."""

from __future__ import annotations

import os

import uvicorn

from fastdraft.integrations.http.asgi import App
from fastdraft.integrations.http.forward import Forward
from fastdraft.integrations.http.front import Front
from fastdraft.integrations.http.servers import VLLM, Server
from fastdraft.integrations.vllm.ledger import FOLDER_VARIABLE
from fastdraft.integrations.vllm.middleware import PredictionMiddleware

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
    forward = Forward(url, silence=silence)
    if FOLDER_VARIABLE in os.environ and server in (None, VLLM):
        return PredictionMiddleware(forward, namespace_by_key=namespace_by_key)
    return Front(forward, server, namespace_by_key=namespace_by_key)


def serve(app: App, *, host: str, port: int) -> None:
    """Serves the application until a signal ends the process."""
    # What the inference server says of itself is passed on.
    uvicorn.run(
        app,
        host=host,
        port=port,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        log_config=None,
    )
