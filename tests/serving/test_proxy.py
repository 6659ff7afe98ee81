"""The proxy before a real HTTP server, which is a small ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from fastdraft.cli.app import app as commands
from fastdraft.errors import InvalidValueError
from fastdraft.serving.http.proxy import create
from fastdraft.serving.http.servers import SERVERS
from http_serving import running
from inference_server import CHAT, InferenceServer, chat, content

SECONDS = 20
"""The longest that something may take that should happen at once."""


@contextlib.contextmanager
def proxied(backend: InferenceServer, **options: Any) -> Iterator[httpx.Client]:
    """A client of the proxy before a backend."""
    with running(backend) as url, running(create(url, **options)) as own:
        with httpx.Client(base_url=own, timeout=SECONDS) as client:
            yield client
        backend.go_on.set()


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


# --- what each server gets ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "field"),
    [("vllm", "vllm_xargs"), ("vllm-frontend-rs", "vllm_xargs"), ("sglang", "custom_params")],
)
def test_each_server_gets_token_ids_in_its_own_field(owner: str, field: str) -> None:
    backend = InferenceServer(owner=owner)
    with proxied(backend) as client:
        for _ in range(2):
            body = chat(prediction=content("abc"), tools=TOOLS, **{field: {"mine": 1}})
            assert client.post(CHAT, json=body).json()["choices"] == ["naïve"]
        refused = client.post(CHAT, json=chat(**{field: {"fastdraft_lookahead": 0}}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    sent = backend.bodies(CHAT)
    for each in sent:
        assert "look(" in "".join(map(chr, each[field].pop("fastdraft_template_ids")))
    parameters = {"mine": 1, "prediction_token_ids": [97, 98, 99]}
    assert sent == [chat(tools=TOOLS, **{field: parameters})] * 2
    assert [path for path, _ in backend.asked].count("/v1/models") == 1


@pytest.mark.parametrize(
    ("owner", "warned"),
    [
        ("llamacpp", "predictions have no effect"),
        ("me", "predictions have no effect"),
        ("somebody", "somebody"),
    ],
)
def test_other_servers_get_the_request_as_it_is(
    owner: str, warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = InferenceServer(owner=owner)
    body = chat(prediction=content("abc"), tools=TOOLS)
    with proxied(backend) as client:
        for _ in range(3):
            assert client.post(CHAT, json=body).status_code == 200
    assert backend.bodies(CHAT) == [body] * 3
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warned in warning.getMessage()
    assert [path for path, _ in backend.asked].count("/v1/models") == 1


def test_a_server_without_models_is_asked_once_and_one_that_refuses_again() -> None:
    for status, times in ((404, 1), (405, 1), (401, 3), (500, 3)):
        backend = InferenceServer()
        backend.models_status = status
        with proxied(backend) as client:
            for _ in range(3):
                body = chat(prediction=content("abc"))
                assert client.post(CHAT, json=body).status_code == 200
        assert [path for path, _ in backend.asked].count("/v1/models") == times


def test_each_key_has_a_namespace_only_where_the_server_is_known() -> None:
    for owner, status in (("vllm", 200), ("somebody", 400), ("llamacpp", 400), ("sglang", 200)):
        backend = InferenceServer(owner=owner)
        with proxied(backend, namespace_by_key=True) as client:
            headers = {"Authorization": "Bearer k"}
            assert client.post(CHAT, json=chat(), headers=headers).status_code == status
            closed = client.post("/v1/responses", json=chat(), headers=headers)
            assert closed.status_code == (200 if owner == "vllm" else 400)
        sent = json.dumps(backend.bodies(CHAT))
        assert sent.count('"fastdraft_namespace": "key-') == (status == 200)


def test_a_server_may_be_named() -> None:
    backend = InferenceServer(owner="somebody")
    with proxied(backend, server=SERVERS["sglang"]) as client:
        client.post(CHAT, json=chat(prediction=content("abc")))
    [sent] = backend.bodies(CHAT)
    assert sent["custom_params"] == {"prediction_token_ids": [97, 98, 99]}
    assert backend.bodies("/tokenize")
    assert "/v1/models" not in [path for path, _ in backend.asked]


@pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp", "somebody"])
def test_invalid_predictions_are_refused_before_any_server(owner: str) -> None:
    backend = InferenceServer(owner=owner)
    with proxied(backend) as client:
        refused = client.post(CHAT, json=chat(prediction={"type": "content", "content": 5}))
        assert client.post(CHAT, json=chat()).status_code == 200
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("prediction", 400)
    assert "must be" in error["message"]
    assert backend.bodies(CHAT) == [chat()]


# --- what passes ----------------------------------------------------------------------------------


def test_paths_queries_headers_and_errors_pass() -> None:
    backend = InferenceServer()
    with proxied(backend) as client:
        headers = {
            "Authorization": "Bearer k",
            "X-Own": "1",
            "Connection": "keep-alive, X-Drop",
            "X-Drop": "1",
            "X-Forwarded-For": "10.0.0.1",
        }
        got = client.get("/a%2Fb/c?x=%20y&z", headers=headers)
        assert got.status_code == 404
        assert got.json()["error"]["message"] == "no such path"
        assert got.headers.get_list("set-cookie") == ["a=1", "b=2"]
        assert client.get("/none").status_code == 204
        head = client.head("/a")
        assert (head.status_code, head.content) == (404, b"")
        assert int(head.headers["content-length"]) > 0
    first = backend.scopes[0]
    assert (first["raw_path"], first["query_string"]) == (b"/a%2Fb/c", b"x=%20y&z")
    sent = dict(first["headers"])
    assert sent[b"authorization"] == b"Bearer k"
    assert sent[b"x-own"] == b"1"
    assert b"x-drop" not in sent
    assert sent[b"x-forwarded-for"] == b"10.0.0.1, 127.0.0.1"
    assert [scope["method"] for scope in backend.scopes] == ["GET", "GET", "HEAD"]


def test_a_prefix_of_the_servers_url_stays() -> None:
    backend = InferenceServer()
    with running(backend) as url, running(create(f"{url}/deep/")) as own:
        httpx.get(f"{own}/v1/x?y=1")
    [scope] = backend.scopes
    assert (scope["path"], scope["query_string"]) == ("/deep/v1/x", b"y=1")


@contextlib.contextmanager
def answering(data: bytes) -> Iterator[str]:
    """A server that sends the same bytes for each request on a connection, whatever they are."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while received := self.request.recv(1 << 16):
                if b"\r\n\r\n" in received:
                    self.request.sendall(data)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nSECRET", b"SECRET"])
def test_an_answer_too_many_reaches_nobody(more: bytes) -> None:
    first = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmine"
    with answering(first + more) as url, running(create(url)) as own:
        for _ in range(4):
            assert httpx.get(own).text == "mine"


@pytest.mark.parametrize(
    "path",
    ["/../../etc", "/v1/../../etc", "/%2e%2E/etc", "/a/..%2fetc", "/a%5c..%5Cetc", "/..", "*", "x"],
)
def test_paths_stay_within_the_servers_url(path: str) -> None:
    backend = InferenceServer()
    with running(backend) as url, running(create(f"{url}/base/tenant1")) as own:
        host = own.removeprefix("http://")
        with socket.create_connection(host.split(":")) as connection:
            text = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            connection.sendall(text.encode())
            answered = connection.makefile("rb").read()
        assert answered.startswith(b"HTTP/1.1 400 ")
        assert httpx.get(f"{own}/a/...b/..c").status_code == 404
    assert [scope["path"] for scope in backend.scopes] == ["/base/tenant1/a/...b/..c"]


def test_headers_of_several_lines() -> None:
    backend = InferenceServer()
    with proxied(backend) as client:
        headers = [
            ("X-Forwarded-For", "6.6.6.6"),
            ("Connection", "keep-alive"),
            ("X-Forwarded-For", "10.0.0.1, 10.0.0.2"),
            ("Connection", "X-Drop, close"),
            ("X-Drop", "1"),
            ("X-Drop", "2"),
            ("X-Keep", "1"),
            ("X-Keep", "2"),
        ]
        client.get("/none", headers=headers)
    [scope] = backend.scopes
    sent = scope["headers"]
    [forwarded] = [value for name, value in sent if name == b"x-forwarded-for"]
    assert forwarded == b"6.6.6.6, 10.0.0.1, 10.0.0.2, 127.0.0.1"
    assert [value for name, value in sent if name == b"x-keep"] == [b"1", b"2"]
    assert b"x-drop" not in dict(sent)
    # The server's connection ends, whatever the client's does.
    assert [value for name, value in sent if name == b"connection"] == [b"close"]


def test_many_requests_at_once() -> None:
    backend = InferenceServer()

    async def ask(url: str) -> list[int]:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            answers = await asyncio.gather(
                *(
                    client.post(CHAT, json=chat(prediction=content(f"text {number}")))
                    for number in range(40)
                )
            )
        return [answer.status_code for answer in answers]

    with running(backend) as url, running(create(url)) as own:
        assert asyncio.run(ask(own)) == [200] * 40
    texts = [
        "".join(map(chr, body["vllm_xargs"]["prediction_token_ids"]))
        for body in backend.bodies(CHAT)
    ]
    assert sorted(texts) == sorted(f"text {number}" for number in range(40))


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_pass_in_parts(chunked: bool) -> None:
    data = bytes(range(256)) * (1 << 17)  # 32 MiB

    def parts() -> Iterator[bytes]:
        for at in range(0, len(data), 1 << 20):
            yield data[at : at + (1 << 20)]

    backend = InferenceServer()
    with proxied(backend) as client:
        got = client.post("/upload", content=parts() if chunked else data).json()
    assert got["digest"] == hashlib.sha256(data).hexdigest()
    assert got["parts"] > 10
    size = dict(backend.scopes[0]["headers"]).get(b"content-length")
    assert size == (None if chunked else str(len(data)).encode())


# --- streams and disconnects ----------------------------------------------------------------------


def test_events_arrive_as_they_are_written() -> None:
    backend = InferenceServer()
    body = chat(stream=True, prediction=content("abc"))
    with proxied(backend) as client, client.stream("POST", CHAT, json=body) as stream:
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = stream.iter_lines()
        # The second one is not written before this one was read.
        assert next(events) == "data: 0"
        backend.go_on.set()
        assert [line for line in events if line] == [f"data: {number}" for number in range(1, 5)]


@pytest.mark.parametrize("when", ["before the answer", "in the answer"])
def test_a_client_that_goes_away_ends_the_request_at_the_server(when: str) -> None:
    backend = InferenceServer()
    with proxied(backend) as client:
        if when == "in the answer":
            with client.stream("POST", CHAT, json=chat(stream=True)) as stream:
                assert next(stream.iter_lines()) == "data: 0"
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.get("/silence", timeout=0.3)
        assert backend.disconnected.wait(SECONDS)
        assert client.post(CHAT, json=chat()).status_code == 200


def test_a_client_that_goes_away_in_mid_body() -> None:
    backend = InferenceServer()
    with proxied(backend) as client:
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address) as connection:
            connection.sendall(
                b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
                + b"a" * 1000
            )
        # The server hears of it, if it had heard of the request at all.
        if backend.scopes:
            assert backend.disconnected.wait(SECONDS)
        assert client.post(CHAT, json=chat()).status_code == 200


# --- what fails -----------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_an_error_502() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with running(create(url)) as own:
        for body in (chat(), chat(prediction=content("abc"))):
            got = httpx.post(own + CHAT, json=body)
            assert got.status_code == 502
            assert got.json()["error"]["type"] == "APIConnectionError"


def test_a_server_that_is_silent_is_an_error_504(caplog: pytest.LogCaptureFixture) -> None:
    backend = InferenceServer()
    with proxied(backend, silence=0.2) as client:
        got = client.get("/silence?api_key=SECRET")
        assert backend.disconnected.wait(SECONDS)
    assert got.status_code == 504
    assert got.json()["error"]["message"] == "The inference server did not answer in time."
    assert "GET /silence failed: ReadTimeout" in caplog.text
    assert "SECRET" not in caplog.text


def test_an_answer_that_breaks_off_does_not_look_complete() -> None:
    with proxied(InferenceServer()) as client:
        with pytest.raises(httpx.RemoteProtocolError), client.stream("GET", "/cut") as stream:
            assert b"".join(stream.iter_raw()) == b"data: 1\n\n"
        assert client.post(CHAT, json=chat()).status_code == 200


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("localhost:8000", "must be such as http://localhost:8000"),
        ("ftp://localhost", "must be such as"),
        ("http://", "must be such as"),
        ("http://x:port", "invalid"),
        ("http://x:99999", "must be such as"),
        ("http://localhost:8000/v1", "without /v1"),
        ("http://localhost:8000/v1/", "without /v1"),
        ("http://localhost:8000?x=1", "end with its path"),
    ],
)
def test_bad_urls(url: str, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=f"{reason}.*got {re.escape(repr(url))}"):
        create(url)


# --- the command ----------------------------------------------------------------------------------


@contextlib.contextmanager
def commanded(url: str, *before: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`fastdraft proxy` before a server: its process, and its URL."""
    code = ";".join([*before, "from fastdraft.cli import main", "main()"])
    command = [sys.executable, "-c", code, "proxy", "--backend", url, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"running on (\S+)", line):
                break
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def accepts(url: str) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection(url.removeprefix("http://").split(":")).close()
    except (ConnectionRefusedError, ConnectionResetError):  # the latter while it is closing
        return False
    return True


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal_ends_it(sent: signal.Signals) -> None:
    """In the middle of a stream, too; it needs no torch."""
    backend = InferenceServer()
    without_torch = "import sys; sys.modules['torch'] = None"
    with running(backend) as url, commanded(url, without_torch) as (process, own):
        body = chat(prediction=content("abc"))
        assert httpx.post(own + CHAT, json=body, timeout=SECONDS).status_code == 200
        assert backend.bodies(CHAT)[0]["vllm_xargs"] == {"prediction_token_ids": [97, 98, 99]}
        with (
            httpx.Client(timeout=SECONDS) as client,
            client.stream("POST", own + CHAT, json=chat(stream=True)) as stream,
        ):
            events = stream.iter_lines()
            assert next(events) == "data: 0"
            process.send_signal(sent)
            if sent == signal.SIGINT:
                # The server never goes on.
                assert process.wait(SECONDS) in (0, -sent)
                with pytest.raises(httpx.RemoteProtocolError):
                    list(events)
            else:
                while accepts(own):
                    pass
                assert process.poll() is None
                backend.go_on.set()
                assert list(events)[-2:] == ["data: 4", ""]
                assert process.wait(SECONDS) in (0, -sent)
        backend.go_on.set()


def test_a_client_that_keeps_the_proxy_waiting_is_left() -> None:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"
    backend = InferenceServer()
    soon = "import fastdraft.serving.http.proxy as p", "p.IDLE_SECONDS = 2"
    with (
        running(backend) as url,
        commanded(url, *soon) as (_, own),
        httpx.stream("POST", own + CHAT, json=chat(stream=True), timeout=SECONDS) as stream,
        contextlib.ExitStack() as stack,
    ):
        events = stream.iter_lines()
        assert next(events) == "data: 0"
        clients = []
        for said in (b"", b"GET / HTTP/1.1\r\nHost", head % b"/upload", head % CHAT.encode()):
            waiting = socket.create_connection(own.removeprefix("http://").split(":"))
            clients.append(stack.enter_context(waiting))
            waiting.settimeout(SECONDS)
            waiting.sendall(said)
        for waiting in clients:
            with contextlib.suppress(ConnectionResetError):
                assert waiting.recv(1) == b""
        # It is the server that others wait for.
        backend.go_on.set()
        assert list(events)[-2:] == ["data: 4", ""]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "Missing option '--backend'"),
        (["--backend", "localhost"], "must be such as http://localhost:8000, got 'localhost'"),
        (["--backend", "http://localhost", "--server", "other"], "'other' is not one of"),
        (["--backend", "http://localhost", "--timeout", "0"], "0"),
    ],
)
def test_wrong_arguments_of_the_command(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(commands, ["proxy", *arguments])
    assert result.exit_code != 0
    assert reason in result.output
