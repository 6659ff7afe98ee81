"""Predicted outputs over HTTP, in a plain ASGI application with a server's HTTP interface."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fastdraft.errors import InvalidValueError
from fastdraft.serving import ledger as ledgers
from fastdraft.serving.handover import ASKED
from fastdraft.serving.http import templates
from fastdraft.serving.http.front import Front
from fastdraft.serving.http.record import RECORD_VARIABLE
from fastdraft.serving.http.servers import COMPLETIONS, LLAMA_CPP, SGLANG, VLLM
from fastdraft.serving.ledger import Ledger
from fastdraft.serving.request_options import MOST_IDS
from fastdraft.serving.vllm.middleware import PredictionMiddleware
from inference_server import CHAT, InferenceServer, chat, content

JSON_TYPE = (b"content-type", b"application/json")
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
COUNTS = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}
"""The default ones of an `InferenceServer`."""


@dataclass
class Answer:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self):
        return json.loads(self.body)


def ask(
    app, body, *, path=CHAT, method="POST", headers=(JSON_TYPE,), root_path="", pieces=1
) -> Answer:
    """Sends a request in `pieces`, then goes away, and returns what was answered."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = max(-(-len(body) // pieces), 1)
    messages = [
        {"type": "http.request", "body": body[at : at + size], "more_body": at + size < len(body)}
        for at in range(0, max(len(body), 1), size)
    ]
    result = Answer()

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            assert result.status == 0, "answered twice"
            result.status = message["status"]
            result.headers = dict(message["headers"])
        else:
            result.parts.append(message["body"])

    scope = {
        "type": "http",
        "method": method,
        "path": root_path + path,
        "raw_path": (root_path + path).encode(),
        "root_path": root_path,
        "query_string": b"",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "state": {},
    }
    asyncio.run(app(scope, receive, send))
    if b"content-length" in result.headers:
        assert int(result.headers[b"content-length"]) == len(result.body)
    return result


def request(prediction=None, **fields) -> dict:
    return chat(**fields) if prediction is None else chat(**fields, prediction=prediction)


def refused(**fields) -> dict:
    """The error that a request gets before the server has read it."""
    server = InferenceServer()
    got = ask(PredictionMiddleware(server), request(**fields))
    error = got.json()["error"]
    assert (got.status, error["type"], error["code"]) == (400, "BadRequestError", 400)
    assert server.disconnected.is_set() and server.asked == []
    return error


def usage_of(server: InferenceServer, **fields) -> dict:
    """The usage in the answer to a request with a prediction."""
    return ask(PredictionMiddleware(server), request(content("abc"), **fields)).json()["usage"]


pytestmark = pytest.mark.usefixtures("folder")

# --- the request -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["abc", [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]]
)
@pytest.mark.parametrize("path", COMPLETIONS)
def test_prediction_becomes_token_ids(text, path: str) -> None:
    server = InferenceServer()
    body = request(content(text), temperature=0.5, vllm_xargs={"mine": 1})
    assert ask(PredictionMiddleware(server), body, path=path, pieces=3).status == 200
    assert server.bodies("/tokenize") == [
        {"model": "m", "prompt": "abc", "add_special_tokens": False}
    ]
    (sent,) = server.bodies(path)
    arguments = sent.pop("vllm_xargs")
    ticket = arguments.pop("prediction_ticket")
    assert len(ticket) == 16
    assert arguments == {"mine": 1, "prediction_token_ids": [97, 98, 99]}
    del body["prediction"], body["vllm_xargs"]
    assert sent == body


def test_token_ids_of_the_caller_are_kept_and_its_ticket_is_not() -> None:
    server = InferenceServer()
    ticket = "0123456789abcdef"
    arguments = {"prediction_token_ids": [7, 8], "prediction_ticket": ticket}
    ask(PredictionMiddleware(server), request(content("abc"), vllm_xargs=arguments))
    assert server.bodies("/tokenize") == []
    (sent,) = server.bodies(CHAT)
    assert sent["vllm_xargs"]["prediction_token_ids"] == [7, 8]
    assert sent["vllm_xargs"]["prediction_ticket"] != ticket
    assert "prediction" not in sent


# Templates of tools and schemas


def tool(name: str, *properties: str) -> dict:
    schema = {"type": "object", "properties": {each: {"type": "string"} for each in properties}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def template_of(server: InferenceServer, **fields) -> str | None:
    """The text of the templates that the server got with a request."""
    server.asked.clear()
    assert ask(PredictionMiddleware(server), request(**fields)).status == 200
    (sent,) = server.bodies(CHAT)
    ids = sent.get("vllm_xargs", {}).get("fastdraft_template_ids")
    return None if ids is None else "".join(map(chr, ids))


TOOLS = [tool("look", "room"), tool("go", "there", "by")]
LOOK = 'look({"room": "room"});'
GO = 'go({"there": "there", "by": "by"});'


@pytest.mark.parametrize(
    "fields",
    [
        # As /v1/chat/completions, /v1/responses and /v1/messages take them.
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "go"}}},
        {
            "tools": [{"type": "function", **each["function"]} for each in TOOLS],
            "tool_choice": {"type": "function", "name": "go"},
        },
        {
            "tools": [
                {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
                for each in TOOLS
            ],
            "tool_choice": {"type": "tool", "name": "go"},
        },
    ],
)
def test_a_chosen_tool_of_each_interface(fields) -> None:
    assert template_of(InferenceServer(), **fields) == GO
    for choice in ("auto", "required", {"type": "auto"}):
        assert template_of(InferenceServer(), **{**fields, "tool_choice": choice}) == LOOK + GO
    for choice in ("none", {"type": "none"}):
        assert template_of(InferenceServer(), **{**fields, "tool_choice": choice}) is None


def test_a_schema_of_each_interface() -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    chat = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for fields in (
        {"response_format": chat},
        {"text": {"format": form}},
        {"output_config": {"format": form}},
    ):
        assert template_of(InferenceServer(), **fields) == '{"age": 1}'


def test_templates_are_made_anew_for_each_caller() -> None:
    """How fast an answer comes would tell what others have sent."""
    server = InferenceServer()
    app = Front(server, VLLM)
    server.keys = (b"a", b"b")

    def asked(key: bytes, **fields) -> int:
        server.asked.clear()
        headers = (JSON_TYPE, (b"authorization", b"Bearer " + key))
        assert ask(app, request(tools=TOOLS, **fields), headers=headers).status == 200
        return len(server.bodies("/tokenize"))

    assert asked(b"a") > 0
    assert asked(b"a") == 0
    assert asked(b"b") > 0
    assert asked(b"b", cache_salt="s") > 0
    assert asked(b"b", vllm_xargs={"fastdraft_namespace": "n"}) > 0
    assert asked(b"a") == asked(b"b") == asked(b"b", cache_salt="s") == 0


def test_templates_that_are_kept_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_MOST_KEPT", 1 << 14)
    app = Front(InferenceServer(), VLLM)
    for number in range(18):
        schema = {"properties": {f"{number}{each}" * 20: {} for each in range(30)}}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert ask(app, request(response_format=form)).status == 200
        assert 0 < sum(map(len, app._templates._known.values())) <= 1 << 14
    assert len(app._templates._known) < 18


@pytest.mark.parametrize("most_calls", [9, 1])
def test_tools_become_templates_by_the_chat_template(most_calls: int) -> None:
    text = template_of(InferenceServer(most_calls=most_calls), tools=TOOLS)
    assert text == LOOK + GO


def test_calls_that_the_chat_template_does_not_write_are_written_as_most_models_do() -> None:
    text = template_of(InferenceServer(most_calls=0), tools=TOOLS[:1])
    assert text == '<tool_call>\n{"name": "look", "arguments": {"room": "room"}}\n</tool_call>\n'


def test_a_server_that_cannot_tokenize_gets_its_tools_without_templates() -> None:
    server = InferenceServer()
    server.tokenize_status = 500
    assert template_of(server, tools=TOOLS) is None


@pytest.mark.parametrize(
    "body",
    [
        request(),
        b'{ "model" : "m",  "messages": [] }',
        b'{"model": "m", "prediction": ',
        b'["prediction"]',
        b"",
        json.dumps(request(vllm_xargs={"other": 1})).encode(),
        json.dumps({**request(), "prediction": None}).encode(),
        json.dumps(request(content(""))).encode(),
        json.dumps(request(content("abc"), vllm_xargs=5)).encode(),
        *(request(tools=tools) for tools in (None, [], "look", [1])),
        *(request(response_format={"type": kind}) for kind in ("json_object", "json_schema")),
        request(tools=TOOLS, vllm_xargs={"fastdraft": "off"}),
    ],
)
def test_bodies_without_a_prediction_or_templates_stay_as_they_are(body) -> None:
    server = InferenceServer()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    expected = ask(InferenceServer(), raw)
    got = ask(PredictionMiddleware(server), raw, pieces=2)
    assert (got.status, got.headers, got.body) == (
        expected.status,
        expected.headers,
        expected.body,
    )
    assert server.asked == [(CHAT, raw)]


def test_other_paths_methods_and_encodings_pass() -> None:
    server = InferenceServer()
    app = PredictionMiddleware(server)
    raw = json.dumps(request(content("abc"))).encode()
    ask(app, raw, path="/v1/embeddings")
    for method in ("PUT", "TRACE"):
        ask(app, raw, method=method)
    packed = gzip.compress(raw)
    ask(app, packed, headers=(JSON_TYPE, (b"content-encoding", b"gzip")))
    assert [body for _, body in server.asked] == [raw, raw, raw, packed]


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_other_protocols_pass(kind: str) -> None:
    seen = []

    async def send(message) -> None:
        seen.append(message["type"])

    async def receive():
        raise AssertionError("nobody asked")

    async def app(scope, _receive, send) -> None:
        await send({"type": f"{scope['type']}.seen"})

    asyncio.run(PredictionMiddleware(app)({"type": kind}, receive, send))
    assert seen == [f"{kind}.seen"]


def test_root_path_and_authorization_go_along() -> None:
    server = InferenceServer()
    body = request(content("abc"))
    headers = (JSON_TYPE, (b"authorization", b"Bearer good"))
    assert ask(PredictionMiddleware(server), body, root_path="/api", headers=headers).status == 200
    assert [path for path, _ in server.asked] == ["/tokenize", CHAT]
    for scope in server.scopes:
        assert dict(scope["headers"])[b"authorization"] == b"Bearer good"


def test_nothing_is_read_before_the_application_asks() -> None:
    server = InferenceServer()
    server.keys = (b"good",)
    headers = (JSON_TYPE, (b"authorization", b"Bearer bad"))
    got = ask(PredictionMiddleware(server), request(content("abc")), headers=headers)
    assert (got.status, server.asked) == (401, [])


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("abc", 'prediction must be an object such as .*, got "abc"'),
        (["abc"], r'prediction must be an object .*, got \["abc"\]'),
        ({"content": "abc"}, 'prediction.type must be "content", got null'),
        ({"type": "text", "content": "abc"}, 'prediction.type must be "content", got "text"'),
        ({"type": "content"}, "prediction.content must be a string or a list .*, got null"),
        (content(5), "prediction.content must be a string or a list of text parts, got 5"),
        (content(["a"]), r'prediction.content\[0\] must be \{"type": "text".*, got "a"'),
        (
            content([{"type": "text", "text": "a"}, {"type": "image_url", "text": "x" * 99}]),
            r"prediction.content\[1\] must be .*\.\.\.$",
        ),
        (content([{"type": "text", "text": None}]), r"prediction.content\[0\] must be"),
    ],
)
def test_wrong_predictions_are_refused(prediction, message: str) -> None:
    error = refused(prediction=prediction)
    assert error["param"] == "prediction" and re.search(message, error["message"])


def test_an_application_that_reads_again_after_a_refusal_is_not_kept_waiting() -> None:
    async def app(_scope, receive, _send) -> None:
        for _ in range(3):
            assert (await receive())["type"] == "http.disconnect"

    messages = [{"type": "http.request", "body": json.dumps(request("abc")).encode()}]
    answers = []

    async def receive():
        assert messages, "the client says nothing more"
        return messages.pop()

    async def send(message) -> None:
        answers.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [JSON_TYPE]}
    asyncio.run(PredictionMiddleware(app)(scope, receive, send))
    assert answers[0]["status"] == 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fastdraft_remember": "false"}, "vllm_xargs.fastdraft_remember must be True or False"),
        ({"fastdraft_cache_salt": "a"}, "vllm_xargs.fastdraft_cache_salt is not a known option"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message: str) -> None:
    error = refused(vllm_xargs=arguments)
    assert error["param"] == "vllm_xargs" and error["message"].startswith(message)


@pytest.mark.parametrize("name", ["fastdraft_remember", "prediction_token_ids", "fastdraft_"])
def test_arguments_outside_their_field_are_refused(name: str) -> None:
    error = refused(**{name: False})
    assert (error["message"], error["param"]) == (f'"{name}" belongs in vllm_xargs', name)


def test_predictions_have_an_end() -> None:
    server = InferenceServer()
    app = PredictionMiddleware(server)
    assert ask(app, request(content("a" * MOST_IDS))).status == 200
    got = ask(app, request(content("a" * (MOST_IDS + 1))))
    assert got.status == 400
    error = got.json()["error"]
    assert error["message"] == f"prediction must be at most {MOST_IDS} tokens, got {MOST_IDS + 1}"
    assert error["param"] == "prediction"
    assert len(server.bodies(CHAT)) == 1


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"prediction": ' + DEEP + b"}",
        b'{"vllm_xargs": {"fastdraft_namespace": ' + DEEP + b"}}",
        *(b'{"tools": ' + b"[" * depth + b"]" * depth + b"}" for depth in range(880, 1000, 7)),
    ],
)
def test_deep_bodies_are_no_error_of_the_server(body: bytes) -> None:
    got = ask(PredictionMiddleware(InferenceServer()), body)
    assert got.status in (200, 400)
    if DEEP in body:
        assert got.json()["error"]["message"] == "the body is nested too deeply"


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies_are_refused_before_they_are_whole(announced: bool) -> None:
    server = InferenceServer()
    app = PredictionMiddleware(server)
    taken = 0

    async def receive():
        nonlocal taken
        taken += 1 << 20
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    result = Answer()

    async def send(message) -> None:
        result.status = message.get("status", result.status)
        result.parts.append(message.get("body", b""))

    headers = [(b"content-length", b"200000000")] if announced else []
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
    asyncio.run(app(scope, receive, send))
    assert result.status == 413
    assert result.json()["error"]["message"] == "the body must be at most 67108864 bytes"
    assert taken == (0 if announced else 65 << 20)
    assert server.asked == []


@pytest.mark.parametrize("reason", ["answered with status 404", "no tokens today"])
def test_request_goes_on_where_tokenizing_fails(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = InferenceServer()
    server.tokenize_status = 404

    async def no_tokens(scope, receive, send) -> None:
        if scope["path"] == "/tokenize" and reason == "no tokens today":
            raise RuntimeError(reason)
        await server(scope, receive, send)

    app = PredictionMiddleware(no_tokens)
    for _ in range(2):
        assert ask(app, request(content("abc"))).status == 200
    assert server.bodies(CHAT) == [request(content("abc"))] * 2
    (warning,) = caplog.messages
    assert reason in warning


def test_disconnect_in_mid_body_reaches_the_application() -> None:
    server = InferenceServer()
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive():
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message) -> None:
        raise AssertionError(f"nobody is there for {message}")

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [JSON_TYPE]}
    with pytest.raises(ConnectionError):
        asyncio.run(PredictionMiddleware(server)(scope, receive, send))
    assert server.disconnected.is_set()


# --- the answer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "choices", "accepted", "rejected"),
    [
        ((1, 2), 3, 3, 6),  # those of all choices
        ((9, 0), 1, USAGE["completion_tokens"], 0),  # no more than was said
    ],
)
def test_counts_are_reported(
    folder: Path, counts: tuple[int, int], choices: int, accepted: int, rejected: int
) -> None:
    server = InferenceServer(Ledger(folder), counts=counts)
    assert usage_of(server, n=choices)["completion_tokens_details"] == {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
    }


def test_counts_that_cannot_arrive_are_warned_of_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an engine runs on another machine: its ledger is in a folder there."""
    app = PredictionMiddleware(InferenceServer(Ledger(folder)))
    ask(app, request(content("abc")))
    assert not caplog.records
    app = PredictionMiddleware(InferenceServer())
    for _ in range(3):
        assert ask(app, request(content("abc"))).json()["usage"] == USAGE
    [record] = caplog.records
    assert "another machine" in record.getMessage()
    assert str(folder) in record.getMessage()
    monkeypatch.delenv(ledgers.FOLDER_VARIABLE)
    assert usage_of(InferenceServer()) == USAGE


def test_usage_before_the_first_token_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    server = InferenceServer()
    server.events = [event(usage={"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3})]
    ask(PredictionMiddleware(server), request(content("abc"), stream=True))
    assert not caplog.records


def test_counts_of_the_server_itself_stand(folder: Path) -> None:
    own = {"reasoning_tokens": 1, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 0}
    server = InferenceServer(Ledger(folder))
    server.usage = {**USAGE, "completion_tokens_details": own}
    assert usage_of(server)["completion_tokens_details"] == own
    thought = {"reasoning_tokens": 1}
    server.usage["completion_tokens_details"] = {**thought, "accepted_prediction_tokens": None}
    assert usage_of(server)["completion_tokens_details"] == {**thought, **COUNTS}


def test_half_a_character_is_passed_on(folder: Path) -> None:
    server = InferenceServer(Ledger(folder))
    server.usage = {**USAGE, "note": "\ud800 naïve"}
    got = ask(PredictionMiddleware(server), request(content("abc")))
    assert got.json()["usage"]["note"] == "\ud800 naïve"
    assert "naïve".encode() in got.body
    assert got.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 4


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_streams_report_in_their_usage_and_nowhere_else(folder: Path) -> None:
    server = InferenceServer(Ledger(folder))
    server.events = [
        b": keep-alive\n\n",
        event(choices=[{"delta": {"content": 'says "usage": {}'}}]),
        event(choices=[], usage=None),
        event(choices=[], usage=USAGE),
        b"data: [DONE]\n\n",
    ]
    got = ask(PredictionMiddleware(server), request(content("abc"), stream=True))
    assert len(got.parts) == len(server.events) + 1
    for index in (0, 1, 4):
        assert got.parts[index] == server.events[index]
    before, after = (json.loads(got.parts[index].removeprefix(b"data: ")) for index in (2, 3))
    assert before == {"choices": [], "usage": None}
    assert after["usage"] == {**USAGE, "completion_tokens_details": COUNTS}
    assert got.parts[3].endswith(b"}\n\n")


def test_counts_in_the_words_of_other_endpoints(folder: Path) -> None:
    usage = {"input_tokens": 3, "output_tokens": 5}
    for path, before, at in (
        ("/v1/responses", [event(type="response.created", response={"usage": None})], "response"),
        ("/v1/messages", [event(type="message_start", message={"usage": usage})], None),
    ):
        server = InferenceServer(Ledger(folder))
        last = {"type": "last", **({"usage": usage} if at is None else {at: {"usage": usage}})}
        server.events = [*before, event(**last)]
        got = ask(PredictionMiddleware(server), request(content("abc")), path=path)
        assert got.parts[0] == before[0]
        last = json.loads(got.parts[1].removeprefix(b"data: "))
        assert (last if at is None else last[at])["usage"] == {
            **usage,
            "output_tokens_details": COUNTS,
        }


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_streams_may_be_cut_anywhere(folder: Path, size: int) -> None:
    stream = event(choices=["é"]) + event(choices=[], usage=USAGE) + b"data: [DONE]\r\n\r\nend"
    server = InferenceServer(Ledger(folder))
    server.events = [stream]
    whole = ask(PredictionMiddleware(server), request(content("abc"))).body
    assert whole != stream
    server.events = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert ask(PredictionMiddleware(server), request(content("abc"))).body == whole


def test_streams_without_a_prediction_are_untouched(folder: Path) -> None:
    server = InferenceServer(Ledger(folder))
    server.events = [b"data: half", b" an event\n\n", event(usage=USAGE)]
    got = ask(PredictionMiddleware(server), request(stream=True))
    assert got.parts == [*server.events, b""]


# --- other servers -------------------------------------------------------------------------------


def test_sglang_gets_token_ids_in_its_own_field(folder: Path) -> None:
    server = InferenceServer(Ledger(folder), sglang=True)
    app = Front(server, SGLANG)
    body = request(content("abc"), tools=TOOLS[:1], custom_params={"mine": 1})
    assert ask(app, body).json()["usage"]["completion_tokens_details"] == COUNTS
    [sent] = server.bodies(CHAT)
    params = sent.pop("custom_params")
    assert len(params.pop("prediction_ticket")) == 16
    assert "".join(map(chr, params.pop("fastdraft_template_ids"))) == LOOK
    assert params == {"mine": 1, "prediction_token_ids": [97, 98, 99]}
    refused = ask(app, request(custom_params={"fastdraft_lookahead": 0}))
    assert (refused.status, refused.json()["error"]["param"]) == (400, "custom_params")


def test_a_path_that_takes_no_options_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    server = InferenceServer()
    for _ in range(2):
        assert ask(Front(server, SGLANG), request(content("abc")), path="/v1/responses").status
    assert server.bodies("/v1/responses") == [request(content("abc"))] * 2
    app = Front(server, SGLANG)
    caplog.clear()
    for _ in range(2):
        ask(app, request(content("abc")), path="/v1/responses")
    assert caplog.messages == ["SGLang takes no predictions at /v1/responses"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_drafter_in_the_process_is_handed_the_request(stream: bool) -> None:
    server = InferenceServer()
    server.events = [event(usage=USAGE)] if stream else []
    seen = []

    async def app(scope, receive, send) -> None:
        async def started(message) -> None:
            # As the drafter does in a thread that has the request's context.
            if message["type"] == "http.response.start" and (asked := ASKED.get()) is not None:
                seen.append((asked.prediction, dict(asked.params)))
                asked.counts = (3, 1)
            await send(message)

        await server(scope, receive, started)

    front = Front(app, LLAMA_CPP)
    got = ask(front, request(content("abc"), custom_params={"fastdraft_namespace": "a"}))
    assert seen == [("abc", {"fastdraft_namespace": "a"})]
    assert server.bodies(CHAT) == [request()]
    answer = json.loads(got.body.removeprefix(b"data: "))
    counts = answer["usage"]["completion_tokens_details"]
    assert counts == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
    # The next one has nothing of it.
    assert json.loads(ask(front, request()).body.removeprefix(b"data: "))["usage"] == USAGE
    assert seen[1:] == [(None, {})]


# --- the record ----------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "record.jsonl"
    monkeypatch.setenv(RECORD_VARIABLE, str(path))
    return path


def recorded(app: Front, path: Path) -> list[tuple[dict, str]]:
    assert app.record is not None
    app.record.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["request"], line["response"]) for line in lines]


def test_answered_requests_are_recorded_for_their_owner_alone(record: Path) -> None:
    before = os.umask(0)
    try:
        server = InferenceServer()
        app = PredictionMiddleware(server)
        assert record.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    thinking = [event(choices=[{"delta": {"reasoning_content": "hm"}}]), b"data: [DONE]\n\n"]
    ask(app, request(content("abc"), tools=TOOLS))
    server.events = thinking
    ask(app, request(stream=True), pieces=3)
    first, second = recorded(app, record)
    # As the client sent it and as the server answered, with the thoughts.
    assert first[0] == request(content("abc"), tools=TOOLS)
    assert json.loads(first[1])["choices"] == ["naïve"]
    assert second == (request(stream=True), b"".join(thinking).decode())


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"vllm_xargs": {"fastdraft_remember": False}}, CHAT),
        ({"vllm_xargs": {"fastdraft_remember": 0}}, CHAT),
        ({"vllm_xargs": {"fastdraft": "off"}}, CHAT),
        ({"vllm_xargs": {"fastdraft_lookahead": 0}}, CHAT),
        ({"vllm_xargs": 5}, CHAT),
        ({}, "/v1/embeddings"),
    ],
)
def test_requests_that_opted_out_are_not_recorded(fields, path: str, record: Path) -> None:
    app = PredictionMiddleware(InferenceServer())
    # An escape hides a name from a look at the bytes.
    body = json.dumps(request(**fields)).replace("fast", "\\u0066ast").encode()
    ask(app, body, path=path)
    assert recorded(app, record) == []


def test_failed_and_broken_answers_are_not_recorded(record: Path) -> None:
    async def broken(_scope, receive, send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async def packed(_scope, receive, send) -> None:
        await receive()
        headers = [(b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": gzip.compress(b"{}")})

    for server, body in ((InferenceServer(), b"{"), (broken, b"{}"), (packed, b"{}")):
        app = Front(server, VLLM)
        ask(app, body)
        assert recorded(app, record) == []


def test_a_record_that_cannot_be_written_is_an_error_at_the_start(record: Path) -> None:
    record.symlink_to("/dev/null")
    with pytest.raises(InvalidValueError, match=RECORD_VARIABLE):
        PredictionMiddleware(InferenceServer())


# --- the metrics ---------------------------------------------------------------------------------


def test_metrics_are_added_to_those_of_the_server(folder: Path) -> None:
    Ledger(folder, engine=0).publish(
        {
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 2,
            "faults": 1,
            "steps": 100,
            "seconds": 0.25,
            "requests": 3,
            "request_bytes": 4096,
            "datastore_bytes": 1 << 20,
        }
    )
    Ledger(folder, engine=1).publish({"steps": 7})
    server = InferenceServer()
    headers = ((b"accept", b"application/openmetrics-text"), (b"accept-encoding", b"gzip"))
    app = PredictionMiddleware(server)
    got = ask(app, b"", path="/metrics", method="GET", headers=headers)
    assert got.status == 200
    # In plain text, which alone can be added to.
    assert [name for name, _ in server.scopes[0]["headers"]] == [b"content-length"]
    lines = got.body.decode().splitlines()
    assert lines[0] == "vllm:num_requests_running 0.0"
    assert "# TYPE fastdraft_faults_total counter" in lines
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['fastdraft_accepted_prediction_tokens_total{engine="0"}'] == "5.0"
    assert values['fastdraft_rejected_prediction_tokens_total{engine="0"}'] == "2.0"
    assert values['fastdraft_faults_total{engine="0"}'] == "1.0"
    assert values['fastdraft_seconds_total{engine="0"}'] == "0.25"
    assert values['fastdraft_datastore_bytes{engine="0"}'] == "1048576.0"
    assert values['fastdraft_steps_total{engine="1"}'] == "7.0"
    assert values['fastdraft_requests{engine="1"}'] == "0.0"
