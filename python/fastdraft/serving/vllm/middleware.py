"""OpenAI's predicted outputs, and templates of tool calls, in vLLM's HTTP server."""

from __future__ import annotations

from fastdraft.serving.http.asgi import App
from fastdraft.serving.http.front import Front
from fastdraft.serving.http.servers import VLLM

__all__ = ["PredictionMiddleware"]


class PredictionMiddleware(Front):
    """Predicted outputs over HTTP: `--middleware fastdraft.serving.vllm.PredictionMiddleware`.

    Where text is asked for, such as at `/v1/chat/completions`, `/v1/responses` and `/v1/messages`,
    it takes OpenAI's `prediction` and reports `accepted_prediction_tokens` and
    `rejected_prediction_tokens` in `usage.completion_tokens_details` (`output_tokens_details`
    there), where a request has a prediction and an engine on the same machine drafts with
    fastdraft. Calls of a request's `tools`, and JSON of the schema in its
    `response_format`, are drafted before the first one was written. To `/metrics` it adds
    fastdraft's own.
    """

    def __init__(self, app: App) -> None:
        super().__init__(app, VLLM)
