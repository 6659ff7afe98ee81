"""The proxy before llama-cpp-python's own server, whose model drafts with fastdraft."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from llama_cpp.server import app as llama_server
from llama_cpp.server.settings import ModelSettings, ServerSettings

from fastdraft import DraftConfig
from fastdraft.serving.http.proxy import create
from fastdraft.serving.llama_cpp import FastdraftDraftModel
from http_serving import running
from llama_models import tiny_model

# The model goes through its cycles of characters.
PROMPT = "%&'()*+,%&'()"


@dataclass
class Server:
    """The proxy's client, and the drafts of the server behind it."""

    client: openai.OpenAI
    draft_model: FastdraftDraftModel
    plain: str

    def ask(self, **options: Any) -> Any:
        return ask(self.client, **options)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"max_tokens": 40, "temperature": 0.0, **options}
    return client.completions.create(model="any", prompt=PROMPT, **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tiny_model(tmp_path_factory.mktemp("model"))
    model = ModelSettings(model=str(path), n_ctx=512, n_threads=1, verbose=False)
    app = llama_server.create_app(
        server_settings=ServerSettings(disable_ping_events=True), model_settings=[model]
    )
    with running(app) as backend, running(create(backend)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        plain = ask(client).choices[0].text
        # As an application would that starts this server in its own process.
        draft_model = FastdraftDraftModel(
            llama_server._llama_proxy(), drafter=DraftConfig.prompt_lookup(max_ngram=3)
        )
        yield Server(client, draft_model, plain)
        draft_model.close()


def test_drafts_work_behind_the_server(server: Server) -> None:
    before = server.draft_model.stats
    assert server.ask().choices[0].text == server.plain
    after = server.draft_model.stats
    assert after.drafted > before.drafted
    assert after.emitted > before.emitted


def test_streams_pass(server: Server) -> None:
    chunks = [chunk.choices[0].text for chunk in server.ask(stream=True)]
    assert "".join(chunks) == server.plain
    assert len(chunks) > 5


def test_a_prediction_changes_nothing(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    expected = {"type": "content", "content": server.plain}
    with caplog.at_level(logging.WARNING, logger="fastdraft"):
        for _ in range(2):
            answer = server.ask(extra_body={"prediction": expected})
            assert answer.choices[0].text == server.plain
            assert answer.usage.completion_tokens_details is None
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        "llama-cpp-python's server's /v1/completions passes nothing of a request on to a drafter, "
        "so predictions have no effect"
    ]


def test_errors_are_the_proxys_and_the_servers_own(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        server.ask(extra_body={"prediction": "text"})
    assert raised.value.param == "prediction"
    with pytest.raises(openai.APIStatusError):
        server.ask(temperature="hot")
    assert [model.owned_by for model in server.client.models.list()] == ["me"]
