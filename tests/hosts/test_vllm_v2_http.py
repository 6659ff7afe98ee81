"""Predicted outputs over HTTP with the V2 model runner: OpenAI's client, a real vLLM server.

FASTDRAFT_DEMO_MODEL names the folder of the demo model, whose tokenizer a tiny model has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdraft.replay.importers import Importer
from fastdraft.replay.records import parse_lines
from fastdraft.replay.tokenizer import TextTokenizer
from forks import Forks
from vllm_forks import v2_variables
from vllm_server import MODEL, Server, serving

APART = {"vllm_xargs": {"fastdraft_remember": 0}}


@pytest.fixture(scope="module")
def server(
    words: Path, vllm_v2_forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("v2")
    with serving(
        vllm_v2_forks,
        words,
        folder,
        {"num_speculative_tokens": 6},
        spawn=True,
        variables=v2_variables(),
        log_texts=True,
    ) as server:
        yield server


def ask(server: Server, **options: Any) -> Any:
    return server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write a few sentences about a cat."}],
        temperature=0.0,
        max_tokens=32,
        **{"extra_body": APART, **options},
    )


def test_a_prediction_is_accepted_and_counted(server: Server) -> None:
    plain = ask(server)
    text = plain.choices[0].message.content
    # The drafter's thread shares the processor with the interpreted kernels, and may come too late
    # for most steps of an answer.
    accepted: list[int] = []
    while len(accepted) < 20 and sum(accepted) < 16:
        again = ask(server, prediction={"type": "content", "content": text})
        assert again.choices[0].message.content == text
        accepted.append(again.usage.completion_tokens_details.accepted_prediction_tokens)
    assert sum(accepted) >= 16, accepted
    said = re.findall("fastdraft [0-9.]+ drafts: .*", server.log.read_text())
    assert [re.sub("fastdraft [0-9.]+ ", "", line) for line in said] == [
        "drafts: Model Runner V2, asynchronous scheduling off, drafts of up to 6 tokens, memory: "
        "1024 MiB"
    ]
    metrics = server.metrics()
    assert metrics["fastdraft_accepted_prediction_tokens_total"] >= 16
    assert metrics["fastdraft_faults_total"] == 0
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] >= 16


def test_the_log_is_one_that_replay_reads(server: Server, words: Path) -> None:
    before = len([*parse_lines(server.log)])
    whole = ask(server, extra_body={**APART, "return_token_ids": True})
    answer = whole.choices[0]
    deltas = [each.choices[0].delta.content or "" for each in ask(server, stream=True)]
    assert "".join(deltas) == answer.message.content
    tokenizer = TextTokenizer(words)
    read = Importer(tokenizer)
    lines = [*parse_lines(server.log)][before:]
    found, streamed = (record for line in lines for record in read(line))
    assert found["prompt_ids"] == whole.prompt_token_ids
    assert found["output_ids"] == answer.token_ids
    # Of a streamed answer the server logs all the text, and not all the ids.
    assert tokenizer.encode([streamed["prompt"]]) == [whole.prompt_token_ids]
    assert streamed["output"] == answer.message.content
    assert read.unanswered == 0
