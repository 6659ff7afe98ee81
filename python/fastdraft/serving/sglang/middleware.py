"""OpenAI's predicted outputs, and templates of tool calls, in SGLang's HTTP server."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Final

from fastdraft.serving.http.front import Front
from fastdraft.serving.http.servers import SGLANG

__all__ = ["mount"]

_SERVER: Final = "sglang.srt.entrypoints.http_server"


def mount() -> None:
    """Adds the front to SGLang's application, which is imported later, or is there already.

    SGLang adds the check of keys afterwards, and so outside of it.
    """
    if _SERVER in sys.modules:
        _add(sys.modules[_SERVER].app)
        return
    # Processes of further tokenizers load no plugins: they import what this variable names.
    os.environ.setdefault("SGLANG_HTTP_SERVER_APP_PATH", f"{__name__}:app")
    # The application's module calls this one of its own middleware with it when it is imported.
    from sglang.srt.observability import http_request_metrics as module

    original = module.add_http_request_metrics_middleware
    if hasattr(original, "calls_fastdraft"):
        return

    @functools.wraps(original)
    def wrapped(app: Any) -> None:
        original(app)
        _add(app)

    wrapped.calls_fastdraft = True  # type: ignore[attr-defined]
    module.add_http_request_metrics_middleware = wrapped


def _add(app: Any) -> None:
    if all(each.cls is not Front for each in app.user_middleware):
        app.add_middleware(Front, server=SGLANG)


def __getattr__(name: str) -> Any:
    """The application with its front, for a process that imports it from here."""
    if name != "app":
        raise AttributeError(name)
    mount()
    from sglang.srt.entrypoints.http_server import app

    return app
