"""Logs that tracers' own packages write are read as the calls that a server of models got.

The packages that install beside the others write here, while OpenAI's client talks to a server that
keeps its own count: OpenInference and Langfuse, each through OpenTelemetry's exporter to a console,
OpenTelemetry's writer of GenAI spans and events, and LangSmith, whose uploads are put together as
its exports have them. LiteLLM, agents and evaluations write in tests/hosts/test_agents.py; the
newest instrumentation of OpenTelemetry for OpenAI does not go with the pinned wrapt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import openai
import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import ConsoleLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.util.genai.handler import TelemetryHandler
from opentelemetry.util.genai.types import InputMessage, OutputMessage, Reasoning, Text

from exported import TOOL, calls_in, calls_of
from fake_models import FakeModels, fake_models

# Newer langsmith names a moved module when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def models() -> Iterator[FakeModels]:
    with fake_models() as models:
        yield models


def agent(client: Any, *, thinks: bool) -> None:
    """Three turns with tools, whole and streamed, and a call that stands alone."""
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look around."},
    ]
    more = {"reasoning_effort": "low"} if thinks else {}
    for stream in (False, True, False):
        options = {"model": "qwen", "messages": messages, "tools": [TOOL], **more}
        if stream:
            assert list(client.chat.completions.create(stream=True, **options))
            messages = [*messages, {"role": "user", "content": "And now?"}]
            continue
        said = client.chat.completions.create(**options).choices[0].message
        messages = [*messages, said.model_dump(exclude_none=True)]
        for call in said.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    client.chat.completions.create(model="qwen", messages=[{"role": "user", "content": "Bye."}])


def client(models: FakeModels) -> Any:
    return openai.OpenAI(base_url=f"{models.url}/v1", api_key="none")


def spans_to(file: TextIO) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file)))
    return provider


def test_openinference(models: FakeModels, tmp_path: Path) -> None:
    from openinference.instrumentation.openai import OpenAIInstrumentor

    path = tmp_path / "spans.json"
    written = StringIO()
    provider = spans_to(written)
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    try:
        agent(client(models), thinks=True)
    finally:
        OpenAIInstrumentor().uninstrument()
        provider.shutdown()
    path.write_text(written.getvalue())
    found, reader = calls_in(path)
    assert found == calls_of(models, thinks=True)
    assert not reader.left_out


def test_langfuse(models: FakeModels, tmp_path: Path) -> None:
    """Its wrapper keeps no thoughts. What lies around the calls does not count."""
    from langfuse import Langfuse
    from langfuse.openai import OpenAI

    path = tmp_path / "spans.json"
    written = StringIO()
    provider = spans_to(written)
    tracer = Langfuse(
        public_key="pk", secret_key="sk", base_url=models.url, tracer_provider=provider
    )
    asked = {"messages": [{"role": "user", "content": "x"}]}
    with tracer.start_as_current_observation(name="agent", as_type="agent", input=asked) as around:
        agent(OpenAI(base_url=f"{models.url}/v1", api_key="none"), thinks=False)
        said = {"role": "assistant", "content": "all of it"}
        around.update(output={"messages": [*asked["messages"], said]})
    tracer.flush()
    provider.shutdown()
    path.write_text(written.getvalue())
    found, reader = calls_in(path)
    assert [answer for _, answer in found] == [
        answer for _, answer in calls_of(models, thinks=False)
    ]
    assert list(reader.left_out) == ["not a model's call, but around one"]


def test_langsmith(models: FakeModels, tmp_path: Path) -> None:
    from langsmith import Client, traceable, tracing_context
    from langsmith.wrappers import wrap_openai

    uploads = Client(api_url=models.url, api_key="none")
    wrapped = wrap_openai(client(models))

    @traceable(run_type="chain", client=uploads)
    def chain(messages: list[Any]) -> dict[str, Any]:
        agent(wrapped, thinks=False)
        return {"messages": [*messages, {"role": "assistant", "content": "all of it"}]}

    with tracing_context(enabled=True, client=uploads):
        chain([{"role": "user", "content": "x"}])
    uploads.flush()
    runs: dict[str, dict[str, Any]] = {}
    for _, body in models.posted:
        for name, content in re.findall(
            rb'name="(?:post|patch)\.([^"]+)"\r\n.*?\r\n\r\n(.*?)\r\n--', body, re.DOTALL
        ):
            run, _, field = name.decode().partition(".")
            value = json.loads(content)
            runs.setdefault(run, {}).update({field: value} if field else value)
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(run) + "\n" for run in runs.values()))
    found, reader = calls_in(path)
    assert sorted(found, key=str) == sorted(calls_of(models, thinks=False), key=str)
    assert sum(count for count, _ in reader.left_out.values()) == 1  # the chain


@pytest.mark.parametrize("kept", ["SPAN_ONLY", "EVENT_ONLY", "SPAN_AND_EVENT"])
def test_opentelemetrys_genai_spans_and_events(
    models: FakeModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "gen_ai_latest_experimental")
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", kept)
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT", str("EVENT" in kept).lower())
    spans, events = StringIO(), StringIO()
    provider, logs = spans_to(spans), LoggerProvider()
    logs.add_log_record_processor(SimpleLogRecordProcessor(ConsoleLogRecordExporter(out=events)))
    handler = TelemetryHandler(tracer_provider=provider, logger_provider=logs)
    speaker = client(models)
    with handler.invoke_local_agent(agent_name="a") as around:
        for n in range(3):
            asked = [{"role": "user", "content": f"Look {n}."}]
            with handler.inference("openai", request_model="qwen") as call:
                whole = speaker.chat.completions.create(
                    model="qwen", messages=asked, reasoning_effort="low"
                )
                said = whole.choices[0].message
                call.response_id = whole.id
                call.input_messages = [InputMessage("user", [Text(asked[0]["content"])])]
                parts = [Reasoning(said.reasoning_content), Text(said.content)]
                call.output_messages = [OutputMessage("assistant", parts, "stop")]
        around.input_messages, around.output_messages = call.input_messages, call.output_messages
    provider.shutdown()
    logs.shutdown()
    whole_log = tmp_path / "all.json"
    whole_log.write_text(spans.getvalue() + events.getvalue())
    found, reader = calls_in(whole_log)
    assert found == calls_of(models, thinks=True)
    assert reader.duplicates == (3 if kept == "SPAN_AND_EVENT" else 0)
