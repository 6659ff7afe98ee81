"""What the HTTP interface of each inference server lets through to a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["COMPLETIONS", "SERVERS", "SGLANG", "VLLM", "Server", "server_of"]

COMPLETIONS: Final = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/invocations",
)
"""Where a server is asked for text."""


@dataclass(frozen=True)
class Server:
    """An inference server with OpenAI's API.

    With `parameters`, it has `/tokenize` and `/detokenize` as vLLM has them.
    """

    title: str
    owners: tuple[str, ...]
    """What it calls itself: `owned_by` of the models in its `/v1/models`."""
    parameters: str | None = None
    """The field of a request that holds its own parameters for what runs in the engine; None where
    nothing can be passed to a drafter."""
    text: str = "prompt"
    """The field of the text in what its `/detokenize` answers."""
    paths: tuple[str, ...] = ("/v1/chat/completions", "/v1/completions")
    """The endpoints that take these parameters."""


# The second is vLLM's frontend in Rust.
VLLM: Final = Server("vLLM", ("vllm", "vllm-frontend-rs"), "vllm_xargs", paths=COMPLETIONS)
SGLANG: Final = Server("SGLang", ("sglang",), "custom_params", "text")

SERVERS: Final = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama-server": Server("llama-server", ("llamacpp",)),
    "llama-cpp-python": Server("llama-cpp-python's server", ("me",)),
}
"""All known servers, by the names that `fastdraft proxy --server` takes."""


def server_of(models: object) -> Server | None:
    """The server that answered `/v1/models` with this JSON; None for one that is not known."""
    listed = models.get("data") if isinstance(models, dict) else None
    for model in listed if isinstance(listed, list) else []:
        owner = model.get("owned_by") if isinstance(model, dict) else None
        for server in SERVERS.values():
            if owner in server.owners:
                return server
    return None
