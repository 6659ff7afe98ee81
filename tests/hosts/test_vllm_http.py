"""Predicted outputs over HTTP: OpenAI's own client before a real vLLM server on the CPU.

FASTDRAFT_DEMO_MODEL names the folder of the demo model, whose tokenizer a tiny model has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fastdraft.replay.calls import Reader
from fastdraft.replay.lines import parse_lines
from fastdraft.replay.tokenizer import TextTokenizer
from forks import Forks
from vllm_forks import v2_variables
from vllm_server import KEY, MODEL, Server, serving

# What is drafted comes from the prediction and the request itself, not from those before it.
APART = {"vllm_xargs": {"fastdraft_remember": 0}}
TOPICS = [
    "a cat",
    "two ships",
    "the moon",
    "an old clock",
    "rain",
    "a red bicycle",
    "bread",
    "owls",
]


@pytest.fixture(scope="module")
def server(
    words: Path, vllm_forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    # A fixed cost, since a model of this size on a CPU hardly gains: measured, it drafts little.
    folder, settings = tmp_path_factory.mktemp("drafting"), {"token_cost": 0.01}
    with serving(vllm_forks, words, folder, settings, log_texts=True) as server:
        yield server


def messages(topic: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Write a few sentences about {topic}."}]


def say(server: Server, topic: str = TOPICS[0], **options):
    options = {"max_tokens": 48, "temperature": 0.0, "extra_body": APART, **options}
    return server.client.chat.completions.create(model=MODEL, messages=messages(topic), **options)


def ask(server: Server, topic: str = TOPICS[0], **options):
    """The same, with what tells near ties."""
    return say(server, topic, logprobs=True, top_logprobs=2, **options)


def predicting(text: str) -> dict[str, object]:
    return {"type": "content", "content": text}


def edited(text: str) -> str:
    """The text with every tenth word replaced."""
    words = text.split(" ")
    words[9::10] = ["entirely"] * len(words[9::10])
    return " ".join(words)


def assert_same(expected, got) -> None:
    """Equal token for token, or up to where the two best tokens tie to within rounding."""
    for wanted, other in zip(expected.logprobs.content, got.logprobs.content, strict=True):
        if wanted.token != other.token:
            best, second = wanted.top_logprobs
            assert best.logprob - second.logprob < 1e-3, (wanted, other)
            assert {best.token, second.token} == {wanted.token, other.token}
            return
    assert expected.message.content == got.message.content


def details(usage) -> tuple[int, int]:
    counts = usage.completion_tokens_details
    return counts.accepted_prediction_tokens, counts.rejected_prediction_tokens


@pytest.fixture(scope="module")
def plain(server: Server) -> dict[str, object]:
    """Answers to requests without a prediction; those of some topics one after the other."""

    def answer(topic: str):
        return ask(server, topic).choices[0]

    with ThreadPoolExecutor(len(TOPICS)) as pool:
        answers = [*map(answer, TOPICS[:3]), *pool.map(answer, TOPICS[3:])]
    return dict(zip(TOPICS, answers, strict=True))


def test_prediction_is_accepted_and_reported(server: Server, plain) -> None:
    before = server.metrics()
    expected = plain[TOPICS[0]]
    answer = ask(server, prediction=predicting(edited(expected.message.content)))
    assert_same(expected, answer.choices[0])
    accepted, rejected = details(answer.usage)
    assert 10 < accepted <= answer.usage.completion_tokens
    assert rejected > 0
    after = server.metrics()
    for name, count in (("accepted", accepted), ("rejected", rejected)):
        metric = f"fastdraft_{name}_prediction_tokens_total"
        assert after[metric] - before.get(metric, 0.0) >= count
    assert after["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert after["fastdraft_steps_total"] > 0
    assert after["fastdraft_seconds_total"] > 0
    assert after["fastdraft_faults_total"] == 0


def what_drafts(server: Server) -> list[str]:
    """What the server's log says of it."""
    return re.findall("fastdraft [0-9.]+ drafts: (.*)", server.log.read_text())


def test_one_line_says_what_drafts(server: Server) -> None:
    said = "Model Runner V1, drafts of up to 8 tokens, memory: 1024 MiB"
    assert what_drafts(server) == [said]


def test_predictions_with_the_other_model_runner(
    words: Path, vllm_v2_forks: Forks, tmp_path: Path
) -> None:
    """Its engine has a process that starts anew, as vLLM's do."""
    settings = {"num_speculative_tokens": 6}
    with serving(
        vllm_v2_forks, words, tmp_path, settings, spawn=True, variables=v2_variables()
    ) as server:
        text = say(server, max_tokens=32).choices[0].message.content
        # The drafter's thread shares the processor with the interpreted kernels, and may come too
        # late for most steps of an answer.
        accepted: list[int] = []
        while len(accepted) < 20 and sum(accepted) < 16:
            again = say(server, max_tokens=32, prediction=predicting(text))
            assert again.choices[0].message.content == text
            accepted.append(details(again.usage)[0])
        assert sum(accepted) >= 16, accepted
        metrics = server.metrics()
        [said] = what_drafts(server)
        begins = "Model Runner V2, asynchronous scheduling off, drafts of up to 6 tokens, of one "
        assert said.startswith(begins + "length for all rows (Adaptive verification requires full")
        assert said.endswith("memory: 1024 MiB")
    assert metrics["fastdraft_accepted_prediction_tokens_total"] >= 16
    assert metrics["fastdraft_faults_total"] == 0
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] >= 16


def test_behind_the_frontend_in_rust_requests_are_drafted(
    words: Path, vllm_forks: Forks, tmp_path: Path
) -> None:
    """It runs no Python: no hook refuses a wrong option there, which costs drafts."""
    program = os.environ.get("FASTDRAFT_VLLM_RUST")
    if program is None:
        pytest.skip("FASTDRAFT_VLLM_RUST names no frontend")
    with serving(
        vllm_forks,
        words,
        tmp_path,
        {"token_cost": 0.01},
        frontend=Path(program).resolve(),
    ) as server:
        wrong = {"vllm_xargs": {"predictions": "misspelt"}}
        first, again, other = (say(server, extra_body=each) for each in ({}, {}, wrong))
        said = {each.choices[0].message.content for each in (first, again, other)}
        assert len(said) == 1
        assert "a request goes on without drafts" in server.log.read_text()


def test_the_log_is_one_that_replay_reads(server: Server, words: Path) -> None:
    before = len([*parse_lines(server.log)])
    whole = say(server, extra_body={**APART, "return_token_ids": True})
    answer = whole.choices[0]
    deltas = [each.choices[0].delta.content or "" for each in say(server, stream=True)]
    assert "".join(deltas) == answer.message.content
    tokenizer = TextTokenizer(words)
    read = Reader(tokenizer)
    lines = [*parse_lines(server.log)][before:]
    while b" details: prompt: " not in lines[0].text:
        del lines[0]  # what vLLM says of itself, before the form of a log is known
    found, streamed = (record for line in lines for record in read(line))
    assert found["prompt_ids"] == whole.prompt_token_ids
    assert found["output_ids"] == answer.token_ids
    # Of a streamed answer the server logs all the text, and not all the ids.
    assert tokenizer.encode([streamed["prompt"]]) == [whole.prompt_token_ids]
    assert streamed["output"] == answer.message.content
    assert not any("no answer" in each for each in read.summary())


WRONG = {
    "prediction_token_ids": "abc",
    "predictions": "misspelt",
    "fastdraft_namespaces": "misspelt",
    "fastdraft_cache_salt": "another tenant's",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_an_error_400(server: Server, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=name) as raised:
        ask(server, extra_body={"vllm_xargs": {name: WRONG[name]}})
    assert raised.value.status_code == 400
    metrics = server.metrics()
    assert metrics["fastdraft_faults_total"] == metrics["fastdraft_refused_requests_total"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [*WRONG.items(), ("prediction_token_ids", [10**6]), ("fastdraft_remember", "false")],
)
def test_wrong_options_that_no_front_reads_are_an_error_400(
    server: Server, name: str, value: object
) -> None:
    """At an endpoint for tokens the engine's own check answers."""
    body = {
        "model": MODEL,
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 2, "extra_args": {name: value}},
    }
    answer = httpx.post(
        f"{server.url}/inference/v1/generate",
        content=json.dumps(body),
        headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
        timeout=120,
    )
    assert answer.status_code == 400, (answer.status_code, answer.text)
    assert name in answer.json()["error"]["message"]


def test_requests_without_a_prediction_report_none(server: Server) -> None:
    usage = ask(server, max_tokens=4).usage
    assert usage.completion_tokens_details is None


@pytest.mark.parametrize("continuous", [False, True])
def test_streams_report_in_their_last_usage(server: Server, plain, continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    text, usages = "", []
    for chunk in server.client.chat.completions.create(
        model=MODEL,
        messages=messages(TOPICS[0]),
        max_tokens=48,
        temperature=0.0,
        stream=True,
        stream_options=options,
        prediction=predicting(edited(plain[TOPICS[0]].message.content)),
        extra_body=APART,
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        if chunk.usage is not None:
            usages.append(chunk.usage)
    assert text == plain[TOPICS[0]].message.content
    accepted, rejected = details(usages[-1])
    assert 10 < accepted <= usages[-1].completion_tokens
    assert rejected > 0
    assert (len(usages) > 1) == continuous


def test_json_of_a_schema_is_drafted_before_it_was_written(server: Server) -> None:
    properties = {name: {"type": "boolean"} for name in ("kilometres", "kilograms", "centuries")}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "measures", "schema": {**schema, "additionalProperties": False}},
    }

    def answer(**arguments: object) -> str:
        options = {"vllm_xargs": {**APART["vllm_xargs"], **arguments}}
        found = ask(server, extra_body=options, response_format=form)
        assert found.choices[0].finish_reason in ("stop", "length")
        return found.choices[0].message.content

    expected = answer(fastdraft="off")
    assert '"kil' in expected
    before = server.metrics()["vllm:spec_decode_num_accepted_tokens_total"]
    assert answer(fastdraft_template_ids=[0]) == expected  # a template of no use
    without = server.metrics()["vllm:spec_decode_num_accepted_tokens_total"]
    assert answer() == expected
    after = server.metrics()
    accepted = after["vllm:spec_decode_num_accepted_tokens_total"] - without
    assert accepted > without - before
    # The draft tokens that a grammar cuts are not counted here. No request was aborted yet.
    counted = after["fastdraft_accepted_tokens_total"]
    assert 0 < counted <= after["vllm:spec_decode_num_accepted_tokens_total"]


def test_choices_are_counted_together(server: Server, plain) -> None:
    text = plain[TOPICS[2]].message.content
    # More than one choice is for sampling, and this is hardly random.
    answer = ask(server, TOPICS[2], prediction=predicting(text), n=2, temperature=0.01)
    assert len(answer.choices) == 2
    accepted, rejected = details(answer.usage)
    assert 0 < accepted <= answer.usage.completion_tokens
    assert rejected >= 0


def test_plain_completions(server: Server) -> None:
    prompt = "One, two, three,"

    def complete(*, prompts: int, **extra) -> openai.types.Completion:
        return server.client.completions.create(
            model=MODEL,
            prompt=[prompt] * prompts,
            max_tokens=32,
            temperature=0.0,
            extra_body={**APART, **extra},
        )

    text = complete(prompts=1).choices[0].text
    one = complete(prompts=1, prediction=predicting(text))
    two = complete(prompts=2, prediction=predicting(text))
    assert [choice.text for choice in [*one.choices, *two.choices]] == [text] * 3
    assert details(one.usage)[0] > 5
    assert details(two.usage)[0] > details(one.usage)[0]


def said_at(path: str, answer: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The texts and the usage of a whole answer of an endpoint."""
    if path == "/v1/responses":
        [message] = [part for part in answer["output"] if part["type"] == "message"]
        return [part["text"] for part in message["content"]], answer["usage"]
    if path == "/v1/messages":
        return [part["text"] for part in answer["content"]], answer["usage"]
    return [choice["message"]["content"] for choice in answer["choices"]], answer["usage"]


def streamed_at(path: str, events: list[dict[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """The same of a streamed answer."""
    if path == "/v1/responses":
        return said_at(path, events[-1]["response"])
    if path == "/v1/messages":
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        usages = [event["usage"] for event in events if event["type"] == "message_delta"]
        return ["".join(delta["text"] for delta in deltas)], usages[-1]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return ["".join(delta.get("content") or "" for delta in deltas)], events[-1]["usage"]


@pytest.mark.parametrize(
    ("path", "streams"),
    [
        ("/v1/responses", False),
        ("/v1/responses", True),
        ("/v1/messages", False),
        ("/v1/messages", True),
        ("/invocations", False),
        ("/invocations", True),
        ("/v1/chat/completions/batch", False),
    ],
)
def test_every_endpoint_takes_predictions_and_counts(
    server: Server, plain, path: str, streams: bool
) -> None:
    expected = plain[TOPICS[0]].message.content
    conversation = messages(TOPICS[0])
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {
        "model": MODEL,
        "temperature": 0.0,
        limit: 48,
        "prediction": predicting(edited(expected)),
        "input" if path == "/v1/responses" else "messages": conversation,
        **APART,
    }
    copies = 1
    if path.endswith("/batch"):
        copies, body["messages"] = 2, [conversation, conversation]
    if streams:
        body |= {"stream": True}
        if path == "/invocations":
            body["stream_options"] = {"include_usage": True}
    answer = httpx.post(
        f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    if streams:
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n")]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        texts, usage = streamed_at(path, events)
    else:
        texts, usage = said_at(path, answer.json())
    assert texts == [expected] * copies
    total = "completion_tokens" if "completion_tokens" in usage else "output_tokens"
    counts = usage[f"{total}_details"]
    assert 10 * copies < counts["accepted_prediction_tokens"] <= usage[total]
    assert counts["rejected_prediction_tokens"] > 0


def test_errors_of_the_server_itself_stand(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(
            model="other", messages=messages("x"), prediction=predicting("x")
        )
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        ask(server, max_tokens=-1, prediction=predicting("x"))
    with pytest.raises(openai.BadRequestError, match="vllm_xargs"):
        ask(server, extra_body={"vllm_xargs": 5}, prediction=predicting("x"))
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(
            model=MODEL, messages=messages("x"), extra_body={"prediction": 5}
        )


def test_concurrent_requests(server: Server, plain) -> None:
    async def run():
        async with server.async_client as client:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=MODEL,
                        messages=messages(topic),
                        max_tokens=48,
                        temperature=0.0,
                        logprobs=True,
                        top_logprobs=2,
                        prediction=predicting(edited(plain[topic].message.content)),
                        extra_headers={"X-Request-Id": "the same for all"},
                        extra_body=APART,
                    )
                    for topic in TOPICS
                )
            )

    for topic, answer in zip(TOPICS, asyncio.run(run()), strict=True):
        assert_same(plain[topic], answer.choices[0])
        accepted, _ = details(answer.usage)
        assert 5 < accepted <= answer.usage.completion_tokens


def test_abandoned_requests_leave_nothing_behind(server: Server, plain) -> None:
    choose = random.Random(5)
    sizes = [choose.randint(1, 24) for _ in range(150)]
    # At how many events the client goes away; some before the first, most never.
    patience = [choose.choice([0, 1, 3, 8, 1000, 1000, 1000]) for _ in sizes]

    async def one(client: openai.AsyncOpenAI, index: int) -> bool:
        topic = TOPICS[index % len(TOPICS)]
        prediction = {}
        if index % 3:
            prediction = {"prediction": predicting(edited(plain[topic].message.content))}
        request = client.chat.completions.create(
            model=MODEL,
            messages=messages(topic),
            max_tokens=sizes[index],
            temperature=0.0 if index % 2 else 0.8,
            stream=True,
            **prediction,
        )
        if patience[index] == 0:
            # Some are still waiting for their turn then, others are at their prompt.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(request, 0.05 + index / 300)
            return False
        events = 0
        async with await request as stream:
            async for _ in stream:
                events += 1
                if events == patience[index]:
                    return False
        return True

    async def run() -> list[bool]:
        async with server.async_client as client:
            return await asyncio.gather(*(one(client, index) for index in range(len(sizes))))

    finished = asyncio.run(run())
    assert 50 < sum(finished) < len(finished)

    for _ in range(120):
        metrics = server.metrics()
        held = ("vllm:num_requests_running", "vllm:num_requests_waiting", "fastdraft_requests")
        if all(metrics[name] == 0 for name in held):
            break
        time.sleep(0.5)
    assert {name: metrics[name] for name in held} == dict.fromkeys(held, 0.0)
    assert metrics["fastdraft_request_bytes"] == 0
    assert metrics["fastdraft_faults_total"] == 0
    assert_same(plain[TOPICS[0]], ask(server).choices[0])
