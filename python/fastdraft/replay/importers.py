"""Forms of recorded conversations, as one: the bodies of OpenAI's chat and completions.

Each form is a line of the table at the end: what tells it, and what turns it into
`{"request": BODY, "response": BODY}` for `server_log`. A conversation gives one for each answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from fastdraft.replay.records import RecordError, parse_object

__all__ = ["FORMS", "exchanges_of"]

Json = dict[str, Any]

_ROLES: Final = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""What ShareGPT and others call them."""


def exchanges_of(line: Json, place: str) -> list[Json]:
    """The exchanges of one line of a log, which is left as it is where it has no known form.

    Args:
        line: The line.
        place: Names it in errors, and its session where it has no id.

    Raises:
        RecordError: It has a known form and another content.
    """
    for name, (applies, exchanges) in FORMS.items():
        if applies(line):
            try:
                found = list(exchanges(line))
            except RecordError as error:
                raise RecordError(f"{place}: {error}") from error
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                raise RecordError(f"{place}: not what {name} hold: {error!r:.100}") from error
            if len(found) > 1:
                session = str(line.get("id") or place)
                found = [{"session": session, **each} for each in found]
            return found
    return [line]


def _exchange(messages: Sequence[Json], answer: Json, tools: Any = None, **more: Any) -> Json:
    request = {"messages": list(messages), **({"tools": tools} if tools else {})}
    return {"request": request, "response": {"choices": [{"message": answer}], **more}}


def _turns(messages: Sequence[Json], tools: Any = None) -> Iterator[Json]:
    """One exchange for each answer of a conversation."""
    for at, message in enumerate(messages):
        if at > 0 and message["role"] == "assistant":
            yield _exchange(messages[:at], message, tools)


def _messages(items: Any) -> Iterator[Json]:
    """Messages of OpenAI's chats, of /v1/responses and of Anthropic's API as those of chats."""
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind, content = item.get("type"), item.get("content")
        if kind == "function_call":
            yield {"role": "assistant", "content": "", "tool_calls": [_call(item)]}
        elif kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
        elif kind == "reasoning":
            continue
        elif isinstance(content, list):
            for block in content:
                if block.get("type") == "tool_result":
                    text = _text(block.get("content") or "")
                    yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}
            calls = [_call(block) for block in content if block.get("type") == "tool_use"]
            texts = [block for block in content if isinstance(block.get("text"), str)]
            if calls or texts or not content:
                message = {"role": item["role"], "content": _text(texts)}
                yield {**item, **message, **({"tool_calls": calls} if calls else {})}
        else:
            yield item


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _call(item: Json) -> Json:
    arguments = item["arguments"] if "arguments" in item else json.dumps(item["input"])
    function = {"name": item["name"], "arguments": arguments}
    return {"type": "function", "id": item.get("call_id") or item.get("id"), "function": function}


def _tools(tools: Any) -> list[Json]:
    """Tools of any of the three interfaces as those of chats."""
    found = []
    for tool in tools or ():
        function = tool.get("function", tool)
        schema = function.get("parameters") or function.get("input_schema")
        kept = {**function, "parameters": schema}
        kept.pop("input_schema", None)
        kept.pop("type", None)
        found.append({"type": "function", "function": kept})
    return found


def _one(messages: Sequence[Json]) -> Json:
    """The parts of one answer as one message."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    text = "".join(message.get("content") or "" for message in messages)
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _body(value: Any, name: str) -> Any:
    return parse_object(value, name) if isinstance(value, str) else value


def _event_stream(text: str) -> Json:
    """The body that the events of a streamed answer make."""
    texts: dict[int, list[str]] = {}
    calls: dict[tuple[int, int], Json] = {}
    body: Json = {}
    is_chat = False
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = parse_object(data, "an event")
        if isinstance(event.get("response"), dict):
            body = event["response"]  # the last event of /v1/responses has all
            continue
        body |= {name: event[name] for name in ("id", "model") if name in event}
        for choice in event.get("choices") or ():
            index, delta = choice.get("index", 0), choice.get("delta")
            is_chat |= delta is not None
            texts.setdefault(index, []).append(
                (choice.get("text") if delta is None else delta.get("content")) or ""
            )
            for part in (delta or {}).get("tool_calls") or ():
                key = (index, part.get("index", 0))
                call = calls.setdefault(key, {"type": "function", "function": {"arguments": ""}})
                function = part.get("function") or {}
                call["function"]["arguments"] += function.get("arguments") or ""
                call |= {"id": part["id"]} if part.get("id") else {}
                call["function"] |= {"name": function["name"]} if function.get("name") else {}
    if texts:
        body["choices"] = []
        for index, parts in sorted(texts.items()):
            answer = _one([{"content": "".join(parts)}])
            made = [call for (choice, _), call in sorted(calls.items()) if choice == index]
            if made:
                answer["tool_calls"] = made
            body["choices"].append({"message": answer} if is_chat else {"text": "".join(parts)})
    return body


def _logged(line: Json) -> Iterator[Json]:
    """A request and its answer by any of the three interfaces."""
    request, response = _body(line["request"], "request"), line.get("response")
    if isinstance(response, str) and response.lstrip().startswith(("data:", "event:")):
        response = _event_stream(response)
    response = _body(response, "response")
    exchange = {**line, "request": request, "response": response}
    answered = isinstance(response, dict) and not response.get("error")
    if answered and "choices" not in response and isinstance(response.get("output"), list):
        system = request.get("instructions")
        before = [{"role": "system", "content": system}] if system else []
        messages = [*before, *_messages(request["input"])]
        answer = _one(list(_messages(response["output"])))
    elif answered and response.get("type") == "message":
        system = request.get("system")
        before = [{"role": "system", "content": _text(system)}] if system else []
        messages = [*before, *_messages(request["messages"])]
        answer = _one(list(_messages([{"role": "assistant", "content": response["content"]}])))
    else:
        yield exchange
        return
    names = {name: response[name] for name in ("id", "model") if name in response}
    made = _exchange(messages, answer, _tools(request.get("tools")), **names)
    made["request"] = {**request, **made["request"]}
    yield {**exchange, **made}


def _traced(line: Json) -> Iterator[Json]:
    """Input and output of a call as tracing tools keep them: LangSmith, Langfuse."""
    asked, said = (line.get(name, line.get(f"{name}s")) for name in ("input", "output"))
    tools = asked.get("tools") if isinstance(asked, dict) else None
    if isinstance(asked, dict):
        asked = asked.get("messages") or asked["prompt"]
    if isinstance(said, dict) and "choices" in said:
        yield {**_exchange(list(_messages(asked)), {}, _tools(tools)), "response": said}
        return
    if isinstance(said, dict):
        said = said.get("messages") or [said]
    answer = {"content": said} if isinstance(said, str) else _one(list(_messages(said)))
    yield _exchange(list(_messages(asked)), {"role": "assistant", **answer}, _tools(tools))


def _paired(line: Json) -> Iterator[Json]:
    prompt = next(line[name] for name in ("prompt", "instruction", "question") if name in line)
    if isinstance(line.get("input"), str) and line["input"]:
        prompt = f"{prompt}\n\n{line['input']}"
    answers = ("completion", "response", "output", "answer")
    answer = next(line[name] for name in answers if isinstance(line.get(name), str))
    yield {"request": {"prompt": prompt}, "response": {"choices": [{"text": answer}]}}


def _share_gpt(line: Json) -> Iterator[Json]:
    yield from _turns(
        [
            {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
            for turn in line["conversations"]
        ]
    )


def _litellm(line: Json) -> Iterator[Json]:
    tools = (line.get("model_parameters") or {}).get("tools")
    made = _exchange(list(_messages(line["messages"])), {}, _tools(tools))
    yield {**line, **made, "response": line["response"]}


def _is_pair(line: Json) -> bool:
    asked = any(isinstance(line.get(name), str) for name in ("prompt", "instruction", "question"))
    names = ("completion", "response", "output", "answer")
    return asked and any(isinstance(line.get(name), str) for name in names)


def _has(*names: str) -> Callable[[Json], bool]:
    return lambda line: all(name in line for name in names)


FORMS: Final[dict[str, tuple[Callable[[Json], bool], Callable[[Json], Iterator[Json]]]]] = {
    "requests with their responses": (_has("request", "response"), _logged),
    "Helicone's lines": (
        _has("request_body", "response_body"),
        lambda line: _logged(
            {**line, "request": line["request_body"], "response": line["response_body"]}
        ),
    ),
    "LiteLLM's lines": (_has("messages", "response"), _litellm),
    "fine-tuning files": (
        lambda line: isinstance(line.get("messages"), list),
        lambda line: _turns(list(_messages(line["messages"])), _tools(line.get("tools"))),
    ),
    "ShareGPT's lines": (_has("conversations"), _share_gpt),
    "pairs of a prompt and an answer": (_is_pair, _paired),
    "LangSmith's lines": (_has("inputs", "outputs"), _traced),
    "Langfuse's lines": (_has("input", "output"), _traced),
}
"""By name: what tells a line of this form, and its exchanges. The first that applies is taken."""
