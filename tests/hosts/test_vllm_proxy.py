"""The proxy before a real vLLM server that takes no predictions; OpenAI's client before it.

FASTDRAFT_DEMO_MODEL names the folder of the demo model. FASTDRAFT_VLLM_RUST names the program of
vLLM's frontend in Rust, which wheels for CPUs leave out.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from fastdraft.serving.http.proxy import create
from forks import Forks
from http_serving import running
from vllm_server import KEY, MODEL, Server, serving

APART = {"vllm_xargs": {"fastdraft_remember": 0}}
MESSAGES = [{"role": "user", "content": "Write a few sentences about two ships."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


RUST = os.environ.get("FASTDRAFT_VLLM_RUST")
IN_RUST = pytest.param(
    RUST, id="rust", marks=pytest.mark.skipif(RUST is None, reason="FASTDRAFT_VLLM_RUST is not set")
)


@pytest.fixture(scope="module", params=[pytest.param(None, id="python"), IN_RUST])
def server(
    request: pytest.FixtureRequest,
    vllm_forks: Forks,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """The proxy. The folder of the ledger is shared, as an operator would."""
    folder = tmp_path_factory.mktemp("ledger")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTDRAFT_VLLM_LEDGER", str(folder))
        settings = {"token_cost": 0.01}
        frontend = None if request.param is None else Path(request.param).resolve()
        with (
            serving(
                vllm_forks,
                os.environ["FASTDRAFT_DEMO_MODEL"],
                tmp_path_factory.mktemp("drafting"),
                settings,
                front=False,
                ledger=folder,
                frontend=frontend,
            ) as vllm,
            running(create(vllm.url)) as url,
        ):
            yield dataclasses.replace(vllm, url=url)


@pytest.fixture(scope="module")
def plain(server: Server) -> str:
    return ask(server).choices[0].message.content


def ask(server: Server, **options):
    options = {"max_tokens": 48, "temperature": 0.0, "extra_body": APART, **options}
    return server.client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)


def prediction(text: str) -> dict[str, str]:
    return {"type": "content", "content": text}


def test_prediction_is_accepted_and_counted(server: Server, plain: str) -> None:
    answer = ask(server, prediction=prediction(plain))
    assert answer.choices[0].message.content == plain
    counts = answer.usage.completion_tokens_details
    assert 10 < counts.accepted_prediction_tokens <= answer.usage.completion_tokens
    metrics = server.metrics()
    assert metrics["fastdraft_accepted_prediction_tokens_total"] > 10
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 10


def test_streams(server: Server, plain: str) -> None:
    text, usage = "", None
    for chunk in ask(
        server,
        stream=True,
        stream_options={"include_usage": True},
        prediction=prediction(plain),
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert text == plain
    assert usage.completion_tokens_details.accepted_prediction_tokens > 10


def test_tools_become_templates_by_the_chat_template(server: Server) -> None:
    ask(server, max_tokens=2, tools=TOOLS, tool_choice="none")
    before = server.metrics()["vllm:spec_decode_num_draft_tokens_total"]
    # The model is made to begin a call: the template knows how it goes on.
    server.client.completions.create(
        model=MODEL,
        prompt='Calls: {"name": "get_',
        max_tokens=8,
        temperature=0.0,
        extra_body={**APART, "tools": TOOLS},
    )
    assert server.metrics()["vllm:spec_decode_num_draft_tokens_total"] > before


def test_the_example_of_a_client(server: Server) -> None:
    example = Path(__file__).parents[2] / "examples" / "python" / "openai_client.py"
    done = subprocess.run(
        [sys.executable, str(example)],
        env={**os.environ, "VLLM_URL": f"{server.url}/v1", "OPENAI_API_KEY": KEY},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"[1-9]\d* tokens of the prediction accepted", done.stdout), done.stdout


def test_errors_of_the_server_and_of_the_proxy(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="must be") as raised:
        ask(server, extra_body={"prediction": "text"})
    assert raised.value.param == "prediction"
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(
            model="other", messages=MESSAGES, prediction=prediction("x")
        )
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model=MODEL, messages=MESSAGES, prediction=prediction("x"))
    assert stranger.api_key != KEY


def test_abandoned_requests_end_at_the_engine(server: Server, plain: str) -> None:
    for _ in range(3):
        stream = ask(server, max_tokens=400, stream=True, prediction=prediction(plain))
        next(iter(stream))
        stream.close()
    for _ in range(120):
        metrics = server.metrics()
        held = {name: metrics[name] for name in ("vllm:num_requests_running", "fastdraft_requests")}
        if not any(held.values()):
            break
        time.sleep(0.5)
    assert not any(held.values())
    assert ask(server).choices[0].message.content == plain
