"""Logs of servers as records.

Each form of a line is an entry of the table at the end: what tells it, and what turns it into an
exchange, `{"request": BODY, "response": BODY}` with the bodies of OpenAI's interfaces. Where a
request and its answer are lines of their own, each is a part: `{"part_of": ID, ...}`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from fastdraft.replay.records import JsonLine, RecordError, check_record, parse_object, short
from fastdraft.replay.tokenizer import TextTokenizer

__all__ = ["FORMS", "Importer"]

Json = dict[str, Any]


class Importer:
    """Turns the lines of logs into the fields of records, for `read_families`.

    Attributes:
        unanswered: The requests so far that have no answer, or an error for one.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """`tokenizer` renders messages."""
        self._tokenizer = tokenizer
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
        if exchange is None:
            if self._is_server_log and line.text.lstrip()[:1] != b"{":
                return []  # a server logs much else
            value = line.value
            if _is_record(value):
                return [value]
            form = next((form for applies, form in FORMS.values() if applies(value)), None)
            if form is None:
                names = ", ".join(value) or "nothing"
                raise RecordError(f"expected a known form, got a line with {names}")
            exchange = form(value)
        else:
            self._is_server_log = True
        if "part_of" in exchange:
            part_of = exchange.pop("part_of")
            exchange = self._parts.pop(part_of, {}) | exchange
            if not {"request", "response"} <= exchange.keys():
                self._parts[part_of] = exchange
                return []
        return [] if not exchange else self._answers(exchange, line.place)

    def _answers(self, exchange: Json, place: str) -> list[Json]:
        """A record of each answer to a request."""
        request = _body(exchange, "request")
        response = {"error": "none"}
        if exchange["response"] is not None:
            response = _body(exchange, "response")
        if response.get("error") is not None:
            self._failed += 1
            return []
        if "choices" not in response and isinstance(response.get("output"), list):
            request, response = _as_chat(request, response)
        choices = response.get("choices")
        if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
            raise RecordError(f"response.choices must be a list of objects, got {short(choices)}")
        exchange = {**exchange, "request": request, "response": response}
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


def _as_chat(request: Json, response: Json) -> tuple[Json, Json]:
    """An exchange of /v1/responses as one of /v1/chat/completions."""
    system = request.get("instructions")
    messages = [{"role": "system", "content": system}] if system else []
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in request.get("tools") or ()
    ]
    parts = list(_messages(response["output"]))
    answer: Json = {"role": "assistant", "content": "".join(each["content"] for each in parts)}
    calls = [call for each in parts for call in each.get("tool_calls", ())]
    if calls:
        answer["tool_calls"] = calls
    chat = {**request, "messages": [*messages, *_messages(request["input"])]}
    return {**chat, "tools": tools or None}, {**response, "choices": [{"message": answer}]}


def _messages(items: Any) -> Iterator[Json]:
    """The items of /v1/responses as messages of chats."""
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type")
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"type": "function", "id": item["call_id"], "function": function}
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
        elif kind != "reasoning":
            yield {"role": item["role"], "content": _text(item["content"])}


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


def _sglang(line: Json) -> Json:
    """SGLang's log as JSON. Requests that it received are logged again when they finish."""
    if line["event"] != "request.finished":
        return {}
    asked, said = line["obj"], line["out"]
    return _exchange(
        prompt=asked.get("text"),
        prompt_ids=asked.get("input_ids"),
        output=said.get("text"),
        output_ids=said.get("output_ids"),
    )


def _litellm(line: Json) -> Json:
    tools = (line.get("model_parameters") or {}).get("tools")
    return {**line, "request": {"messages": line["messages"], "tools": tools}}


def _batched(line: Json) -> Json:
    """A line of the input or of the output of a batch."""
    part: Json = {"part_of": ("batch", line["custom_id"]), "id": line["custom_id"]}
    if "body" in line:
        return {**part, "request": line["body"]}
    response = line["response"]
    return {**part, "response": None if response is None else response["body"]}


def _is_record(line: Json) -> bool:
    kinds = (("prompt", "prompt_ids"), ("output", "output_ids"))
    return all(any(name in line for name in names) for names in kinds)


def _has(*names: str) -> Callable[[Json], bool]:
    return lambda line: all(name in line for name in names)


FORMS: Final[dict[str, tuple[Callable[[Json], bool], Callable[[Json], Json]]]] = {
    "openai-batch": (_has("custom_id"), _batched),
    "openai": (_has("request", "response"), lambda line: line),
    "litellm": (_has("messages", "response"), _litellm),
    "sglang": (_has("event", "rid", "obj"), _sglang),
}
"""Of the forms that apply to a line the first is taken."""
