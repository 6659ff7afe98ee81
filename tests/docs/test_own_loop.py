"""A decoding loop of your own: the page's code runs, and what it promises of the engine holds."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.errors import FastdraftError, MemoryLimitError
from fastdraft.step_latency import StepLatency
from hf_models import EOS, PAD, VOCABULARY, assert_same_tokens, edited, tiny_model
from pages import ROOT, code

PAGE = "guides/your-own-loop.md"
LOOP = (ROOT / "examples" / "serving" / "loop.py").read_text()
SHORTEST, MORE = 20, 3  # new tokens of the first prompt, and how many more each further one gets


def _run(source: str, **names: Any) -> dict[str, Any]:
    exec(compile(source, PAGE, "exec"), names)
    return names


def _loop() -> Any:
    return SimpleNamespace(**_run(LOOP, __name__=__name__))


def _prompts(count: int) -> list[list[int]]:
    """Prompts of unequal length, in which something can be found."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, VOCABULARY, (5 + index,), generator=generator).tolist() * 3
        for index in range(count)
    ]


def _plain(model: Any, prompts: list[list[int]], **options: Any) -> list[torch.Tensor]:
    return [
        model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=SHORTEST + MORE * index,
            eos_token_id=EOS,
            pad_token_id=PAD,
            **options,
        )[0]
        for index, prompt in enumerate(prompts)
    ]


def _requests(loop: Any, prompts: list[list[int]], outputs: list[torch.Tensor]) -> list[Any]:
    """Every second request has a prediction with mistakes."""
    return [
        loop.Request(
            list(prompt),
            end=len(prompt) + SHORTEST + MORE * index,
            prediction=edited(output[len(prompt) :]) if index % 2 else None,
        )
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def _decode(server: Any) -> int:
    steps = 0
    with torch.inference_mode():
        while server.waiting or server.running:
            server.step()
            assert len(server.running) <= server.rows
            steps += 1
    return steps


def _assert_same(model: Any, outputs: list[torch.Tensor], requests: list[Any]) -> None:
    for output, request in zip(outputs, requests, strict=True):
        actual = torch.tensor(request.text)
        assert_same_tokens(
            model, output[None], actual[None], attention_mask=torch.ones_like(output)[None]
        )


def test_the_loop_is_as_short_as_the_page_says() -> None:
    loop = LOOP[LOOP.index("@dataclass") : LOOP.index("if __name__")]
    assert len([line for line in loop.splitlines() if line.strip()]) <= 60


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "opt"])
def test_the_loop_decodes_what_generate_does(family: str) -> None:
    model, loop, prompts = tiny_model(family), _loop(), _prompts(9)
    outputs = _plain(model, prompts)
    memory = Datastore(max_bytes=1 << 24)
    engine = Engine(DraftConfig(token_cost=0.0), datastores=[memory])
    server = loop.Server(model, engine, rows=4, eos=EOS)
    steps = []
    for _ in range(2):
        requests = _requests(loop, prompts, outputs)
        server.waiting.extend(requests)
        steps.append(_decode(server))
        _assert_same(model, outputs, requests)
        assert sum(request.stats.accepted_prediction_tokens for request in requests) > 0
        assert engine.num_requests == engine.num_bytes == 0
    # All of it stands in the datastore the second time.
    assert steps[1] < steps[0] / 2
    texts = sum(
        len(request.text) - len(prompt) for request, prompt in zip(requests, prompts, strict=True)
    )
    assert sum(request.stats.emitted for request in requests) == texts
    assert len(memory) > 0


def test_requests_come_and_go_while_others_run() -> None:
    model, loop, prompts = tiny_model("llama"), _loop(), _prompts(6)
    outputs = _plain(model, prompts)
    memory = Datastore(max_bytes=1 << 24)
    engine = Engine(DraftConfig(token_cost=0.0), datastores=[memory])
    server = loop.Server(model, engine, rows=3, eos=EOS)
    requests = _requests(loop, prompts, outputs)
    early = [len(output) < request.end for output, request in zip(outputs, requests, strict=True)]
    assert any(early) and not all(early)  # by the end-of-text token, or by their length
    aborted = loop.Request(list(prompts[0]), end=200)
    server.waiting.extend([requests[0], aborted, requests[1]])
    with torch.inference_mode():
        for index in range(2, 6):
            server.step()
            server.waiting.append(requests[index])
    assert aborted in server.running
    before = len(memory)
    server.leave(aborted, engine.cancel)
    assert len(memory) == before
    _decode(server)
    _assert_same(model, outputs, requests)
    assert aborted.stats is None
    assert engine.num_requests == engine.num_bytes == 0


def test_a_fault_costs_one_request_its_drafts() -> None:
    engine = Engine(DraftConfig(max_bytes=1 << 19, token_cost=0.0))
    faults: list[FastdraftError] = []
    observe = _run(
        code(PAGE, "def observe("),
        __name__=__name__,
        contextlib=contextlib,
        np=np,
        FastdraftError=FastdraftError,
        warn_once=faults.append,
    )["observe"]
    prompt = [5, 6, 7, 8, 5, 6]
    requests = [SimpleNamespace(id=engine.add_request(prompt), text=list(prompt)) for _ in range(3)]
    requests.append(SimpleNamespace(id=None, text=list(prompt)))

    def step(emitted: list[list[int]]) -> None:
        for request, tokens in zip(requests, emitted, strict=True):
            request.text += tokens
        observe(engine, requests, emitted)

    step([[7], [7], [7], [7]])
    assert not faults
    # More than fits, which is one request's alone; then an id that no text can hold.
    step([[8], np.random.default_rng(0).integers(9, 900, 20_000).tolist(), [8], [8]])
    assert [type(fault) for fault in faults] == [MemoryLimitError]
    assert [request.id is None for request in requests] == [False, True, False, True]
    step([[5], [5], [-1], [5]])
    assert len(faults) == 2
    assert [request.id is None for request in requests] == [False, True, True, True]
    assert engine.num_tokens(requests[0].id) == len(requests[0].text)
    assert engine.propose(requests[0].id).tolist()[:3] == [6, 7, 8]
    assert engine.num_requests == 1


def test_the_measured_cost_of_the_page() -> None:
    """The page's lines decode a text of repeats, on a device that takes a second a token."""
    engine, text = Engine(), [5, 6, 7, 8, 9] * 60
    request = engine.add_request(text[:20])
    said, widths = [20], []

    def decode(ids: list[int], drafts: Any) -> tuple[float, int, int]:
        draft, position = drafts.tolist()[0], said[-1]
        assert draft == text[position : position + len(draft)]
        engine.observe_batch(ids, text[position : position + len(draft) + 1], [0, len(draft) + 1])
        said.append(position + len(draft) + 1)
        widths.append(len(draft) + 1)
        return len(draft) + 1.0, len(draft) + 1, 0

    _run(
        code(PAGE, 'cost = StepLatency("cuda")'),
        StepLatency=StepLatency,
        engine=engine,
        running=lambda: said[-1] < 200,
        rows_of_this_step=lambda: ([request], [199 - said[-1]]),
        decode=decode,
    )
    # Without measuring, by the typical curve, each draft would be as long as it may be.
    assert max(widths) > 1
    assert widths[-1] < max(widths)
