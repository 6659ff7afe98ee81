"""fastdraft's part of vLLM's /metrics: predictions, drafting errors, time and memory."""

from __future__ import annotations

from collections.abc import Mapping

from fastdraft.integrations.vllm.ledger import Totals

__all__ = ["exposition"]

# By field of Totals: the metric's type and its help text.
_METRICS = {
    "accepted_prediction_tokens": (
        "counter",
        "Tokens drafted from predictions that the model emitted.",
    ),
    "rejected_prediction_tokens": (
        "counter",
        "Tokens drafted from predictions that the model did not emit.",
    ),
    "faults": ("counter", "Steps or requests that went on without drafts because drafting raised."),
    "steps": ("counter", "Calls of the proposer."),
    "seconds": ("counter", "Time spent in calls of the proposer."),
    "requests": ("gauge", "Requests that the drafting engine holds."),
    "request_bytes": ("gauge", "Bytes of their indexes."),
    "datastore_bytes": ("gauge", "Bytes of the live datastores."),
}


def exposition(totals: Mapping[str, Totals]) -> str:
    """The totals, by engine, in Prometheus' text format, version 0.0.4."""
    lines = []
    for field, (kind, description) in _METRICS.items():
        name = f"fastdraft_{field}_total" if kind == "counter" else f"fastdraft_{field}"
        lines.append(f"# HELP {name} {description}")
        lines.append(f"# TYPE {name} {kind}")
        for engine, values in totals.items():
            lines.append(f'{name}{{engine="{engine}"}} {getattr(values, field)}')
    return "\n".join(lines) + "\n"
