"""`transformers serve` with drafts: its own command, with the front mounted in it.

Needs what `transformers[serving]` brings, and the `openai` client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import socket
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, OpenAI
from transformers.cli import transformers

from fastdraft import hf
from fastdraft.serving import transformers_serve
from fastdraft.serving.http.record import RECORD_VARIABLE
from hf_models import Generous, tiny_model
from tiny_tokenizer import tiny_tokenizer

NEW = 60
MESSAGES = [{"role": "user", "content": "aabbccddaabbccdd" * 2}]
COUNTS = re.compile(r"^DraftStats\((.*)\)$", re.MULTILINE)


@dataclass
class Server:
    """A running server.

    Attributes:
        folder: The model's.
        client: One of its clients.
        log: The file that it prints to.
    """

    folder: Path
    client: OpenAI
    log: Path

    @property
    def options(self) -> dict[str, Any]:
        return {
            "model": str(self.folder),
            "messages": MESSAGES,
            "temperature": 0,
            "max_tokens": NEW,
        }

    def text(self, **options: Any) -> str:
        answer = self.client.chat.completions.create(**{**self.options, **options})
        return str(answer.choices[0].message.content)

    def counts(self) -> list[dict[str, int]]:
        """What the drafts of each request were worth, in the order of their ends."""
        pairs = [re.findall(r"(\w+)=(\d+)", line) for line in COUNTS.findall(self.log.read_text())]
        return [{name: int(value) for name, value in line} for line in pairs]


def _serve(folder: Path, start: Callable[[], None]) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    log = folder / "log"
    options = [str(folder), "--device", "cpu", "--port", str(port)]
    # Forked, since importing what it runs takes longer than all that is asked of it.
    process = multiprocessing.get_context("fork").Process(target=_run, args=(start, options, log))
    process.start()
    url = f"http://localhost:{port}"
    try:
        _wait(process, f"{url}/health", log)
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1) as client:
            yield Server(folder, client, log)
    finally:
        process.terminate()
        process.join(30)


def _run(start: Callable[[], None], options: list[str], log: Path) -> None:
    """In the server's process."""
    os.environ[RECORD_VARIABLE] = str(log.with_name("record.jsonl"))
    warnings.simplefilter("default")
    sys.argv[1:] = options
    with log.open("w", buffering=1) as sys.stdout, contextlib.redirect_stderr(sys.stdout):
        start()


def _wait(process: BaseProcess, url: str, log: Path) -> None:
    for _ in range(600):
        assert process.is_alive(), log.read_text()
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"no server after two minutes: {log.read_text()}")


def _serve_plainly() -> None:
    sys.argv.insert(1, "serve")
    transformers.main()


def _serve_with_drafts() -> None:
    """No clock rules what is drafted, and the counts are printed."""
    generate = hf.generate

    def generate_and_print(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        print(output.stats)
        return output

    transformers_serve.Engine = Generous
    hf.generate = generate_and_print
    transformers_serve.main()


def _saved(folder: Path) -> Path:
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(_saved(tmp_path_factory.mktemp("plain")), _serve_plainly)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(_saved(tmp_path_factory.mktemp("drafting")), _serve_with_drafts)


def test_same_answers(plain: Server, drafting: Server) -> None:
    expected = plain.text()
    assert [drafting.text() for _ in range(2)] == [expected] * 2
    first, second = drafting.counts()[-2:]
    assert first["emitted"] == second["emitted"] == NEW
    # The first answer is remembered.
    assert second["steps"] < first["steps"] / 2


def test_stop_strings(plain: Server, drafting: Server) -> None:
    stop = [plain.text()[30:34], "zz"]
    expected = plain.text(stop=stop)
    assert len(expected) < len(plain.text())
    assert drafting.text(stop=stop) == expected


def test_streams(plain: Server, drafting: Server) -> None:
    chunks = drafting.client.chat.completions.create(**drafting.options, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(list(filter(None, parts))) > NEW / 2
    assert "".join(parts) == plain.text()


def test_completions_and_responses(plain: Server, drafting: Server) -> None:
    def answers(server: Server) -> list[str]:
        options = {"model": str(server.folder), "temperature": 0}
        completion = server.client.completions.create(**options, prompt="aabb" * 6, max_tokens=NEW)
        response = server.client.responses.create(
            **options, input="aabb" * 6, max_output_tokens=NEW, stream=False
        )
        return [completion.choices[0].text, response.output_text]

    assert answers(drafting) == answers(plain)


@pytest.mark.parametrize("stream", [False, True])
def test_predictions_are_counted(plain: Server, drafting: Server, stream: bool) -> None:
    messages = [{"role": "user", "content": "hghghihiggij" * 2}]
    expected = plain.text(messages=messages)
    options = {
        **drafting.options,
        "messages": messages,
        "prediction": {"type": "content", "content": expected},
        "extra_body": {"custom_params": {"fastdraft_remember": False}},
    }
    if stream:
        chunks = list(drafting.client.chat.completions.create(**options, stream=True))
        actual = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        usage = chunks[-1].usage
    else:
        answer = drafting.client.chat.completions.create(**options)
        actual, usage = answer.choices[0].message.content, answer.usage
    assert actual == expected
    counts = usage.completion_tokens_details
    drafts = drafting.counts()[-1]
    assert counts.accepted_prediction_tokens == drafts["accepted_prediction_tokens"] > NEW / 4
    assert counts.rejected_prediction_tokens == drafts["rejected_prediction_tokens"]
    assert drafts["steps"] < NEW / 2


def test_predictions_at_the_other_endpoints(drafting: Server) -> None:
    options = {"model": str(drafting.folder), "temperature": 0}
    body = {"prediction": {"type": "content", "content": "aabb" * 9}}
    completion = drafting.client.completions.create(
        **options, prompt="aabb" * 6, max_tokens=NEW, extra_body=body
    )
    assert completion.usage.completion_tokens_details.accepted_prediction_tokens is not None
    response = drafting.client.responses.create(
        **options, input="aabb" * 6, max_output_tokens=NEW, stream=False, extra_body=body
    )
    assert response.usage.model_dump()["output_tokens_details"]["accepted_prediction_tokens"] >= 0
    with pytest.raises(BadRequestError, match="prediction must be an object"):
        drafting.text(prediction="text")


def test_requests_are_recorded_but_for_those_that_opted_out(drafting: Server) -> None:
    record = drafting.folder / "record.jsonl"
    for mark, params in (("kept", {}), ("apart", {"fastdraft": "off"}), ("last", {})):
        drafting.text(user=mark, extra_body={"custom_params": params})
    found: list[Any] = []
    while "last" not in found:
        lines = record.read_text().splitlines()
        found = [json.loads(line)["request"].get("user") for line in lines]
    assert "kept" in found and "apart" not in found
    assert record.stat().st_mode & 0o777 == 0o600


def test_concurrent_requests_and_clients_that_go_away(plain: Server, drafting: Server) -> None:
    expected = plain.text()

    async def ask(client: AsyncOpenAI, place: int) -> str | None:
        if place % 3:
            answer = await client.chat.completions.create(**drafting.options)
            return answer.choices[0].message.content
        chunks = await client.chat.completions.create(
            **{**drafting.options, "max_tokens": 150}, stream=True
        )
        async for _ in chunks:
            break
        await chunks.close()
        return None

    async def ask_all() -> list[str | None]:
        async with AsyncOpenAI(
            base_url=drafting.client.base_url, api_key="none", max_retries=1
        ) as client:
            return await asyncio.gather(*(ask(client, place) for place in range(9)))

    answers = asyncio.run(ask_all())
    assert [answer for answer in answers if answer is not None] == [expected] * 6
    assert drafting.text() == expected


def test_what_cannot_be_drafted_is_an_error_of_its_request(plain: Server, drafting: Server) -> None:
    beams = json.dumps({"num_beams": 2, "max_new_tokens": NEW})
    with pytest.raises(InternalServerError):
        drafting.text(extra_body={"generation_config": beams})
    assert drafting.text() == plain.text()
    assert "got beam_search" in drafting.log.read_text()
