"""Messages, requests and answers of any interface in one form: that of OpenAI's chats.

A message has `role`, `content` as one string and, where there are any, `reasoning_content`,
`tool_calls` with arguments as objects, and `tool_call_id`. `left_out` counts its images and other
attachments, which no text holds; `given` marks what no model wrote though it has its role, `aside`
an answer that later requests do not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from fastdraft.replay.lines import RecordError, parse_object, short

__all__ = [
    "Answer",
    "Asked",
    "asked",
    "choices",
    "flat",
    "is_message",
    "messages_of",
    "parsed",
    "text_of",
    "tools_of",
]

Json = dict[str, Any]

_ROLES: Final = {
    **dict.fromkeys(("user", "human", "HumanMessage", "HumanMessageChunk"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "ai", "model", "agent"), "assistant"),
    **dict.fromkeys(("AIMessage", "AIMessageChunk", "gemini", "ASSISTANT"), "assistant"),
    **dict.fromkeys(("system", "developer", "SystemMessage"), "system"),
    **dict.fromkeys(("tool", "function", "ToolMessage", "FunctionMessage"), "tool"),
}
"""The names that interfaces give the four roles."""
_TEXTS: Final = ("text", "content", "thinking", "reasoning", "refusal", "value", "summary")
_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking", "thought")
_CALL_IDS: Final = ("call_id", "tool_call_id", "toolCallId", "toolUseId", "tool_use_id", "id")
_USES: Final = ("tool_use", "tool-call", "toolCall")
_RESULTS: Final = ("tool_result", "tool_call_response", "tool-result")


class Asked(NamedTuple):
    """The input of a model: messages, text, or token ids; of several prompts each has choices."""

    messages: list[Json] | None = None
    prompts: Sequence[str] = ()
    tools: list[Json] | None = None
    reference: str | None = None
    model: str | None = None
    prompt_ids: list[int] | None = None


class Answer(NamedTuple):
    """One choice of an answer: text, or messages, of which those of the model are answers."""

    text: str | None = None
    messages: Sequence[Json] = ()
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    id: str | None = None
    model: str | None = None


def parsed(value: Any) -> Any:
    """A string that is JSON of a request, of an answer or of messages is parsed; all else stays."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(found, dict) and not found.keys().isdisjoint(_SHAPES):
            return found
        if isinstance(found, list) and any(
            isinstance(each, dict)
            and ({"role", "generations", "delta"} & each.keys() or "lc" in each)
            for each in flat(found)
        ):
            return found
    return value


def text_of(value: Any) -> str:
    """The text in a content, a part or a list of parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(text_of, value))
    if isinstance(value, dict):
        return next((text_of(value[name]) for name in _TEXTS if value.get(name) is not None), "")
    return ""


def is_message(item: Any) -> bool:
    """True for a message, or an item of one, in any interface's form."""
    return isinstance(item, dict) and (
        _role(item) is not None or str(item.get("type")).endswith(("_call", "_call_output"))
    )


def messages_of(items: Any, role: str | None = None) -> list[Json]:
    """The messages that items are. `role` is of those that say none. Raises RecordError."""
    if isinstance(items, str):
        items = [{"role": role or "user", "content": items}]
    elif isinstance(items, dict):
        items = [items]
    while isinstance(items, list) and len(items) == 1 and isinstance(items[0], list):
        items = items[0]  # LangChain has them in batches
    if not isinstance(items, list):
        raise RecordError(f"messages must be a list, got {short(items)}")
    return [message for item in items for message in _messages(item, role)]


def _role(item: Json) -> str | None:
    inner = _unwrapped(item)
    said = inner.get("role") or inner.get("from") or inner.get("type")
    has_content = not inner.keys().isdisjoint(
        {"content", "parts", "value", "tool_calls", "tool_name"}
    )
    return _ROLES.get(said) if isinstance(said, str) and has_content else None


def _unwrapped(item: Json) -> Json:
    """Without what LangChain, OpenInference and sessions of agents lay around a message."""
    if "lc" in item and isinstance(item.get("kwargs"), dict):
        kind = item["id"][-1] if isinstance(item.get("id"), list) and item["id"] else ""
        return {**item["kwargs"], "type": kind}
    for name in ("data", "message", "content"):
        inner = item.get(name)
        if isinstance(inner, dict) and not inner.keys().isdisjoint({"content", "contents", "role"}):
            found = {"type": item.get("type"), **inner}
            return {**found, "content": found.get("content") or found.get("contents")}
    return item


def _messages(item: Any, role: str | None) -> Iterator[Json]:
    if isinstance(item, str) and role is not None:
        item = {"role": role, "content": item}
    if not isinstance(item, dict):
        raise RecordError(f"a message must be an object, got {short(item)}")
    item = _unwrapped(item)
    kind = str(item.get("type"))
    if kind.endswith("_call_output"):
        yield _result(item)
        return
    if kind.endswith("_call") or kind == "reasoning":
        item = {"role": "assistant", "content": [item]}
    said = item.get("role") or item.get("from") or kind
    known = role if said in ("None", "message") else None
    found = _ROLES.get(said, known) if isinstance(said, str) else None
    if found is None:
        if "role" not in item and "from" not in item and kind != "None":
            return  # an item of another kind, such as a reference or a search
        raise RecordError(f"a message must have a role, got {short(said)}")
    content = next((item[each] for each in ("content", "parts", "value") if item.get(each)), None)
    if isinstance(content, dict) and isinstance(content.get("parts"), list):
        content = content["parts"]
    held: dict[str, list[Any]] = {
        each: [] for each in ("text", "thought", "call", "result", "other")
    }
    for part in content if isinstance(content, list) else [content]:
        part_kind, value = _part(part)
        held[part_kind] += [value] if value else []
    yield from held["result"]
    extra = item.get("additional_kwargs")
    for named in (item, extra if isinstance(extra, dict) else {}):
        thought = next((named[each] for each in _THOUGHTS if named.get(each)), None)
        if not held["thought"] and (text := text_of(thought)):
            held["thought"].append(text)
    ids = [each["id"] for each in held["call"]]
    called = item.get("tool_calls")
    if isinstance(called, str):
        with suppress(ValueError, RecursionError):
            called = json.loads(called)
    for call in called or [item.get("function_call")]:
        if isinstance(call, dict):
            made = _call(call.get("tool_call", call))
            held["call"] += [made] if made["id"] is None or made["id"] not in ids else []
    is_empty = not any(held[each] for each in ("text", "thought", "call", "other"))
    if is_empty and (held["result"] or kind == "reasoning"):
        return
    message: Json = {"role": found, "content": "".join(held["text"])}
    message |= {"reasoning_content": "\n\n".join(held["thought"])} if held["thought"] else {}
    message |= {"tool_calls": held["call"]} if held["call"] else {}
    if found == "tool":
        message["tool_call_id"] = next((item[each] for each in _CALL_IDS if item.get(each)), None)
    message |= {"left_out": len(held["other"])} if held["other"] else {}
    message |= {"aside": True} if item.get("aside") else {}
    yield message | ({"given": True} if item.get("given") or item.get("is_demo") else {})


def _part(part: Any) -> tuple[str, Any]:
    """The kind of a part of a content, and its text. Raises RecordError."""
    if part is None or isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        raise RecordError(f"a message's content must be text or parts, got {short(part)}")
    part = part.get("message_content", part)
    kind, names = str(part.get("type")), part.keys()
    if kind in _RESULTS or {"toolResult", "functionResponse"} & names:
        return "result", _result(part)
    if kind in _USES or kind.endswith("_call") or {"toolUse", "functionCall"} & names:
        return "call", _call(part)
    if kind in ("thinking", "reasoning", "redacted_thinking", "reasoningContent") or (
        part.get("thought") is True or "reasoningContent" in names
    ):
        part = part.get("reasoningContent", part)
        part = part.get("reasoningText", part)
        inner = (text_of(part.get(each)) for each in ("content", "summary"))
        return "thought", next(filter(None, inner), text_of(part))
    return ("text", text) if (text := text_of(part)) or kind == "text" else ("other", part)


def _result(part: Json) -> Json:
    """The message of a tool's result."""
    part = part.get("toolResult") or part.get("functionResponse") or part
    names = ("content", "output", "response", "result")
    content = next((part[each] for each in names if part.get(each) is not None), "")
    text = text_of(content)
    if not text and content:
        text = json.dumps(content, ensure_ascii=False)
    name = next((part[each] for each in _CALL_IDS if part.get(each)), None)
    return {"role": "tool", "content": text, "tool_call_id": name}


def _call(part: Json) -> Json:
    part = part.get("toolUse") or part.get("functionCall") or part
    function = part["function"] if isinstance(part.get("function"), dict) else part
    titles = ("name", "toolName", "function_name", "function")  # the last is Inspect's
    name = next((function[each] for each in titles if isinstance(function.get(each), str)), "")
    names = ("arguments", "input", "args", "parameters", "action")
    arguments: Any = next((function[each] for each in names if function.get(each)), {})
    arguments = function.get("partial_json") or arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    kind = str(part.get("type")).removesuffix("_call")
    made = {"name": name or kind, "arguments": {} if arguments is None else arguments}
    identity = next((part[each] for each in _CALL_IDS if part.get(each)), None)
    return {"type": "function", "id": identity, "function": made}


def tools_of(tools: Any) -> list[Json] | None:
    """Tools of any interface as those of chats."""
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    found = []
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            continue
        tool = tool.get("tool", tool)
        schema = tool.get("json_schema")
        tool = json.loads(schema) if isinstance(schema, str) else tool
        for function in tool.get("functionDeclarations") or [tool.get("function", tool)]:
            function = dict(function.get("toolSpec", function))
            schemas = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema")
            schema = next((function.pop(each) for each in schemas if function.get(each)), None)
            for each in ("type", *schemas):
                function.pop(each, None)
            found.append({"type": "function", "function": {**function, "parameters": schema}})
    return found or None


_REQUESTS: Final = (
    *("messages", "input", "contents", "prompt", "prompts", "inputs", "text", "question"),
    *("query", "input_ids", "raw"),
)
_ANSWERS: Final = (
    *("choices", "generations", "candidates", "message", "messages", "output", "outputs"),
    *("response", "completion", "generated_text", "content", "text", "answer", "result"),
)
_SHAPES: Final = {*_REQUESTS, *_ANSWERS, "role", "body", "lc"}


def asked(value: Any) -> Asked | None:
    """The prompt of a request in any interface's form; None where it is no request."""
    value = parsed(value)
    if isinstance(value, str):
        return Asked(prompts=[value])
    if isinstance(value, list):
        if value and all(type(each) is int for each in value):
            return Asked(prompt_ids=value)
        if value and all(isinstance(each, str) for each in value):
            inner = parsed(value[0])  # lm-eval has the messages of a chat as a string
            return Asked(prompts=value) if isinstance(inner, str) else asked(inner)
        return Asked(messages_of(value)) if value else None
    if not isinstance(value, dict):
        return None
    if is_message(value):
        return Asked(messages_of(value))
    name = next((each for each in _REQUESTS if value.get(each) is not None), None)
    if name is None:
        return asked(value["body"]) if value.get("body") else None
    inner = parsed(value[name])
    if name == "messages" and isinstance(inner, str):
        raise RecordError(f"messages must be a list, got {short(inner)}")
    are_messages = isinstance(inner, {"messages": list, "input": str}.get(name, ()))
    found = Asked(messages_of(inner)) if are_messages else asked(inner)
    if found is None:
        return None
    names = ("system", "instructions", "systemInstruction", "system_instruction")
    system = next((value[each] for each in names if value.get(each)), None)
    if system is not None and found.messages is not None:
        if isinstance(system, str) and system.startswith("[{"):  # OpenTelemetry's parts
            with suppress(ValueError):
                system = json.loads(system)
        content = system.get("parts", system) if isinstance(system, dict) else system
        before = messages_of([{"role": "system", "content": content}])
        found = found._replace(messages=before + found.messages)
    tools = tools_of(value.get("tools")) or tools_of(value.get("functions")) or found.tools
    model = value.get("model") or found.model
    ids = _ids(value, "input_ids", "prompt_token_ids") or found.prompt_ids
    return found._replace(tools=tools, reference=_reference(value), model=model, prompt_ids=ids)


def _reference(request: Json) -> str | None:
    """The text of OpenAI's Predicted Outputs."""
    prediction = request.get("prediction")
    if not isinstance(prediction, dict):
        return None
    content = prediction.get("content")
    if not isinstance(content, str | list) or not text_of(content):
        raise RecordError(
            f"prediction.content must be a string or a list of text parts, got {short(content)}"
        )
    return text_of(content)


def choices(value: Any) -> list[Answer]:
    """The choices of an answer in any interface's form; none where it holds none.

    Raises RecordError where it is an error, or of no known form.
    """
    if isinstance(value, str) and value.lstrip().startswith(("data:", "event:", ":")):
        events = _events(value)
        value = _streamed(events) if events else value
    value = parsed(value)
    if value is None or value == {} or value == []:
        return []
    if isinstance(value, str):
        return [Answer(text=value)]
    if isinstance(value, list):
        return _listed(value)
    if not isinstance(value, dict):
        raise RecordError(f"an answer must be text, messages or choices, got {short(value)}")
    if value.get("error") not in (None, False, "", {}):
        return []
    if is_message(value) or (value.get("type") == "message" and "content" in value):
        found = [Answer(messages=messages_of(value, "assistant"))]
    else:
        name = next((each for each in _ANSWERS if value.get(each) is not None), None)
        ids = _ids(value, "token_ids", "output_ids", "completion_token_ids")
        if name is None and ids is None and "choices" not in value:
            keys = ", ".join(value) or "nothing"
            raise RecordError(f"an answer holds no message, text or choices; it has {keys:.80}")
        if name == "choices" and isinstance(value[name], list):
            found = [answer for each in value[name] for answer in choices(each)]
        else:
            found = choices(value[name]) if name is not None else [Answer("")]
    prompt_ids = _ids(value, "prompt_token_ids")
    return [
        each._replace(
            ids=each.ids or _ids(value, "token_ids", "output_ids", "completion_token_ids"),
            prompt_ids=each.prompt_ids or prompt_ids,
            id=value.get("id") or each.id,
            model=value.get("model") or each.model,
        )
        for each in found
    ]


def _listed(items: list[Any]) -> list[Answer]:
    """Choices of a list: of texts, of choices, of a stream's events, or the messages of one."""
    if all(type(each) is int for each in items):
        return [Answer(text="", ids=items)]
    if all(isinstance(each, dict) for each in items) and any(map(_is_event, items)):
        return choices(_streamed(items))
    if all(
        isinstance(each, dict) and each.get("finish_reason") and is_message(each) for each in items
    ):
        return [Answer(messages=messages_of(each)) for each in items]  # OpenTelemetry
    if any(map(is_message, items)):
        return [Answer(messages=messages_of(items))]
    return [answer for each in items for answer in choices(each)]


def _ids(value: Json, *names: str) -> list[int] | None:
    return next((value[each] for each in names if value.get(each) is not None), None)


def flat(items: Iterable[Any]) -> Iterator[Any]:
    """The items of lists within lists."""
    for each in items:
        if isinstance(each, list):
            yield from flat(each)
        else:
            yield each


def _events(text: str) -> list[Json]:
    """The events of a stream as text; comments and names are passed over."""
    found = []
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data not in ("", "[DONE]"):
            found.append(parse_object(data, "an event"))
    return found


def _is_event(item: Json) -> bool:
    parts = item.get("choices")
    kinds = ("response.", "message_", "content_block_")
    return str(item.get("type")).startswith(kinds) or (
        isinstance(parts, list)
        and any(isinstance(each, dict) and "delta" in each for each in parts)
    )


def _streamed(events: Iterable[Json]) -> Json:
    """The body that the events of a streamed answer make."""
    body: Json = {}
    found: dict[int, Json] = {}
    for event in events:
        kind = event.get("type")
        if isinstance(event.get("response"), dict):  # of /v1/responses; the last one has all
            body = {
                **event["response"],
                "output": event["response"].get("output") or body.get("output"),
            }
        elif kind == "response.output_item.done":
            body["output"] = [*(body.get("output") or ()), event["item"]]
        elif kind == "message_start":
            body = {**event["message"], "role": "assistant", "content": []}
        elif "content_block" in event:
            body.setdefault("content", []).append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            _extend(body["content"][event["index"]], event["delta"])
        elif isinstance(event.get("error"), dict):
            body["error"] = event["error"]
        else:
            names = ("id", "model", "prompt_token_ids")
            body |= {name: event[name] for name in names if event.get(name)}
            for part in event.get("choices") or ():
                whole = found.setdefault(part.get("index") or 0, {})
                delta = {"role": "assistant", "content": "", **(part.get("delta") or {})}
                piece = {"message": delta} if "delta" in part else {"text": part.get("text") or ""}
                if part.get("token_ids"):
                    piece["token_ids"] = part["token_ids"]
                _extend(whole, piece)
    if found:
        body["choices"] = [choice for _, choice in sorted(found.items())]
    return body


_WHOLE: Final = ("role", "type", "id", "name", "index", "format")
"""Fields that a stream sends whole, once or repeatedly, not in pieces."""


def _extend(whole: Json, more: Json) -> None:
    """Adds an event to those before it."""
    for name, value in more.items():
        before: Any = whole.get(name)
        if value is None:
            continue
        if isinstance(value, dict):
            _extend(whole.setdefault(name, {}), value)
        elif name == "tool_calls":
            calls = whole.setdefault(name, [])
            for call in value:
                same = [each for each in calls if each.get("index") == call.get("index", 0)]
                if not same:
                    same = [{"index": call.get("index", 0)}]
                    calls += same
                _extend(same[0], call)
        elif name not in _WHOLE and isinstance(value, str | list) and type(before) is type(value):
            whole[name] = before + value  # type: ignore[operator]  # both of one type
        elif before is None or name not in _WHOLE:
            whole[name] = value
