"""`fastdraft proxy --record`: what passes is replayed, as text or as token ids without text."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from fastdraft.cli.app import app as commands
from fastdraft.demo import ensure_model
from fastdraft.replay import read_family
from fastdraft.replay.importers import Importer
from fastdraft.replay.tokenizer import TextTokenizer
from http_serving import running

CHAT = "/v1/chat/completions"
SECONDS = 60
SECRET = "the honey is sold at the gate"


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers a chat with its last message, as a document or as events; /v1/completions fails."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    chat = scope["path"] == CHAT
    asked = json.loads(body) if chat else {}
    headers = [(b"content-encoding", b"x")] if asked.get("user") == "packed" else []
    await send({"type": "http.response.start", "status": 200 if chat else 500, "headers": headers})
    text = asked["messages"][-1]["content"] if chat else ""
    if asked.get("stream"):
        for part in (text[:3], text[3:]):
            event = {"id": "c", "choices": [{"index": 0, "delta": {"content": part}}]}
            data = f"data: {json.dumps(event)}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        return
    answer = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def recorded(file: Path, *options: str, requests: list[tuple[str, dict[str, Any]]]) -> None:
    """Runs the command before a server, and sends it requests."""
    with running(echo) as url:
        command = [sys.executable, "-m", "fastdraft.cli", "proxy", "--backend", url, "--port", "0"]
        command += ["--record", str(file), *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            own = next(
                found[1] for line in process.stderr if (found := re.search(r"on (http\S+)", line))
            )
            for path, body in requests:
                httpx.post(own + path, json=body, timeout=SECONDS)
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


def chat(*texts: str, **more: Any) -> tuple[str, dict[str, Any]]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return CHAT, {"messages": messages, **more}


REQUESTS = [
    chat(SECRET),
    chat(SECRET, SECRET, SECRET, stream=True),
    chat("packed", user="packed"),
    ("/v1/completions", {"prompt": "fails"}),
]


def test_what_passes_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text('{"prompt": "before", "output": "said before"}\n')  # what is there stays
    recorded(file, requests=[*REQUESTS, chat("again")])
    texts = TextTokenizer(ensure_model)
    before, first, second, third = read_family(file, texts.encode, convert=Importer(texts))
    assert texts.decode(before.output_ids.tolist()) == "said before"
    assert [texts.decode(each.output_ids.tolist()) for each in (first, second, third)] == [
        SECRET,
        SECRET,
        "again",
    ]
    assert first.session == second.session != third.session
    assert texts.decode(second.prompt_ids.tolist()).count(SECRET) == 3
    result = CliRunner().invoke(commands, ["replay", str(file)])
    assert result.exit_code == 0, result.output


def test_hashed_ids_are_recorded_without_text(tmp_path: Path) -> None:
    file, model = tmp_path / "traffic.jsonl", ensure_model()
    recorded(file, "--record-ids", str(model), requests=REQUESTS)
    assert "honey" not in file.read_text() and "text" not in file.read_text()
    texts = TextTokenizer(model)
    first, second = read_family(file, texts.encode)
    ids = texts.encode([SECRET])[0]
    assert len(first.output_ids) == len(ids)
    assert not set(first.output_ids.tolist()) & set(ids)
    # Equal tokens stay equal, so the same drafts are accepted.
    assert first.output_ids.tolist() == second.output_ids.tolist()
    assert first.session == second.session
    assert second.prompt_ids.tolist()[: len(first.prompt_ids)] == first.prompt_ids.tolist()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--record-ids", "."], "--record-ids needs --record"),
        (["--record", "gone/x"], "gone is not a directory"),
        (["--record", "/dev/null", "--record-ids", "/dev"], "cannot load"),
    ],
)
def test_wrong_options_are_named(options: list[str], reason: str) -> None:
    result = CliRunner().invoke(commands, ["proxy", "--backend", "http://localhost:1", *options])
    assert result.exit_code != 0
    assert reason in result.output
