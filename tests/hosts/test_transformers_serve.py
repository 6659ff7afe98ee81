"""`transformers serve`, as it comes, over a model's folder with the file of the page.

Needs what `transformers[serving]` brings, and the `openai` client.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI, InternalServerError, OpenAI
from transformers import PreTrainedTokenizerFast

from hf_models import tiny_model
from pages import code
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


def _serve(folder: Path, *options: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    log = folder / "log"
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]
    command += ["serve", str(folder), "--device", "cpu", "--port", str(port), *options]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    url = f"http://localhost:{port}"
    try:
        _wait(process, f"{url}/health", log)
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1) as client:
            yield Server(folder, client, log)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"no server after two minutes: {log.read_text()}")


def _save_with_the_file(folder: Path) -> None:
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    file = code("guides/transformers.md", "def generate(")
    # No clock rules what is drafted, and the counts are printed.
    told = file.replace("Engine(", "Generous(").replace(
        "    return", "    print(output.stats)\n    return"
    )
    (folder / "custom_generate" / "generate.py").write_text(
        "from hf_models import Generous\n\n" + told
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without trust the file is not run."""
    folder = tmp_path_factory.mktemp("plain")
    _save_with_the_file(folder)
    yield from _serve(folder)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("drafting")
    _save_with_the_file(folder)
    yield from _serve(folder, "--trust-remote-code")


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


def test_predictions(plain: Server, drafting: Server) -> None:
    messages = [{"role": "user", "content": "hghghihiggij" * 2}]
    expected = plain.text(messages=messages)
    config = {"max_new_tokens": NEW, "do_sample": False, "prediction": expected}
    actual = drafting.text(messages=messages, extra_body={"generation_config": json.dumps(config)})
    assert actual == expected
    counts = drafting.counts()[-1]
    assert counts["accepted_prediction_tokens"] > NEW / 4
    assert counts["steps"] < NEW / 2


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


def test_without_trust_the_folder_decodes_plainly(plain: Server) -> None:
    model = tiny_model("llama")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(plain.folder)
    inputs = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    new = output[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(new, skip_special_tokens=True) == plain.text()
    assert not plain.counts()
