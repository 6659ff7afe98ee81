"""A real HTTP server for an ASGI application, in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

__all__ = ["running"]


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """Serves `app` on a free port until the block ends; the server's URL."""
    off = dict.fromkeys(("server_header", "date_header", "proxy_headers"), False)
    config = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1, **off)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    [listener] = server.servers[0].sockets
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
