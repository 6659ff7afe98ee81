"""llama-cpp-python's server with drafts.

`python -m fastdraft.serving.llama_cpp_server --model FILE`; its options are those of
`python -m llama_cpp.server`. `FASTDRAFT_MEMORY_BYTES` in the environment bounds the memory of
earlier requests of each model.
"""

from __future__ import annotations

import functools
from typing import Any

from llama_cpp.server import app as server
from llama_cpp.server.model import LlamaProxy

from fastdraft import Memory
from fastdraft.serving.http.front import Front
from fastdraft.serving.http.servers import LLAMA_CPP
from fastdraft.serving.llama_cpp import FastdraftDraftModel
from fastdraft.serving.settings import memory_bytes_of_environment

__all__ = ["create_app", "main"]

_create_app = server.create_app


@functools.wraps(_create_app)
def create_app(*args: Any, **kwargs: Any) -> Any:
    """The server's application, as `llama_cpp.server.app.create_app` makes it, with drafts.

    Raises:
        InvalidValueError: A bad value in the environment, or a model that takes no drafts.
    """
    if not hasattr(LlamaProxy.load_llama_from_model_settings, "calls_fastdraft"):
        LlamaProxy.load_llama_from_model_settings = staticmethod(
            _with_drafts(LlamaProxy.load_llama_from_model_settings)
        )
    app = _create_app(*args, **kwargs)
    app.add_middleware(Front, server=LLAMA_CPP)
    return app


def _with_drafts(load: Any) -> Any:
    @functools.wraps(load)
    def loaded(settings: Any) -> Any:
        llama = load(settings)
        FastdraftDraftModel(llama, memory=Memory(memory_bytes_of_environment()))
        return llama

    loaded.calls_fastdraft = True  # type: ignore[attr-defined]
    return loaded


def main() -> None:
    """Runs `python -m llama_cpp.server` with this application."""
    server.create_app = create_app
    from llama_cpp.server import __main__ as command

    command.main()


if __name__ == "__main__":
    main()
