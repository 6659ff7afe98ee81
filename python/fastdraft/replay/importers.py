"""Logs of many forms as records.

Each form is a line of the table at the end: what tells it, and what turns it into exchanges,
`{"request": BODY, "response": BODY}` with the bodies of OpenAI's chat and completions. A
conversation gives one for each answer. Where a request and its answer are lines of their own, each
is a part of an exchange: `{"part_of": ID, ...}`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
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

    def __init__(
        self, tokenizer: TextTokenizer, *, form: str | None = None, session: str | None = None
    ) -> None:
        """`tokenizer` renders messages; `form` is one of `FORMS`, by default what tells each line;
        `session` is the path of the session's name in a line, such as request.user."""
        self._tokenizer = tokenizer
        self._forms = FORMS if form is None else {form: FORMS[form]}
        self._session = session
        self._parts: dict[Any, Json] = {}
        self._ended: dict[bytes, str] = {}
        self._failed = 0
        self._is_server_log = form in ("vllm", "sglang")

    @property
    def unanswered(self) -> int:
        return self._failed + len(self._parts)

    def __call__(self, line: JsonLine) -> list[Json]:
        """The fields of a line's records. Raises RecordError, also where its form is not known."""
        place, value = line.place, _server_line(line)
        if value is not None:
            self._is_server_log = True
        elif self._is_server_log and line.text.lstrip()[:1] != b"{":
            return []  # a server logs much else
        else:
            value = line.value
        known = (form for form in self._forms.values() if form.applies(value))
        form = next(known, None)
        if form is None:
            names = ", ".join(value) or "nothing"
            expected = " or ".join(each.title for each in self._forms.values())
            if len(self._forms) > 1:
                expected = "a known form"
            raise RecordError(f"{place}: expected {expected}, got a line with {names}")
        if form.exchanges is None:
            check_record(value, place)
            return [value]
        try:
            found = [each for part in form.exchanges(value) for each in self._joined(part)]
        except RecordError as error:
            raise RecordError(f"{place}: {error}") from error
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise RecordError(f"{place}: not what {form.title} holds: {error!r:.100}") from error
        if len(found) > 1:
            name = str(value.get("id") or place)
            found = [{"session": name, **each} for each in found]
        return [record for each in found for record in self._records(each, value, place)]

    def _joined(self, exchange: Json) -> Iterator[Json]:
        """An exchange; of one that comes in parts, when all are there."""
        part_of = exchange.pop("part_of", None)
        if part_of is None:
            yield exchange
            return
        exchange = {**self._parts.pop(part_of, {}), **exchange}
        if {"request", "response"} <= exchange.keys():
            yield from _logged(exchange)
        else:
            self._parts[part_of] = exchange

    def _records(self, exchange: Json, line: Json, place: str) -> Iterator[Json]:
        if exchange.get("response", 0) is None:
            self._failed += 1
            return
        request, response = (_body(exchange, name, place) for name in ("request", "response"))
        if response.get("error") is not None:
            self._failed += 1
            return
        choices = response.get("choices")
        if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
            raise RecordError(
                f"{place}: response.choices must be a list of objects, got {short(choices)}"
            )
        bodies = {**line, **exchange, "request": request, "response": response}
        name = response.get("id") or exchange.get("id")
        common = {"model": response.get("model"), "reference": _prediction(request, place)}
        records = [
            {
                **common,
                "id": name if name is None or len(choices) == 1 else f"{name}/{index}",
                **_choice(bodies, choice, place, self._tokenizer),
            }
            for index, choice in enumerate(choices)
        ]
        if self._session is not None:
            session: str | None = _field(bodies, self._session, place)
        else:
            session = exchange.get("session") or self._conversation(request, choices, place)
        for record in records:
            check_record(record, place)
            yield {**record, "session": session}

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


def _choice(bodies: Json, choice: Json, place: str, tokenizer: TextTokenizer) -> Json:
    """Prompt and output of one choice, as text or as ids."""
    request, places = bodies["request"], (choice, bodies["response"], bodies)
    ids = [
        next((each[name] for each in places if each.get(name) is not None), None)
        for name in ("prompt_token_ids", "token_ids")
    ]
    if None not in ids:
        return {"prompt_ids": ids[0], "output_ids": ids[1]}
    if "messages" in request:
        answer, messages = choice.get("message"), request["messages"]
        if not isinstance(answer, dict):
            raise RecordError(f"{place}: choices[].message must be an object, got {short(answer)}")
        if not isinstance(messages, list):
            raise RecordError(f"{place}: request.messages must be a list, got {short(messages)}")
        text = tokenizer.render(messages, request.get("tools"), answer, place)
        return dict(zip(("prompt", "output"), text, strict=True))
    if "prompt" not in request:
        raise RecordError(f"{place}: request.messages or request.prompt is missing")
    prompt, output = request["prompt"], choice.get("text")
    if not isinstance(output, str):
        raise RecordError(f"{place}: choices[].text must be a string, got {short(output)}")
    if not isinstance(prompt, str):
        raise RecordError(
            f"{place}: request.prompt must be a string where the response has no token ids, "
            f"got {short(prompt)}"
        )
    if request.get("echo"):
        output = output.removeprefix(prompt)
    return {"prompt": prompt, "output": output}


def _body(line: Json, name: str, place: str) -> Json:
    if name not in line:
        raise RecordError(f"{place}: {name!r} is missing; it has {', '.join(line) or 'nothing'}")
    body = line[name]
    if isinstance(body, str):
        return parse_object(body, f"{place}: {name}")
    if not isinstance(body, dict):
        raise RecordError(f"{place}: {name} must be an object, got {short(body)}")
    return body


def _prediction(request: Json, place: str) -> str | None:
    """The text of OpenAI's Predicted Outputs."""
    prediction = request.get("prediction")
    if prediction is None:
        return None
    content = prediction.get("content") if isinstance(prediction, dict) else None
    try:
        return _text(content)
    except (TypeError, KeyError) as error:
        raise RecordError(
            f"{place}: prediction.content must be a string or a list of text parts, "
            f"got {short(content)}"
        ) from error


def _field(line: Json, path: str, place: str) -> str:
    value: Any = line
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        raise RecordError(f"{place}: {path}, which names the session, is missing")
    return str(value)


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
    arguments = item.get("arguments") or json.dumps(item["input"])
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
        if isinstance(event.get("message"), dict):
            body = event["message"]  # the first one of Anthropic's
            body["content"] = []
            continue
        if "content_block" in event:
            body["content"].append(event["content_block"])
            continue
        if event.get("type") == "content_block_delta":
            block, part = body["content"][event["index"]], event["delta"]
            if "text" in part:
                block["text"] += part["text"]
            elif "partial_json" in part:
                block["arguments"] = block.get("arguments", "") + part["partial_json"]
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
    request, response = line["request"], line["response"]
    if isinstance(request, str):
        request = parse_object(request, "request")
    if isinstance(response, str) and response.lstrip().startswith(("data:", "event:")):
        response = _event_stream(response)
    elif isinstance(response, str):
        response = parse_object(response, "response")
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


def _batched(line: Json) -> Iterator[Json]:
    """A line of a batch's input or output, of OpenAI's or of Anthropic's."""
    part: Json = {"part_of": ("batch", line["custom_id"]), "id": line["custom_id"]}
    if "body" in line or "params" in line:
        yield {**part, "request": line["body"] if "body" in line else line["params"]}
        return
    result = line["result"] if "result" in line else line["response"]
    if result is not None:
        result = result.get("message") or result.get("body")
    yield {**part, "response": result}


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
    messages = [_from_parts(each) for each in (*before, *asked)]
    answer = _one(list(_messages([{"role": "assistant", **_from_parts(each)} for each in said])))
    tools = _tools(_json(found.get("gen_ai.tool.definitions")))
    names = {"id": found.get("gen_ai.response.id"), "model": found.get("gen_ai.response.model")}
    session = found.get("gen_ai.conversation.id")
    yield {**_exchange(list(_messages(messages)), answer, tools, **names), "session": session}


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


_STRING: Final = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None"""
_LIST: Final = r"\[[\d, ]*\]|None"
_VLLM: Final = (
    rf"(?:Received r|R)equest (?P<id>\S+?)(?: details)?: prompt: (?P<prompt>{_STRING}),"
    rf".*?prompt_token_ids: (?P<prompt_ids>{_LIST})",
    rf"Generated response (?P<id>\S+)(?: \(streaming complete\))?: output: (?P<output>{_STRING}),"
    rf"(?: output_token_ids: (?P<output_ids>{_LIST}),)? finish_reason",
    r"Generated response (?P<id>\S+)(?: \(streaming complete\))? details: "
    rf"output_token_ids: (?P<output_ids>{_LIST})",
    r"(?P<id>)(?:Received request|Request|Generated response) \S+",
)
_SGLANG: Final = (
    rf"Finish: obj=\w+\(.*?\btext=(?P<prompt>{_STRING}),(?:.*?\binput_ids=(?P<prompt_ids>{_LIST}))?"
    rf".*?\bout=\{{.*?'text': (?P<output>{_STRING})(?:.*?'output_ids': (?P<output_ids>{_LIST}))?",
    r"(?:Receive|Finish): obj=",
)


def _server_line(line: JsonLine) -> Json | None:
    """What a line of the text that a server logs says of a request; None for all other lines.

    Raises RecordError.
    """
    if line.text.lstrip()[:1] == b"{" or not re.search(rb"equest |Generated |: obj=", line.text):
        return None
    text = line.text.decode("utf-8", "replace")
    for name, patterns in (("vllm", _VLLM), ("sglang", _SGLANG)):
        for pattern in patterns:
            if found := re.search(pattern, text):
                parts = {key: each for key, each in found.groupdict().items() if each is not None}
                try:
                    return {
                        name: {
                            key: each if key == "id" else ast.literal_eval(each)
                            for key, each in parts.items()
                        }
                    }
                except (SyntaxError, ValueError) as error:
                    raise RecordError(f"{line.place}: not what {name} logs: {error}") from error
    return None


def _vllm(line: Json) -> Iterator[Json]:
    found = line["vllm"]
    if not found["id"]:
        return  # says nothing of what was asked or answered
    # The prompts of a request for completions are numbered.
    part: Json = {"part_of": ("vllm", re.sub(r"^(cmpl-.*)-0$", r"\1", found["id"]))}
    if "prompt" in found:
        yield {
            **part,
            "request": {"prompt": found["prompt"]},
            "prompt_token_ids": found.get("prompt_ids"),
        }
    else:
        ids = {"token_ids": found["output_ids"]} if found.get("output_ids") else {}
        answer = {"response": {"choices": [{"text": found["output"]}]}} if "output" in found else {}
        yield {**part, **ids, **answer}


def _sglang(line: Json) -> Iterator[Json]:
    """Finished requests, as text or as JSON; those received are logged again when they finish."""
    if "sglang" in line:
        found = line["sglang"]
    elif line["event"] == "request.finished":
        found = {
            "prompt": line["obj"].get("text"),
            "prompt_ids": line["obj"].get("input_ids"),
            "output": line["out"].get("text"),
            "output_ids": line["out"].get("output_ids"),
        }
    else:
        return
    if not found:
        return
    ids = {"prompt_token_ids": found.get("prompt_ids"), "token_ids": found.get("output_ids")}
    response = {"choices": [{"text": found["output"], **ids}]}
    yield {"request": {"prompt": found["prompt"]}, "response": response}


def _is_pair(line: Json) -> bool:
    asked = any(isinstance(line.get(name), str) for name in ("prompt", "instruction", "question"))
    names = ("completion", "response", "output", "answer")
    return asked and any(isinstance(line.get(name), str) for name in names)


def _has(*names: str) -> Callable[[Json], bool]:
    return lambda line: all(name in line for name in names)


class Form(NamedTuple):
    """A form of lines.

    Attributes:
        title: Its name for people.
        applies: Whether a line has it.
        exchanges: The exchanges of a line, or their parts; None where a line is a record.
    """

    title: str
    applies: Callable[[Json], bool]
    exchanges: Callable[[Json], Iterator[Json]] | None


def _is_record(line: Json) -> bool:
    kinds = (("prompt", "prompt_ids"), ("output", "output_ids"))
    return all(any(name in line for name in names) for names in kinds)


def _is_span(line: Json) -> bool:
    attributes = line.get("attributes")
    return "resourceSpans" in line or (
        isinstance(attributes, dict | list) and "gen_ai." in json.dumps(attributes)
    )


FORMS: Final = {
    "records": Form("a record", _is_record, None),
    "openai-batch": Form("a line of a batch file", _has("custom_id"), _batched),
    "openai": Form("a request with its response", _has("request", "response"), _logged),
    "helicone": Form(
        "a line of Helicone's",
        _has("request_body", "response_body"),
        lambda line: _logged(
            {**line, "request": line["request_body"], "response": line["response_body"]}
        ),
    ),
    "litellm": Form("a line of LiteLLM's", _has("messages", "response"), _litellm),
    "otel": Form("a span of OpenTelemetry", _is_span, _spans),
    "vllm": Form("a line of vLLM's log", _has("vllm"), _vllm),
    "sglang": Form(
        "a line of SGLang's log",
        lambda line: "sglang" in line or {"event", "rid", "obj"} <= line.keys(),
        _sglang,
    ),
    "fine-tuning": Form(
        "a line of a fine-tuning file",
        lambda line: isinstance(line.get("messages"), list),
        lambda line: _turns(list(_messages(line["messages"])), _tools(line.get("tools"))),
    ),
    "sharegpt": Form("a line of ShareGPT's", _has("conversations"), _share_gpt),
    "pairs": Form("a pair of a prompt and an answer", _is_pair, _paired),
    "langsmith": Form("a line of LangSmith's", _has("inputs", "outputs"), _traced),
    "langfuse": Form("a line of Langfuse's", _has("input", "output"), _traced),
}
"""By the name that `--format` takes. Of those that apply to a line the first is taken."""
