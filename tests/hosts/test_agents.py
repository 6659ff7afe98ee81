"""What gateways, agents and evaluations write is read as the calls that a server was asked.

Their own packages write the logs, while they talk to a server that keeps its own count.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from exported import TOOL, calls_in, calls_of
from fake_models import FakeModels, fake_models

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
}
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture
def models() -> Iterator[FakeModels]:
    with fake_models() as models:
        yield models


def key(call: Any) -> str:
    return json.dumps(call, sort_keys=True)


def check(path: Path, models: FakeModels) -> Any:
    """Holds that a log has the calls that the server was asked, and returns its reader."""
    found, reader = calls_in(path)
    assert models.calls
    assert sorted(found, key=key) == sorted(calls_of(models, thinks=True), key=key)
    return reader


def test_litellms_callbacks_and_spend_logs(models: FakeModels, tmp_path: Path) -> None:
    """Its proxy is asked, whole and streamed; spend logs hold texts only where that is set."""
    import litellm
    from litellm.integrations.custom_logger import CustomLogger
    from litellm.proxy import proxy_server
    from litellm.proxy.spend_tracking.spend_tracking_utils import get_logging_payload

    lines: dict[str, list[str]] = {"callbacks": [], "stored": [], "not stored": []}

    class Log(CustomLogger):  # type: ignore[misc]  # untyped
        async def async_log_success_event(
            self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
        ) -> None:
            event = kwargs, response_obj, start_time, end_time
            made = {"callbacks": kwargs["standard_logging_object"]}
            for name in ("stored", "not stored"):
                setting = {"store_prompts_in_spend_logs": name == "stored"}
                proxy_server.general_settings.update(setting)
                made[name] = get_logging_payload(*event)
            for name, each in made.items():
                lines[name].append(json.dumps(each, default=str))

    parameters = {"model": "openai/qwen", "api_base": f"{models.url}/v1", "api_key": "none"}
    config = tmp_path / "config.yaml"
    content = {"model_list": [{"model_name": "qwen", "litellm_params": parameters}]}
    config.write_text(json.dumps(content))

    async def ask() -> None:
        await proxy_server.initialize(config=str(config))
        litellm.callbacks = [*litellm.callbacks, Log()]
        transport = httpx.ASGITransport(proxy_server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for number, stream in enumerate((False, True, False)):
                body = {"model": "qwen", "stream": stream, "tools": [TOOL]}
                body["messages"] = [{"role": "user", "content": f"Look {number}."}]
                response = await client.post("/v1/chat/completions", json=body, timeout=60)
                assert response.status_code == 200, response.text
        for _ in range(600):  # it logs after it answered
            if len(lines["not stored"]) == len(models.calls):
                break
            await asyncio.sleep(0.05)

    asyncio.run(ask())
    for name, written in lines.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in written))
        if name != "not stored":
            assert not check(path, models).left_out
            continue
        found, reader = calls_in(path)
        (reason,) = reader.left_out.values()
        assert not found and reason[0] == 3 and "prompt not stored" in reason[1]


def test_mini_swe_agents_trajectories(models: FakeModels, tmp_path: Path) -> None:
    """An answer without a tool call is one that it refuses, and leaves out of later requests."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    options = {"api_base": f"{models.url}/v1", "api_key": "none"}
    agent = DefaultAgent(
        LitellmModel(model_name="openai/qwen", model_kwargs=options),
        LocalEnvironment(cwd=str(tmp_path)),
        system_template="Be brief.",
        instance_template="Do {{task}}.",
        step_limit=5,
        max_consecutive_format_errors=0,
        output_path=tmp_path / "it.traj.json",
    )
    agent.run("it")
    assert len(models.calls) == 5
    assert not check(tmp_path / "it.traj.json", models).left_out


def test_inspects_logs(models: FakeModels, tmp_path: Path) -> None:
    """As JSON and as its archive. Long texts stand elsewhere in the file, and messages once."""
    from inspect_ai import Task, eval  # noqa: A004 - its name there
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.solver import generate, system_message, use_tools
    from inspect_ai.tool import Tool, tool

    @tool
    def bash() -> Tool:
        async def execute(command: str) -> str:
            """Runs a command.

            Args:
                command: What to run.
            """
            return f"{command}: a long result, " * 40

        return execute

    model = get_model("openai-api/fake/qwen", base_url=f"{models.url}/v1", api_key="none")
    for form in ("json", "eval"):
        samples = [Sample(input=f"Look {number}.", target="x") for number in range(3)]
        steps = [system_message("Be brief."), use_tools(bash()), generate()]
        eval(
            Task(dataset=samples, solver=steps),
            model=model,
            log_format=form,
            log_dir=str(tmp_path),
            display="none",
        )
    assert len(models.calls) == 12
    reader = check(tmp_path, models)
    assert reader.models == {"qwen": 12} and not reader.left_out


def test_lm_evals_samples(
    models: FakeModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each filter of an answer: the answer counts once."""
    from lm_eval import tasks
    from lm_eval.__main__ import cli_evaluate

    # Reading the thousands of tasks that it brings takes longer than all else here.
    own_alone = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", own_alone)

    questions = [{"q": f"What is {number}?", "a": "x"} for number in range(3)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    same = [{"function": "take_first"}]
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "q.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "Question: {{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["ZZ"]},
        "metric_list": [{"metric": "exact_match"}],
        "filter_list": [{"name": name, "filter": same} for name in ("strict", "loose")],
    }
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    out, url = tmp_path / "out", f"{models.url}/v1/chat/completions"
    arguments = ["--model", "local-chat-completions", "--model_args", f"model=qwen,base_url={url}"]
    arguments += ["--tasks", str(tmp_path / "task.yaml"), "--output_path", str(out)]
    arguments += ["--log_samples", "--apply_chat_template"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", *arguments])
    cli_evaluate()
    assert len(models.calls) == 3
    assert check(out, models).duplicates == 3
