"""OpenAI's predicted outputs, and templates of tool calls, for vLLM's HTTP server.

What it does to requests is `fastdraft.serving.http.front`'s. Here is what vLLM's engines add
to that: what became of predictions, and metrics.
"""

from __future__ import annotations

import os

from fastdraft.serving.http.answers import WholeAnswer
from fastdraft.serving.http.asgi import App, Json, Receive, Scope, Send, without
from fastdraft.serving.http.front import Front
from fastdraft.serving.http.servers import VLLM
from fastdraft.serving.metrics import exposition
from fastdraft.serving.vllm.ledger import FOLDER_VARIABLE, LedgerReader, new_ticket
from fastdraft.serving.vllm.requests import TICKET

__all__ = ["PredictionMiddleware"]

_METRICS = "/metrics"


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

    def __init__(self, app: App, *, namespace_by_key: bool = False) -> None:
        super().__init__(app, VLLM, namespace_by_key=namespace_by_key)
        self._ledgers = LedgerReader.from_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and self._ledgers is not None:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path == _METRICS:
                await self._metrics(self._ledgers, scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def _metrics(
        self, ledgers: LedgerReader, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # What is added is in the plain text format, so vLLM is asked for that.
        headers = without(scope["headers"], b"accept", b"accept-encoding")
        answer = WholeAnswer(send, lambda body: body + exposition(ledgers.totals()).encode())
        await self.app({**scope, "headers": headers}, receive, answer.send)

    def new_ticket(self) -> tuple[str, str] | None:
        return TICKET, new_ticket()

    def report(self, usage: Json, ticket: str) -> None:
        counts = None if self._ledgers is None else self._ledgers.prediction_tokens(ticket)
        # /v1/responses and /v1/messages have another word for it.
        total = "completion_tokens" if "completion_tokens" in usage else "output_tokens"
        if counts is None:
            if usage.get(total):
                self.warn_once(
                    "nothing is known of a request's prediction, so its usage goes without counts: "
                    "an engine on another machine cannot send them, nor one that does not draft "
                    "with fastdraft; they travel in %s=%s",
                    FOLDER_VARIABLE,
                    os.environ.get(FOLDER_VARIABLE),
                )
            return
        accepted, rejected = counts
        # The model may verify tokens past the end of the answer in its last step.
        accepted = min(accepted, usage.get(total) or 0)
        details = usage.get(f"{total}_details") or {}
        counted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        # A server that comes to count them itself knows better.
        known = {name: count for name, count in details.items() if count is not None}
        usage[f"{total}_details"] = {**details, **counted, **known}
