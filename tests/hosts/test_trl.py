"""TRL's own trainers, with drafts: on one rank, and on two that share what they sample."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from fastdraft import Engine, hf, step_latency
from fastdraft.errors import InvalidValueError
from fastdraft.hf.step import CachedModel
from fastdraft.hf.trl import attach
from step_clock import StepClock

PROMPTS = ["the first of many", "a house by the water", "when it began to rain", "many years ago"]
GROUP, NEW, EPOCHS = 4, 32, 3
FORK = multiprocessing.get_context("fork")


def _trainer(folder: Path, out: Path, sampled: list[list[int]], **options: Any) -> GRPOTrainer:
    """A trainer whose batch on each rank is a group, so that an epoch has a step for each prompt,
    or half of that on two ranks."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled.extend(completion_ids)
        return [len(set(each)) / len(each) for each in completion_ids]

    config = GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        max_completion_length=NEW,
        temperature=0.2,
        num_train_epochs=EPOCHS,
        learning_rate=1e-6,
        bf16=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": each} for each in PROMPTS]),
    )


def _train(folder: Path, out: Path, rank: int, ranks: int, port: int) -> None:
    """Trains in a process of its own, and writes what came of it."""
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    clock = StepClock()
    step_latency.clock = clock
    CachedModel.forward = clock.timing_forwards(CachedModel.forward)
    sampled: list[list[int]] = []
    trainer = _trainer(folder, out / str(rank), sampled)
    store = attach(trainer)
    trainer.train()
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    engine = model.generate.keywords["custom_generate"].drafter
    result = {
        "log": trainer.state.log_history,
        "sampled": sum(map(len, sampled)),
        "prompts": len(sampled) * max(len(tokenizer(each).input_ids) for each in PROMPTS),
        "remembered": len(store),
        "running": engine.num_requests,
        "difference": _difference(model, tokenizer, engine),
    }
    (out / f"{rank}.json").write_text(json.dumps(result))


def _difference(model: Any, tokenizer: Any, engine: Engine) -> float:
    """By how much log-probabilities that are sampled with are off those of a forward."""
    del model.generate
    inputs = tokenizer(PROMPTS[:1] * GROUP, return_tensors="pt")
    output = hf.generate(
        model.eval(), **inputs, drafter=engine, do_sample=True, max_new_tokens=NEW, logprobs=True
    )
    columns = inputs["input_ids"].shape[1]
    with torch.no_grad():
        logits = model(output.sequences).logits[:, columns - 1 : -1]
    expected = logits.log_softmax(-1).gather(2, output.sequences[:, columns:, None])[..., 0]
    return max(
        float((own - line[: len(own)]).abs().max())
        for own, line in zip(output.raw_logprobs, expected, strict=True)
    )


@pytest.fixture(scope="module")
def trained(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """What came of training on so many ranks."""

    def run(ranks: int) -> list[Any]:
        out = tmp_path_factory.mktemp("trained")
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        processes = [
            FORK.Process(target=_train, args=(words, out, rank, ranks, port))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]

    return run


def test_rollouts_are_drafted_from_earlier_epochs(trained: Callable[[int], list[Any]]) -> None:
    [result] = trained(1)
    log = [each for each in result["log"] if "loss" in each]
    assert len(log) == EPOCHS * len(PROMPTS)
    assert all(each["fastdraft/tokens_per_step"] > 1 for each in log)
    drafted = [each["fastdraft/datastore_per_step"] for each in log]
    assert drafted[0] == 0
    assert min(drafted[len(PROMPTS) :]) > 0
    assert result["running"] == 0
    assert result["difference"] < 1e-4


def test_ranks_share_what_they_sample(trained: Callable[[int], list[Any]]) -> None:
    results = trained(2)
    for result in results:
        # More than all that the rank can have remembered of its own.
        assert result["remembered"] > result["sampled"] + result["prompts"]
        assert result["difference"] < 1e-4
    log = [each for each in results[0]["log"] if "loss" in each]
    assert len(log) == EPOCHS * len(PROMPTS) // 2
    assert min(each["fastdraft/datastore_per_step"] for each in log[2:]) > 0


def test_what_is_not_drafted_for_is_refused(words: Path, tmp_path: Path) -> None:
    trainer = _trainer(words, tmp_path, [])
    model = trainer.model
    state = trainer.accelerator.state
    for changes, message in [
        ({"use_vllm": True}, "use_vllm must be off"),
        ({"use_transformers_continuous_batching": True}, "continuous_batching must be off"),
        ({"rollout_func": print}, "rollout_func must be None"),
        ({"is_fsdp_enabled": True}, "parameters must be whole on each rank"),
    ]:
        before = {name: getattr(trainer, name) for name in changes}
        vars(trainer).update(changes)
        with pytest.raises(InvalidValueError, match=message):
            attach(trainer)
        vars(trainer).update(before)
        assert "generate" not in vars(model)
    assert getattr(state, "deepspeed_plugin", None) is None
    with pytest.raises(InvalidValueError, match="must be a GRPOTrainer or an RLOOTrainer"):
        attach(SimpleNamespace(model=model))
    attach(trainer)
    with pytest.raises(InvalidValueError, match="attach once"):
        attach(trainer)


def test_a_custom_generate_in_generation_kwargs_is_refused(words: Path, tmp_path: Path) -> None:
    trainer = _trainer(words, tmp_path, [], generation_kwargs={"custom_generate": hf.speculate()})
    with pytest.raises(InvalidValueError, match="custom_generate must be an argument"):
        trainer.train()
