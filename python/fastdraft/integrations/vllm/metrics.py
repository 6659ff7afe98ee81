"""What vLLM's own /metrics does not know: predictions, failures of drafting, and its memory."""

from __future__ import annotations

from collections.abc import Mapping

from fastdraft.integrations.vllm.ledger import Totals

__all__ = ["exposition"]

# The field of Totals, the metric's name, its type and its help text.
_METRICS = (
    (
        "accepted_prediction_tokens",
        "fastdraft_accepted_prediction_tokens_total",
        "counter",
        "Tokens drafted from predictions that the model emitted.",
    ),
    (
        "rejected_prediction_tokens",
        "fastdraft_rejected_prediction_tokens_total",
        "counter",
        "Tokens drafted from predictions that the model did not emit.",
    ),
    (
        "faults",
        "fastdraft_faults_total",
        "counter",
        "Steps or requests that went on without drafts because drafting raised.",
    ),
    ("steps", "fastdraft_steps_total", "counter", "Calls of the proposer."),
    ("seconds", "fastdraft_seconds_total", "counter", "Time spent in calls of the proposer."),
    ("requests", "fastdraft_requests", "gauge", "Requests that the drafting engine holds."),
    (
        "request_bytes",
        "fastdraft_request_bytes",
        "gauge",
        "Bytes of their indexes.",
    ),
    ("datastore_bytes", "fastdraft_datastore_bytes", "gauge", "Bytes of the live datastores."),
)


def exposition(totals: Mapping[str, Totals]) -> str:
    """The totals, by engine, in Prometheus' text format, version 0.0.4."""
    lines = []
    for field, name, kind, description in _METRICS:
        lines.append(f"# HELP {name} {description}")
        lines.append(f"# TYPE {name} {kind}")
        for engine, values in totals.items():
            lines.append(f'{name}{{engine="{engine}"}} {getattr(values, field)}')
    return "\n".join(lines) + "\n"
