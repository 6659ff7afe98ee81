"""The servers that a front is mounted in: how each passes a request on to its drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["COMPLETIONS", "LLAMA_CPP", "SGLANG", "TRANSFORMERS", "VLLM", "Server"]

COMPLETIONS: Final = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/invocations",
)
"""The paths at which a server is asked for text."""


@dataclass(frozen=True)
class Server:
    """An inference server with OpenAI's API."""

    title: str
    parameters: str
    """The field of a request that holds fastdraft's options."""
    paths: tuple[str, ...]
    """The endpoints that take them."""
    text: str | None
    """The field of the text in what its `/detokenize` answers, which like its `/tokenize` is called
    as vLLM's. None where the drafter runs in the server's process and gets text by `handover`."""


_TWO: Final = ("/v1/chat/completions", "/v1/completions")
VLLM: Final = Server("vLLM", "vllm_xargs", COMPLETIONS, "prompt")
SGLANG: Final = Server("SGLang", "custom_params", _TWO, "text")
TRANSFORMERS: Final = Server("transformers serve", "custom_params", (*_TWO, "/v1/responses"), None)
LLAMA_CPP: Final = Server("llama-cpp-python's server", "custom_params", _TWO, None)
