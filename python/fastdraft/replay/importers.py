"""Logs of many forms as records.

Each form of a line is an entry of the table at the end: what tells it, and what turns it into
exchanges, `{"request": BODY, "response": BODY}` with the bodies of OpenAI's interfaces or of
Anthropic's. A conversation gives one for each answer. Where a request and its answer are lines of
their own, each is a part: `{"part_of": ID, ...}`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from fastdraft.replay.records import JsonLine, RecordError, check_record, parse_object, short
from fastdraft.replay.tokenizer import TextTokenizer

__all__ = ["FORMS", "Importer"]

Json = dict[str, Any]

_ROLES: Final = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""What ShareGPT and others call them."""


class Importer:
    """Turns the lines of logs into the fields of records, for `read_families`.

    Attributes:
        unanswered: The requests so far that have no answer, or an error for one.
    """

    def __init__(self, tokenizer: TextTokenizer, *, form: str | None = None) -> None:
        """`tokenizer` renders messages; `form`, of FORMS, is taken for every line's."""
        self._tokenizer = tokenizer
        self._form = form
        self._parts: dict[Any, Json] = {}
        self._ended: dict[bytes, str] = {}
        self._failed = 0
        self._is_server_log = False

    @property
    def unanswered(self) -> int:
        return self._failed + len(self._parts)

    def __call__(self, line: JsonLine) -> list[Json]:
        """The fields of a line's records. Raises RecordError, also where its form is not known."""
        try:
            records = self._records(line)
        except RecordError as error:
            begins = "" if str(error).startswith(line.place) else f"{line.place}: "
            raise RecordError(f"{begins}{error}") from error
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise RecordError(
                f"{line.place}: not what such a line holds: {error!r:.100}"
            ) from error
        for record in records:
            check_record(record, line.place)
        return records

    def _records(self, line: JsonLine) -> list[Json]:
        exchange = _server_line(line.text)
        if exchange is not None:
            self._is_server_log = True
            exchanges = [exchange]
        elif self._is_server_log and line.text.lstrip()[:1] != b"{":
            return []  # a server logs much else
        else:
            value = line.value
            name = self._form or next((name for name in FORMS if FORMS[name].applies(value)), None)
            if name is None:
                names = ", ".join(value) or "nothing"
                raise RecordError(f"expected a known form, got a line with {names}")
            exchanges = list(FORMS[name].exchanges(value))
            if name == "records":
                return exchanges
            if len(exchanges) > 1:
                session = str(value.get("id") or line.place)
                exchanges = [{"session": session, **each} for each in exchanges]
        joined = [each for part in exchanges if (each := self._joined(part))]
        return [record for each in joined for record in self._answers(each, line.place)]

    def _joined(self, exchange: Json) -> Json:
        """An exchange; of one that comes in parts nothing before all are there."""
        if "part_of" not in exchange:
            return exchange
        part_of = exchange.pop("part_of")
        exchange = self._parts.pop(part_of, {}) | exchange
        if {"request", "response"} <= exchange.keys():
            return exchange
        self._parts[part_of] = exchange
        return {}

    def _answers(self, exchange: Json, place: str) -> list[Json]:
        """A record of each answer to a request."""
        request = _body(exchange, "request")
        response = {"error": "none"}
        if exchange["response"] is not None:
            response = _body(exchange, "response")
        if response.get("error") is not None:
            self._failed += 1
            return []
        exchange = {**exchange, "request": request, "response": response}
        is_responses = isinstance(response.get("output"), list)
        if "choices" not in response and (is_responses or response.get("type") == "message"):
            exchange |= _as_chat(request, response)
            request, response = exchange["request"], exchange["response"]
        choices = response.get("choices")
        if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
            raise RecordError(f"response.choices must be a list of objects, got {short(choices)}")
        name = response.get("id") or exchange.get("id")
        common = {"model": response.get("model"), "reference": _prediction(request)}
        records = [
            {
                **common,
                "id": name if name is None or len(choices) == 1 else f"{name}/{index}",
                **_choice(exchange, choice, self._tokenizer),
            }
            for index, choice in enumerate(choices)
        ]
        session = exchange.get("session") or self._conversation(request, choices, place)
        return [{**record, "session": session} for record in records]

    def _conversation(self, request: Json, choices: Sequence[Json], place: str) -> str | None:
        """The session of a request: that of the one whose messages and answer it begins with."""
        if not isinstance(request.get("messages"), list):
            return None
        said, keys = hashlib.blake2b(digest_size=16), []
        for message in request["messages"]:
            said.update(_digested(message))
            keys.append(said.digest())
        earlier = (self._ended.pop(key, None) for key in reversed(keys))
        session = next((each for each in earlier if each is not None), place)
        for choice in choices:
            ended = said.copy()
            ended.update(_digested(choice.get("message")))
            self._ended[ended.digest()] = session
        return session


def _digested(message: Any) -> bytes:
    """What tells a message from others, however it is written."""
    if not isinstance(message, dict):
        return b""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content]
    return json.dumps([message.get("role"), parts, calls], sort_keys=True).encode()


def _choice(exchange: Json, choice: Json, tokenizer: TextTokenizer) -> Json:
    """Prompt and output of one choice, as text or as ids."""
    request, places = exchange["request"], (choice, exchange["response"], exchange)
    ids = [
        next((each[name] for each in places if each.get(name) is not None), None)
        for name in ("prompt_token_ids", "token_ids")
    ]
    if None not in ids:
        return {"prompt_ids": ids[0], "output_ids": ids[1]}
    if "messages" in request:
        answer, messages = choice.get("message"), request["messages"]
        if not isinstance(answer, dict):
            raise RecordError(f"choices[].message must be an object, got {short(answer)}")
        if not isinstance(messages, list):
            raise RecordError(f"request.messages must be a list, got {short(messages)}")
        text = tokenizer.render(messages, request.get("tools"), answer)
        return dict(zip(("prompt", "output"), text, strict=True))
    if "prompt" not in request:
        raise RecordError("request.messages or request.prompt is missing")
    prompt, output = request["prompt"], choice.get("text")
    if not isinstance(output, str):
        raise RecordError(f"choices[].text must be a string, got {short(output)}")
    if not isinstance(prompt, str):
        raise RecordError(
            "request.prompt must be a string where the response has no token ids, "
            f"got {short(prompt)}"
        )
    if request.get("echo"):
        output = output.removeprefix(prompt)
    return {"prompt": prompt, "output": output}


def _body(exchange: Json, name: str) -> Json:
    """The body of a request or of its answer, which may be text, or the events of a stream."""
    body = exchange[name]
    if isinstance(body, str):
        is_stream = body.lstrip().startswith(("data:", "event:"))
        return _event_stream(body) if is_stream else parse_object(body, name)
    if not isinstance(body, dict):
        raise RecordError(f"{name} must be an object, got {short(body)}")
    return body


def _prediction(request: Json) -> str | None:
    """The text of OpenAI's Predicted Outputs."""
    prediction = request.get("prediction")
    if prediction is None:
        return None
    content = prediction.get("content") if isinstance(prediction, dict) else None
    try:
        return _text(content)
    except (TypeError, KeyError) as error:
        raise RecordError(
            f"prediction.content must be a string or a list of text parts, got {short(content)}"
        ) from error


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _event_stream(text: str) -> Json:
    """The body that the events of a streamed answer make."""
    body: Json = {}
    choices: dict[int, Json] = {}
    calls: dict[tuple[int, int], Json] = {}
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = parse_object(data, "an event")
        if isinstance(event.get("response"), dict):
            body = event["response"]  # the last event of /v1/responses has all
            continue
        if isinstance(event.get("message"), dict):
            body = {**event["message"], "content": []}  # the first one of Anthropic's
            continue
        if "content_block" in event:
            body["content"].append(event["content_block"])
            continue
        if event.get("type") == "content_block_delta":
            block, delta = body["content"][event["index"]], event["delta"]
            if "text" in delta:
                block["text"] += delta["text"]
            elif "partial_json" in delta:
                block["arguments"] = block.get("arguments", "") + delta["partial_json"]
            continue
        body |= {name: event[name] for name in ("id", "model") if name in event}
        for part in event.get("choices") or ():
            index, delta = part.get("index", 0), part.get("delta")
            if delta is None:
                choice = choices.setdefault(index, {"text": ""})
                choice["text"] += part.get("text") or ""
                continue
            message = {"role": "assistant", "content": ""}
            message = choices.setdefault(index, {"message": message})["message"]
            message["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls") or ():
                key = (index, piece.get("index", 0))
                if key not in calls:
                    calls[key] = {"type": "function", "function": {"arguments": ""}}
                    message.setdefault("tool_calls", []).append(calls[key])
                function = piece.get("function") or {}
                calls[key] |= {"id": piece["id"]} if piece.get("id") else {}
                calls[key]["function"]["arguments"] += function.get("arguments") or ""
                if function.get("name"):
                    calls[key]["function"]["name"] = function["name"]
    if choices:
        body["choices"] = [choice for _, choice in sorted(choices.items())]
    return body


def _as_chat(request: Json, response: Json) -> Json:
    """An exchange of /v1/responses or of Anthropic's messages as one of /v1/chat/completions."""
    if "output" in response:
        system, asked, said = request.get("instructions"), request["input"], response["output"]
    else:
        system, asked = request.get("system"), request["messages"]
        said = [{"role": "assistant", "content": response["content"]}]
    before = [{"role": "system", "content": _text(system)}] if system else []
    return _chat([*before, *_messages(asked)], _one(_messages(said)), request, response)


def _chat(messages: Sequence[Json], answer: Json, request: Json, response: Json) -> Json:
    """An exchange of a chat with one answer; it keeps what else the bodies of its source hold."""
    asked = {**request, "messages": list(messages), "tools": _tools(request.get("tools"))}
    return {"request": asked, "response": {**response, "choices": [{"message": answer}]}}


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


def _call(item: Json) -> Json:
    arguments = item.get("arguments") or json.dumps(item["input"])
    function = {"name": item["name"], "arguments": arguments}
    return {"type": "function", "id": item.get("call_id") or item.get("id"), "function": function}


def _tools(tools: Any) -> list[Json] | None:
    """Tools of any of the three interfaces as those of chats."""
    found = []
    for tool in tools or ():
        function = dict(tool.get("function", tool))
        schema = function.pop("input_schema", None)
        function.pop("type", None)
        function["parameters"] = function.get("parameters") or schema
        found.append({"type": "function", "function": function})
    return found or None


def _one(messages: Iterator[Json]) -> Json:
    """The parts of one answer as one message."""
    parts = list(messages)
    calls = [call for part in parts for call in part.get("tool_calls") or ()]
    text = "".join(part.get("content") or "" for part in parts)
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


_STRING: Final = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None"""
_LIST: Final = r"\[[\d, ]*\]|None"
_SERVERS: Final = (
    rf"(?:Received r|R)equest (?P<id>\S+?)(?: details)?: prompt: (?P<prompt>{_STRING}),"
    rf".*?prompt_token_ids: (?P<prompt_ids>{_LIST})",
    rf"Generated response (?P<id>\S+)(?: \(streaming complete\))?: output: (?P<output>{_STRING}),"
    rf"(?: output_token_ids: (?P<output_ids>{_LIST}),)? finish_reason",
    r"Generated response (?P<id>\S+)(?: \(streaming complete\))? details: "
    rf"output_token_ids: (?P<output_ids>{_LIST})",
    r"(?:Received request|Request|Generated response) \S+",
    rf"Finish: obj=\w+\(.*?\btext=(?P<prompt>{_STRING}),(?:.*?\binput_ids=(?P<prompt_ids>{_LIST}))?"
    rf".*?\bout=\{{.*?'text': (?P<output>{_STRING})(?:.*?'output_ids': (?P<output_ids>{_LIST}))?",
    r"(?:Receive|Finish): obj=",
)
"""What vLLM and SGLang write into their logs as text."""


def _server_line(line: bytes) -> Json | None:
    """What a line of the text that vLLM or SGLang logs says of a request; None for all others.

    Raises RecordError.
    """
    if line.lstrip()[:1] == b"{" or not re.search(rb"equest |Generated |: obj=", line):
        return None
    text = line.decode("utf-8", "replace")
    found = next((found for each in _SERVERS if (found := re.search(each, text))), None)
    if found is None:
        return None
    parts = {name: each for name, each in found.groupdict().items() if each is not None}
    name = parts.pop("id", None)
    try:
        exchange = _exchange(**{name: ast.literal_eval(each) for name, each in parts.items()})
    except (SyntaxError, ValueError) as error:
        raise RecordError(f"not what a server logs: {error}") from error
    if name is not None:
        # The prompts of a request for completions are numbered.
        exchange["part_of"] = ("vllm", re.sub(r"^(cmpl-.*)-0$", r"\1", name))
    return exchange


def _exchange(**parts: Any) -> Json:
    """An exchange, or part of one, from what is known of its prompt and output."""
    exchange: Json = {"prompt_token_ids": parts["prompt_ids"]} if parts.get("prompt_ids") else {}
    if parts.get("output_ids"):
        exchange["token_ids"] = parts["output_ids"]
    if "prompt" in parts:
        exchange["request"] = {"prompt": parts["prompt"]}
    if "output" in parts:
        exchange["response"] = {"choices": [{"text": parts["output"]}]}
    return exchange


def _sglang(line: Json) -> Iterator[Json]:
    """SGLang's log as JSON. Requests that it received are logged again when they finish."""
    if line["event"] == "request.finished":
        asked, said = line["obj"], line["out"]
        yield _exchange(
            prompt=asked.get("text"),
            prompt_ids=asked.get("input_ids"),
            output=said.get("text"),
            output_ids=said.get("output_ids"),
        )


def _litellm(line: Json) -> Iterator[Json]:
    tools = (line.get("model_parameters") or {}).get("tools")
    yield {**line, "request": {"messages": line["messages"], "tools": tools}}


def _batched(line: Json) -> Iterator[Json]:
    """A line of the input or of the output of a batch, of OpenAI's or of Anthropic's."""
    part: Json = {"part_of": ("batch", line["custom_id"]), "id": line["custom_id"]}
    if "body" in line or "params" in line:
        yield {**part, "request": line["body"] if "body" in line else line["params"]}
        return
    result = line["result"] if "result" in line else line["response"]
    if result is not None:
        result = result.get("message") or result.get("body")
    yield {**part, "response": result}


def _conversation(messages: Sequence[Json], tools: Any = None) -> Iterator[Json]:
    """One exchange for each answer of a conversation."""
    for at, message in enumerate(messages):
        if at > 0 and message["role"] == "assistant":
            yield _chat(messages[:at], message, {"tools": tools}, {})


def _share_gpt(line: Json) -> Iterator[Json]:
    return _conversation(
        [
            {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
            for turn in line["conversations"]
        ]
    )


_ASKED: Final = ("prompt", "instruction", "question")
_ANSWERED: Final = ("completion", "response", "output", "answer")


def _paired(line: Json) -> Iterator[Json]:
    prompt = next(line[name] for name in _ASKED if name in line)
    if isinstance(line.get("input"), str) and line["input"]:
        prompt = f"{prompt}\n\n{line['input']}"
    yield _exchange(prompt=prompt, output=next(line[each] for each in _ANSWERED if each in line))


def _is_pair(line: Json) -> bool:
    return all(
        any(isinstance(line.get(name), str) for name in names) for names in (_ASKED, _ANSWERED)
    )


def _traced(line: Json) -> Iterator[Json]:
    """Input and output of a call as tracing tools keep them: LangSmith, Langfuse."""
    asked, said = (line.get(name, line.get(f"{name}s")) for name in ("input", "output"))
    request = asked if isinstance(asked, dict) else {"messages": asked}
    messages = list(_messages(request.get("messages") or request["prompt"]))
    if isinstance(said, dict) and "choices" in said:
        yield {**_chat(messages, {}, request, {}), "response": said}
        return
    if isinstance(said, str):
        said = [{"content": said}]
    elif isinstance(said, dict):
        said = said.get("messages") or [said]
    yield _chat(messages, _one(_messages(said)), request, {})


def _spans(line: Json) -> Iterator[Json]:
    """Spans of OpenTelemetry: one, or those of a line that its collector writes."""
    if "resourceSpans" not in line:
        yield from _span(line)
        return
    for resource in line["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield from _span(span)


def _span(span: Json) -> Iterator[Json]:
    """The exchange of a span of the GenAI conventions, or of OpenLLMetry's; others have none."""
    named = [span, *span.get("events", ())]
    found = {
        name: value for each in named for name, value in _attributes(each.get("attributes")).items()
    }
    asked = _json(found.get("gen_ai.input.messages")) or _numbered(found, "gen_ai.prompt.")
    said = _json(found.get("gen_ai.output.messages")) or _numbered(found, "gen_ai.completion.")
    if not asked or not said:
        return
    system = _json(found.get("gen_ai.system_instructions"))
    before = [{"role": "system", "parts": system}] if system else []
    messages = list(_messages(_from_parts(each) for each in (*before, *asked)))
    answer = _one(_messages({"role": "assistant", **_from_parts(each)} for each in said))
    names = {"id": found.get("gen_ai.response.id"), "model": found.get("gen_ai.response.model")}
    tools = _json(found.get("gen_ai.tool.definitions"))
    session = found.get("gen_ai.conversation.id")
    yield {**_chat(messages, answer, {"tools": tools}, names), "session": session}


def _attributes(attributes: Any) -> Json:
    """OpenTelemetry's attributes, which its collector writes as a list, as an object."""
    if isinstance(attributes, list):
        return {each["key"]: _value(each["value"]) for each in attributes}
    return attributes or {}


def _value(value: Json) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in content.get("values", ())]
    return _attributes(content["values"]) if kind == "kvlistValue" else content


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _numbered(attributes: Json, prefix: str) -> list[Json]:
    """The messages of attributes such as gen_ai.prompt.0.role."""
    messages: dict[int, Json] = {}
    for name, value in attributes.items():
        number, _, field = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdigit() and field in ("role", "content"):
            messages.setdefault(int(number), {"role": "assistant"})[field] = value
    return [message for _, message in sorted(messages.items())]


def _from_parts(message: Json) -> Json:
    """A message with the parts of OpenTelemetry as one with the blocks of Anthropic's API."""
    blocks = []
    for part in message.get("parts", ()):
        if part["type"] == "text":
            blocks.append({"type": "text", "text": part["content"]})
        elif part["type"] == "tool_call":
            made = {"id": part.get("id"), "name": part["name"]}
            blocks.append({"type": "tool_use", **made, "input": part.get("arguments")})
        elif part["type"] == "tool_call_response":
            content = part.get("response", part.get("result"))
            text = content if isinstance(content, str) else json.dumps(content)
            blocks.append({"type": "tool_result", "tool_use_id": part.get("id"), "content": text})
    return message if "parts" not in message else {"role": message["role"], "content": blocks}


def _is_span(line: Json) -> bool:
    attributes = line.get("attributes")
    return "resourceSpans" in line or (
        isinstance(attributes, dict | list) and "gen_ai." in json.dumps(attributes)
    )


def _is_record(line: Json) -> bool:
    kinds = (("prompt", "prompt_ids"), ("output", "output_ids"))
    return all(any(name in line for name in names) for names in kinds)


def _has(*names: str) -> Callable[[Json], bool]:
    return lambda line: all(name in line for name in names)


class _Form(NamedTuple):
    applies: Callable[[Json], bool]
    exchanges: Callable[[Json], Iterable[Json]]


FORMS: Final[dict[str, _Form]] = {
    "records": _Form(_is_record, lambda line: [line]),
    "openai-batch": _Form(_has("custom_id"), _batched),
    "openai": _Form(_has("request", "response"), lambda line: [line]),
    "helicone": _Form(
        _has("request_body", "response_body"),
        lambda line: [{"request": line["request_body"], "response": line["response_body"]}],
    ),
    "litellm": _Form(_has("messages", "response"), _litellm),
    "otel": _Form(_is_span, _spans),
    "sglang": _Form(_has("event", "rid", "obj"), _sglang),
    "fine-tuning": _Form(
        lambda line: isinstance(line.get("messages"), list),
        lambda line: _conversation(list(_messages(line["messages"])), line.get("tools")),
    ),
    "sharegpt": _Form(_has("conversations"), _share_gpt),
    "pairs": _Form(_is_pair, _paired),
    "langsmith": _Form(_has("inputs", "outputs"), _traced),
    "langfuse": _Form(_has("input", "output"), _traced),
}
"""Of the forms that apply to a line the first is taken."""
