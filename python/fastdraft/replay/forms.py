"""The forms of logs: a table of what lies around model calls.

A tracer, an agent or a trainer that writes another form is one more row.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final, NamedTuple

import jmespath

from fastdraft.replay.lines import RecordError
from fastdraft.replay.messages import parsed

__all__ = ["AROUND", "NO_CALLS", "ROWS", "Row", "flattened", "mapped", "search"]

Json = dict[str, Any]


class Row(NamedTuple):
    """One form of log. All but `name` and `has` are JMESPath expressions.

    Attributes:
        name: What writes it.
        has: Fields that it has, separated by blanks; of `a|b` one.
        when: What is true of it besides.
        kind: What sort of thing it says it is; only models' calls count.
        request, answer: The two parts of a call. With `join`, either may be null: the parts with
            the same value of `join` are one call.
        conversation: Instead of these, messages, of which each of the model's is an answer.
        turn: Instead of these, a message that goes on a conversation: the one of `parent`, or of
            `session`, or of the file.
        within: Instead of these, where to look for calls.
        id, session, model: The names of the call, of its conversation and of the model.
    """

    name: str
    has: str
    when: str = ""
    kind: str = ""
    request: str = ""
    answer: str = ""
    join: str = ""
    conversation: str = ""
    turn: str = ""
    parent: str = ""
    within: str = ""
    id: str = "id"
    session: str = ""
    model: str = "model"


_SPAN: Final = (
    '"gen_ai.operation.name" || "openinference.span.kind" || "traceloop.span.kind"'
    ' || "llm.request.type" || openinference.span.kind'
)
_SPAN_ID: Final = '"gen_ai.response.id" || spanId || span_id || context.span_id'
_SPAN_MODEL: Final = '"gen_ai.response.model" || "gen_ai.request.model" || "llm.model_name"'
# fmt: off
ROWS: Final = (
    # These hold several calls.
    Row("Inspect", "events messages", "events[?event=='model']",
        within="events[?event=='model']"),
    Row("mini-swe-agent", "trajectory_format messages", session="null", conversation="messages["
        "?role!='exit'].[extra.interrupt_type && extra.response.choices[0].message && merge("
        "extra.response.choices[0].message, {aside: `true`}), @][]"),
    Row("LangSmith", "child_runs", "child_runs", within="child_runs"),
    Row("Langfuse", "observations", "observations[?input]", within="observations"),
    Row("preferences", "chosen rejected", "!(prompt)",
        within="[{conversation: chosen}, {conversation: rejected}]"),
    # Conversations in one value.
    Row("Harbor's trajectories (ATIF)", "steps schema_version", session="session_id",
        conversation="steps[].[{role: source, content: message, reasoning_content: "
        "reasoning_content, tool_calls: tool_calls}, observation.results[].{type: "
        "'tool_call_output', call_id: source_call_id, output: content}]"),
    Row("SWE-agent", "trajectory history", conversation="history"),
    Row("Inspect", "messages output target", conversation="messages"),
    # One call, or a part of one.
    Row("batch files of OpenAI and Anthropic", "custom_id", join="custom_id", id="null",
        request="body || params",
        answer="response.body || result.message || response || result"),
    Row("exchanges", "request response", id="id || request_id", session="session",
        request="request.postData.text || request.body || request",
        answer="response.content.text || response.body || response"),
    Row("Helicone", "request_body|full_request response_body|full_response", id="request_id || id",
        request="request_body || full_request", answer="response_body || full_response"),
    Row("LiteLLM's spend logs", "proxy_server_request response", answer="response",
        kind="response=='{}' && 'prompt not stored' || null",
        request="proxy_server_request.body || proxy_server_request || {messages: messages}",
        id="request_id || id", session="session_id"),
    Row("LiteLLM", "messages response", answer="response", id="id || litellm_call_id",
        request="{messages: messages, tools: tools || model_parameters.tools"
        " || optional_params.tools || kwargs.tools}"),
    Row("OpenTelemetry", "gen_ai.input.messages|gen_ai.prompt "
        "gen_ai.output.messages|gen_ai.completion", kind=_SPAN, id=_SPAN_ID, model=_SPAN_MODEL,
        request='{messages: "gen_ai.input.messages" || "gen_ai.prompt",'
        ' system: "gen_ai.system_instructions", tools: "gen_ai.tool.definitions"}',
        answer='"gen_ai.output.messages" || "gen_ai.completion"',
        session='"gen_ai.conversation.id"'),
    Row("OpenInference", "llm.input_messages|llm.prompts|llm llm.output_messages|llm.choices|llm",
        kind=_SPAN, id=_SPAN_ID, model=_SPAN_MODEL, session='"session.id" || session.id',
        request='{messages: "llm.input_messages" || llm.input_messages, prompt: "llm.prompts",'
        ' tools: "llm.tools" || llm.tools}',
        answer='"llm.output_messages" || llm.output_messages || "llm.choices" || "output.value"'),
    Row("Langfuse", "langfuse.observation.type", kind='"langfuse.observation.type"',
        request='"langfuse.observation.input"', answer='"langfuse.observation.output"',
        id=_SPAN_ID, model='"langfuse.observation.model.name"', session='"session.id"'),
    Row("the AI SDK", "ai.prompt.messages ai.response.text|ai.response.toolCalls", id=_SPAN_ID,
        request='{messages: "ai.prompt.messages", tools: "ai.prompt.tools"}', model=_SPAN_MODEL,
        answer="{role: 'assistant', content: \"ai.response.text\", tool_calls:"
        ' "ai.response.toolCalls"}'),
    Row("OpenTelemetry's events", "gen_ai event", turn="event", id="null",
        session="spanId || span_id"),
    Row("OpenTelemetry", "gen_ai.operation.name|gen_ai.system|openinference.span.kind",
        kind="'event'"),
    Row("Inspect", "event input output", "event=='model'", answer="output",
        kind="cache=='read' && 'cached' || null", request="{messages: input, tools: tools}",
        id="output.id || uuid"),
    Row("SGLang", "event rid obj", kind="event!='request.finished' && 'event' || null",
        request="obj", answer="out", id="rid"),
    Row("preferences", "prompt chosen rejected", request="prompt", answer="[chosen, rejected]"),
    Row("preferences", "input preferred_output non_preferred_output", request="input",
        answer="[preferred_output, non_preferred_output]"),
    Row("LangSmith, Langfuse and other tracers", "inputs|input outputs|output", "!(instruction)",
        kind="type || run_type || span_attributes.type || observation_type",
        request="input.inputBodyJson || inputs || input",
        answer="output.outputBodyJson || outputs || output || null",
        model="model || extra.metadata.ls_model_name || extra.invocation_params.model"),
    Row("lm-eval", "arguments resps", answer="resps", kind="resps[0][0][0] && 'likelihood' || null",
        id="prompt_hash && join(' ', [to_string(doc_id), prompt_hash, target_hash])",
        request="arguments.gen_args_0.arg_0 || arguments[0][0]"),
    # Sessions of agents: a line is a part of a conversation.
    Row("Claude Code", "type message", "message.role", id="uuid || id",
        parent="parentUuid || parentId", session="sessionId || session_id",
        turn="message.model!='<synthetic>' && message || null"),
    Row("Claude Code", "uuid parentUuid", turn="null", id="uuid", parent="parentUuid",
        session="sessionId"),
    Row("Codex", "type payload timestamp", id="null",
        turn="(type=='response_item' && payload) || (type=='session_meta' && {role: 'system',"
        " content: payload.instructions || payload.base_instructions.text}) || null"),
    Row("OpenHands", "kind source", id="null",
        turn="(kind=='MessageEvent' && llm_message) || (kind=='ActionEvent' && {role: 'assistant',"
        " content: thought, reasoning_content: reasoning_content, tool_calls: [tool_call]})"
        " || (kind=='ObservationEvent' && {role: 'tool', tool_call_id: tool_call_id, content:"
        " observation.content || observation})"
        " || (kind=='SystemPromptEvent' && {role: 'system', content: system_prompt}) || null"),
    # By the shape alone.
    Row("prompts and completions",
        "messages|prompt|instruction|question|query|problem choices|completion|response|sampled|"
        "generation|generations|responses|generated_text|answer|output|outputs|completions",
        request="messages || prompt || instruction && join('\n\n', [instruction, input || ''])"
        " || question || query || problem",
        answer="choices || completion || response || sampled || generation || generations"
        " || responses || generated_text || answer || output || outputs || completions"),
    Row("conversations", "messages|conversations|conversation|history|chat",
        conversation="messages || conversations || conversation || history || chat"),
)
# fmt: on
"""Of the rows that apply to a value the first is taken."""


def mapped(text: str) -> Row:
    """The row of a user's own form: `messages=input.messages, answer=output.content`.

    Raises RecordError.
    """
    names = {"messages": "request", "prompt": "request", "request": "request", "answer": "answer"}
    names |= {each: each for each in ("conversation", "id", "session", "model", "kind")}
    split = rf",\s*(?=(?:{'|'.join(names)})\s*=)"
    found: dict[str, str] = {}
    for part in re.split(split, text):
        name, equals, expression = (each.strip() for each in part.partition("="))
        if not equals or name not in names:
            raise RecordError(f"expected NAME=EXPRESSION with {', '.join(names)}, got {part!r:.60}")
        try:
            jmespath.compile(expression)
        except (jmespath.exceptions.JMESPathError, ValueError) as error:
            raise RecordError(f"{name}: not JMESPath: {' '.join(str(error).split())}") from error
        found[names[name]] = expression
    if "conversation" not in found and not {"request", "answer"} <= found.keys():
        raise RecordError("expected messages or prompt, and answer; or conversation")
    return Row("--map", "", **found)


NO_CALLS: Final = {
    *("tool", "retriever", "embedding", "embeddings", "parser", "prompt", "event", "execute_tool"),
    *("create_agent", "evaluator", "guardrail", "reranker", "score", "rerank"),
    *("cached", "likelihood", "prompt not stored"),
}
AROUND: Final = {
    *("span", "chain", "agent", "workflow", "invoke_agent", "invoke_workflow", "task", "trace"),
    "unknown",
}
"""Kinds that hold the text of calls in them; they count where a file has none of these."""


def search(expression: str, value: Json) -> Any:
    """The value that a JMESPath expression finds; None for the empty expression."""
    return _compiled(expression).search(value) if expression else None


@cache
def _compiled(expression: str) -> Any:
    return jmespath.compile(expression)


_NUMBERED: Final = re.compile(
    r"(gen_ai\.(?:prompt|completion)|llm\.(?:(?:in|out)put_messages|prompts|choices|tools))\.(\d+.*)"
)
_EVENT: Final = re.compile(r"gen_ai\.(?:(system|user|assistant|tool)\.message|(choice))$")


def flattened(value: Json) -> Json:
    """An object with the attributes of OpenTelemetry, its events' included, among its fields.

    Attributes such as gen_ai.prompt.0.role become a list of objects. A log record that is a message
    becomes the field `event` of it.
    """
    events = value.get("events")
    if isinstance(events, list) and isinstance(value.get("attachments"), dict):
        value = {**value, "events": [_inspected(each, value) for each in events]}
        events = None
    holders = [value, *(events if isinstance(events, list) else ())]
    found: Json = {}
    for each in holders:
        if isinstance(each, dict) and isinstance(each.get("attributes"), dict | list):
            found |= _attributes(each["attributes"])
    found = {**found, **value}
    names = ("gen_ai.", "llm.", "attributes.", "event.name", "event_name", "eventName")
    if not any(name.startswith(names) for name in found):
        return found
    nested: Json = {}
    for name, content in list(found.items()):
        name = name.removeprefix("attributes.")
        found.setdefault(name, content)
        if numbered := _NUMBERED.match(name):
            inner = nested.setdefault(numbered[1], {})
            *path, last = numbered[2].split(".")
            for step in path:
                inner = inner.setdefault(step, {})
                if not isinstance(inner, dict):
                    raise RecordError(f"{name} lies within a value that is none")
            inner[last] = content
    found |= {name: _listed(content) for name, content in nested.items()}
    for whole, part in (("input.value", "messages"), ("output.value", "choices")):
        inner = parsed(found.get(whole))  # OpenInference has the whole bodies beside the messages
        if isinstance(inner, dict) and isinstance(inner.get(part), list):
            found[f"llm.{whole[:-6]}_messages"] = inner
    said = [found.get(each) for each in ("event.name", "event_name", "eventName")]
    body = found.get("body")
    if isinstance(body, dict):
        body = _value(body) if len(body) == 1 else body
        event = next((kind for each in said if (kind := _EVENT.match(str(each)))), None)
        if event is not None and isinstance(body, dict):
            inner = body.get("message")
            inner = inner if isinstance(inner, dict) else {}
            given = {} if event[2] else {"given": True}
            found["event"] = {**body, **inner, "role": event[1] or "assistant", **given}
            found["gen_ai"] = True
    return found


def _inspected(event: Any, sample: Json) -> Any:
    """An event of Inspect's with what it refers to: messages of a pool, and long texts."""
    if not isinstance(event, dict) or event.get("event") != "model":
        return None
    pool = (sample.get("events_data") or {}).get("messages") or []
    refs = event.get("input_refs") or ()
    event = {each: event.get(each) for each in ("event", "input", "tools", "output", "cache")}
    event["input"] = event["input"] or [each for ends in refs for each in pool[slice(*ends)]]
    texts: Json = sample["attachments"]

    def whole(item: Any) -> Any:
        if isinstance(item, str):
            return texts.get(item.removeprefix("attachment://"), item)
        if isinstance(item, list):
            return [whole(each) for each in item]
        return {k: whole(v) for k, v in item.items()} if isinstance(item, dict) else item

    return whole(event)


def _attributes(attributes: Any) -> Json:
    """Attributes, which a collector writes as a list, as an object."""
    if isinstance(attributes, dict):
        return attributes
    return {
        each["key"]: _value(each.get("value"))
        for each in attributes
        if isinstance(each, dict) and "key" in each
    }


def _value(value: Any) -> Any:
    """A value as a collector writes it."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in content.get("values") or ()]
    if kind == "kvlistValue":
        return _attributes(content.get("values") or [])
    return content if kind.endswith("Value") else value


def _listed(value: Any) -> Any:
    """Objects with numbers for names as lists."""
    if not isinstance(value, dict):
        return value
    made = {name: _listed(content) for name, content in value.items()}
    if all(name.isdigit() for name in made):
        return [content for _, content in sorted(made.items(), key=lambda each: int(each[0]))]
    return made
