"""llama-cpp-python's own server with drafts; OpenAI's client before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from llama_cpp.server import app as llama_server
from llama_cpp.server.settings import ModelSettings, ServerSettings

from fastdraft.serving.http.record import RECORD_VARIABLE
from fastdraft.serving.llama_cpp_server import create_app
from http_serving import running
from llama_models import tiny_model

# The model goes through its cycles of characters.
PROMPT = "%&'()*+,%&'()"


@dataclass
class Server:
    client: openai.OpenAI
    record: Path
    plain: str

    def ask(self, **options: Any) -> Any:
        return ask(self.client, **options)

    @property
    def draft_model(self) -> Any:
        return llama_server._llama_proxy().draft_model


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"max_tokens": 40, "temperature": 0.0, **options}
    return client.completions.create(model="any", prompt=PROMPT, **options)


def served(path: Path, make: Any) -> Any:
    model = ModelSettings(model=str(path), n_ctx=512, n_threads=1, verbose=False)
    settings = ServerSettings(disable_ping_events=True)
    return running(make(server_settings=settings, model_settings=[model]))


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    path = tiny_model(folder)
    with served(path, llama_server.create_app) as url:
        plain = ask(client_of(url)).choices[0].text
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECORD_VARIABLE, str(folder / "record.jsonl"))
        with served(path, create_app) as url:
            yield Server(client_of(url), folder / "record.jsonl", plain)


def test_it_says_what_it_would_have_said(server: Server) -> None:
    emitted = server.draft_model.stats.emitted
    for _ in range(3):
        assert server.ask().choices[0].text == server.plain
    assert server.draft_model.stats.emitted > emitted
    assert server.draft_model.memory.bytes


def test_streams_pass(server: Server) -> None:
    chunks = [chunk.choices[0].text for chunk in server.ask(stream=True)]
    assert "".join(chunks) == server.plain
    assert len(chunks) > 5


def test_a_prediction_reaches_the_drafter_and_is_counted(server: Server) -> None:
    expected = {"type": "content", "content": server.plain}
    apart = {"fastdraft_remember": False}
    answer = server.ask(extra_body={"prediction": expected, "custom_params": apart})
    assert answer.choices[0].text == server.plain
    counts = answer.usage.completion_tokens_details
    stats = server.draft_model.latest_stats
    assert counts.accepted_prediction_tokens == stats.accepted_prediction_tokens
    assert counts.rejected_prediction_tokens == stats.rejected_prediction_tokens
    # One without a prediction has no counts.
    assert server.ask().usage.completion_tokens_details is None


def test_chats_too(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=8,
        temperature=0.0,
        prediction={"type": "content", "content": server.plain},
    )
    assert answer.usage.completion_tokens_details is not None


def test_errors_are_of_openais_form(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        server.ask(extra_body={"prediction": "text"})
    assert raised.value.param == "prediction"
    with pytest.raises(openai.BadRequestError, match="fastdraft_lookahed"):
        server.ask(extra_body={"custom_params": {"fastdraft_lookahed": 1}})
    with pytest.raises(openai.APIStatusError):
        server.ask(temperature="hot")


def test_what_did_not_opt_out_is_recorded(server: Server) -> None:
    marks = ["recorded", "kept apart"]
    for mark, params in zip(marks, ({}, {"fastdraft_remember": False}), strict=True):
        server.ask(user=mark, extra_body={"custom_params": params})
    server.ask(user="last")
    found: list[Any] = []
    while "last" not in found:
        lines = server.record.read_text().splitlines()
        found = [json.loads(line)["request"].get("user") for line in lines]
    assert marks[0] in found and marks[1] not in found
    assert server.record.stat().st_mode & 0o777 == 0o600
