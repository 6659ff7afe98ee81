"""fastdraft's part of vLLM's /metrics: predictions, errors, hits, time, memory and the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fastdraft.integrations.vllm.ledger import Totals

__all__ = ["exposition"]


class _Metric(NamedTuple):
    """A metric: its type, its help text, and its labels by field of Totals."""

    kind: str
    description: str
    fields: Mapping[str, str]


def _one(field: str, kind: str, description: str) -> tuple[str, _Metric]:
    return f"fastdraft_{field}" + "_total" * (kind == "counter"), _Metric(
        kind, description, {field: ""}
    )


_METRICS = dict(
    [
        _one(
            "accepted_prediction_tokens",
            "counter",
            "Tokens drafted from predictions that the model emitted.",
        ),
        _one(
            "rejected_prediction_tokens",
            "counter",
            "Tokens drafted from predictions that the model did not emit.",
        ),
        _one(
            "faults",
            "counter",
            "Steps or requests that went on without drafts because drafting raised.",
        ),
        _one("steps", "counter", "Calls of the proposer."),
        _one("seconds", "counter", "Time spent in calls of the proposer."),
        _one("requests", "gauge", "Requests that the drafting engine holds."),
        _one("request_bytes", "gauge", "Bytes of their indexes."),
        _one("datastore_bytes", "gauge", "Bytes of the live datastores."),
        (
            "fastdraft_accepted_tokens_total",
            _Metric(
                "counter",
                "Draft tokens of finished requests that the model emitted.",
                {
                    f"{name}_{source}": f',namespace="{name}",source="{source}"'
                    for name in ("unnamed", "named", "apart")
                    for source in ("prediction", "text")
                },
            ),
        ),
        _one("memory_faults", "counter", "Errors of saving the memory and reading it again."),
        (
            "fastdraft_fleet_faults_total",
            _Metric(
                "counter",
                "Errors of publishing the memory and of following what others published.",
                {"publish_faults": ',kind="publish"', "follow_faults": ',kind="follow"'},
            ),
        ),
        _one("published_tokens", "counter", "Tokens that this replica published."),
        _one("dropped_tokens", "counter", "Tokens that were not published in time."),
        _one("published_bytes", "gauge", "Bytes of published stores that are mapped."),
        _one("manifest_number", "gauge", "The number of the manifest that is followed."),
    ]
)


def exposition(totals: Mapping[str, Totals]) -> str:
    """The totals, by engine, in Prometheus' text format, version 0.0.4."""
    lines = []
    for name, metric in _METRICS.items():
        lines.append(f"# HELP {name} {metric.description}")
        lines.append(f"# TYPE {name} {metric.kind}")
        for engine, values in totals.items():
            for field, labels in metric.fields.items():
                lines.append(f'{name}{{engine="{engine}"{labels}}} {getattr(values, field)}')
    return "\n".join(lines) + "\n"
